"""Differences told one by one: how they read, what is close enough to be none, and what a mend keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.sql import quoted_name

from pillarbox.errors import ConfigError, LayoutError, SchemaError
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.schema import autovacuum_sql, check_schema, check_tables
from tests.contract.drifts import DATABASES, declare, mend, own_engine, undo


@pytest.fixture(params=DATABASES)
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    with own_engine(request.param) as engine:
        yield engine


@pytest.fixture
def postgres() -> Iterator[sa.Engine]:
    with own_engine("postgres") as engine:
        yield engine


@pytest.fixture
def db(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def pg(postgres: sa.Engine) -> Iterator[sa.Connection]:
    with postgres.connect() as connection:
        yield connection


def create(db: sa.Connection, *statements: str, layout: str = "pillarbox") -> dict[str, sa.Table]:
    """The layout's tables as declared, and then changed by statements."""
    tables = declare(layout)
    tables["outbox"].metadata.create_all(db)
    for statement in statements:
        db.exec_driver_sql(statement)
    db.commit()
    return tables


def texts(db: sa.Connection, tables: dict[str, sa.Table]) -> list[str]:
    return [str(drift) for drift in check_tables(db, tables.values())]


def assert_mends(db: sa.Connection, tables: dict[str, sa.Table]) -> None:
    first = check_tables(db, tables.values())
    assert first
    mend(db, first)
    assert texts(db, tables) == []
    undo(db, first)
    assert check_tables(db, tables.values()) == first
    db.commit()


# -- how they read -----------------------------------------------------------------------------------------


def test_a_difference_names_the_table_the_thing_and_both_sides(pg: sa.Connection) -> None:
    tables = create(
        pg,
        "ALTER TABLE events ALTER COLUMN attempts SET DEFAULT 3, ALTER COLUMN topic TYPE varchar(100)",
        "ALTER TABLE events DROP CONSTRAINT events_lane, ADD CONSTRAINT mine CHECK (lane < 8)",
        "DROP INDEX events_ready",
        "CREATE INDEX events_ready ON events (sink, lane, state, seq) INCLUDE (topic) WHERE state IN (0, 1)",
        "DROP TABLE events_lanes",
    )
    drifts = check_tables(pg, tables.values())
    assert list(map(str, drifts)) == [
        "Table 'events', length 'topic': expected character varying(255); found character varying(100)",
        "Table 'events', default 'attempts': expected '0'; found 3",
        "Table 'events', check 'events_lane': expected lane >= 0 AND lane < 64; found ((lane < 8))",
        "Table 'events', index 'events_ready': expected (sink, lane, state, seq) where state = 0; "
        "found (sink, lane, state, seq) include (topic) where state = ANY (ARRAY[0, 1])",
        "Table 'events_lanes': expected a table; found none",
    ]
    assert drifts[1].statement == "ALTER TABLE events ALTER COLUMN attempts SET DEFAULT '0';"
    assert drifts[2].statement == (
        "ALTER TABLE events DROP CONSTRAINT mine;\n"
        "ALTER TABLE events ADD CONSTRAINT events_lane CHECK (lane >= 0 AND lane < 64);"
    )
    assert drifts[3].statements[0] == "DROP INDEX events_ready"


def test_column_that_a_put_cannot_fill_is_found(db: sa.Connection) -> None:
    tables = create(db, "ALTER TABLE events_lanes ADD COLUMN tenant INTEGER DEFAULT 1 NOT NULL")
    assert texts(db, tables) == []
    declared = tables["lanes"]
    declared.drop(db)
    wider = declared.to_metadata(sa.MetaData())
    wider.append_column(sa.Column("tenant", sa.Integer(), nullable=False))
    wider.create(db)
    (text,) = texts(db, tables)
    assert text.startswith(
        "Table 'events_lanes', foreign column 'tenant': expected nullable, or with a default; found int"
    )
    assert_mends(db, tables)


# -- numbering ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("ALTER COLUMN seq DROP IDENTITY", "identity 'seq': expected by default; found none"),
        ("ALTER COLUMN seq SET GENERATED ALWAYS", "identity 'seq': expected by default; found always"),
        ("ALTER COLUMN seq SET CACHE 20", "cache 'seq': expected 1; found 20"),
    ],
)
def test_numbering_of_rows_is_checked_on_postgresql(pg: sa.Connection, statement: str, text: str) -> None:
    tables = create(pg, f"ALTER TABLE events {statement}")
    assert texts(pg, tables) == [f"Table 'events', {text}"]
    assert_mends(pg, tables)


def test_new_numbers_go_on_after_the_highest(pg: sa.Connection) -> None:
    tables = create(pg, "ALTER TABLE events_audit ALTER COLUMN number DROP IDENTITY")
    row = "INSERT INTO events_audit ({}at, actor, action, events) VALUES ({}now(), 'ann', 'prune', 1)"
    pg.exec_driver_sql(row.format("number, ", "41, "))
    mend(pg, check_tables(pg, tables.values()))
    pg.exec_driver_sql(row.format("", ""))
    assert pg.exec_driver_sql("SELECT max(number) FROM events_audit").scalar_one() == 42


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
def test_missing_auto_increment_is_found(name: str) -> None:
    with own_engine(name) as engine, engine.connect() as db:
        tables = create(db, "ALTER TABLE events_audit MODIFY number BIGINT NOT NULL")
        assert texts(db, tables) == ["Table 'events_audit', identity 'number': expected auto_increment; found none"]
        assert_mends(db, tables)


def test_sqlite_must_not_give_a_number_twice() -> None:
    with own_engine("sqlite") as engine, engine.connect() as db:
        tables = declare("pillarbox")
        for role, table in tables.items():
            if role != "audit":
                table.create(db)
        db.exec_driver_sql(
            "CREATE TABLE events_audit (number INTEGER PRIMARY KEY, at DATETIME NOT NULL, actor VARCHAR(255) NOT NULL, "
            "action VARCHAR(50) NOT NULL, detail JSON, events INTEGER NOT NULL)"
        )
        assert texts(db, tables) == ["Table 'events_audit', identity 'number': expected autoincrement; found none"]
        assert_mends(db, tables)


# -- keys --------------------------------------------------------------------------------------------------


def test_missing_and_wrong_primary_keys_are_found(db: sa.Connection) -> None:
    tables = create(db)
    declared = tables["lanes"]
    declared.drop(db)
    wider = declared.to_metadata(sa.MetaData())
    narrow = sa.Table(
        "events_lanes",
        sa.MetaData(),
        *(sa.Column(column.name, column.type, nullable=False) for column in wider.columns),
        sa.PrimaryKeyConstraint("lane"),
    )
    narrow.c.lane.autoincrement = False
    narrow.create(db)
    assert texts(db, tables) == ["Table 'events_lanes', primary key 'sink, lane': expected (sink, lane); found (lane)"]
    assert_mends(db, tables)
    narrow.drop(db)
    keyless = sa.Table(
        "events_lanes", sa.MetaData(), *(sa.Column(c.name, c.type, nullable=False) for c in wider.columns)
    )
    keyless.create(db)
    assert texts(db, tables) == ["Table 'events_lanes', primary key 'sink, lane': expected (sink, lane); found none"]
    assert_mends(db, tables)


def test_index_that_failed_to_build_is_no_index(pg: sa.Connection) -> None:
    tables = create(pg, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'events_until'::regclass")
    assert texts(pg, tables) == [
        "Table 'events', index 'events_until': expected (sink, state, until_at) where until_at IS NOT NULL; "
        "found (sink, state, until_at) where until_at IS NOT NULL, invalid"
    ]
    mend(pg, check_tables(pg, tables.values()))
    assert texts(pg, tables) == []


def test_condition_that_is_not_enforced_is_no_check() -> None:
    with own_engine("mysql") as engine, engine.connect() as db:
        tables = create(db, "ALTER TABLE events ALTER CHECK events_lane NOT ENFORCED")
        (text,) = texts(db, tables)
        assert text.endswith("not enforced")
        assert_mends(db, tables)


# -- what is no difference ---------------------------------------------------------------------------------


def test_additions_and_other_names_are_no_drift(db: sa.Connection) -> None:
    tables = declare("pillarbox")
    outbox = tables["outbox"]
    made = declare("pillarbox")
    for index in made["outbox"].indexes:
        index.name = quoted_name(f"other_{index.name}", quote=None)
    check = next(each for each in made["outbox"].constraints if isinstance(each, sa.CheckConstraint))
    check.name = "something_else"
    made["outbox"].append_column(sa.Column("note", sa.String(20)))
    made["outbox"].append_column(sa.Column("tenant", sa.Integer(), nullable=False, server_default="1"))
    sa.Index("by_note", made["outbox"].c.note)
    assert {index.name for index in outbox.indexes}.isdisjoint(index.name for index in made["outbox"].indexes)
    made["outbox"].metadata.create_all(db)
    assert texts(db, tables) == []


def test_naming_conventions_are_no_drift(db: sa.Connection) -> None:
    convention = {
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
    metadata = sa.MetaData(naming_convention=convention)
    tables = dict(declare_layout(get_layout("pillarbox"), metadata, table="events"))
    metadata.create_all(db)
    assert texts(db, tables) == []
    assert texts(db, declare("pillarbox")) == []


async def test_layout_of_another_database_is_refused() -> None:
    expected = "Layout 'omnibox': its table exists on postgresql; got 'sqlite'"
    with own_engine("sqlite") as engine, pytest.raises(LayoutError, match=expected):
        await check_schema(engine, "omnibox")


def test_other_words_for_the_same_are_no_drift(pg: sa.Connection) -> None:
    tables = create(
        pg,
        "ALTER TABLE events ALTER COLUMN attempts SET DEFAULT 0, ALTER COLUMN sink SET DEFAULT ''::text",
        "ALTER TABLE events DROP CONSTRAINT events_lane, ADD CHECK (64 > lane AND lane >= '0')",
        "DROP INDEX events_key, events_dedup",
        "CREATE INDEX k ON events (sink, key, state, seq) WHERE state = ANY (ARRAY[3, 2, 1]) AND NOT (key IS NULL)",
        "CREATE UNIQUE INDEX d ON events (dedup_key, sink) WHERE (dedup_key) IS NOT NULL",
        "ALTER TABLE events_audit ALTER COLUMN number DROP IDENTITY",
        "CREATE SEQUENCE n OWNED BY events_audit.number",
        "ALTER TABLE events_audit ALTER COLUMN number SET DEFAULT nextval('n')",
    )
    assert texts(pg, tables) == []


def test_text_is_an_unbounded_varchar() -> None:
    for name in ("postgres", "sqlite"):
        with own_engine(name) as engine, engine.connect() as db:
            declared = sa.Table("t", sa.MetaData(), sa.Column("a", sa.String()), sa.Column("b", sa.Text()))
            db.exec_driver_sql("CREATE TABLE t (a TEXT, b VARCHAR)")
            assert check_tables(db, [declared]) == []


def test_mariadb_has_json_as_text_and_boolean_as_number() -> None:
    with own_engine("mariadb") as engine, engine.connect() as db:
        declared = sa.Table("t", sa.MetaData(), sa.Column("a", sa.JSON()), sa.Column("b", sa.Boolean()))
        db.exec_driver_sql("CREATE TABLE t (a JSON, b BOOLEAN)")
        assert check_tables(db, [declared]) == []
        db.exec_driver_sql("ALTER TABLE t MODIFY a LONGTEXT, MODIFY b TINYINT(1)")
        assert check_tables(db, [declared]) == []
        db.exec_driver_sql("ALTER TABLE t MODIFY a TEXT, MODIFY b SMALLINT")
        assert [drift.kind for drift in check_tables(db, [declared])] == ["type", "type"]


def test_keys_widened_by_the_partition_key_are_no_drift(pg: sa.Connection) -> None:
    tables = create(pg, "DROP TABLE events_dead")
    columns = ", ".join(
        f"{column.name} {column.type.compile(pg.dialect)}"
        + (" NOT NULL" if not column.nullable else "")
        + {"sink": " DEFAULT ''", "attempts": " DEFAULT 0"}.get(column.name, "")
        for column in tables["dead"].columns
    )
    pg.exec_driver_sql(f"CREATE TABLE events_dead ({columns}, PRIMARY KEY (seq, died_at)) PARTITION BY RANGE (died_at)")
    for index in tables["dead"].indexes:
        index.create(pg)
    assert texts(pg, tables) == []
    # A unique index without the key cannot be made there: the mend has it.
    tables["dead"].append_constraint(sa.Index("events_dead_once", "id", unique=True))
    (drift,) = check_tables(pg, tables.values())
    assert drift.statement == "CREATE UNIQUE INDEX events_dead_once ON events_dead (id, died_at);"
    assert_mends(pg, tables)


def test_mysql_keys_widened_by_the_partition_key_are_no_drift() -> None:
    for name in ("mariadb", "mysql"):
        with own_engine(name) as engine, engine.connect() as db:
            declared = sa.Table(
                "t",
                sa.MetaData(),
                sa.Column("a", sa.Integer(), primary_key=True),
                sa.Column("d", sa.Date(), nullable=False),
            )
            db.exec_driver_sql(
                "CREATE TABLE t (a INT NOT NULL AUTO_INCREMENT, d DATE NOT NULL, PRIMARY KEY (a, d)) "
                "PARTITION BY RANGE (to_days(d)) (PARTITION p0 VALUES LESS THAN MAXVALUE)"
            )
            assert check_tables(db, [declared]) == []


# -- partitions --------------------------------------------------------------------------------------------


def test_partitioning_is_compared_and_cannot_be_mended(pg: sa.Connection) -> None:
    def declared(**options: Any) -> sa.Table:
        columns = (sa.Column("a", sa.Integer(), nullable=False), sa.Column("b", sa.Integer(), nullable=False))
        return sa.Table("t", sa.MetaData(), *columns, **options)

    wanted = declared(postgresql_partition_by="RANGE (a)")
    for live, found in ((declared(), "none"), (declared(postgresql_partition_by="LIST (b)"), "LIST (b)")):
        live.create(pg)
        (drift,) = check_tables(pg, [wanted])
        assert str(drift) == f"Table 't', partitioning 'RANGE (a)': expected RANGE (a); found {found}"
        assert drift.statement.startswith("-- A table that is there cannot be partitioned.")
        live.drop(pg)
    wanted.create(pg)
    assert check_tables(pg, [wanted]) == []
    assert check_tables(pg, [declared()]) == []


# -- rows survive ------------------------------------------------------------------------------------------


def test_sqlite_rebuild_keeps_rows_additions_and_the_highest_number(tmp_path: Path) -> None:
    with own_engine("sqlite") as engine, engine.connect() as db:
        made = declare("pillarbox")
        made["audit"].append_column(sa.Column("note", sa.String(20), server_default="x"))
        made["audit"].append_constraint(sa.CheckConstraint("note <> 'y'"))
        sa.Index("by_note", made["audit"].c.note)
        made["audit"].c.actor.nullable = True
        made["audit"].metadata.create_all(db)
        for _ in range(3):
            db.exec_driver_sql(
                "INSERT INTO events_audit (at, actor, action, events) VALUES ('2020-01-31 00:00:00', 'ann', 'prune', 1)"
            )
        db.exec_driver_sql("DELETE FROM events_audit WHERE number > 1")
        db.exec_driver_sql(
            "CREATE TRIGGER audited AFTER INSERT ON events_audit BEGIN UPDATE events_audit SET note = 'z'; END"
        )
        tables = declare("pillarbox")
        assert texts(db, tables) == ["Table 'events_audit', nullability 'actor': expected not null; found nullable"]
        mend(db, check_tables(db, tables.values()))
        assert texts(db, tables) == []
        db.exec_driver_sql(
            "INSERT INTO events_audit (at, actor, action, events) VALUES ('2020-01-31 00:00:00', 'bob', 'prune', 1)"
        )
        rows = db.exec_driver_sql("SELECT number, actor, note FROM events_audit ORDER BY number").all()
        assert [tuple(row) for row in rows] == [(1, "ann", "z"), (4, "bob", "z")]
        with pytest.raises(sa.exc.IntegrityError):
            db.exec_driver_sql("UPDATE events_audit SET note = 'y'")
        assert "by_note" in {index["name"] for index in sa.inspect(db).get_indexes("events_audit")}


def test_postgres_mend_keeps_values(pg: sa.Connection) -> None:
    tables = create(
        pg,
        "ALTER TABLE events_audit ALTER COLUMN at TYPE timestamp USING at AT TIME ZONE 'UTC', "
        "ALTER COLUMN events TYPE text, ALTER COLUMN detail TYPE text",
        "INSERT INTO events_audit (at, actor, action, events, detail) "
        "VALUES ('2020-01-31 12:00:00', 'ann', 'prune', '7', '{\"a\": 1}')",
        "SET TIME ZONE 'Asia/Tokyo'",
    )
    assert_mends(pg, tables)
    mend(pg, check_tables(pg, tables.values()))
    row = pg.exec_driver_sql("SELECT at = '2020-01-31 12:00:00+00', events, detail ->> 'a' FROM events_audit").one()
    assert tuple(row) == (True, 7, "1")


# -- autovacuum --------------------------------------------------------------------------------------------


async def test_autovacuum_is_looked_at_when_asked(postgres: sa.Engine) -> None:
    with postgres.begin() as db:
        tables = declare("pillarbox")
        tables["outbox"].metadata.create_all(db)
    assert await check_schema(postgres, table="events") == []
    (drift,) = await check_schema(postgres, table="events", autovacuum=True)
    assert str(drift) == (
        "Table 'events', autovacuum 'events': expected scale factors 0 and thresholds in rows; found none"
    )
    assert drift.statement == (
        "ALTER TABLE events SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, "
        "autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 1000);"
    )
    with postgres.begin() as db:
        mend(db, [drift])
    assert await check_schema(postgres, table="events", autovacuum=True) == []
    with postgres.begin() as db:
        undo(db, [drift])
    assert await check_schema(postgres, table="events", autovacuum=True) == [drift]


async def test_a_chosen_threshold_is_kept(postgres: sa.Engine) -> None:
    with postgres.begin() as db:
        tables = declare("pillarbox")
        tables["outbox"].metadata.create_all(db)
        db.exec_driver_sql(autovacuum_sql(tables["outbox"], vacuum_threshold=50, cost_delay=0, cost_limit=2000))
    assert await check_schema(postgres, table="events", autovacuum=True) == []
    with postgres.begin() as db:
        db.exec_driver_sql("ALTER TABLE events SET (autovacuum_vacuum_scale_factor = 0.1)")
    (drift,) = await check_schema(postgres, table="events", autovacuum=True)
    assert "autovacuum_vacuum_threshold = 50" in drift.statement
    with postgres.begin() as db:
        mend(db, [drift])
    assert await check_schema(postgres, table="events", autovacuum=True) == []


def test_autovacuum_of_a_partitioned_table_is_that_of_its_partitions(pg: sa.Connection) -> None:
    table = sa.Table("t", sa.MetaData(), sa.Column("a", sa.Integer()), postgresql_partition_by="RANGE (a)")
    table.create(pg)
    pg.exec_driver_sql("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (9)")
    (drift,) = check_tables(pg, [table], autovacuum=[table])
    assert (drift.kind, drift.name) == ("autovacuum", "t_1")
    mend(pg, [drift])
    assert check_tables(pg, [table], autovacuum=[table]) == []


def test_autovacuum_statement_quotes_and_refuses() -> None:
    assert autovacuum_sql("sales.Events", cost_delay=2.5).startswith('ALTER TABLE sales."Events" SET (')
    assert autovacuum_sql("t", cost_delay=2.5).endswith("autovacuum_vacuum_cost_delay = 2.5)")
    with pytest.raises(ConfigError, match="vacuum_threshold: expected a number of rows from 0 on; got -1"):
        autovacuum_sql("t", vacuum_threshold=-1)


@pytest.mark.parametrize("name", ["mariadb", "mysql", "sqlite"])
async def test_other_databases_have_no_autovacuum(name: str) -> None:
    with own_engine(name) as engine:
        with engine.begin() as db:
            declare("pillarbox")["outbox"].metadata.create_all(db)
        assert await check_schema(engine, table="events", autovacuum=True) == []


def test_missing_schema_is_said(db: sa.Connection) -> None:
    table = sa.Table("t", sa.MetaData(), sa.Column("a", sa.Integer()), schema="nowhere")
    expected = {
        "postgresql": r"There is no schema 'nowhere'. Create it first: CREATE SCHEMA nowhere;",
        "mysql": r"There is no database 'nowhere', or user '.*' may not see it.",
        "sqlite": r"Schema 'nowhere': SQLite has no schemas; name the table alone",
    }
    with pytest.raises(SchemaError, match=expected[db.dialect.name]):
        check_tables(db, [table])
