"""One target: its writer, what the writer can, and the questions the service asks the database through it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pillarbox.errors import SinkUnavailable, StoreUnavailable
from pillarbox.retry import describe_error
from pillarbox.sync import remote_sql
from pillarbox.sync.writers import Batches, Dialect, Statement, Writer, describe
from pillarbox.urls import Secrets

log = logging.getLogger("pillarbox.sync")


class Remote:
    """A target's database behind its writer; shared by the tables of the target.

    `batches` and `dialect` override what the writer says of itself. At most `concurrency` calls run at once. What it
    says is passed on without the secrets of `connection`.
    """

    def __init__(
        self,
        name: str,
        writer: Writer,
        *,
        batches: Batches | None = None,
        dialect: Dialect | None = None,
        auto_schema: bool = True,
        connection: Mapping[str, Any] | None = None,
    ) -> None:
        traits = describe(writer)
        self.name = name
        self.writer = writer
        self.batches = batches or traits.batches
        self.dialect = dialect or traits.dialect
        self._auto_schema = auto_schema
        self._secrets = Secrets(connection or {})
        self._slots = asyncio.Semaphore(traits.concurrency)
        self._opening = asyncio.Lock()
        self._is_open = False
        self.indexes: dict[str, tuple[str, ...]] = {}
        """The names of the unique indexes on `outbox_seq`, by table, as far as they were looked for."""
        self._tables: set[str] = set()
        self._changing = asyncio.Lock()

    @property
    def is_atomic(self) -> bool:
        return self.batches == "atomic"

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._hook("open")
                self._is_open = True

    async def close(self) -> None:
        async with self._opening:
            if self._is_open:
                self._is_open = False
                await self._hook("close")

    async def _hook(self, name: str) -> None:
        call = getattr(self.writer, name, None)
        if call is None:
            return
        try:
            result = call()
            if asyncio.iscoroutine(result):
                await result
        except SinkUnavailable:
            raise
        except Exception as error:
            reason = self._secrets.hide(describe_error(error))
            raise SinkUnavailable(f"Target {self.name}: its writer's {name} failed: {reason}") from None

    # -- writing -----------------------------------------------------------------------------------------------------

    async def write(self, statements: Sequence[Statement]) -> Sequence[Mapping[str, Any]]:
        """One call of the writer; whatever it raises means that the outcome is not known."""
        await self.open()
        async with self._slots:
            try:
                results = await self.writer.write_batch([(sql, list(args)) for sql, args in statements])
            except SinkUnavailable:
                raise
            except Exception as error:
                # Without its cause: a traceback would show what is hidden here.
                raise SinkUnavailable(f"Target {self.name}: {self._secrets.hide(describe_error(error))}") from None
        return self._check(results, len(statements))

    def _check(self, results: Any, count: int) -> Sequence[Mapping[str, Any]]:
        is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
        if not is_list or not all(isinstance(each, Mapping) and "ok" in each for each in results):
            raise SinkUnavailable(
                f"Target {self.name}: its writer returned {str(results)[:200]!r}; expected a list with one dict a "
                'statement, such as {"ok": True, "rows_affected": 1}'
            )
        if len(results) > count:
            raise SinkUnavailable(f"Target {self.name}: its writer gave {len(results)} answers to {count} statements")
        return [each if each["ok"] else self._clean(each) for each in results]

    def _clean(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**result, "error": self._secrets.hide(str(result.get("error") or "the writer gave no reason"))}

    async def ask(self, statement: Statement, what: str) -> list[Sequence[Any]]:
        """The rows of a SELECT; raises `StoreUnavailable` when there is no answer."""
        try:
            results = await self.write([statement])
        except SinkUnavailable as error:
            raise StoreUnavailable(f"Target {self.name}: {what} cannot be read now: {error}") from error
        if not results or not results[0]["ok"]:
            reason = results[0].get("error") if results else "the writer gave no answer"
            hint = "" if self._auto_schema else ". `pillarbox sync schema` prints what has to be there"
            raise StoreUnavailable(f"Target {self.name}: {what} cannot be read: {reason}{hint}")
        rows = results[0].get("rows")
        if not isinstance(rows, Sequence):
            raise StoreUnavailable(
                f"Target {self.name}: {what} cannot be read: its writer answered a SELECT without rows; expected "
                '{"ok": True, "rows": [[…]]}'
            )
        return [list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows]

    async def _do(self, statement: Statement, what: str) -> None:
        try:
            results = await self.write([statement])
        except SinkUnavailable as error:
            raise StoreUnavailable(f"Target {self.name}: {what}: {error}") from error
        if not results or not results[0]["ok"]:
            reason = results[0].get("error") if results else "the writer gave no answer"
            raise StoreUnavailable(f"Target {self.name}: {what} failed: {reason}")

    # -- schema ------------------------------------------------------------------------------------------------------

    async def ensure_schema(self, table: str, *, inject: bool) -> None:
        """Add what is missing, and take away the column that we added once and that is not wanted any more."""
        if not self._auto_schema:
            return
        async with self._changing:
            if self.is_atomic:
                await self._ensure_table(remote_sql.MARKS, remote_sql.marks_ddl(self.dialect))
            if inject:
                await self._ensure_table(remote_sql.ADDED, remote_sql.added_ddl(self.dialect))
                await self._add_column(table)
                return
            try:
                if await self._has_table(remote_sql.ADDED) and await self._was_added(table):
                    await self._drop_column(table)
            except StoreUnavailable as error:
                log.info("Target %s: whether %s has a column of ours is left open: %s", self.name, table, error)

    async def _ensure_table(self, name: str, ddl: str) -> None:
        if name not in self._tables:
            await self._do((ddl, ()), f"making the table {name}")
            self._tables.add(name)

    async def _has_table(self, name: str) -> bool:
        return bool(await self.ask(remote_sql.select_columns(name, self.dialect), f"the columns of {name}"))

    async def _was_added(self, table: str) -> bool:
        rows = await self.ask(remote_sql.select_added(), f"what was added to {table}")
        return any(str(row[0]) == table for row in rows)

    async def _add_column(self, table: str) -> None:
        column, index = remote_sql.schema_sql([table], self.dialect)
        if remote_sql.SEQ_COLUMN not in await self.read_columns(table):
            # Recorded first: a column that is there without a record would never be taken away again.
            if not await self._was_added(table):
                record = remote_sql.record_added(table, added_at=datetime.now(UTC), dialect=self.dialect)
                await self._do(record, f"noting the column of {table}")
            await self._do((column, ()), f"adding {remote_sql.SEQ_COLUMN} to {table}")
            log.info("Target %s: added %s to %s.", self.name, remote_sql.SEQ_COLUMN, table)
        found = await self.ask(remote_sql.select_index(table, self.dialect), f"the index of {table}")
        self.indexes[table] = tuple(str(row[0]) for row in found)
        if not found:
            await self._do((index, ()), f"adding the index on {remote_sql.SEQ_COLUMN} to {table}")

    async def _drop_column(self, table: str) -> None:
        if remote_sql.SEQ_COLUMN in await self.read_columns(table):
            for sql in remote_sql.drop_schema_sql([table], self.dialect):
                await self._do((sql, ()), f"dropping {remote_sql.SEQ_COLUMN} of {table}")
            log.info("Target %s: dropped %s of %s, which was added here.", self.name, remote_sql.SEQ_COLUMN, table)
        await self._do(remote_sql.forget_added(table), f"forgetting the column of {table}")

    # -- questions ---------------------------------------------------------------------------------------------------

    async def read_columns(self, table: str) -> tuple[str, ...]:
        """The names of a table's columns in order, `outbox_seq` among them."""
        rows = await self.ask(remote_sql.select_columns(table, self.dialect), f"the columns of {table}")
        if not rows:
            is_folded = self.dialect == "postgresql" and table != table.lower()
            hint = f". PostgreSQL keeps unquoted names in lower case: is it {table.lower()!r}?" if is_folded else ""
            raise StoreUnavailable(
                f"Target {self.name}: there is no table {table!r}. Create it; its rows wait meanwhile{hint}"
            )
        return tuple(str(row[0]) for row in rows)

    async def read_maximum(self, table: str) -> int:
        """The highest number that the table has."""
        rows = await self.ask(remote_sql.select_maximum(table, self.dialect), f"the highest outbox_seq of {table}")
        return _as_number(rows, f"Target {self.name}: the highest outbox_seq of {table}") or 0

    async def read_mark(self, queue_id: str) -> tuple[int, str] | None:
        """Up to which number the statements of a queue are there, and who signed; None for a queue never seen."""
        rows = await self.ask(remote_sql.read_mark(queue_id), "the mark of the queue")
        applied = _as_number(rows, f"Target {self.name}: the mark of queue {queue_id}")
        return None if applied is None else (applied, str(rows[0][1]))

    async def fence_mark(self, queue_id: str, *, known: tuple[int, str], token: str) -> None:
        await self._do(remote_sql.fence_mark(queue_id, known=known, token=token), "signing the mark of the queue")

    async def create_mark(self, queue_id: str, table: str) -> None:
        statement = remote_sql.create_mark(queue_id, table, applied=0, dialect=self.dialect)
        await self._do(statement, "making the mark of the queue")


def _as_number(rows: Sequence[Sequence[Any]], what: str) -> int | None:
    value = rows[0][0] if rows and rows[0] else None
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError) as error:
        raise StoreUnavailable(f"{what}: expected a number, got {value!r}") from error
