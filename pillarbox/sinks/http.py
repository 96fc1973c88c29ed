"""HTTP webhooks: one request an event, or a JSON array of several.

A key's events go one after the other, keys in parallel over kept connections. What a lost connection leaves open (the
destination may have taken the event) is sent again, with the same `Idempotency-Key`.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Delivered, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks.forms import FORM_OPTIONS, FormName, make_form
from pillarbox.sinks.message import DEFAULT_SOURCE
from pillarbox.sinks.options import read_options
from pillarbox.sinks.order import group_by_key
from pillarbox.sinks.refused import Refused, make_each
from pillarbox.sinks.tls import TLS_OPTIONS, make_tls_context
from pillarbox.sinks.url import SinkUrl, parse_sink_url
from pillarbox.sinks.workers import send_groups
from pillarbox.urls import Secrets
from pillarbox.values import Given, Read, one_of, read_number, read_pause, read_switch, read_texts

try:
    import httpx

    from pillarbox.sinks.guard import Guard
    from pillarbox.sinks.http_answer import is_acknowledged, judge, read_answer
    from pillarbox.sinks.http_request import RequestForm, Signer, check_headers, read_keys
    from pillarbox.sinks.http_transport import (
        DOWN,
        SLOW,
        UNSENDABLE,
        ClientTransport,
        DirectTransport,
        Outgoing,
        ProxyTransport,
        Reply,
        Transport,
    )
except ImportError as error:
    if isinstance(error, MissingExtra) or (error.name or "").startswith("pillarbox"):
        raise
    raise MissingExtra("HTTP", "http") from error

CONNECT_TIMEOUT: Final = timedelta(seconds=5)


def _as_given(given: Given) -> Any:
    # Checked by the constructor, whose errors do not show it.
    return given.value


_OPTIONS: Final[dict[str, Read]] = {
    "method": one_of("POST", "PUT"),
    "batch": read_number,
    "concurrency": read_number,
    "timeout": read_pause,
    "connect_timeout": read_pause,
    "headers": _as_given,
    "signing_secret": _as_given,
    "pause_statuses": _as_given,
    "refuse_private": read_switch,
    "allow": read_texts,
    "proxy": _as_given,
    **FORM_OPTIONS,
}


class HttpSink(Sink):
    """Sends each event to an address. Url: `https://user:password@host:port/path/{topic}?query`.

    Path and query may contain fields of the event. `batch` sends up to that many events as one array of CloudEvents.
    `concurrency` requests are under way at once, and `timeout` is how long each waits for its answer. `headers` go with
    every request; with `signing_secret`, one `whsec_…` or several while they change, requests are signed.
    `pause_statuses` are answers that pause the destination instead of counting against the message. `refuse_private`
    connects to public addresses only, and to the networks in `allow`. With `client` the connections are yours: the sink
    neither makes, checks nor closes them.
    """

    is_quick: bool = False

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        client: httpx.AsyncClient | None = None,
        method: Literal["POST", "PUT"] = "POST",
        batch: int = 1,
        concurrency: int = 16,
        timeout: timedelta = timedelta(seconds=30),
        connect_timeout: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        signing_secret: str | Sequence[str] = (),
        pause_statuses: Collection[int] = (),
        refuse_private: bool = False,
        allow: Sequence[str] = (),
        proxy: str | None = None,
        tls: ssl.SSLContext | None = None,
        message: FormName | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        self.name = parse_sink_url(url, name=name, options={}).name
        self._batch, self._concurrency = batch, concurrency
        self._connect_timeout = _choose_connect_timeout(self.name, timeout, connect_timeout)
        self._timeout, self._seconds = timeout, timeout.total_seconds()
        self._pause_statuses = _check_statuses(self.name, pause_statuses)
        _check_numbers(self.name, method=method, batch=batch, concurrency=concurrency)
        keys = read_keys(signing_secret, name=self.name)
        plain_url, login = _split_login(url)
        given = check_headers(headers or {}, name=self.name, is_signed=bool(keys))
        if login and any(each.lower() == "authorization" for each in given):
            raise ConfigError(
                f"Sink {self.name!r}: give a login in the url or an Authorization among headers, not both"
            )
        if batch > 1 and message not in (None, "cloudevents"):
            raise ConfigError(f"Sink {self.name!r} message: a batch is an array of CloudEvents, got {message!r}")
        if batch > 1 and cloudevents == "binary":
            raise ConfigError(f"Sink {self.name!r} cloudevents: a batch is an array of structured ones; leave it out")
        self._form = RequestForm(
            plain_url,
            name=self.name,
            method=method,
            headers={"user-agent": f"pillarbox/{version('pillarbox')}", **login, **_lower(given)},
            signer=Signer(keys) if keys else None,
            render=make_form(
                "cloudevents" if batch > 1 and message is None else message,
                broker="http",
                sink=self.name,
                cloudevents="structured" if batch > 1 else cloudevents,
                cloudevents_source=cloudevents_source,
                folds_case=True,
            ),
        )
        if batch > 1 and self._form.has_fields:
            raise ConfigError(f"Sink {self.name!r}: a batch has one address; the url has fields of the event in it")
        # An answer may repeat what it was sent.
        self._secrets = Secrets(url, {"authorization": [*login.values(), *given.values()]})
        self._slots = asyncio.Semaphore(concurrency)
        self._transport = self._make_transport(client, tls, refuse_private=refuse_private, allow=allow, proxy=proxy)

    @classmethod
    def from_url(cls, url: SinkUrl) -> HttpSink:
        is_secure = url.scheme == "https"
        options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
        tls = make_tls_context(options, sink=url.name) if is_secure else None
        chosen = {name: value for name, value in options.items() if name not in TLS_OPTIONS}
        return cls(url.text, name=url.name, tls=tls, **chosen)

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        """Connect: a request would be an event, so more than that is not tried."""
        try:
            await self._transport.check()
        except DOWN as error:
            raise self._unavailable(error) from error

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        groups = group_by_key(claims)
        if self._batch > 1:
            groups = _pack(groups, self._batch)
        return await send_groups(
            claims, groups, self._send, slots=self._slots, width=self._concurrency, size=self._batch
        )

    async def close(self) -> None:
        await self._transport.close()

    async def _send(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        try:
            return await (self._send_one(claims[0]) if self._batch == 1 else self._send_batch(claims))
        finally:
            self._slots.release()

    async def _send_one(self, claim: Claim) -> Sequence[Outcome]:
        try:
            request = self._form.make(claim.event)
        except Refused as error:
            return [Dead(self._secrets.hide(str(error)))]
        return [await self._exchange(request)]

    async def _send_batch(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        documents = dict(make_each(claims, self._form.make_document, outcomes))
        try:
            await self._send_part(claims, documents, outcomes)
        except SinkUnavailable as outage:
            outage.outcomes = outcomes
            raise
        return outcomes

    async def _send_part(
        self, claims: Sequence[Claim], documents: Mapping[int, bytes], outcomes: list[Outcome]
    ) -> set[str]:
        """Send documents as one array, or by halves until one alone is to blame; returns the keys that failed."""
        if not documents:
            return set()
        events = [claims[position].event for position in documents]
        is_alone = len(events) == 1
        outcome = await self._exchange(self._form.make_batch(events, list(documents.values())), is_alone=is_alone)
        if is_alone or isinstance(outcome, Delivered):
            for position in documents:
                outcomes[position] = outcome
            return set() if isinstance(outcome, Delivered) else {event.key for event in events if event.key is not None}
        if isinstance(outcome, Retry) and outcome.after is not None:
            raise SinkUnavailable(f"Sink {self.name}: {outcome.error}", after=outcome.after)
        positions, middle = list(documents), len(documents) // 2
        failed = await self._send_part(claims, {each: documents[each] for each in positions[:middle]}, outcomes)
        rest = {each: documents[each] for each in positions[middle:] if claims[each].event.key not in failed}
        return failed | await self._send_part(claims, rest, outcomes)

    async def _exchange(self, request: Outgoing, *, is_alone: bool = True) -> Outcome:
        """Send a request and judge its answer; without one in time the event is retried, if it was alone."""
        limit = asyncio.timeout(self._seconds)
        reply: Reply | None = None
        try:
            async with limit:
                reply = await self._transport.send(request)
                answer = await read_answer(reply)
        except (TimeoutError, *SLOW) as error:
            if type(error) is TimeoutError and not limit.expired():
                raise self._unavailable(error) from error
            if reply is not None and is_acknowledged(reply.status):
                return DELIVERED
            text = f"no answer within {format_duration(self._timeout)}"
            if not is_alone:
                raise SinkUnavailable(f"Sink {self.name}: {text}") from error
            return Retry(text, cause=error)
        except UNSENDABLE as error:
            return Dead(f"The request cannot be sent: {self._secrets.hide(str(error))}")
        except DOWN as error:
            raise self._unavailable(error) from error
        if is_acknowledged(answer.status):
            return DELIVERED
        return judge(
            answer._replace(text=self._secrets.hide(answer.text)), name=self.name, pause_statuses=self._pause_statuses
        )

    def _unavailable(self, error: BaseException) -> SinkUnavailable:
        return SinkUnavailable(f"Sink {self.name}: {self._secrets.hide(describe_error(error))}")

    def _make_transport(
        self,
        client: httpx.AsyncClient | None,
        tls: ssl.SSLContext | None,
        *,
        refuse_private: bool,
        allow: Sequence[str],
        proxy: str | None,
    ) -> Transport:
        if allow and not refuse_private:
            raise ConfigError(f"Sink {self.name!r} allow: it makes exceptions of refuse_private, which is off")
        if proxy is not None and refuse_private:
            raise ConfigError(f"Sink {self.name!r} proxy: a proxy connects where it likes; refuse_private cannot hold")
        if client is not None:
            if tls is not None or proxy is not None or refuse_private:
                raise ConfigError(
                    f"Sink {self.name!r}: tls, proxy and refuse_private are the client's, if one is given"
                )
            return ClientTransport(client, connect_timeout=self._connect_timeout)
        tls = tls or ssl.create_default_context()
        if proxy is not None:
            url = _read_proxy(self.name, proxy)
            return ProxyTransport(url, tls=tls, connect_timeout=self._connect_timeout, connections=self._concurrency)
        origin = self._form.origin
        guard = _make_guard(self.name, allow) if refuse_private else None
        if guard is not None and not guard.permits_host(origin.host):
            raise ConfigError(
                f"Sink {self.name!r}: {origin.host} is not a public address and refuse_private is on; "
                "add its network to allow"
            )
        return DirectTransport(origin, tls=tls, connect_timeout=self._connect_timeout, guard=guard)


def _pack(groups: Sequence[list[int]], size: int) -> list[list[int]]:
    """Put the groups of keys together until they fill a request; a key stays in one."""
    packed: list[list[int]] = [[]]
    for group in groups:
        if packed[-1] and len(packed[-1]) + len(group) > size:
            packed.append([])
        packed[-1].extend(group)
    return [sorted(each) for each in packed]


def _split_login(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    login, at, server = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    user, _, password = login.partition(":")
    token = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode("ascii")
    return urlunsplit(parts._replace(netloc=server)), {"authorization": f"Basic {token}"}


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _make_guard(name: str, allow: Sequence[str]) -> Guard:
    try:
        return Guard(allow)
    except ValueError as error:
        raise ConfigError(f"Sink {name!r} allow: expected networks such as '10.1.0.0/16': {error}") from None


def _read_proxy(name: str, proxy: object) -> httpx.URL:
    try:
        url = httpx.URL(proxy) if isinstance(proxy, str) else None
    except (httpx.InvalidURL, ValueError):
        url = None
    if url is None or url.scheme not in ("http", "https") or not url.host:
        # It may contain a password: not shown.
        raise ConfigError(f"Sink {name!r} proxy: expected http://host:port or https://host:port")
    return url


def _choose_connect_timeout(name: str, timeout: object, connect_timeout: object) -> float:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ConfigError(f"Sink {name!r} timeout: expected a duration above zero, got {timeout!r}")
    # Connecting and the TLS handshake each get it, and time must be left for an answer.
    longest = timeout / 3
    if connect_timeout is None:
        return min(CONNECT_TIMEOUT, longest).total_seconds()
    if not isinstance(connect_timeout, timedelta) or not timedelta(0) < connect_timeout <= longest:
        raise ConfigError(
            f"Sink {name!r} connect_timeout: expected at most a third of timeout, "
            f"{format_duration(longest)}; got {connect_timeout!r}"
        )
    return connect_timeout.total_seconds()


def _check_numbers(name: str, *, method: object, batch: object, concurrency: object) -> None:
    if method not in ("POST", "PUT"):
        raise ConfigError(f"Sink {name!r} method: expected POST or PUT, got {method!r}")
    for what, value in (("batch", batch), ("concurrency", concurrency)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"Sink {name!r} {what}: expected a whole number of 1 or more, got {value!r}")


def _check_statuses(name: str, statuses: object) -> frozenset[int]:
    found = list(statuses) if isinstance(statuses, Collection) and not isinstance(statuses, str) else [None]
    if not all(type(each) is int and 400 <= each < 600 for each in found):
        raise ConfigError(f"Sink {name!r} pause_statuses: expected a list of numbers from 400 to 599, got {statuses!r}")
    return frozenset(each for each in found if each is not None)
