"""An event as NATS takes it: a subject, a head of lines, and the payload.

Subject and head stand between line ends on the wire, so whatever could end a line or order the server is refused here.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from pillarbox.event import Event
from pillarbox.sinks.forms import Render
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template

MESSAGE_ID: Final = "Nats-Msg-Id"
# A server ends the connection over a line of more than 4096; subject, inbox and sizes share it.
_SUBJECT_BYTES: Final = 3900
_BAD_SUBJECT: Final = re.compile(r"[\x00-\x20\x7f]|(?:^|\.)[*>]?(?:\.|$)")
# Subjects that order the server or answer somebody: an event's fields must not lead there.
_RESERVED: Final = ("$JS.", "$SYS.", "$SRV.", "_INBOX.")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_KNOWN_NAMES: Final = 10_000
_OWN_LINES: Final = 2


class NatsMessage(NamedTuple):
    subject: str
    head: bytes
    body: bytes


class NatsForm:
    """Makes messages; remembers the names of headers that it has found good."""

    def __init__(self, subject: Template, form: Render, *, is_sorted: bool = False) -> None:
        self._subject = subject
        self._form = form
        self._is_sorted = is_sorted
        self._names: set[str] = set()

    def name_subject(self, event: Event) -> str:
        """Return the event's subject; raises `Refused` when it is none that may be published to."""
        subject = self._subject.fill(event)
        if _BAD_SUBJECT.search(subject) or subject.startswith(_RESERVED):
            raise Refused(f"Subject {subject!r} cannot be published to: expected words with dots between them")
        size = len(subject) if subject.isascii() else len(_encode(subject, "Subject"))
        if size > _SUBJECT_BYTES:
            raise Refused(f"Subject {subject[:80]!r}… has {size} bytes: expected at most {_SUBJECT_BYTES}")
        return subject

    def render(self, event: Event, *, suffix: str, largest: int) -> NatsMessage:
        """Make the message, its id being the event's with a suffix; raises `Refused` when it cannot be sent."""
        subject = self.name_subject(event)
        headers, _, body = self._form(event)
        if not headers.keys() <= self._names:
            self._check_names(headers)
        headers[MESSAGE_ID] = f"{event.id}{suffix}"
        written = sorted(headers.items()) if self._is_sorted else headers.items()
        lines = "".join([f"{name}: {value}\r\n" for name, value in written])
        text = f"NATS/1.0\r\n{lines}\r\n"
        expected = len(headers) + _OWN_LINES
        if text.count("\n") != expected or text.count("\r") != expected:
            _refuse_line_end(headers)
        head = _encode(text, "Header")
        size = len(head) + len(body)
        if size > largest:
            raise Refused(f"The message has {size} bytes with its headers: the server takes at most {largest}")
        return NatsMessage(subject, head, body)

    def _check_names(self, headers: dict[str, str]) -> None:
        for name in headers:
            if not _HEADER_NAME.fullmatch(name):
                raise Refused(f"Header {name!r} cannot be sent: expected a name of letters, digits and -._")
            if name.lower().startswith("nats-"):
                raise Refused(f"Header {name!r} is an order to the server: expected a name without Nats- before it")
        if len(self._names) > _KNOWN_NAMES:
            self._names.clear()
        self._names.update(headers)


def _encode(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{what} cannot be sent: {error.object[error.start : error.end]!r} is no text") from None


def _refuse_line_end(headers: dict[str, str]) -> None:
    for name, value in headers.items():
        if "\n" in value or "\r" in value:
            raise Refused(f"Header {name!r} cannot be sent: expected one line, got {value[:80]!r}")
