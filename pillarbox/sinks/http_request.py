"""An event as an HTTP request: its address, its headers within what HTTP allows, and its signature.

Header values of printable ASCII are sent as they are. Any other is percent-encoded as a whole, as CloudEvents does it
with its own headers; those are encoded always, so that they can be decoded always.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
import orjson

from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.sinks.forms import Render
from pillarbox.sinks.http_transport import Outgoing
from pillarbox.sinks.message import PREFIX
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template

BATCH_TYPE: Final = "application/cloudevents-batch+json"
_FRAMING: Final = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "proxy-connection"),
        *("te", "trailer", "upgrade", "expect"),
    }
)
_OURS: Final = frozenset({"idempotency-key", "accept-encoding"})
_SIGNATURE: Final = frozenset({"webhook-id", "webhook-timestamp", "webhook-signature"})

_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_PLAIN: Final = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_CE_PLAIN: Final = re.compile(r"[!#$&-~]*")
# What CloudEvents leaves as it is: printable ASCII but for the blank, the quotation mark and the percent sign.
_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class Signer:
    """Signs requests the way of Standard Webhooks, once with each key: while keys change, both are good."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    def sign(self, id: str, body: bytes) -> list[tuple[bytes, bytes]]:
        timestamp = str(int(time.time()))
        signed = b".".join((id.encode(), timestamp.encode(), body))
        signatures = [b"v1," + b64encode(hmac.digest(key, signed, hashlib.sha256)) for key in self._keys]
        return [
            (b"webhook-id", id.encode()),
            (b"webhook-timestamp", timestamp.encode()),
            (b"webhook-signature", b" ".join(signatures)),
        ]


class RequestForm:
    """How a sink writes its requests. `url` has no login in it; `headers` are sent with every request."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        method: str,
        headers: Mapping[str, str],
        signer: Signer | None,
        render: Render,
    ) -> None:
        self._name = name
        self._method = method
        self._render = render
        self._signer = signer
        self._common = [(each.lower().encode(), value.encode()) for each, value in headers.items()]
        self._reserved = _FRAMING | _OURS | {each.lower() for each in headers} | (_SIGNATURE if signer else set())
        self._origin, self._target = _read_target(url, name)
        self._cached_url = lru_cache(1024)(self._parse_url)
        self._cached_name = lru_cache(1024)(self._check_name)
        if self._target.is_constant:
            try:
                self._parse_url(self._target.text)
            except Refused as error:
                raise ConfigError(str(error)) from None

    @property
    def origin(self) -> httpx.URL:
        return self._origin

    @property
    def has_fields(self) -> bool:
        """Whether the address depends on the event."""
        return not self._target.is_constant

    def make(self, event: Event) -> Outgoing:
        """Make the request for an event; raises `Refused` when there is none."""
        url = self._cached_url(self._target.fill(event))
        message = self._render(event)
        lines = []
        for name, value in message.headers.items():
            key = self._cached_name(name)
            lines.append((key, _encode(value, _CE_PLAIN if key.startswith(b"ce-") else _PLAIN)))
        return self._finish(url, str(event.id), lines, message.body)

    def make_document(self, event: Event) -> bytes:
        """Make an event's part of a batch. The event's own headers have no place but an attribute of their own."""
        message = self._render(event)
        own = {name: value for name, value in message.headers.items() if name in event.headers}
        if not own:
            return message.body
        return message.body[:-1] + b',"headers":' + orjson.dumps(orjson.dumps(own).decode()) + b"}"

    def make_batch(self, events: Sequence[Event], documents: Sequence[bytes]) -> Outgoing:
        """Make one request of several events; its id is the same for the same events, and no other."""
        ids = hashlib.sha256(b"".join(event.id.bytes for event in events)).hexdigest()
        body = b"[" + b",".join(documents) + b"]"
        url = self._cached_url(self._target.text)
        return self._finish(url, f"batch-{ids[:32]}", [(b"content-type", BATCH_TYPE.encode())], body)

    def _finish(self, url: httpx.URL, id: str, lines: list[tuple[bytes, bytes]], body: bytes) -> Outgoing:
        lines += self._common
        lines += ((b"idempotency-key", id.encode()), (b"accept-encoding", b"identity"))
        if self._signer is not None:
            lines += self._signer.sign(id, body)
        return Outgoing(self._method, url, lines, body)

    def _check_name(self, name: str) -> bytes:
        if _TOKEN.fullmatch(name) is None:
            raise Refused(f"Header {name!r} cannot be sent: HTTP allows letters, digits and !#$%&'*+-.^_`|~ in a name")
        lowered = name.lower()
        return (PREFIX + lowered if lowered in self._reserved else lowered).encode()

    def _parse_url(self, target: str) -> httpx.URL:
        # httpx would resolve them, and a filled-in value must not lead to another path.
        if self.has_fields and not {".", ".."}.isdisjoint(target.partition("?")[0].split("/")):
            raise Refused(f"Sink {self._name!r}: the address for this event would have a segment '.' or '..'")
        try:
            return self._origin.copy_with(raw_path=target.encode("ascii"))
        except (httpx.InvalidURL, ValueError) as error:
            raise Refused(f"Sink {self._name!r}: the address for this event is no url: {error}") from None


def _read_target(url: str, name: str) -> tuple[httpx.URL, Template]:
    parts = urlsplit(url)
    try:
        origin = httpx.URL(f"{parts.scheme}://{parts.netloc}/")
        is_port = origin.port is None or 0 < origin.port < 65_536
        is_good = bool(origin.host) and is_port and not set("{}") & set(parts.netloc)
    except (httpx.InvalidURL, ValueError):
        is_good = False
    if not is_good or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"Sink {name!r}: expected http://host/path or https://host/path, with a host that is plain and a port "
            "up to 65535"
        )
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~{}")
    query = "?" + quote(parts.query, safe="/?%:@!$&'()*+,;=~{}") if parts.query else ""
    shown = "/…" if parts.path.strip("/") or query else "/"
    template = Template(
        path + query, what=f"Sink {name!r} url", escape=lambda value: quote(value, safe=""), shown=shown
    )
    return origin, template


def _encode(value: str, plain: re.Pattern[str]) -> bytes:
    if plain.fullmatch(value) is None:
        value = quote(value, safe=_SAFE, errors="replace")
    return value.encode("ascii")


def check_headers(headers: object, *, name: str, is_signed: bool) -> dict[str, str]:
    """Return headers for every request; errors name the header and never show its value."""
    if not isinstance(headers, Mapping):
        raise ConfigError(f"Sink {name!r} headers: expected a table of names and texts")
    taken = _FRAMING | _OURS | {"content-type"} | (_SIGNATURE if is_signed else frozenset())
    for each, value in headers.items():
        if not isinstance(each, str) or _TOKEN.fullmatch(each) is None:
            raise ConfigError(f"Sink {name!r} headers: expected the name of a header, got {each!r}")
        if each.lower() in taken:
            raise ConfigError(f"Sink {name!r} headers: {each!r} is set by the sink itself; leave it out")
        if not isinstance(value, str) or _PLAIN.fullmatch(value) is None:
            raise ConfigError(f"Sink {name!r} headers: expected printable ASCII without outer blanks for {each!r}")
    return dict(headers)


def read_keys(secrets: object, *, name: str) -> list[bytes]:
    """Return the keys of `whsec_…` secrets, one or several; errors do not show them."""
    given = [secrets] if isinstance(secrets, str) else secrets
    keys = [_read_key(each) for each in given] if isinstance(given, list | tuple) else [None]
    if None in keys:
        raise ConfigError(
            f"Sink {name!r} signing_secret: expected 'whsec_' and base64, or a list of such; it is not shown here"
        )
    return [key for key in keys if key is not None]


def _read_key(secret: object) -> bytes | None:
    if not isinstance(secret, str) or not secret.startswith("whsec_"):
        return None
    text = secret.removeprefix("whsec_")
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True) or None
    except ValueError:
        return None
