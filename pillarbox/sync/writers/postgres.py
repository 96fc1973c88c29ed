"""Writing to PostgreSQL with psycopg: statements in a pipeline, the same ones in a row by `executemany`.

Text is sent without a type, so that the server reads it as what its column is: a time, a UUID, a number, JSON. Numbers
have the types that they have when they are written into the statement: `integer`, `bigint` where that is too small,
`numeric` with a point. A column of another kind refuses them, and booleans, as PostgreSQL does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.silence import cut, keep_alive
from pillarbox.sinks.sql.failures import Kind, describe, judge_code
from pillarbox.sync.binds import to_percent
from pillarbox.sync.writers import Statement
from pillarbox.sync.writers.shared import (
    CONNECTIONS,
    TIMEOUT,
    Failed,
    Lost,
    Result,
    Session,
    Transactions,
    check_arguments,
    check_statement,
    read_address,
    read_timeout,
)
from pillarbox.values import Read, read_number, read_switch

try:
    import psycopg
    from psycopg.abc import PyFormat
    from psycopg.adapt import Dumper
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.types.numeric import Int4, Int4Dumper, IntDumper
except ImportError as error:
    raise MissingExtra("PostgreSQL", "postgres") from error

_READERS: Final[dict[str, Read]] = {"connections": read_number, "timeout": read_timeout, "pooler": read_switch}
# The server's default may be another one, under which a batch would fail for what others write.
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
_PREPARE_AFTER: Final = 5
_INTEGER: Final = Int4Dumper(Int4)
_INTERRUPT_TIMEOUT: Final = 0.5
_LOST: Final = ("08", "57P0")


class PostgresWriter:
    """Writes to one PostgreSQL database, a batch a transaction. Url: `postgresql://user:password@host:port/database`.

    The url's query takes libpq's parameters, such as `sslmode`. `pooler=True` is for pgbouncer and its like: no
    statement is prepared then. `timeout`, a duration or a number of seconds, is how long a transaction may take.
    """

    batches: Literal["atomic"] = "atomic"
    dialect: Literal["postgresql"] = "postgresql"

    def __init__(
        self,
        url: str,
        *,
        connections: int | None = None,
        timeout: timedelta | float | str | None = None,
        pooler: bool | None = None,
    ) -> None:
        own = {"connections": connections, "timeout": timeout, "pooler": pooler}
        known = [each.keyword.decode() for each in psycopg.pq.Conninfo.get_defaults()]
        address = read_address(url, own, _READERS, driver=known)
        self.concurrency: int = address.options.get("connections", CONNECTIONS)
        limit: timedelta = address.options.get("timeout", TIMEOUT)
        self._settings = _read_settings(address.url, address.query, address.name, limit)
        self._prepare_after = None if address.options.get("pooler") else _PREPARE_AFTER
        self._transactions = Transactions(address.name, self._connect, connections=self.concurrency, timeout=limit)

    async def write_batch(self, statements: Sequence[Statement]) -> Sequence[Mapping[str, Any]]:
        """Run all statements in one transaction, or none: then the last result is the failure.

        Raises `SinkUnavailable` when the database cannot be reached, or nobody knows whether the batch was written.
        """
        return await self._transactions.write(statements, _prepare)

    async def close(self) -> None:
        await self._transactions.close()

    async def _connect(self) -> Session:
        try:
            connection = await psycopg.AsyncConnection.connect(
                **self._settings, autocommit=True, prepare_threshold=self._prepare_after
            )
        except (psycopg.Error, OSError) as error:
            raise Lost(describe(error)) from error
        for type_, dumper in ((int, _IntDumper), (float, _FloatDumper)):
            connection.adapters.register_dumper(type_, dumper)
        keep_alive(connection)
        return _PostgresSession(connection)


def _read_settings(url: str, query: Mapping[str, str], name: str, timeout: timedelta) -> dict[str, Any]:
    _, _, rest = url.partition("://")
    address = f"postgresql://{rest}?{urlencode(query, quote_via=quote)}"
    try:
        settings = dict(conninfo_to_dict(address))
    except psycopg.Error:
        # Not the driver's message: it may quote the password.
        raise ConfigError(f"Writer {name!r}: the url cannot be read; escape special characters with %") from None
    if "@" in f"{settings.get('host')}{settings.get('dbname')}":
        raise ConfigError(f"Writer {name!r}: the url has a bare '@' in its password or name; write it as %40")
    settings.setdefault("application_name", "pillarbox")
    settings.setdefault("connect_timeout", max(2, int(timeout.total_seconds())))
    return settings


@lru_cache(maxsize=4096)
def _translate(sql: str, count: int) -> str:
    check_statement(sql, "postgresql", arguments=count)
    return to_percent(sql, "postgresql", arguments=count)


def _prepare(sql: str, args: Sequence[Any]) -> Statement:
    return _translate(sql, len(args)), check_arguments(args, refuses_nul=True)


class _IntDumper(IntDumper):
    def upgrade(self, obj: int, format: PyFormat) -> Dumper:
        # The driver's own begins with smallint, in which 300 * 300 does not fit.
        return _INTEGER if -(2**31) <= obj < 2**31 else super().upgrade(obj, format)


class _FloatDumper(Dumper):
    # As double precision it would make that of all it is added to. The shortest text is exact for either type.
    oid = psycopg.adapters.types["numeric"].oid

    def dump(self, obj: float) -> bytes:
        return repr(obj).encode()


class _PostgresSession:
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def run(self, statements: Sequence[Statement], *, is_reading: bool) -> list[Result]:
        groups = [(sql, [args for _, args in found]) for sql, found in groupby(statements, lambda each: each[0])]
        cursors: list[psycopg.AsyncCursor[Any]] = []
        error: psycopg.Error | None = None
        try:
            async with self._connection.pipeline():
                try:
                    if not is_reading:
                        await self._connection.execute(_BEGIN)
                    for sql, rows in groups:
                        cursors.append(self._connection.cursor())
                        if len(rows) == 1:
                            await cursors[-1].execute(sql, rows[0])
                        else:
                            await cursors[-1].executemany(sql, rows, returning=True)
                except psycopg.Error as first:
                    error = first
        except psycopg.Error as later:
            # Leaving a pipeline with an error in it raises again, that it was broken off.
            error = error or later
        if error is not None:
            raise self._judge(error, _count_done(groups, cursors)) from error
        return [result for cursor in cursors for result in await _read_results(cursor)]

    async def commit(self, count: int) -> None:
        try:
            done = await self._connection.execute("COMMIT")
        except psycopg.Error as error:
            # A deferred constraint. The last statement is blamed; when it was another, the try without it tells.
            failed = self._judge(error, count - 1)
            if isinstance(failed, Failed) and failed.kind in (None, Kind.DOWN):
                raise Lost(str(failed)) from error
            raise failed from error
        if done.statusmessage != "COMMIT":
            raise Lost(f"the server answered {done.statusmessage!r}")

    async def rollback(self) -> None:
        try:
            await self._connection.execute("ROLLBACK")
        except psycopg.Error as error:
            raise Lost(describe(error)) from error

    async def interrupt(self) -> None:
        # Not by cancelling a task: a pipeline that is left in the middle complains when it is collected.
        with suppress(psycopg.Error, OSError):
            await self._connection.cancel_safe(timeout=_INTERRUPT_TIMEOUT)

    def cut(self) -> None:
        cut(self._connection)

    async def close(self) -> None:
        await self._connection.close()

    def _judge(self, error: psycopg.Error, index: int) -> Failed | Lost:
        state = error.sqlstate
        if self._connection.closed or (state or "").startswith(_LOST) or _is_stale(error):
            return Lost(describe(error))
        if state is None:
            # The driver itself refused: a value it cannot send.
            return Failed(index, Kind.BAD, describe(error))
        return Failed(index, judge_code(state), f"{describe(error)} (SQLSTATE {state})")


def _is_stale(error: psycopg.Error) -> bool:
    """Whether a prepared statement no longer fits its table, or is not there: another connection has none of that."""
    return error.sqlstate == "26000" or error.diag.source_function == "RevalidateCachedQuery"


def _count_done(groups: Sequence[tuple[str, list[Any]]], cursors: Sequence[psycopg.AsyncCursor[Any]]) -> int:
    before = 0
    for (_, rows), cursor in zip(groups, cursors, strict=False):
        done = 0 if cursor.statusmessage is None else 1
        while done and cursor.nextset():
            done += 1
        before += done
        if done < len(rows):
            break
    return before


async def _read_results(cursor: psycopg.AsyncCursor[Any]) -> list[Result]:
    results: list[Result] = []
    while True:
        if cursor.description is None:
            results.append({"ok": True, "rows_affected": max(0, cursor.rowcount)})
        else:
            results.append({"ok": True, "rows": [list(row) for row in await cursor.fetchall()]})
        if not cursor.nextset():
            return results
