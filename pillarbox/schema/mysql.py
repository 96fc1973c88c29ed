"""What MySQL or MariaDB has: information_schema for columns and indexes, SHOW CREATE TABLE for checks.

information_schema hides the constraints from a user who may only read; SHOW CREATE TABLE does not.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import SchemaError
from pillarbox.schema.predicates import columns_of, tokenize, unquote
from pillarbox.schema.shape import CheckShape, ColumnShape, IndexShape, TableShape, parse_type

_COLUMNS = """
SELECT column_name, column_type, is_nullable, column_default, extra, collation_name, generation_expression
FROM information_schema.columns
WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name
ORDER BY ordinal_position
"""

_INDEXES = """
SELECT index_name, non_unique, column_name, sub_part, collation, index_type, {expression}
FROM information_schema.statistics
WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name
ORDER BY index_name, seq_in_index
"""

_PARTITION = """
SELECT partition_method, partition_expression FROM information_schema.partitions
WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name AND partition_method IS NOT NULL
LIMIT 1
"""


def check_access(db: sa.Connection, schema: str | None) -> None:
    """Raise `SchemaError` when a database is not there, or hidden, which the server does not tell apart."""
    if schema is None:
        return
    query = "SELECT COUNT(*), CURRENT_USER() FROM information_schema.schemata WHERE schema_name = :schema"
    count, user = db.execute(sa.text(query), {"schema": schema}).one()
    if not count:
        name = db.dialect.identifier_preparer.quote(schema)
        raise SchemaError(
            f"There is no database {schema!r}, or user {user!r} may not see it. Create it first: CREATE DATABASE "
            f"{name}; or let its owner run: GRANT SELECT ON {name}.* TO {quote_account(user)}"
        )


def quote_account(user: str) -> str:
    """A user as a GRANT names it."""
    name, _, host = user.rpartition("@")
    return f"'{name}'@'{host}'"


def read_table(db: sa.Connection, table: sa.Table) -> TableShape | None:
    """The picture of a live table, None when there is none that this user may see."""
    names = {"name": table.name, "schema": table.schema}
    columns = {row[0]: _column(row, db) for row in db.execute(sa.text(_COLUMNS), names)}
    if not columns:
        _check_hidden(db, table)
        return None
    indexes = _read_indexes(db, table)
    partition = db.execute(sa.text(_PARTITION), names).first()
    return TableShape(
        columns=columns,
        key=next((index.columns for index in indexes if index.name == "PRIMARY"), ()),
        key_name="PRIMARY",
        indexes=[index for index in indexes if index.name != "PRIMARY"],
        checks=_read_checks(db, table),
        partition=None if partition is None else f"{partition[0]} ({partition[1]})",
        partition_columns=frozenset() if partition is None else columns_of(str(partition[1])),
    )


def _check_hidden(db: sa.Connection, table: sa.Table) -> None:
    """Who may only create and drop sees that there is a table, and nothing of its columns."""
    query = (
        "SELECT COUNT(*), CURRENT_USER() FROM information_schema.tables "
        "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name"
    )
    count, user = db.execute(sa.text(query), {"name": table.name, "schema": table.schema}).one()
    if count:
        name = db.dialect.identifier_preparer.format_table(table)
        raise SchemaError(
            f"User {user!r} may not read table {table.fullname!r}. Let its owner run: GRANT SELECT ON {name} TO "
            f"{quote_account(user)}"
        )


def _column(row: Any, db: sa.Connection) -> ColumnShape:
    name, type_, is_nullable, default, extra, collation, generation = (_text(each) for each in row)
    words = (extra or "").lower()
    is_generated = bool(generation)
    default = _default(default, words, is_mariadb=bool(getattr(db.dialect, "is_mariadb", False)))
    shape = parse_type(f"{type_} COLLATE {collation}" if collation else str(type_), db.dialect)
    column = str(name)
    return ColumnShape(
        name=column,
        type=shape,
        nullable=is_nullable == "YES",
        default=default,
        numbering="auto_increment" if "auto_increment" in words else None,
        is_generated=is_generated,
        definition=_definition(db, column, str(type_), collation, is_nullable == "YES", default, words),
    )


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _default(default: str | None, extra: str, *, is_mariadb: bool) -> str | None:
    if default is None or (is_mariadb and default == "NULL"):
        return None
    if is_mariadb or "default_generated" in extra:
        return default.replace("\\'", "'")
    return "'" + default.replace("'", "''") + "'"


def _definition(
    db: sa.Connection, name: str, type_: str, collation: str | None, nullable: bool, default: str | None, extra: str
) -> str:
    parts = [db.dialect.identifier_preparer.quote(name), type_]
    if collation:
        parts.append(f"CHARACTER SET {collation.partition('_')[0]} COLLATE {collation}")
    parts.append("NULL" if nullable else "NOT NULL")
    if default is not None:
        is_plain = default.startswith("'") or re.match(r"(?i)current_timestamp|-?\d", default)
        parts.append(f"DEFAULT {default}" if is_plain else f"DEFAULT ({default})")
    if "on update" in extra:
        parts.append(extra[extra.index("on update") :].upper())
    if "auto_increment" in extra:
        parts.append("AUTO_INCREMENT")
    return " ".join(parts)


def _read_indexes(db: sa.Connection, table: sa.Table) -> list[IndexShape]:
    expression = "NULL" if getattr(db.dialect, "is_mariadb", False) else "expression"
    rows = db.execute(
        sa.text(_INDEXES.format(expression=expression)), {"name": table.name, "schema": table.schema}
    ).all()
    indexes = []
    for name, group in groupby(rows, key=lambda row: row[0]):
        parts = list(group)
        is_unique, method = not parts[0][1], str(parts[0][5]).lower()
        indexes.append(
            IndexShape(
                name=name,
                columns=tuple(map(_index_column, parts)),
                is_unique=is_unique,
                method=method,
                definition=_index_definition(db, table, name, parts, is_unique),
            )
        )
    return indexes


def _index_column(row: Any) -> str:
    _, _, column, length, direction, _, expression = row
    text = f"({_text(expression)})" if expression else str(column) + (f"({length})" if length else "")
    return text + (" desc" if direction == "D" else "")


def _index_definition(db: sa.Connection, table: sa.Table, name: str, rows: list[Any], is_unique: bool) -> str:
    preparer = db.dialect.identifier_preparer
    columns = []
    for row in rows:
        plain = _index_column(row)
        columns.append(plain if row[6] else plain.replace(row[2], preparer.quote(row[2]), 1))
    kind = "UNIQUE INDEX" if is_unique else "INDEX"
    return f"CREATE {kind} {preparer.quote(name)} ON {preparer.format_table(table)} ({', '.join(columns)})"


def _read_checks(db: sa.Connection, table: sa.Table) -> list[CheckShape]:
    name = db.dialect.identifier_preparer.format_table(table)
    text = str(_text(db.exec_driver_sql(f"SHOW CREATE TABLE {name}").one()[1]))
    checks = []
    for line in map(str.strip, text.splitlines()):
        if "CHECK" not in line or line.startswith(("PRIMARY", "KEY", "UNIQUE")):
            continue
        check = _parse_check(line)
        if check is not None and not _is_json_check(check):
            checks.append(check)
    return checks


def _parse_check(line: str) -> CheckShape | None:
    tokens = tokenize(line)
    start = next((at for at, token in enumerate(tokens) if token.kind == "word" and token.text == "CHECK"), None)
    if start is None:
        return None
    depth = 0
    for token in tokens[start + 1 :]:
        depth += {"(": 1, ")": -1}.get(token.text, 0) if token.kind == "sign" else 0
        if depth == 0:
            predicate = line[tokens[start + 1].start : token.end]
            break
    else:
        return None
    is_table = tokens[0].text == "CONSTRAINT"
    name = unquote(tokens[1].text) if is_table else unquote(tokens[0].text)
    return CheckShape(name, predicate, is_inline=not is_table, is_enforced="NOT ENFORCED" not in line)


# MariaDB's JSON is text with this check.
def _is_json_check(check: CheckShape) -> bool:
    return check.is_inline and re.fullmatch(r"\(json_valid\([`\"][^`\"]+[`\"]\)\)", check.predicate) is not None
