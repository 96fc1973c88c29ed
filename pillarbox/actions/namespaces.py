"""Names of an action log: its namespace, which also begins topics and schema names, and the names of its actions."""

from __future__ import annotations

import re
from typing import Final

from pillarbox.errors import ConfigError, InvalidAction

MAX_NAME: Final = 255
_NAMESPACE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


def check_namespace(value: object) -> str:
    """Return a namespace, or raise `ConfigError`; nothing is rewritten to make it fit."""
    if not isinstance(value, str) or len(value) > MAX_NAME or not _NAMESPACE.fullmatch(value):
        hint = f" Write {value.replace('-', '_')!r}?" if isinstance(value, str) and "-" in value else ""
        raise ConfigError(
            f"Action log namespace: expected identifiers of letters, digits and underscores with dots between them, "
            f"such as 'shop.orders', at most {MAX_NAME} characters; got {value!r}.{hint}"
        )
    return value


def check_text(what: str, value: object) -> str:
    """Return a text that fits a name's column, or raise `InvalidAction`; `what` says whose it is."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidAction(f"{what}: expected text, got {value!r}")
    if len(value) > MAX_NAME:
        raise InvalidAction(f"{what}: {len(value)} characters, at most {MAX_NAME} fit; got {value[:40]!r}…")
    if not value.isprintable():
        raise InvalidAction(f"{what}: expected printable characters only, got {value!r}")
    return value
