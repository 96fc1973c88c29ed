"""What is particular to the SQL sink: its tables, its statements, and that an event is taken once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import Event, Relay
from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Retry, load_event
from pillarbox.sinks.sql import SqlSink
from pillarbox.stores import Counts
from tests.contract.broker_kits import named_claim
from tests.contract.kit_sql import until_waiting
from tests.contract.sinks import KITS, sink_kit, sinks_that
from tests.contract.stores import make_database
from tests.servers import ROOT, server_url

__all__ = ["sink_kit"]

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
every_database = sinks_that("is a database")


def on(*backends: str) -> pytest.MarkDecorator:
    chosen = [pytest.param((f"sql-{name}", frozenset()), id=f"sql-{name}") for name in backends]
    assert all(param.values[0][0] in KITS for param in chosen)  # type: ignore[index]
    return pytest.mark.parametrize("kit", chosen, indirect=True)


def claim_of(payload: Any = None, *, type: str = "order.placed", created_at: datetime | None = None, **fields: Any):
    event = Event(type, {"name": "a"} if payload is None else payload, **fields)
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    return Claim(row=1, event=load_event(*{**values, "created_at": created_at}.values()), attempt=1)


def own_engine(kit: Any, driver: str | None = None) -> AsyncEngine:
    """An engine as a user of the sink makes one."""
    url = sa.make_url(kit.url)
    driver = driver or ("psycopg" if kit.backend == "postgres" else "aiomysql")
    return create_async_engine(url.set(drivername=f"{url.drivername}+{driver}"))


def count_statements(sink: Any) -> list[str]:
    """Collect what the sink sends from now on, one entry a round trip."""
    engine = getattr(sink._runner._engine, "sync_engine", sink._runner._engine)
    sent: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cursor, statement, *rest: sent.append(statement))
    return sent


# -- rows ------------------------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "key": "order-7",
    "topic": "orders",
    "id": ID,
    "headers": {"tenant": "acme", "count": 3, "is-new": True, "city": "Zürich", "none": None},
    "aggregate_type": "order",
    "aggregate_id": "7",
    "schema_version": "2",
    "correlation_id": "c-1",
    "causation_id": "c-0",
    "trace_id": "t-1",
    "source": "shop",
    "created_at": datetime(2026, 3, 1, 12, 30, 0, 250_000, tzinfo=UTC),
}


@every_database
async def test_every_field_has_its_column(kit):
    assert await kit.sink.deliver([claim_of({"n": 1}, **FULL)]) == [DELIVERED]
    key = "`key`" if kit.backend in ("mysql", "mariadb") else "key"
    texts = "aggregate_type, aggregate_id, schema_version, correlation_id, causation_id, trace_id, source"
    (row,) = kit.query(f"SELECT id, type, topic, {key}, payload, content_type, headers, {texts} FROM {kit.table}")
    assert UUID(str(row[0])) == ID
    assert row[1:6] == ("order.placed", "orders", "order-7", b'{"n":1}', "application/json")
    headers = row[6] if isinstance(row[6], dict) else json.loads(row[6])
    assert headers == {"tenant": "acme", "count": 3, "is-new": True, "city": "Zürich", "none": None}
    assert row[7:] == ("order", "7", "2", "c-1", "c-0", "t-1", "shop")


@every_database
async def test_times_are_in_utc(kit):
    await kit.sink.deliver([claim_of(**FULL), claim_of()])
    first, second = kit.query(f"SELECT created_at, received_at FROM {kit.table} ORDER BY seq")
    expected = {
        "postgres": datetime(2026, 3, 1, 12, 30, 0, 250_000, tzinfo=UTC),
        "mariadb": datetime(2026, 3, 1, 12, 30, 0, 250_000),  # noqa: DTZ001
        "mysql": datetime(2026, 3, 1, 12, 30, 0, 250_000),  # noqa: DTZ001
        "sqlite": "2026-03-01T12:30:00.250000+00:00",
    }
    assert first[0] == expected[kit.backend]
    assert second[0] is None
    received = datetime.fromisoformat(first[1]) if isinstance(first[1], str) else first[1]
    now = datetime.now(UTC) if received.tzinfo else datetime.now(UTC).replace(tzinfo=None)
    assert abs(now - received) < timedelta(minutes=1)


OWN_TABLES = {
    "postgres": "nr serial, event_id text, body jsonb, at timestamp, kind varchar(50), version integer",
    "mariadb": "nr int auto_increment primary key, event_id binary(16), body text, at text, kind text, version int",
    "mysql": "nr int auto_increment primary key, event_id binary(16), body json, at datetime, kind text, version int",
    "sqlite": "nr integer primary key, event_id text, body text, at text, kind text, version integer",
}


@every_database
async def test_fields_go_into_columns_of_ones_own_in_their_form(kit):
    table = f"{kit.table}_own"
    kit.execute(f"CREATE TABLE {table} ({OWN_TABLES[kit.backend]})")
    columns = {"id": "event_id", "payload": "body", "created_at": "at", "type": "kind", "schema_version": "version"}
    sink = kit.make_sink(table=table, columns=columns)
    assert await sink.deliver([claim_of({"n": 1}, **FULL), claim_of(b"\xff")]) == [
        DELIVERED,
        Dead(
            "The payload is no UTF-8 text, which its column takes: 'utf-8' codec can't decode byte 0xff in position 0: "
            "invalid start byte"
        ),
    ]
    await sink.close()
    ((event_id, body, at, kind, version),) = kit.query(f"SELECT event_id, body, at, kind, version FROM {table}")
    assert event_id == (ID.bytes if kit.backend in ("mariadb", "mysql") else str(ID))
    assert (body if isinstance(body, dict) else json.loads(body)) == {"n": 1}
    assert str(at)[:10] == "2026-03-01"
    assert str(at)[11:19] == "12:30:00"
    assert (kind, version) == ("order.placed", 2)


@on("postgres")
async def test_text_goes_into_columns_of_other_types(kit):
    table = f"{kit.table}_own"
    kit.execute(
        f"CREATE TYPE {kit.table}_mood AS ENUM ('order.placed', 'calm')",
        f"CREATE TABLE {table} (id uuid, aggregate_id uuid, type {kit.table}_mood, source timestamptz, key varchar(3))",
    )
    sink = kit.make_sink(table=table, columns={n: n for n in ("id", "aggregate_id", "type", "source", "key")})
    await sink.check()
    good = claim_of(id=ID, aggregate_id=str(ID), source="2026-03-01 12:00Z", key="k")
    bad = [claim_of(aggregate_id="7"), claim_of(type="angry"), claim_of(key="long")]
    first, *others = await sink.deliver([good, *bad])
    await sink.close()
    assert first == DELIVERED
    assert [type(each) for each in others] == [Dead, Dead, Dead]
    moment = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert kit.query(f"SELECT * FROM {table}") == [(ID, ID, "order.placed", moment, "k")]
    kit.execute(f"DROP TYPE {kit.table}_mood CASCADE")


@on("postgres")
@pytest.mark.filterwarnings("ignore:Did not recognize type")
async def test_column_of_an_unknown_type_is_found_out_before_anything_is_delivered(kit):
    table = f"{kit.table}_own"
    kit.execute(f"CREATE TABLE {table} (type text, key point, other point)")
    sink = kit.make_sink(table=table, columns={"type": "type", "key": "key"})
    with pytest.raises(SinkUnavailable) as refusal:
        await sink.check()
    await sink.close()
    assert str(refusal.value) == (
        f"Sink postgres: column 'key' of table '{table}' has a type that SQLAlchemy does not know. Name another in "
        "columns, or write rows with statements."
    )
    sink = kit.make_sink(table=table, columns={"type": "type"})
    assert await sink.deliver([claim_of()]) == [DELIVERED]
    await sink.close()


@on("postgres")
async def test_tables_may_be_in_a_schema(kit):
    kit.execute(f"CREATE SCHEMA {kit.table}_s")
    sink = kit.make_sink(schema=f"{kit.table}_s", create=True)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    assert kit.query(f"SELECT count(*) FROM {kit.table}_s.{kit.table}") == [(1,)]
    assert kit.query(f"SELECT count(*) FROM {kit.table}_s.{kit.table}_received") == [(1,)]
    kit.execute(f"DROP SCHEMA {kit.table}_s CASCADE")


@every_database
async def test_tables_are_made_only_when_asked(kit):
    names = {"table": f"{kit.table}_new", "dedup_table": f"{kit.table}_taken"}
    sink = kit.make_sink(**names)
    for look in (sink.open, sink.check):
        with pytest.raises(
            SinkUnavailable, match=rf"(?s){kit.table}_taken.*CREATE TABLE {kit.table}_taken .*;"
        ) as missing:
            await look()
    with pytest.raises(SinkUnavailable):
        await sink.deliver([named_claim("a")])
    made = kit.make_sink(create=True, **names)
    assert await made.deliver([named_claim("a")]) == [DELIVERED]
    await made.close()
    # The first sink recovers by itself, and the statements it named are those that made the tables.
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.check()
    await sink.close()
    assert len(kit.query(f"SELECT 1 FROM {kit.table}_new")) == 2
    kit.execute(f"DROP TABLE {kit.table}_new", f"DROP TABLE {kit.table}_taken")
    _, _, ddl = str(missing.value).partition("what the sink needs: ")
    kit.execute(*(statement for statement in ddl.split(";") if statement.strip()))
    assert await sink.deliver([named_claim("c")]) == [DELIVERED]
    await sink.close()


@every_database
async def test_missing_column_stops_the_sink_until_it_is_there(kit):
    sink = kit.make_sink(columns={"id": "id", "type": "kind", "topic": "topic"})
    with pytest.raises(SinkUnavailable) as missing:
        await sink.deliver([named_claim("a")])
    await sink.close()
    advice = "Add it, or name another in columns."
    assert str(missing.value) == f"Sink {kit.backend}: table '{kit.table}' has no column 'kind'. {advice}"
    assert kit.arrived() == []


@every_database
async def test_missing_table_with_columns_of_ones_own_is_not_said_to_be_made(kit):
    sink = kit.make_sink(table=f"{kit.table}_none", columns={"id": "id"}, create=True)
    with pytest.raises(SinkUnavailable) as missing:
        await sink.open()
    await sink.close()
    advice = "Make it: the option create makes none for columns of your own."
    assert str(missing.value) == f"Sink {kit.backend}: there is no table '{kit.table}_none'. {advice}"


@on("sqlite")
async def test_table_that_was_made_anew_is_looked_at_again(kit):
    sink = kit.make_sink(columns={"payload": "payload"})
    await sink.deliver([named_claim("a")])
    kit.execute(f"DROP TABLE {kit.table}")
    with pytest.raises(SinkUnavailable, match="no such table"):
        await sink.deliver([named_claim("b")])
    kit.execute(f"CREATE TABLE {kit.table} (payload text)")
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.close()
    assert kit.query(f"SELECT payload FROM {kit.table}") == [('{"name":"b"}',)]


@every_database
async def test_batch_is_a_round_trip_for_the_ids_and_one_for_the_rows(kit):
    await kit.sink.deliver([named_claim("first")])
    sent = count_statements(kit.sink)
    assert await kit.sink.deliver([named_claim(str(n), f"k{n % 7}") for n in range(500)]) == [DELIVERED] * 500
    assert len([each for each in sent if each.startswith("INSERT")]) == 2
    assert kit.arrived() == ["first", *map(str, range(500))]


# -- statements ------------------------------------------------------------------------------------------------------

LOG = {
    "postgres": "seq bigserial PRIMARY KEY, a text, b text, c text, d text, e bytea",
    "mariadb": "seq bigint AUTO_INCREMENT PRIMARY KEY, a text, b text, c text, d text, e blob",
    "mysql": "seq bigint AUTO_INCREMENT PRIMARY KEY, a text, b text, c text, d text, e blob",
    "sqlite": "seq integer PRIMARY KEY, a text, b text, c text, d text, e blob",
}


def make_log(kit: Any) -> str:
    kit.execute(f"CREATE TABLE {kit.table}_log ({LOG[kit.backend]})")
    return f"{kit.table}_log"


@every_database
async def test_binds_are_filled_from_the_event(kit):
    log = make_log(kit)
    sink = kit.make_sink(
        consumer="shop",
        statements={
            "fields": f"INSERT INTO {log} (a, b, c, d, e) VALUES (:id, :key, :headers, :payload, :payload_bytes)",
            "paths": f"INSERT INTO {log} (a, b, c, d) VALUES "
            "(:payload__customer__id, :payload__items__1__sku, :payload__customer, :headers__tenant)",
            "params": f"INSERT INTO {log} (a, b, c) VALUES (:street, :note, :gone)",
        },
        params={
            "street": "payload.ship-to.street",
            "note": {"path": "payload.note", "default": "none"},
            "gone": {"path": "headers.x", "default": None},
        },
    )
    outcomes = await sink.deliver(
        [
            claim_of({"n": "é"}, type="fields", id=ID, key="k", headers={"t": 1}),
            claim_of({"customer": {"id": 7}, "items": [{}, {"sku": "A-1"}]}, type="paths", headers={"tenant": "acme"}),
            claim_of({"ship-to": {"street": "Elm"}}, type="params"),
        ]
    )
    await sink.close()
    assert outcomes == [DELIVERED] * 3
    first, second, third = kit.query(f"SELECT a, b, c, d, e FROM {log} ORDER BY seq")
    assert first == (str(ID), "k", '{"t":1}', '{"n":"é"}', '{"n":"é"}'.encode())
    assert second == ("7", "A-1", '{"id":7}', "acme", None)
    assert third == ("Elm", "none", None, None, None)


@every_database
async def test_event_without_what_its_statement_needs_is_dead(kit):
    log = make_log(kit)
    sink = kit.make_sink(consumer="x", statements={"order.placed": f"INSERT INTO {log} (a) VALUES (:payload__a__b)"})
    missing, text, good = (
        claim_of({"a": [1]}, id=ID),
        claim_of(b"{}", content_type="text/plain"),
        claim_of({"a": {"b": 1}}),
    )
    outcomes = await sink.deliver([missing, text, good])
    await sink.close()
    assert outcomes == [
        Dead(f"Event {ID} has no payload.a.b, which its statement needs"),
        Dead("Statement needs payload.a.b, but the payload is no JSON: its content type is 'text/plain'"),
        DELIVERED,
    ]
    assert kit.query(f"SELECT a FROM {log}") == [("1",)]


@every_database
async def test_type_without_a_statement_is_dead_or_ignored_or_takes_the_star(kit):
    log = make_log(kit)
    statements = {"known": f"INSERT INTO {log} (a) VALUES (:type)"}
    batch = [claim_of(type="known"), claim_of(type="other", key="k"), claim_of(type="known", key="k")]
    strict = kit.make_sink(consumer="strict", statements=statements)
    assert await strict.deliver(batch) == [
        DELIVERED,
        Dead("There is no statement for events of type 'other'"),
        RELEASED,
    ]
    await strict.close()
    lenient = kit.make_sink(consumer="lenient", statements=statements, unmatched="ignore")
    assert await lenient.deliver(batch) == [DELIVERED] * 3
    await lenient.close()
    star = kit.make_sink(consumer="star", statements={**statements, "*": f"INSERT INTO {log} (a) VALUES ('star')"})
    assert await star.deliver(batch) == [DELIVERED] * 3
    await star.close()
    found = [each for (each,) in kit.query(f"SELECT a FROM {log} ORDER BY seq")]
    assert found == ["known", "known", "known", "known", "star", "known"]


@every_database
async def test_ignored_event_behind_a_failed_one_of_its_key_is_released(kit):
    log = make_log(kit)
    kit.execute(f"CREATE UNIQUE INDEX {kit.table}_u ON {log} (seq)", f"INSERT INTO {log} (seq) VALUES (1)")
    sink = kit.make_sink(
        consumer="x", unmatched="ignore", statements={"known": f"INSERT INTO {log} (seq) VALUES (:payload__n)"}
    )
    batch = [
        claim_of({"n": 1}, type="known", key="k"),
        claim_of(type="other", key="k"),
        claim_of(type="other", key="j"),
    ]
    outcomes = await sink.deliver(batch)
    await sink.close()
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1:] == [RELEASED, DELIVERED]


@every_database
async def test_statements_run_in_the_order_of_the_claims_and_neighbours_together(kit):
    log = make_log(kit)
    insert = f"INSERT INTO {log} (a) VALUES (:payload__n)"
    sink = kit.make_sink(
        consumer="x", statements={"one": insert, "two": insert.replace("(a)", "(b)").replace("a)", "a)")}
    )
    await sink.open()
    sent = count_statements(sink)
    types = ["one"] * 200 + ["two"] * 100 + ["one"] * 200
    batch = [claim_of({"n": str(n)}, type=type_, key="k") for n, type_ in enumerate(types)]
    assert await sink.deliver(batch) == [DELIVERED] * 500
    await sink.close()
    assert len([each for each in sent if each.startswith(f"INSERT INTO {log}")]) == 3
    found = kit.query(f"SELECT coalesce(a, b) FROM {log} ORDER BY seq")
    assert [int(each) for (each,) in found] == list(range(500))


@on("postgres")
async def test_function_makes_the_statement(kit):
    log = make_log(kit)
    table = sa.table(log, sa.column("a"), sa.column("b"))

    def make(event: Event) -> sa.Executable | None:
        match event.type:
            case "put":
                return sa.insert(table).values(a=event.key, b=event.topic)
            case "change":
                return sa.update(table).where(table.c.a == event.key).values(b="changed")
            case "skip":
                return None
            case "odd":
                return "SELECT 1"  # type: ignore[return-value]
            case _:
                raise ValueError("no idea")

    engine = create_async_engine(kit.url.replace("postgresql:", "postgresql+psycopg:"))
    sink = SqlSink(engine, statement=make, consumer="f", dedup_table=f"{kit.table}_received")
    sent = count_statements(sink)
    batch = [claim_of(type="put", key=f"k{n}") for n in range(50)]
    batch += [claim_of(type="change", key=f"k{n}") for n in range(0, 50, 2)]
    assert await sink.deliver([*batch, claim_of(type="skip")]) == [DELIVERED] * 76
    assert len([each for each in sent if log in each and not each.startswith("SELECT")]) == 2
    odd, bug = await sink.deliver([claim_of(type="odd", id=ID), claim_of(type="bug")])
    assert odd == Dead(f"The statement of event {ID} is no SQLAlchemy statement but 'SELECT 1'")
    assert isinstance(bug, Retry)
    assert "no idea" in bug.error
    await sink.close()
    # The engine is the caller's: its connection is still there.
    assert engine.pool.checkedin() == 1  # type: ignore[attr-defined]
    async with engine.connect() as db:
        assert (await db.scalar(sa.text(f"SELECT count(*) FROM {log} WHERE b = 'changed'"))) == 25
    await engine.dispose()


@on("postgres", "mariadb")
async def test_statement_of_a_function_keeps_what_sqlalchemy_fills_in(kit):
    log = sa.Table(
        make_log(kit),
        sa.MetaData(),
        sa.Column("seq", sa.BigInteger, primary_key=True),
        sa.Column("a", sa.Text),
        sa.Column("b", sa.Text, default="new", onupdate="changed"),
        sa.Column("c", sa.Text, default=lambda: "called"),
        sa.Column("d", sa.Text, default="none"),
    )

    def make(event: Event) -> sa.Executable:
        match event.type:
            case "one":
                return sa.insert(log).values(a=event.key, d=None)
            case "bare":
                return sa.insert(log)
            case "many":
                return sa.insert(log).values([{"a": f"{event.key}{n}"} for n in range(2)])
            case "copy":
                return sa.insert(log).from_select(["a"], sa.select(sa.literal(f"{event.key}!", sa.Text)))
            case "change":
                return sa.update(log).where(log.c.a == event.key).values(d="x")
            case _:
                return sa.update(log).where(log.c.a.in_([f"{event.key}0", f"{event.key}!"])).values(d="y")

    engine = own_engine(kit)
    sink = SqlSink(engine, statement=make, consumer="f", dedup_table=f"{kit.table}_received")
    script = "one:a one:b one:z bare:- many:m many:n copy:m copy:n change:b change:a among:m among:n"
    batch = [claim_of(type=type_, key=key) for type_, key in (each.split(":") for each in script.split())]
    assert await sink.deliver(batch) == [DELIVERED] * len(batch)
    await engine.dispose()
    assert sorted(kit.query(f"SELECT coalesce(a, ''), b, c, d FROM {log.name}")) == [
        ("", "new", "called", "none"),
        ("a", "changed", "called", "x"),
        ("b", "changed", "called", "x"),
        *((f"m{n}", "changed", "called", "y") for n in "!0"),
        ("m1", "new", "called", "none"),
        *((f"n{n}", "changed", "called", "y") for n in "!0"),
        ("n1", "new", "called", "none"),
        ("z", "new", "called", None),
    ]


@on("mariadb", "mysql")
async def test_engine_of_ones_own_writes_bytes(kit):
    engine = own_engine(kit)
    async with engine.connect() as db:  # a connection that is older than the sink
        await db.execute(sa.text("SELECT 1"))
    escapes = []
    for n in range(2):
        sink = SqlSink(engine, table=kit.table, dedup_table=f"{kit.table}_received")
        assert await sink.deliver([claim_of(b"\x00'\\\xff", content_type="image/png", key=str(n))]) == [DELIVERED]
        async with engine.connect() as db:
            escapes.append((await db.get_raw_connection()).driver_connection.escape)  # type: ignore[union-attr]
    assert escapes[0] is escapes[1]  # a second sink changes nothing
    await engine.dispose()
    assert kit.query(f"SELECT payload FROM {kit.table}") == [(b"\x00'\\\xff",)] * 2


# -- exactly once ----------------------------------------------------------------------------------------------------


@every_database
async def test_consumers_take_the_same_event_each_once(kit):
    log = make_log(kit)
    once = claim_of()
    for consumer in ("one", "two", "one"):
        sink = kit.make_sink(consumer=consumer, statements={"*": f"INSERT INTO {log} (a) VALUES ('{consumer}')"})
        assert await sink.deliver([once, once]) == [DELIVERED] * 2
        await sink.close()
    assert [each for (each,) in kit.query(f"SELECT a FROM {log} ORDER BY seq")] == ["one", "two"]
    assert sorted(each for (each,) in kit.query(f"SELECT consumer FROM {kit.table}_received")) == ["one", "two"]


@on("mariadb", "mysql")
async def test_known_event_among_more_than_one_statement_takes_is_told_from_new_ones(kit):
    # The driver sends at most a megabyte at once: the last ids are in a second statement.
    sink = kit.make_sink(consumer="🎈" * 200)
    batch = [claim_of({"name": str(n)}, id=UUID(int=n)) for n in range(1500)]
    assert await sink.deliver(batch[-1:]) == [DELIVERED]
    assert await sink.deliver(batch) == [DELIVERED] * 1500
    await sink.close()
    assert sorted(map(int, kit.arrived())) == list(range(1500))


@every_database
async def test_two_relays_with_the_same_events_at_the_same_moment(kit):
    other = kit.make_sink()
    batch = [named_claim(str(n), f"k{n % 3}") for n in range(200)]
    results = await asyncio.gather(kit.sink.deliver(batch), other.deliver(batch[::-1]), kit.sink.deliver(batch))
    await other.close()
    assert list(results) == [[DELIVERED] * 200] * 3
    assert sorted(map(int, kit.arrived())) == list(range(200))


@on("postgres", "mariadb", "mysql")
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
async def test_event_that_another_is_just_taking_is_waited_for(kit, commits):
    await kit.sink.open()
    mine = named_claim("a", id=ID)
    other = kit.connect()
    other.cursor().execute(f"INSERT INTO {kit.table}_received (consumer, event_id) VALUES ('{kit.table}', '{ID}')")
    delivery = asyncio.create_task(kit.sink.deliver([mine, named_claim("b")]))
    await until_waiting(kit)
    assert not delivery.done()
    if commits:
        other.commit()
    else:
        other.rollback()
    assert await delivery == [DELIVERED, DELIVERED]
    other.close()
    assert kit.arrived() == (["b"] if commits else ["a", "b"])


DYING_RELAY = """
import asyncio, json, os, signal, sys
import sqlalchemy as sa
from pillarbox import Outbox, Relay, open_sink

url, table, sink_url, options = sys.argv[1:]
sink = open_sink(sink_url, **json.loads(options))
deliver = sink.deliver

async def die_after(claims):
    outcomes = await deliver(claims)
    os.kill(os.getpid(), signal.SIGKILL)
    return outcomes

sink.deliver = die_after

async def main():
    async with Relay(Outbox(sa.MetaData(), table=table).store(url), sink, claim="hold") as relay:
        await relay.run_once()

asyncio.run(main())
"""


@every_database
async def test_relay_killed_between_the_commit_and_the_settlement_delivers_nothing_twice(kit, tmp_path):
    database = make_database("postgres", tmp_path)
    events = [Event("order.placed", {"name": str(n)}, key=f"k{n % 3}") for n in range(20)]
    with database.engine.begin() as db:
        database.outbox.put(db, *events)
    url = server_url("postgres")
    options = json.dumps({"table": kit.table, "dedup_table": f"{kit.table}_received"})
    command = [sys.executable, "-c", DYING_RELAY, url, database.table, kit.url, options]
    died = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=False, timeout=60)
    assert died.returncode == -9
    arrived = kit.arrived()
    assert sorted(map(int, arrived)) == list(range(20))
    async with Relay(database.outbox.store(database.url), kit.sink) as relay:
        assert await relay.drain() == Counts()
    assert kit.arrived() == arrived
    database.drop()


OLD = {
    "postgres": "now() - interval '{} hours'",
    "mariadb": "utc_timestamp(6) - interval {} hour",
    "mysql": "utc_timestamp(6) - interval {} hour",
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '-{} hours')",
}


@every_database
async def test_received_events_are_forgotten_when_they_are_old_a_few_at_a_time(kit):
    sink = kit.make_sink(dedup_keep="2h")
    values = ", ".join(
        f"('{consumer}', '00000000-0000-4000-8000-{n:012}', {OLD[kit.backend].format(hours)})"
        for consumer, first, count, hours in ((kit.table, 0, 1300, 3), (kit.table, 2000, 5, 1), ("another", 0, 3, 9))
        for n in range(first, first + count)
    )
    kit.execute(f"INSERT INTO {kit.table}_received (consumer, event_id, received_at) VALUES {values}")
    counted = f"SELECT count(*) FROM {kit.table}_received WHERE consumer = '{kit.table}'"
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    assert kit.query(counted) == [(306,)]
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    assert kit.query(counted) == [(7,)]
    assert kit.query(f"SELECT count(*) FROM {kit.table}_received WHERE consumer = 'another'") == [(3,)]
    sent = count_statements(sink)
    await sink.deliver([named_claim("c")])
    await sink.close()
    assert [each for each in sent if each.startswith("DELETE")] == []
