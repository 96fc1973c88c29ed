"""How the HTTP sink connects: directly, by a guard's leave, or through a proxy that was asked for.

Proxies, certificates and logins that the environment names are not used: a relay does what its settings say.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import httpcore
import httpx

from pillarbox.sinks.guard import Guard, GuardedBackend

# Many servers close an idle connection after five seconds: let it go before, rather than send into its end.
KEEP_IDLE = 4.0


class DirectTransport(httpx.AsyncBaseTransport):
    """A pool of kept connections. httpx has no way to give its own one a network backend."""

    def __init__(self, *, tls: ssl.SSLContext, connections: int, guard: Guard | None = None) -> None:
        self._tls = tls
        self._backend: httpcore.AsyncNetworkBackend = (
            httpcore.AnyIOBackend() if guard is None else GuardedBackend(guard)
        )
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=connections,
            max_keepalive_connections=connections,
            keepalive_expiry=KEEP_IDLE,
            network_backend=self._backend,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        assert isinstance(request.stream, httpx.AsyncByteStream)
        try:
            response = await self._pool.handle_async_request(
                httpcore.Request(
                    request.method,
                    httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        except _ERRORS as error:
            raise _translate(error) from error
        return httpx.Response(response.status, headers=response.headers, stream=_Body(response))

    async def connect(self, url: httpx.URL, *, timeout: float) -> None:
        """Connect and say goodbye; raises what a request would raise."""
        is_secure = url.scheme == "https"
        try:
            stream = await self._backend.connect_tcp(
                url.raw_host.decode("ascii"), url.port or (443 if is_secure else 80), timeout=timeout
            )
            try:
                if is_secure:
                    stream = await stream.start_tls(self._tls, server_hostname=url.raw_host.decode(), timeout=timeout)
            finally:
                await stream.aclose()
        except _ERRORS as error:
            raise _translate(error) from error

    async def aclose(self) -> None:
        await self._pool.aclose()


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
        port = self._proxy.port or (443 if self._proxy.scheme == "https" else 80)
        try:
            stream = await httpcore.AnyIOBackend().connect_tcp(self._proxy.host, port, timeout=timeout)
        except _ERRORS as error:
            raise _translate(error) from error
        await stream.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._response.aiter_stream():
                yield part
        except _ERRORS as error:
            raise _translate(error) from error

    async def aclose(self) -> None:
        await self._response.aclose()


_ERRORS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)


def _translate(error: Exception) -> Exception:
    # httpx names its exceptions as httpcore does.
    kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__, httpx.TransportError)
    return kind(str(error))
