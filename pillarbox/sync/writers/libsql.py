"""Writing to libSQL and Turso over HTTP, with the Hrana protocol.

One call is one request, however many statements it has: a request that gets no answer was either done or not, and the
caller finds out by its mark. The server limits how large a request may be; `batch_size` and `max_batch_bytes` keep
below that. A stream lives for one request, so no later one could be sent elsewhere by the server.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.retry import describe_error
from pillarbox.sinks.sql.failures import Kind
from pillarbox.sinks.tls import make_tls_context
from pillarbox.sync.writers import Statement, hrana
from pillarbox.sync.writers.hrana import BrokenAnswer, Failure
from pillarbox.sync.writers.shared import (
    CONNECTIONS,
    MAX_CONFLICTS,
    TIMEOUT,
    Address,
    first_word,
    read_address,
    read_timeout,
)
from pillarbox.urls import Secrets
from pillarbox.values import Given, Read, read_number, read_text

try:
    import httpcore
    import httpx

    from pillarbox.sinks.http_answer import Answer, read_retry_after
    from pillarbox.sinks.http_transport import DOWN, DirectTransport, Outgoing
except ImportError as error:
    if isinstance(error, MissingExtra) or (error.name or "").startswith("pillarbox"):
        raise
    raise MissingExtra("libSQL", "http") from error

CONNECT_TIMEOUT: Final = timedelta(seconds=5)
_FIRST_PAUSE: Final = 0.02
_SHOWN: Final = 200
_UNREACHED: Final = (httpcore.ConnectError, httpcore.ConnectTimeout)
_T = TypeVar("_T")


def _read_token(given: Given) -> str:
    token = given.value
    # Whatever is wrong with it, it is not shown.
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{given.where}: expected a text of ASCII characters without blanks")
    return token


_READERS: Final[dict[str, Read]] = {
    "auth_token": _read_token,
    "timeout": read_timeout,
    "connections": read_number,
    "tls_ca": read_text,
}


class LibsqlWriter:
    """Writes to one libSQL database. Url: `libsql://host`, `https://host/path` or `http://host:port`.

    `libsql:` means https, and http with `?tls=0`. The token is `auth_token`, or `?authToken=` in the url; it is sent to
    that host alone. `timeout` is how long a call waits for its answer, a duration or a number of seconds;
    `connections` calls are under way at once.
    """

    batches: Literal["atomic"] = "atomic"
    dialect: Literal["sqlite"] = "sqlite"

    def __init__(
        self,
        url: str,
        *,
        auth_token: str | None = None,
        timeout: timedelta | float | str | None = None,
        connections: int | None = None,
        tls_ca: str | None = None,
    ) -> None:
        own = {"auth_token": auth_token, "timeout": timeout, "connections": connections, "tls_ca": tls_ca}
        address = read_address(url, own, _READERS, driver=("authToken", "tls"))
        self._url = _read_url(address)
        self.name = address.name
        self.concurrency: int = address.options.get("connections", CONNECTIONS)
        self._token = _choose_token(address)
        # A server may repeat what it was sent.
        self._secrets = Secrets({"token": self._token})
        self._timeout: timedelta = address.options.get("timeout", TIMEOUT)
        self._slots = asyncio.Semaphore(self.concurrency)
        self._headers = [
            (b"content-type", b"application/json"),
            (b"user-agent", f"pillarbox/{version('pillarbox')}".encode()),
        ]
        if self._token:
            self._headers.append((b"authorization", b"Bearer " + self._token.encode("ascii")))
        authority = {name: value for name, value in address.options.items() if name == "tls_ca"}
        tls = make_tls_context(authority, sink=self.name) if authority else ssl.create_default_context()
        self._transport = DirectTransport(
            self._url, tls=tls, connect_timeout=min(CONNECT_TIMEOUT, self._timeout / 3).total_seconds()
        )

    async def open(self) -> None:
        """Ask for nothing but an answer: it tells a wrong address or token at once."""
        [result] = await self.write_batch([("SELECT 1", ())])
        if not result["ok"]:
            raise self._unavailable(f"SELECT 1 failed: {result['error']}")

    async def close(self) -> None:
        """Close the kept connections. A later call makes new ones."""
        await self._transport.close()

    async def write_batch(self, statements: Sequence[Statement]) -> Sequence[Mapping[str, Any]]:
        """Run all statements in one transaction, or none: then the last result is the failure.

        Raises `SinkUnavailable` when the outcome is not known, or the database takes nothing now.
        """
        encoded: list[dict[str, Any]] = []
        for sql, args in statements:
            try:
                encoded.append(hrana.encode_statement(sql, args))
            except ValueError as error:
                return [*_untried(len(encoded)), _fail(str(error), Kind.BAD)]
        if not encoded:
            return []
        tried = await self._try(encoded)
        if tried.failure is None:
            return tried.results
        if tried.failure.kind is Kind.DOWN or not tried.has_culprit:
            raise self._unavailable(f"takes nothing now: {tried.failure}; nothing was written")
        return [*tried.results, _fail(self._secrets.hide(str(tried.failure)), tried.failure.kind)]

    # -- statements ------------------------------------------------------------------------------------------------

    async def _try(self, statements: Sequence[dict[str, Any]]) -> _Tried:
        """Run them, several times when another transaction is in the way."""
        is_reading = len(statements) == 1 and first_word(statements[0]["sql"]) == "SELECT"
        for conflict in range(MAX_CONFLICTS):
            if conflict:
                # Not in step with others who wait for the same lock.
                await asyncio.sleep(_FIRST_PAUSE * 2**conflict * random.uniform(0.5, 1.5))
            try:
                tried = await (self._read(statements[0]) if is_reading else self._transact(statements))
            except _Uncertain as doubt:
                if is_reading:
                    raise self._unavailable(str(doubt), after=doubt.after) from doubt
                why = f"no answer to COMMIT, outcome unknown: {doubt}; the batch was written as a whole or not at all"
                raise self._unavailable(why, after=doubt.after) from doubt
            if tried.failure is None or tried.failure.kind is not Kind.CONFLICT:
                break
        return tried

    async def _read(self, statement: dict[str, Any]) -> _Tried:
        [answer] = await self._ask([{"type": "execute", "stmt": statement}])
        if isinstance(answer, Failure):
            return _Tried([], answer)
        return _Tried([_understand(hrana.read_result, answer)])

    async def _transact(self, statements: Sequence[dict[str, Any]]) -> _Tried:
        [answer] = await self._ask([hrana.make_transaction(statements)])
        if isinstance(answer, Failure):
            return await self._find_culprit(statements, answer)
        begun, *done, committed = _understand(hrana.read_steps, answer, len(statements))
        if isinstance(begun, Failure):
            return _Tried([], begun, has_culprit=False)
        results: list[dict[str, Any]] = []
        for each in done:
            if not isinstance(each, dict):
                break
            results.append(each)
        if len(results) < len(done):
            failed = done[len(results)]
            if isinstance(failed, Failure) and committed is None:
                return _Tried(results, failed)
        elif isinstance(committed, Failure):
            return self._judge_commit(results, committed)
        elif committed is not None:
            return _Tried(results)
        raise _Uncertain("the answer contradicts itself about which statements were run")

    def _judge_commit(self, results: list[dict[str, Any]], failure: Failure) -> _Tried:
        if failure.code.startswith("SQLITE_CONSTRAINT"):
            # A deferred constraint. The last statement is blamed; when it was another, the next try without it tells.
            return _Tried(results[:-1], failure)
        if failure.kind is Kind.CONFLICT:
            return _Tried(results, failure, has_culprit=False)
        raise _Uncertain(f"COMMIT failed: {failure}")

    async def _find_culprit(self, statements: Sequence[dict[str, Any]], failure: Failure) -> _Tried:
        """Have each statement parsed alone: a server that cannot parse one of a batch does not say which."""
        if failure.kind is Kind.BAD:
            answers = await self._ask([hrana.make_trial(each) for each in statements])
            for position, answer in enumerate(answers):
                if isinstance(answer, Failure):
                    return _Tried(_untried(position), answer)
        raise _Uncertain(str(failure))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | Failure]:
        async with self._slots:
            answer, body = await self._exchange(Outgoing("POST", self._url, self._headers, hrana.make_body(requests)))
        if answer.status != 200:
            raise self._refuse(answer)
        return _understand(hrana.read_answer, body, len(requests))

    async def _exchange(self, request: Outgoing) -> tuple[Answer, bytes]:
        limit = asyncio.timeout(self._timeout.total_seconds())
        try:
            async with limit:
                reply = await self._transport.send(request)
                try:
                    body = b"".join([part async for part in reply.parts])
                finally:
                    await reply.close()
        except _UNREACHED as error:
            raise self._unavailable(f"cannot be reached: {describe_error(error)}") from error
        except (TimeoutError, *DOWN) as error:
            why = f"no answer within {format_duration(self._timeout)}" if limit.expired() else describe_error(error)
            raise _Uncertain(why) from error
        return Answer(reply.status, reply.headers, "" if reply.status == 200 else body.decode("utf-8", "replace")), body

    def _refuse(self, answer: Answer) -> SinkUnavailable | _Uncertain:
        status = answer.status
        said = f"HTTP {status}{self._show(answer.text)}"
        if status in (401, 403):
            return self._unavailable(
                f"{'the token was' if self._token else 'a call without a token is'} refused, {said}"
            )
        if status == 404:
            return self._unavailable(f"nothing is served at {self._url.path}, {said}. Check the url")
        if status == 413:
            return self._unavailable(f"the request is too large, {said}. Lower batch_size, or set max_batch_bytes")
        if status == 429:
            after = read_retry_after(answer.find(b"retry-after"))
            return self._unavailable(f"too many requests, {said}", after=after)
        if 300 <= status < 400:
            return self._unavailable(f"{said}: redirects are not followed, mend the url")
        if 400 <= status < 500 and status not in (408, 425):
            return self._unavailable(f"the request was refused, {said}")
        return _Uncertain(said, after=read_retry_after(answer.find(b"retry-after")))

    def _unavailable(self, why: str, *, after: timedelta | None = None) -> SinkUnavailable:
        return SinkUnavailable(f"{self.name}: {self._secrets.hide(why)}", after=after)

    def _show(self, text: str) -> str:
        # Hidden before it is cut: half a token must not be shown either.
        shown = "".join(each if each.isprintable() else " " for each in self._secrets.hide(text)).strip()
        return f": {shown[:_SHOWN]}" if shown else ""


class _Uncertain(Exception):
    """There is no answer that says what was done."""

    def __init__(self, why: str, *, after: timedelta | None = None) -> None:
        super().__init__(why)
        self.after = after


class _Tried(NamedTuple):
    """The results before the first failure. Without a culprit the failure is no statement's."""

    results: list[dict[str, Any]]
    failure: Failure | None = None
    has_culprit: bool = True


def _understand(read: Callable[..., _T], *parts: Any) -> _T:
    try:
        return read(*parts)
    except (BrokenAnswer, TypeError, ValueError) as error:
        raise _Uncertain(f"the answer cannot be understood, {error}") from error


def _untried(count: int) -> list[dict[str, Any]]:
    return [{"ok": True, "rows_affected": 0} for _ in range(count)]


def _fail(error: str, kind: Kind) -> dict[str, Any]:
    return {"ok": False, "error": error, "kind": "bad" if kind in (Kind.BAD, Kind.WRONG) else "later"}


# -- settings --------------------------------------------------------------------------------------------------------


def _read_url(address: Address) -> httpx.URL:
    parts, tls = urlsplit(address.url), address.query.get("tls")
    expected = "expected a url such as libsql://host, https://host or http://host:port"
    if parts.scheme not in ("libsql", "http", "https") or not parts.hostname:
        raise ConfigError(f"Writer {address.name!r}: {expected}")
    if "@" in parts.netloc:
        raise ConfigError(f"Writer {address.name!r}: {expected}, without a login; a token is given as auth_token")
    if tls not in (None, "0", "1"):
        raise ConfigError(f"Writer {address.name!r} tls: expected 0 or 1, got {tls!r}")
    scheme = parts.scheme
    if scheme == "libsql":
        scheme = "http" if tls == "0" else "https"
    elif tls not in (None, "1" if scheme == "https" else "0"):
        raise ConfigError(f"Writer {address.name!r} tls: {tls} contradicts the url's scheme; leave it out")
    try:
        return httpx.URL(f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/v2/pipeline")
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"Writer {address.name!r}: {expected}: {error}") from None


def _choose_token(address: Address) -> str:
    given, found = address.options.get("auth_token"), address.query.get("authToken")
    if given and found:
        raise ConfigError(f"Writer {address.name!r}: a token is given in the url and as auth_token; give it once")
    return _read_token(Given(given or found or "", f"Writer {address.name!r} authToken"))
