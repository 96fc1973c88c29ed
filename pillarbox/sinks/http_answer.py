"""What a destination's answer says: about this message, or about the destination.

| answer | meaning |
|---|---|
| 2xx but 207 | delivered |
| 408, 425, 5xx but 503 | this message may succeed later |
| 429, 503 | the destination wants a pause, whatever the message |
| 401, 407 | our credentials are not good, whatever the message |
| 1xx, 3xx, 207 | not a webhook's answer: the address is wrong, whatever the message |
| other 4xx | this message is bad |
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, Dead, Outcome, Retry
from pillarbox.sinks.http_transport import DOWN, Reply

LONGEST_PAUSE: Final = timedelta(hours=1)
_MOST_BYTES: Final = 65_536
_SHOWN: Final = 200
_WANTS_PAUSE: Final = frozenset({429, 503})
_NO_LOGIN: Final = frozenset({401, 407})
_TRY_AGAIN: Final = frozenset({408, 425})


class Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    text: str

    def find(self, name: bytes) -> str | None:
        """Return a header's value, by its name in small letters."""
        return next((value.decode("latin-1") for each, value in self.headers if each.lower() == name), None)


async def read_answer(reply: Reply) -> Answer:
    """Read an answer to its end, so that the connection can be kept; one that is too long is cut off."""
    body = b""
    try:
        async for part in reply.parts:
            body += part
            if len(body) > _MOST_BYTES:
                break
    except DOWN:
        # A status of success is the acknowledgement: what happens to the rest of the answer does not matter.
        if not is_acknowledged(reply.status):
            raise
    finally:
        await reply.close()
    # All of it: a secret is not found any more in what is cut.
    return Answer(reply.status, reply.headers, body.decode("utf-8", "replace"))


def is_acknowledged(status: int) -> bool:
    """Whether a status alone says that everything was taken."""
    return 200 <= status < 300 and status != 207


def judge(answer: Answer, *, name: str, pause_statuses: Collection[int] = ()) -> Outcome:
    """Return what became of the message, or raise `SinkUnavailable` when the answer is about the destination."""
    status = answer.status
    if is_acknowledged(status):
        return DELIVERED
    after = read_retry_after(answer.find(b"retry-after"))
    error = f"HTTP {status}{_show(answer.text)}"
    if status in _WANTS_PAUSE or status in pause_statuses:
        raise SinkUnavailable(f"Sink {name}: {error}", after=after)
    if status in _NO_LOGIN:
        raise SinkUnavailable(f"Sink {name}: login refused, {error}. Check the credentials among its headers")
    if status == 207:
        raise SinkUnavailable(f"Sink {name}: HTTP 207 says that a part may have failed; expected another status")
    if status < 400:
        raise SinkUnavailable(
            f"Sink {name}: HTTP {status}{_show_target(answer)}; redirects are not followed, mend its url"
        )
    if status in _TRY_AGAIN or status >= 500:
        return Retry(error, after=after)
    return Dead(error)


def read_retry_after(text: str | None) -> timedelta | None:
    """Return the pause that a Retry-After asks for, in seconds or as a date; None when it asks for nothing."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        pause = timedelta(seconds=min(int(text[:10]), 10**9))
    else:
        try:
            pause = parsedate_to_datetime(text).astimezone(UTC) - datetime.now(UTC)
        except (ValueError, OverflowError):
            return None
    return min(pause, LONGEST_PAUSE) if pause > timedelta(0) else None


def _show(text: str) -> str:
    shown = "".join(each if each.isprintable() else " " for each in text).strip()
    return f": {shown[:_SHOWN]}" if shown else ""


def _show_target(answer: Answer) -> str:
    try:
        target = urlsplit(answer.find(b"location") or "")
        host = target.hostname
    except ValueError:
        return ""
    return f" to {target.scheme}://{host}" if host else ""
