"""The Open Outbox Relay's table: fields and columns, what is refused, leases, order, rows that do not decode."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from pillarbox import Constant, Event, InvalidEvent, Relay, Retry, Unsupported
from pillarbox.errors import ConfigError
from pillarbox.event import DELIVERED, Dead
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Counts, Filter, Mode, Settlement
from tests.contract.layouts import HOUR, LAPSED, NOW, OWNER, Around, LayoutKit, claim, names
from tests.contract.stores import until

KITS = ["openoutbox-postgresql", "openoutbox-mariadb", "openoutbox-mysql", "openoutbox-sqlite"]
EVERYTHING = Filter()
ALL_BYTES = bytes(range(256))

pytestmark = pytest.mark.parametrize("layout_kit", KITS, indirect=True)


def headers_of(layout_kit: LayoutKit, row: Any) -> Any:
    """The headers' column, which not every driver takes apart."""
    value = layout_kit.column(row, "headers")
    return json.loads(value) if isinstance(value, str) else value


async def set_headers(layout_kit: LayoutKit, row: Any, headers: str) -> None:
    cast = "CAST(:headers AS jsonb)" if layout_kit.database.backend == "postgresql" else ":headers"
    await layout_kit.set(row, f"headers = {cast}", headers=headers)


# -- fields and columns ------------------------------------------------------------------------------------------------


def test_put_writes_each_field_into_its_column(layout_kit: LayoutKit) -> None:
    placed = Event(
        "order.placed",
        {"order": 7},
        topic="orders",
        key="o-7",
        headers={"tenant": "acme"},
        aggregate_type="order",
        aggregate_id="7",
        correlation_id="corr-1",
        source="shop",
        max_attempts=3,
    )
    layout_kit.put(placed)
    row = layout_kit.row(placed.id)
    assert row is not None
    assert UUID(str(row.pop("event_id"))) == placed.id
    headers = row.pop("headers")
    assert row == {
        "event_type": "orders",
        "partition_key": "o-7",
        "payload": b'{"order":7}',
        "status": "PENDING",
        "attempts": 0,
        "last_error": None,
        "available_at": NOW,
        "locked_by": None,
        "locked_at": None,
        "delivered_at": None,
        "created_at": NOW,
        "updated_at": NOW,
    }
    assert (json.loads(headers) if isinstance(headers, str) else headers) == {
        "tenant": "acme",
        "content-type": "application/json",
        "pillarbox-type": "order.placed",
        "pillarbox-aggregate-type": "order",
        "pillarbox-aggregate-id": "7",
        "pillarbox-correlation-id": "corr-1",
        "pillarbox-source": "shop",
        "pillarbox-max-attempts": "3",
    }


def test_event_of_bytes_without_a_key_needs_no_headers(layout_kit: LayoutKit) -> None:
    raw = Event("raw", ALL_BYTES)
    layout_kit.put(raw)
    assert headers_of(layout_kit, raw.id) == {}
    assert layout_kit.column(raw.id, "partition_key") is None
    assert bytes(layout_kit.column(raw.id, "payload")) == ALL_BYTES


@pytest.mark.parametrize("count", [1, 3])
async def test_claimed_event_is_the_one_that_was_put(layout_kit: LayoutKit, mode: Mode, count: int) -> None:
    put = [
        Event(
            f"placed.{number}",
            {"n": number},
            topic="orders",
            key=f"k-{number}",
            headers={"tenant": "köln 🐙"},
            aggregate_type="order",
            aggregate_id=7,
            schema_version="2",
            correlation_id="corr",
            causation_id="cause",
            trace_id="trace",
            source="shop",
            max_attempts=3,
        )
        for number in range(count)
    ]
    layout_kit.put(*put)
    batch = await claim(await layout_kit.open(), mode=mode)
    assert sorted((each.event for each in batch.claims), key=lambda event: event.type) == put
    assert all(each.event.created_at == NOW for each in batch.claims)
    await batch.abandon()


async def test_row_of_the_other_system_has_its_type_for_topic_and_its_bytes_for_payload(
    layout_kit: LayoutKit, mode: Mode
) -> None:
    row = layout_kit.insert("user.signup", ALL_BYTES)
    batch = await claim(await layout_kit.open(), mode=mode)
    [found] = batch.claims
    event = found.event
    assert (event.id, event.type, event.topic) == (row, "user.signup", "user.signup")
    assert (event.key, event.payload, dict(event.headers)) == (None, ALL_BYTES, {})
    assert (event.content_type, event.max_attempts, event.created_at) == ("application/octet-stream", None, NOW)
    await batch.abandon()


@pytest.mark.parametrize("key", [None, "", "k", "ключ"])
async def test_partition_key_is_passed_on(layout_kit: LayoutKit, key: str | None) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "partition_key = :key", key=key)
    [found] = (await claim(await layout_kit.open())).claims
    assert found.event.key == key


@pytest.mark.parametrize(
    ("stored", "headers"),
    [
        ("{}", {}),
        ('{"tenant": "acme"}', {"tenant": "acme"}),
        ('{"n": 1, "is": true, "x": null, "f": 1.5}', {"n": 1, "is": True, "x": None, "f": 1.5}),
        ('{"deep": {"a": [1, 2]}}', {"deep": {"a": [1, 2]}}),
    ],
)
async def test_headers_of_the_other_system_are_passed_on(layout_kit: LayoutKit, stored: str, headers: Any) -> None:
    row = layout_kit.insert("placed")
    await set_headers(layout_kit, row, stored)
    [found] = (await claim(await layout_kit.open())).claims
    assert (found.defect, dict(found.event.headers)) == (None, headers)


async def test_content_type_of_the_other_system_is_the_events(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    await set_headers(layout_kit, row, '{"content-type": "application/json"}')
    [found] = (await claim(await layout_kit.open())).claims
    assert (found.event.content_type, dict(found.event.headers)) == ("application/json", {})


@pytest.mark.needs("sqlite")
async def test_payload_that_was_stored_as_text_is_passed_on_as_bytes(layout_kit: LayoutKit) -> None:
    layout_kit.insert("placed", '{"city": "köln"}')
    [found] = (await claim(await layout_kit.open())).claims
    assert found.event.payload == '{"city": "köln"}'.encode()


# -- what is refused before any SQL ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"headers": {"n": 1}}, InvalidEvent, "header 'n': .* takes text for headers only, got 1"),
        ({"headers": {"is": True}}, InvalidEvent, "header 'is': .* takes text for headers only, got True"),
        ({"headers": {"content-type": "text/plain"}}, InvalidEvent, "needs the header 'content-type'"),
        (
            {"headers": {"pillarbox-source": "x"}, "source": "shop"},
            InvalidEvent,
            "needs the header 'pillarbox-source' for the event's source",
        ),
        ({"dedup_key": "once"}, Unsupported, "'openoutbox' has no place for the event's dedup_key; leave it out"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_event_that_the_table_could_not_take_is_refused_before_any_sql(
    layout_kit: LayoutKit, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    event = Event("placed", {"n": 1}, **given)
    with layout_kit.engine.connect() as db, layout_kit.no_statements(), pytest.raises(error, match=message):
        layout_kit.outbox.put(db, event)
    assert layout_kit.count() == 0


def test_existing_id_is_left_as_it_is(layout_kit: LayoutKit) -> None:
    first = Event("first", {"n": 1})
    second, other = Event("second", {"n": 2}, id=first.id), Event("other", {"n": 3})
    assert layout_kit.put(first).new == (first,)
    receipt = layout_kit.put(second, other)
    assert (receipt.new, receipt.existing) == ((other,), (second,))
    assert (layout_kit.count(), layout_kit.column(first.id, "event_type")) == (2, "first")


# -- claiming ----------------------------------------------------------------------------------------------------------


async def test_nothing_is_claimed_from_an_empty_table(layout_kit: LayoutKit, mode: Mode) -> None:
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    assert (list(batch.claims), batch.is_full) == ([], False)
    assert await store.next_due() is None
    assert await store.counts() == Counts()


async def test_claim_of_nothing_takes_nothing(layout_kit: LayoutKit, mode: Mode) -> None:
    layout_kit.insert("placed")
    batch = await claim(await layout_kit.open(), 0, mode=mode)
    assert list(batch.claims) == []
    assert layout_kit.count("status = 'PENDING'") == 1
    await batch.abandon()


async def test_rows_go_out_by_when_they_were_available_then_created(layout_kit: LayoutKit, mode: Mode) -> None:
    back = layout_kit.database.ago
    for name, available, created in (("d", 10, 90), ("b", 40, 50), ("c", 40, 20), ("a", 50, 20)):
        row = layout_kit.insert(name)
        # To the second, so that rows can share a time.
        await layout_kit.set(row, f"available_at = {back(str(available))}, created_at = {back(str(created))}")
    layout_kit.execute(
        "UPDATE {outbox} SET available_at = (SELECT m FROM (SELECT available_at AS m FROM {outbox} "
        "WHERE event_type = 'b') AS other) WHERE event_type = 'c'"
    )
    batch = await claim(await layout_kit.open(), mode=mode)
    assert names(batch) == "a b c d"
    await batch.abandon()


async def test_claimed_row_is_not_pending_and_not_another_claims(layout_kit: LayoutKit) -> None:
    layout_kit.insert("placed")
    first, second = await layout_kit.open(), await layout_kit.open()
    assert names(await claim(first)) == "placed"
    assert names(await claim(second)) == ""
    counts = await second.counts()
    assert (counts.new, counts.held) == (0, 1)


@pytest.mark.parametrize("status", ["DELIVERED", "DEAD"])
async def test_row_at_its_end_is_never_claimed(layout_kit: LayoutKit, mode: Mode, status: str) -> None:
    row = layout_kit.insert("ended")
    await layout_kit.set(row, f"status = '{status}', available_at = {{ago}}, locked_at = {{ago}}", seconds=864000)
    store = await layout_kit.open()
    assert names(await claim(store, mode=mode)) == ""
    assert await store.next_due() is None
    assert layout_kit.column(row, "status") == status


async def test_owner_is_this_process_and_differs_with_each_claim(layout_kit: LayoutKit) -> None:
    rows = [layout_kit.insert("one"), layout_kit.insert("two")]
    store = await layout_kit.open()
    for _ in rows:
        await claim(store, 1)
    owners = [layout_kit.column(row, "locked_by") for row in rows]
    assert owners == [OWNER, OWNER]
    assert len(set(owners)) == 2


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_claim_of_the_other_relay_is_left_alone_until_it_lapses(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.insert("placed")
    locked = "status = 'DELIVERING', locked_by = 'relay-7', locked_at = {ago}"
    await layout_kit.set(row, locked, seconds=160)
    store = await layout_kit.open()
    assert names(await claim(store, mode=mode)) == ""
    assert layout_kit.column(row, "locked_by") == "relay-7"
    await layout_kit.set(row, locked, seconds=181)
    [found] = (await claim(store)).claims
    assert (found.event.type, found.attempt) == ("placed", 2)
    assert (layout_kit.column(row, "locked_by"), layout_kit.column(row, "attempts")) == (OWNER, 1)


async def test_claim_of_20_minutes_ago_is_taken_once(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "status = 'DELIVERING', locked_by = 'relay-7', locked_at = {ago}", seconds=1200)
    first, second = await layout_kit.open(), await layout_kit.open()
    assert names(await claim(first)) == "placed"
    before = layout_kit.row(row)
    await layout_kit.look_again()
    assert names(await claim(second)) == ""
    assert layout_kit.row(row) == before


@pytest.mark.parametrize("owner", [None, "relay-7"])
async def test_claim_without_a_time_is_taken_with_its_attempt_counted(layout_kit: LayoutKit, owner: str | None) -> None:
    row = layout_kit.insert("stuck")
    await layout_kit.set(row, "status = 'DELIVERING', locked_by = :owner, locked_at = NULL", owner=owner)
    [found] = (await claim(await layout_kit.open())).claims
    assert (found.event.type, found.attempt) == ("stuck", 2)
    layout_kit.expect(row, "leased again")


async def test_relay_wakes_for_claims_without_a_time(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("stuck")
    await layout_kit.set(row, "status = 'DELIVERING', locked_by = NULL, locked_at = NULL")
    assert await (await layout_kit.open()).next_due() == timedelta(0)


async def test_more_claims_without_a_time_than_one_look_takes_are_all_taken(layout_kit: LayoutKit) -> None:
    columns = "(event_id, event_type, payload, status)"
    table = layout_kit.database.names["outbox"]
    mark = "?" if layout_kit.database.backend == "sqlite" else "%s"
    rows = [(str(UUID(int=number + 1)), "stuck", b"x", "DELIVERING") for number in range(2500)]
    with layout_kit.engine.begin() as db:
        for start in range(0, 2500, 500):
            chunk = rows[start : start + 500]
            values = ", ".join([f"({', '.join([mark] * 4)})"] * len(chunk))
            given = tuple(value for row in chunk for value in row)
            db.exec_driver_sql(f"INSERT INTO {table} {columns} VALUES {values}", given)
    store = await layout_kit.open()
    batch = await claim(store, 5000)
    assert len(batch.claims) == 2500
    assert {each.attempt for each in batch.claims} == {2}
    assert layout_kit.count("status = 'DELIVERING' AND attempts = 1 AND locked_at IS NOT NULL") == 2500


async def test_row_that_lapsed_twice_returns_after_a_while(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("poison")
    await layout_kit.set(
        row,
        "status = 'DELIVERING', attempts = 1, locked_by = 'relay-7', locked_at = {ago}, updated_at = {ago}",
        seconds=1200,
    )
    with patch("pillarbox.stores.transitions.random.uniform", lambda low, high: high):
        assert names(await claim(await layout_kit.open())) == ""
    found = layout_kit.row(row)
    assert found is not None
    wanted = {
        "status": "PENDING",
        "attempts": 2,
        "last_error": LAPSED,
        "available_at": Around(timedelta(seconds=4), within=timedelta(seconds=3)),
        "locked_by": None,
        "locked_at": None,
        "updated_at": NOW,
    }
    assert {name: found[name] for name in wanted} == wanted


async def test_row_whose_attempts_are_spent_dies_when_its_lease_lapses(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("poison")
    await layout_kit.set(row, "status = 'DELIVERING', attempts = 4, locked_by = 'r', locked_at = {ago}", seconds=1200)
    store = await layout_kit.open()
    assert names(await claim(store, max_attempts=5)) == ""
    layout_kit.expect(row, "buried", attempts=5)
    assert (await store.counts()).dead == 1


async def test_attempts_in_the_headers_override_the_policy_of_a_relay(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed", max_attempts=2)
    sink = MemorySink(is_quick=False)
    sink.fail(lambda event: True, Retry("503", timedelta(0)), times=None)
    async with Relay(await layout_kit.open(), sink, retry=Constant(HOUR, max_attempts=20)) as relay:
        assert await relay.run_once() == Settlement(retried=1)
        await layout_kit.look_again()
        assert await relay.run_once() == Settlement(dead=1)
    layout_kit.expect(row, "dead", attempts=2, last_error="503")


@pytest.mark.parametrize("outcome", [Retry, Dead])
async def test_error_is_kept_whole(layout_kit: LayoutKit, mode: Mode, outcome: Any) -> None:
    rows = {name: layout_kit.insert(name) for name in ("one", "two")}
    errors = {"one": "'quoted' \\ and \"so\", naïve 🐙\n" * 1000, "two": ""}
    batch = await claim(await layout_kit.open(), mode=mode)
    await batch.settle([outcome(errors[each.event.type]) for each in batch.claims])
    assert {name: layout_kit.column(row, "last_error") for name, row in rows.items()} == errors


# -- through a relay ---------------------------------------------------------------------------------------------------


async def test_mixed_batch_is_written_to_the_right_rows(layout_kit: LayoutKit) -> None:
    rows = {name: layout_kit.insert(name) for name in ("good", "slow", "bad", "fine")}
    sink = MemorySink()
    sink.fail(lambda event: event.type == "slow", Retry("503 from the destination", HOUR))
    sink.fail(lambda event: event.type == "bad", Dead("400: no such order"))
    async with Relay(await layout_kit.open(), sink) as relay:
        assert await relay.run_once() == Settlement(delivered=2, retried=1, dead=1)
    for name, step in {"good": "delivered", "fine": "delivered", "slow": "waiting", "bad": "dead"}.items():
        layout_kit.expect(rows[name], step)
    assert sorted(event.type for event in sink.events) == ["fine", "good"]


async def test_full_batch_is_followed_by_the_next_at_once(layout_kit: LayoutKit) -> None:
    for number in range(20):
        layout_kit.insert(f"e{number}")
    sink = MemorySink()
    relay = Relay(await layout_kit.open(), sink, batch_size=5, poll=HOUR)
    async with relay:
        remaining = await relay.drain()
    assert (len(sink.events), remaining.delivered, remaining.new) == (20, 20, 0)


@pytest.mark.parametrize("size", [0, -1])
async def test_relay_without_a_batch_size_is_refused(layout_kit: LayoutKit, size: int) -> None:
    with pytest.raises(ConfigError, match="positive batch_size"):
        Relay(await layout_kit.open(), MemorySink(), batch_size=size)


@pytest.mark.parametrize("headers", ["[1, 2]", '"text"', "7"])
@pytest.mark.parametrize("is_quick", [True, False], ids=["quick sink", "slow sink"])
async def test_row_whose_headers_are_no_object_dies_alone(layout_kit: LayoutKit, headers: str, is_quick: bool) -> None:
    layout_kit.insert("before")
    row = layout_kit.insert("broken")
    await set_headers(layout_kit, row, headers)
    layout_kit.insert("after")
    sink = MemorySink(is_quick=is_quick)
    async with Relay(await layout_kit.open(), sink) as relay:
        remaining = await relay.drain()
    assert sorted(event.type for event in sink.events) == ["after", "before"]
    assert (remaining.dead, remaining.new, remaining.delivered) == (1, 0, 2)
    assert layout_kit.column(row, "status") == "DEAD"
    assert "headers are not a JSON object" in layout_kit.column(row, "last_error")


@pytest.mark.needs("sqlite")
@pytest.mark.parametrize(
    "column", ["event_id = 'no id'", "headers = 'no json'", "created_at = 'yesterday'", "payload = 7"]
)
async def test_row_with_a_value_of_another_kind_dies_alone(layout_kit: LayoutKit, column: str) -> None:
    layout_kit.insert("before")
    row = layout_kit.insert("broken")
    await layout_kit.set(row, column)
    layout_kit.insert("after")
    sink = MemorySink()
    async with Relay(await layout_kit.open(), sink) as relay:
        remaining = await relay.drain()
    assert sorted(event.type for event in sink.events) == ["after", "before"]
    assert (remaining.dead, remaining.delivered) == (1, 2)


# -- what operators do -------------------------------------------------------------------------------------------------


async def test_events_are_listed_with_their_state_error_and_times(layout_kit: LayoutKit) -> None:
    dead = layout_kit.insert("dead")
    await layout_kit.set(dead, "status = 'DEAD', attempts = 25, last_error = 'broken'")
    delivered = layout_kit.insert("delivered")
    await layout_kit.set(delivered, "status = 'DELIVERED', delivered_at = {ago}", seconds=0)
    waiting = layout_kit.insert("waiting")
    await layout_kit.set(waiting, "attempts = 3, last_error = 'slow', available_at = {ago}", seconds=-3600)
    layout_kit.insert("ready", b"body")
    store = await layout_kit.open()
    before = {row: layout_kit.row(row) for row in (dead, delivered, waiting)}
    records = {record.event.type: record for record in await store.events(EVERYTHING)}
    assert {name: (record.state, record.attempts, record.error) for name, record in records.items()} == {
        "dead": ("dead", 25, "broken"),
        "delivered": ("delivered", 0, None),
        "waiting": ("waiting", 3, "slow"),
        "ready": ("ready", 0, None),
    }
    assert (records["dead"].died_at, records["delivered"].delivered_at) == (NOW, NOW)
    assert records["ready"].event.payload == b"body"
    assert [record.event.type for record in await store.events(Filter(error="rok"))] == ["dead"]
    assert [record.event.type for record in await store.events(EVERYTHING, state="waiting")] == ["waiting"]
    assert {row: layout_kit.row(row) for row in (dead, delivered, waiting)} == before


async def test_redrive_takes_what_the_filter_says(layout_kit: LayoutKit) -> None:
    rows = {name: layout_kit.insert(name) for name in ("one", "two", "three")}
    for name, row in rows.items():
        await layout_kit.set(row, "status = 'DEAD', attempts = 25, last_error = :error", error=f"error of {name}")
    store = await layout_kit.open()
    assert await store.redrive(Filter(ids=[rows["one"]]), actor="ann") == 1
    assert await store.redrive(Filter(error="of two"), actor="ann") == 1
    assert [layout_kit.column(row, "status") for row in rows.values()] == ["PENDING", "PENDING", "DEAD"]
    assert [layout_kit.column(row, "attempts") for row in rows.values()] == [0, 0, 25]


async def test_delivered_rows_older_than_the_retention_are_pruned_by_a_relay(layout_kit: LayoutKit) -> None:
    old, new = layout_kit.insert("old"), layout_kit.insert("new")
    await layout_kit.set(old, "status = 'DELIVERED', delivered_at = {ago}", seconds=7200)
    await layout_kit.set(new, "status = 'DELIVERED', delivered_at = {ago}", seconds=60)
    pending = layout_kit.insert("pending")
    sink = MemorySink()
    relay = Relay(await layout_kit.open(retention=HOUR), sink)

    async def is_pruned() -> bool:
        return layout_kit.row(old) is None and len(sink.events) == 1

    async with relay:
        running = asyncio.create_task(relay.run())
        await until(is_pruned)
        relay.stop()
        await running
    assert layout_kit.row(new) is not None
    assert layout_kit.column(pending, "status") == "DELIVERED"


async def test_late_settlement_after_the_other_relay_took_the_row_changes_nothing(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    batch = await claim(await layout_kit.open())
    await layout_kit.set(row, "locked_by = 'relay-7', locked_at = {ago}", seconds=0)
    before = layout_kit.row(row)
    assert [each.event.type for each in await batch.renew(HOUR)] == ["placed"]
    assert await batch.settle([DELIVERED]) == Settlement(lost=1)
    assert layout_kit.row(row) == before
