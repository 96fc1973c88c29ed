"""The obligations of the Store port, one test each, on every database: claiming, leases, holds and settlement."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pillarbox.errors import StoreUnavailable, Unsupported
from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome, Retry
from pillarbox.stores import Batch, Counts, Mode, Settlement, Store
from tests.contract.stores import (
    EVERYTHING,
    HOUR,
    LEASE,
    Kit,
    SqlKit,
    attempts,
    claim,
    closed_port,
    deliver,
    event,
    events,
    names,
    states,
    until,
)

MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
LATER = Retry("503 from the destination", HOUR)


class Interrupted(Exception):
    """The application changes its mind."""


# -- what is claimed ---------------------------------------------------------------------------------------------


async def test_committed_event_is_claimed(kit: Kit, store: Store, mode: Mode) -> None:
    placed = event("placed", "o-1")
    kit.put(placed)
    batch = await claim(store, mode=mode)
    assert [each.event.id for each in batch.claims] == [placed.id]
    assert batch.mode == mode
    await batch.abandon()


async def test_rolled_back_event_is_never_claimed(kit: Kit, store: Store, mode: Mode) -> None:
    with suppress(Interrupted), kit.transaction() as put:
        put(event("placed"))
        raise Interrupted
    assert names(await claim(store, mode=mode)) == ""
    assert await store.counts() == Counts()


@pytest.mark.needs("open transactions")
async def test_event_is_not_claimed_before_its_commit(kit: Kit, store: Store, mode: Mode) -> None:
    with kit.transaction() as put:
        put(event("placed"))
        assert names(await claim(store, mode=mode)) == ""
    batch = await claim(store, mode=mode)
    assert names(batch) == "placed"
    await batch.abandon()


async def test_events_are_claimed_in_the_order_they_were_put(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(event("a1", "a"), event("b1", "b"), event("x"), event("a2", "a"))
    kit.put(event("c1", "c"), event("y"))
    kit.put(event("b2", "b"), event("a3", "a"))
    batch = await claim(store, mode=mode)
    assert names(batch) == "a1 b1 x a2 c1 y b2 a3"
    await batch.abandon()


async def test_claim_takes_at_most_its_limit_and_says_that_more_waits(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(*events("one two three", "k"))
    first = await claim(store, 2, mode=mode)
    assert (names(first), first.is_full) == ("one two", True)
    await first.settle([DELIVERED, DELIVERED])
    second = await claim(store, 2, mode=mode)
    assert (names(second), second.is_full) == ("three", False)
    await second.settle([DELIVERED])


async def test_empty_outbox_gives_an_empty_batch(store: Store, mode: Mode) -> None:
    batch = await claim(store, mode=mode)
    assert (list(batch.claims), batch.is_full, batch.has_tried) == ([], False, False)


async def test_claim_by_a_way_the_store_does_not_offer_is_refused(kit: Kit, store: Store) -> None:
    with pytest.raises(Unsupported, match="cannot claim by telepathy"):
        await claim(store, mode="telepathy")  # type: ignore[arg-type]


# -- once, by id and by dedup key --------------------------------------------------------------------------------


async def test_existing_id_is_left_as_it_is(kit: Kit, store: Store) -> None:
    first = event("first", "k")
    second = event("second", "k", id=first.id)
    other = event("other", "k")
    assert kit.put(first).new == (first,)
    receipt = kit.put(second, other)
    assert (receipt.new, receipt.existing) == ((other,), (second,))
    assert await deliver(store) == "first other"


async def test_dedup_key_allows_one_live_event(kit: Kit, store: Store) -> None:
    first, second, third = events("first second third", dedup_key="reminder-7")
    receipt = kit.put(first, second)
    assert (receipt.new, receipt.existing) == ((first,), (second,))
    assert kit.put(third).existing == (third,)
    assert await deliver(store) == "first"


async def test_dedup_keys_are_compared_exactly(kit: Kit, store: Store) -> None:
    keys = ["a", "A", "a ", "á", "a\N{COMBINING ACUTE ACCENT}"]
    receipt = kit.put(*(event(f"e{number}", dedup_key=key) for number, key in enumerate(keys)))
    assert [each.type for each in receipt.existing] == []
    assert await deliver(store) == "e0 e1 e2 e3 e4"


@pytest.mark.parametrize("retention", [None, HOUR], ids=["deleted", "retained"])
async def test_dedup_key_is_free_again_after_delivery(kit: Kit, retention: timedelta | None) -> None:
    store = await kit.open(retention=retention)
    kit.put(event("first", dedup_key="reminder-7"))
    assert await deliver(store) == "first"
    assert kit.put(event("second", dedup_key="reminder-7")).existing == ()
    assert await deliver(store) == "second"


async def test_dedup_key_is_free_again_after_death(kit: Kit, store: Store) -> None:
    kit.put(event("first", dedup_key="reminder-7"))
    await (await claim(store)).settle([Dead("no such address")])
    assert kit.put(event("second", dedup_key="reminder-7")).existing == ()
    assert await deliver(store) == "second"


async def test_event_can_die_again_after_it_was_put_again(kit: Kit, store: Store) -> None:
    first = event("first")
    kit.put(first)
    await (await claim(store)).settle([Dead("no such address")])
    kit.put(event("second", id=first.id))
    settlement = await (await claim(store)).settle([Dead("still no such address")])
    assert settlement == Settlement(dead=1)


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["delay", "due_at"])
async def test_event_is_not_claimed_before_its_time(kit: Kit, store: Store, by: str) -> None:
    when = {"delay": MINUTE} if by == "delay" else {"due_at": datetime.now(UTC) + MINUTE}
    kit.put(event("reminder", **when))
    assert names(await claim(store)) == ""
    assert await states(store) == {"reminder": "scheduled"}
    await kit.pass_time(50 * SECOND)
    assert names(await claim(store)) == ""
    await kit.pass_time(11 * SECOND)
    assert names(await claim(store)) == "reminder"


async def test_event_due_in_the_past_is_claimed_at_once(kit: Kit, store: Store, mode: Mode) -> None:
    due_at = datetime.now(UTC) - HOUR
    kit.put(event("overdue", due_at=due_at), event("now", delay=timedelta(0)))
    batch = await claim(store, mode=mode)
    assert names(batch) == "overdue now"
    assert batch.claims[0].event.due_at == due_at
    await batch.abandon()


async def test_scheduled_event_blocks_nobody(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(event("reminder", "k", delay=MINUTE), event("next", "k"), event("other", "o"))
    batch = await claim(store, mode=mode)
    assert names(batch) == "next other"
    await batch.abandon()


async def test_scheduled_event_takes_its_place_when_it_is_due(kit: Kit, store: Store) -> None:
    kit.put(event("reminder", "k", delay=MINUTE), event("next", "k"))
    await kit.pass_time(MINUTE + SECOND)
    assert names(await claim(store)) == "reminder next"


@pytest.mark.needs("sql")
async def test_database_clock_makes_an_event_due(kit: Kit, store: Store) -> None:
    kit.put(event("soon", delay=timedelta(milliseconds=150)))
    put_at = time.monotonic()

    async def claimed() -> Batch | None:
        await store.next_due()
        batch = await claim(store)
        return batch if batch.claims else None

    assert names(await until(claimed)) == "soon"
    assert time.monotonic() - put_at >= 0.149


async def test_nothing_is_due_when_nothing_waits(kit: Kit, store: Store) -> None:
    assert await store.next_due() is None
    kit.put(event("ready"))
    assert await store.next_due() is None


async def assert_due_in(store: Store, expected: timedelta, since: float) -> None:
    due = await store.next_due()
    passed = timedelta(seconds=time.monotonic() - since)
    tolerance = timedelta(milliseconds=5)
    assert due is not None
    assert expected - passed - tolerance <= due <= expected + tolerance


async def test_next_due_is_when_the_next_scheduled_event_is(kit: Kit, store: Store) -> None:
    start = time.monotonic()
    kit.put(event("later", delay=2 * MINUTE), event("sooner", delay=MINUTE))
    await assert_due_in(store, MINUTE, start)


async def test_next_due_is_when_the_next_retry_is(kit: Kit, store: Store) -> None:
    kit.put(event("flaky"))
    batch = await claim(store)
    start = time.monotonic()
    await batch.settle([Retry("503", 20 * SECOND)])
    await assert_due_in(store, 20 * SECOND, start)


async def test_next_due_is_when_the_next_lease_lapses(kit: Kit, store: Store) -> None:
    kit.put(event("placed"), event("later", delay=2 * MINUTE))
    start = time.monotonic()
    await claim(store, lease=30 * SECOND)
    await assert_due_in(store, 30 * SECOND, start)


async def test_next_due_is_zero_when_a_time_has_come(kit: Kit, store: Store) -> None:
    kit.put(event("reminder", delay=MINUTE))
    await kit.pass_time(HOUR)
    assert await store.next_due() == timedelta(0)


async def test_wait_ends_at_its_timeout(store: Store) -> None:
    await store.wait(timedelta(milliseconds=10))  # whatever was put before this test counts once
    assert await store.wait(timedelta(milliseconds=30)) is False


@pytest.mark.needs("wakes")
async def test_put_wakes_a_waiting_store(kit: Kit, store: Store) -> None:
    await store.wait(timedelta(milliseconds=10))
    waiting = asyncio.create_task(store.wait(timedelta(seconds=10)))
    await asyncio.sleep(0)
    kit.put(event("placed"))
    assert await waiting is True


# -- leases ------------------------------------------------------------------------------------------------------


async def test_lease_counts_its_attempt_when_it_is_claimed(kit: Kit, store: Store) -> None:
    kit.put(event("placed"))
    batch = await claim(store)
    assert [each.attempt for each in batch.claims] == [1]
    assert await attempts(store) == {"placed": 1}
    assert await states(store) == {"placed": "leased"}


async def test_leased_event_is_claimed_by_nobody_else(kit: Kit, store: Store, mode: Mode) -> None:
    other = await kit.open()
    kit.put(event("placed"), event("keyed", "k"))
    assert names(await claim(store)) == "placed keyed"
    assert names(await claim(other, mode=mode)) == ""
    assert names(await claim(store, mode=mode)) == ""


async def test_lapsed_lease_is_claimed_again_with_its_attempt_counted(kit: Kit, store: Store) -> None:
    kit.put(*events("one two", "k"))
    await claim(store, lease=MINUTE)
    await kit.pass_time(MINUTE + SECOND)
    again = await claim(await kit.open())
    assert names(again) == "one two"
    assert [each.attempt for each in again.claims] == [2, 2]


@pytest.mark.needs("sql")
async def test_database_clock_lets_a_lease_lapse(kit: Kit, store: Store) -> None:
    other = await kit.open()
    kit.put(event("placed"))
    claimed_at = time.monotonic()
    await claim(store, lease=timedelta(milliseconds=150))

    async def claimed() -> Batch | None:
        await other.next_due()
        batch = await claim(other)
        return batch if batch.claims else None

    assert names(await until(claimed)) == "placed"
    assert time.monotonic() - claimed_at >= 0.149


@pytest.mark.parametrize(
    "outcome", [DELIVERED, LATER, Dead("bad"), RELEASED], ids=["delivered", "retry", "dead", "released"]
)
async def test_relay_that_lost_its_lease_changes_nothing(kit: Kit, store: Store, outcome: Outcome) -> None:
    kit.put(event("placed", "k"), event("next", "k"))
    old = await claim(store, 1)
    await kit.pass_time(HOUR)
    new = await claim(await kit.open(), 1)
    assert await old.settle([outcome]) == Settlement(lost=1)
    assert (await states(store))["placed"] == "leased"
    assert (await attempts(store))["placed"] == 2
    assert await new.settle([DELIVERED]) == Settlement(delivered=1)
    assert await deliver(store) == "next"


async def test_only_the_lost_claims_of_a_batch_are_left_alone(kit: Kit, store: Store) -> None:
    kit.put(event("slow", "s"), event("quick", "q"))
    old = await claim(store)
    await kit.pass_time(HOUR)
    taken = await claim(await kit.open(), 1)
    assert names(taken) == "slow"
    # The other lapsed too, and became ready again when the first was claimed.
    assert await old.settle([DELIVERED, DELIVERED]) == Settlement(lost=2)
    assert await taken.settle([DELIVERED]) == Settlement(delivered=1)
    assert await deliver(store) == "quick"


async def test_lapsed_claim_that_nobody_took_is_still_settled(kit: Kit, store: Store) -> None:
    kit.put(event("placed"))
    batch = await claim(store)
    await kit.pass_time(HOUR)
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
    assert await store.counts() == Counts()


async def test_second_settlement_changes_nothing(kit: Kit, store: Store) -> None:
    kit.put(event("placed"))
    batch = await claim(store)
    await batch.settle([RELEASED])
    assert await batch.settle([Dead("bad")]) == Settlement(lost=1)
    assert await states(store) == {"placed": "ready"}


async def test_renewed_lease_does_not_lapse(kit: Kit, store: Store) -> None:
    other = await kit.open()
    kit.put(event("placed"))
    batch = await claim(store, lease=MINUTE)
    for _ in range(3):
        await kit.pass_time(40 * SECOND)
        assert list(await batch.renew(MINUTE)) == []
        assert names(await claim(other)) == ""
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


async def test_renewal_reports_the_claims_that_are_lost(kit: Kit, store: Store) -> None:
    kit.put(event("slow", "s"), event("quick", "q"))
    batch = await claim(store, lease=MINUTE)
    await kit.pass_time(HOUR)
    taken = await claim(await kit.open(), lease=30 * SECOND)
    assert names(await batch.renew(HOUR)) == "slow quick"
    await kit.pass_time(31 * SECOND)
    # A renewal in vain does not extend the lease of the one who has it now.
    assert names(await claim(store)) == ""
    await kit.pass_time(MINUTE)
    assert names(await claim(store)) == "slow quick"
    assert await taken.settle([DELIVERED, DELIVERED]) == Settlement(lost=2)


@pytest.mark.parametrize("how", ["settle", "abandon"])
async def test_released_claim_is_ready_at_once_and_counts_no_attempt(kit: Kit, store: Store, how: str) -> None:
    kit.put(event("placed", "k"))
    batch = await claim(store)
    if how == "settle":
        assert await batch.settle([RELEASED]) == Settlement(released=1)
    else:
        await batch.abandon()
    assert await attempts(store) == {"placed": 0}
    again = await claim(store)
    assert [each.attempt for each in again.claims] == [1]


async def claim_after_lapse(kit: Kit, store: Store, **options: Any) -> Batch:
    """Claim a lapsed event; one that lapsed before waits a moment more when it is let go."""
    await kit.pass_time(HOUR)
    batch = await claim(store, **options)
    if not batch.claims:
        await kit.pass_time(HOUR)
        batch = await claim(store, **options)
    return batch


async def test_lease_that_lapses_on_its_last_attempt_is_dead(kit: Kit, store: Store) -> None:
    kit.put(event("twice"), event("once", max_attempts=1), event("thrice", max_attempts=3))
    await claim(store, max_attempts=2)
    await kit.pass_time(HOUR)
    second = await claim(store, max_attempts=2)
    assert names(second) == "twice thrice"
    third = await claim_after_lapse(kit, store, max_attempts=2)
    assert names(third) == "thrice"
    dead = await store.events(EVERYTHING, state="dead")
    assert [(record.event.type, record.attempts) for record in dead] == [("once", 1), ("twice", 2)]
    assert all(record.error is not None and "lapsed" in record.error for record in dead)


async def test_without_a_limit_a_lease_may_lapse_for_ever(kit: Kit, store: Store) -> None:
    kit.put(event("placed"))
    await claim(store)
    for attempt in range(2, 6):
        (taken,) = (await claim_after_lapse(kit, store)).claims
        assert taken.attempt == attempt


async def test_events_that_lapsed_twice_come_back_at_different_moments(kit: Kit, store: Store) -> None:
    kit.put(*(event(f"e{number}") for number in range(20)))
    await claim(store)
    await kit.pass_time(HOUR)
    assert len((await claim(store)).claims) == 20  # after the first time they come back at once
    await kit.pass_time(HOUR)
    now = kit.now()
    early = await claim(store)
    waiting = await store.events(EVERYTHING, state="waiting")
    assert len(waiting) + len(early.claims) == 20
    moments = [record.until_at for record in waiting if record.until_at is not None]
    assert len(set(moments)) >= 0.75 * len(moments)
    assert now + 2 * SECOND < max(moments) <= kit.now() + 4 * SECOND


# -- settlement --------------------------------------------------------------------------------------------------


async def test_settlement_writes_one_outcome_a_claim(kit: Kit, store: Store) -> None:
    kit.put(*(event(name, name) for name in ("sent", "flaky", "bad", "untried")))
    batch = await claim(store)
    settlement = await batch.settle([DELIVERED, LATER, Dead("400 from the destination"), RELEASED])
    assert settlement == Settlement(delivered=1, retried=1, dead=1, released=1)
    assert await states(store) == {"flaky": "waiting", "bad": "dead", "untried": "ready"}
    records = {record.event.type: record for record in await store.events(EVERYTHING)}
    assert {name: record.attempts for name, record in records.items()} == {"flaky": 1, "bad": 1, "untried": 0}
    assert records["flaky"].error == "503 from the destination"
    assert records["bad"].error == "400 from the destination"
    assert records["untried"].error is None


async def test_settlement_takes_one_outcome_a_claim(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(event("one"), event("two"))
    batch = await claim(store, mode=mode)
    with pytest.raises(ValueError, match="shorter"):
        await batch.settle([DELIVERED])
    await batch.abandon()
    assert await deliver(store) == "one two"


async def test_retained_events_stay_with_the_time_of_their_delivery(kit: Kit, mode: Mode) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(event("placed", "k"))
    await (await claim(store, mode=mode)).settle([DELIVERED])
    (record,) = await store.events(EVERYTHING)
    assert (record.state, record.attempts) == ("delivered", 1)
    assert record.delivered_at is not None
    assert record.delivered_at >= record.event.created_at
    assert names(await claim(store, mode=mode)) == ""


async def test_retried_event_is_claimed_when_its_delay_is_over(kit: Kit, store: Store) -> None:
    kit.put(event("flaky"))
    await (await claim(store)).settle([Retry("503", MINUTE)])
    await kit.pass_time(50 * SECOND)
    assert names(await claim(store)) == ""
    await kit.pass_time(11 * SECOND)
    again = await claim(store)
    assert [each.attempt for each in again.claims] == [2]


async def test_dead_event_is_not_claimed_again(kit: Kit, store: Store, mode: Mode) -> None:
    kit.put(event("bad"))
    batch = await claim(store, mode=mode)
    assert await batch.settle([Dead("400")]) == Settlement(dead=1)
    await kit.pass_time(100 * HOUR)
    assert names(await claim(store, mode=mode)) == ""
    (record,) = await store.events(EVERYTHING)
    assert (record.state, record.attempts, record.error) == ("dead", 1, "400")


async def test_error_text_is_kept_whole(kit: Kit, store: Store) -> None:
    text = "Ошибка 🚫 'quoted' \"twice\" back\\slash 100 % {json: [1]}\nsecond line " + "x" * 10_000
    kit.put(event("flaky"), event("bad"))
    await (await claim(store)).settle([Retry(text, HOUR), Dead(text)])
    assert [record.error for record in await store.events(EVERYTHING)] == [text, text]


@pytest.mark.needs("server")
async def test_server_that_is_down_is_reported_as_such(kit: SqlKit) -> None:
    url = kit.database.url.set(port=closed_port())
    from pillarbox.stores.url import open_store

    store = open_store(url, table=kit.database.table)
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()


async def test_batches_of_one_store_are_settled_in_any_order(kit: Kit, store: Store) -> None:
    kit.put(event("one", "a"), event("two", "b"), event("three", "c"))
    first, second, third = [await claim(store, 1, lease=LEASE) for _ in range(3)]
    assert names(first) == "one"
    assert await third.settle([DELIVERED]) == Settlement(delivered=1)
    assert await first.settle([DELIVERED]) == Settlement(delivered=1)
    assert await second.settle([DELIVERED]) == Settlement(delivered=1)
    assert await store.counts() == Counts()
