"""Tables made otherwise than declared: every single change that can be made to a declaration, and what it is called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.schema import conv
from sqlalchemy.types import UserDefinedType

from pillarbox.layouts import declare_layout, get_layout, layout_names
from pillarbox.layouts.variants import indexes_on
from pillarbox.schema import Drift
from pillarbox.schema.ddl import run_ddl
from tests.servers import ServerName, server_url

DATABASES = ("postgres", "mariadb", "mysql", "sqlite")
DIALECTS = {"postgres": "postgresql", "mariadb": "mariadb", "mysql": "mysql", "sqlite": "sqlite"}
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}

Expected = set[tuple[str, str]]


def supported(layout: str) -> list[str]:
    """The databases of a layout."""
    known = getattr(get_layout(layout), "databases", None) or frozenset(DIALECTS.values())
    return [name for name in DATABASES if DIALECTS[name] in known]


LAYOUTS = [(name, database) for name in layout_names() for database in supported(name)]


@contextmanager
def own_engine(name: str) -> Iterator[sa.Engine]:
    """An engine for a new database of its own."""
    if name == "sqlite":
        engine = sa.create_engine("sqlite://")
        yield engine
        engine.dispose()
        return
    servers: dict[str, ServerName] = {"postgres": "postgres", "mariadb": "mariadb", "mysql": "mysql"}
    url = sa.make_url(server_url(servers[name]))
    url = url.set(drivername=DRIVERS[url.get_backend_name()])
    database = f"drift_{uuid4().hex[:12]}"
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as db:
        db.exec_driver_sql(f"CREATE DATABASE {database}")
    engine = sa.create_engine(url.set(database=database))
    try:
        yield engine
    finally:
        engine.dispose()
        with server.connect() as db:
            db.exec_driver_sql(f"DROP DATABASE {database}{' WITH (FORCE)' if name == 'postgres' else ''}")
        server.dispose()


def run_all(db: sa.Connection, statements: list[str]) -> None:
    assert not [statement for statement in statements if statement.startswith("--")]
    run_ddl(db, statements)


def once(groups: list[tuple[str, ...]]) -> list[str]:
    """The statements of several differences, those that are shared once."""
    return [statement for group in dict.fromkeys(groups) for statement in group]


def mend(db: sa.Connection, drifts: list[Drift]) -> None:
    run_all(db, once([drift.statements for drift in drifts]))


def undo(db: sa.Connection, drifts: list[Drift]) -> None:
    run_all(db, once([drift.undo for drift in reversed(drifts)]))


# -- single changes ----------------------------------------------------------------------------------------


class Raw(UserDefinedType[Any]):
    """A type by its name."""

    cache_ok = True

    def __init__(self, text: str) -> None:
        self.text = text

    def get_col_spec(self, **kw: Any) -> str:
        return self.text


@dataclass(frozen=True)
class Change:
    """One way to make a table wrong; `expected` are the kinds and names of the differences."""

    label: str
    role: str
    table: sa.Table
    expected: Expected
    column: str | None = None


Make = Callable[[], dict[str, sa.Table]]


def declare(layout: str, engine: sa.Engine | None = None) -> dict[str, sa.Table]:
    """A layout's tables; in the engine's own database where the layout names a schema."""
    tables = declare_layout(get_layout(layout), sa.MetaData(), table="events")
    if engine is not None and tables["outbox"].schema is not None:
        schema = "public" if engine.dialect.name == "postgresql" else engine.url.database
        tables = declare_layout(get_layout(layout), sa.MetaData(), table="events", schema=schema)
    return dict(tables)


def checks_of(table: sa.Table) -> list[sa.CheckConstraint]:
    found = [each for each in table.constraints if isinstance(each, sa.CheckConstraint)]
    return [each for each in found if not getattr(each, "_type_bound", False)]


def uniques_of(table: sa.Table) -> list[sa.UniqueConstraint]:
    return [each for each in table.constraints if isinstance(each, sa.UniqueConstraint)]


def unique_name(unique: sa.UniqueConstraint) -> str:
    columns = "_".join(column.name for column in unique.columns)
    return str(unique.name) if unique.name else f"{unique.table.name}_{columns}_key"


def has_twin(table: sa.Table, names: list[str], dialect: str) -> bool:
    """Whether a unique key is declared twice, so that one may be missing."""
    keys = [[column.name for column in each.columns] for each in uniques_of(table)]
    keys += [[column.name for column in each.columns] for each in indexes_on(table, dialect) if each.unique]
    return keys.count(names) > 1


def where_of(index: sa.Index, dialect: str) -> str:
    if dialect not in ("postgresql", "sqlite"):
        return ""
    where = index.dialect_options[dialect].get("where")
    return "" if where is None else str(where)


def mentions(text: str, column: str) -> bool:
    return re.search(rf"\b{column}\b", text) is not None


def is_numbered(column: sa.Column[Any]) -> bool:
    return column is column.table._autoincrement_column or column.identity is not None


def type_of(column: sa.Column[Any], dialect: Any) -> str:
    return str(column.type.compile(dialect=dialect))


def without_column(table: sa.Table, name: str, dialect: Any) -> sa.Table:
    columns: list[Any] = [column._copy() for column in table.columns if column.name != name]
    if name not in table.primary_key.columns:  # its order may be another than that of the columns
        columns.append(sa.PrimaryKeyConstraint(*(column.name for column in table.primary_key.columns)))
    checks = [
        sa.CheckConstraint(each.sqltext, name=conv(str(each.name)))
        for each in checks_of(table)
        if not mentions(str(each.sqltext), name)
    ]
    uniques = [
        sa.UniqueConstraint(*(column.name for column in each.columns), name=each.name)
        for each in uniques_of(table)
        if name not in each.columns
    ]
    metadata = sa.MetaData()
    made = sa.Table(table.name, metadata, *columns, *checks, *uniques, schema=table.schema, **table.kwargs)
    for index in indexes_on(table, dialect.name):
        if not uses(index, name):
            parts = [made.c[each.name] if isinstance(each, sa.Column) else each for each in index.expressions]
            options: dict[str, Any] = dict(index.dialect_kwargs)
            made.append_constraint(sa.Index(index.name, *parts, unique=bool(index.unique), **options))
    return made


def uses(index: sa.Index, column: str) -> bool:
    include = index.dialect_options["postgresql"].get("include") or ()
    names = [each.name for each in index.columns] + [getattr(each, "name", each) for each in include]
    texts = [str(index.dialect_options[each].get("where")) for each in ("postgresql", "sqlite")]
    texts += [str(each) for each in index.expressions if not isinstance(each, sa.Column)]
    return column in names or any(mentions(text, column) for text in texts)


def columns_to_try(table: sa.Table, dialect: Any) -> list[sa.Column[Any]]:
    """All columns; where DDL is slow, one of each kind."""
    if dialect.name != "mysql":
        return list(table.columns)
    kinds: dict[tuple[object, ...], sa.Column[Any]] = {}
    for column in table.columns:
        is_indexed = any(uses(index, column.name) for index in table.indexes)
        facts = (column.nullable, column.server_default is None, column.primary_key, is_indexed)
        kinds.setdefault((type_of(column, dialect), *facts), column)
    return list(kinds.values())


def spare_indexes(dialect: Any, column: str, *tables: sa.Table) -> None:
    """Leave out the indexes that a column is not in: each is a statement more where DDL is slow."""
    if dialect.name == "mysql":
        for table in tables:
            table.indexes.intersection_update([index for index in table.indexes if uses(index, column)])


def dropped_columns(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for column in columns_to_try(table, dialect):
            name = column.name
            expected = {("column", name)}
            for index in indexes_on(table, dialect.name):
                if uses(index, name):
                    expected.add(("index", str(index.name)))
            expected |= {("index", unique_name(each)) for each in uniques_of(table) if name in each.columns}
            expected |= {("check", str(each.name)) for each in checks_of(table) if mentions(str(each.sqltext), name)}
            if column.primary_key:
                expected.add(("primary key", ", ".join(each.name for each in table.primary_key.columns)))
            if len(table.columns) > 1:
                yield Change(f"{role}.{name} dropped", role, without_column(table, name, dialect), expected, name)


OTHER_TYPES = [
    (r"(?i)^VARCHAR\b", "CHAR"),
    (r"(?i)^CHAR\b", "VARCHAR"),
    (r"(?i)^(BIGINT|NUMERIC.*|DOUBLE.*|FLOAT.*)$", "INTEGER"),
    (r"(?i)^(SMALLINT|INTEGER|INT)$", "BIGINT"),
    (r"(?i)^(BOOLEAN|BOOL)$", "SMALLINT"),
    (r"(?i)^(LONGTEXT|MEDIUMTEXT)\b.*$", "LONGBLOB"),
    (r"(?i)^TEXT$", "VARCHAR(300)"),
    (r"(?i)^(LONGBLOB|BYTEA|BLOB)$", "TEXT"),
    (r"(?i)^JSONB?$", "TEXT"),
    (r"(?i)^TIMESTAMP WITH TIME ZONE$", "TIMESTAMP WITHOUT TIME ZONE"),
    (r"(?i)^(DATETIME|TIMESTAMP).*$", "DATE"),
    (r"(?i)^UUID$", "VARCHAR(40)"),
    (r"(?i)^DATE$", "VARCHAR(40)"),
]


def other_type(text: str) -> str:
    for pattern, replacement in OTHER_TYPES:
        if re.match(pattern, text):
            return re.sub(pattern, replacement, text)
    raise AssertionError(f"no other type for {text!r}")


def retyped_columns(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for column in columns_to_try(table, dialect):
            text = type_of(column, dialect)
            if is_numbered(column):  # its type is part of how it counts
                continue
            changed = other_type(text)
            expected = {("type", column.name)}
            if "COLLATE" in text and "COLLATE" not in changed:
                expected.add(("collation", column.name))
            change = _with_type(make, role, column.name, changed, expected)
            if text == "BOOLEAN" and dialect.name == "postgresql":
                # A condition on it is none for a number: such an index is missing too.
                for index in indexes_on(change.table, dialect.name):
                    if mentions(where_of(index, dialect.name), column.name):
                        change.table.indexes.remove(index)
                        expected.add(("index", str(index.name)))
            yield change


def relengthened_columns(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for column in columns_to_try(table, dialect):
            text = type_of(column, dialect)
            match = re.search(r"\((\d+)\)", text)
            if match is not None:
                changed = text.replace(match[0], f"({int(match[1]) - 1})", 1)
                yield _with_type(make, role, column.name, changed, {("length", column.name)})


def _with_type(make: Make, role: str, name: str, text: str, expected: Expected) -> Change:
    tables = make()
    tables[role].c[name].type = Raw(text)
    return Change(f"{role}.{name} is {text}", role, tables[role], expected, name)


def nullability(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for column in columns_to_try(table, dialect):
            if not column.primary_key:
                tables = make()
                tables[role].c[column.name].nullable = not column.nullable
                yield Change(
                    f"{role}.{column.name} nullability", role, tables[role], {("nullability", column.name)}, column.name
                )


def some_default(text: str, dialect: Any) -> Any:
    word = text.upper()
    if re.match(r"(LONG|MEDIUM)?(TEXT|BLOB)|JSON|BYTEA", word):
        is_strict = dialect.name == "mysql" and not dialect.is_mariadb
        return None if is_strict else sa.text("'[]'")
    if word.startswith("BOOL"):
        return sa.true()
    if re.match(r"UUID", word):
        return "00000000-0000-4000-8000-000000000000"
    if re.match(r"TIMESTAMP|DATE", word):
        return "2020-01-31 00:00:00"
    return "7"


def defaults(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for column in columns_to_try(table, dialect):
            if is_numbered(column) or column.computed is not None:
                continue
            other = some_default(type_of(column, dialect), dialect)
            changes = {"has another default": other} if other is not None else {}
            if column.server_default is not None:
                changes["has no default"] = None
            for label, default in changes.items():
                tables = make()
                changed = tables[role].c[column.name]
                changed.server_default = None if default is None else sa.DefaultClause(default)
                yield Change(
                    f"{role}.{column.name} {label}", role, tables[role], {("default", column.name)}, column.name
                )


def checks(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for name in sorted(str(check.name) for check in checks_of(table)):
            for label, also in (("gone", None), ("weaker", "OR 1 = 1"), ("stronger", "AND 1 = 1")):
                tables = make()
                check = next(each for each in checks_of(tables[role]) if str(each.name) == name)
                tables[role].constraints.remove(check)
                if also is not None:
                    text = f"({check.sqltext}) {also}"
                    tables[role].append_constraint(sa.CheckConstraint(text, name=conv(name)))
                yield Change(f"{role} check {name} {label}", role, tables[role], {("check", name)})


def indexes(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for name in [str(index.name) for index in indexes_on(table, dialect.name)]:
            for label, change in INDEX_CHANGES.items():
                tables = make()
                index = next(each for each in indexes_on(tables[role], dialect.name) if each.name == name)
                if has_twin(table, [column.name for column in index.columns], dialect.name):
                    continue
                if change(index, dialect.name):
                    yield Change(f"{role} index {name} {label}", role, tables[role], {("index", name)})


def _drop_index(index: sa.Index, dialect: str) -> bool:
    assert index.table is not None
    index.table.indexes.remove(index)
    return True


def _toggle_unique(index: sa.Index, dialect: str) -> bool:
    index.unique = not index.unique
    return True


def _reverse(index: sa.Index, dialect: str) -> bool:
    index.expressions = list(reversed(index.expressions))
    return len(index.expressions) > 1


def _narrow(index: sa.Index, dialect: str) -> bool:
    index.expressions = list(index.expressions)[:-1]
    return len(index.expressions) > 0


def _drop_condition(index: sa.Index, dialect: str) -> bool:
    had = where_of(index, dialect) != ""
    if had:
        index.dialect_options[dialect]["where"] = None
    return had


def _change_condition(index: sa.Index, dialect: str) -> bool:
    if dialect not in ("postgresql", "sqlite"):
        return False
    column = next(iter(index.columns)).name
    also = f'"{column}" IS NOT NULL AND 2 > 1'
    before = where_of(index, dialect)
    index.dialect_options[dialect]["where"] = sa.text(f"({before}) AND {also}" if before else also)
    return True


def _change_include(index: sa.Index, dialect: str) -> bool:
    if dialect != "postgresql" or index.dialect_options["postgresql"].get("using") not in (None, False, "", "btree"):
        return False
    assert index.table is not None
    had = index.dialect_options["postgresql"].get("include")
    own = {column.name for column in index.columns}
    other = [column.name for column in index.table.columns if column.name not in own]
    index.dialect_options["postgresql"]["include"] = None if had else other[:1]
    return bool(had or other)


INDEX_CHANGES: dict[str, Callable[[sa.Index, str], bool]] = {
    "dropped": _drop_index,
    "with another uniqueness": _toggle_unique,
    "reversed": _reverse,
    "narrowed": _narrow,
    "without its condition": _drop_condition,
    "with another condition": _change_condition,
    "with another include": _change_include,
}


def uniques(make: Make, dialect: Any) -> Iterator[Change]:
    for role, table in make().items():
        for name in sorted(map(unique_name, uniques_of(table))):
            tables = make()
            unique = next(each for each in uniques_of(tables[role]) if unique_name(each) == name)
            if has_twin(table, [column.name for column in unique.columns], dialect.name):
                continue
            tables[role].constraints.remove(unique)
            yield Change(f"{role} unique {name} gone", role, tables[role], {("index", name)})


FAMILIES: dict[str, Callable[[Make, Any], Iterator[Change]]] = {
    "column": dropped_columns,
    "type": retyped_columns,
    "length": relengthened_columns,
    "nullability": nullability,
    "default": defaults,
    "check": checks,
    "index": indexes,
    "unique": uniques,
}
