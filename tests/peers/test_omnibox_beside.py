"""The real omni-box and our relay on one table: each publishes what the other put, and together they repeat nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from pillarbox import CallableSink, Event, Relay
from tests.peers.omnibox import OmniBoxTables

AGGREGATE = "0b7f3c52-8a4e-4a53-9a3f-0f2b6c1d7e10"
COUNT = 300

each_outbox = pytest.mark.parametrize("table", ["outbox", "outbox-partitioned"])


@pytest.fixture(autouse=True)
def empty(omnibox: OmniBoxTables) -> None:
    omnibox.empty()


def put_ours(omnibox: OmniBoxTables, table: str) -> list[str]:
    events = [
        Event("Placed", {"n": n}, key=f"k{n}", topic="orders", aggregate_type="Order", aggregate_id=AGGREGATE)
        for n in range(COUNT)
    ]
    with omnibox.engine.begin() as db:
        omnibox.outbox(table).put(db, *events)
    return [str(event.id) for event in events]


def put_theirs(omnibox: OmniBoxTables, table: str) -> list[str]:
    usual = {"aggregate_type": "Order", "aggregate_id": AGGREGATE, "event_type": "Placed", "topic": "orders"}
    events = [{**usual, "partition_key": f"t{n}", "payload": {"n": n}} for n in range(COUNT)]
    ids: list[str] = omnibox.peer.call("put", table=table, events=events)
    return ids


async def relay(omnibox: OmniBoxTables, table: str) -> list[str]:
    delivered: list[str] = []

    def note(event: Event) -> None:
        delivered.append(str(event.id))

    store = omnibox.outbox(table).store(omnibox.url, pooler=False)
    async with Relay(store, CallableSink(note), batch_size=20) as relay:
        await relay.drain()
    return delivered


async def publish(omnibox: OmniBoxTables, table: str, empty: int = 1) -> list[str]:
    options: dict[str, Any] = {"table": table, "worker": "peer", "batch": 20, "empty": empty}
    ids: list[str] = await asyncio.to_thread(omnibox.peer.call, "publish", **options)
    return ids


def left(omnibox: OmniBoxTables, table: str) -> Any:
    return omnibox.run(table, "SELECT count(*) AS n FROM {table} WHERE status <> 'completed'")[0]["n"]


@each_outbox
async def test_its_worker_publishes_what_we_put(omnibox: OmniBoxTables, table: str) -> None:
    ids = put_ours(omnibox, table)
    assert Counter(await publish(omnibox, table)) == Counter(ids)
    assert left(omnibox, table) == 0


@each_outbox
async def test_our_relay_delivers_what_it_put(omnibox: OmniBoxTables, table: str) -> None:
    ids = put_theirs(omnibox, table)
    assert Counter(await relay(omnibox, table)) == Counter(ids)
    assert left(omnibox, table) == 0


@each_outbox
async def test_both_at_once_lose_nothing_and_repeat_nothing(omnibox: OmniBoxTables, table: str) -> None:
    ids = [*put_ours(omnibox, table), *put_theirs(omnibox, table)]
    ours, theirs = await asyncio.gather(relay(omnibox, table), publish(omnibox, table, empty=3))
    assert Counter([*ours, *theirs]) == Counter(ids)
    assert left(omnibox, table) == 0
    # What both have seen is readable to it, completed as well.
    for event_id in (ids[0], ids[-1]):
        assert omnibox.peer.call("read", table=table, id=event_id)["status"] == "completed"
