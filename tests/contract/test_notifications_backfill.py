"""A handler that comes late gets the history that others already handled, once, and no event is touched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from pillarbox import Handlers
from pillarbox.errors import ConfigError, Unsupported
from pillarbox.handlers.backfill import backfill
from tests.contract.layouts import LayoutKit
from tests.contract.notifications import INSERT, SENTINEL, Log, everywhere, make_handlers
from tests.contract.stores import process_time_zone

HOUR = timedelta(hours=1)


@pytest.fixture
async def log(layout_kit: LayoutKit) -> AsyncIterator[Log]:
    made = Log(layout_kit)
    yield made
    await made.close()


def ago(hours: float) -> datetime:
    return datetime.now(UTC) - hours * HOUR


async def fill(
    log: Log, handlers: Handlers, name: str = "ledger", *, retention: timedelta | None = None, **options: Any
) -> int:
    store = await log.kit.open(retention=retention)
    return await backfill(store, handlers[name], **{"since": ago(24), "namespace": "shop", **options})


async def handle_before(log: Log, *types: str) -> None:
    """Let another handler have had events of these types."""
    handlers, _ = make_handlers(*types, name="mailer")
    log.emit(*types)
    await log.drain(handlers)


@everywhere
async def test_new_handler_gets_what_others_already_handled(log: Log) -> None:
    await handle_before(log, *["Deposited"] * 5)
    new, calls = make_handlers("Deposited", name="ledger")
    await log.drain(new)
    assert calls == []
    assert await fill(log, new, batch=2) == 5
    assert log.kit.count("delivered = TRUE", role="events") == 5
    await log.drain(new)
    assert calls == [("ledger", "Deposited")] * 5
    assert log.kit.count("handler_name = 'mailer' AND state = 'SUCCEEDED'") == 5


@everywhere
async def test_backfill_may_be_repeated(log: Log) -> None:
    await handle_before(log, "Deposited", "Deposited")
    new, calls = make_handlers("Deposited", name="ledger")
    assert [await fill(log, new), await fill(log, new)] == [2, 0]
    await log.drain(new)
    assert (await fill(log, new), len(calls)) == (0, 2)


@everywhere
async def test_history_beyond_the_retention_is_refused_unless_it_may_be_told_again(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", name="mailer")
    log.emit(*["Deposited"] * 3)
    await log.drain(handlers)
    # Handled and pruned: nothing says any more that the handler had them.
    log.kit.execute("DELETE FROM {outbox}")
    with pytest.raises(
        ConfigError, match=r"since is 20.* longer ago than the retention of 1h\. .*again=True \(--again\)"
    ):
        await fill(log, handlers, "mailer", retention=HOUR)
    with pytest.raises(ConfigError, match="retention of 1h"):
        await fill(log, handlers, "mailer", retention=HOUR, dry_run=True)
    assert log.kit.count() == 0
    assert await fill(log, handlers, "mailer", retention=HOUR, again=True) == 3
    await log.drain(handlers)
    assert calls == [("mailer", "Deposited")] * 6


@everywhere
async def test_history_within_the_retention_is_told(log: Log) -> None:
    await handle_before(log, "Deposited")
    new, _ = make_handlers("Deposited", name="ledger")
    assert await fill(log, new, retention=25 * HOUR) == 1


@everywhere
async def test_history_comes_in_the_order_of_its_dates(log: Log) -> None:
    types = ["E1", "E2", "E3", "E4", "E5"]
    ids = sorted((uuid4() for _ in types), reverse=True)
    for type, id, age in zip(types, ids, (50, 40, 40, 30, 20), strict=True):
        log.kit.insert(type, sql=INSERT.replace("{utc}", "{ago}").replace("FALSE", "TRUE"), id=id, seconds=age)
    # Two of one moment, with the end of a batch between them.
    log.kit.execute("UPDATE {events} SET event_date = {ago} WHERE event_type IN ('E2', 'E3')", seconds=40)
    new, calls = make_handlers(*reversed(types), name="ledger")
    assert await fill(log, new, batch=2) == 5
    await log.drain(new)
    told = [type for _, type in calls]
    assert (told[:1], sorted(told[1:3]), told[3:]) == (["E1"], ["E2", "E3"], ["E4", "E5"])


@everywhere
async def test_event_dated_after_the_clock_of_the_database_is_told(log: Log) -> None:
    await handle_before(log, "Deposited")
    # As written by an application whose clock is ahead.
    log.kit.execute("UPDATE {events} SET event_date = {back[event_date]}", seconds=-600)
    new, _ = make_handlers("Deposited", name="ledger")
    assert await fill(log, new) == 1


@everywhere
async def test_what_a_handler_had_under_its_former_name_is_not_repeated(log: Log) -> None:
    await handle_before(log, "Deposited")
    renamed, _ = make_handlers("Deposited", name="ledger", aliases=["mailer"])
    assert await fill(log, renamed) == 0


@everywhere
async def test_undelivered_and_foreign_events_are_left_to_others(log: Log) -> None:
    log.emit("Deposited")
    log.emit("", sql=SENTINEL)
    log.emit("Withdrawn", "deposited")
    log.emit("Deposited", namespace="bank")
    log.kit.execute("UPDATE {events} SET delivered = TRUE WHERE namespace <> 'shop' OR event_type <> 'Deposited'")
    new, _ = make_handlers("Deposited", name="ledger")
    assert (await fill(log, new), log.kit.count()) == (0, 0)
    assert log.kit.count("delivered = FALSE AND namespace = 'shop'", role="events") >= 1


@everywhere
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
async def test_times_bound_the_events_by_their_own(log: Log, zone: str) -> None:
    with process_time_zone(zone):
        for hours in (1, 3, 5):
            log.emit(f"E{hours}")
            moved = "UPDATE {events} SET event_date = {back[event_date]}, delivered = TRUE WHERE event_type = :name"
            log.kit.execute(moved, name=f"E{hours}", seconds=hours * 3600)
        new, _ = make_handlers("E1", "E3", "E5", name="ledger")
        assert await fill(log, new, since=ago(4), until=ago(2)) == 1
        assert log.notifications("event_type", "state") == [("E3", "PENDING")]
        assert await fill(log, new, since=ago(4)) == 1
        assert await fill(log, new, since=ago(6)) == 1
    assert log.notifications("event_type", "state") == [("E1", "PENDING"), ("E3", "PENDING"), ("E5", "PENDING")]


@everywhere
async def test_dry_run_counts_and_writes_nothing(log: Log) -> None:
    await handle_before(log, "Deposited", "Deposited")
    new, _ = make_handlers("Deposited", name="ledger")
    assert (await fill(log, new, dry_run=True), log.kit.count("handler_name = 'ledger'")) == (2, 0)


@everywhere
async def test_old_events_are_as_young_as_their_backfill(log: Log) -> None:
    await handle_before(log, "Deposited")
    log.kit.execute("UPDATE {events} SET event_date = {back[event_date]}", seconds=30 * 86400)
    new, calls = make_handlers("Deposited", name="ledger", max_age=HOUR)
    await fill(log, new, since=ago(31 * 24))
    await log.drain(new)
    assert calls == [("ledger", "Deposited")]


@everywhere
async def test_times_without_a_zone_or_in_the_wrong_order_are_refused(log: Log) -> None:
    new, _ = make_handlers("Deposited", name="ledger")
    with pytest.raises(ConfigError, match="Backfill since: expected an aware datetime"):
        await fill(log, new, since=datetime(2026, 1, 1))  # noqa: DTZ001 - that is the point
    with pytest.raises(ConfigError, match="expected until to be after since"):
        await fill(log, new, since=ago(1), until=ago(2))


@pytest.mark.parametrize("layout_kit", ["actions-sqlite"], indirect=True)
async def test_store_of_another_layout_is_refused(log: Log) -> None:
    new, _ = make_handlers("Deposited", name="ledger")
    with pytest.raises(Unsupported, match="layout 'actions' keeps no log of events to backfill from"):
        await fill(log, new)
