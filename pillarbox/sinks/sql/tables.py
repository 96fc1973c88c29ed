"""The two tables a SQL sink may make at its destination: the events, and which were received.

A received event is a row of the second one, unique by consumer and event. It is written in the transaction of the
event's own rows, so an event that comes again finds it and does nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from operator import attrgetter
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from pillarbox.event import LIMITS
from pillarbox.sinks.sql.failures import is_duplicate

CONSUMER_LENGTH: Final = 200
PRUNED_AT_ONCE: Final = 1000
# The driver for MySQL splits what is longer than a megabyte into several statements; so many rows are not.
INSERTED_AT_ONCE: Final = 1000
_FAMILY: Final = ("mysql", "mariadb")
_MYSQL_TABLE: Final[Any] = {
    f"{name}_{option}": value
    for name in _FAMILY
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}

EventId: Final = (
    sa.CHAR(36)
    .with_variant(postgresql.UUID(as_uuid=True), "postgresql")
    .with_variant(mysql.CHAR(36, charset="ascii", collation="ascii_bin"), *_FAMILY)
)
Instant: Final = (
    sa.Text().with_variant(sa.TIMESTAMP(timezone=True), "postgresql").with_variant(mysql.DATETIME(fsp=6), *_FAMILY)
)
Body: Final = sa.BLOB().with_variant(postgresql.BYTEA(), "postgresql").with_variant(mysql.LONGBLOB(), *_FAMILY)
Headers: Final = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
# SQLite can number rows only by a column of exactly this type.
Number: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_NOW: Final = {
    "postgresql": "now()",
    "mysql": "CURRENT_TIMESTAMP(6)",
    "mariadb": "CURRENT_TIMESTAMP(6)",
    "sqlite": "(strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now'))",
}
_BEFORE: Final = {
    "postgresql": "now() - make_interval(secs => :seconds)",
    "mysql": "CURRENT_TIMESTAMP(6) - INTERVAL :seconds SECOND",
    "mariadb": "CURRENT_TIMESTAMP(6) - INTERVAL :seconds SECOND",
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '-' || :seconds || ' seconds')",
}


def declare_events(name: str, *, schema: str | None, dialect: str) -> sa.Table:
    """The event table as `create` makes it; `seq` numbers the rows in the order of arrival."""
    texts = ("aggregate_type", "aggregate_id", "schema_version", "correlation_id", "causation_id", "trace_id", "source")
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("seq", Number, *([sa.Identity()] if dialect == "postgresql" else []), primary_key=True),
        sa.Column("id", EventId, nullable=False),
        sa.Column("type", sa.String(LIMITS["type"]), nullable=False),
        sa.Column("topic", sa.String(LIMITS["topic"]), nullable=False),
        sa.Column("key", sa.String(LIMITS["key"])),
        sa.Column("payload", Body, nullable=False),
        sa.Column("content_type", sa.String(LIMITS["content_type"]), nullable=False),
        sa.Column("headers", Headers, nullable=False),
        *(sa.Column(text, sa.String(LIMITS[text])) for text in texts),
        sa.Column("created_at", Instant),
        sa.Column("received_at", Instant, nullable=False, server_default=sa.text(_NOW[dialect])),
        schema=schema,
        **_MYSQL_TABLE,
    )


def declare_received(name: str, *, schema: str | None, dialect: str) -> sa.Table:
    """The table of received events, as `create` makes it and the sink expects it."""
    table = sa.Table(
        name,
        sa.MetaData(),
        sa.Column("consumer", sa.String(CONSUMER_LENGTH), primary_key=True),
        sa.Column("event_id", EventId, primary_key=True),
        sa.Column("received_at", Instant, nullable=False, server_default=sa.text(_NOW[dialect])),
        schema=schema,
        **_MYSQL_TABLE,
    )
    sa.Index(f"{name}_received_at", table.c.received_at)
    return table


def show_ddl(table: sa.Table, dialect: sa.Dialect) -> str:
    """The statements that make a table, on one line each."""
    made: list[Any] = [CreateTable(table), *map(CreateIndex, table.indexes)]
    return " ".join(" ".join(str(each.compile(dialect=dialect)).split()) + ";" for each in made)


class Received:
    """Takes events once for one consumer, in the caller's transaction; ids are what `encode` makes of them."""

    def __init__(self, table: sa.Table, *, consumer: str, keep: timedelta, dialect: str) -> None:
        self.table = table
        self._consumer = consumer
        self._keep = keep.total_seconds()
        self._dialect = dialect
        # Without types: values go to the driver as they are.
        rows = sa.table(
            table.name, sa.column("consumer"), sa.column("event_id"), sa.column("received_at"), schema=table.schema
        )
        self._rows = rows
        self._insert = sa.insert(rows).values(consumer=sa.bindparam("consumer"), event_id=sa.bindparam("event_id"))
        self._known = sa.select(rows.c.event_id).where(
            rows.c.consumer == sa.bindparam("consumer"), rows.c.event_id.in_(sa.bindparam("ids", expanding=True))
        )
        ids = sa.func.unnest(sa.bindparam("ids", type_=postgresql.ARRAY(postgresql.UUID(as_uuid=True))))
        self._insert_new = (
            postgresql.insert(table)
            .from_select(["consumer", "event_id"], sa.select(sa.bindparam("consumer", type_=sa.Text()), ids))
            .on_conflict_do_nothing()
            .returning(table.c.event_id)
        )

    def take(self, db: sa.Connection, ids: Collection[Any]) -> set[Any]:
        """Write the ids down as received; returns those that were new.

        Waits for another transaction that is just taking one of them, to know whether it commits.
        """
        # In one order everywhere, so that two relays with the same events do not wait for each other.
        if self._dialect == "postgresql":
            ordered = sorted(ids, key=attrgetter("int"))
            return set(db.execute(self._insert_new, {"consumer": self._consumer, "ids": ordered}).scalars())
        ordered = sorted(set(ids))
        if self._dialect == "sqlite" or len(ordered) > INSERTED_AT_ONCE:
            return self._insert_unknown(db, ordered)
        try:
            # Nearly always all are new; the server undoes the statement as a whole when one is not.
            self._insert_all(db, ordered)
            return set(ordered)
        except sa.exc.IntegrityError as error:
            if not is_duplicate(error):
                raise
        return self._insert_unknown(db, ordered)

    def _insert_unknown(self, db: sa.Connection, ids: list[Any]) -> set[Any]:
        known = set(db.execute(self._known, {"consumer": self._consumer, "ids": ids}).scalars())
        unknown = [each for each in ids if each not in known]
        self._insert_all(db, unknown)
        return set(unknown)

    def _insert_all(self, db: sa.Connection, ids: list[Any]) -> None:
        if ids:
            db.execute(self._insert, [{"consumer": self._consumer, "event_id": each} for each in ids])

    def prune(self, db: sa.Connection) -> int:
        """Forget up to a thousand events that were received longer ago than is kept; returns how many."""
        name = db.dialect.identifier_preparer.format_table(self.table)
        old = f"consumer = :consumer AND received_at < {_BEFORE[self._dialect]}"
        if self._dialect in _FAMILY:
            statement = f"DELETE FROM {name} WHERE {old} ORDER BY received_at LIMIT {PRUNED_AT_ONCE}"
        else:
            row = "ctid" if self._dialect == "postgresql" else "rowid"
            few = f"SELECT {row} FROM {name} WHERE {old} ORDER BY received_at LIMIT {PRUNED_AT_ONCE}"
            statement = f"DELETE FROM {name} WHERE {row} IN ({few})"
        found = db.execute(sa.text(statement), {"consumer": self._consumer, "seconds": self._keep})
        return int(found.rowcount)
