"""What the service asks of a remote database, as texts with `?` binds and their arguments; nothing is run here.

`outbox_seq` on a remote table says which queued statement wrote a row. `pillarbox_sync_marks` says up to which row a
queue was applied: a batch moves its mark and is stopped by the guard when somebody else has moved it before.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    # sqlglot, which the statements of others need, is not needed for these.
    from pillarbox.sync.binds import Dialect

SEQ_COLUMN: Final = "outbox_seq"
MARKS: Final = "pillarbox_sync_marks"
ADDED: Final = "pillarbox_sync_added"

Statement = tuple[str, tuple[Any, ...]]

_NAME_LIMITS: Final = {"sqlite": None, "postgresql": 63, "mysql": 64}


def quote_name(name: str, dialect: Dialect) -> str:
    """Return one name quoted for a database; its case is kept."""
    mark = "`" if dialect == "mysql" else '"'
    return mark + name.replace(mark, mark * 2) + mark


def quote_table(table: str, dialect: Dialect) -> str:
    """Return a table's name quoted, with its schema when the name has a dot."""
    return ".".join(quote_name(part, dialect) for part in _parts(table) if part)


def index_name(table: str, dialect: Dialect) -> str:
    """Return the name of a table's index over outbox_seq, shortened where the database has a limit."""
    name = f"idx_{_parts(table)[1]}_{SEQ_COLUMN}"
    limit = _NAME_LIMITS[dialect]
    if limit is None or len(name.encode()) <= limit:
        return name
    ending = f"_{sha256(name.encode()).hexdigest()[:8]}_{SEQ_COLUMN}"
    # The limit of PostgreSQL is in bytes: a character that would be cut in half is left out.
    return name.encode()[: limit - len(ending)].decode(errors="ignore") + ending


def add_column_sql(table: str, dialect: Dialect) -> str:
    """Return the statement that adds outbox_seq: 0, and NULL on MySQL, for rows that no queue wrote."""
    # MySQL has no partial index, and a unique index takes any number of NULLs.
    kind = {"sqlite": "INTEGER NOT NULL DEFAULT 0", "postgresql": "BIGINT NOT NULL DEFAULT 0", "mysql": "BIGINT NULL"}
    check = "IF NOT EXISTS " if dialect == "postgresql" else ""
    return f"ALTER TABLE {quote_table(table, dialect)} ADD COLUMN {check}{SEQ_COLUMN} {kind[dialect]}"


def create_index_sql(table: str, dialect: Dialect) -> str:
    """Return the statement that makes outbox_seq unique among the rows that a queue wrote."""
    schema, bare = _parts(table)
    name = quote_name(index_name(table, dialect), dialect)
    if dialect == "mysql":
        return f"CREATE UNIQUE INDEX {name} ON {quote_table(table, dialect)} ({SEQ_COLUMN})"
    target = quote_table(table, dialect)
    if dialect == "sqlite" and schema:
        # SQLite takes the schema on the index alone.
        name, target = f"{quote_name(schema, dialect)}.{name}", quote_name(bare, dialect)
    return f"CREATE UNIQUE INDEX IF NOT EXISTS {name} ON {target} ({SEQ_COLUMN}) WHERE {SEQ_COLUMN} <> 0"


def schema_sql(tables: Iterable[str], dialect: Dialect) -> list[str]:
    """Return the statements that add outbox_seq and its index to tables. On MySQL each of them commits."""
    return [make(table, dialect) for table in tables for make in (add_column_sql, create_index_sql)]


def drop_schema_sql(tables: Iterable[str], dialect: Dialect) -> list[str]:
    """Return the statements that take outbox_seq and its index from tables. On MySQL each of them commits."""
    return [text for table in tables for text in _drops(table, dialect)]


def marks_ddl(dialect: Dialect) -> str:
    """Return the statement that makes the table of marks where it is missing."""
    return (
        f"CREATE TABLE IF NOT EXISTS {MARKS} (queue VARCHAR(64) NOT NULL PRIMARY KEY, table_name VARCHAR(255) NOT NULL,"
        f" applied BIGINT NOT NULL, token VARCHAR(36) NOT NULL){_table_options(dialect)}"
    )


def added_ddl(dialect: Dialect) -> str:
    """Return the statement that makes the table of columns that we added ourselves, where it is missing."""
    return (
        f"CREATE TABLE IF NOT EXISTS {ADDED} (table_name VARCHAR(255) NOT NULL PRIMARY KEY,"
        f" added_at VARCHAR(40) NOT NULL){_table_options(dialect)}"
    )


def select_columns(table: str, dialect: Dialect) -> Statement:
    """Return the question for a table's columns: one a row, in the order that an INSERT without a list fills them.

    outbox_seq is among them when the table has it. No row means that there is no such table.
    """
    schema, bare = _parts(table)
    if dialect == "sqlite":
        source, args = ("?, ?", (bare, schema)) if schema else ("?", (bare,))
        return f"SELECT name FROM pragma_table_info({source}) ORDER BY cid", args
    if dialect == "postgresql":
        return (
            "SELECT CAST(attname AS text) FROM pg_catalog.pg_attribute WHERE attrelid = to_regclass(CAST(? AS text)) "
            "AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (quote_table(table, dialect),),
        )
    return (
        "SELECT column_name FROM information_schema.columns WHERE table_schema = COALESCE(?, DATABASE()) "
        f"AND table_name = ? AND (extra NOT LIKE '%INVISIBLE%' OR column_name = '{SEQ_COLUMN}') "
        "ORDER BY ordinal_position",
        (schema, bare),
    )


def select_index(table: str, dialect: Dialect) -> Statement:
    """Return the question for the unique indexes over outbox_seq alone: one name a row, whatever they are called."""
    schema, bare = _parts(table)
    if dialect == "sqlite":
        source, args = ("?, ?", (bare, schema)) if schema else ("?", (bare,))
        return (
            f'SELECT i.name FROM pragma_index_list({source}) AS i WHERE i."unique" = 1 AND '
            f"(SELECT group_concat(c.name) FROM pragma_index_info({'i.name, ?' if schema else 'i.name'}) AS c) = ?",
            (*args, *([schema] if schema else []), SEQ_COLUMN),
        )
    if dialect == "postgresql":
        return (
            "SELECT CAST(c.relname AS text) FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c "
            "ON c.oid = i.indexrelid JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid "
            "AND a.attnum = i.indkey[0] WHERE i.indrelid = to_regclass(CAST(? AS text)) AND i.indisunique "
            "AND i.indisvalid AND i.indnkeyatts = 1 AND a.attname = ?",
            (quote_table(table, dialect), SEQ_COLUMN),
        )
    return (
        "SELECT index_name FROM information_schema.statistics WHERE table_schema = COALESCE(?, DATABASE()) "
        "AND table_name = ? GROUP BY index_name HAVING COUNT(*) = 1 AND MAX(column_name) = ? AND MAX(non_unique) = 0",
        (schema, bare, SEQ_COLUMN),
    )


def select_maximum(table: str, dialect: Dialect) -> Statement:
    """Return the question for the highest outbox_seq of a table: one row, 0 when no queue wrote to it."""
    return f"SELECT COALESCE(MAX({SEQ_COLUMN}), 0) FROM {quote_table(table, dialect)}", ()


def read_mark(queue: str) -> Statement:
    """Return the question for a queue's mark: one row (applied, token), or none."""
    return f"SELECT applied, token FROM {MARKS} WHERE queue = ?", (queue,)


def create_mark(queue: str, table: str, *, applied: int, dialect: Dialect) -> Statement:
    """Return the statement that makes a queue's mark where it is missing; an existing one stays as it is."""
    columns = f"INTO {MARKS} (queue, table_name, applied, token) VALUES (?, ?, ?, '')"
    args = (queue, table, applied)
    if dialect == "mysql":
        return f"INSERT {columns} ON DUPLICATE KEY UPDATE queue = queue", args
    return f"INSERT {columns} ON CONFLICT (queue) DO NOTHING", args


def fence_mark(queue: str, *, known: tuple[int, str], token: str) -> Statement:
    """Return the statement that signs a mark anew where it is: batches that know the old signature then fail."""
    return f"UPDATE {MARKS} SET token = ? WHERE queue = ? AND applied = ? AND token = ?", (token, queue, *known)


def advance_mark(queue: str, *, known: tuple[int, str], applied: int, token: str) -> Statement:
    """Return the first statement of a batch: it moves the mark from where we know it, or nothing."""
    return (
        f"UPDATE {MARKS} SET applied = ?, token = ? WHERE queue = ? AND applied = ? AND token = ?",
        (applied, token, queue, *known),
    )


def guard_mark(queue: str, *, applied: int, token: str) -> Statement:
    """Return the second statement of a batch: it fails with a duplicate key unless the mark is where we moved it."""
    # Two equal rows violate the primary key whether the mark exists or not, in every SQL mode of every database.
    return (
        f"INSERT INTO {MARKS} (queue, table_name, applied, token) "
        "SELECT g.queue, 'another session moved the mark', 0, '' FROM (SELECT ? AS queue UNION ALL SELECT ?) AS g "
        f"WHERE NOT EXISTS (SELECT 1 FROM {MARKS} AS m WHERE m.queue = ? AND m.applied = ? AND m.token = ?)",
        (queue, queue, queue, applied, token),
    )


def select_added() -> Statement:
    """Return the question for the tables whose outbox_seq we added ourselves: one name a row."""
    return f"SELECT table_name FROM {ADDED} ORDER BY table_name", ()


def record_added(table: str, *, added_at: datetime, dialect: Dialect) -> Statement:
    """Return the statement that remembers that we added a table's outbox_seq; a second time it changes nothing."""
    columns = f"INTO {ADDED} (table_name, added_at) VALUES (?, ?)"
    args = (table, added_at.isoformat())
    if dialect == "mysql":
        return f"INSERT {columns} ON DUPLICATE KEY UPDATE table_name = table_name", args
    return f"INSERT {columns} ON CONFLICT (table_name) DO NOTHING", args


def forget_added(table: str) -> Statement:
    """Return the statement that forgets a table whose outbox_seq was dropped."""
    return f"DELETE FROM {ADDED} WHERE table_name = ?", (table,)


def _parts(table: str) -> tuple[str | None, str]:
    schema, dot, bare = table.rpartition(".")
    return (schema if dot else None), bare


def _drops(table: str, dialect: Dialect) -> tuple[str, str]:
    schema, _ = _parts(table)
    target = quote_table(table, dialect)
    name = quote_name(index_name(table, dialect), dialect)
    if dialect == "mysql":
        drop = f"DROP INDEX {name} ON {target}"
    else:
        drop = f"DROP INDEX IF EXISTS {quote_name(schema, dialect) + '.' if schema else ''}{name}"
    return drop, f"ALTER TABLE {target} DROP COLUMN {SEQ_COLUMN}"


def _table_options(dialect: Dialect) -> str:
    # The mark must take part in the batch's transaction and tell upper from lower case.
    return " ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if dialect == "mysql" else ""
