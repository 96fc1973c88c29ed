"""What PostgreSQL has, from its catalog, which every user may read whatever the rights on the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import SchemaError
from pillarbox.schema.predicates import columns_of, unquote
from pillarbox.schema.shape import CheckShape, ColumnShape, IndexShape, TableShape, parse_type

_TABLE = """
SELECT c.oid, CASE WHEN c.relkind = 'p' THEN pg_get_partkeydef(c.oid) END
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = :name AND c.relkind IN ('r', 'p')
  AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_table_is_visible(c.oid) ELSE n.nspname = :schema END
"""

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid),
       CAST(a.attidentity AS text), a.attgenerated <> '', s.name, q.seqcache
FROM pg_attribute a
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
CROSS JOIN LATERAL (SELECT pg_get_serial_sequence(CAST(a.attrelid AS regclass)::text, a.attname)) s (name)
LEFT JOIN pg_sequence q ON q.seqrelid = CAST(CAST(s.name AS regclass) AS oid)
WHERE a.attrelid = :oid AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

_INDEXES = """
SELECT i.relname, x.indisunique, x.indisprimary, x.indisvalid, m.amname, pg_get_expr(x.indpred, x.indrelid, true),
       x.indnkeyatts, CAST(x.indoption AS text), pg_get_indexdef(i.oid), n.conname, pg_get_constraintdef(n.oid),
       ARRAY(SELECT pg_get_indexdef(i.oid, k, true) FROM generate_series(1, x.indnatts) k ORDER BY k)
FROM pg_index x
JOIN pg_class i ON i.oid = x.indexrelid
JOIN pg_am m ON m.oid = i.relam
LEFT JOIN pg_constraint n ON n.conindid = i.oid AND n.conrelid = x.indrelid AND n.contype IN ('p', 'u')
WHERE x.indrelid = :oid
ORDER BY i.relname
"""

_CHECKS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = :oid AND contype = 'c' ORDER BY conname
"""

# The settings of a partitioned table are those of its partitions.
_SETTINGS = """
SELECT CAST(CAST(c.oid AS regclass) AS text), c.reloptions
FROM pg_class c
WHERE c.oid = :oid AND c.relkind = 'r'
   OR c.oid IN (SELECT relid FROM pg_partition_tree(CAST(:oid AS oid)) WHERE isleaf)
ORDER BY 1
"""


def check_access(db: sa.Connection, schema: str | None) -> None:
    """Raise `SchemaError` when a schema is not there or may not be used."""
    if schema is None:
        return
    found = db.execute(
        sa.text(
            "SELECT has_schema_privilege(oid, 'USAGE'), quote_ident(nspname), quote_ident(current_user), current_user "
            "FROM pg_namespace WHERE nspname = :schema"
        ),
        {"schema": schema},
    ).one_or_none()
    if found is None:
        raise SchemaError(
            f"There is no schema {schema!r}. Create it first: CREATE SCHEMA {_quote(db, schema)}; "
            "Pillarbox creates tables only."
        )
    is_usable, name, user, plain_user = found
    if not is_usable:
        raise SchemaError(
            f"User {plain_user!r} may not use schema {schema!r}. Let its owner run: GRANT USAGE ON SCHEMA {name} "
            f"TO {user}"
        )


def _quote(db: sa.Connection, name: str) -> str:
    return str(db.dialect.identifier_preparer.quote(name))


def read_table(db: sa.Connection, table: sa.Table) -> TableShape | None:
    """The picture of a live table, None when there is none."""
    found = db.execute(sa.text(_TABLE), {"name": table.name, "schema": table.schema}).first()
    if found is None:
        return None
    oid, partition = found
    indexes = db.execute(sa.text(_INDEXES), {"oid": oid}).all()
    primary = next((row for row in indexes if row[2]), None)
    return TableShape(
        columns=_read_columns(db, oid),
        key=() if primary is None else tuple(unquote(name) for name in primary[11][: primary[6]]),
        key_name=None if primary is None else primary[9],
        indexes=[_index(row) for row in indexes if not row[2]],
        checks=_read_checks(db, oid),
        partition=partition,
        partition_columns=columns_of(partition.partition("(")[2]) if partition else frozenset(),
    )


def _read_columns(db: sa.Connection, oid: int) -> dict[str, ColumnShape]:
    columns = {}
    for name, type_, is_required, default, identity, generated, sequence, cache in db.execute(
        sa.text(_COLUMNS), {"oid": oid}
    ):
        numbering = {"d": "by default", "a": "always"}.get(identity)
        if default is not None and sequence is not None and default.startswith("nextval("):
            numbering, default = "serial", None
        columns[name] = ColumnShape(
            name=name,
            type=parse_type(type_, db.dialect),
            nullable=not is_required,
            default=None if generated else default,
            numbering=numbering,
            cache=cache if numbering else None,
            sequence=sequence,
            is_generated=generated,
        )
    return columns


def _index(row: Any) -> IndexShape:
    name, is_unique, _, is_valid, method, where, keys, options, definition, constraint, constraint_def, columns = row
    flags = [int(each) for each in options.split()]
    return IndexShape(
        name=name,
        columns=tuple(
            column + (" desc" if flag & 1 else "") for column, flag in zip(columns[:keys], flags, strict=False)
        ),
        is_unique=is_unique,
        where=where,
        include=tuple(map(unquote, columns[keys:])),
        method=method,
        is_valid=is_valid,
        constraint=None if constraint is None else constraint_def,
        definition=definition,
    )


def _read_checks(db: sa.Connection, oid: int) -> list[CheckShape]:
    checks = []
    for name, text in db.execute(sa.text(_CHECKS), {"oid": oid}):
        predicate = re.sub(r"( NOT VALID| NO INHERIT| NOT ENFORCED)+$", "", text)
        checks.append(
            CheckShape(name, predicate.removeprefix("CHECK "), is_enforced=not text.endswith(" NOT ENFORCED"))
        )
    return checks


def read_settings(db: sa.Connection, table: sa.Table) -> dict[str, Mapping[str, str]]:
    """The storage settings of a table, or of each of its partitions, by name."""
    found = db.execute(sa.text(_TABLE), {"name": table.name, "schema": table.schema}).first()
    if found is None:
        return {}
    rows = db.execute(sa.text(_SETTINGS), {"oid": found[0]})
    return {name: dict(each.split("=", 1) for each in options or ()) for name, options in rows}
