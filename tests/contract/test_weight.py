"""What a batch weighs: on every store and in the table of every layout it ends before its payloads are too heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from pillarbox import Event, Relay
from pillarbox.event import DELIVERED
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Batch, Mode, Store
from pillarbox.stores.weighing import Scale
from tests.contract.layouts import LayoutKit, names
from tests.contract.layouts import claim as claim_row
from tests.contract.stores import Kit, claim, event

SIZES = {"one": 1000, "two": 1000, "three": 1000, "heavy": 9000, "five": 1000, "six": 1900, "seven": 10, "eight": 10}
BOUND = 3500
"""For three of a thousand with the few bytes around them, and not for four."""


def make_payload(name: str) -> dict[str, str]:
    return {"name": name, "body": name[0] * SIZES[name]}


async def settle(batch: Batch) -> str:
    """Deliver a batch; returns its names."""
    for each in batch.claims:
        # A put may add what the table's own system reads there.
        assert orjson.loads(each.event.payload).items() >= make_payload(each.event.type).items()
    assert sum(SIZES[each.event.type] for each in batch.claims) <= BOUND or len(batch.claims) == 1
    delivered = names(batch)
    if batch.claims:
        await batch.settle([DELIVERED] * len(batch.claims))
    return delivered


async def test_batch_ends_before_it_is_too_heavy(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(*(Event(name, make_payload(name), key="k") for name in SIZES))
    batch = await claim(store, mode=mode, max_bytes=BOUND)
    assert (names(batch), batch.is_full) == ("one two three", True)
    await settle(batch)
    # What weighs more than a whole batch goes alone.
    batch = await claim(store, mode=mode, max_bytes=BOUND)
    assert (await settle(batch), batch.is_full) == ("heavy", True)
    rest = ""
    while found := await settle(await claim(store, mode=mode, max_bytes=BOUND)):
        rest += f" {found}"
    assert rest == " five six seven eight"


async def test_light_events_behind_a_heavy_one_do_not_pass_it(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(*(Event(name, make_payload(name), key="k") for name in ("seven", "heavy", "eight")))
    found = [await settle(await claim(store, mode=mode, max_bytes=BOUND)) for _ in range(3)]
    assert found == ["seven", "heavy", "eight"]
    assert await settle(await claim(store, max_bytes=BOUND)) == ""


async def test_what_was_cut_off_is_nobodys(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(Event("one", make_payload("one"), key="k"), Event("heavy", make_payload("heavy"), key="k"))
    first = await claim(store, mode=mode, max_bytes=BOUND)
    assert names(first) == "one"
    await first.abandon()
    again = await claim(store, mode="lease")
    assert [(each.event.type, each.attempt) for each in again.claims] == [("one", 1), ("heavy", 1)]


async def test_without_a_bound_everything_comes_at_once(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(*(Event(name, make_payload(name), key="k") for name in SIZES))
    batch = await claim(store, mode=mode)
    assert [orjson.loads(claim.event.payload) for claim in batch.claims] == [make_payload(name) for name in SIZES]
    await batch.abandon()


@pytest.mark.needs("sql")
async def test_light_batches_need_no_weighing(kit: Kit, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = Scale._ask

    def note(scale: Scale, db: Any, what: Any, rows: Sequence[Any]) -> dict[Any, Any]:
        asked.append(len(rows))
        return ask(scale, db, what, rows)

    monkeypatch.setattr(Scale, "_ask", note)
    kit.put(*(event(f"e{number}") for number in range(20)))
    batch = await claim(store, 20, max_bytes=20_000)
    await batch.settle([DELIVERED] * len(batch.claims))
    assert asked == []
    kit.put(Event("heavy", make_payload("heavy")))
    await claim(store, 20, max_bytes=20_000)
    assert asked == [1, 1]


@pytest.mark.needs("put")
async def test_batch_of_any_table_ends_before_it_is_too_heavy(layout_kit: LayoutKit, mode: Mode) -> None:
    for name in SIZES:
        layout_kit.add(name, payload=make_payload(name))
    store = await layout_kit.open()
    batches: list[str] = []
    while found := await settle(await claim_row(store, mode=mode, max_bytes=BOUND)):
        batches.append(found)
    assert batches[:2] == ["one two three", "heavy"]
    assert " ".join(batches[2:]) == "five six seven eight"


async def test_relay_delivers_heavy_events_in_order_and_within_its_bound(kit: Kit, store: Store) -> None:
    kit.put(*(Event(f"e{number}", "x" * (10 + number % 7 * 3000), key=f"k{number % 3}") for number in range(60)))
    sink = MemorySink()
    async with Relay(store, sink, batch_bytes=30_000) as relay:
        left = await relay.drain()
    assert (left.new, left.held, left.dead) == (0, 0, 0)
    weights = [sum(len(each.event.payload) for each in batch) for batch in sink.batches]
    assert 20_000 < max(weights) <= 30_000
    for key in ("k0", "k1", "k2"):
        mine = [int(each.type[1:]) for each in sink.events if each.key == key]
        assert mine == list(range(int(key[1:]), 60, 3))
