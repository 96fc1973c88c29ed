"""Monthly partitions of a PostgreSQL table: made ahead of their time, dropped when they are old.

A partition is judged by its bounds in the catalog, never by its name. Bounds are months of UTC, whatever the session's
time zone is. Whoever changes partitions locks the parent first and looks at the catalog after that, so that any number
of processes may run this at once, and beside other tools that do the same work:

    making     SHARE UPDATE EXCLUSIVE on the parent: readers and writers go on. A table is made empty and attached,
               because CREATE TABLE … PARTITION OF would lock them out.
    dropping   ACCESS EXCLUSIVE on the parent, for as long as the caller's transaction lasts after it.

Nobody waits for a lock longer than `lock_timeout`, and so nobody waits longer behind the one who waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from pillarbox.errors import ConfigError, SchemaError, TransactionError, Unsupported

LOCK_TIMEOUT: Final = timedelta(seconds=2)
MAX_NAME: Final = 63
"""Bytes of a name in PostgreSQL."""

KEY_TYPES: Final = ("timestamp with time zone", "timestamp without time zone")

LOCK_NOT_AVAILABLE: Final = "55P03"
CHECK_VIOLATION: Final = "23514"


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A table as the catalog has it."""

    oid: int
    schema: str
    name: str
    key: str

    @property
    def sql(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition and its bounds; a default partition has none, nor has one without an end."""

    schema: str
    name: str
    kind: str
    since: datetime | None
    until: datetime | None
    is_default: bool

    @property
    def sql(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"

    @property
    def is_month(self) -> bool:
        return self.since is not None and self.since == month_of(self.since) and self.until == add_months(self.since, 1)


# -- making and dropping -----------------------------------------------------------------------------------


def ensure_partitions(
    db: sa.Connection,
    table: str,
    *,
    schema: str | None = None,
    months_ahead: int = 1,
    now: datetime | None = None,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> list[str]:
    """Make the partitions of the current month and of the next ones; return the names of the new ones.

    Runs in the caller's transaction, which must be READ COMMITTED, and takes no lock when nothing is missing. Raises
    `SchemaError` when a partition cannot be made and `TransactionError` when a lock is not free in time; nothing was
    changed then, and the transaction can go on.
    """
    check_number("months_ahead", months_ahead, least=0)
    this_month = month_of(now or datetime.now(UTC))
    months = [add_months(this_month, number) for number in range(months_ahead + 1)]
    with work_on(db, table, lock_timeout):
        parent = find_partitioned(db, table, schema=schema)
        names = {month: name_partition(parent.name, month) for month in months}
        if not _list_missing(db, parent, months):
            return []
        execute(db, f"LOCK TABLE ONLY {parent.sql} IN SHARE UPDATE EXCLUSIVE MODE")
        missing = _list_missing(db, parent, months)
        for month in missing:
            _make_partition(db, parent, month, names[month])
        return [names[month] for month in missing]


def drop_partitions(
    db: sa.Connection,
    table: str,
    *,
    keep: int = 12,
    schema: str | None = None,
    now: datetime | None = None,
    dry_run: bool = False,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> list[str]:
    """Drop every monthly partition before the kept months; return their names, oldest first.

    The current month is the last of the kept ones. What is not exactly one month stays, and so does a default
    partition. Transactions and errors are as with `ensure_partitions`.
    """
    check_number("keep", keep, least=1)
    oldest = add_months(month_of(now or datetime.now(UTC)), 1 - keep)
    with work_on(db, table, lock_timeout):
        parent = find_partitioned(db, table, schema=schema)
        old = _list_old(db, parent, oldest)
        if old and not dry_run:
            # Not its partitions: those that stay need no lock.
            execute(db, f"LOCK TABLE ONLY {parent.sql} IN ACCESS EXCLUSIVE MODE")
            old = _list_old(db, parent, oldest)
            for partition in old:
                execute(db, f"DROP TABLE {partition.sql}")
        return [partition.name for partition in old]


def _list_missing(db: sa.Connection, parent: Partitioned, months: list[datetime]) -> list[datetime]:
    partitions = list_partitions(db, parent)
    missing = []
    for month in months:
        end = add_months(month, 1)
        near = [each for each in partitions if _overlaps(each, month, end)]
        if not near:
            missing.append(month)
        elif not any(_covers(each, month, end) for each in near):
            raise SchemaError(
                f"Table {parent.name!r}: partition {near[0].name!r} has a part of {month:%Y-%m} only, so that "
                "no partition for that month can be made. Make the rest of the month by hand, or detach it."
            )
    return missing


def _overlaps(partition: Partition, since: datetime, until: datetime) -> bool:
    if partition.is_default:
        return False
    starts_before = partition.since is None or partition.since < until
    return starts_before and (partition.until is None or partition.until > since)


def _covers(partition: Partition, since: datetime, until: datetime) -> bool:
    starts_before = partition.since is None or partition.since <= since
    return starts_before and (partition.until is None or partition.until >= until)


def _list_old(db: sa.Connection, parent: Partitioned, oldest: datetime) -> list[Partition]:
    # A foreign table is somebody else's archive.
    months = [each for each in list_partitions(db, parent) if each.is_month and each.kind != "f"]
    return [each for each in months if each.until is not None and each.until <= oldest]


def _make_partition(db: sa.Connection, parent: Partitioned, month: datetime, name: str) -> None:
    partition = f"{quote(parent.schema)}.{quote(name)}"
    if db.execute(sa.text("SELECT to_regclass(:name)"), {"name": partition}).scalar() is not None:
        raise SchemaError(
            f"Table {parent.name!r}: expected no table {name!r}, or one that is the partition of {month:%Y-%m}; "
            "there is another. Rename it, or attach it by hand."
        )
    # Indexes, keys and triggers come with the attachment.
    like = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE"
    execute(db, f"CREATE TABLE {partition} (LIKE {parent.sql} {like})")
    try:
        execute(db, f"ALTER TABLE {parent.sql} ATTACH PARTITION {partition} {bounds_sql(month)}")
    except sa.exc.DBAPIError as error:
        if sqlstate(error) != CHECK_VIOLATION:
            raise
        raise SchemaError(
            f"Table {parent.name!r}: partition {name!r} cannot be made, because the default partition has rows of "
            f"{month:%Y-%m}. Detach the default partition, run this again, insert those rows into {parent.name!r}, "
            "delete them from the detached table, then attach it again."
        ) from error


# -- months and names --------------------------------------------------------------------------------------


def month_of(moment: datetime) -> datetime:
    """The start of a moment's month in UTC."""
    if moment.tzinfo is None:
        raise ConfigError(f"Time: expected one with a time zone, got {moment!r}")
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def add_months(month: datetime, number: int) -> datetime:
    count = month.year * 12 + month.month - 1 + number
    return month.replace(year=count // 12, month=count % 12 + 1)


def name_partition(table: str, month: datetime) -> str:
    name = f"{table}_{month:%Y_%m}"
    if len(name.encode()) > MAX_NAME:
        raise ConfigError(
            f"Table {table!r}: the name of its partition {name!r} is {len(name.encode())} bytes long, and PostgreSQL "
            f"would cut it at {MAX_NAME}. Expected a table's name of {MAX_NAME - 8} bytes at most."
        )
    return name


def bounds_sql(month: datetime) -> str:
    # A column without a time zone reads the same text and ignores the offset.
    first, last = (f"'{moment:%Y-%m-%d} 00:00:00+00'" for moment in (month, add_months(month, 1)))
    return f"FOR VALUES FROM ({first}) TO ({last})"


def split_name(table: str, schema: str | None) -> tuple[str | None, str]:
    """A table's schema and name: `sales.outbox` says both."""
    if schema is None and "." in table:
        schema, table = table.split(".", 1)
    return schema, table


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def check_number(name: str, number: int, *, least: int) -> None:
    if number < least:
        raise ConfigError(f"Partitions: expected {name} of at least {least}, got {number!r}")


# -- the catalog -------------------------------------------------------------------------------------------

_FIND = sa.text("""
    SELECT c.oid::bigint AS oid, n.nspname AS schema, c.relname AS name, c.relkind::text AS kind,
           p.partstrat::text AS strategy, p.partnatts AS columns, a.attname AS key,
           format_type(a.atttypid, NULL) AS type
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0]
    WHERE c.relname = CAST(:name AS text) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_table_is_visible(c.oid)
               ELSE n.nspname = CAST(:schema AS text) END
""")

_LIST = sa.text("""
    SELECT n.nspname AS schema, c.relname AS name, c.relkind::text AS kind,
           pg_get_expr(c.relpartbound, c.oid) AS bounds
    FROM pg_inherits i
    JOIN pg_class c ON c.oid = i.inhrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE i.inhparent = CAST(:parent AS bigint)::oid AND c.relispartition
""")


def find_partitioned(db: sa.Connection, table: str, *, schema: str | None = None) -> Partitioned:
    """Look a table up that is partitioned by ranges of one time; `SchemaError` when it is not."""
    wanted, name = split_name(table, schema)
    row = db.execute(_FIND, {"schema": wanted, "name": name}).one_or_none()
    if row is None:
        raise SchemaError(f"There is no table {table!r}" + (f" in schema {wanted!r}." if wanted else "."))
    expected = f"Table {table!r}: expected a table partitioned by RANGE of one timestamp column"
    if row.kind != "p":
        raise SchemaError(f"{expected}; it is not partitioned. `convert_to_partitioned` makes it so in a migration.")
    if row.strategy != "r" or row.columns != 1 or row.type not in KEY_TYPES:
        strategy = {"r": "RANGE", "l": "LIST", "h": "HASH"}.get(row.strategy, row.strategy)
        of = f"{row.columns} columns" if row.columns != 1 else f"{row.key!r} ({row.type})" if row.key else "expression"
        raise SchemaError(f"{expected}; it is partitioned by {strategy} of {of}")
    return Partitioned(oid=row.oid, schema=row.schema, name=row.name, key=row.key)


def is_partitioned(db: sa.Connection, table: str, *, schema: str | None = None) -> bool:
    """Whether there is such a table and it has partitions of any kind."""
    wanted, name = split_name(table, schema)
    row = db.execute(_FIND, {"schema": wanted, "name": name}).one_or_none()
    return row is not None and row.kind == "p"


def list_partitions(db: sa.Connection, parent: Partitioned) -> list[Partition]:
    """The partitions by time, the default one last. The session must speak ISO dates in UTC."""
    found = [
        Partition(row.schema, row.name, row.kind, *_read_bounds(row.bounds), is_default=row.bounds == "DEFAULT")
        for row in db.execute(_LIST, {"parent": parent.oid})
        if row.bounds is not None  # dropped by somebody else while we looked
    ]
    earliest = datetime.min.replace(tzinfo=UTC)
    return sorted(found, key=lambda each: (each.is_default, each.since or earliest, each.name))


def _read_bounds(bounds: str) -> tuple[datetime | None, datetime | None]:
    match = re.fullmatch(r"FOR VALUES FROM \((.+)\) TO \((.+)\)", bounds)
    return (None, None) if match is None else (_read_moment(match[1]), _read_moment(match[2]))


def _read_moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text.strip("'"))
    except ValueError:  # MINVALUE, MAXVALUE, infinity, or a year that nobody lives in
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


# -- the session -------------------------------------------------------------------------------------------


@contextmanager
def work_on(db: sa.Connection, table: str, lock_timeout: timedelta) -> Iterator[None]:
    """A savepoint in a session that is in UTC and waits briefly; afterwards it is as it was."""
    check_postgres(db)
    level = db.execute(sa.text("SELECT current_setting('transaction_isolation')")).scalar_one()
    if level != "read committed":
        raise TransactionError(
            f"Table {table!r}: expected a READ COMMITTED transaction, got {level.upper()}: it would not see the "
            "partitions that others have made since it began."
        )
    with say_what_failed(table, lock_timeout), db.begin_nested():
        settings = session_settings(lock_timeout)
        before = {name: db.execute(_SHOW, {"name": name}).scalar_one() for name in settings}
        set_locally(db, settings)
        yield
        set_locally(db, before)


_SHOW = sa.text("SELECT current_setting(:name)")
_SET = sa.text("SELECT set_config(:name, :value, true)")


def session_settings(lock_timeout: timedelta) -> dict[str, str]:
    milliseconds = max(1, int(lock_timeout / timedelta(milliseconds=1)))
    return {"TimeZone": "UTC", "DateStyle": "ISO, YMD", "lock_timeout": f"{milliseconds}ms"}


def set_locally(db: sa.Connection, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        db.execute(_SET, {"name": name, "value": value})


@contextmanager
def say_what_failed(table: str, lock_timeout: timedelta) -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        state = sqlstate(error)
        if state == LOCK_NOT_AVAILABLE:
            raise TransactionError(
                f"Table {table!r}: its lock was not free within {lock_timeout.total_seconds():g} s, because another "
                "transaction uses the table; nothing was changed. Run it again, or look for a long transaction in "
                "pg_stat_activity."
            ) from error
        if state[:2] in ("2B", "42", "23", "55"):  # what depends on it, the DDL, the rows, the object's state
            raise SchemaError(f"Table {table!r}: {first_line(error)}; nothing was changed.") from error
        raise


def check_postgres(db: sa.Connection) -> None:
    if db.dialect.name != "postgresql":
        raise Unsupported(f"Partitions: expected a PostgreSQL database, got {db.dialect.name}")


def execute(db: sa.Connection, sql: str, **params: Any) -> sa.CursorResult[Any]:
    """Run SQL that has names of any kind in it; parameters are given as `:name`, and only those."""
    text = re.sub(r"(?<!:):(\w+)", lambda each: each[0] if each[1] in params else f"\\{each[0]}", sql)
    return db.execute(sa.text(text), params)


def sqlstate(error: sa.exc.DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or "")


def first_line(error: sa.exc.DBAPIError) -> str:
    text = str(error.orig).strip().splitlines()[0]
    return re.sub(r"^<class '[^']+'>: ", "", text).rstrip(".")
