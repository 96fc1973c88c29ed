"""NATS JetStream: one window of unacknowledged messages a batch on one connection, which keeps the order.

The event's id is the message's `Nats-Msg-Id`: what is sent again while the stream remembers it is stored once. Only a
message that has to come again *because* it overtook a refused one of its key gets another id, so that it does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal
from uuid import UUID

from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks.message import DEFAULT_SOURCE, MessageForm
from pillarbox.sinks.nats_connection import Connection, Forbidden, Lost, Window
from pillarbox.sinks.nats_options import Stream, read_nats_url
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.publish import Refused
from pillarbox.sinks.templates import Template
from pillarbox.sinks.url import SinkUrl

try:
    from nats.aio.msg import Msg
    from nats.errors import Error as ClientError
    from nats.js import JetStreamContext
    from nats.js.errors import NotFoundError
except ImportError as error:
    raise MissingExtra("NATS", "nats") from error

MESSAGE_ID: Final = "Nats-Msg-Id"
# As much may be unacknowledged at once: more would only lie in buffers.
_WINDOW_BYTES: Final = 1 << 20
# A server ends the connection over a longer line; subject, inbox and sizes share it.
_SUBJECT_BYTES: Final = 3900
_OVERTAKEN: Final = 10_000
_BAD_SUBJECT: Final = re.compile(r"[\x00-\x20\x7f]|(?:^|\.)(?:[*>]?)(?:\.|$)")
# Subjects that order the server or answer somebody: an event's fields must not lead there.
_RESERVED: Final = ("$JS.", "$SYS.", "$SRV.", "_INBOX.")
_HEADER_NAMES: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]*")
_HEADER_LINE: Final = len(": \r\n")
_HEADER_FRAME: Final = len("NATS/1.0\r\n\r\n")

_TOO_LARGE: Final = 10054
_SEALED: Final = 10109
_NOT_STORED: Final = 10077
# No room, no leader, not enabled: whatever the message.
_STATES: Final = frozenset({10002, 10008, 10009, 10023, 10028, 10035, 10039, 10047, 10076})


class NatsSink:
    """Publishes each event to JetStream. Url: `nats://user:password@host:port,host:port`, `tls://` with TLS.

    `subject` is the template of the subject; a stream must take it. With `stream` one is made when the server has none
    of that name; an existing one is left as it is. `connect` are arguments of `nats.connect`: the sink makes its own
    connection, because a client that reconnects by itself would send what was already given back.
    """

    is_quick: bool = True

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str = "nats:",
        subject: str = "{topic}",
        stream: Stream | None = None,
        timeout: float = 5,
        domain: str | None = None,
        api_prefix: str | None = None,
        connect: Mapping[str, Any] | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        if domain is not None and api_prefix is not None:
            raise ConfigError(f"Sink {name!r}: expected domain or api_prefix, got both")
        self.name = name
        self._servers = list(servers)
        self._is_secure = any(server.startswith("tls:") for server in servers)
        self._connect = dict(connect or {})
        self._subject = Template(subject, what=f"Sink {name!r} subject")
        self._stream = stream
        self._timeout = timeout
        self._api = api_prefix or (f"$JS.{domain}.API" if domain else "$JS.API")
        self._form = MessageForm(cloudevents=cloudevents, cloudevents_source=cloudevents_source)
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._overtaken: dict[UUID, int] = {}

    @classmethod
    def from_url(cls, url: SinkUrl) -> NatsSink:
        return cls(**read_nats_url(url))

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        connection = await self._get_connection()
        await self._ask(connection, lambda jetstream: jetstream.account_info())

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if not claims:
            return []
        connection = await self._get_connection()
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        window = Window()
        outage: SinkUnavailable | None = None
        try:
            await self._send(connection, window, claims, outcomes)
            await self._wait(connection, window)
        except SinkUnavailable as error:
            outage = error
        except BaseException:
            if connection.forget(window) and connection.is_idle:
                # What has not left yet must not leave after the claims were given back.
                await connection.drop(Lost("cancelled"))
            raise
        for position in window.stored:
            outcomes[position] = DELIVERED
        if window.answers:
            outage = await self._judge(connection, window, claims, outcomes) or outage
        if outage is None and len(window.stored) == len(claims):
            self._forget_overtaken(claims)
            return outcomes
        ordered = release_successors(claims, outcomes)
        self._note_overtaken(claims, outcomes, ordered, {claims[each].event.key for each in window.answers})
        if outage is not None:
            raise SinkUnavailable(str(outage), outcomes=ordered) from outage
        return ordered

    # -- connecting ----------------------------------------------------------------------------------------------------

    async def _get_connection(self) -> Connection:
        connection = self._connection
        if connection is not None and connection.lost is None:
            return connection
        async with self._connecting:
            if self._connection is None or self._connection.lost is not None:
                self._connection = await self._make_connection()
            return self._connection

    async def _make_connection(self) -> Connection:
        connection = Connection(api=self._api)
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect(self._servers, self._connect, is_secure=self._is_secure)
        except (ClientError, OSError, Lost, ValueError) as error:
            raise self._unavailable(error) from error
        if self._stream is not None:
            try:
                await self._ask(connection, self._stream.make)
            except BaseException:
                await connection.close()
                raise
        return connection

    async def _ask(self, connection: Connection, request: Any) -> Any:
        try:
            return await connection.ask(request, timeout=self._timeout)
        except (ClientError, OSError, Lost) as error:
            if isinstance(error, TimeoutError):
                await connection.drop(Lost("JetStream did not answer"))
            raise self._unavailable(error) from error

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _send(
        self, connection: Connection, window: Window, claims: Sequence[Claim], outcomes: list[Outcome]
    ) -> None:
        largest = connection.client.max_payload
        stopped: set[str] = set()
        sent_bytes = 0
        for position, claim in enumerate(claims):
            key = claim.event.key
            if key is not None and key in stopped:
                continue
            try:
                subject, headers, body, size = self._render(claim.event, largest)
                if sent_bytes + size > _WINDOW_BYTES and sent_bytes:
                    await self._wait(connection, window)
                    stopped |= {str(claims[each].event.key) for each in window.answers}
                    sent_bytes = 0
                    if key is not None and key in stopped:
                        continue
                sent_bytes += size
                await connection.publish(window, position, subject, body, headers)
            except Refused as error:
                outcomes[position] = Dead(str(error))
                if key is not None:
                    stopped.add(key)
            except ClientError as error:
                raise self._unavailable(connection.lost or error) from error

    def _render(self, event: Event, largest: int) -> tuple[str, dict[str, str], bytes, int]:
        subject = self._subject.fill(event)
        if _BAD_SUBJECT.search(subject) or subject.startswith(_RESERVED):
            raise Refused(f"Subject {subject!r} cannot be published to: expected words with dots between them")
        headers, _, body = self._form.render(event)
        names, values = "".join(headers), "".join(headers.values())
        if not _HEADER_NAMES.fullmatch(names) or "" in headers or "nats-" in names.lower():
            _refuse_name(headers)
        if "\n" in values or "\r" in values:
            raise Refused(f"Header {_find_broken(headers)!r} cannot be sent: expected one line of text")
        identity = str(event.id)
        if self._overtaken and event.id in self._overtaken:
            identity += f"-{self._overtaken[event.id]}"
        headers[MESSAGE_ID] = identity
        try:
            text = len(names) + (len(values) if values.isascii() else len(values.encode()))
            line = len(subject) if subject.isascii() else len(subject.encode())
        except UnicodeEncodeError as error:
            raise Refused(f"Event {event.id} has a subject or header that is no text: {error}") from None
        if line > _SUBJECT_BYTES:
            raise Refused(f"Subject {subject[:80]!r}… has {line} bytes: expected at most {_SUBJECT_BYTES}")
        size = len(body) + _HEADER_FRAME + text + len(MESSAGE_ID) + len(identity) + _HEADER_LINE * len(headers)
        if size > largest:
            raise Refused(f"The message has {size} bytes with its headers: the server takes at most {largest}")
        return subject, headers, body, size

    async def _wait(self, connection: Connection, window: Window) -> None:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                await window.wait()
        except Lost as error:
            raise self._unavailable(error) from error
        except TimeoutError:
            if not limit.expired():
                raise
            connection.forget(window)
            reason = Lost(f"no acknowledgement within {self._timeout:g} s")
            await connection.drop(reason)
            raise self._unavailable(reason) from None

    # -- judging -------------------------------------------------------------------------------------------------------

    async def _judge(
        self, connection: Connection, window: Window, claims: Sequence[Claim], outcomes: list[Outcome]
    ) -> SinkUnavailable | None:
        """Put the outcomes of messages that were not stored; returns the outage when one of the answers is one."""
        outage: SinkUnavailable | None = None
        lost: dict[str, list[int]] = {}
        for position, answer in window.answers.items():
            if not isinstance(answer, Forbidden) and _is_unheard(answer):
                lost.setdefault(self._subject.fill(claims[position].event), []).append(position)
                continue
            try:
                outcomes[position] = self._judge_answer(answer)
            except SinkUnavailable as error:
                outage = outage or error
        for subject, found in zip(lost, await self._find_streams(connection, list(lost)), strict=True):
            if isinstance(found, SinkUnavailable):
                outage = outage or found
                continue
            for position in lost[subject]:
                outcomes[position] = Dead(f"No stream takes subject {subject!r}")
        return outage

    def _judge_answer(self, answer: Msg | Forbidden) -> Outcome:
        if isinstance(answer, Forbidden):
            text = f"This user may not publish to {answer.subject!r}"
            return Dead(text) if answer.is_sure else Retry(f"{text}, or to one that differs by case alone")
        try:
            error = dict(json.loads(answer.data)["error"])
        except (ValueError, TypeError, KeyError):
            return _judge_other(answer)
        code, text = error.get("err_code"), str(error.get("description"))
        shown = f"{text} (JetStream error {code})"
        if code in (_TOO_LARGE, _SEALED):
            return Dead(shown)
        if code == _NOT_STORED and "per subject" in text:
            return Retry(shown)
        if code in _STATES or code == _NOT_STORED or int(error.get("code") or 0) >= 500:
            raise SinkUnavailable(f"Sink {self.name}: {shown}")
        return Retry(shown)

    async def _find_streams(self, connection: Connection, subjects: list[str]) -> list[SinkUnavailable | None]:
        """Ask for the stream of each subject nobody answered for: None only when JetStream says that there is none.

        While streams are being recovered or have no leader, nobody answers for them either.
        """

        async def find(subject: str) -> SinkUnavailable | None:
            try:
                stream = await self._ask(connection, lambda jetstream: _find_stream(jetstream, subject))
            except SinkUnavailable as outage:
                return outage
            if stream is None:
                return None
            return SinkUnavailable(f"Sink {self.name}: stream {stream!r} of subject {subject!r} does not answer now")

        return list(await asyncio.gather(*map(find, subjects)))

    def _note_overtaken(
        self, claims: Sequence[Claim], found: list[Outcome], ordered: list[Outcome], refused: set[str | None]
    ) -> None:
        """Remember the stored messages that come again after their refused predecessor, and need another id for it."""
        for claim, was, now in zip(claims, found, ordered, strict=True):
            event = claim.event
            if now is DELIVERED:
                self._overtaken.pop(event.id, None)
            elif was is DELIVERED and event.key in refused:
                self._overtaken[event.id] = self._overtaken.pop(event.id, 1) + 1
        while len(self._overtaken) > _OVERTAKEN:
            del self._overtaken[next(iter(self._overtaken))]

    def _forget_overtaken(self, claims: Sequence[Claim]) -> None:
        if self._overtaken:
            for claim in claims:
                self._overtaken.pop(claim.event.id, None)

    def _unavailable(self, error: BaseException) -> SinkUnavailable:
        text = str(error) if isinstance(error, Lost) else describe_error(error)
        return SinkUnavailable(f"Sink {self.name}: {text}")


async def _find_stream(jetstream: JetStreamContext, subject: str) -> str | None:
    try:
        return await jetstream.find_stream_name_by_subject(subject)
    except NotFoundError as error:
        # The client raises it without a code when the list is empty; one with a code is an answer about something else.
        if error.code is None:
            return None
        raise


def _is_unheard(answer: Msg) -> bool:
    return not answer.data and (answer.headers or {}).get("Status") == "503"


def _judge_other(answer: Msg) -> Outcome:
    """Another subscriber of the subject may answer before the stream does: that is no acknowledgement."""
    with suppress(ValueError, TypeError):
        acknowledgement = json.loads(answer.data)
        if isinstance(acknowledgement, dict) and {"stream", "seq"} <= acknowledgement.keys():
            return DELIVERED
    return Retry(f"Expected JetStream's acknowledgement, got {bytes(answer.data[:100])!r}; who answers there?")


def _refuse_name(headers: dict[str, str]) -> None:
    for name in headers:
        if not name or not _HEADER_NAMES.fullmatch(name):
            raise Refused(f"Header {name!r} cannot be sent: expected a name of letters, digits and -._")
        if name.lower().startswith("nats-"):
            raise Refused(f"Header {name!r} is an order to the server: expected a name that does not begin with Nats-")


def _find_broken(headers: dict[str, str]) -> str:
    return next(name for name, value in headers.items() if "\n" in value or "\r" in value)
