"""What becomes of a notification: retries, expiry, former names, and what handlers do to each other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from pillarbox import Context, Handlers, Reject
from pillarbox.errors import ConfigError
from pillarbox.notifications.relays import retry_policy
from pillarbox.retry import Constant, Failure
from tests.contract.layouts import Around, LayoutKit
from tests.contract.notifications import Log, everywhere, make_handlers, note
from tests.servers import ROOT

HOUR = timedelta(hours=1)
DAY = 24 * HOUR


@pytest.fixture
async def log(layout_kit: LayoutKit) -> AsyncIterator[Log]:
    made = Log(layout_kit)
    yield made
    await made.close()


# -- retries and expiry ------------------------------------------------------------------------------------------------


@everywhere
async def test_flaky_handler_is_called_until_it_succeeds(log: Log) -> None:
    handlers = Handlers()
    calls: list[int] = []

    # By default the delay is drawn, and may be shorter than the time between two drains.
    @handlers.on("Deposited", retry=Constant(timedelta(seconds=200)))
    async def mailer(context: Context) -> None:
        calls.append(context.attempt)
        if context.attempt < 3:
            raise ConnectionError("no mail today")

    log.emit("Deposited")
    for attempts in (1, 2):
        await log.drain(handlers)
        await log.drain(handlers)
        assert log.notifications("state", "attempts") == [("FAILED", attempts)]
        log.let_pass(300)
    await log.drain(handlers)
    assert (calls, log.notifications("state", "attempts")) == ([1, 2, 3], [("SUCCEEDED", 3)])


@everywhere
async def test_failed_notification_waits_as_its_policy_says(log: Log) -> None:
    handlers = Handlers()

    @handlers.on("Deposited", retry=Constant(HOUR))
    async def mailer() -> None:
        raise ConnectionError("no mail today")

    log.emit("Deposited")
    await log.drain(handlers)
    in_an_hour: Any = Around(HOUR, within=timedelta(minutes=2))
    assert log.notifications("state", "next_retry_at") == [("FAILED", in_an_hour)]


def test_delays_are_thirty_seconds_doubled_up_to_five_minutes() -> None:
    handlers, _ = make_handlers("Deposited")
    policy: Any = retry_policy(handlers["mailer"])
    object.__setattr__(policy, "random", lambda: 1.0)
    delays = [policy.next_delay(Failure(attempt, age=HOUR)) for attempt in (1, 2, 3, 4, 5, 2000)]
    assert [each.total_seconds() for each in delays] == [30, 60, 120, 240, 300, 300]
    assert policy.next_delay(Failure(1, age=7 * DAY)) is None


def test_delays_are_spread_from_zero_to_their_bound() -> None:
    handlers, _ = make_handlers("Deposited")
    policy = retry_policy(handlers["mailer"])
    delays = {policy.next_delay(Failure(1, age=HOUR)) for _ in range(50)}
    assert len(delays) > 40
    assert all(each is not None and timedelta(0) <= each <= timedelta(seconds=30) for each in delays)


def test_policy_gives_up_at_the_age_of_the_handler() -> None:
    handlers, _ = make_handlers("Deposited", max_age=HOUR)
    policy = retry_policy(handlers["mailer"])
    assert policy.next_delay(Failure(5, age=HOUR)) is None
    assert policy.next_delay(Failure(5, age=HOUR - timedelta(seconds=1))) is not None


@everywhere
async def test_always_failing_handler_ends_expired_and_is_never_called_again(log: Log) -> None:
    handlers = Handlers()
    calls: list[str] = []

    @handlers.on("Deposited", max_age=DAY, retry=Constant(HOUR))
    async def mailer(context: Context) -> None:
        calls.append(context.type)
        raise ConnectionError("no mail today")

    log.emit(*["Deposited"] * 5)
    await log.drain(handlers)
    assert log.notifications("state", "attempts") == [("FAILED", 1)] * 5
    log.let_pass(23 * 3600)
    await log.drain(handlers)
    log.let_pass(2 * 3600)
    await log.drain(handlers)
    # Too old to be called by then.
    assert log.notifications("state", "attempts") == [("EXPIRED", 3)] * 5
    log.let_pass(7 * 86400)
    await log.drain(handlers)
    assert len(calls) == 10


@pytest.mark.parametrize("layout_kit", ["actions-notifications-sqlite"], indirect=True)
async def test_expiry_is_decided_by_the_time_after_the_call(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = Handlers()
    calls: list[str] = []

    class Tomorrow:
        @staticmethod
        def now(zone: Any) -> datetime:
            return datetime.now(zone) + DAY

    @handlers.on("Deposited", max_age=DAY)
    async def mailer(context: Context) -> None:
        calls.append(context.type)
        # A slow one: the notification comes of age meanwhile.
        monkeypatch.setattr("pillarbox.judging.datetime", Tomorrow)
        raise ConnectionError("no mail today")

    log.emit("Deposited")
    await log.drain(handlers)
    assert (calls, log.notifications("state", "attempts")) == (["Deposited"], [("EXPIRED", 1)])


@everywhere
async def test_notification_that_kills_its_process_is_not_called_for_ever(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    [first, _] = log.emit("Deposited", "Deposited")
    async with log.relays(handlers) as group:
        await group.relays["fan-out"].drain()
        # One was claimed by a process that died with it, again and again; nobody had time for the other.
        log.kit.execute("UPDATE {outbox} SET attempts = 40, state = 'FAILED' WHERE event_id = :id", id=first)
        log.let_pass(8 * 86400)
        await group.drain()
    assert calls == [("mailer", "Deposited")]
    assert log.notifications("state", "attempts") == [("EXPIRED", 41), ("SUCCEEDED", 1)]


@everywhere
async def test_policy_without_an_age_is_asked_for_old_notifications_too(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", retry=Constant(HOUR, max_attempts=50))
    log.emit("Deposited")
    async with log.relays(handlers) as group:
        await group.relays["fan-out"].drain()
        log.kit.execute("UPDATE {outbox} SET attempts = 40, state = 'FAILED'")
        log.let_pass(8 * 86400)
        await group.drain()
    assert (calls, log.notifications("state", "attempts")) == ([("mailer", "Deposited")], [("SUCCEEDED", 41)])


@everywhere
async def test_notification_past_its_age_expires_without_a_call(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", max_age=DAY)
    log.emit(*["Deposited"] * 5)
    async with log.relays(handlers) as group:
        await group.relays["fan-out"].drain()
        log.let_pass(25 * 3600)
        await group.drain()
    assert (calls, log.notifications("state", "attempts")) == ([], [("EXPIRED", 1)] * 5)


@everywhere
async def test_age_is_counted_from_the_fan_out(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", max_age=HOUR)
    log.emit("Deposited")
    log.kit.execute("UPDATE {events} SET event_date = {back[event_date]}", seconds=30 * 86400)
    await log.drain(handlers)
    assert (calls, log.notifications("state", "attempts")) == ([("mailer", "Deposited")], [("SUCCEEDED", 1)])


@everywhere
async def test_rejected_notification_expires_at_once(log: Log) -> None:
    handlers = Handlers()

    @handlers.on("Deposited")
    async def mailer() -> None:
        raise Reject("no such customer")

    log.emit("Deposited")
    await log.drain(handlers)
    assert log.notifications("state", "attempts") == [("EXPIRED", 1)]


@pytest.mark.parametrize("layout_kit", ["actions-notifications-sqlite"], indirect=True)
@pytest.mark.parametrize("column", ["id", "action_params", "started_date"])
async def test_event_that_cannot_be_read_expires_and_spares_the_others(log: Log, column: str) -> None:
    handlers, calls = make_handlers("Deposited")
    [bad, _] = log.emit("Deposited", "Deposited")
    log.kit.execute(f"UPDATE {{events}} SET {column} = 'nonsense' WHERE id = :id", id=bad)
    await log.drain(handlers)
    assert calls == [("mailer", "Deposited")]
    assert log.notifications("state", "attempts") == [("EXPIRED", 1), ("SUCCEEDED", 1)]
    assert log.kit.count("delivered = TRUE", role="events") == 2


# -- handlers and each other -------------------------------------------------------------------------------------------


@everywhere
async def test_fatal_error_of_one_handler_leaves_the_result_of_its_sibling(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", name="ledger")

    @handlers.on("Deposited", retry=Constant(HOUR))
    async def mailer() -> None:
        raise SystemExit(3)

    log.emit("Deposited", "Deposited")
    await log.drain(handlers)
    await log.drain(handlers)
    assert calls == [("ledger", "Deposited")] * 2
    assert log.notifications("handler_name", "state", "attempts") == [
        *[("ledger", "SUCCEEDED", 1)] * 2,
        *[("mailer", "FAILED", 1)] * 2,
    ]


@everywhere
async def test_fatal_error_on_one_notification_leaves_the_results_of_its_batch(log: Log) -> None:
    handlers = Handlers()
    calls: list[str] = []

    @handlers.on("Deposited", "Withdrawn", retry=Constant(HOUR))
    async def mailer(context: Context) -> None:
        calls.append(context.type)
        if context.type == "Withdrawn":
            raise SystemExit(3)

    log.emit(*["Deposited"] * 4, "Withdrawn")
    # Of different models: events of one model wait for each other.
    text = "CAST(id AS char(36))" if log.kit.database.backend == "mysql" else "CAST(id AS text)"
    log.kit.execute(f"UPDATE {{events}} SET model_id = {text}")
    await log.drain(handlers)
    await log.drain(handlers)
    assert sorted(calls) == [*["Deposited"] * 4, "Withdrawn"]
    assert log.notifications("event_type", "state") == [*[("Deposited", "SUCCEEDED")] * 4, ("Withdrawn", "FAILED")]


@everywhere
async def test_slow_handler_delays_no_other(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", name="ledger")
    begun, ended = asyncio.Event(), asyncio.Event()

    @handlers.on("Deposited")
    async def mailer() -> None:
        begun.set()
        await ended.wait()

    log.emit("Deposited")
    async with log.relays(handlers) as group, asyncio.timeout(30):
        running = asyncio.create_task(group.run())
        await begun.wait()
        while log.kit.count("state = 'SUCCEEDED'") < 1:
            await asyncio.sleep(0.01)
        log.emit("Deposited")
        while log.kit.count("state = 'SUCCEEDED'") < 2:
            await asyncio.sleep(0.01)
        assert calls == [("ledger", "Deposited")] * 2
        ended.set()
        while log.kit.count("state = 'SUCCEEDED'") < 4:
            await asyncio.sleep(0.01)
        group.stop()
        await running


@everywhere
async def test_events_that_a_handler_causes_are_fanned_out_in_the_next_round(log: Log) -> None:
    handlers, calls = make_handlers("Notified", name="auditor")

    @handlers.on("Deposited")
    async def mailer() -> None:
        await asyncio.to_thread(log.emit, "Notified")

    log.emit("Deposited")
    async with log.relays(handlers) as group:
        for name in ("fan-out", "mailer"):
            await group.relays[name].drain()
        assert (calls, log.delivered()) == ([], {"Deposited": True, "Notified": False})
        await group.drain()
    assert (calls, log.delivered()) == ([("auditor", "Notified")], {"Deposited": True, "Notified": True})


# -- former names ------------------------------------------------------------------------------------------------------


@everywhere
async def test_renamed_handler_takes_what_waits_under_its_former_names(log: Log) -> None:
    old, _ = make_handlers("Deposited", name="mail-paid")
    log.emit("Deposited")
    async with log.relays(old, handles=False) as group:
        await group.drain()
    new, calls = make_handlers("Deposited", name="mailer", aliases=["mail-paid", "mail"])
    log.emit("Deposited")
    await log.drain(new)
    assert calls == [("mailer", "Deposited")] * 2
    # A former name is never written.
    assert log.notifications("handler_name", "state") == [("mail-paid", "SUCCEEDED"), ("mailer", "SUCCEEDED")]


@everywhere
async def test_notifications_of_a_handler_that_is_gone_wait(log: Log) -> None:
    old, _ = make_handlers("Deposited", name="gone")
    log.emit("Deposited")
    async with log.relays(old, handles=False) as group:
        await group.drain()
    other, calls = make_handlers("Deposited", name="mailer")
    await log.drain(other)
    assert (calls, log.notifications("handler_name", "state")) == ([], [("gone", "PENDING")])


@pytest.mark.parametrize(("name", "aliases"), [("mailer", []), ("post", ["mailer"]), ("mail", []), ("post", ["mail"])])
def test_names_and_former_names_meet_no_others(name: str, aliases: list[str]) -> None:
    handlers, calls = make_handlers("Deposited", name="mailer", aliases=["mail"])
    with pytest.raises(ConfigError, match="expected a name and aliases that no other handler has"):
        note(handlers, ["Deposited"], calls, name=name, aliases=aliases)


# -- options -----------------------------------------------------------------------------------------------------------


@everywhere
async def test_registry_without_handlers_is_refused(log: Log) -> None:
    with pytest.raises(ConfigError, match="expected at least one handler"):
        log.relays(Handlers())


@everywhere
async def test_fan_out_and_handling_can_be_left_to_others(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("Deposited")
    await log.drain(handlers, fans_out=False)
    assert log.delivered() == {"Deposited": False}
    await log.drain(handlers, handles=False)
    assert (calls, log.delivered()) == ([], {"Deposited": True})
    await log.drain(handlers, fans_out=False)
    assert calls == [("mailer", "Deposited")]
    with pytest.raises(ConfigError, match="got neither"):
        log.relays(handlers, fans_out=False, handles=False)


@everywhere
@pytest.mark.parametrize("options", [{"batch_size": 0}, {"poll": timedelta(0)}], ids=str)
async def test_batch_size_and_poll_must_be_positive(log: Log, options: Any) -> None:
    handlers, _ = make_handlers("Deposited")
    with pytest.raises(ConfigError, match=r"expected a (positive|poll)"):
        log.relays(handlers, **options)


# -- crashes -----------------------------------------------------------------------------------------------------------

NODE = """
import asyncio, os, signal, sys
from functools import partial
from pillarbox import Handlers
from pillarbox.hooks import Hook
from pillarbox.notifications import fan_out
from pillarbox.notifications.relays import notification_relays
from pillarbox.stores.url import open_store

moment, url, table, schema, layout = sys.argv[1:]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
handlers = Handlers()
handlers.on("Deposited", name="mailer")(lambda: None)
notify = fan_out.Notify.__call__
settled = Hook.settled
if moment == "before":
    fan_out.Notify.__call__ = lambda self, db, wanted: (notify(self, db, wanted), die())
if moment == "after":
    Hook.settled = die
opened = partial(open_store, url, table=table, schema=schema or None)
group = notification_relays(opened, handlers, namespace="shop", layout=layout, handles=False)
asyncio.run(group.drain())
"""


def die_in_fan_out(log: Log, moment: str) -> None:
    """Run a node that is killed before or after the commit of its fan-out."""
    table, url = log.kit.outbox.table, log.kit.database.url.render_as_string(hide_password=False)
    layout = log.kit.spec.layout.removesuffix("-notifications")
    command = [sys.executable, "-c", NODE, moment, url, table.name, table.schema or "", layout]
    node = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, timeout=60, check=False)
    assert node.returncode == -signal.SIGKILL, node.stderr.decode()


@everywhere
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_node_killed_at_its_fan_out_loses_and_repeats_nothing(log: Log, moment: str) -> None:
    log.emit(*["Deposited"] * 3)
    await asyncio.to_thread(die_in_fan_out, log, moment)
    written = log.kit.count()
    assert log.kit.count("delivered = TRUE", role="events") == written
    # A second batch may be under way when the first one's end is reported.
    assert written == 0 if moment == "before" else written in (1, 2, 3)
    handlers, calls = make_handlers("Deposited")
    async with asyncio.timeout(30):
        # Row locks of the killed node last until its server has noticed.
        while log.kit.count("delivered = TRUE", role="events") < 3:
            await log.drain(handlers)
    await log.drain(handlers)
    assert calls == [("mailer", "Deposited")] * 3
    assert log.notifications("state", "attempts") == [("SUCCEEDED", 1)] * 3
