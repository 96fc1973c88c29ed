"""Alembic operations that make a plain PostgreSQL table partitioned by month, and plain again, while writers write.

How a table is replaced under its writers stands in `pillarbox.schema.twin`. Both operations commit step by step, so
that writers wait for moments only: they need `autocommit_block` and enter it themselves. What a migration did before
them is committed then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from pillarbox.errors import ConfigError, SchemaError, TransactionError, Unsupported
from pillarbox.schema.partitions import (
    KEY_TYPES,
    LOCK_NOT_AVAILABLE,
    LOCK_TIMEOUT,
    add_months,
    bounds_sql,
    check_postgres,
    first_line,
    month_of,
    name_partition,
    quote,
    quote_text,
    sqlstate,
)
from pillarbox.schema.source import Source, read_source, set_apart
from pillarbox.schema.twin import ATTEMPTS, TRIGGER, Twin

if TYPE_CHECKING:
    from alembic.operations import Operations

MOST_MONTHS: Final = 600
_LEFT = "Rows of {table} before {since}, left behind by convert_to_partitioned"


def convert_to_partitioned(
    op: Operations,
    table: str,
    *,
    by: str,
    schema: str | None = None,
    since: datetime | None = None,
    drop_old: bool = False,
    batch: int = 10_000,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> None:
    """Make a table partitioned by months of the column `by`, for an Alembic migration.

    Rows before `since` stay behind in `<table>_old`, or go with `drop_old`. A table that is partitioned so already is
    left as it is. On an error the table is as it was.
    """
    with _steps(op, table) as db:
        source = read_source(db, table, schema=schema, own=TRIGGER)
        if source.kind == "p":
            if source.key != by:
                raise SchemaError(f"Table {table!r}: expected a plain table; it is partitioned by {source.key!r}")
            return
        _check_key(source, by)
        key = source.primary_key if by in source.primary_key else (*source.primary_key, by)
        cut = None if since is None else f"'{_in_utc(since):%Y-%m-%d %H:%M:%S.%f}+00'"
        twin = Twin(db, source, by, cut, batch, lock_timeout, key, is_partitioned=True)
        with _say_what_failed(twin, "nothing was changed"):
            months = _Months(twin)
        old = set_apart(source.name) if since is not None and not drop_old else None
        if old is not None and _read_comment(db, source.schema, old) is not None:
            raise SchemaError(f"Table {table!r}: there is a table {old!r} already. Rename or drop it first.")
        _replace(twin, months.prepare, months.finish, old=old)
        if since is not None and old is not None:
            _mark(twin, old, since)
            _trim(twin, old)
        twin.execute(f"ANALYZE {source.sql}")


def revert_partitioned(
    op: Operations,
    table: str,
    *,
    primary_key: Sequence[str] | None = None,
    schema: str | None = None,
    batch: int = 10_000,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> None:
    """Make a table plain that `convert_to_partitioned` made partitioned, for the downgrade.

    The primary key loses the partition key unless `primary_key` says what it is. Rows of `<table>_old` come back, if
    they were left behind by the conversion. A plain table is left as it is.
    """
    with _steps(op, table) as db:
        source = read_source(db, table, schema=schema, own=TRIGGER)
        if source.kind != "p":
            return
        if source.key is None:
            raise SchemaError(f"Table {table!r}: expected one that is partitioned by a column")
        by = source.key
        narrowed = tuple(column for column in source.primary_key if column != by)
        twin = Twin(db, source, by, None, batch, lock_timeout, tuple(primary_key or narrowed), is_partitioned=False)
        old = set_apart(source.name)
        match = re.fullmatch(
            _LEFT.format(table=re.escape(source.name), since="(.+)"), _read_comment(db, source.schema, old) or ""
        )
        left = f"{quote(source.schema)}.{quote(old)}"

        def restore() -> None:
            if match is not None:
                columns = ", ".join(quote(column) for column in source.written)
                twin.execute(
                    f"INSERT INTO {twin.sql} ({columns}) OVERRIDING SYSTEM VALUE "
                    f"SELECT {columns} FROM {left} WHERE {quote(by)} < {quote_text(match[1])}"
                )

        def forget() -> None:
            if match is not None:
                twin.execute(f"DROP TABLE {left}")

        _replace(twin, restore, forget, old=None)
        twin.execute(f"ANALYZE {source.sql}")


def _replace(twin: Twin, prepare: Callable[[], None], finish: Callable[[], None], *, old: str | None) -> None:
    with _say_what_failed(twin, "nothing was changed"):
        twin.begin(prepare)
    try:
        with _say_what_failed(twin, "the table is as it was"):
            twin.copy()
            twin.swap(finish, old=old)
    except BaseException as error:
        try:
            twin.give_up()
        except sa.exc.DBAPIError as second:
            error.add_note(
                f"Table {twin.source.name!r} keeps the trigger {TRIGGER!r}, which does nothing and could not be "
                f"removed: {first_line(second)}. The next run removes it, or: DROP FUNCTION {twin.function} CASCADE"
            )
        raise


# -- partitions of the twin --------------------------------------------------------------------------------


class _Months:
    """The twin's partitions: those of the rows, this month and the next, and one for rows of any other month."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.rest = f"{quote(twin.source.schema)}.{quote(f'{twin.name}_rest')}"
        this_month = month_of(datetime.now(UTC))
        with twin.transaction():
            found = self._read_months(twin.source.sql, twin.since)
        self.months = sorted({*found, this_month, add_months(this_month, 1)})

    def prepare(self) -> None:
        self._make(self.twin.sql, self.months)
        # The mirror must take every row that the table takes.
        self.twin.execute(f"CREATE TABLE {self.rest} PARTITION OF {self.twin.sql} DEFAULT")

    def finish(self) -> None:
        twin = self.twin
        months = self._read_months(self.rest, None)
        twin.execute(f"ALTER TABLE {twin.sql} DETACH PARTITION {self.rest}")
        if months:
            self._make(twin.sql, months)
            columns = ", ".join(quote(column) for column in twin.source.written)
            twin.execute(
                f"INSERT INTO {twin.sql} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {self.rest}"
            )
        twin.execute(f"DROP TABLE {self.rest}")

    def _make(self, parent: str, months: list[datetime]) -> None:
        source = self.twin.source
        options = f" WITH ({', '.join(source.options)})" if source.options else ""
        for month in months:
            partition = f"{quote(source.schema)}.{quote(name_partition(source.name, month))}"
            self.twin.execute(f"CREATE TABLE {partition} PARTITION OF {parent} {bounds_sql(month)}{options}")
            self.twin.execute(f"ALTER TABLE {partition} OWNER TO {quote(source.owner)}")

    def _read_months(self, table: str, since: str | None) -> list[datetime]:
        by = quote(self.twin.by)
        where = f" WHERE {by} >= {since}" if since else ""
        month = f"CASE WHEN isfinite({by}) THEN to_char({by}, 'YYYY-MM') END"
        rows = self.twin.execute(f"SELECT DISTINCT {month} FROM {table}{where}").all()
        if len(rows) > MOST_MONTHS or any(text is None for (text,) in rows):
            raise SchemaError(
                f"Table {self.twin.source.name!r}: expected times of at most {MOST_MONTHS} months in column "
                f"{self.twin.by!r}; it has {'infinity' if any(row[0] is None for row in rows) else len(rows)}"
            )
        return sorted(datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC) for (text,) in rows)


# -- what stays behind -------------------------------------------------------------------------------------


def _read_comment(db: sa.Connection, schema: str, table: str) -> str | None:
    """A table's comment, empty when it has none; None when there is no such table."""
    query = "SELECT CAST(c AS text), coalesce(obj_description(c, 'pg_class'), '') FROM to_regclass(:name) AS c"
    row = db.execute(sa.text(query), {"name": f"{quote(schema)}.{quote(table)}"}).one()
    return None if row[0] is None else str(row[1])


def _mark(twin: Twin, old: str, since: datetime) -> None:
    text = _LEFT.format(table=twin.source.name, since=_in_utc(since).isoformat())
    twin.execute(f"COMMENT ON TABLE {quote(twin.source.schema)}.{quote(old)} IS {quote_text(text)}")


def _trim(twin: Twin, old: str) -> None:
    """Delete the rows that are in the twin from the table that was set aside; nobody else uses it."""
    table = f"{quote(twin.source.schema)}.{quote(old)}"
    some = f"SELECT ctid FROM {table} WHERE {quote(twin.by)} >= {twin.since} LIMIT {twin.batch}"
    while twin.execute(f"DELETE FROM {table} WHERE ctid = ANY (ARRAY({some}))").rowcount:
        pass


# -- the migration -----------------------------------------------------------------------------------------


@contextmanager
def _steps(op: Operations, table: str) -> Iterator[sa.Connection]:
    context = op.get_context()
    if context.as_sql:
        raise Unsupported(f"Table {table!r}: its conversion reads the table and cannot be written as SQL beforehand")
    check_postgres(op.get_bind())
    with context.autocommit_block():
        yield op.get_bind()


@contextmanager
def _say_what_failed(twin: Twin, outcome: str) -> Iterator[None]:
    table = twin.source.name
    try:
        yield
    except sa.exc.DBAPIError as error:
        if sqlstate(error) == LOCK_NOT_AVAILABLE:
            raise TransactionError(
                f"Table {table!r}: its lock was not free within {twin.lock_timeout.total_seconds():g} s, {ATTEMPTS} "
                f"times, because other transactions use the table; {outcome}. Run the migration again, or look for a "
                "long transaction in pg_stat_activity."
            ) from error
        raise SchemaError(f"Table {table!r}: {first_line(error)}; {outcome}.") from error


def _check_key(source: Source, by: str) -> None:
    column = next((column for column in source.columns if column.name == by), None)
    if column is None:
        raise ConfigError(f"Table {source.name!r} has no column {by!r}")
    if column.type not in KEY_TYPES or column.is_generated:
        raise ConfigError(f"Column {by!r} of table {source.name!r}: expected a timestamp, got {column.type}")
    if not column.is_required:
        raise ConfigError(
            f"Column {by!r} of table {source.name!r} may be NULL, and such a row has no month. Make it NOT NULL first."
        )


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ConfigError(f"since: expected a time with a time zone, got {moment!r}")
    return moment.astimezone(UTC)
