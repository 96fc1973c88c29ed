"""What the built-in writers share: reading a URL, checking arguments, and running a batch as one transaction.

COMMIT is sent once every statement was answered, never together with them. So whoever loses the connection, gives up
waiting or is cancelled before that knows that nothing was written, and a batch can be run again for a connection that
had died in the pool. A connection that failed, or whose user was cancelled, is closed and never used again.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from pillarbox.durations import format_duration, parse_duration
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.silence import wait_patiently
from pillarbox.sinks.sql.failures import Kind
from pillarbox.sync.binds import Dialect, count_binds, read_tokens
from pillarbox.sync.refusals import refuse_unsafe
from pillarbox.sync.writers import Statement
from pillarbox.urls import is_doubtful, mask_url
from pillarbox.values import Given, Read, as_number, check_known

Result: TypeAlias = Mapping[str, Any]

TIMEOUT: Final = timedelta(seconds=30)
CONNECTIONS: Final = 4
MAX_CONFLICTS: Final = 4
_FIRST_PAUSE: Final = 0.01

# -- urls and options ------------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """A writer's URL without its options, what may be shown of it, and the options."""

    url: str
    name: str
    options: dict[str, Any]
    """Those of the writer, checked."""
    query: dict[str, str]
    """Those of the driver, as they stand in the URL."""


def read_address(
    url: str, options: Mapping[str, Any], readers: Mapping[str, Read], *, driver: Sequence[str] = ()
) -> Address:
    """Take a URL apart; what is None among `options` was not given. Errors show no secrets."""
    shown = mask_url(url)
    if is_doubtful(url):
        raise ConfigError(f"Writer {shown!r}: the url has a bare '@' behind a '?'; write them as %40 and %3F")
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        has_port = parts.port is not None
    except ValueError:
        # Not the parser's message: it may quote the password.
        raise ConfigError(f"Writer {shown!r}: the url cannot be read; escape special characters with %") from None
    if parts.fragment or (has_port and parts.hostname is None):
        raise ConfigError(f"Writer {shown!r}: the url cannot be read; write '#' as '%23'")
    bare = url.partition("?")[0]
    name = mask_url(bare)
    found: dict[str, Any] = {}
    own: dict[str, str] = {}
    for option, value in query:
        check_known(option, (*readers, *driver), f"Writer {name!r}", kind="option")
        if option in found or option in own or options.get(option) is not None:
            raise ConfigError(f"Writer {name!r}: option {option!r} is given twice; give it in the url or beside it")
        if option in readers:
            found[option] = readers[option](Given(value, f"Writer {name!r} {option}", is_text=True))
        else:
            own[option] = value
    for option, value in options.items():
        if value is not None:
            found[option] = readers[option](Given(value, f"Writer {name!r} {option}"))
    return Address(bare, name, found, own)


def read_timeout(given: Given) -> timedelta:
    """A number of seconds or a duration such as "30s"."""
    value = as_number(given.value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = timedelta(seconds=value) if 0 < value <= 86_400 else timedelta(0)
    timeout = parse_duration(value, what=given.where)
    if not timedelta(0) < timeout <= timedelta(days=1):
        raise ConfigError(f"{given.where}: expected a time above zero and up to a day, got {given.value!r}")
    return timeout


# -- statements ------------------------------------------------------------------------------------------------------


class BadStatement(ValueError):
    """A statement that cannot be sent as it is."""


_SKIPPED: Final = r"(?:[\s;]+|--[^\n]*(?:\n|$)|/\*(?!!|M!).*?\*/)*"
_FIRST_WORD: Final = re.compile(_SKIPPED + r"([A-Za-z]*)", re.DOTALL)
_PLAIN: Final = frozenset({type(None), bool, int, float, bytes})


@lru_cache(maxsize=4096)
def first_word(sql: str) -> str:
    match = _FIRST_WORD.match(sql)
    return match[1].upper() if match else ""


def check_statement(sql: str, dialect: Dialect, *, arguments: int) -> None:
    """Refuse what would end the transaction around it or change its session, and a wrong number of arguments."""
    refuse_unsafe(sql, read_tokens(sql, dialect), dialect)
    # Not left to the database: SQLite itself takes an argument that is missing for NULL.
    expected = count_binds(sql, dialect, arguments=arguments)
    if expected != arguments:
        raise BadStatement(f"the statement has {expected} placeholders, but there are {arguments} arguments")


def check_arguments(args: Sequence[Any], *, refuses_nul: bool = False) -> Sequence[Any]:
    """Return the arguments as drivers take them: a list or dict as JSON text; raises `BadStatement`."""
    for value in args:
        kind = type(value)
        if kind is str:
            if value.isascii() and not (refuses_nul and "\x00" in value):
                continue
        elif kind in _PLAIN:
            continue
        return [_check(place, each, refuses_nul) for place, each in enumerate(args, 1)]
    return args


def _check(place: int, value: Any, refuses_nul: bool) -> Any:
    if isinstance(value, dict | list | tuple):
        try:
            value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise BadStatement(f"argument {place} cannot be written as JSON: {error}") from None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadStatement(f"argument {place} is no valid text: {error.reason}") from None
        if refuses_nul and "\x00" in value:
            raise BadStatement(f"argument {place} has a NUL character, which the database cannot store in a text")
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if type(value) not in _PLAIN:
        expected = "None, bool, int, float, str, bytes, list or dict"
        raise BadStatement(f"argument {place} is of type {type(value).__name__}; expected {expected}")
    return value


# -- transactions ----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """The database refused a statement, or the commit, on a connection that lives on."""

    def __init__(self, index: int, kind: Kind | None, text: str) -> None:
        super().__init__(text)
        self.index = index
        self.kind = kind


class Lost(Exception):
    """The connection is gone, or must not be used again."""


class Session(Protocol):
    """One connection. Raises `Failed`, or `Lost`, or lets a cancellation through; it is then closed by its user."""

    async def run(self, statements: Sequence[Statement], *, is_reading: bool) -> list[Result]:
        """Begin a transaction, unless it `is_reading`, and run the statements in order."""

    async def commit(self, count: int) -> None:
        """End the transaction of so many statements; a `Lost` here leaves open whether it was written."""

    async def rollback(self) -> None: ...

    async def interrupt(self) -> None:
        """Let what is waited for end soon, if the other side is there to end it."""

    def cut(self) -> None:
        """End what is waited for, without a word to the other side: that may be silent."""

    async def close(self) -> None: ...


class Transactions:
    """Runs batches on a few connections, each batch as one transaction."""

    def __init__(
        self, name: str, connect: Callable[[], Awaitable[Session]], *, connections: int, timeout: timedelta
    ) -> None:
        self._name = name
        self._connect = connect
        self._timeout = timeout
        self._slots = asyncio.Semaphore(connections)
        self._idle: list[Session] = []
        self._generation = 0

    async def write(
        self, statements: Sequence[Statement], prepare: Callable[[str, Sequence[Any]], Statement]
    ) -> list[Result]:
        """Write the statements, all or none; up to the first that is refused, there is one result each."""
        ready: list[Statement] = []
        try:
            for sql, args in statements:
                ready.append(prepare(sql, args))
        except ValueError as error:
            return _report(Failed(len(ready), Kind.BAD, str(error)))
        if not ready:
            return []
        is_reading = len(ready) == 1 and first_word(ready[0][0]) == "SELECT"
        async with self._slots:
            return await self._persist(ready, is_reading)

    async def close(self) -> None:
        """Close the connections; one that is in use is closed by its user. A later call makes new ones."""
        self._generation += 1
        await self._drop_idle()

    async def _persist(self, statements: Sequence[Statement], is_reading: bool) -> list[Result]:
        give_up_at = time.monotonic() + self._timeout.total_seconds()
        for conflict in range(MAX_CONFLICTS):
            try:
                return await self._attempt(statements, is_reading)
            except Failed as failed:
                last = failed
            if last.kind is not Kind.CONFLICT or time.monotonic() > give_up_at:
                break
            if conflict + 1 < MAX_CONFLICTS:
                # Not in step with those whom it met.
                await asyncio.sleep(_FIRST_PAUSE * 2**conflict * random.uniform(0.5, 1.5))
        return _report(last)

    async def _attempt(self, statements: Sequence[Statement], is_reading: bool) -> list[Result]:
        if self._idle:
            with suppress(Lost):
                return await self._transact(self._idle.pop(), statements, is_reading)
            # It had died in the pool, or its plans are out of date; nothing was committed. The others may be as old.
            await self._drop_idle()
        try:
            return await self._transact(await self._open(), statements, is_reading)
        except Lost as error:
            self._refuse(f"the connection was lost: {error}; nothing was written", error)

    async def _open(self) -> Session:
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                return await self._connect()
        except Lost as error:
            self._refuse(f"cannot be reached: {error}", error)
        except TimeoutError as error:
            self._refuse(f"cannot be reached: no answer within {format_duration(self._timeout)}", error)

    async def _transact(self, session: Session, statements: Sequence[Statement], is_reading: bool) -> list[Result]:
        generation = self._generation
        is_committing = False
        failed: Failed | None = None
        results: list[Result] = []

        async def transact() -> None:
            nonlocal is_committing, failed, results
            try:
                results = await session.run(statements, is_reading=is_reading)
                if not is_reading:
                    is_committing = True
                    await session.commit(len(statements))
            except Failed as error:
                if error.kind is Kind.DOWN:
                    self._refuse(f"takes nothing now: {error}; nothing was written", error)
                failed = error
                await session.rollback()

        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                await wait_patiently(transact(), session.cut, session.interrupt)
        except BaseException as error:
            await session.close()
            if isinstance(error, TimeoutError):
                await self._drop_idle()  # what happened to one connection has happened to its neighbours
            if isinstance(error, TimeoutError | Lost) and is_committing and failed is None:
                why = str(error) or f"none within {format_duration(self._timeout)}"
                self._refuse(f"no answer to COMMIT: {why}; the batch was written as a whole or not at all", error)
            if isinstance(error, TimeoutError):
                self._refuse(f"no answer within {format_duration(self._timeout)}; nothing was written", error)
            if isinstance(error, Lost) and failed is not None:
                raise failed from error  # what was refused is known; only the connection is gone
            raise
        if generation == self._generation:
            self._idle.append(session)
        else:
            await session.close()
        if failed is not None:
            raise failed
        return results

    def _refuse(self, why: str, cause: BaseException) -> NoReturn:
        raise SinkUnavailable(f"{self._name}: {why}") from cause

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for session in idle:
            await session.close()


def _report(failed: Failed) -> list[Result]:
    # What nobody knows is tried again and counted; the row waits where it is.
    kind = "bad" if failed.kind in (Kind.BAD, Kind.WRONG) else "later"
    before: list[Result] = [{"ok": True, "rows_affected": 0} for _ in range(failed.index)]
    return [*before, {"ok": False, "error": str(failed), "kind": kind}]
