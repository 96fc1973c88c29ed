"""Replacing a PostgreSQL table by a twin of another shape while others write to it.

    begin    the twin, and a trigger that mirrors every change of the table into it, appear in one transaction
    copy     batches in the order of the primary key. A batch locks its rows FOR SHARE and skips those that a writer
             has locked, so that it never waits and cannot be part of a deadlock. What it has locked cannot change until
             the copy is committed; a change after that is mirrored. A skipped row comes again in a later batch.
    swap     under ACCESS EXCLUSIVE: the last skipped rows, the sequences, the names

A change that a writer commits is therefore in the twin, by the trigger or by a batch that read it. A crash leaves the
twin and the trigger behind, which hurt nobody, and the next attempt removes them. Every step is a transaction of its
own on a connection in autocommit mode.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from pillarbox.errors import ConfigError, SchemaError
from pillarbox.schema.partitions import (
    LOCK_NOT_AVAILABLE,
    MAX_NAME,
    execute,
    quote,
    quote_text,
    session_settings,
    set_locally,
    sqlstate,
)
from pillarbox.schema.source import Source, narrow, set_apart, widen

T = TypeVar("T")

ATTEMPTS: Final = 10
"""How often a lock is asked for, and how often rows that were locked are tried again."""

PAUSE: Final = 0.1
"""Seconds between two tries of rows that were locked."""

TRIGGER: Final = "pillarbox_twin"
RETRIED: Final = (LOCK_NOT_AVAILABLE, "40P01", "40001")
"""The last two: a deadlock was lost, and a row that was to be locked went to another partition."""


@dataclass
class Twin:
    """The replacement of one table; `since` leaves rows behind whose `by` is before it."""

    db: sa.Connection
    source: Source
    by: str
    since: str | None
    """As SQL."""
    batch: int
    lock_timeout: timedelta
    key: tuple[str, ...]
    """The twin's primary key."""
    is_partitioned: bool

    def __post_init__(self) -> None:
        self.name = self._derive("twin")
        self.sql = f"{quote(self.source.schema)}.{quote(self.name)}"
        self.function = f"{quote(self.source.schema)}.{quote(self._derive('mirror'))}"
        self.skipped: list[tuple[str, ...]] = []

    def _derive(self, word: str) -> str:
        name = f"{self.source.name}_{word}"
        if len(name.encode()) > MAX_NAME:
            raise ConfigError(f"Table {self.source.name!r}: the name {name!r} is longer than {MAX_NAME} bytes")
        return name

    # -- begin

    def begin(self, prepare: Callable[[], None]) -> None:
        """Make the twin, let `prepare` add to it, and mirror into it from here on."""

        def work() -> None:
            self._drop_own()
            shape = f" PARTITION BY RANGE ({quote(self.by)})" if self.is_partitioned else ""
            parts = ("DEFAULTS", "CONSTRAINTS", "IDENTITY", "GENERATED", "STORAGE", "COMMENTS")
            including = " ".join(f"INCLUDING {part}" for part in parts)
            self.execute(f"CREATE TABLE {self.sql} (LIKE {self.source.sql} {including}){shape}")
            self._add_indexes()
            for name, definition in self.source.foreign_keys:
                self.execute(f"ALTER TABLE {self.sql} ADD CONSTRAINT {quote(name)} {definition}")
            self._take_over_rights()
            prepare()
            # Mirroring needs less, but to end it needs this lock: better to hear now that it cannot be had.
            self.execute(f"LOCK TABLE {self.source.sql} IN ACCESS EXCLUSIVE MODE")
            self._mirror()

        self._insist(work)

    def _drop_own(self) -> None:
        self.execute(f"DROP FUNCTION IF EXISTS {self.function} CASCADE")
        self.execute(f"DROP TABLE IF EXISTS {self.sql}")

    def _names(self, columns: Sequence[str]) -> str:
        return ", ".join(quote(column) for column in columns)

    def _add_indexes(self) -> None:
        change = widen if self.is_partitioned else narrow
        for number, index in enumerate(self.source.indexes):
            name = quote(self._index_name(number))
            definition = change(index.definition, self.by) if index.is_unique else index.definition
            if index.columns:
                definition = f"PRIMARY KEY ({self._names(self.key)})"
            if index.is_constraint:
                self.execute(f"ALTER TABLE {self.sql} ADD CONSTRAINT {name} {definition}")
            else:
                self.execute(f"CREATE {'UNIQUE ' if index.is_unique else ''}INDEX {name} ON {self.sql}{definition}")

    def _index_name(self, number: int) -> str:
        return f"{TRIGGER}_{self.source.oid}_{number}"

    def _take_over_rights(self) -> None:
        self.execute(f"ALTER TABLE {self.sql} OWNER TO {quote(self.source.owner)}")
        rights = """
            SELECT format('%s ON %s TO %s%s',
                a.privilege_type || coalesce(' (' || quote_ident(r.attname) || ')', ''), CAST(:twin AS text),
                CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
                CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
            FROM (
                SELECT relacl AS acl, NULL::name AS attname FROM pg_class WHERE oid = CAST(:oid AS bigint)::oid
                UNION ALL SELECT attacl, attname FROM pg_attribute WHERE attrelid = CAST(:oid AS bigint)::oid
            ) AS r, aclexplode(r.acl) AS a
        """
        for (right,) in self.execute(rights, oid=self.source.oid, twin=self.sql).all():
            self.execute(f"GRANT {right}")

    def _mirror(self) -> None:
        columns = self._names(self.source.written)
        values = ", ".join(f"NEW.{quote(column)}" for column in self.source.written)
        identity = [*self.source.primary_key, self.by]
        same = " AND ".join(f"{quote(column)} = OLD.{quote(column)}" for column in dict.fromkeys(identity))
        wanted = f" AND NEW.{quote(self.by)} >= {self.since}" if self.since else ""
        body = f"""
            BEGIN
                IF TG_OP = 'TRUNCATE' THEN
                    TRUNCATE {self.sql};
                    RETURN NULL;
                END IF;
                IF TG_OP <> 'INSERT' THEN
                    DELETE FROM {self.sql} WHERE {same};
                END IF;
                IF TG_OP <> 'DELETE'{wanted} THEN
                    INSERT INTO {self.sql} ({columns}) OVERRIDING SYSTEM VALUE VALUES ({values});
                END IF;
                RETURN NULL;
            END
        """
        # Writers need no right on the twin, and a subscription's writes count too.
        self.execute(
            f"CREATE FUNCTION {self.function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            f"SET search_path FROM CURRENT AS {quote_text(body)}"
        )
        table, function = self.source.sql, self.function
        for name, when in ((TRIGGER, "INSERT OR UPDATE OR DELETE"), (f"{TRIGGER}_truncate", "TRUNCATE")):
            each = "ROW" if name == TRIGGER else "STATEMENT"
            self.execute(f"CREATE TRIGGER {name} AFTER {when} ON {table} FOR EACH {each} EXECUTE FUNCTION {function}()")
            self.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}")

    # -- copy

    def copy(self) -> None:
        """Copy what was there before the mirror; what writers have locked is left for later."""
        last: tuple[str, ...] | None = None
        while True:
            page = self._copy_page(last)
            if not page:
                break
            last = page[-1]
        for _ in range(ATTEMPTS):
            if not self.skipped:
                return
            self._insist(self.copy_skipped)
            time.sleep(PAUSE)

    def _copy_page(self, last: tuple[str, ...] | None) -> list[tuple[str, ...]]:
        keys = self.source.primary_key
        wanted = [f"{quote(self.by)} >= {self.since}"] if self.since else []
        params: dict[str, Any] = {"limit": self.batch}
        if last is not None:
            given = ", ".join(
                f"CAST(CAST(:key_{number} AS text) AS {self._type(key)})" for number, key in enumerate(keys)
            )
            wanted.append(f"({self._names(keys)}) > ({given})")
            params |= {f"key_{number}": value for number, value in enumerate(last)}
        where = f" WHERE {' AND '.join(wanted)}" if wanted else ""
        names = self._names(keys)
        page = f"SELECT {names} FROM {self.source.sql}{where} ORDER BY {names} LIMIT CAST(:limit AS bigint)"
        return self._insist(lambda: self._copy(page, **params))

    def copy_skipped(self) -> None:
        """Try the rows again that were locked; in a transaction that has locked the table none is."""
        again, self.skipped = self.skipped, []
        for start in range(0, len(again), self.batch):
            self._copy(self._page_of_keys(), given=json.dumps(again[start : start + self.batch]))

    def _copy(self, page: str, **params: Any) -> list[tuple[str, ...]]:
        keys = self.source.primary_key
        columns = self._names(self.source.written)
        using = self._names(keys)
        wanted = f" WHERE {quote(self.by)} >= {self.since}" if self.since else ""
        target = self._names(self.key)
        texts = ", ".join(f"CAST(page.{quote(key)} AS text)" for key in keys)
        order = ", ".join(f"page.{quote(key)}" for key in keys)
        rows = self.execute(
            f"""
            WITH page AS MATERIALIZED ({page}),
            locked AS MATERIALIZED (
                SELECT source.* FROM {self.source.sql} AS source JOIN page USING ({using})
                FOR SHARE OF source SKIP LOCKED
            ),
            copied AS (
                INSERT INTO {self.sql} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM locked{wanted}
                ON CONFLICT ({target}) DO NOTHING
            )
            SELECT {texts}, locked.{quote(keys[0])} IS NULL FROM page LEFT JOIN locked USING ({using}) ORDER BY {order}
            """,
            **params,
        ).all()
        self.skipped += [tuple(row[:-1]) for row in rows if row[-1]]
        if set(self.key) < set(keys):
            self._check_arrival([tuple(row[:-1]) for row in rows if not row[-1]])
        return [tuple(row[:-1]) for row in rows]

    def _check_arrival(self, copied: list[tuple[str, ...]]) -> None:
        """A narrower key may take two rows for one. The rows are still locked: those that are missing met another."""
        same = " AND ".join(f"twin.{quote(key)} = page.{quote(key)}" for key in self.source.primary_key)
        missing = self.execute(
            f"SELECT count(*) FROM ({self._page_of_keys()}) AS page "
            f"WHERE NOT EXISTS (SELECT FROM {self.sql} AS twin WHERE {same})",
            given=json.dumps(copied),
        ).scalar_one()
        if missing:
            raise SchemaError(
                f"Table {self.source.name!r}: {missing} rows have the same {', '.join(self.key)} as another row, so "
                "that it cannot be the primary key; the table is as it was."
            )

    def _page_of_keys(self) -> str:
        keys = enumerate(self.source.primary_key)
        columns = ", ".join(f"CAST(k ->> {number} AS {self._type(key)}) AS {quote(key)}" for number, key in keys)
        return f"SELECT {columns} FROM json_array_elements(CAST(:given AS json)) AS k"

    def _type(self, name: str) -> str:
        return next(column.type for column in self.source.columns if column.name == name)

    # -- swap

    def swap(self, finish: Callable[[], None], *, old: str | None) -> None:
        """Put the twin in the table's place; the table is renamed to `old`, or dropped."""

        def work() -> None:
            self.execute(f"LOCK TABLE {self.source.sql} IN ACCESS EXCLUSIVE MODE")
            self.copy_skipped()
            self.execute(f"DROP FUNCTION {self.function} CASCADE")
            finish()
            sequences = self._take_over_sequences()
            if old is None:
                self.execute(f"DROP TABLE {self.source.sql}")
            else:
                self._set_aside(old, sequences)
            self.execute(f"ALTER TABLE {self.sql} RENAME TO {quote(self.source.name)}")
            self._rename_parts(sequences)

        self._insist(work)

    def _set_aside(self, old: str, sequences: dict[str, str]) -> None:
        self.execute(f"ALTER TABLE {self.source.sql} RENAME TO {quote(old)}")
        home = quote(self.source.schema)
        for index in self.source.indexes:
            self.execute(f"ALTER INDEX {home}.{quote(index.name)} RENAME TO {quote(set_apart(index.name))}")
        for name in sequences:
            self.execute(f"ALTER SEQUENCE {home}.{quote(name)} RENAME TO {quote(set_apart(name))}")

    def _rename_parts(self, sequences: dict[str, str]) -> None:
        home = quote(self.source.schema)
        for number, index in enumerate(self.source.indexes):
            self.execute(f"ALTER INDEX {home}.{quote(self._index_name(number))} RENAME TO {quote(index.name)}")
        for name, own in sequences.items():
            self.execute(f"ALTER SEQUENCE {home}.{quote(own)} RENAME TO {quote(name)}")
        for definition in self.source.triggers:
            self.execute(definition)
        if self.source.comment is not None:
            self.execute(f"COMMENT ON TABLE {self.source.sql} IS {quote_text(self.source.comment)}")

    def _take_over_sequences(self) -> dict[str, str]:
        """Let ids go on where they are; returns the twin's own sequence by the name of the one it replaces."""
        replaced: dict[str, str] = {}
        find = """
            SELECT c.relname AS name, c.oid::regclass::text AS sql, a.attname AS column, d.deptype::text AS kind
            FROM pg_depend d
            JOIN pg_class c ON c.oid = d.objid AND c.relkind = 'S'
            JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
            WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
              AND d.refobjid = to_regclass(:table) AND d.deptype IN ('a', 'i')
        """
        own = {row.column: row for row in self.execute(find, table=self.sql) if row.kind == "i"}
        for row in self.execute(find, table=self.source.sql).all():
            if row.kind == "a":
                self.execute(f"ALTER SEQUENCE {row.sql} OWNED BY {self.sql}.{quote(row.column)}")
                continue
            other = own[row.column]
            # Under the lock nobody takes a number between the two.
            self.execute(
                f"SELECT setval(CAST(CAST(:own AS text) AS regclass), last_value, is_called) FROM {row.sql}",
                own=other.sql,
            )
            replaced[row.name] = other.name
        return replaced

    # -- when it fails

    def give_up(self) -> None:
        """Remove the twin and the mirror; the table is as it was."""

        def work() -> None:
            self.execute(f"LOCK TABLE {self.source.sql} IN ACCESS EXCLUSIVE MODE")
            self._drop_own()

        try:
            self._insist(work)
        except sa.exc.DBAPIError:
            self._disarm()
            raise

    def _disarm(self) -> None:
        """Let the mirror do nothing, for which the table needs no lock, and remove the twin."""
        body = quote_text("BEGIN RETURN NULL; END")
        with self.transaction():
            self.execute(f"CREATE OR REPLACE FUNCTION {self.function}() RETURNS trigger LANGUAGE plpgsql AS {body}")

        def work() -> None:
            self.execute(f"DROP TABLE IF EXISTS {self.sql}")

        self._insist(work)

    # -- transactions

    def _insist(self, work: Callable[[], T]) -> T:
        """Run work in a transaction, again when a lock was not free; in between writers go on."""
        for attempt in range(1, ATTEMPTS + 1):
            skipped = list(self.skipped)
            try:
                with self.transaction():
                    return work()
            except sa.exc.DBAPIError as error:
                self.skipped = skipped
                if sqlstate(error) not in RETRIED or attempt == ATTEMPTS:
                    raise
            # Those who queued behind us get as long as they have waited.
            time.sleep(self.lock_timeout.total_seconds())
        raise AssertionError("unreachable")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.db.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            set_locally(self.db, session_settings(self.lock_timeout))
            yield
            self.db.exec_driver_sql("COMMIT")
        except BaseException:
            self.db.exec_driver_sql("ROLLBACK")
            raise

    def execute(self, sql: str, **params: Any) -> sa.CursorResult[Any]:
        return execute(self.db, sql, **params)
