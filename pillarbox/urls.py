"""Urls and the secrets in them: the one place that knows what of a url, an option or an error text may be shown.

A password that should have been escaped may contain /, ?, # or another @. So everything between the scheme and the
last @ counts as login, whatever a parser makes of it. An @ behind a ? may also stand in an option: then nothing behind
the servers is shown, and the url of a database is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

import sqlalchemy as sa

from pillarbox.errors import ConfigError

MASK: Final = "***"

WEB_SCHEMES: Final = frozenset({"http", "https"})
"""Schemes whose path and query belong to the destination; a webhook's path is often its secret."""

_SHORTEST: Final = 4
"""A shorter secret is not looked for in texts: it would be found everywhere."""

_TOKEN: Final = 12

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?://)?")
_USER: Final = re.compile(r"[\w.%+~-]*")
_AUTHORITY: Final = re.compile(r"[^/?#]*")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]*\]?|[^:]*)(?::[0-9]{0,5})?")
_SECRET_NAME: Final = re.compile(
    r"pass|pwd|secret|token|key|credential|auth|sign?ature|sig|pem|assertion|dsn|jwt|bearer|cookie", re.IGNORECASE
)
# Keys of events, and where they are taken from.
_OPEN_NAMES: Final = frozenset({"key", "key_from", "routing_key", "partition_key"})
# Also as other programs write them: "host=db;password=…".
_OPTION: Final = re.compile(r"([^=&?;#/,\s]+)=")
# Not /: a password in base64 may have one, and end with =.
_IN_LOGIN: Final = re.compile(r"(?:^|[?&;#,\s])([^=&?;#/,:\s]+)=")
# As the options of drivers and brokers are called; what stands before another = may be a part of a password.
_PLAIN_OPTION: Final = re.compile(r"[a-z][a-z0-9_.-]*=")
_OPTION_NAMES: Final = re.compile(rf"(?<=[?&;\s]){_PLAIN_OPTION.pattern}")
_RESERVED: Final = re.compile(r"[@:/?#&=\[\],;\s]+")
# Fields of the event, in { }, are no part of the address that is given.
_BETWEEN: Final = re.compile(r"[/?&=]|\{[^{}]*\}")
_WORD: Final = re.compile(r"[a-z]{0,11}|v[0-9]+")


def is_secret_name(name: str) -> bool:
    """Whether an option, a header or a key of this name has a value that nobody must see."""
    return name.lower() not in _OPEN_NAMES and _SECRET_NAME.search(name) is not None


# -- a url -------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    scheme: str
    """With its colon and slashes; empty when the text has none."""
    login: str | None
    rest: str

    @property
    def is_doubtful(self) -> bool:
        """Whether the @ may be a part of an option."""
        return self.login is not None and ("?" in self.login or _has_secret_option(self.login))


def _take_apart(url: str) -> _Parts:
    match = _SCHEME.match(url)
    scheme = match[0] if match else ""
    login, at, rest = url[len(scheme) :].rpartition("@")
    return _Parts(scheme, login if at else None, rest)


def _has_secret_option(login: str) -> bool:
    return any(is_secret_name(unquote(match[1])) for match in _IN_LOGIN.finditer(login))


def is_doubtful(url: str) -> bool:
    """Whether a bare @ may belong to the login or to an option: whoever reads it may show a part of a password."""
    return _take_apart(url).is_doubtful


def mask_url(url: str) -> str:
    """Return the url as it may be shown: without passwords, tokens and other secrets."""
    parts = _take_apart(url)
    scheme, login, rest = parts
    is_web = _is_web(scheme)
    if is_web and (not scheme.endswith("//") or _AUTHORITY.fullmatch(login or "") is None):
        # Slashes are missing, an @ is in the path, or a / in the password: nobody knows where the host stands.
        return f"{scheme}…"
    if parts.is_doubtful:
        return _mask_doubtful(scheme, url[len(scheme) :])
    # A webhook's login is all secret, as its path is: tokens stand there.
    if login is not None and not is_web:
        scheme += _mask_login(scheme, login)
    if "//" in scheme:
        hosts, path = _split_hosts(rest)
        if is_web:
            path = "/…" if path.strip("/") else ""
        rest = ",".join(map(_mask_host, hosts.split(","))) + path
    return scheme + _mask_options(rest)


def _mask_login(scheme: str, login: str) -> str:
    user, _, password = login.partition(":")
    # Without // nobody knows where the user ends and the password begins; alone, a user may be a token.
    is_user = password and scheme.endswith("//") and _USER.fullmatch(user)
    return f"{user}:{MASK}@" if is_user else f"{MASK}@"


def _mask_doubtful(scheme: str, text: str) -> str:
    before, _, options = text.partition("?")
    hosts, path = _split_hosts(before)
    is_address = "@" not in before and _PLAIN_OPTION.match(options) and all(map(_HOST.fullmatch, hosts.split(",")))
    if is_address and scheme.endswith("//"):
        return f"{scheme}{hosts}{'/' if path else '?'}…"
    return f"{scheme}{_mask_login(scheme, before)}…"


def _is_web(scheme: str) -> bool:
    return scheme.partition(":")[0].lower() in WEB_SCHEMES


def _split_hosts(rest: str) -> tuple[str, str]:
    match = _AUTHORITY.match(rest)
    hosts = match[0] if match else ""
    return hosts, rest[len(hosts) :]


def _mask_host(host: str) -> str:
    # What should be a port may be the password of a url that lacks its @.
    return host if _HOST.fullmatch(host) else f"{host.partition(':')[0]}:{MASK}"


def _mask_options(text: str) -> str:
    return "&".join(shown + MASK if secret else shown for shown, secret in _split_options(text))


def _split_options(text: str) -> Iterator[tuple[str, str]]:
    """The options of a text, each as what may be shown of it and the secret that follows.

    A secret with a bare & goes on to the next option.
    """
    shown, secret, is_secret = "", "", False
    for number, part in enumerate(text.split("&")):
        if is_secret and _PLAIN_OPTION.match(part) is None:
            secret += f"&{part}"
            continue
        if number:
            yield shown, secret
        at = _find_secret(part)
        is_secret = at is not None
        shown, secret = part[:at], part[at:] if is_secret else ""
    yield shown, secret


def _find_secret(part: str) -> int | None:
    """Where the first secret value of a part begins, which goes on to its end."""
    return next((match.end() for match in _OPTION.finditer(part) if is_secret_name(unquote(match[1]))), None)


# -- texts -------------------------------------------------------------------------------------------------


class Secrets:
    """Hides secrets in texts of others: of drivers, servers and functions of the user's.

    What is given are urls, and tables of options or headers. A url's secrets are found in it; of a table those values
    are secret whose name says so. A word that the masked url shows anyway is no secret.
    """

    def __init__(self, *given: object) -> None:
        found = {form for value in given for secret in _find(value) for form in _forms(secret)}
        listed = sorted((form for form in found if len(form) >= _SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, listed))) if listed else None

    def hide(self, text: str) -> str:
        return self._pattern.sub(MASK, text) if self._pattern else text

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide them in what a `ConfigError` says, which then has no cause: the cause may quote them."""
        try:
            yield
        except ConfigError as error:
            text = self.hide(str(error))
            raise (error if text == str(error) else ConfigError(text)) from None


def _find(value: object, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find(key)
            # That of NATS is the name of a file.
            yield from _find(item, is_secret=is_secret or (is_secret_name(str(key)) and key != "credentials"))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find(item, is_secret=is_secret)
    elif isinstance(value, str):
        if "://" in value or (not is_secret and ("@" in value or "=" in value)):
            shown = mask_url(value)
            yield from (secret for secret in _of_url(value) if secret not in shown)
        elif is_secret:
            yield value
            # "Bearer TOKEN": a server may repeat the token alone.
            yield value.rpartition(" ")[2]


def _of_url(url: str) -> Iterator[str]:
    parts = _take_apart(url)
    scheme, login, rest = parts
    if login is not None:
        user, _, password = login.partition(":")
        # A login without a password is a token if it is long, else the name of a user.
        yield password or (user if len(user) >= _TOKEN else "")
        # Without // the user may be what looks like a scheme.
        if not scheme.endswith("//") or not {"@", "/", "?", "#"}.isdisjoint(login):
            yield from _split_secret(login)
    if parts.is_doubtful:
        rest = url[len(scheme) :]
        yield from _split_secret(rest)
    for _, secret in _split_options(rest):
        yield secret
        yield from _split_secret(secret)
    yield from (value for name, value in parse_qsl(rest.partition("?")[2]) if is_secret_name(name))
    if _is_web(scheme):
        _, target = _split_hosts(rest)
        yield from (target, target.partition("?")[0])
        # Alone, a plain word of the path is no secret: it would be found everywhere.
        yield from (part for part in _BETWEEN.split(target) if not _WORD.fullmatch(part))


def _split_secret(text: str) -> list[str]:
    """The pieces of a secret, which a parser may take for something else; the names of options are none."""
    return _RESERVED.split(_OPTION_NAMES.sub("&", text))


def _forms(secret: str) -> Iterable[str]:
    """A secret as it is written, as it is meant, and as others may quote it."""
    plain = {secret, unquote(secret)}
    quoted = {quote(each, safe=safe) for each in plain for safe in ("", "/") if each.isprintable()}
    return plain | quoted | {form(each)[1:-1] for each in plain for form in (repr, json.dumps)}


# -- databases ---------------------------------------------------------------------------------------------


def parse_database_url(url: str | sa.URL, *, what: str, expected: str) -> sa.URL:
    """Take the url of a database apart; raises `ConfigError`, without the password, for what drivers misunderstand.

    A password's bare @ would make a part of it the host, which every later error names.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise _unreadable(url, what, expected) from None
    is_local = parsed.host is None and parsed.username is None
    is_doubtful = isinstance(url, str) and _take_apart(url).is_doubtful and parsed.get_backend_name() != "sqlite"
    if is_doubtful or (not is_local and "@" in f"{parsed.host}{parsed.database}"):
        raise ConfigError(
            f"{what}: the url {_show(url)!r} has a bare '@' in its password, name or options; write it as %40"
        )
    if is_local:
        return parsed
    hosts = parsed.query.get("host", ())
    if "," in (parsed.host or "") or len(hosts if isinstance(hosts, tuple) else (hosts,)) > 1:
        raise _several(url, what)
    if "[" in (parsed.host or "") or not 0 < (parsed.port or 1) < 65_536:
        raise _unreadable(url, what, expected)
    return parsed


def check_options(url: sa.URL, known: Collection[str], *, driver: str, what: str) -> None:
    """Raise `ConfigError` for an option in the url of a database that its driver does not have, or cannot read."""
    is_behind_secret = False
    for name in url.query:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            expected = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(sorted(known))}"
            # A secret with a bare & goes on there.
            shown = MASK if is_behind_secret and not _PLAIN_OPTION.fullmatch(f"{name}=") else name
            raise ConfigError(f"{what} {show_database(url)!r}: its url has an unknown option {shown!r}; {expected}")
        is_behind_secret |= is_secret_name(name)
    try:
        url.set(drivername=driver).get_dialect()().create_connect_args(url)
    except ValueError as error:
        raise ConfigError(f"{what} {show_database(url)!r}: an option in its url has a wrong value: {error}") from None


def show_database(url: sa.URL) -> str:
    """A database's url as it may be shown: without its password, and without its query, which may carry secrets."""
    has_login = (url.host, url.username) != (None, None)
    if has_login and ("@" in f"{url.host}{url.database}" or _has_secret_option(f"{url.username}:{url.password}")):
        # Of a password or an option with a bare @, the end may have become the host or the name.
        return sa.URL.create(url.drivername, url.username, url.password, "…").render_as_string(hide_password=True)
    at = _find_secret(url.database or "")
    named = url if at is None else url.set(database=f"{url.database}"[:at] + MASK)
    shown = named.set(query={}).render_as_string(hide_password=True)
    return mask_url(shown) if shown.count("@") > 1 else shown


def _show(url: str | sa.URL) -> str:
    return mask_url(url if isinstance(url, str) else url.render_as_string(hide_password=False))


def _several(url: str | sa.URL, what: str) -> ConfigError:
    return ConfigError(
        f"{what}: expected one server, got several in {_show(url)!r}. Give one address that leads to the primary: "
        "a DNS name, a proxy or a pooler"
    )


def _unreadable(url: str | sa.URL, what: str, expected: str) -> ConfigError:
    if not isinstance(url, str) or "://" not in url:
        return ConfigError(f"{what}: {expected}; got something that is no url")
    if "," in _split_hosts(_take_apart(url).rest)[0]:
        return _several(url, what)
    return ConfigError(
        f"{what}: the url {_show(url)!r} cannot be read: its port must be a number up to 65535, an IPv6 address "
        f"stands in [ ], and in a password @ : / ? # are written with %, such as %40; {expected}"
    )
