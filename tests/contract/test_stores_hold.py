"""Claiming by hold: rows stay locked until they are settled, and whoever dies lets go."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pillarbox.errors import StoreUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead, Retry
from pillarbox.stores import Batch, Counts, Mode, Settlement, Store
from tests.contract.stores import HOUR, Kit, SqlKit, attempts, claim, event, names, states, until

SECOND = timedelta(seconds=1)
LATER = Retry("503 from the destination", HOUR)


async def test_held_event_is_claimed_by_nobody_else(kit: Kit, hold_store: Store, mode: Mode) -> None:
    other = await kit.open()
    kit.put(event("placed"), event("keyed", "k"))
    batch = await claim(hold_store, mode="hold")
    assert names(batch) == "placed keyed"
    assert names(await claim(other, mode=mode)) == ""
    assert await batch.settle([DELIVERED, DELIVERED]) == Settlement(delivered=2)
    assert await other.counts() == Counts()


async def test_abandoned_hold_gives_all_back_untried(kit: Kit, hold_store: Store) -> None:
    kit.put(event("placed"), event("keyed", "k"))
    batch = await claim(hold_store, mode="hold")
    assert [each.attempt for each in batch.claims] == [1, 1]
    await batch.abandon()
    assert await attempts(hold_store) == {"placed": 0, "keyed": 0}
    again = await claim(await kit.open(), mode="hold")
    assert names(again) == "placed keyed"
    await again.abandon()


async def test_hold_counts_its_attempt_when_it_fails(kit: Kit, hold_store: Store) -> None:
    kit.put(event("flaky"), event("bad"), event("untried"))
    batch = await claim(hold_store, mode="hold")
    settlement = await batch.settle([LATER, Dead("400"), RELEASED])
    assert settlement == Settlement(retried=1, dead=1, released=1)
    assert await attempts(hold_store) == {"flaky": 1, "bad": 1, "untried": 0}
    assert await states(hold_store) == {"flaky": "waiting", "bad": "dead", "untried": "ready"}


async def test_hold_takes_no_event_that_was_tried_and_says_so(kit: Kit, hold_store: Store) -> None:
    kit.put(event("flaky", "k"), event("behind", "k"), event("fresh", "o"))
    await (await claim(hold_store, 1)).settle([LATER])
    await kit.pass_time(HOUR + SECOND)
    held = await claim(hold_store, mode="hold")
    assert (names(held), held.has_tried) == ("fresh", True)
    await held.settle([DELIVERED])
    leased = await claim(hold_store)
    assert (names(leased), leased.has_tried) == ("flaky behind", False)


async def test_hold_renews_nothing(kit: Kit, hold_store: Store) -> None:
    kit.put(event("placed"))
    batch = await claim(hold_store, mode="hold")
    assert list(await batch.renew(HOUR)) == []
    await batch.settle([DELIVERED])


async def test_settled_hold_cannot_be_settled_again(kit: Kit, hold_store: Store) -> None:
    kit.put(event("placed"))
    batch = await claim(hold_store, mode="hold")
    await batch.settle([DELIVERED])
    with pytest.raises(StoreUnavailable, match="settled or abandoned before"):
        await batch.settle([DELIVERED])
    await batch.abandon()


@pytest.mark.needs("server")
async def test_lost_connection_gives_a_hold_back_untried(kit: SqlKit, hold_store: Store) -> None:
    kit.put(event("placed"), event("keyed", "k"))
    batch = await claim(hold_store, mode="hold")
    await kit.kill(batch)
    with pytest.raises(StoreUnavailable):
        await batch.settle([DELIVERED, DELIVERED])
    await batch.abandon()
    other = await kit.open()
    again = await until(lambda: _claimed(other))
    assert names(again) == "placed keyed"
    assert [each.attempt for each in again.claims] == [1, 1]


async def _claimed(store: Store) -> Batch | None:
    batch = await claim(store)
    return batch if batch.claims else None


@pytest.mark.needs("server")
async def test_abandoning_a_hold_whose_connection_is_lost_does_not_raise(kit: SqlKit, hold_store: Store) -> None:
    kit.put(event("placed"))
    batch = await claim(hold_store, mode="hold")
    await kit.kill(batch)
    await batch.abandon()


@pytest.mark.needs("server")
async def test_hold_leaves_no_setting_in_its_session(kit: SqlKit, hold_store: Store) -> None:
    kit.put(event("placed"))
    before = await kit.session_timeouts(hold_store)
    batch = await claim(hold_store, mode="hold")
    await batch.settle([DELIVERED])
    assert await kit.session_timeouts(hold_store) == before
