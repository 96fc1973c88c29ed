"""Writing to MySQL and MariaDB with aiomysql: many statements in one packet, each with an answer of its own.

DDL commits what stands before it there, so such a statement must be a batch of its own. The session is strict: a
value that does not fit is an error. Its time zone is UTC. A table whose engine has no transactions keeps what was
written before a failure.

A float is of type DOUBLE there, and a text becomes one in a calculation. What must stay exact in a DECIMAL column is
pushed as a Decimal, and calculated with as `CAST(? AS DECIMAL(20, 4))`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.silence import cut, keep_alive
from pillarbox.sinks.sql.failures import Kind, describe, judge_code
from pillarbox.sinks.tls import TLS_OPTIONS, make_tls_context
from pillarbox.sync.binds import read_tokens, to_percent
from pillarbox.sync.refusals import COMMITS_ON_MYSQL
from pillarbox.sync.writers import Statement
from pillarbox.sync.writers.shared import (
    CONNECTIONS,
    TIMEOUT,
    BadStatement,
    Failed,
    Lost,
    Result,
    Session,
    Transactions,
    check_arguments,
    check_statement,
    first_word,
    read_address,
    read_timeout,
)
from pillarbox.urls import parse_database_url
from pillarbox.values import Read, read_number, read_switch, read_text

try:
    import aiomysql
    import pymysql
    from pymysql.constants import CLIENT
except ImportError as error:
    raise MissingExtra("MySQL and MariaDB", "mysql") from error

log = logging.getLogger("pillarbox.sync")

_READERS: Final[dict[str, Read]] = {
    "connections": read_number,
    "timeout": read_timeout,
    "tls": read_switch,
    **TLS_OPTIONS,
    "unix_socket": read_text,
}
_SESSION: Final = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_TRANS_TABLES'), time_zone = '+00:00', "
    "innodb_lock_wait_timeout = {seconds}, lock_wait_timeout = {seconds}",
)
_PACKET: Final = 1_000_000
_BEGIN: Final = b"START TRANSACTION"
_BETWEEN: Final = b"\n;\n"


class _Cursor(aiomysql.Cursor):  # type: ignore[misc]
    async def _show_warnings(self, conn: Any) -> None:
        """What would be a warning is an error in a strict session; a note, that a table exists, costs a round trip."""


class MysqlWriter:
    """Writes to one MySQL or MariaDB database, a batch a transaction. Url: `mysql://user:password@host:port/database`.

    `timeout`, a duration or a number of seconds, is how long a transaction may take. `tls=True` asks for
    TLS, as do `tls_ca`, `tls_certificate`, `tls_key` and `tls_verify`.
    """

    batches: Literal["atomic"] = "atomic"
    dialect: Literal["mysql"] = "mysql"

    def __init__(
        self,
        url: str,
        *,
        connections: int | None = None,
        timeout: timedelta | float | str | None = None,
        tls: bool | None = None,
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        tls_verify: bool | None = None,
        unix_socket: str | None = None,
    ) -> None:
        own = {"connections": connections, "timeout": timeout, "tls": tls, "unix_socket": unix_socket}
        files = {"tls_ca": tls_ca, "tls_certificate": tls_certificate, "tls_key": tls_key, "tls_verify": tls_verify}
        address = read_address(url, {**own, **files}, _READERS)
        self.concurrency: int = address.options.get("connections", CONNECTIONS)
        self._timeout: timedelta = address.options.get("timeout", TIMEOUT)
        self._settings = _read_settings(address.url, address.options, address.name)
        self._transactions = Transactions(
            address.name, self._connect, connections=self.concurrency, timeout=self._timeout
        )

    async def write_batch(self, statements: Sequence[Statement]) -> Sequence[Mapping[str, Any]]:
        """Run all statements in one transaction, or none: then the last result is the failure.

        Raises `SinkUnavailable` when the database cannot be reached, or nobody knows whether the batch was written.
        """
        prepare = _prepare if len(statements) == 1 else _prepare_one_of_several
        return await self._transactions.write(statements, prepare)

    async def close(self) -> None:
        await self._transactions.close()

    async def _connect(self) -> Session:
        try:
            connection = await aiomysql.connect(**self._settings)
        except (pymysql.Error, OSError) as error:
            raise Lost(describe(error)) from error
        keep_alive(connection)
        session = _MysqlSession(connection)
        try:
            if self._settings["ssl"] and connection.get_transport_info() is None:
                raise Lost("it offers no TLS, which the url asks for")
            await session.prepare(self._timeout)
        except BaseException:
            connection.close()
            raise
        return session


def _read_settings(url: str, options: Mapping[str, Any], name: str) -> dict[str, Any]:
    expected = "expected mysql://user:password@host:port/database"
    parsed = parse_database_url(url, what=f"Writer {name!r}", expected=expected)
    if not parsed.database:
        raise ConfigError(f"Writer {name!r}: expected the name of a database after the server")
    tls = {option: options[option] for option in TLS_OPTIONS if option in options}
    if options.get("tls") is False and tls:
        raise ConfigError(f"Writer {name!r} tls: TLS is off; leave out {', '.join(tls)}")
    return {
        "host": parsed.host or "localhost",
        "port": parsed.port or 3306,
        "user": parsed.username,
        "password": parsed.password or "",
        "db": parsed.database,
        "unix_socket": options.get("unix_socket"),
        "ssl": make_tls_context(tls, sink=name) if tls or options.get("tls") else None,
        "charset": "utf8mb4",
        "autocommit": True,
        # Rows that an UPDATE finds count, as they do on other databases, not those that it changes.
        "client_flag": CLIENT.FOUND_ROWS,
        "cursorclass": _Cursor,
    }


# -- statements ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _translate(sql: str, count: int) -> str:
    check_statement(sql, "mysql", arguments=count)
    tokens = read_tokens(sql, "mysql")
    ends = [token for token in tokens if token.token_type.name == "SEMICOLON"]
    if any(token is not tokens[-1] for token in ends):
        raise BadStatement("expected one statement, without a ; in the middle")
    if ends:
        sql = sql[: ends[-1].start]
    return to_percent(sql, "mysql", arguments=count)


def _prepare(sql: str, args: Sequence[Any]) -> Statement:
    return _translate(sql, len(args)), check_arguments(args)


def _prepare_one_of_several(sql: str, args: Sequence[Any]) -> Statement:
    ready = _prepare(sql, args)
    if first_word(sql) in COMMITS_ON_MYSQL:
        raise BadStatement(
            f"{first_word(sql)} ends the transaction on MySQL and MariaDB, so it cannot be written together with "
            "other statements; run it on the database itself"
        )
    return ready


class _Packet(NamedTuple):
    text: bytes
    first: int
    """The number of its first statement in the batch."""
    size: int


# -- the connection --------------------------------------------------------------------------------------------------


class _MysqlSession:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._largest = _PACKET
        self._answered = 0

    async def prepare(self, timeout: timedelta) -> None:
        # Longer than we wait: it only ends what was given up here, since the server does not notice that in a wait.
        seconds = int(timeout.total_seconds()) + 1
        try:
            async with self._connection.cursor() as cursor:
                for statement in _SESSION:
                    await cursor.execute(statement.format(seconds=seconds))
                await cursor.execute("SELECT @@max_allowed_packet")
                [self._largest] = await cursor.fetchone()
        except pymysql.Error as error:
            raise Lost(describe(error)) from error

    async def run(self, statements: Sequence[Statement], *, is_reading: bool) -> list[Result]:
        results: list[Result] = []
        for packet in self._pack(statements):
            begins = not is_reading and packet.first == 0
            try:
                results += await self._send(packet, begins=begins, is_together=len(statements) > 1)
            except pymysql.Error as error:
                raise self._judge(error, packet.first + self._answered) from error
        return results

    async def _send(self, packet: _Packet, *, begins: bool, is_together: bool) -> list[Result]:
        results: list[Result] = []
        self._answered = 0
        async with self._connection.cursor() as cursor:
            await cursor.execute(_BEGIN + _BETWEEN + packet.text if begins else packet.text)
            has_more = True
            if begins:
                has_more = await cursor.nextset()
            while has_more:
                results.append(await _read_result(cursor))
                if is_together and not self._connection.get_transaction_status():
                    raise self._committed(packet.first + self._answered)
                self._answered = len(results)
                has_more = await cursor.nextset()
        if len(results) != packet.size:
            # Cannot be, as long as each statement is one: then nothing here may be committed.
            raise Lost(f"the server gave {len(results)} answers to {packet.size} statements")
        return results

    def _pack(self, statements: Sequence[Statement]) -> Iterator[_Packet]:
        largest = min(_PACKET, self._largest - len(_BEGIN) - 64)
        waiting: list[bytes] = []
        size = 0
        for index, (sql, args) in enumerate(statements):
            text = self._write(sql, args, index)
            if waiting and size + len(text) > largest:
                yield _Packet(_BETWEEN.join(waiting), index - len(waiting), len(waiting))
                waiting, size = [], 0
            waiting.append(text)
            size += len(text) + len(_BETWEEN)
        if waiting:
            yield _Packet(_BETWEEN.join(waiting), len(statements) - len(waiting), len(waiting))

    def _write(self, sql: str, args: Sequence[Any], index: int) -> bytes:
        try:
            text: bytes = (sql % tuple([self._escape(value) for value in args])).encode()
        except (pymysql.Error, ValueError) as error:
            raise Failed(index, Kind.BAD, describe(error)) from error
        if len(text) + len(_BEGIN) + 64 > self._largest:
            # The server would close the connection, which looks like an outage.
            raise Failed(
                index,
                Kind.BAD,
                f"the statement has {len(text)} bytes; the server takes {self._largest} (max_allowed_packet)",
            )
        return text

    def _escape(self, value: Any) -> str:
        if isinstance(value, bytes):
            # aiomysql calls a function for them that current releases of PyMySQL have not.
            return f"_binary X'{value.hex()}'"
        escaped: str = self._connection.escape(value)
        return escaped

    async def commit(self, count: int) -> None:
        try:
            await self._connection.commit()
        except pymysql.Error as error:
            failed = self._judge(error, count - 1)
            if isinstance(failed, Failed) and failed.kind is not Kind.CONFLICT:
                raise Lost(str(failed)) from error
            raise failed from error

    async def rollback(self) -> None:
        try:
            await self._connection.rollback()
        except pymysql.Error as error:
            raise Lost(describe(error)) from error

    async def interrupt(self) -> None:
        self.cut()

    def cut(self) -> None:
        cut(self._connection)

    async def close(self) -> None:
        self._connection.close()

    def _committed(self, index: int) -> Failed:
        # What is known to commit is refused before it is sent. Here something else did: it cannot be undone.
        text = (
            "the statement committed the transaction by itself: what stands before it in the batch is written, what "
            "comes after it may be missing or half done"
        )
        log.error("Statement %d of a batch to %s: %s.", index + 1, self._connection.host, text)
        return Failed(index, Kind.BAD, text)

    def _judge(self, error: pymysql.Error, index: int) -> Failed | Lost:
        number = error.args[0] if error.args else None
        text = describe(error)
        # Numbers from 2000 to 2999 are the client's own: it lost the server.
        if self._connection.closed or not isinstance(number, int) or 2000 <= number < 3000 or number in (1053, 1927):
            return Lost(text)
        return Failed(index, judge_code(number), text)


async def _read_result(cursor: Any) -> Result:
    if cursor.description is None:
        return {"ok": True, "rows_affected": max(0, cursor.rowcount)}
    return {"ok": True, "rows": [list(row) for row in await cursor.fetchall()]}
