"""What a NATS sink's url and options say: servers, login, TLS, and the stream to make."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.sinks.forms import FORM_OPTIONS, form_options
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.tls import TLS_OPTIONS, make_tls_context
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_text, read_texts

try:
    import nkeys
    from nats.errors import Error as ClientError
    from nats.js import JetStreamContext
    from nats.js.api import DiscardPolicy, StorageType, StreamConfig
    from nats.js.errors import NotFoundError
except ImportError as error:
    raise MissingExtra("NATS", "nats") from error

# Below the time for which a relay may hold its rows.
TIMEOUT: Final = timedelta(seconds=4)
_CREDENTIALS: Final = re.compile(
    rb"-BEGIN NATS USER JWT-+\s+(\S+)\s.*-BEGIN USER NKEY SEED-+\s+(SU[A-Z2-7]+)\s", re.DOTALL
)
_STREAM_OPTIONS: Final[dict[str, Read]] = {
    "subjects": read_texts,
    "storage": one_of("file", "memory"),
    "replicas": read_number,
    "max_age": read_pause,
    "max_messages": read_number,
    "max_bytes": read_number,
    "discard": one_of("old", "new"),
    "duplicate_window": read_pause,
}
_OPTIONS: Final[dict[str, Read]] = {
    "subject": read_text,
    "id_suffix": read_text,
    "timeout": read_pause,
    "domain": read_text,
    "api_prefix": read_text,
    "inbox_prefix": read_text,
    "nkey_seed": read_text,
    "credentials": read_text,
    "create": read_switch,
    "stream": read_text,
    **_STREAM_OPTIONS,
    **FORM_OPTIONS,
}


@dataclass(frozen=True)
class Stream:
    """A stream to be made when there is none of this name; the server's defaults for what is None."""

    name: str
    subjects: Sequence[str]
    storage: Literal["file", "memory"] = "file"
    replicas: int = 1
    max_age: timedelta | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    discard: Literal["old", "new"] = "old"
    duplicate_window: timedelta | None = None

    async def make(self, jetstream: JetStreamContext) -> None:
        try:
            await jetstream.stream_info(self.name)
        except NotFoundError:
            await jetstream.add_stream(self.settings())

    def settings(self) -> StreamConfig:
        return StreamConfig(
            name=self.name,
            subjects=list(self.subjects),
            storage=StorageType(self.storage),
            num_replicas=self.replicas,
            max_age=None if self.max_age is None else self.max_age.total_seconds(),
            max_msgs=self.max_messages,
            max_bytes=self.max_bytes,
            discard=DiscardPolicy(self.discard),
            duplicate_window=0 if self.duplicate_window is None else self.duplicate_window.total_seconds(),
        )


def read_nats_url(url: SinkUrl) -> dict[str, Any]:
    """Return the arguments of the sink that the url describes."""
    is_secure = url.scheme == "tls"
    options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
    if read_path(url):
        raise ConfigError(f"Sink {url.name!r}: expected nothing after the servers, got {read_path(url)!r}")
    connect = _read_login(url, options)
    if is_secure:
        connect["tls"] = make_tls_context(options, sink=url.name)
    if "inbox_prefix" in options:
        connect["inbox_prefix"] = options["inbox_prefix"]
    timeout: timedelta = options.get("timeout", TIMEOUT)
    connect["connect_timeout"] = timeout.total_seconds()
    names = ("subject", "id_suffix", "domain", "api_prefix")
    chosen: dict[str, Any] = {name: options[name] for name in names if name in options}
    return {
        "servers": [f"{url.scheme}://{_join(host, port)}" for host, port in read_servers(url, port=4222)],
        "name": url.name,
        "stream": _read_stream(url, options),
        "timeout": timeout,
        "connect": connect,
        **chosen,
        **form_options(options),
    }


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_login(url: SinkUrl, options: dict[str, Any]) -> dict[str, Any]:
    user, password = read_login(url)
    ways = [name for name in ("nkey_seed", "credentials") if name in options]
    if len(ways) + (user is not None) > 1:
        raise ConfigError(f"Sink {url.name!r}: expected one of a login in the url, nkey_seed and credentials")
    if "credentials" in options:
        path = Path(options["credentials"])
        try:
            read_credentials(path)
        except ClientError as error:
            raise ConfigError(f"Sink {url.name!r} credentials: {error}") from None
        # Read at each login, because such files are replaced before they expire.
        return {
            "user_jwt_cb": lambda: read_credentials(path)[0],
            "signature_cb": lambda nonce: sign(nonce, read_credentials(path)[1]),
        }
    if "nkey_seed" in options:
        return {"nkeys_seed_str": _check_seed(options["nkey_seed"], url)}
    if user is None:
        return {}
    return {"token": user} if password is None else {"user": user, "password": password}


def read_credentials(path: Path) -> tuple[bytes, bytes]:
    """Return the token and the seed of a credentials file. (The client's own reader never ends on a wrong one.)"""
    try:
        found = _CREDENTIALS.search(path.read_bytes())
    except OSError as error:
        raise ClientError(f"the file {str(path)!r} cannot be read: {error.strerror}") from None
    if found is None:
        raise ClientError(f"expected a user's JWT and NKEY seed in {str(path)!r}")
    return found[1], found[2]


def sign(nonce: str, seed: bytes) -> bytes:
    pair = nkeys.from_seed(bytearray(seed))
    signature = pair.sign(nonce.encode())
    pair.wipe()
    return b64encode(signature)


def _check_seed(seed: str, url: SinkUrl) -> str:
    try:
        nkeys.from_seed(bytearray(seed.strip().encode())).wipe()
    except Exception:
        # The seed is a secret, and the library's message may quote it.
        raise ConfigError(f"Sink {url.name!r} nkey_seed: expected the seed of a user, beginning with SU") from None
    return seed


def _read_stream(url: SinkUrl, options: dict[str, Any]) -> Stream | None:
    given = {name: options[name] for name in _STREAM_OPTIONS if name in options}
    if not options.get("create"):
        unused = [name for name in ("stream", *given) if name in options]
        if unused:
            raise ConfigError(f"Sink {url.name!r} {unused[0]}: it is for a stream to be made; give create=true as well")
        return None
    for name in ("stream", "subjects"):
        if name not in options:
            raise ConfigError(f"Sink {url.name!r} create: give {name} as well")
    return Stream(options["stream"], given.pop("subjects"), **given)
