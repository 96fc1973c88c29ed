"""Another SQL database: event rows in one table, or a statement an event; exactly once.

A batch is one transaction, and each event's id goes into a table of received events in that same transaction. A crash
after its commit and before the store's settlement delivers again, which then does nothing. When the database refuses
a batch for what is in it, the batch is halved until the bad events stand alone: the others are delivered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks.options import read_options
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.sql.engine import DRIVER_OPTIONS, Runner, ServerRunner, Work, backend_of, open_runner
from pillarbox.sinks.sql.failures import Kind, describe, is_missing, judge
from pillarbox.sinks.sql.rows import MissingTable, RowWriter, UnfitTable
from pillarbox.sinks.sql.statements import FunctionWriter, Statement, StatementWriter
from pillarbox.sinks.sql.tables import CONSUMER_LENGTH, PRUNED_AT_ONCE, Received, declare_received, show_ddl
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Given, Read, one_of, read_pause, read_switch, read_text

log = logging.getLogger("pillarbox.sink")

RECEIVED: Final = "pillarbox_received"
KEEP: Final = timedelta(days=30)
TIMEOUT: Final = timedelta(seconds=10)
PRUNE_EVERY: Final = timedelta(hours=1)
MAX_CONFLICTS: Final = 4
_ROOM: Final = 65_536


def _read_table(given: Given) -> Mapping[str, Any]:
    if not isinstance(given.value, Mapping):
        raise ConfigError(f"{given.where}: expected a table of names and values, in pillarbox.toml or in Python")
    return given.value


_OPTIONS: Final[dict[str, Read]] = {
    "table": read_text,
    "schema": read_text,
    "columns": _read_table,
    "statements": _read_table,
    "params": _read_table,
    "unmatched": one_of("dead", "ignore"),
    "consumer": read_text,
    "dedup_table": read_text,
    "dedup_keep": read_pause,
    "create": read_switch,
    "timeout": read_pause,
}


class SqlSink(Sink):
    """Writes events to a database. Url: `postgresql://…`, `mysql://…`, `mariadb://…` or `sqlite:///path`.

    Give one of `table` (a row an event; `columns` maps fields of the event to your own columns), `statements` (SQL by
    the type of the event, binds explained by `params`) and, in Python, `statement` (a function that makes a statement).
    `consumer` is whose received events these are, the table's name by default. With `create` the sink makes the event
    table and the table of received events. With `engine` the connections are yours: the sink does not close them.
    """

    is_quick: bool = True

    def __init__(
        self,
        engine: AsyncEngine | Runner,
        *,
        name: str = "sql:",
        table: str | None = None,
        schema: str | None = None,
        columns: Mapping[str, str] | None = None,
        statements: Mapping[str, str] | None = None,
        statement: Statement | None = None,
        params: Mapping[str, Any] | None = None,
        unmatched: Literal["dead", "ignore"] | None = None,
        consumer: str | None = None,
        dedup_table: str = RECEIVED,
        dedup_keep: timedelta = KEEP,
        create: bool = False,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        what = f"Sink {name!r}"
        self.name = name
        if isinstance(engine, AsyncEngine):
            engine = ServerRunner(engine, timeout=timeout, owns_engine=False)
        self._runner = engine
        targets = {"table": table, "statements": statements, "statement": statement}
        given = [option for option, value in targets.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f'{what}: expected one option that says where events go: table = "events" for a row an event, '
                f"statements for SQL by the type of event or, in Python, statement; got {' and '.join(given) or 'none'}"
            )
        if table is None and columns is not None:
            raise ConfigError(f"{what} columns: is for table; statements name their own columns")
        if statements is None and (params is not None or unmatched is not None):
            raise ConfigError(f"{what} {'params' if params is not None else 'unmatched'}: is for statements")
        self._writer: RowWriter | StatementWriter | FunctionWriter
        if table is not None:
            self._writer = RowWriter(table, schema=schema, columns=columns, what=what)
        elif statements is not None:
            ignores = unmatched == "ignore"
            self._writer = StatementWriter(statements, params=params, ignores_unmatched=ignores, what=what)
        elif statement is not None:
            self._writer = FunctionWriter(statement)
        dialect = self._runner.dialect.name
        self._received = Received(
            declare_received(dedup_table, schema=schema, dialect=dialect),
            consumer=_check_consumer(consumer or table, what),
            keep=dedup_keep,
            dialect=dialect,
        )
        self._has_uuids = dialect == "postgresql"
        self._creates = create
        self._is_ready = False
        self._packet: int | None = None
        self._prune_at = 0.0

    @classmethod
    def from_url(cls, url: SinkUrl) -> SqlSink:
        of_driver = DRIVER_OPTIONS[backend_of(url.scheme)]
        options = read_options(url, {**_OPTIONS, **of_driver})
        timeout = options.get("timeout", TIMEOUT)
        runner = open_runner(url, options, timeout=timeout, has_statements="statements" in options)
        return cls(runner, name=url.name, **{name: options[name] for name in _OPTIONS if name in options})

    async def open(self) -> None:
        self._is_ready = False
        await self._make_ready()

    async def check(self) -> None:
        await self._transact(self._look)

    async def close(self) -> None:
        await self._runner.close()

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        if not claims:
            return outcomes
        await self._make_ready()
        rows = self._prepare(claims, outcomes)
        stopped: set[str] = set()
        # Groups still to be tried, the first one last; a group that fails is replaced by its halves.
        groups = [list(rows)]
        try:
            while groups:
                group = [position for position in groups.pop() if claims[position].event.key not in stopped]
                if not group:
                    continue
                failure = await self._write([(claims[position].event.id, rows[position]) for position in group])
                if failure is None:
                    for position in group:
                        outcomes[position] = DELIVERED
                elif len(group) > 1:
                    half = len(group) // 2
                    groups += [group[half:], group[:half]]
                else:
                    outcomes[group[0]] = failure
                    _stop(stopped, claims[group[0]])
        except SinkUnavailable as error:
            error.outcomes = release_successors(claims, outcomes)
            raise
        await self._prune()
        return release_successors(claims, outcomes) if stopped else outcomes

    def _prepare(self, claims: Sequence[Claim], outcomes: list[Outcome]) -> dict[int, Any]:
        """What is to be written, by position; the outcomes of the others are known."""
        rows: dict[int, Any] = {}
        stopped: set[str] = set()
        prepare = self._writer.prepare
        for position, claim in enumerate(claims):
            if stopped and claim.event.key in stopped:
                continue
            try:
                if self._packet is not None:
                    _check_size(claim.event.payload, self._packet)
                row = prepare(claim.event)
            except Refused as error:
                outcomes[position] = Dead(str(error))
                _stop(stopped, claim)
            except Exception as error:  # the user's function
                outcomes[position] = Retry(describe_error(error), cause=error)
                _stop(stopped, claim)
            else:
                if row is None:
                    outcomes[position] = DELIVERED
                else:
                    rows[position] = row
        return rows

    async def _write(self, rows: Sequence[tuple[Any, Any]]) -> Outcome | None:
        """Write rows in one transaction; None when they are there, else what would be one event's outcome."""

        def work(db: sa.Connection) -> None:
            ids = [identity if self._has_uuids else str(identity) for identity, _ in rows]
            new = self._received.take(db, ids)
            fresh = []
            for identity, (_, row) in zip(ids, rows, strict=True):
                if identity in new:
                    new.discard(identity)
                    fresh.append(row)
            if fresh:
                self._writer.write(db, fresh)

        for conflict in range(MAX_CONFLICTS):
            try:
                await self._runner.run(work)
                return None
            except Exception as error:
                kind = judge(error)
                if kind is None:
                    raise
                if kind in (Kind.DOWN, Kind.WRONG):
                    raise self._unavailable(error, kind) from error
                if kind is not Kind.CONFLICT:
                    return Dead(describe(error)) if kind is Kind.BAD else Retry(describe(error), cause=error)
                failure = Retry(describe(error), cause=error)
            await asyncio.sleep(0.01 * 2**conflict)
        if len(rows) > 1:
            # What lasts is no event's fault: halves would only wait for the same lock, each of them.
            raise SinkUnavailable(f"Sink {self.name}: {failure.error}") from failure.cause
        return failure

    async def _make_ready(self) -> None:
        if self._is_ready:
            return
        if self._creates:
            await self._transact(self._create)
        await self._transact(self._look)
        self._is_ready = True

    async def _transact(self, work: Work[None]) -> None:
        try:
            await self._runner.run(work)
        except MissingTable as error:
            raise SinkUnavailable(f"Sink {self.name}: {error}. {self._hint()}") from error
        except UnfitTable as error:
            raise SinkUnavailable(f"Sink {self.name}: {error}.") from error
        except Exception as error:
            kind = judge(error)
            if kind is None:
                raise
            raise self._unavailable(error, kind) from error

    def _create(self, db: sa.Connection) -> None:
        for table in self._tables():
            table.create(db, checkfirst=True)

    def _look(self, db: sa.Connection) -> None:
        db.execute(sa.select(self._received.table).limit(0))
        self._writer.look(db)
        if db.dialect.name in ("mysql", "mariadb"):
            self._packet = int(db.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())

    def _tables(self) -> list[sa.Table]:
        events = self._writer.declare(self._runner.dialect.name) if isinstance(self._writer, RowWriter) else None
        return [self._received.table] if events is None else [self._received.table, events]

    def _unavailable(self, error: BaseException, kind: Kind) -> SinkUnavailable:
        self._is_ready = self._is_ready and kind is Kind.DOWN
        hint = f". {self._hint()}" if is_missing(error) else ""
        return SinkUnavailable(f"Sink {self.name}: {describe(error)}{hint}")

    def _hint(self) -> str:
        ddl = " ".join(show_ddl(table, self._runner.dialect) for table in self._tables())
        return f"The option create makes what the sink needs: {ddl}"

    async def _prune(self) -> None:
        """Forget a few of the events received long ago; at the next delivery again while there are more."""
        if time.monotonic() < self._prune_at:
            return
        try:
            count = await self._runner.run(self._received.prune)
        except Exception as error:
            # What was delivered is delivered: the next time will do.
            if judge(error) is None:
                raise
            log.warning("Sink %s: could not forget events received long ago: %s", self.name, describe(error))
            count = 0
        if count < PRUNED_AT_ONCE:
            self._prune_at = time.monotonic() + PRUNE_EVERY.total_seconds()


def _check_size(payload: bytes, packet: int) -> None:
    """Refuse what MySQL would answer by closing the connection, which looks like an outage."""
    # Bytes are written as two digits each; and there must be room for everything else in the statement.
    if 2 * len(payload) + _ROOM > packet:
        raise Refused(
            f"The payload has {len(payload)} bytes; at most {(packet - _ROOM) // 2} fit into the server's "
            f"max_allowed_packet, {packet}"
        )


def _stop(stopped: set[str], claim: Claim) -> None:
    if claim.event.key is not None:
        stopped.add(claim.event.key)


def _check_consumer(consumer: str | None, what: str) -> str:
    if consumer is None:
        raise ConfigError(
            f"{what}: expected consumer, a name that tells what this sink received from what others with the same "
            "events receive in that database"
        )
    if len(consumer) > CONSUMER_LENGTH:
        raise ConfigError(f"{what} consumer: at most {CONSUMER_LENGTH} characters fit, got {len(consumer)}")
    return consumer
