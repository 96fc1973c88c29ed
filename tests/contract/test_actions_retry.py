"""An action that lost a conflict is done again as a whole: with another session, another id and another start."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import await_only

from pillarbox import Constant, NoRetry
from pillarbox.actions import Action, DatabaseConflict
from pillarbox.testing import ManualClock
from tests.contract.kit_actions import EACH_DATABASE, KITS, ActionKit, actions, places

__all__ = ["actions", "places"]

on_servers = pytest.mark.parametrize("actions", [kit for kit in KITS if "sqlite" not in kit], indirect=True)
on_postgres = pytest.mark.parametrize("actions", [kit for kit in KITS if "postgresql" in kit], indirect=True)
on_sqlite = pytest.mark.parametrize("actions", [kit for kit in KITS if "sqlite" in kit], indirect=True)

NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)
AT_ONCE = Constant(timedelta(milliseconds=1), max_attempts=2)


@dataclass
class Raised:
    balance: int


class Rival:
    """A body that raises a wallet's balance, and loses it to somebody else in its first attempts."""

    def __init__(self, kit: ActionKit, *, losses: int) -> None:
        self.kit = kit
        self.losses = losses
        self.attempts: list[Action[Any]] = []
        self.sessions: list[Session] = []
        kit.change("INSERT INTO {wallets} (id, balance, version) VALUES (41, 10, 1)")

    def __call__(self, act: Action[Any], session: Session) -> int:
        self.attempts.append(act)
        self.sessions.append(session)
        wallet = session.get_one(self.kit.Wallet, 41)
        if len(self.attempts) <= self.losses:
            if self.kit.place.backend == "sqlite":
                # Nobody else can write while the action reads: say what the mapper would.
                raise StaleDataError("UPDATE statement on table expected to update 1 row(s); 0 were matched.")
            self.kit.change("UPDATE {wallets} SET balance = balance + 100, version = version + 1 WHERE id = 41")
        wallet.balance += 1
        act.emit(Raised(wallet.balance), subject=wallet)
        return len(self.attempts)


async def test_stale_version_is_tried_once_more(actions: ActionKit) -> None:
    clock = ManualClock(NOON)
    rival = Rival(actions, losses=1)

    def body(act: Action[Any], session: Session) -> int:
        clock.advance(timedelta(minutes=1))
        return rival(act, session)

    assert await actions.run(body, log=actions.make_log(clock=clock, retry=AT_ONCE)) == 2
    balance = 11 if actions.place.backend == "sqlite" else 111
    assert actions.balances() == [balance]
    [row] = actions.rows()
    assert row["payload"]["balance"] == balance
    first, second = rival.attempts
    assert row["action_id"] == second.id != first.id
    assert (first.started_at, second.started_at) == (NOON, NOON + timedelta(minutes=1))
    assert row["started_date"] == NOON + timedelta(minutes=1)
    assert rival.sessions[0] is not rival.sessions[1]


async def test_default_is_one_retry_then_the_error(actions: ActionKit) -> None:
    rival = Rival(actions, losses=9)
    with pytest.raises(StaleDataError):
        await actions.run(rival)
    assert len(rival.attempts) == 2
    assert actions.rows() == []


async def test_default_delay_is_at_most_a_tenth_of_a_second(actions: ActionKit) -> None:
    delays: list[float] = []

    async def note(delay: float) -> None:
        delays.append(delay)

    with (
        patch("pillarbox.actions.runner.asyncio.sleep", note),
        patch("pillarbox.actions.runner.time.sleep", delays.append),
    ):
        for _ in range(5):
            actions.place.empty()
            await actions.run(Rival(actions, losses=1))
    assert len(set(delays)) == 5, "it has jitter"
    assert 0 <= min(delays) <= max(delays) <= 0.1


@pytest.mark.parametrize("actions", EACH_DATABASE, indirect=True)
@pytest.mark.parametrize(
    ("log", "decorator", "call", "attempts"),
    [
        ({}, None, {"retry": None}, 1),
        ({"retry": None}, None, {}, 1),
        ({"retry": None}, {StaleDataError: AT_ONCE}, {}, 2),
        ({"retry": AT_ONCE}, None, {"retry": {StaleDataError: None}}, 1),
        ({"retry": AT_ONCE}, None, {"retry": {StaleDataError: NoRetry()}}, 1),
        ({"retry": {DatabaseConflict: None}}, AT_ONCE, {}, 2),
        ({}, None, {"retry": {StaleDataError: Constant(timedelta(milliseconds=1), max_attempts=4)}}, 4),
        ({}, None, {"retry": {StaleDataError: 2}}, 3),
    ],
    ids=["call off", "log off", "decorator on", "call none", "call no retry", "decorator all", "call four", "number"],
)
async def test_retry_is_set_for_the_log_the_function_or_the_call(
    actions: ActionKit, log: Any, decorator: Any, call: Any, attempts: int
) -> None:
    rival = Rival(actions, losses=9)
    with pytest.raises(StaleDataError):
        await actions.run(rival, log=actions.make_log(**log), decorate=decorator, **call)
    assert len(rival.attempts) == attempts


class Busy(Exception):
    pass


class Slow(Exception):
    pass


async def test_each_exception_has_its_own_counter(actions: ActionKit) -> None:
    raised = iter([Busy, Slow, Busy, Slow, None])
    policy = Constant(timedelta(milliseconds=1), max_attempts=3)

    def body(act: Action[Any], session: Session) -> str:
        error = next(raised)
        if error is not None:
            raise error
        return "done"

    assert await actions.run(body, retry={Busy: policy, Slow: policy}) == "done"
    raised = iter([Busy, Slow, Busy, Busy, None])
    with pytest.raises(Busy):
        await actions.run(body, retry={Busy: policy, Slow: policy})
    assert next(raised) is None
    assert len(actions.rows()) == 1


async def test_other_errors_are_not_tried_again(actions: ActionKit) -> None:
    calls = []

    def body(act: Action[Any], session: Session) -> None:
        calls.append(act.id)
        session.add(actions.Wallet(balance=None))
        session.flush()

    with pytest.raises(sa.exc.DBAPIError):
        await actions.run(body)
    assert len(calls) == 1


class Meeting:
    """Two bodies wait for each other, in threads or in tasks."""

    def __init__(self, kit: ActionKit) -> None:
        self._threads = threading.Barrier(2, timeout=20)
        self._tasks = asyncio.Barrier(2)
        self._is_async = kit.is_async

    def wait(self) -> None:
        if self._is_async:
            await_only(asyncio.wait_for(self._tasks.wait(), 20))
        else:
            self._threads.wait()


@on_servers
async def test_action_that_lost_a_deadlock_is_done_again(actions: ActionKit) -> None:
    actions.change("INSERT INTO {wallets} (id, balance, version) VALUES (1, 0, 1), (2, 0, 1)")
    meeting = Meeting(actions)
    attempts: list[int] = []

    def transfer(first: int, second: int) -> Any:
        is_first = [True]

        def body(act: Action[Any], session: Session) -> None:
            attempts.append(first)
            one = session.get_one(actions.Wallet, first, with_for_update=True)
            if is_first.pop() if is_first else False:
                meeting.wait()
            two = session.get_one(actions.Wallet, second, with_for_update=True)
            one.balance -= 1
            two.balance += 3
            act.emit(Raised(two.balance), subject=two)

        return body

    await asyncio.gather(actions.run(transfer(1, 2)), actions.run(transfer(2, 1)))
    assert actions.balances() == [2, 2]
    assert len(actions.rows()) == 2
    assert len(attempts) == 3


@on_postgres
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_serialization_failure_is_tried_again(actions: ActionKit, level: str) -> None:
    actions.change("INSERT INTO {wallets} (id, balance, version) VALUES (1, 10, 1)")
    attempts: list[int] = []
    engine = actions.engine.execution_options(isolation_level=level)

    def body(act: Action[Any], session: Session) -> None:
        wallet = session.get_one(actions.Wallet, 1)
        if not attempts:
            actions.change("UPDATE {wallets} SET balance = balance + 100")
        attempts.append(wallet.balance)
        wallet.balance += 1

    await actions.run(body, log=actions.make_log(engine=engine))
    assert attempts == [10, 110]
    assert actions.balances() == [111]
    assert len(actions.rows()) == 1


@on_sqlite
async def test_locked_file_is_tried_again(actions: ActionKit) -> None:
    make: Any = create_async_engine if actions.is_async else sa.create_engine
    engine = make(actions.place.driver_url(int(actions.is_async)), connect_args={"timeout": 0})
    other = actions.place.engine.connect()
    attempts = []

    def body(act: Action[Any], session: Session) -> None:
        attempts.append(act.id)
        if len(attempts) == 2:
            other.rollback()
        session.add(actions.Wallet(balance=1))

    other.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        await actions.run(body, log=actions.make_log(engine=engine))
    finally:
        other.close()
        await (engine.dispose() if actions.is_async else asyncio.to_thread(engine.dispose))
    assert len(attempts) == 2
    assert actions.balances() == [1]


async def test_cancelled_delay_ends_the_action(actions: ActionKit) -> None:
    rival = Rival(actions, losses=9)
    hour = {StaleDataError: Constant(timedelta(hours=1), max_attempts=9)}
    if not actions.is_async:
        with (
            patch("pillarbox.actions.runner.time.sleep", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            await actions.run(rival, retry=hour)
    else:
        sleeping = asyncio.Event()
        sleep = asyncio.sleep

        async def note(delay: float) -> None:
            if delay == 3600:
                sleeping.set()
            await sleep(delay)

        with patch("pillarbox.actions.runner.asyncio.sleep", note):
            task = asyncio.create_task(actions.run(rival, retry=hour))
            await asyncio.wait_for(sleeping.wait(), 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert task.cancelled()
    assert len(rival.attempts) == 1
    assert actions.rows() == []


async def test_block_is_not_tried_again(actions: ActionKit) -> None:
    rival = Rival(actions, losses=9)
    with pytest.raises(StaleDataError):
        await actions.act(rival)
    assert len(rival.attempts) == 1
    assert actions.rows() == []
