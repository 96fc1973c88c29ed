"""An event's life in the table of every layout, on each of its databases, with the row's columns read by hand."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from pillarbox import Relay, Retry
from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Counts, Filter, Mode, Pruned, Settlement
from tests.contract.layouts import HOUR, LayoutKit, claim, names

LATER = Retry("503 from the destination", HOUR)
REFUSED = Dead("400: no such order")
EVERYTHING = Filter()
SECONDS = timedelta(seconds=20)

everywhere = pytest.mark.usefixtures("zone")


async def test_sessions_are_where_the_suite_says(layout_kit: LayoutKit, zone: str) -> None:
    show = {"postgresql": "SHOW timezone", "mysql": "SELECT @@session.time_zone"}.get(layout_kit.database.backend)
    if show is None:
        assert datetime.now().astimezone().utcoffset() != timedelta(0) or zone == "UTC"
        return
    store = await layout_kit.open()
    with layout_kit.engine.begin() as db:
        seen = {
            db.exec_driver_sql(show).scalar_one(),
            await store.run(lambda db: db.exec_driver_sql(show).scalar_one()),
        }
    is_far = bool(seen & {"America/New_York", "-05:00"})
    assert (len(seen), is_far) == (1, zone == "New York")


# -- putting and claiming ----------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.needs("put")
def test_put_writes_what_the_table_says_of_a_new_row(layout_kit: LayoutKit) -> None:
    placed = layout_kit.event("placed")
    assert layout_kit.put(placed).new == (placed,)
    layout_kit.expect(placed.id, "put")


@everywhere
async def test_row_of_the_other_system_is_claimed_at_once(layout_kit: LayoutKit, mode: Mode) -> None:
    if layout_kit.spec.insert is None:
        layout_kit.add("placed")
    else:
        layout_kit.insert("placed")
    batch = await claim(await layout_kit.open(), mode=mode)
    assert [(each.event.type, each.attempt, each.defect) for each in batch.claims] == [("placed", 1, None)]
    await batch.abandon()


@everywhere
@pytest.mark.needs("put", "schedule")
@pytest.mark.parametrize("given", ["due_at", "delay"])
async def test_scheduled_event_waits_for_its_time(layout_kit: LayoutKit, mode: Mode, given: str) -> None:
    due: dict[str, Any] = {"delay": HOUR} if given == "delay" else {"due_at": datetime.now(UTC) + HOUR}
    row = layout_kit.add("later", **due)
    layout_kit.expect(row, "scheduled")
    store = await layout_kit.open()
    assert names(await claim(store, mode=mode)) == ""
    due_in = await store.next_due()
    assert due_in is not None
    assert HOUR - SECONDS < due_in <= HOUR


@everywhere
@pytest.mark.needs("put", "schedule")
async def test_event_is_claimed_neither_early_nor_late(layout_kit: LayoutKit, mode: Mode) -> None:
    layout_kit.add("soon", due_at=datetime.now(UTC) + SECONDS)
    layout_kit.add("now", due_at=datetime.now(UTC) - SECONDS)
    batch = await claim(await layout_kit.open(), mode=mode)
    assert names(batch) == "now"
    await batch.abandon()


@everywhere
@pytest.mark.needs("lease")
async def test_lease_is_written_into_the_row(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    batch = await claim(await layout_kit.open())
    assert (names(batch), batch.claims[0].attempt) == ("placed", 1)
    layout_kit.expect(row, "leased")


@pytest.mark.needs("hold")
async def test_hold_writes_nothing_before_it_is_settled(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    before = layout_kit.row(row)
    batch = await claim(await layout_kit.open(), mode="hold")
    assert (names(batch), batch.claims[0].attempt, layout_kit.row(row)) == ("placed", 1, before)
    await batch.abandon()
    assert layout_kit.row(row) == before


async def test_claim_takes_at_most_its_limit_and_says_that_more_waits(layout_kit: LayoutKit, mode: Mode) -> None:
    for name in ("one", "two", "three"):
        layout_kit.add(name)
    store = await layout_kit.open()
    first = await claim(store, 2, mode=mode)
    assert (len(first.claims), first.is_full) == (2, True)
    await first.settle([DELIVERED, DELIVERED])
    second = await claim(store, 2, mode=mode)
    assert (len(second.claims), second.is_full) == (1, False)
    await second.settle([DELIVERED])
    assert names(await claim(store, mode=mode)) == ""


@pytest.mark.needs("lease")
async def test_claimers_at_once_never_share_a_row(layout_kit: LayoutKit) -> None:
    for number in range(30):
        layout_kit.add(f"e{number}")
    stores = [await layout_kit.open() for _ in range(3)]
    taken: list[str] = []
    for _ in range(10):
        batches = await asyncio.gather(*(claim(store, 4) for store in stores))
        taken += [each.event.type for batch in batches for each in batch.claims]
        for batch in batches:
            await batch.settle([DELIVERED] * len(batch.claims))
    assert sorted(taken) == sorted(f"e{number}" for number in range(30))


@pytest.mark.needs("hold")
async def test_held_row_is_skipped_by_others(layout_kit: LayoutKit, mode: Mode) -> None:
    # Of two lanes: a hold keeps its own from others.
    layout_kit.add("held", id=UUID(int=1))
    first, second = await layout_kit.open(), await layout_kit.open()
    batch = await claim(first, mode="hold")
    layout_kit.add("free", id=UUID(int=2))
    other = await claim(second, mode=mode)
    assert (names(batch), names(other)) == ("held", "free")
    await batch.abandon()
    await other.abandon()


@pytest.mark.needs("row locks", "parallel")
async def test_row_locked_by_somebody_else_is_skipped(layout_kit: LayoutKit, mode: Mode) -> None:
    locked = layout_kit.add("locked")
    layout_kit.add("free")
    store = await layout_kit.open()
    with layout_kit.locked(locked):
        batch = await claim(store, mode=mode)
        assert names(batch) == "free"
    await batch.settle([DELIVERED])
    batch = await claim(store, mode=mode)
    assert names(batch) == "locked"
    await batch.abandon()


# -- settling ----------------------------------------------------------------------------------------------------------


@everywhere
async def test_delivered_row_is_what_the_table_says(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.add("placed")
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    if mode == "lease":
        layout_kit.expect(row, "leased")
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
    layout_kit.expect(row, "delivered")
    assert names(await claim(store, mode=mode)) == ""


@everywhere
async def test_failed_row_waits_for_its_next_try(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.add("placed")
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    if mode == "lease":
        layout_kit.expect(row, "leased")
    assert await batch.settle([LATER]) == Settlement(retried=1)
    layout_kit.expect(row, "waiting")
    assert names(await claim(store, mode=mode)) == ""
    due_in = await store.next_due()
    assert due_in is not None
    assert HOUR - SECONDS < due_in <= HOUR


@everywhere
async def test_failed_row_is_claimed_again_with_its_attempts_counted(layout_kit: LayoutKit, mode: Mode) -> None:
    layout_kit.add("placed")
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    await batch.settle([Retry("503", timedelta(0))])
    for attempt in (2, 3, 4):
        await layout_kit.look_again()
        batch = await claim(store)
        assert [each.attempt for each in batch.claims] == [attempt]
        await batch.settle([Retry("503", timedelta(0))])


@pytest.mark.needs("hold")
async def test_hold_leaves_tried_rows_to_a_lease(layout_kit: LayoutKit) -> None:
    layout_kit.add("tried")
    store = await layout_kit.open()
    batch = await claim(store, mode="hold")
    await batch.settle([Retry("503", timedelta(0))])
    await layout_kit.look_again()
    batch = await claim(store, mode="hold")
    assert (names(batch), batch.has_tried) == ("", True)
    await batch.abandon()


@everywhere
async def test_dead_row_is_what_the_table_says(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.add("placed")
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    if mode == "lease":
        layout_kit.expect(row, "leased")
    assert await batch.settle([REFUSED]) == Settlement(dead=1)
    layout_kit.expect(row, "dead")
    assert names(await claim(store, mode=mode)) == ""
    assert (await store.counts()).dead == 1


@everywhere
async def test_released_row_is_as_before_its_claim(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.add("placed")
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    if mode == "lease":
        layout_kit.expect(row, "leased")
    assert await batch.settle([RELEASED]) == Settlement(released=1)
    if mode == "lease":
        layout_kit.expect(row, "released")
    await layout_kit.look_again()
    batch = await claim(store, mode=mode)
    assert [(each.event.type, each.attempt) for each in batch.claims] == [("placed", 1)]
    await batch.abandon()


async def test_outcomes_of_one_batch_reach_their_own_rows(layout_kit: LayoutKit, mode: Mode) -> None:
    rows = {name: layout_kit.add(name) for name in ("good", "slow", "bad", "unsent")}
    outcomes: dict[str, Outcome] = {"good": DELIVERED, "slow": LATER, "bad": REFUSED, "unsent": RELEASED}
    batch = await claim(await layout_kit.open(), mode=mode)
    settlement = await batch.settle([outcomes[each.event.type] for each in batch.claims])
    assert settlement == Settlement(delivered=1, retried=1, dead=1, released=1)
    for name, step in {"good": "delivered", "slow": "waiting", "bad": "dead"}.items():
        layout_kit.expect(rows[name], step)


# -- leases ------------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.needs("lease")
async def test_claim_is_not_taken_before_it_lapses(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    first, second = await layout_kit.open(), await layout_kit.open()
    await claim(first)
    await layout_kit.age_claim(row, layout_kit.spec.lease - SECONDS)
    before = layout_kit.row(row)
    assert names(await claim(second)) == ""
    assert layout_kit.row(row) == before


@everywhere
@pytest.mark.needs("lease")
async def test_lapsed_claim_is_taken_with_its_attempt_counted(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    first, second = await layout_kit.open(), await layout_kit.open()
    await claim(first)
    layout_kit.expect(row, "leased")
    await layout_kit.lapse(row)
    batch = await claim(second)
    assert [(each.event.type, each.attempt) for each in batch.claims] == [("placed", 2)]
    layout_kit.expect(row, "leased again")


@pytest.mark.needs("lease", "shared lease")
async def test_shorter_lease_of_a_relay_does_not_take_claims_of_the_other_system(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    first, second = await layout_kit.open(), await layout_kit.open()
    await claim(first)
    await layout_kit.age_claim(row, layout_kit.spec.lease - SECONDS)
    assert names(await claim(second, lease=timedelta(seconds=5))) == ""


@everywhere
@pytest.mark.needs("lease")
async def test_renewed_claim_lasts_for_another_lease(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    first, second = await layout_kit.open(), await layout_kit.open()
    batch = await claim(first)
    layout_kit.expect(row, "leased")
    await layout_kit.age_claim(row, layout_kit.spec.lease - SECONDS)
    assert await batch.renew(layout_kit.spec.lease) == []
    layout_kit.expect(row, "leased")
    assert names(await claim(second)) == ""
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


@pytest.mark.needs("lease")
@pytest.mark.parametrize("outcome", [DELIVERED, LATER, REFUSED, RELEASED], ids=lambda outcome: type(outcome).__name__)
async def test_settling_a_lost_claim_changes_nothing(layout_kit: LayoutKit, outcome: Any) -> None:
    row = layout_kit.add("placed")
    first, second = await layout_kit.open(), await layout_kit.open()
    late = await claim(first)
    await layout_kit.lapse(row)
    batch = await claim(second)
    before = [layout_kit.row(row, role) for role in layout_kit.spec.find]
    assert await late.settle([outcome]) == Settlement(lost=1)
    assert [layout_kit.row(row, role) for role in layout_kit.spec.find] == before
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


@pytest.mark.needs("lease")
async def test_renewing_a_lost_claim_changes_nothing_and_says_so(layout_kit: LayoutKit) -> None:
    lost, kept = layout_kit.add("lost"), layout_kit.add("kept")
    first, second = await layout_kit.open(), await layout_kit.open()
    late = await claim(first)
    assert sorted(each.event.type for each in late.claims) == ["kept", "lost"]
    await layout_kit.lapse(lost)
    batch = await claim(second)
    assert names(batch) == "lost"
    before = [layout_kit.row(lost, role) for role in layout_kit.spec.find]
    await layout_kit.age_claim(kept, layout_kit.spec.lease - SECONDS)
    assert names(await late.renew(layout_kit.spec.lease)) == "lost"
    assert [layout_kit.row(lost, role) for role in layout_kit.spec.find] == before
    layout_kit.expect(kept, "leased")


@pytest.mark.needs("lease")
async def test_claim_of_ours_that_lapsed_and_was_taken_again_by_ourselves_is_another_one(
    layout_kit: LayoutKit,
) -> None:
    row = layout_kit.add("placed")
    store = await layout_kit.open()
    first = await claim(store)
    await layout_kit.lapse(row)
    second = await claim(store)
    assert await first.settle([DELIVERED]) == Settlement(lost=1)
    assert await second.settle([DELIVERED]) == Settlement(delivered=1)


@everywhere
@pytest.mark.needs("lease")
async def test_crash_on_the_last_attempt_does_not_strand_the_row(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    most = 1
    if layout_kit.spec.last_try:
        layout_kit.execute(layout_kit.spec.last_try, id=row)
        most = 20  # what the row says of itself rules
    first, second = await layout_kit.open(), await layout_kit.open()
    await claim(first, max_attempts=most)
    await layout_kit.lapse(row)
    assert names(await claim(second, max_attempts=most)) == ""
    layout_kit.expect(row, "buried")
    assert (await second.counts()).dead == 1


# -- what operators do -------------------------------------------------------------------------------------------------


async def bury(layout_kit: LayoutKit, *rows: str) -> list[Any]:
    added = [layout_kit.add(name) for name in rows]
    store = await layout_kit.open()
    batch = await claim(store)
    assert await batch.settle([REFUSED] * len(rows)) == Settlement(dead=len(rows))
    return added


async def deliver(layout_kit: LayoutKit, *rows: str) -> list[Any]:
    added = [layout_kit.add(name) for name in rows]
    store = await layout_kit.open()
    batch = await claim(store)
    assert await batch.settle([DELIVERED] * len(rows)) == Settlement(delivered=len(rows))
    return added


@everywhere
async def test_redriven_row_is_as_new(layout_kit: LayoutKit) -> None:
    [row] = await bury(layout_kit, "placed")
    layout_kit.expect(row, "dead")
    store = await layout_kit.open()
    assert await store.redrive(EVERYTHING, actor="ann", dry_run=True) == 1
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    layout_kit.expect(row, "redriven")
    batch = await claim(store)
    assert [(each.event.type, each.attempt) for each in batch.claims] == [("placed", 1)]
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
    assert await store.redrive(EVERYTHING, actor="ann") == 0


async def test_redrive_leaves_rows_alone_that_are_not_dead(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    before = layout_kit.row(row)
    assert await (await layout_kit.open()).redrive(EVERYTHING, actor="ann") == 0
    assert layout_kit.row(row) == before


async def test_dropped_row_is_gone(layout_kit: LayoutKit) -> None:
    [row] = await bury(layout_kit, "placed")
    other = layout_kit.add("other")
    store = await layout_kit.open()
    assert await store.drop(EVERYTHING, actor="ann") == 1
    assert [layout_kit.row(row, role) for role in layout_kit.spec.find] == [None for _ in layout_kit.spec.find]
    assert layout_kit.row(other) is not None
    assert (await store.counts()).dead == 0


@everywhere
@pytest.mark.needs("replay")
async def test_replayed_row_is_as_new(layout_kit: LayoutKit) -> None:
    [row] = await deliver(layout_kit, "placed")
    layout_kit.expect(row, "delivered")
    store = await layout_kit.open()
    assert await store.replay(EVERYTHING, actor="ann") == 1
    layout_kit.expect(row, "replayed")
    batch = await claim(store)
    assert [(each.event.type, each.attempt) for each in batch.claims] == [("placed", 1)]
    assert batch.claims[0].event.headers["pillarbox-late"] == "true"
    await batch.settle([DELIVERED])
    layout_kit.expect(row, "delivered")


@everywhere
@pytest.mark.needs("put", "cancel")
async def test_cancelled_row_is_gone_unless_somebody_holds_it(layout_kit: LayoutKit) -> None:
    held, free = layout_kit.event("held"), layout_kit.event("free", delay=HOUR)
    layout_kit.put(held, free)
    await claim(await layout_kit.open())
    with layout_kit.engine.begin() as db:
        assert layout_kit.outbox.cancel(db, held.id, free.id) == 1
    assert layout_kit.row(free.id) is None
    layout_kit.expect(held.id, "leased")


@everywhere
@pytest.mark.needs("put", "cancel")
async def test_rescheduled_row_waits_for_its_new_time(layout_kit: LayoutKit) -> None:
    held = layout_kit.event("held")
    layout_kit.put(held)
    store = await layout_kit.open()
    await claim(store)
    free = layout_kit.event("free")
    layout_kit.put(free)
    layout_kit.expect(free.id, "put")
    with layout_kit.engine.begin() as db:
        assert layout_kit.outbox.reschedule(db, held.id, free.id, due_at=datetime.now(UTC) + HOUR) == 1
    layout_kit.expect(free.id, "rescheduled")
    layout_kit.expect(held.id, "leased")
    assert names(await claim(store)) == ""
    with layout_kit.engine.begin() as db:
        assert layout_kit.outbox.reschedule(db, free.id, due_at=datetime.now(UTC) - SECONDS) == 1
    await layout_kit.look_again()
    assert names(await claim(store)) == "free"


@everywhere
@pytest.mark.needs("retention")
async def test_prune_deletes_old_rows_in_batches_and_never_pending_ones(layout_kit: LayoutKit) -> None:
    delivered = await deliver(layout_kit, "d1", "d2", "d3", "d4", "d5")
    dead = await bury(layout_kit, "x1", "x2")
    pending = layout_kit.add("pending")
    store = await layout_kit.open()
    layout_kit.age_ends(3600 - 20)
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR) == Pruned()
    layout_kit.age_ends(40)
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR, dry_run=True) == Pruned(5, 2)
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR, dry_run=True) == Pruned(5, 2)
    assert await store.run(lambda db: store.operations.prune(db, "delivered", HOUR, 2, False)) == 2
    assert sum(layout_kit.is_there(row) for row in delivered) == 3
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR, batch=2) == Pruned(3, 2)
    assert not any(layout_kit.is_there(row) for row in (*delivered, *dead))
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR, dry_run=True) == Pruned()
    assert await store.prune(delivered_age=timedelta(0), dead_age=timedelta(0)) == Pruned()
    assert layout_kit.row(pending) is not None


@everywhere
@pytest.mark.needs("parallel")
async def test_counts_tell_every_part_of_life(layout_kit: LayoutKit) -> None:
    for name in ("good", "slow", "slow", "bad", "bad", "bad"):
        layout_kit.add(name)
    outcomes: dict[str, Outcome] = {"good": DELIVERED, "slow": LATER, "bad": REFUSED}
    store = await layout_kit.open()
    assert await counted(store) == Counts(new=6)
    batch = await claim(store)
    await batch.settle([outcomes[each.event.type] for each in batch.claims])
    for _ in range(4):
        layout_kit.add("held")
    await claim(store)
    for _ in range(5):
        layout_kit.add("new")
    kept = 1 if "retention" in layout_kit.spec.features else 0
    scheduled = 0
    if {"put", "schedule"} <= layout_kit.spec.features:
        layout_kit.add("scheduled", delay=HOUR)
        scheduled = 1
    expected = Counts(new=5, retrying=2, held=4, scheduled=scheduled, delivered=kept, dead=3)
    assert await counted(store) == expected


async def counted(store: Any) -> Counts:
    """The counts without the age."""
    found = await store.counts()
    return Counts(found.new, found.retrying, found.held, found.scheduled, found.blocked, found.delivered, found.dead)


@everywhere
@pytest.mark.needs("retention")
async def test_oldest_age_is_that_of_the_oldest_undelivered_row(layout_kit: LayoutKit) -> None:
    store = await layout_kit.open()
    assert (await store.counts()).oldest_pending is None
    [delivered] = await deliver(layout_kit, "delivered")
    oldest = layout_kit.add("oldest")
    layout_kit.add("newest")
    created = layout_kit.outbox.layout.created
    for row, seconds in ((oldest, 60), (delivered, 9000)):
        moved = f"UPDATE {{outbox}} SET {created} = {{back[{created}]}} WHERE {layout_kit.spec.find['outbox']}"
        layout_kit.execute(moved, id=row, seconds=seconds)
    age = (await store.counts()).oldest_pending
    assert age is not None
    assert timedelta(seconds=60) <= age < timedelta(seconds=90)


@everywhere
@pytest.mark.needs("retention")
async def test_times_of_a_filter_bound_when_a_row_died_or_was_delivered(layout_kit: LayoutKit) -> None:
    await bury(layout_kit, "dead")
    await deliver(layout_kit, "delivered")
    store = await layout_kit.open()
    layout_kit.age_ends(7200)
    before, after = datetime.now(UTC) - HOUR, datetime.now(UTC) - 3 * HOUR
    assert len(await store.events(Filter(since=after, until=before))) == 2
    assert await store.events(Filter(since=before)) == []
    assert await store.events(Filter(until=after)) == []
    assert await store.redrive(Filter(since=before), actor="ann") == 0
    assert await store.redrive(Filter(since=after, until=before), actor="ann") == 1


# -- through a relay ---------------------------------------------------------------------------------------------------


@everywhere
async def test_relay_delivers_every_row(layout_kit: LayoutKit) -> None:
    for number in range(25):
        layout_kit.add(f"e{number}")
    sink = MemorySink()
    async with Relay(await layout_kit.open(), sink, batch_size=10) as relay:
        remaining = await relay.drain()
    assert sorted(each.event.type for each in sink.claims) == sorted(f"e{number}" for number in range(25))
    assert (remaining.new, remaining.held, remaining.retrying, remaining.dead) == (0, 0, 0, 0)
