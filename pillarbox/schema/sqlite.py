"""What a SQLite file has: its pragmas for columns and keys, its own DDL texts for checks and partial indexes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import SchemaError
from pillarbox.schema.predicates import Token, tokenize, unquote
from pillarbox.schema.shape import CheckShape, ColumnShape, IndexShape, TableShape, parse_type


def check_access(db: sa.Connection, schema: str | None) -> None:
    """Raise `SchemaError` when a schema is named."""
    if schema is not None:
        raise SchemaError(f"Schema {schema!r}: SQLite has no schemas; name the table alone")


def read_table(db: sa.Connection, table: sa.Table) -> TableShape | None:
    """The picture of a live table, None when there is none."""
    master = (
        "SELECT type, sql FROM sqlite_master WHERE tbl_name = :name COLLATE NOCASE AND type IN ('table', 'trigger')"
    )
    found = db.execute(sa.text(master), {"name": table.name}).all()
    ddl = next((sql for kind, sql in found if kind == "table"), None)
    if ddl is None:
        return None
    name = db.dialect.identifier_preparer.quote(table.name)
    rows = db.exec_driver_sql(f"PRAGMA table_xinfo({name})").all()
    key = tuple(row[1] for row in sorted(rows, key=lambda row: row[5]) if row[5])
    is_numbered = any(token.kind == "word" and token.text.upper() == "AUTOINCREMENT" for token in tokenize(ddl))
    return TableShape(
        columns={row[1]: _column(row, key, is_numbered, db) for row in rows},
        key=key,
        indexes=list(_read_indexes(db, name)),
        checks=list(_read_checks(ddl)),
        ddl=ddl,
        triggers=tuple(sql for kind, sql in found if kind == "trigger"),
    )


def _column(row: Any, key: tuple[str, ...], is_numbered: bool, db: sa.Connection) -> ColumnShape:
    _, name, type_, is_required, default, _, hidden = row
    is_row_number = key == (name,) and type_.upper() == "INTEGER"
    return ColumnShape(
        name=name,
        type=parse_type(type_, db.dialect),
        nullable=not is_required and not is_row_number,
        default=default,
        numbering="autoincrement" if is_row_number and is_numbered else None,
        is_generated=hidden in (2, 3),
    )


def _read_indexes(db: sa.Connection, table: str) -> Iterator[IndexShape]:
    listed = db.exec_driver_sql(f"PRAGMA index_list({table})").all()
    for _, name, is_unique, origin, is_partial in sorted(listed, key=lambda row: str(row[1])):
        if origin == "pk":
            continue
        quoted = db.dialect.identifier_preparer.quote(name)
        rows = db.exec_driver_sql(f"PRAGMA index_xinfo({quoted})").all()
        sql = db.execute(sa.text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": name}).scalar()
        texts, where = _parse_index(sql) if sql else ([], None)
        columns = []
        for position, (_, number, column, is_descending, *_rest) in enumerate(row for row in rows if row[5]):
            text = str(column) if number >= 0 else texts[position]
            columns.append(text + (" desc" if is_descending and number >= 0 else ""))
        yield IndexShape(
            name=name,
            columns=tuple(columns),
            is_unique=bool(is_unique),
            where=where if is_partial else None,
            constraint="unique" if origin == "u" else None,
            definition=sql or "",
        )


def _parse_index(sql: str) -> tuple[list[str], str | None]:
    """The columns of a CREATE INDEX and its condition, as they are written."""
    tokens = tokenize(sql)
    opening = next(at for at, token in enumerate(tokens) if token.text == "(" and token.kind == "sign")
    closing = _closing(tokens, opening)
    columns, start, depth = [], tokens[opening].end, 0
    for token in tokens[opening + 1 : closing + 1]:
        if depth == 0 and (token.text == "," or token is tokens[closing]):
            columns.append(sql[start : token.start].strip())
            start = token.end
        depth += _depth(token)
    rest = tokens[closing + 1 :]
    return columns, sql[rest[0].end :].strip() if rest and rest[0].text.upper() == "WHERE" else None


def _depth(token: Token) -> int:
    return {"(": 1, ")": -1}.get(token.text, 0) if token.kind == "sign" else 0


def _closing(tokens: list[Token], opening: int) -> int:
    depth = 0
    for at in range(opening, len(tokens)):
        depth += _depth(tokens[at])
        if depth == 0:
            return at
    raise SchemaError("SQLite: a statement in sqlite_master has no closing bracket")


def _read_checks(ddl: str) -> Iterator[CheckShape]:
    tokens = tokenize(ddl)
    for at, token in enumerate(tokens):
        if token.kind == "word" and token.text.upper() == "CHECK" and tokens[at + 1].text == "(":
            end = _closing(tokens, at + 1)
            is_named = at >= 2 and tokens[at - 2].text.upper() == "CONSTRAINT"
            name = unquote(tokens[at - 1].text) if is_named else None
            yield CheckShape(name, ddl[tokens[at + 1].start : tokens[end].end])


def with_name(ddl: str, name: str) -> str:
    """A CREATE TABLE for another name."""
    return re.sub(
        r'(?is)^CREATE TABLE\s+("(?:[^"]|"")*"|`[^`]*`|\[[^]]*\]|\'[^\']*\'|[\w$]+)',
        lambda _: f"CREATE TABLE {name}",
        ddl,
        count=1,
    )
