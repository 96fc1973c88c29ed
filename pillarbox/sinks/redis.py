"""Redis Streams, or Pub/Sub: one pipeline a batch on one connection, which keeps the order.

What a lost connection leaves open (the server may have run a part of the pipeline) is sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks.message import DEFAULT_SOURCE, FORM_OPTIONS, MessageForm, form_options
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.publish import Refused
from pillarbox.sinks.templates import Template
from pillarbox.sinks.tls import TLS_OPTIONS, check_tls_files
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_text

try:
    from redis import exceptions
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.retry import Retry as ClientRetry
    from redis.backoff import NoBackoff
except ImportError as error:
    raise MissingExtra("Redis", "redis") from error

BODY: Final = "payload"
_OPTIONS: Final[dict[str, Read]] = {
    "stream": read_text,
    "mode": one_of("stream", "pubsub"),
    "maxlen": read_number,
    "create": read_switch,
    "cluster": read_switch,
    "timeout": read_pause,
    **FORM_OPTIONS,
}
# Answers about the server's state, whatever the message.
_STATES: Final = (
    "OOM",
    "LOADING",
    "READONLY",
    "MISCONF",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "NOREPLICAS",
)
_DOWN: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError, OSError)


class RedisSink:
    """Adds each event to a stream. Url: `redis://user:password@host:port/db`, `rediss://` with TLS.

    `stream` is the template of the stream's or channel's name. An entry's fields are the message's headers and
    `payload`. `maxlen` trims the stream to about that length; without `create` a stream that does not exist is not
    made, and its events are dead. `mode="pubsub"` publishes the payload alone to a channel instead, for whoever
    listens at that moment. With `client` the connection is yours: the sink neither makes nor closes it.
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
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        if mode == "pubsub" and (maxlen is not None or not create):
            raise ConfigError(f"Sink {name!r}: maxlen and create are for streams; mode is pubsub")
        if mode == "pubsub" and cloudevents == "binary":
            raise ConfigError(f"Sink {name!r} cloudevents: a channel's messages have no headers; use structured")
        self.name = name
        self._client = client
        self._owns_client = False
        self._stream = Template(stream, what=f"Sink {name!r} stream")
        self._is_stream = mode == "stream"
        self._arguments: list[bytes | int] = [] if create else [b"NOMKSTREAM"]
        if maxlen is not None:
            self._arguments += [b"MAXLEN", b"~", maxlen]
        self._form = MessageForm(cloudevents=cloudevents, cloudevents_source=cloudevents_source)

    @classmethod
    def from_url(cls, url: SinkUrl) -> RedisSink:
        is_secure = url.scheme == "rediss"
        options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
        client = _make_client(url, options, is_secure=is_secure)
        names = ("stream", "mode", "maxlen", "create")
        chosen = {name: options[name] for name in names if name in options}
        sink = cls(client, name=url.name, **chosen, **form_options(options))
        sink._owns_client = True
        return sink

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        try:
            await self._client.ping()
        except (exceptions.RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        sent: list[int] = []
        stopped: set[str] = set()
        pipeline = self._client.pipeline(transaction=False)
        for position, claim in enumerate(claims):
            key = claim.event.key
            if key is not None and key in stopped:
                continue
            try:
                pipeline.execute_command(*self._command(claim.event))
                sent.append(position)
            except Refused as error:
                outcomes[position] = Dead(str(error))
                if key is not None:
                    stopped.add(key)
        if not sent:
            return outcomes
        try:
            answers = await pipeline.execute(raise_on_error=False)
        except (exceptions.RedisError, OSError) as error:
            raise self._unavailable(error) from error
        return self._judge(claims, outcomes, dict(zip(sent, answers, strict=True)))

    async def close(self) -> None:
        if self._owns_client:
            await self._client.aclose()

    def _command(self, event: Event) -> list[Any]:
        name = self._stream.fill(event)
        message = self._form.render(event)
        if not self._is_stream:
            return [b"PUBLISH", name, message.body]
        command: list[Any] = [b"XADD", name, *self._arguments, b"*"]
        for field, value in message.headers.items():
            command += (f"header-{field}" if field == BODY else field, value)
        return [*command, BODY, message.body]

    def _judge(self, claims: Sequence[Claim], outcomes: list[Outcome], answers: dict[int, Any]) -> list[Outcome]:
        outage: SinkUnavailable | None = None
        for position, answer in answers.items():
            if isinstance(answer, Exception):
                try:
                    outcomes[position] = self._judge_error(answer)
                except SinkUnavailable as unavailable:
                    outage = outage or unavailable
            elif answer is None:
                outcomes[position] = Dead(f"Stream {self._stream.fill(claims[position].event)!r} does not exist")
            else:
                outcomes[position] = DELIVERED
        outcomes = release_successors(claims, outcomes)
        if outage is not None:
            raise SinkUnavailable(str(outage), outcomes=outcomes) from outage
        return outcomes

    def _judge_error(self, error: Exception) -> Outcome:
        text = str(error)
        if isinstance(error, _DOWN) or text.startswith(_STATES):
            raise self._unavailable(error)
        if isinstance(error, exceptions.NoPermissionError) or "NOPERM" in text:
            if "key" not in text and "channel" not in text:
                raise self._unavailable(error)
            return Dead(text)
        if text.startswith("WRONGTYPE"):
            return Dead(text)
        return Retry(text, cause=error)

    def _unavailable(self, error: BaseException) -> SinkUnavailable:
        return SinkUnavailable(f"Sink {self.name}: {describe_error(error)}")


def _make_client(url: SinkUrl, options: dict[str, Any], *, is_secure: bool) -> Redis | RedisCluster:
    (host, port), *others = read_servers(url, port=6379)
    user, password = read_login(url)
    database = read_path(url) or "0"
    if others:
        raise ConfigError(f"Sink {url.name!r}: expected one server; a cluster tells the others by itself")
    if not database.isdecimal() or urlsplit(url.text).path.count("/") > 1:
        raise ConfigError(f"Sink {url.name!r}: expected the number of a database after the server, got {database!r}")
    timeout: timedelta = options.get("timeout", timedelta(seconds=5))
    common: dict[str, Any] = {
        "host": host,
        "port": port,
        "username": user,
        "password": password,
        "socket_timeout": timeout.total_seconds(),
        "socket_connect_timeout": timeout.total_seconds(),
        "client_name": "pillarbox",
    }
    if is_secure:
        check_tls_files(options, sink=url.name)
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
    # The relay decides when to try again: the client must not send a pipeline twice on its own.
    return Redis(**common, db=int(database), retry=ClientRetry(NoBackoff(), 0))
