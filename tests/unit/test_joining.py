"""Work in the transaction that settles a claim: how it ends, is undone, cancelled, and served by a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import joining
from pillarbox.errors import SinkUnavailable, StoreUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.joining import Joined, Thread, join
from pillarbox.stores import Effect, Joins

CLAIM = Claim(row=1, event=Event("order.placed", {}), attempt=1)
WITHIN = 10.0


class Settling:
    """A transaction on a SQLite file, through an asynchronous driver or, in a thread, a plain one."""

    def __init__(self, file: Path, *, is_async: bool) -> None:
        self.is_async = is_async
        self.answer = True
        self.ended = threading.Event()
        """Set when a transaction has ended, either way."""
        self.engine = sa.create_engine(f"sqlite:///{file}")
        self._async_engine = create_async_engine(f"sqlite+aiosqlite:///{file}")
        with self.engine.begin() as db:
            db.exec_driver_sql("CREATE TABLE notes (text TEXT)")

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        if not self.answer:
            return False
        if self.is_async:
            async with self._async_engine.begin() as connection:
                await connection.run_sync(self._settle, effect)
        else:
            await asyncio.get_running_loop().run_in_executor(None, self._settle_here, effect)
        return True

    def _settle_here(self, effect: Effect) -> None:
        try:
            with self.engine.begin() as db:
                self._settle(db, effect)
        finally:
            self.ended.set()

    def _settle(self, db: sa.Connection, effect: Effect) -> None:
        db.exec_driver_sql("INSERT INTO notes VALUES ('settled')")
        effect(db)

    def notes(self) -> list[str]:
        """What was committed."""
        with self.engine.connect() as db:
            return list(db.exec_driver_sql("SELECT text FROM notes").scalars())

    async def close(self) -> None:
        self.engine.dispose()
        await self._async_engine.dispose()


@pytest.fixture(params=["async-driver", "plain-driver"])
async def settling(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Settling]:
    made = Settling(tmp_path / "notes.db", is_async=request.param == "async-driver")
    yield made
    await made.close()
    alive = asyncio.all_tasks() - {asyncio.current_task()}
    assert not alive, f"tasks still alive: {alive}"


plain_driver = pytest.mark.parametrize("settling", ["plain-driver"], indirect=True)


async def run_in(joined: Joined, call: Callable[[], Any]) -> Any:
    """Let the transaction's own thread call a function, if it has one."""
    if joined.thread is None:
        return call()
    return await asyncio.wrap_future(joined.thread.submit(call))


async def note(joined: Joined, text: str = "worked") -> None:
    # Through the asynchronous driver a statement needs a greenlet, as a session makes one.
    if joined.thread is None:
        from sqlalchemy.util import greenlet_spawn

        await greenlet_spawn(joined.db.exec_driver_sql, f"INSERT INTO notes VALUES ('{text}')")
    else:
        await run_in(joined, lambda: joined.db.exec_driver_sql(f"INSERT INTO notes VALUES ('{text}')"))


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN):
        while not is_true():
            await asyncio.sleep(0.005)


def start(coroutine: Awaitable[Outcome]) -> asyncio.Future[Outcome]:
    return asyncio.ensure_future(coroutine)


# -- how work ends ---------------------------------------------------------------------------------------------------


async def test_work_that_is_done_commits_with_the_settlement(settling: Settling) -> None:
    async def work(joined: Joined) -> Outcome:
        await note(joined)
        return DELIVERED

    assert await join(settling, CLAIM, work) == DELIVERED
    assert settling.notes() == ["settled", "worked"]


@pytest.mark.parametrize("outcome", [Retry("not now"), Dead("never"), RELEASED], ids=["retry", "dead", "released"])
async def test_any_other_outcome_undoes_both_and_is_returned(settling: Settling, outcome: Outcome) -> None:
    async def work(joined: Joined) -> Outcome:
        await note(joined)
        return outcome

    assert await join(settling, CLAIM, work) == outcome
    assert settling.notes() == []


async def test_error_of_the_work_undoes_both_and_passes(settling: Settling) -> None:
    async def work(joined: Joined) -> Outcome:
        await note(joined)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await join(settling, CLAIM, work)
    assert settling.notes() == []


async def test_claim_that_was_lost_is_not_worked_on(settling: Settling) -> None:
    async def work(joined: Joined) -> Outcome:
        raise AssertionError("called")

    settling.answer = False
    assert await join(settling, CLAIM, work) == RELEASED
    assert await join(settling, CLAIM, work, otherwise=DELIVERED) == DELIVERED


async def test_database_that_is_down_is_a_destination_that_is_down() -> None:
    class Down:
        async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
            raise StoreUnavailable("Store shop: connection refused")

    async def work(joined: Joined) -> Outcome:
        raise AssertionError("called")

    with pytest.raises(SinkUnavailable, match="connection refused"):
        await join(Down(), CLAIM, work)


# -- cancelling ------------------------------------------------------------------------------------------------------


async def test_cancelled_join_waits_for_the_end_of_its_work_and_undoes_it(settling: Settling) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    steps: list[str] = []

    async def work(joined: Joined) -> Outcome:
        await note(joined)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cancelled")
            await may_end.wait()
            # The transaction is still the work's own.
            await run_in(joined, lambda: steps.append("cleaned up"))
        return DELIVERED

    joining_ = start(join(settling, CLAIM, work))
    await begun.wait()
    joining_.cancel()
    await until(lambda: steps)
    assert not joining_.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await joining_
    assert steps == ["cancelled", "cleaned up"]
    assert settling.notes() == []


@plain_driver
async def test_cancelled_join_waits_for_a_call_in_the_thread(settling: Settling) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: list[str] = []

    def block() -> None:
        begun.set()
        assert may_end.wait(WITHIN)
        ended.append("call")

    async def work(joined: Joined) -> Outcome:
        assert joined.thread is not None
        await asyncio.wrap_future(joined.thread.submit(block))
        return DELIVERED

    joining_ = start(join(settling, CLAIM, work))
    await until(begun.is_set)
    joining_.cancel()
    await asyncio.wait([joining_], timeout=0.1)
    assert not joining_.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await joining_
    assert ended == ["call"]
    assert settling.notes() == []


@plain_driver
async def test_second_cancellation_does_not_wait(settling: Settling) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert may_end.wait(WITHIN)

    async def work(joined: Joined) -> Outcome:
        assert joined.thread is not None
        await asyncio.wrap_future(joined.thread.submit(block))
        return DELIVERED

    joining_ = start(join(settling, CLAIM, work))
    await until(begun.is_set)
    joining_.cancel()
    await asyncio.wait([joining_], timeout=0.05)
    joining_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(joining_, WITHIN)
    assert not settling.ended.is_set()
    may_end.set()
    await until(settling.ended.is_set)
    assert settling.notes() == []


@plain_driver
async def test_work_does_not_begin_after_a_cancellation(settling: Settling) -> None:
    """Cancelled while the thread waits for its settlement: the thread goes on, and finds that nobody wants it."""
    begun, may_go_on = threading.Event(), threading.Event()
    called: list[Joined] = []

    class Slow(Settling):
        def _settle(self, db: sa.Connection, effect: Effect) -> None:
            begun.set()
            assert may_go_on.wait(WITHIN)
            super()._settle(db, effect)

    async def work(joined: Joined) -> Outcome:
        called.append(joined)
        return DELIVERED

    settling.__class__ = Slow
    joining_ = start(join(settling, CLAIM, work))
    await until(begun.is_set)
    joining_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining_
    may_go_on.set()
    await until(settling.ended.is_set)
    assert called == []
    assert settling.notes() == []


# -- the thread ------------------------------------------------------------------------------------------------------


@plain_driver
async def test_thread_serves_several_calls_one_after_the_other(settling: Settling) -> None:
    threads: list[int] = []

    def fail() -> None:
        threads.append(threading.get_ident())
        raise KeyError("customer")

    async def work(joined: Joined) -> Outcome:
        for text in ("a", "b"):
            await note(joined, text)
            await run_in(joined, lambda: threads.append(threading.get_ident()))
        # An error is the caller's, and the thread goes on.
        with pytest.raises(KeyError):
            await run_in(joined, fail)
        await note(joined, "c")
        return DELIVERED

    assert await join(settling, CLAIM, work) == DELIVERED
    assert settling.notes() == ["settled", "a", "b", "c"]
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


@plain_driver
async def test_thread_that_runs_past_a_timeout_is_left_to_end_by_itself(
    settling: Settling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_PATIENCE", 0.05)
    may_end = threading.Event()

    def block() -> None:
        assert may_end.wait(WITHIN)

    async def work(joined: Joined) -> Outcome:
        assert joined.thread is not None
        await note(joined)
        await asyncio.wait([asyncio.wrap_future(joined.thread.submit(block))], timeout=0.05)
        return Retry("no answer in time")

    assert await join(settling, CLAIM, work) == Retry("no answer in time")
    assert not settling.ended.is_set()
    may_end.set()
    await until(settling.ended.is_set)
    assert settling.notes() == []


def test_call_that_was_cancelled_is_passed_over() -> None:
    thread, work = Thread(), Future[None]()
    cancelled, called = thread.submit(lambda: 1), thread.submit(lambda: 2)
    assert cancelled.cancel()
    called.add_done_callback(lambda _: work.set_result(None))
    thread.serve(work)
    assert called.result() == 2
    with pytest.raises(CancelledError):
        cancelled.result()


def test_thread_raises_what_the_work_raised() -> None:
    work = Future[None]()
    work.set_exception(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        Thread().serve(work)
