"""Redis Streams, or Pub/Sub: a batch goes on one connection, which keeps the order.

What a lost connection leaves open (the server may have run it without an answer) is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks.forms import FASTSTREAM_FIELD, FORM_OPTIONS, FormName, form_options, make_form
from pillarbox.sinks.message import DEFAULT_SOURCE, HEADER_PREFIX, find_free_name
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.refused import Refused, make_each
from pillarbox.sinks.templates import Template
from pillarbox.sinks.tls import TLS_OPTIONS, make_tls_context
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_text

try:
    from redis import exceptions
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.retry import Retry as ClientRetry
    from redis.backoff import NoBackoff

    from pillarbox.sinks.redis_batch import FAILURES, ClusterLink, Command, ServerLink, Words, name_timeout
except ImportError as error:
    raise MissingExtra("Redis", "redis") from error

BODY: Final = "payload"
# Below the time for which a relay may hold its rows.
TIMEOUT: Final = timedelta(seconds=4)
_OPTIONS: Final[dict[str, Read]] = {
    "stream": read_text,
    "mode": one_of("stream", "pubsub"),
    "maxlen": read_number,
    "create": read_switch,
    "cluster": read_switch,
    "timeout": read_pause,
    **FORM_OPTIONS,
}
# Redis refuses a longer value by closing the connection, which would look like an outage.
_LONGEST: Final = 512 * 1024 * 1024
# Answers about the server's state, whatever the message: those that the client has a class for, and the others.
_DOWN: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.AskError,
    exceptions.TryAgainError,
    OSError,
)
_STATES: Final = ("MISCONF", "NOREPLICAS", "BUSY ")


class RedisSink(Sink):
    """Adds each event to a stream. Url: `redis://user:password@host:port/db`, `rediss://` with TLS.

    `stream` is the template of the stream's or channel's name. An entry's fields are the message's headers and
    `payload`. `maxlen` trims the stream to about that length; without `create` a stream that does not exist is not
    made, and its events are dead. `mode="pubsub"` publishes the payload alone to a channel instead, for whoever
    listens at that moment. `timeout` is for a whole batch. The client is yours: the sink neither makes nor closes it.
    """

    is_quick: bool = True

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        name: str = "redis:",
        stream: str = "{topic}",
        mode: Literal["stream", "pubsub"] = "stream",
        maxlen: int | None = None,
        create: bool = True,
        timeout: timedelta = TIMEOUT,
        message: FormName | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        if mode == "pubsub" and (maxlen is not None or not create):
            raise ConfigError(f"Sink {name!r}: maxlen and create are for streams; mode is pubsub")
        if mode == "pubsub" and (cloudevents == "binary" or (message == "cloudevents" and cloudevents is None)):
            raise ConfigError(f"Sink {name!r} cloudevents: a channel's messages have no headers; use structured")
        if mode == "pubsub" and message == "openoutbox":
            raise ConfigError(f"Sink {name!r} message: openoutbox has a form for streams only; mode is pubsub")
        self.name = name
        self._client = client
        self._owns_client = False
        self._stream = Template(stream, what=f"Sink {name!r} stream")
        self._is_stream = mode == "stream"
        self._arguments: Words = () if create else (b"NOMKSTREAM",)
        if maxlen is not None:
            self._arguments += (b"MAXLEN", b"~", maxlen)
        self._arguments += (b"*",)
        self._timeout = timeout.total_seconds()
        self._link = ClusterLink(client) if isinstance(client, RedisCluster) else ServerLink(client)
        self._render = make_form(
            message, broker="redis", sink=name, cloudevents=cloudevents, cloudevents_source=cloudevents_source
        )
        self._body = FASTSTREAM_FIELD if message == "faststream" else BODY

    @classmethod
    def from_url(cls, url: SinkUrl) -> RedisSink:
        is_secure = url.scheme == "rediss"
        options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
        client = make_client(url, options, is_secure=is_secure)
        names = ("stream", "mode", "maxlen", "create", "timeout")
        chosen = {name: options[name] for name in names if name in options}
        sink = cls(client, name=url.name, **chosen, **form_options(options))
        sink._owns_client = True
        return sink

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        try:
            await self._link.check(deadline=self._deadline())
        except FAILURES as error:
            raise self._unavailable(name_timeout(error)) from error

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        sent: list[int] = []
        answers = await self._link.send(self._commands(claims, outcomes, sent), deadline=self._deadline())
        return self._judge(claims, outcomes, dict(zip(sent, answers, strict=True)))

    async def close(self) -> None:
        if self._owns_client:
            await self._client.aclose()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    def _commands(self, claims: Sequence[Claim], outcomes: list[Outcome], sent: list[int]) -> Iterator[Command]:
        """Make the commands one by one, and note whose they are; a claim that makes none gets its outcome."""
        for position, command in make_each(claims, self._command, outcomes):
            sent.append(position)
            yield command

    def _command(self, event: Event) -> Command:
        name = self._stream.fill(event)
        headers, _, body = self._render(event)
        if len(body) > _LONGEST:
            raise Refused(f"Payload of {len(body)} bytes: Redis takes {_LONGEST} at most")
        if not self._is_stream:
            return _pack("PUBLISH", name, body)
        if self._body in headers:
            free = find_free_name(self._body, headers, prefix=HEADER_PREFIX)
            headers = {free if field == self._body else field: value for field, value in headers.items()}
        return _pack("XADD", name, *self._arguments, *chain.from_iterable(headers.items()), self._body, body)

    def _judge(self, claims: Sequence[Claim], outcomes: list[Outcome], answers: dict[int, Any]) -> list[Outcome]:
        outage: SinkUnavailable | None = None
        for position, answer in answers.items():
            if isinstance(answer, Exception):
                try:
                    outcomes[position] = self._judge_error(answer, claims[position].event)
                except SinkUnavailable as unavailable:
                    outage = outage or unavailable
            elif answer is None:
                outcomes[position] = Dead(f"Stream {self._stream.fill(claims[position].event)!r} does not exist")
            else:
                outcomes[position] = DELIVERED
        outcomes = release_successors(claims, outcomes)
        if outage is not None:
            raise SinkUnavailable(str(outage), outcomes=outcomes) from outage.__cause__
        return outcomes

    def _judge_error(self, error: Exception, event: Event) -> Outcome:
        text = str(error)
        if isinstance(error, _DOWN) or text.startswith(_STATES):
            raise self._unavailable(error) from error
        # Without the right to run the command, no message can pass; without that to a key, this one cannot.
        is_forbidden = isinstance(error, exceptions.NoPermissionError)
        if is_forbidden and "permissions to run" in text:
            raise self._unavailable(error) from error
        if is_forbidden or text.startswith("WRONGTYPE"):
            kind = "Stream" if self._is_stream else "Channel"
            return Dead(f"{kind} {self._stream.fill(event)!r}: {text}")
        return Retry(text, cause=error)

    def _unavailable(self, error: BaseException) -> SinkUnavailable:
        return SinkUnavailable(f"Sink {self.name}: {describe_error(error)}")


def _pack(*words: Any) -> Command:
    try:
        return Command.pack(*words)
    except UnicodeEncodeError as error:
        raise Refused(f"Text that has no form in UTF-8: {error}") from None


def make_client(url: SinkUrl, options: dict[str, Any], *, is_secure: bool) -> Redis | RedisCluster:
    (host, port), *others = read_servers(url, port=6379)
    user, password = read_login(url)
    database = read_path(url) or "0"
    if others:
        raise ConfigError(f"Sink {url.name!r}: expected one server; a cluster tells the others by itself")
    if not database.isdecimal() or urlsplit(url.text).path.count("/") > 1:
        raise ConfigError(f"Sink {url.name!r}: expected the number of a database after the server, got {database!r}")
    common: dict[str, Any] = {
        "host": host,
        "port": port,
        "username": user,
        "password": password,
        # The sink bounds a whole batch.
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "client_name": "pillarbox",
        # The relay decides when to try again.
        "retry": ClientRetry(NoBackoff(), 0),
    }
    if is_secure:
        make_tls_context(options, sink=url.name)  # says which file is bad
        common |= {
            "ssl": True,
            "ssl_ca_certs": options.get("tls_ca"),
            "ssl_certfile": options.get("tls_certificate"),
            "ssl_keyfile": options.get("tls_key"),
        }
        if options.get("tls_verify") is False:
            common |= {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    if options.get("cluster"):
        if database != "0":
            raise ConfigError(f"Sink {url.name!r}: a cluster has database 0 alone, got {database!r}")
        return RedisCluster(**common)
    return Redis(**common, db=int(database))
