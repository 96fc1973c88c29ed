"""How the HTTP sink connects: directly, by a guard's leave, through a proxy that was asked for, or with a client.

Proxies, certificates and logins that the environment names are not used: a relay does what its settings say.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

import httpcore
import httpx

from pillarbox.sinks.guard import Guard, GuardedBackend

# Many servers close an idle connection after five seconds: let it go before, rather than send into its end.
KEEP_IDLE: Final = 4.0

DOWN: Final = (
    httpx.TransportError,
    *(httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, httpcore.ProxyError),
    OSError,
)
SLOW: Final = (httpx.ReadTimeout, httpx.WriteTimeout, httpcore.ReadTimeout, httpcore.WriteTimeout)
UNSENDABLE: Final = (httpx.LocalProtocolError, httpcore.LocalProtocolError)
"""What sending raises when the destination is down, has no answer in time, or the request breaks HTTP's rules."""


class Outgoing(NamedTuple):
    """A request: all of its headers but those that frame it."""

    method: str
    url: httpx.URL
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Reply(NamedTuple):
    """An answer that has begun; it must be closed."""

    status: int
    headers: list[tuple[bytes, bytes]]
    parts: AsyncIterable[bytes]
    close: Callable[[], Awaitable[None]]


class Transport(Protocol):
    """Sends requests to one origin. `check` raises what sending would raise while it cannot be reached."""

    async def send(self, request: Outgoing) -> Reply: ...
    async def check(self) -> None: ...
    async def close(self) -> None: ...


class DirectTransport:
    """Kept connections, as many as there are requests at once.

    The sink limits those itself. The pool that httpx has would do it again, look at every connection for every request,
    and let nobody choose the address.
    """

    def __init__(
        self, origin: httpx.URL, *, tls: ssl.SSLContext, connect_timeout: float, guard: Guard | None = None
    ) -> None:
        self._tls = tls
        self._timeout = connect_timeout
        self._extensions = {"timeout": {"connect": connect_timeout}}
        self._backend: httpcore.AsyncNetworkBackend = (
            httpcore.AnyIOBackend() if guard is None else GuardedBackend(guard)
        )
        self._origin = httpcore.Origin(origin.raw_scheme, origin.raw_host, _port(origin))
        self._host = (b"host", origin.netloc)
        self._idle: deque[httpcore.AsyncHTTPConnection] = deque()

    async def send(self, request: Outgoing) -> Reply:
        origin = self._origin
        length = (b"content-length", b"%d" % len(request.body))
        sent = httpcore.Request(
            request.method,
            httpcore.URL(scheme=origin.scheme, host=origin.host, port=origin.port, target=request.url.raw_path),
            headers=[self._host, length, *request.headers],
            content=request.body,
            extensions=self._extensions,
        )
        connection = await self._take()
        response = await connection.handle_async_request(sent)
        assert isinstance(response.stream, AsyncIterable)
        return Reply(response.status, response.headers, response.stream, partial(self._end, response, connection))

    async def check(self) -> None:
        host = self._origin.host.decode("ascii")
        stream = await self._backend.connect_tcp(host, self._origin.port, timeout=self._timeout)
        try:
            if self._origin.scheme == b"https":
                stream = await stream.start_tls(self._tls, server_hostname=host, timeout=self._timeout)
        finally:
            await stream.aclose()

    async def close(self) -> None:
        while self._idle:
            await self._idle.popleft().aclose()

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            # The one that is idle longest: those that are too old come first.
            connection = self._idle.popleft()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            self._origin, ssl_context=self._tls, keepalive_expiry=KEEP_IDLE, network_backend=self._backend
        )

    async def _end(self, response: httpcore.Response, connection: httpcore.AsyncHTTPConnection) -> None:
        await response.aclose()
        if connection.is_idle():
            self._idle.append(connection)
        else:
            await connection.aclose()


class ProxyTransport:
    """Everything goes through one proxy. A check reaches no further than that."""

    def __init__(self, proxy: httpx.URL, *, tls: ssl.SSLContext, connect_timeout: float, connections: int) -> None:
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_IDLE
        )
        self._proxy = proxy
        self._timeout = connect_timeout
        self._transport = httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits, proxy=proxy)

    async def send(self, request: Outgoing) -> Reply:
        # Past the client, which would log the whole url and keep cookies.
        return _reply(await self._transport.handle_async_request(_as_request(request, self._timeout)))

    async def check(self) -> None:
        stream = await httpcore.AnyIOBackend().connect_tcp(self._proxy.host, _port(self._proxy), timeout=self._timeout)
        await stream.aclose()

    async def close(self) -> None:
        await self._transport.aclose()


class ClientTransport:
    """A client of the caller's, who opens and closes it."""

    def __init__(self, client: httpx.AsyncClient, *, connect_timeout: float) -> None:
        self._client = client
        self._timeout = connect_timeout

    async def send(self, request: Outgoing) -> Reply:
        sent = _as_request(request, self._timeout)
        return _reply(await self._client.send(sent, stream=True, follow_redirects=False))

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _as_request(request: Outgoing, connect_timeout: float) -> httpx.Request:
    timeouts = {"connect": connect_timeout, "read": None, "write": None, "pool": None}
    method, url, headers, body = request
    return httpx.Request(method, url, headers=headers, content=body, extensions={"timeout": timeouts})


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers.raw, response.aiter_raw(), response.aclose)


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
