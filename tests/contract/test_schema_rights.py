"""Rights and schemas: who may not create is told which GRANT is missing, who may read can check; the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from typer.testing import CliRunner

from pillarbox.cli.commands import app
from pillarbox.errors import SchemaError
from pillarbox.inbox import Inbox, Message
from pillarbox.inbox.database import open_database
from pillarbox.schema import check_schema, check_tables, create
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store
from tests.contract.drifts import declare, own_engine

SERVERS = ("postgres", "mariadb", "mysql")


class Restricted:
    """A database with a user who may do only what is granted."""

    def __init__(self, name: str, engine: sa.Engine) -> None:
        self.name = name
        self.engine = engine
        self.user = f"u_{uuid4().hex[:12]}"
        self.database = str(engine.url.database)
        self.account = self.user if name == "postgres" else f"'{self.user}'@'%'"
        password = "WITH LOGIN PASSWORD 'secret'" if name == "postgres" else "IDENTIFIED BY 'secret'"
        kind = "ROLE" if name == "postgres" else "USER"
        self.run(f"CREATE {kind} {self.account} {password}")
        if name == "postgres":
            self.run(f"REVOKE ALL ON DATABASE {self.database} FROM PUBLIC")
            self.run(f"GRANT CONNECT ON DATABASE {self.database} TO {self.user}")
        else:
            self.run(f"CREATE TABLE {self.database}.mine (a INT)")
            self.run(f"GRANT SELECT ON {self.database}.mine TO {self.account}")

    def run(self, *statements: str) -> None:
        with self.engine.begin() as db:
            for statement in statements:
                db.exec_driver_sql(statement.replace("%", "%%"))

    @property
    def url(self) -> sa.URL:
        return self.engine.url.set(username=self.user, password="secret")

    def close(self) -> None:
        if self.name == "postgres":
            self.run(f"DROP OWNED BY {self.user}", f"DROP ROLE {self.user}")
        else:
            self.run(f"DROP USER {self.account}")


@pytest.fixture(params=SERVERS)
def restricted(request: pytest.FixtureRequest) -> Iterator[Restricted]:
    with own_engine(request.param) as engine:
        made = Restricted(request.param, engine)
        yield made
        made.close()


def grant_in(error: pytest.ExceptionInfo[SchemaError]) -> str:
    """The GRANT that a message tells, to be run as it stands."""
    text = str(error.value)
    return text[text.index("GRANT ") :].partition(";")[0]


# -- using ---------------------------------------------------------------------------------------------------


async def test_status_and_relay_tell_the_grants_that_are_missing_and_they_are_enough(restricted: Restricted) -> None:
    declare("pillarbox")["outbox"].metadata.create_all(restricted.engine)
    url = restricted.url.set(drivername=restricted.url.get_backend_name())
    for use in (lambda store: store.counts(), use_as_a_relay):
        store = open_store(url, table="events")
        given: list[str] = []
        try:
            # One right after the other: a database names the first that is missing.
            while True:
                try:
                    await use(store)
                    break
                except SchemaError as error:
                    text = str(error)
                    given.append(text[text.index("GRANT ") :])
                    assert "Let the tables' owner run: GRANT " in text
                    assert given.count(given[-1]) == 1, text
                    restricted.run(given[-1])
        finally:
            await store.close()
        assert given
        assert all(restricted.account in each for each in given)


async def use_as_a_relay(store: SqlStore) -> None:
    await store.open()
    batch = await store.claim(10, mode="lease", lease=timedelta(seconds=30))
    assert batch.claims == []


@pytest.mark.parametrize("is_engine", [False, True], ids=["url", "engine"])
async def test_inbox_tells_the_grants_that_are_missing_and_they_are_enough(
    restricted: Restricted, is_engine: bool
) -> None:
    metadata = sa.MetaData()
    inbox = Inbox(metadata)
    metadata.create_all(restricted.engine)
    engine = sa.create_engine(restricted.url)
    url = restricted.url.set(drivername=restricted.url.get_backend_name())
    database = open_database(inbox, engine if is_engine else url)
    message = Message("m-1", "billing", source="orders", type="order.placed", payload=b"{}")
    given: list[str] = []
    try:
        while True:
            try:
                assert await database.run(lambda db: inbox.take(db, message))
                break
            except SchemaError as error:
                text = str(error)
                given.append(text.partition("Let the tables' owner run: ")[2])
                assert given.count(given[-1]) == 1, text
                restricted.run(given[-1])
    finally:
        await database.close()
        engine.dispose()
    assert given
    assert all(restricted.account in each for each in given)


# -- creating ----------------------------------------------------------------------------------------------


async def test_create_tells_the_grant_that_is_missing_and_it_is_enough(restricted: Restricted) -> None:
    with pytest.raises(SchemaError) as caught:
        await create(restricted.url, table="events")
    message = str(caught.value)
    if restricted.name == "postgres":
        assert message.startswith(
            f"User '{restricted.user}' may not create tables in schema 'public'. Let its owner run:"
        )
        assert grant_in(caught) == f"GRANT CREATE ON SCHEMA public TO {restricted.user}"
    else:
        assert f"may not create tables and indexes in database '{restricted.database}'" in message
        # The name is a pattern, in which an underscore would match any character.
        pattern = restricted.database.replace("_", "\\_")
        assert grant_in(caught) == f"GRANT SELECT, CREATE, INDEX ON `{pattern}`.* TO {restricted.account}"
    restricted.run(grant_in(caught))
    created = await create(restricted.url, table="events")
    assert [each.is_new for each in created] == [True] * 4
    # What was created is seen by its owner.
    assert await check_schema(restricted.url, table="events") == []


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
async def test_half_a_right_creates_nothing(name: str) -> None:
    with own_engine(name) as engine:
        restricted = Restricted(name, engine)
        try:
            restricted.run(f"GRANT CREATE ON {restricted.database}.* TO {restricted.account}")
            with pytest.raises(SchemaError, match="GRANT SELECT, CREATE, INDEX ON"):
                await create(restricted.url, table="events")
            assert sa.inspect(engine).get_table_names() == ["mine"]
        finally:
            restricted.close()


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
async def test_who_may_create_but_not_read_is_told_so(name: str) -> None:
    with own_engine(name) as engine:
        restricted = Restricted(name, engine)
        try:
            restricted.run(f"GRANT CREATE, INDEX ON {restricted.database}.* TO {restricted.account}")
            await create(restricted.url, table="events")
            with pytest.raises(SchemaError) as caught:
                await create(restricted.url, table="events")
            assert str(caught.value).startswith(f"User '{restricted.user}@%' may not read table 'events'.")
            assert grant_in(caught) == f"GRANT SELECT ON events TO {restricted.account}"
        finally:
            restricted.close()


async def test_create_is_idempotent_and_refuses_a_different_table(restricted: Restricted) -> None:
    url = restricted.engine.url
    await create(url, table="events")
    assert [each.is_new for each in await create(url, table="events")] == [False] * 4
    restricted.run("ALTER TABLE events DROP COLUMN source", "DROP TABLE events_lanes")
    with pytest.raises(SchemaError) as caught:
        await create(url, table="events")
    assert str(caught.value).startswith(
        "Table 'events' exists but is not what the layout declares. Table 'events', column "
    )
    assert "Run `pillarbox schema diff` for the migration, or choose another table; nothing was changed." in str(
        caught.value
    )
    assert "events_lanes" not in sa.inspect(restricted.engine).get_table_names()


# -- reading -----------------------------------------------------------------------------------------------


async def test_who_may_only_read_sees_the_same_drift(restricted: Restricted) -> None:
    tables = declare("pillarbox")
    with restricted.engine.begin() as db:
        tables["outbox"].metadata.create_all(db)
    restricted.run(
        "DROP INDEX events_id" if restricted.name == "postgres" else "DROP INDEX events_id ON events",
        *(f"GRANT SELECT ON {table.name} TO {restricted.account}" for table in tables.values()),
    )
    with restricted.engine.connect() as db:
        expected = check_tables(db, tables.values())
    # And the check that is there, which information_schema hides from who may only read.
    assert [(drift.kind, drift.name) for drift in expected] == [("index", "events_id")]
    assert await check_schema(restricted.url, table="events") == expected


async def test_tables_of_another_schema_are_checked(restricted: Restricted) -> None:
    name = "sales" if restricted.name == "postgres" else f"{restricted.database}_sales"
    restricted.run(f"CREATE SCHEMA {name}")
    try:
        url = restricted.engine.url
        await create(url, table=f"{name}.events")
        assert await check_schema(url, table="events", schema=name) == []
        restricted.run(f"ALTER TABLE {name}.events_audit DROP COLUMN events")
        (drift,) = await check_schema(url, table=f"{name}.events")
        assert str(drift).startswith(f"Table '{name}.events_audit', column 'events': expected int")
        restricted.run(*drift.statements)
        assert await check_schema(url, table=f"{name}.events") == []
        with pytest.raises(SchemaError) as caught:
            await check_schema(restricted.url, table=f"{name}.events")
        if restricted.name == "postgres":
            assert str(caught.value) == (
                f"User '{restricted.user}' may not use schema 'sales'. Let its owner run: GRANT USAGE ON SCHEMA sales "
                f"TO {restricted.user}"
            )
        else:
            assert f"There is no database '{name}', or user '{restricted.user}@%' may not see it." in str(caught.value)
    finally:
        restricted.run(f"DROP SCHEMA {name}" + (" CASCADE" if restricted.name == "postgres" else ""))


# -- engines and commands ----------------------------------------------------------------------------------


async def test_every_kind_of_engine_serves(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    missing = [("table", name) for name in ("outbox", "outbox_dead", "outbox_lanes", "outbox_audit")]
    assert [(drift.kind, drift.name) for drift in await check_schema(url)] == missing
    assert not (tmp_path / "shop.db").exists(), "a check makes no file"
    await create(url)
    engine = sa.create_engine(url)
    async_engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    try:
        for database in (url, sa.make_url(url), engine, async_engine):
            assert await check_schema(database) == []
        with engine.begin() as db:
            db.exec_driver_sql("DROP INDEX outbox_ready")
        for database in (url, sa.make_url(url), engine, async_engine):
            assert [drift.name for drift in await check_schema(database, "pillarbox")] == ["outbox_ready"]
    finally:
        engine.dispose()
        await async_engine.dispose()


def test_command_exits_by_what_it_finds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    run = CliRunner().invoke
    assert run(app, ["schema", "create", "--store", url]).exit_code == 0
    clean = run(app, ["schema", "check", "--store", url])
    assert (clean.exit_code, clean.stdout) == (0, "The tables are as layout 'pillarbox' declares them.\n")
    as_json = run(app, ["schema", "check", "--store", url, "--json"])
    assert json.loads(as_json.stdout) == {"layout": "pillarbox", "variant": None, "drifts": [], "hints": []}
    engine = sa.create_engine(url)
    with engine.begin() as db:
        db.exec_driver_sql("DROP INDEX outbox_dead_died")
    engine.dispose()
    found = run(app, ["schema", "check", "--store", url])
    assert found.exit_code == 1
    assert found.stdout == (
        "Table 'outbox_dead', index 'outbox_dead_died': expected (died_at); found none\n"
        "    CREATE INDEX outbox_dead_died ON outbox_dead (died_at);\n"
    )
    as_json = run(app, ["schema", "check", "--store", url, "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["drifts"] == [
        {
            "table": "outbox_dead",
            "kind": "index",
            "name": "outbox_dead_died",
            "expected": "(died_at)",
            "found": None,
            "statements": ["CREATE INDEX outbox_dead_died ON outbox_dead (died_at)"],
        }
    ]


def test_diff_writes_a_file_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    file = tmp_path / "mend.py"
    run = CliRunner().invoke
    written = run(app, ["schema", "diff", "--store", url, "--output", str(file), "--revises", "abc"])
    assert (written.exit_code, written.stdout) == (0, "")
    assert written.stderr == f"Wrote {file} for 4 differences.\n"
    text = file.read_text()
    assert "down_revision = 'abc'" in text
    assert "DROP TABLE outbox_audit" in text
    compile(text, str(file), "exec")
    again = run(app, ["schema", "diff", "--store", url, "--output", str(file)])
    assert str(again.exception) == f"File {str(file)!r} exists; choose another --output."
    assert run(app, ["schema", "diff", "--store", url, "--revises", "abc"]).stdout == text
    assert run(app, ["schema", "create", "--store", url]).exit_code == 0
    nothing = run(app, ["schema", "diff", "--store", url])
    assert (nothing.exit_code, nothing.stdout) == (0, "")
