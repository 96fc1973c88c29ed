"""DDL as text for each database, and creating tables in a SQLite file."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pillarbox.errors import ConfigError, LayoutError, SchemaError
from pillarbox.layouts.pillarbox import pillarbox_layout
from pillarbox.schema import Created, create, ddl

TABLES = ["outbox", "outbox_dead", "outbox_lanes", "outbox_audit"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection


def list_tables(db: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return [name for (name,) in db.execute(query)]


def list_columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


# -- the text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb", "sqlite"])
def test_every_table_is_created_and_every_statement_ends(dialect: str) -> None:
    text = ddl("pillarbox", dialect)
    statements = text.split(";\n")
    assert text.endswith(";\n")
    assert not text.endswith("\n\n")
    assert statements.pop() == ""
    assert all(re.match(r"\n?CREATE (TABLE|INDEX|UNIQUE INDEX) ", statement) for statement in statements)
    assert re.findall(r"CREATE TABLE (\w+) \(", text) == TABLES


@pytest.mark.parametrize(
    ("dialect", "lines"),
    [
        (
            "postgresql",
            [
                "id UUID NOT NULL",
                "payload BYTEA NOT NULL",
                "headers JSONB",
                "due_at TIMESTAMP WITH TIME ZONE",
            ],
        ),
        ("mysql", ["payload LONGBLOB NOT NULL", "headers JSON", "due_at DATETIME(6)"]),
        ("mariadb", ["payload LONGBLOB NOT NULL", "headers JSON", "due_at DATETIME(6)"]),
        ("sqlite", ["id CHAR(36) NOT NULL", "payload BLOB NOT NULL", "headers JSON", "due_at DATETIME"]),
    ],
)
def test_types_are_those_of_the_database(dialect: str, lines: list[str]) -> None:
    text = ddl("pillarbox", dialect)
    for line in lines:
        assert f"\n    {line},\n" in text


def test_mariadb_gets_no_collation_of_mysql() -> None:
    assert "0900" not in ddl("pillarbox", "mariadb")


def test_lines_have_no_tabs_and_no_trailing_blanks() -> None:
    assert not re.search(r"\t|[ \t]\n", ddl("pillarbox", "postgresql"))


def test_table_and_schema_are_named() -> None:
    text = ddl("pillarbox", "postgresql", "events", "sales")
    assert re.findall(r"CREATE TABLE (\S+) \(", text) == [
        "sales.events",
        "sales.events_dead",
        "sales.events_lanes",
        "sales.events_audit",
    ]
    assert " ON sales.events (" in text


def test_table_may_name_its_schema() -> None:
    assert ddl("pillarbox", "mysql", "sales.events") == ddl("pillarbox", "mysql", "events", "sales")


def test_text_runs_in_sqlite(db: sqlite3.Connection) -> None:
    db.executescript(ddl("pillarbox", "sqlite"))
    assert list_tables(db) == TABLES


def test_unknown_dialect_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        ddl("pillarbox", "postgres")
    assert str(caught.value) == (
        "Dialect: expected postgresql, mysql, mariadb, sqlite; got 'postgres'. Did you mean 'postgresql'?"
    )


def test_unknown_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="got 'pilarbox'"):
        ddl("pilarbox", "sqlite")


# -- creating ----------------------------------------------------------------------------------------------


async def test_created_tables_are_those_of_the_text(path: Path, db: sqlite3.Connection) -> None:
    created = await create(f"sqlite:///{path}")
    assert [(each.table, each.is_new) for each in created] == [(table, True) for table in TABLES]
    text = "\n".join(f"{statement};" for each in created for statement in each.statements)
    assert text.split() == ddl("pillarbox", "sqlite").split()
    assert list_tables(db) == TABLES


async def test_second_time_changes_nothing(path: Path, db: sqlite3.Connection) -> None:
    await create(f"sqlite:///{path}")
    before = db.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
    assert await create(f"sqlite:///{path}") == [Created(table, ()) for table in TABLES]
    assert db.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall() == before


async def test_missing_table_is_added_to_the_others(path: Path, db: sqlite3.Connection) -> None:
    await create(f"sqlite:///{path}")
    db.execute("DROP TABLE outbox_audit")
    created = await create(f"sqlite:///{path}")
    assert [each.table for each in created if each.is_new] == ["outbox_audit"]
    assert sorted(list_tables(db)) == sorted(TABLES)


async def test_different_table_is_refused_and_nothing_is_created(path: Path, db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE outbox_lanes (lane SMALLINT NOT NULL, sink VARCHAR(50) NOT NULL, PRIMARY KEY (sink, lane))"
    )
    with pytest.raises(SchemaError) as caught:
        await create(f"sqlite:///{path}")
    assert str(caught.value) == (
        "Table 'outbox_lanes' exists but is not what the layout declares. Table 'outbox_lanes', length 'sink': "
        "expected varchar(100); found varchar(50). Run `pillarbox schema diff` for the migration, or choose another "
        "table; nothing was changed."
    )
    assert list_tables(db) == ["outbox_lanes"]


async def test_every_missing_column_is_listed_with_its_type(path: Path, db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE outbox_audit (number INTEGER, at DATETIME, actor VARCHAR(255))")
    with pytest.raises(SchemaError) as caught:
        await create(f"sqlite:///{path}")
    assert re.findall(r"column '(\w+)': expected ([^;]+); found none", str(caught.value)) == [
        ("action", "varchar(50) not null"),
        ("detail", "json"),
        ("events", "integer not null"),
    ]


async def test_additional_columns_are_left_alone(path: Path, db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE outbox_lanes (sink VARCHAR(100) NOT NULL, lane SMALLINT NOT NULL, note TEXT, "
        "PRIMARY KEY (sink, lane))"
    )
    await create(f"sqlite:///{path}")
    assert list_columns(db, "outbox_lanes") == ["sink", "lane", "note"]


async def test_dry_run_makes_no_file(path: Path) -> None:
    created = await create(f"sqlite:///{path}", dry_run=True)
    assert [each.table for each in created if each.is_new] == TABLES
    assert path.name not in os.listdir(path.parent)


async def test_dry_run_creates_no_table(path: Path, db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE other (id INTEGER)")
    created = await create(f"sqlite:///{path}", dry_run=True)
    assert [each.table for each in created if each.is_new] == TABLES
    assert list_tables(db) == ["other"]


async def test_missing_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(ConfigError) as caught:
        await create(f"sqlite:///{folder}/shop.db")
    assert str(caught.value).endswith(f"there is no folder {str(folder)!r}. Create it first.")


async def test_sqlite_has_no_schemas(path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^Schema 'sales': SQLite has no schemas; name the table alone$"):
        await create(f"sqlite:///{path}", table="sales.events")


async def test_number_of_lanes_is_part_of_the_table(path: Path, db: sqlite3.Connection) -> None:
    await create(f"sqlite:///{path}", layout=pillarbox_layout(8))
    ((text,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'outbox'").fetchall()
    assert "lane < 8" in text
