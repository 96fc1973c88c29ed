"""Any history of puts, claims, settlements, crashes and operators' actions keeps the promises.

A small model in plain Python follows two relays on one table. It does not predict which lanes a claim gets, but it
knows what a claim may take and, because the stores under test latch all lanes, what it must take. Time passes in hours
and never by itself: leases of ninety minutes lapse after the second.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pillarbox.event import DELIVERED, RELEASED, Dead, Event, Outcome, Retry
from pillarbox.stores import Batch, Counts, Filter, Mode, Settlement
from tests.contract.stores import Database, SqlKit, make_database, until

HOUR = timedelta(hours=1)
LEASE = timedelta(minutes=90)
MAX_ATTEMPTS = 3
EVERYTHING = Filter()
OUTCOMES: dict[str, Outcome] = {
    "delivered": DELIVERED,
    "dead": Dead("400"),
    "retry 0": Retry("503", timedelta(0)),
    "retry 2": Retry("503", 2 * HOUR),
    "released": RELEASED,
}


@dataclass(eq=False, repr=False)
class Row:
    """What the model knows of one committed event; `state` is ready, timed, claimed, dead or gone."""

    number: int
    event: Event
    state: str = "ready"
    due: float = 0.0
    """When a timed row is ready; one that was tried blocks its key until then."""
    attempts: int = 0
    is_tried: bool = False
    parks: bool = False
    may_be_late: bool = False
    """Whether others of its key may pass: it is scheduled, or was skipped when it died."""
    holder: Open | None = None
    expires: float = 0.0
    deliveries: int = 0

    def __repr__(self) -> str:
        due = f" at {self.due}" if self.state == "timed" else ""
        return f"<{self.number} of {self.key}: {self.state}{due}, attempts {self.attempts}>"

    @property
    def key(self) -> str | None:
        return self.event.key

    @property
    def is_live(self) -> bool:
        return self.state not in ("dead", "gone")


@dataclass(eq=False, repr=False)
class Open:
    """A batch that a relay has not settled; the model's own view of it."""

    batch: Batch
    rows: list[Row]
    mode: Mode = field(init=False)

    def __post_init__(self) -> None:
        self.mode = self.batch.mode

    def __repr__(self) -> str:
        return f"<{self.mode} of {[row.number for row in self.rows]}>"


class Relays(RuleBasedStateMachine):
    """Two relays and an application on one database."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.kit = SqlKit(database)
        self.stores = [self.runner.run(self.kit.open()) for _ in range(2)]
        self.rows: list[Row] = []
        self.rolled_back: set[Any] = set()
        self.open: list[Open] = []
        self.now = 0.0
        self.delivered: dict[str | None, list[int]] = {}

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.runner.run(self.kit.close())
            self.runner.close()

    # -- the application ---------------------------------------------------------------------------------------------

    @rule(
        parts=st.lists(
            st.tuples(
                st.sampled_from(["a", "a", "b", None]), st.sampled_from([0, 0, 1, 2]), st.sampled_from([None, "x"])
            ),
            min_size=1,
            max_size=4,
        ),
        commits=st.sampled_from([True, True, True, False]),
    )
    def put(self, parts: list[tuple[str | None, int, str | None]], commits: bool) -> None:
        events = [
            Event(f"e{len(self.rows) + index}", {}, key=key, dedup_key=dedup, delay=hours * HOUR if hours else None)
            for index, (key, hours, dedup) in enumerate(parts)
        ]
        taken = {row.event.dedup_key for row in self.rows if row.is_live} - {None}
        expected: list[Event] = []
        for event in events:
            if event.dedup_key not in taken:
                expected.append(event)
                taken |= {event.dedup_key} - {None}
        try:
            with self.kit.transaction() as put:
                assert list(put(*events).new) == expected
                if not commits:
                    raise Interrupted
        except Interrupted:
            self.rolled_back |= {event.id for event in events}
            return
        for event in expected:
            row = Row(len(self.rows), event)
            if event.delay:
                row.state, row.due, row.may_be_late = "timed", self.now + event.delay / HOUR, True
            self.rows.append(row)

    @precondition(lambda self: any(row.is_live for row in self.rows))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [row for row in self.rows if row.is_live]
        row = live[data.draw(st.integers(0, len(live) - 1))]
        cancelled = self.kit.cancel(row.event.id)
        is_free = row.state in ("ready", "timed")
        # A hold also locks rows that it looks at and does not take.
        is_doubtful = is_free and any(each.mode == "hold" for each in self.open)
        assert cancelled == int(is_free) or is_doubtful
        if cancelled:
            row.state = "gone"

    # -- relays ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(row.is_live for row in self.rows))
    @rule(relay=st.integers(0, 1), limit=st.sampled_from([1, 3, 100]), mode=st.sampled_from(["lease", "hold"]))
    def claim(self, relay: int, limit: int, mode: Mode) -> None:
        store = self.stores[relay]
        if mode not in store.modes:
            mode = "lease"
        self.runner.run(store.next_due())  # look at the clock again, however soon this claim comes
        batch = self.runner.run(store.claim(limit, mode=mode, lease=LEASE, max_attempts=MAX_ATTEMPTS))
        self.wake()
        by_id = {row.event.id: row for row in self.rows}
        assert not {claim.event.id for claim in batch.claims} & self.rolled_back
        taken = [by_id[claim.event.id] for claim in batch.claims]
        certain, possible = self.claimable(mode)
        assert [row.number for row in taken] == sorted(row.number for row in taken)
        assert len(taken) <= limit
        assert set(taken) <= set(possible), self.explain(taken, possible)
        leaves_some = batch.is_full or batch.has_tried or any(each.mode == "hold" for each in self.open)
        if not leaves_some:
            assert set(certain) <= set(taken), self.explain(taken, certain)
        self.check_nobody_passed(taken)
        for row, claim in zip(taken, batch.claims, strict=True):
            assert claim.attempt == row.attempts + 1
        self.take(Open(batch, taken))

    def check_nobody_passed(self, taken: list[Row]) -> None:
        """Whoever is claimed comes after all earlier ready ones of its key, and those are in the same batch."""
        for row in taken:
            earlier = [each for each in self.rows if each.key == row.key and each.number < row.number]
            if row.key is not None:
                assert not [each.number for each in earlier if each.state == "ready" and each not in taken]

    def take(self, opened: Open) -> None:
        if not opened.rows:
            return
        self.open.append(opened)
        for row in opened.rows:
            row.state, row.holder = "claimed", opened
            if opened.mode == "lease":
                row.attempts += 1
                row.expires = self.now + LEASE / HOUR

    def wake(self) -> None:
        """What time has done by now: every claim looks at the clock first."""
        for row in self.rows:
            if row.state == "claimed" and row.holder is not None and row.holder.mode == "lease":
                if row.expires <= self.now:
                    row.holder = None
                    if row.attempts >= MAX_ATTEMPTS:
                        row.state, row.parks = "dead", row.key is not None
                    elif row.attempts >= 2:
                        # Back within five minutes: perhaps now, in any case when the next hour has passed.
                        row.state, row.due, row.is_tried = "timed", self.now + 0.1, True
                    else:
                        row.state = "ready"
            elif row.state == "timed" and row.due <= self.now:
                row.state = "ready"

    def claimable(self, mode: Mode) -> tuple[list[Row], list[Row]]:
        """Which rows a claim takes for certain when it has room, and which it may take."""
        certain: list[Row] = []
        possible: list[Row] = []
        in_flight = {row.key for row in self.rows if row.state == "claimed"}
        doubtful: set[str] = set()
        closed: set[str] = set()
        for row in self.rows:
            key = row.key
            perhaps = row.state == "timed" and row.is_tried and row.due == self.now + 0.1
            is_open = key is None or (key not in in_flight and key not in closed)
            if is_open and (row.state == "ready" or perhaps) and not (mode == "hold" and row.attempts):
                possible.append(row)
                if not perhaps and key not in doubtful:
                    certain.append(row)
            elif key is not None and (
                (row.state == "timed" and row.is_tried)
                or (row.state == "dead" and row.parks)
                or (row.state == "ready" and row.attempts)
            ):
                closed.add(key)
            # Those behind an event that was tried may be marked as blocked until it is settled.
            if key is not None and (perhaps or row.attempts):
                doubtful.add(key)
        return certain, possible

    def explain(self, taken: list[Row], expected: list[Row]) -> str:
        return f"took {[row.number for row in taken]}, expected {[row.number for row in expected]} of {self.rows}"

    @precondition(lambda self: self.open)
    @rule(data=st.data(), park=st.sampled_from([True, True, False]))
    def settle(self, data: st.DataObject, park: bool) -> None:
        opened = self.open[data.draw(st.integers(0, len(self.open) - 1))]
        self.open.remove(opened)
        kinds = st.sampled_from(["delivered", *OUTCOMES])
        outcomes: list[Outcome] = []
        stopped: set[str | None] = set()
        for row in opened.rows:
            kind = "released" if row.key in stopped else data.draw(kinds)
            outcomes.append(OUTCOMES[kind])
            if kind != "delivered":
                stopped |= {row.key} - {None}
        settlement = self.runner.run(opened.batch.settle(outcomes, park=park))
        expected = Settlement()
        for row, outcome in zip(opened.rows, outcomes, strict=True):
            expected += self.settle_row(opened, row, outcome, park)
        assert settlement == expected

    def settle_row(self, opened: Open, row: Row, outcome: Outcome, park: bool) -> Settlement:
        if row.holder is not opened:
            return Settlement(lost=1)
        row.holder = None
        if opened.mode == "hold":
            row.attempts += 1
        match outcome:
            case Retry(after=after):
                assert after is not None
                row.state, row.due, row.is_tried = "timed", self.now + after / HOUR, True
                return Settlement(retried=1)
            case Dead():
                row.state, row.parks = "dead", park and row.key is not None
                return Settlement(dead=1)
            case _ if outcome is RELEASED:
                row.state, row.attempts = "ready", row.attempts - 1
                return Settlement(released=1)
        row.state = "gone"
        row.deliveries += 1
        if row.key is not None and not row.may_be_late:
            self.delivered.setdefault(row.key, []).append(row.number)
        return Settlement(delivered=1)

    @precondition(lambda self: any(each.mode == "lease" for each in self.open))
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        leases = [each for each in self.open if each.mode == "lease"]
        opened = leases[data.draw(st.integers(0, len(leases) - 1))]
        lost = {claim.event.id for claim in self.runner.run(opened.batch.renew(LEASE))}
        assert lost == {row.event.id for row in opened.rows if row.holder is not opened}
        for row in opened.rows:
            if row.holder is opened:
                row.expires = self.now + LEASE / HOUR

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        opened = self.open[data.draw(st.integers(0, len(self.open) - 1))]
        self.open.remove(opened)
        self.runner.run(opened.batch.abandon())
        for row in opened.rows:
            self.settle_row(opened, row, RELEASED, park=True)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A relay's process dies: a lease stays in its rows until it lapses, a hold's rows are free."""
        opened = self.open[data.draw(st.integers(0, len(self.open) - 1))]
        self.open.remove(opened)
        if opened.mode == "hold":
            self.runner.run(self.cut(opened.batch))
            for row in opened.rows:
                row.state, row.holder = "ready", None

    async def cut(self, batch: Any) -> None:
        number = (await batch._connection.exec_driver_sql("SELECT pg_backend_pid()")).scalar_one()
        await batch._connection.invalidate()
        await batch._connection.close()

        async def is_gone() -> bool:
            with self.kit.database.engine.connect() as db:
                alive = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
                return not db.execute(alive, {"pid": number}).scalar_one()

        await until(is_gone)

    # -- time and operators ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows and not any(each.mode == "hold" for each in self.open))
    @rule()
    def pass_hour(self) -> None:
        self.runner.run(self.kit.pass_time(HOUR))
        self.now += 1.0

    @precondition(lambda self: any(row.state == "dead" for row in self.rows))
    @rule(limit=st.sampled_from([None, 1]))
    def redrive(self, limit: int | None) -> None:
        taken = {row.event.dedup_key for row in self.rows if row.is_live} - {None}
        chosen: list[Row] = []
        for row in self.rows:
            if row.state == "dead" and row.event.dedup_key not in taken and len(chosen) != limit:
                chosen.append(row)
                taken |= {row.event.dedup_key} - {None}
        assert self.runner.run(self.stores[0].redrive(EVERYTHING, actor="ann", limit=limit)) == len(chosen)
        for row in chosen:
            row.may_be_late = row.may_be_late or (row.key is not None and not row.parks)
            row.state, row.attempts, row.is_tried, row.parks = "ready", 0, False, False

    @precondition(lambda self: any(row.state == "dead" for row in self.rows))
    @rule(key=st.sampled_from(["a", "b", None]))
    def drop(self, key: str | None) -> None:
        chosen = [row for row in self.rows if row.state == "dead" and key in (None, row.key)]
        dropped = self.runner.run(self.stores[1].drop(Filter(key=key), actor="bob"))
        assert dropped == len(chosen)
        for row in chosen:
            row.state = "gone"

    # -- the promises ------------------------------------------------------------------------------------------------

    @invariant()
    def promises_hold(self) -> None:
        counts = self.runner.run(self.stores[0].counts())
        live = counts.new + counts.retrying + counts.held + counts.scheduled + counts.blocked
        leased = [row for row in self.rows if row.holder is not None and row.holder.mode == "lease"]
        assert live == sum(row.is_live for row in self.rows)
        assert counts.held == len(leased)
        assert counts.dead == sum(row.state == "dead" for row in self.rows)
        assert all(row.deliveries <= 1 for row in self.rows)
        for numbers in self.delivered.values():
            assert numbers == sorted(numbers), "the events of a key were delivered out of order"
        assert self.runner.run(self.stores[0].find_faults()) == []

    def drain(self) -> None:
        """Every committed event can still be delivered, once its relays and operators let it."""
        for opened in self.open:
            self.runner.run(opened.batch.abandon())
            for row in opened.rows:
                self.settle_row(opened, row, RELEASED, park=True)
        self.open.clear()
        for _ in range(4 + 2 * len(self.rows)):
            self.pass_hour()
            self.redrive(None)
            self.drop_stuck()
            self.claim(0, 100, "lease")
            for opened in list(self.open):
                self.open.remove(opened)
                self.runner.run(opened.batch.settle([DELIVERED] * len(opened.rows)))
                for row in opened.rows:
                    self.settle_row(opened, row, DELIVERED, park=True)
            self.promises_hold()
            if not any(row.state != "gone" for row in self.rows):
                break
        assert [row for row in self.rows if row.state != "gone"] == []
        assert self.runner.run(self.stores[0].counts()) == Counts()

    def drop_stuck(self) -> None:
        """Drop the dead that cannot be redriven because of an event with their dedup key that they themselves park."""
        for row in self.rows:
            twins = [each for each in self.rows if each.is_live and each.event.dedup_key == row.event.dedup_key]
            if row.state == "dead" and row.parks and row.event.dedup_key and row.key in {each.key for each in twins}:
                assert self.runner.run(self.stores[1].drop(Filter(ids=(row.event.id,)), actor="bob")) == 1
                row.state = "gone"


class Interrupted(Exception):
    """The application changes its mind."""


@pytest.mark.parametrize(("name", "histories"), [("sqlite", 50), ("postgres", 20)])
def test_any_history_keeps_the_promises(name: str, histories: int, tmp_path: Path) -> None:
    database = make_database(name, tmp_path)
    try:
        run_state_machine_as_test(
            lambda: Relays(database),  # type: ignore[arg-type]
            settings=settings(
                max_examples=histories,
                stateful_step_count=40,
                deadline=None,
                # To shrink a history takes minutes: do that by hand.
                phases=(Phase.explicit, Phase.reuse, Phase.generate),
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        database.drop()
