"""NATS JetStream: one window of unacknowledged messages a batch on one connection, which keeps the order.

The event's id is the message's `Nats-Msg-Id`: what is sent again while the stream remembers it is stored once. What has
to be stored again gets another id, so that it is: a late event, and one that overtook a refused one of its key.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from secrets import token_hex
from typing import Any, Final, Literal
from uuid import UUID

from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import DELIVERED, LATE_HEADER, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks.forms import FormName, make_form
from pillarbox.sinks.message import DEFAULT_SOURCE
from pillarbox.sinks.nats_connection import Answer, Connection, Forbidden, Lost, Window
from pillarbox.sinks.nats_message import NatsForm, NatsMessage
from pillarbox.sinks.nats_options import TIMEOUT, Stream, read_nats_url
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.refused import make_each
from pillarbox.sinks.templates import Template
from pillarbox.sinks.url import SinkUrl

try:
    from nats.errors import Error as ClientError
    from nats.js import JetStreamContext
    from nats.js.errors import NotFoundError
except ImportError as error:
    raise MissingExtra("NATS", "nats") from error

# As much may be unacknowledged at once: more would only lie in buffers.
_WINDOW_BYTES: Final = 1 << 20
_REMEMBERED: Final = 10_000
_ID_SUFFIX: Final = re.compile("[!-~]*")

_TOO_LARGE: Final = 10054
_SEALED: Final = 10109
_NOT_STORED: Final = 10077
_ACCOUNT_FULL: Final = 10002


class NatsSink(Sink):
    """Publishes each event to JetStream. Url: `nats://user:password@host:port,host:port`, `tls://` with TLS.

    `subject` is the template of the subject; a stream must take it. With `stream` one is made when the server has none
    of that name; an existing one is left as it is. `connect` are arguments of `nats.connect`: the sink makes its own
    connection, because a client that reconnects by itself would send what was already given back. `id_suffix` ends the
    message's id: a stream that several sinks send the same event to takes those whose suffixes differ.
    """

    is_quick: bool = True

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str = "nats:",
        subject: str = "{topic}",
        stream: Stream | None = None,
        timeout: timedelta = TIMEOUT,
        id_suffix: str = "",
        domain: str | None = None,
        api_prefix: str | None = None,
        connect: Mapping[str, Any] | None = None,
        message: FormName | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        if domain is not None and api_prefix is not None:
            raise ConfigError(f"Sink {name!r}: expected domain or api_prefix, got both")
        if not _ID_SUFFIX.fullmatch(id_suffix):
            raise ConfigError(f"Sink {name!r} id_suffix: expected ASCII characters without blanks, got {id_suffix!r}")
        self.name = name
        self._servers = list(servers)
        self._is_secure = any(server.startswith("tls:") for server in servers)
        self._connect = dict(connect or {})
        self._stream = stream
        self._timeout = timeout.total_seconds()
        self._id_suffix = id_suffix
        self._api = api_prefix or (f"$JS.{domain}.API" if domain else "$JS.API")
        self._form = NatsForm(
            Template(subject, what=f"Sink {name!r} subject"),
            make_form(
                message, broker="nats", sink=name, cloudevents=cloudevents, cloudevents_source=cloudevents_source
            ),
            # As Go's library writes them.
            is_sorted=message == "openoutbox",
        )
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._overtaken: dict[UUID, int] = {}
        self._late: dict[UUID, str] = {}

    @classmethod
    def from_url(cls, url: SinkUrl) -> NatsSink:
        return cls(**read_nats_url(url))

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        connection = await self._get_connection()
        await self._ask(connection, lambda jetstream: jetstream.account_info())

    async def close(self) -> None:
        # One that is being made would come after this and stay open.
        async with self._connecting:
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
            self._forget(claims)
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
        put, largest = connection.put, connection.client.max_payload

        def render(event: Event) -> NatsMessage:
            return self._form.render(event, suffix=self._find_suffix(event), largest=largest)

        stopped: set[str | None] = set()
        sent = 0
        for position, message in make_each(claims, render, outcomes):
            key = claims[position].event.key
            if key is not None and key in stopped:
                continue
            size = len(message.head) + len(message.body)
            if sent and sent + size > _WINDOW_BYTES:
                await self._wait(connection, window)
                stopped.update(claims[each].event.key for each in window.answers)
                sent = 0
                if key is not None and key in stopped:
                    continue
            sent += size
            try:
                put(window, position, message)
            except Lost as error:
                raise self._unavailable(error) from error

    def _find_suffix(self, event: Event) -> str:
        suffix = self._id_suffix
        if LATE_HEADER in event.headers:
            # Nothing tells one replay from the next, so it is another one once the last was acknowledged.
            suffix += self._late.setdefault(event.id, f"-{token_hex(4)}")
            _trim(self._late)
        again = self._overtaken.get(event.id) if self._overtaken else None
        return suffix if again is None else f"{suffix}-{again}"

    async def _wait(self, connection: Connection, window: Window) -> None:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                await connection.wait(window)
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
            if isinstance(answer, Answer) and answer.is_unheard:
                lost.setdefault(self._form.name_subject(claims[position].event), []).append(position)
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

    def _judge_answer(self, answer: Answer | Forbidden) -> Outcome:
        if isinstance(answer, Forbidden):
            return Dead(f"This user may not publish to {answer.subject!r}")
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
        # No room, no leader, not enabled: whatever the message.
        if code == _ACCOUNT_FULL or int(error.get("code") or 0) >= 500:
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
                self._forget([claim])
            elif was is DELIVERED and event.key in refused:
                self._overtaken[event.id] = self._overtaken.pop(event.id, 1) + 1
        _trim(self._overtaken)

    def _forget(self, claims: Sequence[Claim]) -> None:
        if self._overtaken or self._late:
            for claim in claims:
                self._overtaken.pop(claim.event.id, None)
                self._late.pop(claim.event.id, None)

    def _unavailable(self, error: BaseException) -> SinkUnavailable:
        text = str(error) if isinstance(error, Lost) else describe_error(error)
        if isinstance(error, TimeoutError):
            text = f"no answer within {self._timeout:g} s"
        return SinkUnavailable(f"Sink {self.name}: {text}")


async def _find_stream(jetstream: JetStreamContext, subject: str) -> str | None:
    try:
        return await jetstream.find_stream_name_by_subject(subject)
    except NotFoundError as error:
        # The client raises it without a code when the list is empty; one with a code is an answer about something else.
        if error.code is None:
            return None
        raise


def _trim(remembered: dict[UUID, Any]) -> None:
    while len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]


def _judge_other(answer: Answer) -> Outcome:
    """Another subscriber of the subject may answer before the stream does: that is no acknowledgement."""
    with suppress(ValueError, TypeError):
        acknowledgement = json.loads(answer.data)
        if isinstance(acknowledgement, dict) and {"stream", "seq"} <= acknowledgement.keys():
            return DELIVERED
    return Retry(f"Expected JetStream's acknowledgement, got {answer.data[:100]!r}; who answers there?")
