"""Who an action belongs to: the task, or the thread, that began it.

Context variables flow into child tasks and threads, so finding an action in one's context does not make it one's own.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NamedTuple


class Owner(NamedTuple):
    """A thread and, inside an event loop, a task of it."""

    thread: threading.Thread
    task: asyncio.Task[Any] | None

    def __str__(self) -> str:
        if self.task is not None:
            return f"task {self.task.get_name()!r}"
        return f"thread {self.thread.name!r}"


def current_owner() -> Owner:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return Owner(threading.current_thread(), task)
