"""Connections that refuse addresses of private networks, whatever a name resolves to.

The address that was checked is the one that is connected to: a name that resolves to something else a moment later
(DNS rebinding) gains nothing. Server name and certificate are still those of the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final

import httpcore

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# Global by their numbers, but: the host's own control plane on Azure, relays of 6to4, and documentation.
_NOT_PUBLIC: Final = (IPv4Network("168.63.129.16/32"), IPv4Network("192.88.99.0/24"), IPv6Network("3fff::/20"))


def is_public(address: Address) -> bool:
    """Whether an address is one of the public Internet; one that carries an IPv4 address is judged by that."""
    if isinstance(address, IPv6Address):
        inner = _carried(address)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_V6:
            return False
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return not any(address in network for network in _NOT_PUBLIC if network.version == address.version)


def _carried(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


class Guard:
    """Says which addresses may be connected to: public ones, and those of the networks in `allow`."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow: list[Network] = [ip_network(each) for each in allow]

    def permits(self, address: Address) -> bool:
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return is_public(address) or any(
            address in network for network in self._allow if network.version == address.version
        )

    def permits_host(self, host: str) -> bool:
        """Whether a host of a url may stand there: a name always, an address if it is permitted."""
        try:
            return self.permits(ip_address(host))
        except ValueError:
            return True


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Resolves a name, and connects to those of its addresses that the guard permits."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: httpcore.ConnectError | None = None
        try:
            async with asyncio.timeout(timeout):
                for address in await self._resolve(host, port):
                    try:
                        return await self._backend.connect_tcp(
                            str(address), port, local_address=local_address, socket_options=socket_options
                        )
                    except httpcore.ConnectError as error:
                        failure = error
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection to {host!r} within {timeout:g} s") from error
        assert failure is not None
        raise failure

    async def _resolve(self, host: str, port: int) -> list[Address]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = [ip_address(each[4][0]) for each in found]
        permitted = [address for address in addresses if self._guard.permits(address)]
        if not permitted:
            shown = ", ".join(map(str, addresses))
            raise httpcore.ConnectError(f"{host!r} is at {shown}, which is not public and refuse_private is on")
        return permitted
