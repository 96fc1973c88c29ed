"""How numbers of things are said, and how what would steer a terminal is written."""

from __future__ import annotations

import re
from typing import Final

# C0 and C1 controls, what turns the direction of writing, invisible separators, and halves of surrogate pairs.
STEERING: Final = (
    "\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
)
_IN_JSON: Final = re.compile(f"(?![\n\t])[{STEERING}]")


def say_count(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def escape_json(text: str) -> str:
    """A JSON document with the same meaning: controls within its texts are written as JSON writes them."""
    return _IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
