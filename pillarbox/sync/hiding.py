"""Texts of a writer without the secrets of its connection: they are logged, kept in the queue file and shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pillarbox.sinks.url import MASK

_SECRET: Final = re.compile(r"token|passw|secret|key|auth|credential|dsn", re.IGNORECASE)
_SHORTEST: Final = 4


class Hiding:
    """Replaces what a connection's table keeps secret."""

    def __init__(self, connection: Mapping[str, Any]) -> None:
        found = {text for text in _secrets(connection) if len(text) >= _SHORTEST}
        self._secrets = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text


def _secrets(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, is_secret=is_secret or _SECRET.search(str(key)) is not None)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, is_secret=is_secret)
    elif isinstance(value, str):
        if "://" in value:
            yield from _of_url(value)
        elif is_secret:
            yield value


def _of_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        yield url
        return
    if password:
        yield from (password, unquote(password))
    for name, item in parse_qsl(parts.query):
        if _SECRET.search(name):
            yield item
