"""The migration that `pillarbox schema diff` writes, run by Alembic: up it mends, down it restores what was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from pillarbox.schema import Drift, check_tables, migration
from tests.contract.drifts import DATABASES, LAYOUTS, declare, own_engine, without_column


@pytest.fixture(params=DATABASES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    with own_engine(request.param) as engine:
        yield engine


def check(engine: sa.Engine, tables: dict[str, sa.Table]) -> list[Drift]:
    with engine.connect() as db:
        return check_tables(db, tables.values())


class Project:
    """An Alembic project with one migration."""

    def __init__(self, folder: Path, engine: sa.Engine, text: str) -> None:
        (folder / "versions").mkdir(parents=True)
        (folder / "versions" / "mend.py").write_text(text)
        self._scripts = ScriptDirectory(str(folder))
        self._engine = engine

    def run(self, *, up: bool) -> None:
        """What `alembic upgrade head` and `alembic downgrade base` do."""
        with self._engine.connect() as db:
            context = MigrationContext.configure(
                db,
                opts={
                    "script": self._scripts,
                    "fn": lambda revision, _: (
                        self._scripts._upgrade_revs("head", revision)
                        if up
                        else self._scripts._downgrade_revs("base", revision)
                    ),
                },
            )
            with context.begin_transaction(), Operations.context(context):
                context.run_migrations()
            db.commit()


def broken(engine: sa.Engine) -> dict[str, sa.Table]:
    """The tables of the layout with many changes at once: one of each family, on different columns."""
    tables = declare("pillarbox")
    # The index of a missing column is missing too: up the column must be first, down the index.
    outbox = tables["outbox"] = without_column(tables["outbox"], "delivered_at", engine.dialect)
    outbox.c.topic.nullable = True
    outbox.c.attempts.server_default = None
    outbox.c.error.server_default = None
    outbox.c.trace_id.type = sa.String(20)
    outbox.c.max_attempts.type = sa.BigInteger()
    check = next(each for each in outbox.constraints if isinstance(each, sa.CheckConstraint))
    outbox.constraints.remove(check)
    outbox.append_constraint(sa.CheckConstraint("lane >= 0 AND lane < 8", name="events_lane"))
    indexes = {str(index.name): index for index in outbox.indexes}
    outbox.indexes.remove(indexes["events_until"])
    indexes["events_id"].unique = False
    for dialect in ("postgresql", "sqlite"):
        indexes["events_ready"].dialect_options[dialect]["where"] = sa.text("state = 1")
    indexes["events_key"].dialect_options["postgresql"]["include"] = ["topic"]
    outbox.append_column(sa.Column("tenant", sa.Integer(), nullable=False))
    tables["dead"].c.parks.server_default = sa.DefaultClause(sa.text("true"))
    del tables["audit"]
    return tables


FOUND = [
    ("events", "column", "delivered_at"),
    ("events", "index", "events_delivered"),
    ("events", "type", "max_attempts"),
    ("events", "length", "trace_id"),
    ("events", "nullability", "topic"),
    ("events", "default", "attempts"),
    ("events", "foreign column", "tenant"),
    ("events", "check", "events_lane"),
    ("events", "index", "events_id"),
    ("events", "index", "events_until"),
    ("events_dead", "default", "parks"),
    ("events_audit", "table", "events_audit"),
]
PARTIAL = [("events", "index", "events_ready")]
POSTGRES = [("events", "index", "events_key"), ("events", "cache", "seq")]


def test_alembic_mends_everything_and_restores_what_was_found(engine: sa.Engine, tmp_path: Path) -> None:
    declared = declare("pillarbox")
    expected = {*FOUND}
    if engine.dialect.name in ("postgresql", "sqlite"):
        expected |= {*PARTIAL}
    with engine.begin() as db:
        for table in broken(engine).values():
            table.create(db)
        if engine.dialect.name == "postgresql":
            expected |= {*POSTGRES}
            db.exec_driver_sql("ALTER SEQUENCE events_seq_seq CACHE 20")
        if engine.dialect.name == "mysql":
            # Its length and its collation are one type there.
            expected |= {("events", "collation", "trace_id")}
    first = check(engine, declared)
    assert {(drift.table, drift.kind, drift.name) for drift in first} == expected
    assert len(first) == len(expected)
    project = Project(tmp_path / "alembic", engine, migration(first))
    project.run(up=True)
    assert check(engine, declared) == []
    project.run(up=False)
    assert check(engine, declared) == first


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_a_migration_creates_every_layout_from_nothing(layout: str, name: str, tmp_path: Path) -> None:
    with own_engine(name) as engine:
        declared = declare(layout, engine)
        first = check(engine, declared)
        assert {(drift.kind, drift.name) for drift in first} == {("table", table.name) for table in declared.values()}
        project = Project(tmp_path / "alembic", engine, migration(first))
        project.run(up=True)
        assert check(engine, declared) == []
        project.run(up=False)
        assert check(engine, declared) == first


def test_colons_percent_signs_and_backslashes_arrive_as_they_are(tmp_path: Path) -> None:
    odd = "a ':name' 10% \\\\ 12:00 x"
    with own_engine("postgres") as engine:
        table = sa.Table("t", sa.MetaData(), sa.Column("a", sa.Text(), server_default=odd))
        with engine.begin() as db:
            db.exec_driver_sql("CREATE TABLE t (a text)")
        first = check(engine, {"t": table})
        assert [drift.kind for drift in first] == ["default"]
        project = Project(tmp_path / "alembic", engine, migration(first))
        project.run(up=True)
        with engine.begin() as db:
            db.exec_driver_sql("INSERT INTO t DEFAULT VALUES")
            assert db.exec_driver_sql("SELECT a FROM t").scalar_one() == odd
        assert check(engine, {"t": table}) == []
