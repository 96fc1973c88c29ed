"""A live database's own description of a table, as plain tuples that expectations are written against.

    Catalog.columns      (name, type with its length, is nullable, default as the server prints it or None)
    Catalog.key          the columns of the primary key
    Catalog.indexes      (name, definition) without the primary key's, by name
    Catalog.checks       (name, definition), by name
    Catalog.partition    PostgreSQL's partition key, or None

Names of schemas do not appear: a table reads the same in every schema. On MySQL and MariaDB a type carries its
collation, and a schema is a database.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa

from tests.servers import ServerName, server_url

SERVERS: dict[str, ServerName] = {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mariadb"}
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
DIALECTS = ("postgresql", "mysql", "mariadb", "sqlite")


class Catalog(NamedTuple):
    columns: tuple[tuple[str, str, bool, str | None], ...]
    key: tuple[str, ...]
    indexes: tuple[tuple[str, str], ...]
    checks: tuple[tuple[str, str], ...]
    partition: str | None = None


@contextmanager
def empty_database(dialect: str, folder: Path) -> Iterator[sa.Engine]:
    """An engine whose default schema is new and empty; it goes at the end."""
    if dialect == "sqlite":
        with _disposed(sa.create_engine(f"sqlite:///{folder / uuid4().hex}.db")) as engine:
            yield engine
        return
    url = sa.make_url(server_url(SERVERS[dialect]))
    url = url.set(drivername=DRIVERS[url.get_backend_name()])
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
    with new_schema(admin) as schema:
        if dialect == "postgresql":
            url = url.update_query_dict({"options": f"-csearch_path={schema}"})
        else:
            url = url.set(database=schema)
        with _disposed(sa.create_engine(url)) as engine:
            yield engine


@contextmanager
def _disposed(engine: sa.Engine) -> Iterator[sa.Engine]:
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def new_schema(engine: sa.Engine) -> Iterator[str]:
    """The name of one more empty schema on the engine's server."""
    schema = f"catalog_{uuid4().hex[:12]}"
    with engine.begin() as db:
        db.exec_driver_sql(f"CREATE SCHEMA {schema}")
    try:
        yield schema
    finally:
        cascade = " CASCADE" if engine.dialect.name == "postgresql" else ""
        with engine.begin() as db:
            db.exec_driver_sql(f"DROP SCHEMA {schema}{cascade}")


def read_catalog(engine: sa.Engine, table: str, schema: str | None = None) -> Catalog:
    """Read one table of the default schema, or of another one."""
    with engine.connect() as db:
        if engine.dialect.name == "postgresql":
            return _read_postgres(db, table, schema)
        if engine.dialect.name == "sqlite":
            return _read_sqlite(db, table)
        return _read_mysql(db, table, schema)


def read_tables(engine: sa.Engine, schema: str | None = None) -> dict[str, Catalog]:
    """Read every table of a schema by its name."""
    names = sa.inspect(engine).get_table_names(schema)
    return {name: read_catalog(engine, name, schema) for name in sorted(names)}


def _read_postgres(db: sa.Connection, table: str, schema: str | None) -> Catalog:
    schema = schema or db.execute(sa.text("SELECT current_schema()")).scalar_one()
    given = {"table": table, "schema": schema}

    def rows(query: str) -> list[Any]:
        where = "n.nspname = :schema AND t.relname = :table"
        source = "pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace"
        return list(db.execute(sa.text(query.format(source=source, where=where)), given))

    columns = rows(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod), NOT a.attnotnull, "
        "  CASE a.attidentity WHEN '' THEN pg_get_expr(d.adbin, d.adrelid) "
        "  ELSE 'identity ' || a.attidentity::text END "
        "FROM {source} JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped "
        "LEFT JOIN pg_attrdef d ON d.adrelid = t.oid AND d.adnum = a.attnum WHERE {where} ORDER BY a.attnum"
    )
    key = rows(
        "SELECT a.attname FROM {source} JOIN pg_index i ON i.indrelid = t.oid AND i.indisprimary "
        "JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = ANY(i.indkey) "
        "WHERE {where} ORDER BY array_position(i.indkey::int2[], a.attnum)"
    )
    indexes = rows(
        "SELECT c.relname, pg_get_indexdef(i.indexrelid) FROM {source} "
        "JOIN pg_index i ON i.indrelid = t.oid AND NOT i.indisprimary JOIN pg_class c ON c.oid = i.indexrelid "
        'WHERE {where} ORDER BY c.relname COLLATE "C"'
    )
    checks = rows(
        "SELECT k.conname, pg_get_constraintdef(k.oid) FROM {source} "
        "JOIN pg_constraint k ON k.conrelid = t.oid AND k.contype = 'c' "
        'WHERE {where} ORDER BY k.conname COLLATE "C"'
    )
    partition = rows("SELECT pg_get_partkeydef(t.oid) FROM {source} WHERE {where}")
    assert columns, f"there is no table {schema}.{table}"
    return Catalog(
        tuple(tuple(row) for row in columns),
        tuple(row[0] for row in key),
        tuple((row[0], row[1].replace(f" {schema}.", " ")) for row in indexes),
        tuple((row[0], row[1]) for row in checks),
        partition[0][0],
    )


def _read_mysql(db: sa.Connection, table: str, schema: str | None) -> Catalog:
    given = {"table": table, "schema": schema or db.execute(sa.text("SELECT DATABASE()")).scalar_one()}
    where = "table_schema = :schema AND table_name = :table"
    columns = db.execute(
        sa.text(
            "SELECT column_name, CONCAT_WS(' ', column_type, collation_name), is_nullable = 'YES', "
            "  CASE WHEN extra LIKE '%auto_increment%' THEN 'auto_increment' ELSE column_default END "
            f"FROM information_schema.columns WHERE {where} ORDER BY ordinal_position"
        ),
        given,
    ).all()
    parts = db.execute(
        sa.text(
            "SELECT index_name, non_unique, column_name, sub_part FROM information_schema.statistics "
            f"WHERE {where} ORDER BY index_name, seq_in_index"
        ),
        given,
    ).all()
    listed: dict[tuple[str, bool], list[str]] = {}
    for name, is_repeatable, column, prefix in parts:
        listed.setdefault((name, bool(is_repeatable)), []).append(f"{column}({prefix})" if prefix else column)
    checks = db.execute(
        sa.text(
            "SELECT c.constraint_name, c.check_clause FROM information_schema.check_constraints c "
            "JOIN information_schema.table_constraints t ON t.constraint_schema = c.constraint_schema "
            "  AND t.constraint_name = c.constraint_name "
            f"WHERE t.constraint_type = 'CHECK' AND t.{where.replace('AND ', 'AND t.')} "
            + ("AND c.table_name = t.table_name " if getattr(db.dialect, "is_mariadb", False) else "")
            + "ORDER BY c.constraint_name"
        ),
        given,
    ).all()
    assert columns, f"there is no table {table}"
    return Catalog(
        # MariaDB prints NULL where there is no default.
        tuple(
            (name, type_, bool(nullable), None if default == "NULL" else default)
            for name, type_, nullable, default in columns
        ),
        tuple(next((names for (name, _), names in listed.items() if name == "PRIMARY"), [])),
        tuple(
            (name, f"{'' if is_repeatable else 'UNIQUE '}({', '.join(names)})")
            for (name, is_repeatable), names in listed.items()
            if name != "PRIMARY"
        ),
        tuple((row[0], row[1]) for row in checks),
    )


def _read_sqlite(db: sa.Connection, table: str) -> Catalog:
    columns = db.exec_driver_sql(f'PRAGMA table_xinfo("{table}")').all()
    key = sorted((row[5], row[1]) for row in columns if row[5])
    indexes = db.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name = ? ORDER BY name",
        (table,),
    ).all()
    checks = sa.inspect(db).get_check_constraints(table)
    assert columns, f"there is no table {table}"
    return Catalog(
        tuple((row[1], row[2], not row[3], row[4]) for row in columns),
        tuple(name for _, name in key),
        tuple((name, " ".join(text.split())) for name, text in indexes),
        tuple(sorted((str(check["name"]), " ".join(check["sqltext"].split())) for check in checks)),
    )
