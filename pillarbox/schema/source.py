"""A PostgreSQL table as its catalog has it: what another table needs to take its place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import SchemaError
from pillarbox.schema.partitions import MAX_NAME, execute, quote, split_name


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    is_required: bool
    is_generated: bool
    is_identity: bool


@dataclass(frozen=True, slots=True)
class Index:
    """An index, or the constraint that it serves; `definition` is what follows the name of the table or constraint."""

    name: str
    definition: str
    is_unique: bool
    is_constraint: bool
    columns: tuple[str, ...] | None
    """Those of a primary key."""


@dataclass(frozen=True, slots=True)
class Source:
    """A table as the catalog has it."""

    oid: int
    schema: str
    name: str
    kind: str
    owner: str
    comment: str | None
    key: str | None
    """The column that it is partitioned by."""
    columns: tuple[Column, ...]
    indexes: tuple[Index, ...]
    foreign_keys: tuple[tuple[str, str], ...]
    triggers: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def sql(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"

    @property
    def primary_key(self) -> tuple[str, ...]:
        return next(index.columns for index in self.indexes if index.columns)

    @property
    def written(self) -> list[str]:
        return [column.name for column in self.columns if not column.is_generated]


# -- reading the catalog -----------------------------------------------------------------------------------

_TABLE = """
    SELECT c.oid::bigint AS oid, n.nspname AS schema, c.relname AS name, c.relkind::text AS kind,
           pg_get_userbyid(c.relowner) AS owner, obj_description(c.oid, 'pg_class') AS comment,
           c.relrowsecurity AS has_security,
           a.attname AS key, coalesce(array_to_json(c.reloptions)::text, '[]') AS options
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0]
    WHERE c.relname = CAST(:name AS text) AND c.relkind IN ('r', 'p')
      AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_table_is_visible(c.oid)
               ELSE n.nspname = CAST(:schema AS text) END
"""
_COLUMNS = """
    SELECT attname AS name, format_type(atttypid, NULL) AS type, attnotnull AS is_required,
           attgenerated <> '' AS is_generated, attidentity <> '' AS is_identity
    FROM pg_attribute
    WHERE attrelid = CAST(:oid AS bigint)::oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_INDEXES = """
    SELECT c.relname AS name, i.indisunique AS is_unique,
           coalesce(pg_get_constraintdef(k.oid), pg_get_indexdef(i.indexrelid)) AS definition,
           k.contype::text AS contype, k.condeferrable AS is_deferrable,
           (SELECT json_agg(a.attname ORDER BY key.number)::text
            FROM unnest(k.conkey) WITH ORDINALITY AS key (attnum, number)
            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = key.attnum
            WHERE k.contype = 'p') AS columns
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
    LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid AND k.conrelid = i.indrelid AND k.contype IN ('p', 'u', 'x')
    WHERE i.indrelid = CAST(:oid AS bigint)::oid AND i.indisvalid ORDER BY c.relname
"""
_OBSTACLES = """
    SELECT 'foreign key ' || quote_ident(conname) || ' of table ' || conrelid::regclass
    FROM pg_constraint WHERE contype = 'f' AND confrelid = CAST(:oid AS bigint)::oid AND conparentid = 0
    UNION
    SELECT 'view ' || r.ev_class::regclass
    FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid
    WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
      AND d.refobjid = CAST(:oid AS bigint)::oid
    UNION
    SELECT 'publication ' || quote_ident(p.pubname)
    FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE r.prrelid = CAST(:oid AS bigint)::oid
    UNION
    SELECT 'inheritance of table ' || inhrelid::regclass FROM pg_inherits i
    JOIN pg_class c ON c.oid = i.inhrelid WHERE inhparent = CAST(:oid AS bigint)::oid AND NOT c.relispartition
    ORDER BY 1
"""
_FOREIGN_KEYS = """
    SELECT conname AS name, pg_get_constraintdef(oid) AS definition FROM pg_constraint
    WHERE contype = 'f' AND conrelid = CAST(:oid AS bigint)::oid AND conparentid = 0 ORDER BY conname
"""
_TRIGGERS = """
    SELECT pg_get_triggerdef(oid) FROM pg_trigger
    WHERE tgrelid = CAST(:oid AS bigint)::oid AND NOT tgisinternal
      AND NOT starts_with(tgname::text, CAST(:own AS text)) ORDER BY tgname
"""


def read_source(db: sa.Connection, table: str, *, schema: str | None, own: str) -> Source:
    """Look a table up; `SchemaError` when it is not there or has what another cannot take over.

    `own` is the prefix of triggers that are not the user's.
    """
    wanted, name = split_name(table, schema)
    row = execute(db, _TABLE, schema=wanted, name=name).one_or_none()
    if row is None:
        raise SchemaError(f"There is no table {table!r}" + (f" in schema {wanted!r}." if wanted else "."))
    indexes = tuple(_read_index(table, each) for each in execute(db, _INDEXES, oid=row.oid).all())
    obstacles = [text for (text,) in execute(db, _OBSTACLES, oid=row.oid)]
    obstacles += ["row security"] if row.has_security else []
    if obstacles:
        raise SchemaError(
            f"Table {table!r}: cannot be replaced by another table because of: {', '.join(obstacles)}. Remove these "
            "before, and make them again afterwards; nothing was changed."
        )
    if not any(index.columns for index in indexes):
        raise SchemaError(f"Table {table!r}: expected a primary key; without one its rows cannot be told apart")
    return Source(
        oid=row.oid,
        schema=row.schema,
        name=row.name,
        kind=row.kind,
        owner=row.owner,
        comment=row.comment,
        key=row.key,
        columns=tuple(Column(**each) for each in execute(db, _COLUMNS, oid=row.oid).mappings()),
        indexes=indexes,
        foreign_keys=tuple((each.name, each.definition) for each in execute(db, _FOREIGN_KEYS, oid=row.oid)),
        triggers=tuple(text for (text,) in execute(db, _TRIGGERS, oid=row.oid, own=own)),
        options=tuple(json.loads(row.options)),
    )


def _read_index(table: str, row: Any) -> Index:
    if row.contype == "x" or row.is_deferrable:
        what = "an exclusion constraint" if row.contype == "x" else "deferrable"
        raise SchemaError(f"Table {table!r}: constraint {row.name!r} is {what}, which its twin cannot have")
    columns = None if row.columns is None else tuple(json.loads(row.columns))
    definition = row.definition if row.contype else row.definition[row.definition.index(" USING ") :]
    return Index(row.name, definition, row.is_unique, row.contype is not None, columns)


def widen(definition: str, column: str) -> str:
    """Add a column to the key columns of an index or constraint, unless it is among them."""
    start, end = _find_keys(definition)
    keys = [key.strip().strip('"').replace('""', '"') for key in definition[start:end].split(",")]
    return definition if column in keys else f"{definition[:end]}, {quote(column)}{definition[end:]}"


def narrow(definition: str, column: str) -> str:
    """Take a column from the end of the key columns of an index or constraint, unless it is the only one."""
    start, end = _find_keys(definition)
    keys = definition[start:end]
    ends = [f", {name}" for name in (column, quote(column)) if keys.endswith(f", {name}")]
    return f"{definition[:start]}{keys.removesuffix(ends[0])}{definition[end:]}" if ends else definition


def _find_keys(definition: str) -> tuple[int, int]:
    """Where the text within the first pair of parentheses begins and ends."""
    depth, quoted = 0, ""
    start = definition.index("(") + 1
    for position in range(start - 1, len(definition)):
        letter = definition[position]
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "'\"":
            quoted = letter
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return start, position
    raise AssertionError(f"no end of the columns in {definition!r}")


def set_apart(name: str) -> str:
    """The name of a table, or of a part of one, that was set aside."""
    return f"{name.encode()[: MAX_NAME - 4].decode(errors='ignore')}_old"
