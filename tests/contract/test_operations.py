"""What operators do, on every database: count, list, redrive, drop, replay, prune, and the audit of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pillarbox.event import DELIVERED, LATE_HEADER, Dead, Event, Retry
from pillarbox.stores import Counts, Filter, Pruned, Record, State, Store
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

MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
LATER = Retry("503 from the destination", HOUR)
ALONE: tuple[State, ...] = ("ready", "leased", "scheduled", "blocked", "dead", "delivered")


async def kill(store: Store, *errors: str, park: bool = True) -> None:
    """Let the first events die, one of each error."""
    batch = await claim(store, len(errors))
    await batch.settle([Dead(error) for error in errors], park=park)


def listed(records: Any) -> str:
    return " ".join(record.event.type for record in records)


async def seqs(store: Store) -> dict[str, int]:
    return {record.event.type: record.seq for record in await store.events(EVERYTHING)}


async def put_dead(kit: Kit, store: Store, *dead: Event, error: str = "400", park: bool = True) -> None:
    kit.put(*dead)
    await kill(store, *[error] * len(dead), park=park)


# -- counting ----------------------------------------------------------------------------------------------------


async def test_empty_store_counts_nothing(store: Store) -> None:
    assert await store.counts() == Counts()


async def test_each_event_is_counted_once(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(*events("sent also-sent flaky bad held"), event("b1", "b"), event("b2", "b"))
    batch = await claim(store, 6)
    assert names(batch) == "sent also-sent flaky bad held b1"
    await (await claim(store)).abandon()  # finds b2 behind b1
    # One batch is settled as a whole, so what is to stay held is claimed again.
    await batch.settle([DELIVERED, DELIVERED, LATER, Dead("400"), LATER, LATER])
    kit.put(event("late", delay=HOUR), event("new"), event("newer"), event("newest"))
    held = await claim(store, 1)
    assert names(held) == "new"
    counts = await store.counts()
    assert counts.oldest_pending is not None
    assert timedelta(0) <= counts.oldest_pending < MINUTE
    assert counts == Counts(
        new=2,
        retrying=3,
        held=1,
        scheduled=1,
        blocked=1,
        delivered=2,
        dead=1,
        oldest_pending=counts.oldest_pending,
    )


async def test_event_whose_retry_is_due_still_counts_as_retrying(kit: Kit, store: Store) -> None:
    kit.put(*events("one two", "k"))
    await (await claim(store, 1)).settle([LATER])
    await kit.pass_time(HOUR + SECOND)
    batch = await claim(store)
    await batch.settle([Retry("503", timedelta(0)), Retry("503", timedelta(0))])
    await kit.pass_time(SECOND)
    await (await claim(store)).abandon()
    counts = await store.counts()
    assert (counts.new, counts.retrying) == (0, 2)


async def test_age_is_that_of_the_oldest_undelivered_event(kit: Kit) -> None:
    store = await kit.open(retention=100 * HOUR)
    kit.put(event("sent"))
    assert await deliver(store) == "sent"
    await kit.pass_time(2 * HOUR)
    assert (await store.counts()).oldest_pending is None
    kit.put(event("old", delay=10 * HOUR))
    await kit.pass_time(HOUR)
    kit.put(event("young"))
    age = (await store.counts()).oldest_pending
    assert age is not None
    assert HOUR <= age < HOUR + MINUTE


# -- listing -----------------------------------------------------------------------------------------------------


async def test_newest_events_are_listed_first_with_their_state(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(*events("sent flaky bad held"), event("a1", "a"), event("a2", "a"))
    batch = await claim(store, 5)
    await (await claim(store)).abandon()
    await batch.settle([DELIVERED, LATER, Dead("400"), LATER, LATER])
    kit.put(event("late", delay=HOUR), event("held-2"), event("new"))
    await claim(store, 1)
    assert await states(store) == {
        "sent": "delivered",
        "flaky": "waiting",
        "bad": "dead",
        "held": "waiting",
        "a1": "waiting",
        "a2": "blocked",
        "late": "scheduled",
        "held-2": "leased",
        "new": "ready",
    }
    found = await store.events(EVERYTHING)
    assert listed(found) == "new held-2 late a2 a1 held bad flaky sent"
    assert listed(await store.events(EVERYTHING, limit=2)) == "new held-2"
    for state in ALONE:
        assert [record.state for record in await store.events(EVERYTHING, state=state)] == [state]
    assert listed(await store.events(EVERYTHING, state="waiting")) == "a1 held flaky"


async def test_record_says_what_became_of_its_event(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    moment = kit.now()
    kit.put(event("sent", "a"), event("flaky", "b"), event("bad", "c"))
    await (await claim(store)).settle([DELIVERED, LATER, Dead("400 from the destination")])
    bad, flaky, sent = await store.events(EVERYTHING)
    assert (sent.attempts, sent.error, sent.until_at, sent.died_at, sent.parks) == (1, None, None, None, False)
    assert sent.delivered_at is not None
    assert abs(sent.delivered_at - moment) < MINUTE
    assert (flaky.attempts, flaky.error) == (1, "503 from the destination")
    assert flaky.until_at is not None
    assert abs(flaky.until_at - (moment + HOUR)) < MINUTE
    assert (bad.attempts, bad.error, bad.delivered_at, bad.parks) == (1, "400 from the destination", None, True)
    assert bad.died_at is not None
    assert abs(bad.died_at - moment) < MINUTE
    assert sent.seq < flaky.seq < bad.seq


@pytest.fixture
async def filtered(kit: Kit, store: Store) -> Store:
    """Four dead events and two ready ones that differ in what a filter can name."""
    kit.put(
        Event("order.placed", {}, topic="orders", key="o-1", headers={"name": "one"}),
        Event("order.placed", {}, topic="orders", key="o-2", headers={"name": "two"}),
        Event("order.shipped", {}, topic="shipping", key="o-1b", headers={"name": "three"}),
        Event("mail.sent", {}, topic="mails", headers={"name": "four"}),
    )
    batch = await claim(store)
    errors = ["timeout after 100 % of 5_000 ms", "timeout after 100 ms, 5x000", "410 Gone", "back\\slash"]
    await batch.settle([Dead(error) for error in errors])
    kit.put(
        Event("order.placed", {}, topic="orders", key="o-3", headers={"name": "five"}),
        Event("mail.sent", {}, topic="mails", headers={"name": "six"}),
    )
    return store


async def find(store: Store, where: Filter, **options: Any) -> set[str]:
    return {record.event.headers["name"] for record in await store.events(where, **options)}


async def test_filter_by_key(filtered: Store) -> None:
    assert await find(filtered, Filter(key="o-1")) == {"one"}
    assert await find(filtered, Filter(key="O-1")) == set()


async def test_filter_by_topic(filtered: Store) -> None:
    assert await find(filtered, Filter(topic="orders")) == {"one", "two", "five"}
    assert await find(filtered, Filter(topic="orders"), state="dead") == {"one", "two"}


async def test_filter_by_type(filtered: Store) -> None:
    assert await find(filtered, Filter(type="mail.sent")) == {"four", "six"}


async def test_filter_by_id(filtered: Store) -> None:
    records: list[Record] = list(await filtered.events(EVERYTHING))
    chosen = [record.event.id for record in records if record.event.headers["name"] in ("two", "six")]
    assert await find(filtered, Filter(chosen)) == {"two", "six"}


async def test_conditions_of_a_filter_all_hold(filtered: Store) -> None:
    assert await find(filtered, Filter(topic="orders", key="o-2", error="timeout")) == {"two"}
    assert await find(filtered, Filter(topic="mails", key="o-2")) == set()


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("timeout", {"one", "two"}),
        ("100 %", {"one"}),
        ("5_000", {"one"}),
        ("_", {"one"}),
        ("%", {"one"}),
        ("Gone", {"three"}),
        ("gone", set()),
        ("back\\slash", {"four"}),
        ("\\", {"four"}),
        ("/", set()),
    ],
)
async def test_filter_by_a_part_of_the_error_taken_literally(filtered: Store, part: str, found: set[str]) -> None:
    assert await find(filtered, Filter(error=part)) == found


async def test_filter_by_time_of_death_of_delivery_or_of_putting(kit: Kit) -> None:
    store = await kit.open(retention=100 * HOUR)
    kit.put(*events("sent bad"))
    await kit.pass_time(2 * HOUR)
    await (await claim(store)).settle([DELIVERED, Dead("400")])
    await kit.pass_time(2 * HOUR)
    kit.put(event("new"))
    moment = kit.now()
    since = Filter(since=moment - 3 * HOUR)
    until = Filter(until=moment - HOUR)
    assert listed(await store.events(since)) == "new bad sent"
    assert listed(await store.events(until)) == "bad sent"
    assert listed(await store.events(Filter(since=moment - HOUR))) == "new"
    # The times of putting of these two were four hours ago, but that is not when they died or were delivered.
    assert listed(await store.events(Filter(until=moment - 3 * HOUR))) == ""


# -- redriving ---------------------------------------------------------------------------------------------------


async def test_redriven_event_keeps_its_place_and_starts_afresh(kit: Kit, store: Store) -> None:
    kit.put(*events("one two three", "k"))
    before = await seqs(store)
    await (await claim(store, 1)).settle([LATER])
    await kit.pass_time(HOUR + SECOND)
    await kill(store, "400")
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    assert await seqs(store) == before
    (one,) = [record for record in await store.events(EVERYTHING) if record.event.type == "one"]
    assert (one.state, one.attempts, one.error) == ("ready", 0, None)
    batch = await claim(store)
    assert names(batch) == "one two three"
    assert batch.claims[0].attempt == 1


async def test_redriven_event_that_nobody_overtook_is_not_late(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("keyed", "k", headers={"tenant": "acme"}), event("keyless"))
    assert await store.redrive(EVERYTHING, actor="ann") == 2
    keyed, keyless = (await claim(store)).claims
    assert dict(keyed.event.headers) == {"tenant": "acme"}
    # Without a key there is no order in which anybody could overtake it.
    assert dict(keyless.event.headers) == {}


async def test_redriven_event_that_was_overtaken_says_that_it_is_late(kit: Kit, store: Store) -> None:
    one, two = event("one", "k", headers={"tenant": "acme"}), event("two", "k")
    await put_dead(kit, store, one, park=False)
    kit.put(two)
    assert await deliver(store) == "two"
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    (late,) = (await claim(store)).claims
    assert dict(late.event.headers) == {"tenant": "acme", LATE_HEADER: "true"}


async def test_redrive_takes_the_oldest_that_match_up_to_its_limit(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("a1", "a"), event("b1", "b"), event("a2", "c"), event("c1", "d"))
    kit.put(event("alive", "z"))
    assert await store.redrive(EVERYTHING, actor="ann", limit=2) == 2
    found = await states(store)
    assert [name for name in found if found[name] == "ready"] == ["alive", "b1", "a1"]
    assert await store.redrive(Filter(type="c1"), actor="ann", limit=2) == 1
    assert (await states(store))["a2"] == "dead"


async def test_dry_run_changes_nothing(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    await put_dead(kit, store, event("a1", "a"), event("b1", "b"))
    kit.put(event("sent"))
    await deliver(store)
    before = await states(store)
    assert await store.redrive(EVERYTHING, actor="ann", dry_run=True) == 2
    assert await store.redrive(EVERYTHING, actor="ann", dry_run=True, limit=1) == 1
    assert await store.drop(Filter(key="a"), actor="ann", dry_run=True) == 1
    assert await store.replay(EVERYTHING, actor="ann", dry_run=True) == 1
    await kit.pass_time(2 * HOUR)
    pruned = await store.prune(delivered_age=HOUR, dead_age=HOUR, actor="ann", dry_run=True)
    assert pruned == Pruned(delivered=1, dead=2)
    assert await states(store) == before
    assert list(await store.audit()) == []


async def test_many_events_are_redriven_at_once(kit: Kit, store: Store) -> None:
    dead = [event(f"e{number}", f"k{number}") for number in range(600)]
    kit.put(*dead)
    while (batch := await claim(store, 400)).claims:
        await batch.settle([Dead("400")] * len(batch.claims))
    assert await store.redrive(EVERYTHING, actor="ann") == 600
    counts = await store.counts()
    assert (counts.new, counts.dead) == (600, 0)


async def test_event_whose_dedup_key_lives_again_is_not_redriven(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("old", dedup_key="reminder-7"))
    kit.put(event("new", dedup_key="reminder-7"))
    assert await store.redrive(EVERYTHING, actor="ann") == 0
    assert await store.redrive(EVERYTHING, actor="ann", dry_run=True) == 0
    assert await states(store) == {"old": "dead", "new": "ready"}
    assert await deliver(store) == "new"
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    assert kit.put(event("newer", dedup_key="reminder-7")).new == ()


async def test_of_dead_events_with_one_dedup_key_one_is_redriven(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("first", dedup_key="reminder-7"))
    await put_dead(kit, store, event("second", dedup_key="reminder-7"))
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    assert await states(store) == {"first": "ready", "second": "dead"}


async def test_event_put_again_with_its_old_id_is_not_redriven_beside_it(kit: Kit, store: Store) -> None:
    first = event("first")
    await put_dead(kit, store, first)
    kit.put(event("again", id=first.id))
    assert await store.redrive(EVERYTHING, actor="ann") == 0
    assert await deliver(store) == "again"


# -- dropping ----------------------------------------------------------------------------------------------------


async def test_dropped_event_is_gone(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("a1", "a"), event("b1", "b"))
    kit.put(event("alive"))
    assert await store.drop(Filter(key="a"), actor="ann") == 1
    assert await states(store) == {"b1": "dead", "alive": "ready"}
    assert await store.redrive(Filter(key="a"), actor="ann") == 0


async def test_drop_takes_no_event_that_is_not_dead(kit: Kit, store: Store) -> None:
    kit.put(*events("ready held"), event("late", delay=HOUR))
    await claim(store, 1)
    assert await store.drop(EVERYTHING, actor="ann") == 0
    assert len(await states(store)) == 3


# -- replaying ---------------------------------------------------------------------------------------------------


async def test_replayed_event_is_delivered_again_and_says_that_it_is_late(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(event("one", "k", headers={"tenant": "acme"}), event("two", "k"))
    assert await deliver(store) == "one two"
    assert await store.replay(Filter(type="one"), actor="ann") == 1
    batch = await claim(store)
    (again,) = batch.claims
    assert (again.event.type, again.attempt) == ("one", 1)
    assert dict(again.event.headers) == {"tenant": "acme", LATE_HEADER: "true"}
    await batch.settle([DELIVERED])
    assert await states(store) == {"one": "delivered", "two": "delivered"}


async def test_replay_takes_the_oldest_retained_events_only(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(*events("one two three bad"))
    batch = await claim(store)
    await batch.settle([DELIVERED, DELIVERED, DELIVERED, Dead("400")])
    kit.put(event("new"))
    assert await store.replay(EVERYTHING, actor="ann", limit=2) == 2
    assert await deliver(store) == "one two new"
    assert (await store.counts()).dead == 1


async def test_replayed_event_waits_while_its_key_is_in_flight(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(event("one", "k"))
    await deliver(store)
    kit.put(event("two", "k"))
    batch = await claim(store)
    await store.replay(EVERYTHING, actor="ann")
    assert names(await claim(store)) == ""
    await batch.settle([DELIVERED])
    assert await deliver(store) == "one"


# -- pruning -----------------------------------------------------------------------------------------------------


async def put_old_and_young(kit: Kit, store: Store) -> None:
    """Delivered and dead events of two ages, and one pending event of each kind, all older than an hour."""
    kit.put(*events("old-sent old-bad"), event("r1", "r"), event("r2", "r"), event("late", delay=9 * HOUR))
    batch = await claim(store, 3)
    await (await claim(store)).abandon()
    await batch.settle([DELIVERED, Dead("400"), Retry("503", 9 * HOUR)])
    kit.put(event("held"), event("ready"))
    await claim(store, 1, lease=9 * HOUR)
    await kit.pass_time(2 * HOUR)
    kit.put(*events("young-sent young-bad"))
    young = await claim(store, 3)
    assert names(young) == "ready young-sent young-bad"
    await young.settle([Retry("503", 9 * HOUR), DELIVERED, Dead("400")])


PENDING = {"r1": "waiting", "r2": "blocked", "late": "scheduled", "held": "leased", "ready": "waiting"}


async def test_prune_deletes_delivered_and_dead_events_by_their_ages(kit: Kit) -> None:
    store = await kit.open(retention=100 * HOUR)
    await put_old_and_young(kit, store)
    assert await store.prune(delivered_age=HOUR) == Pruned(delivered=1)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert await states(store) == {**PENDING, "young-sent": "delivered", "young-bad": "dead"}
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR) == Pruned()


async def test_prune_never_deletes_a_pending_event(kit: Kit) -> None:
    store = await kit.open(retention=100 * HOUR)
    await put_old_and_young(kit, store)
    await kit.pass_time(SECOND)
    pruned = await store.prune(delivered_age=timedelta(0), dead_age=timedelta(0))
    assert pruned == Pruned(delivered=2, dead=2)
    assert await states(store) == PENDING


async def test_prune_without_an_age_deletes_nothing(kit: Kit) -> None:
    store = await kit.open(retention=100 * HOUR)
    await put_old_and_young(kit, store)
    before = await states(store)
    assert await store.prune() == Pruned()
    assert await states(store) == before


async def test_prune_works_in_batches_until_all_is_done(kit: Kit) -> None:
    store = await kit.open(retention=100 * HOUR)
    kit.put(*(event(f"e{number}") for number in range(25)))
    await deliver(store)
    await put_dead(kit, store, *(event(f"d{number}") for number in range(12)))
    await kit.pass_time(2 * HOUR)
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR, batch=10) == Pruned(delivered=25, dead=12)
    assert await states(store) == {}


# -- the audit ---------------------------------------------------------------------------------------------------


async def test_audit_says_who_did_what_to_how_many(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    moment = kit.now()
    await put_dead(kit, store, event("a1", "a"), event("a2", "b"), event("a3", "c"))
    kit.put(event("sent"))
    await deliver(store)
    (sent,) = await store.events(EVERYTHING, state="delivered")
    assert await store.redrive(Filter(key="a", error="400"), actor="ann") == 1
    assert await store.drop(Filter(type="a2"), actor="bob@example.org") == 1
    assert await store.replay(Filter([sent.event.id]), actor="Çelik") == 1
    await kit.pass_time(2 * HOUR)
    assert await store.prune(dead_age=HOUR, actor="cron") == Pruned(dead=1)
    entries = await store.audit()
    assert [(entry.actor, entry.action, entry.events) for entry in entries] == [
        ("cron", "prune", 1),
        ("Çelik", "replay", 1),
        ("bob@example.org", "drop", 1),
        ("ann", "redrive", 1),
    ]
    assert entries[3].detail == {"key": "a", "error": "400"}
    assert entries[2].detail == {"type": "a2"}
    assert entries[1].detail == {"ids": [str(sent.event.id)]}
    assert entries[0].detail["dead_age"] == "1:00:00"
    assert abs(entries[0].at - kit.now()) < MINUTE
    assert abs(entries[3].at - moment) < 3 * HOUR
    assert [entry.action for entry in await store.audit(limit=1)] == ["prune"]


async def test_action_that_changed_nothing_leaves_no_line(kit: Kit, store: Store) -> None:
    kit.put(event("alive"))
    assert await store.redrive(EVERYTHING, actor="ann") == 0
    assert await store.drop(EVERYTHING, actor="ann") == 0
    assert await store.replay(EVERYTHING, actor="ann") == 0
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR, actor="ann") == Pruned()
    assert list(await store.audit()) == []


async def test_housekeeping_without_an_actor_leaves_no_line(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("bad"))
    await kit.pass_time(2 * HOUR)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert list(await store.audit()) == []


async def test_what_an_operator_did_is_undone_when_it_fails(kit: Kit, store: Store) -> None:
    await put_dead(kit, store, event("bad"))
    if not isinstance(kit, SqlKit):
        return
    kit.execute("ALTER TABLE {audit} RENAME TO {audit}_away")
    try:
        with pytest.raises(Exception, match="audit"):
            await store.drop(EVERYTHING, actor="ann")
    finally:
        kit.execute("ALTER TABLE {audit}_away RENAME TO {audit}")
    assert await states(store) == {"bad": "dead"}
