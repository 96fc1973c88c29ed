"""Blocking work in a thread, with an orderly end when the delivery is cancelled.

A thread cannot be stopped from outside. So a cancelled delivery asks its thread to stop and waits for it
before it passes the cancellation on: nothing of it happens after its claims have been given back. A second
cancellation does not wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_GLANCE = 0.05


async def finish(work: asyncio.Future[T], stop: Callable[[], object], *, timeout: float | None = None) -> T:
    """Await work that runs in a thread; when cancelled, call `stop` and wait for the work's end first.

    Raises `TimeoutError` after `timeout` seconds and leaves the work running.
    """
    try:
        done, _ = await asyncio.wait([work], timeout=timeout)
    except asyncio.CancelledError:
        stop()
        work.add_done_callback(_ignore_result)
        await asyncio.wait([work])
        raise
    if not done:
        work.add_done_callback(_ignore_result)
        raise TimeoutError
    return work.result()


async def run_stoppable(work: Callable[[threading.Event], T]) -> T:
    """Run `work` in a thread; it looks at the event it is given and returns early once that is set."""
    stop = threading.Event()
    return await finish(asyncio.ensure_future(asyncio.to_thread(work, stop)), stop.set)


def acquire(lock: threading.Lock, stop: threading.Event) -> bool:
    """Acquire the lock, or return False once `stop` is set."""
    while not stop.is_set():
        if lock.acquire(timeout=_GLANCE):
            return True
    return False


def _ignore_result(work: asyncio.Future[T]) -> None:
    # asyncio complains about an exception that nobody asked for.
    if not work.cancelled():
        work.exception()
