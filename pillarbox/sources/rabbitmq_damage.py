"""Messages whose properties the client library cannot read: a time beyond the year 9999, text that is no UTF-8.

The library ends the connection over one of them, the server then gives it out again, and nothing behind it would ever
be read. Here such a message comes through with what could be read of it, the reason, and the bytes of its properties.
The library's reader is replaced for that, and does what it did before on every connection but those made in `tolerant`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from pamqp.header import ContentHeader

DAMAGE: Final = "amqp-damage"
PROPERTIES: Final = "amqp-properties"

# The task that reads a connection inherits it from whoever connects.
_is_tolerant: ContextVar[bool] = ContextVar("pillarbox_rabbitmq_tolerant", default=False)
_unmarshal: Final[Any] = ContentHeader.unmarshal


@contextmanager
def tolerant() -> Iterator[None]:
    """Let a connection that is made meanwhile survive damaged properties."""
    token = _is_tolerant.set(True)
    try:
        yield
    finally:
        _is_tolerant.reset(token)


def _read_header(self: ContentHeader, data: bytes) -> None:
    try:
        _unmarshal(self, data)
    except Exception as error:
        if not _is_tolerant.get():
            raise
        _, self.weight, self.body_size = struct.unpack(">HHQ", data[:12])
        found = self.properties.headers or {}
        self.properties.headers = {**found, DAMAGE: str(error), PROPERTIES: data[12:]}


ContentHeader.unmarshal = _read_header  # type: ignore[method-assign]
