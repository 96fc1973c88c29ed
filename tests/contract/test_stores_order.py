"""Order per key: what stands in a key's way, what sets it free, and that several relays keep to it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox.errors import StoreUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead, Event, Outcome, Retry
from pillarbox.stores import Batch, Filter, Mode, Settlement, Store
from pillarbox.stores.server import AsyncSqlStore
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import (
    EVERYTHING,
    HOUR,
    Kit,
    SqlKit,
    claim,
    deliver,
    event,
    events,
    names,
    states,
)

SECOND = timedelta(seconds=1)
LATER = Retry("503 from the destination", HOUR)


async def fail_first(store: Store, outcome: Retry | Dead, *, park: bool = True) -> None:
    """Try the first event in vain."""
    batch = await claim(store, 1)
    await batch.settle([outcome], park=park)


# -- a key in flight ---------------------------------------------------------------------------------------------


async def test_one_claim_takes_several_events_of_a_key_in_order(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(*events("one two three four five", "k"))
    batch = await claim(store, mode=mode)
    assert names(batch) == "one two three four five"
    await batch.abandon()


async def test_key_in_flight_is_claimed_by_nobody_else(kit: Kit, store: Store, mode: Mode) -> None:
    other = await kit.open()
    kit.put(*events("one two three", "k"))
    first = await claim(store, 1, mode=mode)
    assert names(first) == "one"
    for relay in (store, other):
        assert names(await claim(relay)) == ""
    await first.settle([DELIVERED])
    assert await deliver(other) == "two three"


async def test_event_put_while_its_key_is_in_flight_waits(kit: Kit, store: Store, mode: Mode) -> None:
    other = await kit.open()
    kit.put(event("one", "k"))
    first = await claim(store, mode=mode)
    kit.put(event("two", "k"))
    assert names(await claim(other)) == ""
    kit.put(event("three", "k"))
    assert names(await claim(other)) == ""
    await first.settle([DELIVERED])
    assert await deliver(other) == "two three"


async def test_other_keys_are_claimed_while_one_is_in_flight(kit: Kit, store: Store) -> None:
    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"), event("x"))
    assert names(await claim(store, 1)) == "a1"
    assert names(await claim(await kit.open())) == "b1 x"


async def test_events_without_a_key_do_not_wait_for_each_other(kit: Kit, store: Store) -> None:
    kit.put(*events("one two three"))
    assert names(await claim(store, 1)) == "one"
    assert names(await claim(await kit.open(), 1)) == "two"
    assert names(await claim(store, 1)) == "three"


async def test_keys_are_compared_exactly(kit: Kit, store: Store) -> None:
    keys = ["a", "A", "a ", "á", "a\N{COMBINING ACUTE ACCENT}"]
    kit.put(*(event(f"e{number}", key) for number, key in enumerate(keys)))
    await fail_first(store, LATER)
    assert names(await claim(store)) == "e1 e2 e3 e4"


# -- a key that waits --------------------------------------------------------------------------------------------


async def test_retry_blocks_later_events_of_its_key_only(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"), event("x"))
    await fail_first(store, LATER)
    kit.put(event("a3", "a"), event("y"))
    batch = await claim(store, mode=mode)
    assert names(batch) == "b1 x y"
    await batch.settle([DELIVERED] * 3)
    assert names(await claim(store, mode=mode)) == ""


async def test_retried_event_comes_before_those_it_blocked(kit: Kit, store: Store) -> None:
    kit.put(*events("one two three", "k"))
    await fail_first(store, LATER)
    assert names(await claim(store)) == ""
    await kit.pass_time(HOUR + SECOND)
    assert await deliver(store) == "one two three"


@pytest.mark.parametrize("front", ["retried", "lapsed"])
async def test_later_event_does_not_pass_one_that_was_blocked(kit: Kit, store: Store, front: str) -> None:
    kit.put(*events("one two", "k"))
    batch = await claim(store, 1)
    if front == "retried":
        await batch.settle([LATER])
    assert names(await claim(store)) == ""
    assert (await states(store))["two"] == "blocked"
    kit.put(event("three", "k"))
    await kit.pass_time(HOUR + SECOND)
    assert await deliver(store) == "one two three"


async def test_retry_in_a_hold_blocks_later_events_of_its_key(kit: Kit, hold_store: Store) -> None:
    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"))
    batch = await claim(hold_store, mode="hold")
    await batch.settle([LATER, RELEASED, DELIVERED])
    assert names(await claim(hold_store, mode="hold")) == ""
    await kit.pass_time(HOUR + SECOND)
    assert await deliver(hold_store) == "a1 a2"


async def test_event_that_waits_after_a_lapse_blocks_its_key(kit: Kit, store: Store) -> None:
    kit.put(event("one", "k"))
    await claim(store)
    await kit.pass_time(HOUR)
    await claim(store)
    kit.put(event("two", "k"))
    await kit.pass_time(HOUR)
    # The second lapse makes it wait a moment.
    if not (again := await claim(store)).claims:
        await kit.pass_time(HOUR)
        again = await claim(store)
    assert names(again) in ("one", "one two")
    await again.settle([DELIVERED] * len(again.claims))
    assert await deliver(store) == ("two" if len(again.claims) == 1 else "")


@pytest.mark.parametrize("outcome", [Retry("503", 9 * HOUR), Dead("400")], ids=["retried", "dead"])
async def test_event_that_came_due_meanwhile_does_not_wait_for_a_later_one_that_failed(
    kit: Kit, store: Store, outcome: Retry | Dead
) -> None:
    kit.put(event("reminder", "k", delay=HOUR), event("next", "k"), event("last", "k"))
    batch = await claim(store, 1, lease=3 * HOUR)
    assert names(batch) == "next"
    await kit.pass_time(HOUR + SECOND)
    assert names(await claim(store)) == ""
    await batch.settle([outcome])
    assert names(await claim(store)) == "reminder"


async def see_blocked(kit: SqlKit, store: SqlStore) -> Sequence[tuple[Any, str]]:
    """Let a relay find out that the first event must wait, and stop it before it marks that."""
    await store.run(lambda db: store.transitions.wake(db, None, True))
    taken = await store.run(lambda db: store.transitions.claim(db, 100, "lease", HOUR))
    assert not taken.claims
    assert [key for _, key in taken.blocked] == ["k"]
    return taken.blocked


@pytest.mark.needs("sql")
@pytest.mark.parametrize("outcome", [Dead("400"), LATER, DELIVERED, RELEASED, None], ids=str)
async def test_event_that_came_due_is_marked_as_behind_a_later_one_only_while_that_is_in_flight(
    kit: SqlKit, store: SqlStore, outcome: Outcome | None
) -> None:
    """The later one ends, or does not, after a relay has seen it in flight and before that relay marks the other."""
    other = await kit.open()
    kit.put(event("one", "k", delay=HOUR), event("two", "k"))
    later = await claim(store, lease=3 * HOUR)
    assert names(later) == "two"
    await kit.pass_time(HOUR + SECOND)
    blocked = await see_blocked(kit, other)
    if outcome is not None:
        await later.settle([outcome])
    is_in_flight = outcome is None
    assert await other.run(lambda db: other.transitions.block(db, blocked)) == is_in_flight
    assert (await states(store))["one"] == ("blocked" if is_in_flight else "ready")
    assert await store.find_faults() == []
    if is_in_flight:
        await later.settle([Dead("400")])
    assert names(await claim(other, 1)) == "one"


@pytest.mark.parametrize("outcome", [Dead("400"), LATER, DELIVERED, RELEASED], ids=str)
async def test_event_that_comes_due_behind_a_later_one_in_flight_hides_no_other_key(
    kit: Kit, store: Store, outcome: Outcome
) -> None:
    kit.put(event("one", "k", delay=HOUR), event("two", "k"))
    later = await claim(store, lease=9 * HOUR)
    assert names(later) == "two"
    await kit.pass_time(HOUR + SECOND)
    await store.next_due()
    kit.put(event("a", "a"), event("b", "b"))
    # The claim that finds the key taken marks the event; the next one does not see it any more.
    found = [names(await claim(store, 1)) for _ in range(3)]
    assert [name for name in found if name] == ["a", "b"]
    await later.settle([outcome])
    assert names(await claim(store, 1)) == "one"


async def test_event_behind_a_later_one_whose_lease_lapses_goes_first(kit: Kit, store: Store) -> None:
    kit.put(event("one", "k", delay=HOUR), event("two", "k"))
    assert names(await claim(store, lease=2 * HOUR)) == "two"
    await kit.pass_time(HOUR + SECOND)
    await store.next_due()
    assert names(await claim(store)) == ""
    await kit.pass_time(HOUR + SECOND)
    await store.next_due()
    assert names(await claim(store, 1)) == "one"


@pytest.mark.needs("sql")
async def test_event_between_two_in_flight_is_free_when_the_second_fails(kit: SqlKit, store: SqlStore) -> None:
    other = await kit.open()
    kit.put(event("one", "k"), event("two", "k", delay=HOUR), event("three", "k"))
    batch = await claim(store, lease=3 * HOUR)
    assert names(batch) == "one three"
    await kit.pass_time(HOUR + SECOND)
    blocked = await see_blocked(kit, other)
    assert await other.run(lambda db: other.transitions.block(db, blocked)) == 1
    await batch.settle([DELIVERED, Dead("400")])
    assert await deliver(other) == "two"


@pytest.mark.needs("server")
async def test_scheduled_events_of_a_key_keep_their_order_when_two_relays_wake_them(
    kit: SqlKit, store: AsyncSqlStore
) -> None:
    """The first relay has made the first event ready, and not committed that, when the second one comes due."""
    other = await kit.open()
    kit.put(event("one", "k", delay=HOUR))
    await kit.pass_time(HOUR + SECOND)
    async with store._engine.connect() as slow:
        assert await slow.run_sync(lambda db: store.transitions.wake(db, None, True)) == 1
        due = [event("two", "k", delay=HOUR), event("other", "j", delay=HOUR)]
        kit.put(*due)
        table = kit.database.outbox.table
        with kit.database.engine.begin() as db:
            mine = table.c.id.in_([each.id for each in due])
            db.execute(sa.update(table).where(mine).values(until_at=table.c.created_at))
        await other.next_due()
        assert await deliver(other) == "other"
        await slow.commit()
    await other.next_due()
    assert await deliver(other) == "one two"


@pytest.mark.needs("server")
async def test_scheduled_event_that_somebody_has_locked_is_not_passed(kit: SqlKit, store: Store) -> None:
    one = event("one", "k", delay=HOUR)
    kit.put(one, event("two", "k", delay=HOUR), event("other", "j", delay=HOUR))
    await kit.pass_time(HOUR + SECOND)
    with kit.lock(one):
        assert await deliver(store) == "other"
    await store.next_due()
    assert await deliver(store) == "one two"


async def test_scheduled_event_that_was_tried_blocks_its_key(kit: Kit, store: Store) -> None:
    kit.put(event("reminder", "k", delay=HOUR), event("next", "k"), event("last", "k"))
    assert names(await claim(store, 1)) == "next"
    await kit.pass_time(HOUR + SECOND)
    await fail_first_of(await claim(store), "reminder", store)
    assert names(await claim(store)) == ""


async def fail_first_of(batch: Batch, name: str, store: Store) -> None:
    assert names(batch).startswith(name)
    await batch.settle([LATER, *[RELEASED] * (len(batch.claims) - 1)])


async def test_prefetch_leaves_rows_that_wait_where_they_are(kit: Kit, store: Store) -> None:
    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"))
    assert names(await claim(store, 1)) == "a1"
    assert names(await claim(store, is_prefetch=True)) == "b1"
    assert (await states(store))["a2"] == "ready"
    await claim(store)
    assert (await states(store))["a2"] == "blocked"


# -- what sets a key free ----------------------------------------------------------------------------------------


async def block_behind(store: Store, outcome: Retry | Dead) -> None:
    """Fail the first event of a key and let the next claim find the others behind it."""
    await fail_first(store, outcome)
    assert names(await claim(store)) == ""
    found = await states(store)
    assert [name for name in found if found[name] == "blocked"] == ["three", "two"]


@pytest.mark.parametrize("how", ["redriven", "dropped", "pruned"])
async def test_parked_key_is_free_when_its_dead_event_is(kit: Kit, store: Store, how: str) -> None:
    kit.put(*events("one two three", "k"))
    await block_behind(store, Dead("400"))
    if how == "redriven":
        assert await store.redrive(EVERYTHING, actor="ann") == 1
    elif how == "dropped":
        assert await store.drop(EVERYTHING, actor="ann") == 1
    else:
        await kit.pass_time(2 * HOUR)
        assert (await store.prune(dead_age=HOUR)).dead == 1
    assert (await store.counts()).blocked == 0
    assert await deliver(store) == ("one two three" if how == "redriven" else "two three")


async def test_blocked_key_is_free_when_its_first_event_is_cancelled(kit: Kit, store: Store) -> None:
    one, two, three = events("one two three", "k")
    kit.put(one, two, three)
    await block_behind(store, LATER)
    assert kit.cancel(one.id) == 1
    assert await deliver(store) == "two three"


@pytest.mark.parametrize("how", ["delivered", "released"])
async def test_blocked_key_is_free_when_its_first_event_is(kit: Kit, store: Store, how: str) -> None:
    kit.put(*events("one two three", "k"))
    first = await claim(store, 1)
    assert names(await claim(store)) == ""
    assert (await store.counts()).blocked == 2
    await first.settle([DELIVERED if how == "delivered" else RELEASED])
    assert (await store.counts()).blocked == 0
    assert await deliver(store) == ("two three" if how == "delivered" else "one two three")


async def test_cancelling_a_blocked_event_frees_nothing_before_it(kit: Kit, store: Store) -> None:
    one, two, three = events("one two three", "k")
    kit.put(one, two, three)
    await block_behind(store, LATER)
    assert kit.cancel(two.id) == 1
    assert names(await claim(store)) == ""
    await kit.pass_time(HOUR + SECOND)
    assert await deliver(store) == "one three"


async def test_claimed_event_cannot_be_cancelled(kit: Kit, store: Store) -> None:
    one = event("one")
    kit.put(one)
    batch = await claim(store)
    assert kit.cancel(one.id) == 0
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


# -- death and order ---------------------------------------------------------------------------------------------


async def test_dead_event_parks_its_key(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"))
    await fail_first(store, Dead("400"))
    batch = await claim(store, mode=mode)
    assert names(batch) == "b1"
    await batch.settle([DELIVERED])
    kit.put(event("a3", "a"))
    await kit.pass_time(100 * HOUR)
    assert names(await claim(store, mode=mode)) == ""


async def test_skipped_dead_event_lets_its_key_pass(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(*events("one two", "k"))
    await fail_first(store, Dead("400"), park=False)
    batch = await claim(store, mode=mode)
    assert names(batch) == "two"
    await batch.abandon()


async def test_skipping_a_dead_event_frees_those_it_blocked(kit: Kit, store: Store) -> None:
    kit.put(*events("one two three", "k"))
    await block_behind(store, LATER)
    await kit.pass_time(HOUR + SECOND)
    await fail_first(store, Dead("400"), park=False)
    assert (await store.counts()).blocked == 0
    assert await deliver(store) == "two three"


async def test_death_by_a_lapsed_lease_parks_its_key(kit: Kit, store: Store) -> None:
    kit.put(*events("one two", "k"))
    await claim(store, 1, max_attempts=1)
    await kit.pass_time(HOUR)
    assert names(await claim(store, max_attempts=1)) == ""
    assert await states(store) == {"one": "dead", "two": "blocked"}


async def test_death_by_a_lapsed_lease_can_be_skipped(kit: Kit, store: Store) -> None:
    kit.put(*events("one two three", "k"))
    await claim(store, 1, max_attempts=1)
    assert names(await claim(store)) == ""
    assert (await store.counts()).blocked == 2
    await kit.pass_time(HOUR)
    assert names(await claim(store, max_attempts=1, park=False)) == "two three"


async def test_parked_event_lets_earlier_ones_of_its_key_pass(kit: Kit, store: Store) -> None:
    kit.put(*events("one two three", "k"))
    batch = await claim(store, 2)
    await batch.settle([RELEASED, Dead("400")])
    assert names(await claim(store)) == "one"


async def test_event_without_a_key_parks_nothing(kit: Kit, store: Store) -> None:
    kit.put(*events("one two"))
    await fail_first(store, Dead("400"))
    assert await deliver(store) == "two"


# -- several relays ----------------------------------------------------------------------------------------------


def many(count: int, keys: int) -> list[Event]:
    return [event(f"{number % keys}.{number // keys}", f"key-{number % keys}") for number in range(count)]


async def test_concurrent_claims_are_disjoint_and_share_no_key(kit: Kit, mode: Mode) -> None:
    options: dict[str, Any] = {"all_lanes": False} if isinstance(kit, SqlKit) else {}
    relays = [await kit.open(**options) for _ in range(4)]
    kit.put(*many(400, keys=40))
    taken: list[str] = []
    while len(taken) < 400:
        batches = await asyncio.gather(*(claim(relay, 40, mode=mode) for relay in relays))
        keys = [{each.event.key for each in batch.claims} for batch in batches]
        assert sum(map(len, keys)) == len(set[Any]().union(*keys))
        found = " ".join(filter(None, map(names, batches))).split()
        assert found
        taken += found
        for batch in filter(lambda each: each.claims, batches):
            await batch.settle([DELIVERED] * len(batch.claims))
    assert sorted(taken) == sorted(f"{key}.{number}" for key in range(40) for number in range(10))
    for key in range(40):
        own = [name for name in taken if name.startswith(f"{key}.")]
        assert own == [f"{key}.{number}" for number in range(10)]


@pytest.mark.needs("server")
async def test_hold_leaves_lanes_to_others(kit: SqlKit) -> None:
    first, second = await kit.open(all_lanes=False), await kit.open(all_lanes=False)
    kit.put(*many(200, keys=200))
    held = await claim(first, 1000, mode="hold")
    assert 0 < len(held.claims) < 200
    rest = await claim(second, 1000, mode="hold")
    assert 0 < len(rest.claims) <= 200 - len(held.claims)
    await held.abandon()
    await rest.abandon()


@pytest.mark.needs("sql")
async def test_claim_that_fails_midway_gives_back_what_it_took(
    kit: SqlKit, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await kit.open()
    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"))
    await fail_first(store, LATER)

    def fail(*_: Any) -> int:
        raise StoreUnavailable("the server is gone")

    with monkeypatch.context() as patched:
        patched.setattr(store.transitions, "block", fail)
        with pytest.raises(StoreUnavailable):
            await claim(store, mode=mode)
    assert names(await claim(await kit.open())) == "b1"


@pytest.mark.needs("server")
async def test_row_locked_by_somebody_else_stops_its_key_only(kit: SqlKit, store: Store, mode: Mode) -> None:
    a1 = event("a1", "a")
    kit.put(a1, event("a2", "a"), event("b1", "b"), event("a3", "a"), event("x"))
    with kit.lock(a1):
        batch = await claim(store, mode=mode)
        assert names(batch) == "b1 x"
        await batch.settle([DELIVERED, DELIVERED])
        assert names(await claim(store, mode=mode)) == ""
    assert await deliver(store) == "a1 a2 a3"


@pytest.mark.needs("server")
async def test_row_locked_in_the_middle_of_a_key_stops_the_later_ones(kit: SqlKit, store: Store, mode: Mode) -> None:
    a2 = event("a2", "a")
    kit.put(event("a1", "a"), a2, event("a3", "a"))
    with kit.lock(a2):
        batch = await claim(store, mode=mode)
        assert names(batch) == "a1"
        await batch.settle([DELIVERED])
        assert names(await claim(store, mode=mode)) == ""
    assert await deliver(store) == "a2 a3"


async def test_claim_that_finds_only_blocked_events_says_that_more_waits(kit: Kit) -> None:
    options: dict[str, Any] = {"all_lanes": False} if isinstance(kit, SqlKit) else {}
    store = await kit.open(**options)
    kit.put(*many(128, keys=128))
    while (batch := await claim(store)).claims:
        await batch.settle([Dead("400")] * len(batch.claims))
    kit.put(*many(128, keys=128), event("free"))
    while not (batch := await claim(store, 1000)).claims:
        assert batch.is_full, "a relay that drains would end here, with an event left"
    assert names(batch) == "free"


async def test_redriving_the_first_of_two_dead_events_keeps_the_second_parked(kit: Kit, store: Store) -> None:
    one, two, three = events("one two three", "k")
    kit.put(one, two, three)
    batch = await claim(store, 2)
    await batch.settle([Dead("400"), Dead("400")])
    assert await store.redrive(Filter([one.id]), actor="ann") == 1
    assert await deliver(store) == "one"
    assert await store.redrive(Filter([two.id]), actor="ann") == 1
    assert await deliver(store) == "two three"
