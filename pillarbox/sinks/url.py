"""Reading a sink's URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pillarbox.errors import ConfigError
from pillarbox.urls import WEB_SCHEMES, mask_url


@dataclass(frozen=True, slots=True)
class SinkUrl:
    """A sink's URL taken apart, as an adapter's factory receives it.

    `text` is the whole URL with its secrets; `location` is what stands between scheme and options, decoded.
    `options` are those of the query (texts) and those given beside the URL. A web address keeps its query to itself:
    there it is a part of `text` alone.
    """

    text: str = field(repr=False)
    name: str
    scheme: str
    location: str = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)

    def refuse_location(self) -> None:
        """Raise `ConfigError` when anything follows the scheme, for a sink that needs nothing."""
        if self.location:
            raise ConfigError(f"Sink {self.name!r}: expected '{self.scheme}:' alone, got {mask_url(self.text)!r}")

    def refuse_options(self, *known: str) -> None:
        """Raise `ConfigError` when an option is none of those `known`."""
        for option in self.options:
            if option in known:
                continue
            near = get_close_matches(option, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            takes = f"takes the options {', '.join(known)}" if known else "takes no options"
            raise ConfigError(f"Sink {self.name!r}: unknown option {option!r}; scheme {self.scheme!r} {takes}.{hint}")


def parse_sink_url(url: object, *, name: str | None, options: Mapping[str, Any]) -> SinkUrl:
    """Take a sink's URL apart; `name` is what errors call the sink, the masked URL when not given."""
    if not isinstance(url, str):
        what = f"Sink {name!r}" if name else "Sink"
        raise ConfigError(f"{what}: expected a url, got {url!r}")
    shown = mask_url(url)
    what = f"Sink {name or shown!r}"
    if not url.isprintable() or url != url.strip():
        raise ConfigError(f"{what}: expected a url without control characters and outer blanks, got {shown!r}")
    try:
        parts = urlsplit(url)
        # The query of a web address belongs to the destination: a sink's options stand beside the url only.
        query = "" if parts.scheme in WEB_SCHEMES else parts.query
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        # The parser's own message may quote the part of the URL that holds the password.
        raise ConfigError(f"{what}: the url {shown!r} cannot be read; escape special characters with %") from error
    if parts.scheme in _WITH_PORTS and not _has_ports(parts.netloc):
        raise ConfigError(
            f"{what}: expected {parts.scheme}://host:port with a number for the port, got {shown!r}; escape special "
            "characters of a password with %"
        )
    if parts.fragment:
        raise ConfigError(f"{what}: expected a url without a fragment, got {shown!r}; write '#' as '%23'")
    merged: dict[str, Any] = {}
    for option, value in (*given, *options.items()):
        if option in merged:
            raise ConfigError(f"{what}: option {option!r} is given twice; give it in the url or beside it, once")
        merged[option] = value
    authority = f"//{parts.netloc}" if parts.netloc else ""
    return SinkUrl(
        text=url,
        name=name or shown,
        scheme=parts.scheme,
        location=unquote(authority + parts.path),
        options=MappingProxyType(merged),
    )


# Other packages' schemes may write what they like after the colon.
_WITH_PORTS: Final = WEB_SCHEMES | frozenset(
    ["kafka", "nats", "tls", "amqp", "amqps", "redis", "rediss", "mqtt", "mqtts", "postgresql", "mysql", "mariadb"]
)


def _has_ports(authority: str) -> bool:
    """Whether ports are numbers; one that is not is a part of a password with a bare / ? or #, or lacks its @."""
    ports = (host.rpartition("]")[2].partition(":")[2] for host in authority.rpartition("@")[2].split(","))
    return all(not port or port.isdigit() or "{" in port for port in ports)
