"""Monthly partitions on a real PostgreSQL server: made, dropped, and left alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.errors import ConfigError, SchemaError, TransactionError, Unsupported
from pillarbox.schema import ddl
from pillarbox.schema.cron import partitions_sql
from pillarbox.schema.partitions import drop_partitions, ensure_partitions
from tests.servers import ROOT, server_url

NOVEMBER = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
BRIEFLY = timedelta(milliseconds=100)
BOUNDS = """
    SELECT c.relname, pg_get_expr(c.relpartbound, c.oid)
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = to_regclass('{table}') ORDER BY 1
"""


@pytest.fixture
def schema() -> Iterator[str]:
    """A schema of one's own, first in the search path of `engine`."""
    name = f"partitions_{uuid4().hex[:12]}"
    engine = sa.create_engine(psycopg_url())
    with engine.begin() as db:
        db.exec_driver_sql(f"CREATE SCHEMA {name}")
    yield name
    with engine.begin() as db:
        db.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
    engine.dispose()


@pytest.fixture
def engine(schema: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(psycopg_url(), connect_args={"options": f"-csearch_path={schema}"})
    yield made
    assert made.pool.checkedout() == 0  # type: ignore[attr-defined]
    made.dispose()


def psycopg_url() -> sa.URL:
    return sa.make_url(server_url("postgres")).set(drivername="postgresql+psycopg")


def run(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as db:
        for statement in statements:
            db.exec_driver_sql(statement)


def make_dead(engine: sa.Engine, *months: str, name: str = "dead") -> None:
    """A dead-letter table with these months' partitions, made by hand."""
    run(
        engine,
        f"CREATE TABLE {name} (id bigint, failed_at timestamptz NOT NULL, note text DEFAULT 'none', "
        f"PRIMARY KEY (id, failed_at), CHECK (id > 0)) PARTITION BY RANGE (failed_at)",
        f"CREATE INDEX {name}_note ON {name} (note)",
    )
    for month in months:
        year, number = map(int, month.split("_"))
        end = f"{year + number // 12}-{number % 12 + 1:02}"
        add(engine, f"{name}_{month}", f"FROM ('{year}-{number:02}-01 00:00+00') TO ('{end}-01 00:00+00')", name)


def add(engine: sa.Engine, partition: str, bounds: str, name: str = "dead") -> None:
    values = bounds if bounds == "DEFAULT" else f"FOR VALUES {bounds}"
    run(engine, f"CREATE TABLE {partition} PARTITION OF {name} {values}")


def read_bounds(engine: sa.Engine, table: str = "dead") -> dict[str, str]:
    with engine.connect() as db:
        db.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")
        return {row[0]: row[1] for row in db.exec_driver_sql(BOUNDS.format(table=table))}


def list_names(engine: sa.Engine, table: str = "dead") -> list[str]:
    return list(read_bounds(engine, table))


def month_bounds(since: str, until: str) -> str:
    return f"FOR VALUES FROM ('{since}-01 00:00:00+00') TO ('{until}-01 00:00:00+00')"


# -- making ------------------------------------------------------------------------------------------------


def test_this_month_and_the_next_are_made_once(engine: sa.Engine) -> None:
    make_dead(engine)
    with engine.begin() as db:
        assert ensure_partitions(db, "dead", now=NOVEMBER) == ["dead_2026_11", "dead_2026_12"]
    with engine.begin() as db:
        assert ensure_partitions(db, "dead", now=NOVEMBER) == []
    assert read_bounds(engine) == {
        "dead_2026_11": month_bounds("2026-11", "2026-12"),
        "dead_2026_12": month_bounds("2026-12", "2027-01"),
    }


def test_months_ahead_go_over_the_end_of_the_year(engine: sa.Engine) -> None:
    make_dead(engine, "2026_12")
    with engine.begin() as db:
        assert ensure_partitions(db, "dead", now=NOVEMBER, months_ahead=3) == [
            "dead_2026_11",
            "dead_2027_01",
            "dead_2027_02",
        ]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_bounds_are_months_of_utc_in_every_time_zone(engine: sa.Engine, zone: str) -> None:
    make_dead(engine)
    # In New York it is still October.
    first_hour = datetime(2026, 11, 1, 1, 0, tzinfo=UTC)
    with engine.begin() as db:
        db.exec_driver_sql(f"SET LOCAL TIME ZONE '{zone}'")
        db.exec_driver_sql("SET LOCAL DateStyle = 'SQL, DMY'")
        assert ensure_partitions(db, "dead", now=first_hour, months_ahead=0) == ["dead_2026_11"]
        assert ensure_partitions(db, "dead", now=first_hour, months_ahead=0) == []
        assert drop_partitions(db, "dead", now=datetime(2026, 12, 1, tzinfo=UTC), keep=1, dry_run=True) == [
            "dead_2026_11"
        ]
        assert db.exec_driver_sql("SHOW TimeZone").scalar_one() == zone
        assert db.exec_driver_sql("SHOW DateStyle").scalar_one() == "SQL, DMY"
        assert db.exec_driver_sql("SHOW lock_timeout").scalar_one() == "0"
    assert read_bounds(engine) == {"dead_2026_11": month_bounds("2026-11", "2026-12")}


def test_column_without_time_zone_has_months_too(engine: sa.Engine) -> None:
    run(engine, "CREATE TABLE plain (at timestamp NOT NULL) PARTITION BY RANGE (at)")
    with engine.begin() as db:
        db.exec_driver_sql("SET LOCAL TIME ZONE 'America/New_York'")
        assert ensure_partitions(db, "plain", now=NOVEMBER, months_ahead=0) == ["plain_2026_11"]
    assert read_bounds(engine, "plain") == {
        "plain_2026_11": "FOR VALUES FROM ('2026-11-01 00:00:00') TO ('2026-12-01 00:00:00')"
    }


def test_new_partition_has_defaults_checks_keys_and_indexes(engine: sa.Engine) -> None:
    make_dead(engine)
    with engine.begin() as db:
        ensure_partitions(db, "dead", now=NOVEMBER)
        db.exec_driver_sql("INSERT INTO dead (id, failed_at) VALUES (1, '2026-11-30 23:59:59.999999+00')")
        assert db.exec_driver_sql("SELECT id, note FROM dead_2026_11").all() == [(1, "none")]
        columns = "SELECT indexdef FROM pg_indexes WHERE tablename = 'dead_2026_11' ORDER BY 1"
        definitions = [definition.partition(" USING ")[2] for (definition,) in db.exec_driver_sql(columns)]
        assert sorted(definitions) == ["btree (id, failed_at)", "btree (note)"]
    for values in ("1, '2026-11-30 23:59:59.999999+00'", "-1, '2026-11-02'"):
        with pytest.raises(sa.exc.IntegrityError):
            run(engine, f"INSERT INTO dead (id, failed_at) VALUES ({values})")


def test_writer_in_the_middle_of_a_transaction_does_not_stop_a_new_partition(engine: sa.Engine) -> None:
    make_dead(engine, "2026_11")
    with engine.begin() as writer:
        writer.exec_driver_sql("INSERT INTO dead VALUES (1, '2026-11-02')")
        with engine.begin() as db:
            assert ensure_partitions(db, "dead", now=NOVEMBER, lock_timeout=BRIEFLY) == ["dead_2026_12"]
            # And the other way round: it is not committed yet, and the writer goes on.
            writer.exec_driver_sql("SET LOCAL lock_timeout = '100ms'")
            writer.exec_driver_sql("INSERT INTO dead VALUES (2, '2026-11-03')")
    assert list_names(engine) == ["dead_2026_11", "dead_2026_12"]


def test_month_that_a_larger_partition_covers_is_not_made(engine: sa.Engine) -> None:
    make_dead(engine)
    add(engine, "dead_2026", "FROM ('2026-01-01 00:00+00') TO ('2027-01-01 00:00+00')")
    add(engine, "dead_later", "FROM ('2027-02-01 00:00+00') TO (MAXVALUE)")
    with engine.begin() as db:
        assert ensure_partitions(db, "dead", now=NOVEMBER, months_ahead=4) == ["dead_2027_01"]


def test_partition_of_half_a_month_is_an_error(engine: sa.Engine) -> None:
    make_dead(engine)
    add(engine, "dead_half", "FROM ('2026-12-01 00:00+00') TO ('2026-12-16 00:00+00')")
    with engine.begin() as db, pytest.raises(SchemaError, match=r"'dead_half' has a part of 2026-12 only"):
        ensure_partitions(db, "dead", now=NOVEMBER)
    assert list_names(engine) == ["dead_half"]


def test_another_table_of_the_name_is_an_error(engine: sa.Engine) -> None:
    make_dead(engine)
    run(engine, "CREATE TABLE dead_2026_12 (id bigint)")
    with engine.begin() as db:
        with pytest.raises(SchemaError, match=r"expected no table 'dead_2026_12'"):
            ensure_partitions(db, "dead", now=NOVEMBER)
        assert db.exec_driver_sql("SELECT 1").scalar_one() == 1
    assert list_names(engine) == []


def test_rows_in_the_default_partition_are_an_error_that_says_what_to_do(engine: sa.Engine) -> None:
    make_dead(engine)
    add(engine, "dead_rest", "DEFAULT")
    run(engine, "INSERT INTO dead VALUES (1, '2026-12-24')")
    with engine.begin() as db, pytest.raises(SchemaError, match=r"has rows of 2026-12\. Detach the default partition"):
        ensure_partitions(db, "dead", now=NOVEMBER)
    assert list_names(engine) == ["dead_rest"]


def test_default_partition_without_such_rows_is_no_obstacle(engine: sa.Engine) -> None:
    make_dead(engine)
    add(engine, "dead_rest", "DEFAULT")
    run(engine, "INSERT INTO dead VALUES (1, '2020-12-24')")
    with engine.begin() as db:
        assert ensure_partitions(db, "dead", now=NOVEMBER) == ["dead_2026_11", "dead_2026_12"]


def test_table_in_another_schema(engine: sa.Engine, schema: str) -> None:
    make_dead(engine)
    elsewhere = sa.create_engine(psycopg_url())
    with elsewhere.begin() as db:
        assert ensure_partitions(db, "dead", schema=schema, now=NOVEMBER, months_ahead=0) == ["dead_2026_11"]
        assert ensure_partitions(db, f"{schema}.dead", now=NOVEMBER) == ["dead_2026_12"]
        with pytest.raises(SchemaError, match=r"There is no table 'dead'\."):
            ensure_partitions(db, "dead", now=NOVEMBER)
    elsewhere.dispose()
    assert list_names(engine) == ["dead_2026_11", "dead_2026_12"]


def test_names_are_quoted(engine: sa.Engine) -> None:
    name = 'odd "name" 100% :now'
    quoted = '"odd ""name"" 100% :now"'
    with engine.begin() as db:
        db.execute(sa.text(f"CREATE TABLE {quoted} (at timestamptz) PARTITION BY RANGE (at)".replace(":", "\\:")))
        assert ensure_partitions(db, name, now=NOVEMBER, months_ahead=0) == [f"{name}_2026_11"]
        assert drop_partitions(db, name, now=datetime(2027, 1, 1, tzinfo=UTC), keep=1) == [f"{name}_2026_11"]
        block = partitions_sql(name, keep=1).replace("%", "%%")
        db.exec_driver_sql(block)
        db.exec_driver_sql(block)


@pytest.mark.parametrize(("length", "is_fine"), [(55, True), (56, False)])
def test_name_that_postgres_would_cut_is_refused(engine: sa.Engine, length: int, is_fine: bool) -> None:
    name = "t" * length
    make_dead(engine, name=name)
    with engine.begin() as db:
        if is_fine:
            assert ensure_partitions(db, name, now=NOVEMBER, months_ahead=0) == [f"{name}_2026_11"]
            return
        with pytest.raises(ConfigError, match=r"is 64 bytes long"):
            ensure_partitions(db, name, now=NOVEMBER)
        with pytest.raises(ConfigError, match=r"is 64 bytes long"):
            partitions_sql(name)


# -- dropping ----------------------------------------------------------------------------------------------


def test_every_month_before_the_kept_ones_is_dropped(engine: sa.Engine) -> None:
    make_dead(engine, "2024_02", "2026_07", "2026_08", "2026_09", "2026_10", "2026_11", "2026_12")
    with engine.begin() as db:
        expected = ["dead_2024_02", "dead_2026_07", "dead_2026_08"]
        assert drop_partitions(db, "dead", keep=3, now=NOVEMBER, dry_run=True) == expected
        assert drop_partitions(db, "dead", keep=3, now=NOVEMBER) == expected
        assert drop_partitions(db, "dead", keep=3, now=NOVEMBER) == []
    assert list_names(engine) == ["dead_2026_09", "dead_2026_10", "dead_2026_11", "dead_2026_12"]


def test_dry_run_changes_nothing_and_takes_no_lock(engine: sa.Engine) -> None:
    make_dead(engine, "2024_02", "2026_11")
    with engine.begin() as writer:
        writer.exec_driver_sql("INSERT INTO dead VALUES (1, '2026-11-02')")
        with engine.begin() as db:
            assert drop_partitions(db, "dead", now=NOVEMBER, dry_run=True, lock_timeout=BRIEFLY) == ["dead_2024_02"]
    assert list_names(engine) == ["dead_2024_02", "dead_2026_11"]


def test_twelve_months_are_kept_unless_told(engine: sa.Engine) -> None:
    make_dead(engine, "2025_10", "2025_11", "2025_12")
    with engine.begin() as db:
        assert drop_partitions(db, "dead", now=NOVEMBER) == ["dead_2025_10", "dead_2025_11"]


def test_last_moment_of_a_month_keeps_it(engine: sa.Engine) -> None:
    make_dead(engine, "2026_10")
    end = datetime(2026, 11, 1, tzinfo=UTC)
    with engine.begin() as db:
        assert drop_partitions(db, "dead", keep=1, now=end - timedelta(microseconds=1)) == []
        assert drop_partitions(db, "dead", keep=1, now=end) == ["dead_2026_10"]


def test_partition_is_judged_by_its_bounds_and_not_by_its_name(engine: sa.Engine) -> None:
    make_dead(engine)
    # The name is that of an old month, the bounds are not.
    add(engine, "dead_2020_01", "FROM ('2026-11-01 00:00+00') TO ('2026-12-01 00:00+00')")
    add(engine, "dead_2020_02", "FROM ('2020-02-01 00:00+00') TO ('2020-02-15 00:00+00')")
    add(engine, "dead_2020_03", "FROM ('2020-03-01 00:00+00') TO ('2020-05-01 00:00+00')")
    add(engine, "dead_2020_06", "FROM ('2020-06-01 00:00-05') TO ('2020-07-01 00:00-05')")
    add(engine, "dead_2019_12", "FROM (MINVALUE) TO ('2020-01-01 00:00+00')")
    add(engine, "dead_2020_12", "DEFAULT")
    # The bounds are those of an old month, the name is not.
    add(engine, "dead_summer", "FROM ('2020-08-01 00:00+00') TO ('2020-09-01 00:00+00')")
    kept = ["dead_2019_12", "dead_2020_01", "dead_2020_02", "dead_2020_03", "dead_2020_06", "dead_2020_12"]
    with engine.begin() as db:
        assert drop_partitions(db, "dead", keep=1, now=NOVEMBER) == ["dead_summer"]
    assert list_names(engine) == kept


def test_caller_that_rolls_back_keeps_everything(engine: sa.Engine) -> None:
    make_dead(engine, "2024_02")
    with engine.connect() as db:
        assert drop_partitions(db, "dead", now=NOVEMBER) == ["dead_2024_02"]
        assert ensure_partitions(db, "dead", now=NOVEMBER) == ["dead_2026_11", "dead_2026_12"]
        db.rollback()
    assert list_names(engine) == ["dead_2024_02"]


def test_lock_that_is_not_free_is_an_error_and_the_transaction_goes_on(engine: sa.Engine) -> None:
    make_dead(engine, "2024_02", "2026_11")
    with engine.begin() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM dead")
        with engine.begin() as db:
            with pytest.raises(TransactionError, match=r"'dead': its lock was not free within 0\.1 s"):
                drop_partitions(db, "dead", now=NOVEMBER, lock_timeout=BRIEFLY)
            assert db.exec_driver_sql("SHOW lock_timeout").scalar_one() == "0"
    assert list_names(engine) == ["dead_2024_02", "dead_2026_11"]


def test_partition_that_others_depend_on_is_an_error(engine: sa.Engine) -> None:
    make_dead(engine, "2024_02")
    run(engine, "CREATE VIEW february AS SELECT * FROM dead_2024_02")
    with engine.begin() as db, pytest.raises(SchemaError, match=r"other objects depend on it; nothing was changed"):
        drop_partitions(db, "dead", now=NOVEMBER)
    assert list_names(engine) == ["dead_2024_02"]


# -- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("(at timestamptz)", "it is not partitioned"),
        ("(at timestamptz) PARTITION BY LIST (at)", r"by LIST of 'at' \(timestamp with time zone\)"),
        ("(at timestamptz, b int) PARTITION BY RANGE (at, b)", "by RANGE of 2 columns"),
        ("(id bigint) PARTITION BY RANGE (id)", r"by RANGE of 'id' \(bigint\)"),
        ("(at timestamp) PARTITION BY RANGE (date_trunc('day', at))", "by RANGE of expression"),
    ],
    ids=["plain", "list", "two", "type", "expression"],
)
def test_other_tables_are_refused(engine: sa.Engine, ddl: str, reason: str) -> None:
    run(engine, f"CREATE TABLE other {ddl}")
    for change in (ensure_partitions, drop_partitions):
        with engine.begin() as db, pytest.raises(SchemaError, match=reason):
            change(db, "other")


def test_other_databases_are_refused() -> None:
    engine = sa.create_engine("sqlite://")
    for change in (ensure_partitions, drop_partitions):
        with engine.begin() as db, pytest.raises(Unsupported, match=r"expected a PostgreSQL database, got sqlite"):
            change(db, "dead")
    engine.dispose()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_transaction_that_cannot_see_what_others_do_is_refused(engine: sa.Engine, level: Any) -> None:
    make_dead(engine)
    with (
        engine.connect().execution_options(isolation_level=level) as db,
        pytest.raises(TransactionError, match=f"expected a READ COMMITTED transaction, got {level}"),
    ):
        ensure_partitions(db, "dead")


def test_bad_numbers_are_refused(engine: sa.Engine) -> None:
    with engine.begin() as db:
        with pytest.raises(ConfigError, match="expected keep of at least 1, got 0"):
            drop_partitions(db, "dead", keep=0)
        with pytest.raises(ConfigError, match="expected months_ahead of at least 0, got -1"):
            ensure_partitions(db, "dead", months_ahead=-1)
        with pytest.raises(ConfigError, match="expected one with a time zone"):
            ensure_partitions(db, "dead", now=datetime(2026, 11, 15))  # noqa: DTZ001
    with pytest.raises(ConfigError, match="expected keep of at least 1, got 0"):
        partitions_sql("dead", keep=0)


# -- several at once ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [ensure_partitions, drop_partitions], ids=["ensure", "drop"])
def test_four_connections_at_once_change_each_partition_once(engine: sa.Engine, change: Callable[..., Any]) -> None:
    make_dead(engine, "2024_01", "2024_02", "2024_03")
    changed: list[list[str]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with engine.begin() as db:
                changed.append(change(db, "dead", now=NOVEMBER, lock_timeout=timedelta(seconds=30)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with engine.begin() as db:
        # All four have seen the same partitions, and wait, before the first may go on.
        db.exec_driver_sql("LOCK TABLE ONLY dead IN SHARE UPDATE EXCLUSIVE MODE")
        for thread in threads:
            thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'dead'::regclass AND NOT granted"
        while db.exec_driver_sql(waiting).scalar_one() < 4 and not failed:
            pass
    for thread in threads:
        thread.join(60)
    assert failed == []
    made = ["dead_2026_11", "dead_2026_12"]
    old = ["dead_2024_01", "dead_2024_02", "dead_2024_03"]
    assert sorted(changed) == [[], [], [], made if change is ensure_partitions else old]
    assert list_names(engine) == ([*old, *made] if change is ensure_partitions else [])


def test_four_processes_at_once_make_each_partition_once(engine: sa.Engine, schema: str, tmp_path: Path) -> None:
    make_dead(engine)
    command = [sys.executable, "-m", "pillarbox", "partitions", "ensure", "--json"]
    where = ["--store", server_url("postgres"), "--table", f"{schema}.dead", "--months-ahead", "11"]
    processes = [
        subprocess.Popen([*command, *where], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, outputs, strict=True)] == [(0, "")] * 4
    made = [name for out, _ in outputs for each in orjson.loads(out) for name in each["made"]]
    assert len(made) == 12
    assert sorted(made) == list_names(engine)


async def test_asynchronous_connection(engine: sa.Engine, schema: str) -> None:
    make_dead(engine, "2024_02")
    asynchronous = create_async_engine(psycopg_url().set(drivername="postgresql+asyncpg"))
    async with asynchronous.begin() as db:
        made = await db.run_sync(ensure_partitions, "dead", schema=schema, now=NOVEMBER)
        dropped = await db.run_sync(drop_partitions, "dead", schema=schema, now=NOVEMBER)
    with engine.begin() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM dead")
        async with asynchronous.begin() as db:
            with pytest.raises(TransactionError, match="its lock was not free"):
                await db.run_sync(
                    drop_partitions,
                    "dead",
                    schema=schema,
                    keep=1,
                    now=datetime(2028, 1, 1, tzinfo=UTC),
                    lock_timeout=BRIEFLY,
                )
    await asynchronous.dispose()
    assert (made, dropped) == (["dead_2026_11", "dead_2026_12"], ["dead_2024_02"])


# -- the statement for pg_cron -----------------------------------------------------------------------------


def months_around_now(*offsets: int) -> list[str]:
    now = datetime.now(UTC)
    counts = [now.year * 12 + now.month - 1 + offset for offset in offsets]
    return [f"{count // 12}_{count % 12 + 1:02}" for count in counts]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_block_makes_two_months_and_drops_all_before_the_kept(engine: sa.Engine, schema: str, zone: str) -> None:
    old, oldest_kept = months_around_now(-3, -2)
    make_dead(engine, "2019_12", "2020_01", old, oldest_kept)
    add(engine, "dead_2020_02", "FROM ('2020-02-01 00:00+00') TO ('2020-02-15 00:00+00')")
    add(engine, "dead_2020_03", "FROM ('2020-03-01 00:00+00') TO ('2020-05-01 00:00+00')")
    add(engine, "dead_2020_06", "FROM ('2020-06-01 00:00-05') TO ('2020-07-01 00:00-05')")
    add(engine, "dead_2019_01", "FROM (MINVALUE) TO ('2019-12-01 00:00+00')")
    add(engine, "dead_2020_12", "DEFAULT")
    block = partitions_sql("dead", schema=schema, keep=3)
    elsewhere = sa.create_engine(psycopg_url())
    for _ in range(2):
        with elsewhere.begin() as db:
            db.exec_driver_sql(f"SET TIME ZONE '{zone}'")
            db.exec_driver_sql(block.replace("%", "%%"))
    elsewhere.dispose()
    this, following, after = months_around_now(0, 1, 2)
    bounds = read_bounds(engine)
    strange = ["dead_2019_01", "dead_2020_02", "dead_2020_03", "dead_2020_06", "dead_2020_12"]
    assert list(bounds) == [*strange, *sorted([f"dead_{oldest_kept}", f"dead_{this}", f"dead_{following}"])]
    dashed = [month.replace("_", "-") for month in (this, following, after)]
    assert bounds[f"dead_{this}"] == month_bounds(dashed[0], dashed[1])
    assert bounds[f"dead_{following}"] == month_bounds(dashed[1], dashed[2])


def test_block_leaves_months_that_a_larger_partition_covers(engine: sa.Engine) -> None:
    make_dead(engine)
    add(engine, "dead_later", "FROM ('2020-01-01 00:00+00') TO (MAXVALUE)")
    run(engine, partitions_sql("dead").replace("%", "%%"))
    assert list_names(engine) == ["dead_later"]


# -- the commands ------------------------------------------------------------------------------------------


def command(*args: str, schema: str | None = None) -> subprocess.CompletedProcess[str]:
    where = [] if schema is None else ["--store", server_url("postgres"), "--table", f"{schema}.dead"]
    line = [sys.executable, "-m", "pillarbox", "partitions", *args, *where]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_commands_say_what_they_did(engine: sa.Engine, schema: str) -> None:
    make_dead(engine, "2020_01")
    this, following = months_around_now(0, 1)
    table = f"{schema}.dead"
    done = command("ensure", schema=schema)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{table}: dead_{this} made\n{table}: dead_{following} made\n"
    assert command("ensure", schema=schema).stdout == f"{table}: nothing to make\n"
    assert command("drop", "--dry-run", schema=schema).stdout == f"{table}: dead_2020_01 would be dropped\n"
    assert orjson.loads(command("drop", "--json", schema=schema).stdout) == [
        {"table": table, "dropped": ["dead_2020_01"], "dry_run": False}
    ]
    assert command("drop", schema=schema).stdout == f"{table}: nothing to drop\n"
    assert list_names(engine) == [f"dead_{this}", f"dead_{following}"]


def test_all_partitioned_tables_of_the_layout_are_looked_after(engine: sa.Engine, schema: str) -> None:
    make_dead(engine, name="orders_dead")
    make_dead(engine, name="orders_audit")
    where = ["--store", server_url("postgres"), "--table", f"{schema}.orders", "--layout", "pillarbox"]
    done = command("ensure", "--months-ahead", "0", "--json", *where)
    (this,) = months_around_now(0)
    assert orjson.loads(done.stdout) == [
        {"table": f"{schema}.orders_dead", "made": [f"orders_dead_{this}"]},
        {"table": f"{schema}.orders_audit", "made": [f"orders_audit_{this}"]},
    ]


@pytest.mark.parametrize(
    ("layout", "table"),
    [
        ("omnibox-partitioned", "outbox_events_partitioned"),
        ("omnibox-inbox-partitioned", "inbox_events_partitioned"),
    ],
)
def test_layout_with_a_partitioned_table(engine: sa.Engine, schema: str, layout: str, table: str) -> None:
    run(engine, *filter(str.strip, ddl(layout, "postgresql", schema=schema).split(";")))
    this, following = months_around_now(0, 1)
    # A layout of somebody else's has its own table's name.
    where = ["--store", server_url("postgres"), "--layout", layout, "--table", f"{schema}.{table}"]
    assert orjson.loads(command("ensure", "--json", *where).stdout) == [
        {"table": f"{schema}.{table}", "made": [f"{table}_{this}", f"{table}_{following}"]}
    ]
    assert command("sql", "--layout", layout).stdout == partitions_sql(table)
    run(engine, partitions_sql(table).replace("%", "%%"))
    assert list_names(engine, table) == [f"{table}_{this}", f"{table}_{following}"]


def test_printed_statement_runs(engine: sa.Engine, schema: str) -> None:
    make_dead(engine, "2020_01")
    done = command("sql", "--keep", "3", "--table", f"{schema}.dead")
    assert done.stdout == partitions_sql("dead", schema=schema, keep=3)
    run(engine, done.stdout.replace("%", "%%"))
    assert list_names(engine) == [f"dead_{month}" for month in months_around_now(0, 1)]


def test_commands_fail_in_one_line(engine: sa.Engine, schema: str) -> None:
    run(engine, "CREATE TABLE dead (id bigint)")
    done = command("ensure", schema=schema)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pillarbox: Table '{schema}.dead': expected a partitioned table" in done.stderr
    assert command("drop", "--keep", "0", schema=schema).returncode == 2
    assert command("sql").returncode == 2
    done = command("ensure", "--store", "sqlite:///nowhere.db", "--table", "dead")
    assert done.returncode == 1
