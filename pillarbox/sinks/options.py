"""A sink's options from its URL, its table in the file or its keyword arguments, checked and typed."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from pillarbox.errors import ConfigError
from pillarbox.sinks.url import SinkUrl
from pillarbox.urls import mask_url
from pillarbox.values import Given, Read


def read_options(url: SinkUrl, readers: dict[str, Read]) -> dict[str, Any]:
    """Return the options that were given, each read by its reader; an unknown one is refused."""
    url.refuse_options(*readers)
    return {
        name: readers[name](Given(value, f"Sink {url.name!r} {name}", is_text=isinstance(value, str)))
        for name, value in url.options.items()
    }


def read_servers(url: SinkUrl, *, port: int) -> list[tuple[str, int]]:
    """Return the servers of `scheme://user:password@host:port,host:port/…`, with `port` where none is given."""
    _, _, listed = urlsplit(url.text).netloc.rpartition("@")
    return [_read_server(url, each.strip(), port) for each in listed.split(",")]


def _read_server(url: SinkUrl, text: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        found = parts.hostname, parts.port or port
    except ValueError:
        found = None, 0
    host, number = found
    if not host:
        raise ConfigError(f"Sink {url.name!r}: expected {url.scheme}://host:port, got {mask_url(url.text)!r}")
    return host, number


def read_login(url: SinkUrl) -> tuple[str | None, str | None]:
    """Return user and password of the URL, decoded."""
    login, at, _ = urlsplit(url.text).netloc.rpartition("@")
    user, colon, password = login.partition(":")
    return (unquote(user) or None if at else None), (unquote(password) if colon else None)


def read_path(url: SinkUrl) -> str:
    """Return what follows the servers, decoded and without its first slash."""
    return unquote(urlsplit(url.text).path.removeprefix("/"))
