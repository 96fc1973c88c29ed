"""How the HTTP sink connects: directly, by a guard's leave, or through a proxy that was asked for.

Proxies, certificates and logins that the environment names are not used: a relay does what its settings say.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import httpcore
import httpx

from pillarbox.sinks.guard import Guard, GuardedBackend

# Many servers close an idle connection after five seconds: let it go before, rather than send into its end.
KEEP_IDLE = 4.0


class DirectTransport(httpx.AsyncBaseTransport):
    """Kept connections to one origin, as many as there are requests at once.

    The sink limits those itself. A pool would do it again, and look at every connection for every request.
    """

    def __init__(self, origin: httpx.URL, *, tls: ssl.SSLContext, guard: Guard | None = None) -> None:
        self._tls = tls
        self._backend: httpcore.AsyncNetworkBackend = (
            httpcore.AnyIOBackend() if guard is None else GuardedBackend(guard)
        )
        self._origin = httpcore.Origin(origin.raw_scheme, origin.raw_host, _port(origin))
        self._idle: deque[httpcore.AsyncHTTPConnection] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        target = httpcore.URL(
            scheme=self._origin.scheme, host=self._origin.host, port=self._origin.port, target=request.url.raw_path
        )
        sent = httpcore.Request(
            request.method,
            target,
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        connection = await self._take()
        try:
            response = await connection.handle_async_request(sent)
        except _ERRORS as error:
            raise _translate(error) from error
        body = _Body(response, lambda: self._put_back(connection))
        return httpx.Response(response.status, headers=response.headers, stream=body)

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

    async def _put_back(self, connection: httpcore.AsyncHTTPConnection) -> None:
        if connection.is_idle():
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def connect(self, url: httpx.URL, *, timeout: float) -> None:
        """Connect and say goodbye; raises what a request would raise."""
        is_secure = url.scheme == "https"
        try:
            stream = await self._backend.connect_tcp(url.raw_host.decode("ascii"), _port(url), timeout=timeout)
            try:
                if is_secure:
                    stream = await stream.start_tls(self._tls, server_hostname=url.raw_host.decode(), timeout=timeout)
            finally:
                await stream.aclose()
        except _ERRORS as error:
            raise _translate(error) from error

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.popleft().aclose()


class ProxiedTransport(httpx.AsyncHTTPTransport):
    """Everything goes through one proxy."""

    def __init__(self, proxy: httpx.URL, *, tls: ssl.SSLContext, connections: int) -> None:
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_IDLE
        )
        super().__init__(verify=tls, trust_env=False, limits=limits, proxy=proxy)
        self._proxy = proxy

    async def connect(self, url: httpx.URL, *, timeout: float) -> None:
        """Connect to the proxy; what is behind it only a request can tell."""
        try:
            stream = await httpcore.AnyIOBackend().connect_tcp(self._proxy.host, _port(self._proxy), timeout=timeout)
        except _ERRORS as error:
            raise _translate(error) from error
        await stream.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response, end: Callable[[], Awaitable[None]]) -> None:
        self._response = response
        self._end = end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._response.aiter_stream():
                yield part
        except _ERRORS as error:
            raise _translate(error) from error

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._end()


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


_ERRORS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)


def _translate(error: Exception) -> Exception:
    # httpx names its exceptions as httpcore does.
    kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__, httpx.TransportError)
    return kind(str(error))
