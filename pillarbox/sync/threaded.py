"""A queue file in a thread of its own: SQLite's driver blocks. It is opened again when it was removed or replaced."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from pillarbox.errors import QueueError, StoreUnavailable
from pillarbox.retry import describe_error
from pillarbox.sync.files import subscribe
from pillarbox.sync.opening import open_connection
from pillarbox.sync.seeding import adopt, recognizes, sign
from pillarbox.sync.state import QueueState, ensure_state, finish_marked, load_state, transaction, write_state

log = logging.getLogger("pillarbox.sync")

T = TypeVar("T")


class ThreadedQueue:
    """One namespace of a queue file, and what the file remembers of it.

    `generation` counts how often the file was opened: rows claimed from an earlier one are not this one's.
    """

    def __init__(self, path: Path, namespace: str, *, name: str, is_application_file: bool) -> None:
        self.path = path
        self.namespace = namespace
        self.name = name
        self.session = uuid4().hex[:12]
        """What this run signs with where it leaves a mark."""
        self.generation = 0
        self._is_application_file = is_application_file
        self._is_prepared = False
        self._opening = asyncio.Lock()
        self._pushed = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._db: sqlite3.Connection | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._identity: tuple[int, int] | None = None
        self._outage: str | None = None

    async def open(self) -> None:
        async with self._opening:
            if self._db is None:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="pillarbox-queue")
                await self._run(self._open_here)
            if self._unsubscribe is None:
                loop = asyncio.get_running_loop()
                self._unsubscribe = subscribe(self.path, lambda: _call_soon(loop, self._pushed.set))

    def _open_here(self) -> None:
        db = open_connection(
            self.path,
            is_application_file=self._is_application_file,
            journal=None if self._is_application_file else "wal",
        )
        try:
            with transaction(db):
                ensure_state(db, self.namespace)
                marked = finish_marked(db, self.namespace)
        except BaseException:
            db.close()
            raise
        self._db = db
        self._identity = _identify(self.path)
        self.generation += 1
        self._forget()
        if marked:
            log.info("%s: %d rows that had been delivered before were still in the queue.", self.name, marked)

    async def close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.get_running_loop().run_in_executor(thread, self._close_here)
            thread.shutdown()

    def _close_here(self) -> None:
        self._forget()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _forget(self) -> None:
        """What was known of the file and of the destination has to be asked again."""
        self._is_prepared = False
        self._forget_numbers()

    def _forget_numbers(self) -> None:
        """The rows may have other numbers now."""

    def _check_file(self) -> None:
        """Notice that the file was removed or replaced: the rows are in the one that is there now."""
        if self._db is None:
            self._open_here()
        elif self._identity != _identify(self.path):
            self._close_here()
            self._open_here()
            raise sqlite3.OperationalError("the file was removed or replaced; going on with the one that is there now")

    async def _run(self, work: Callable[..., T], *given: Any) -> T:
        if self._thread is None:
            raise StoreUnavailable(f"Queue {self.name}: is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)
        except QueueError as error:
            raise StoreUnavailable(f"Queue {self.name}: {error}") from error
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"Queue {self.name}: {self.path}: {error}") from error
        except Exception as error:
            # One table's trouble, whatever it is, must not end the others.
            log.exception("Queue %s: failed.", self.name)
            raise StoreUnavailable(f"Queue {self.name}: {describe_error(error)}") from error

    @property
    def _file(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.ProgrammingError("the file is not open")
        return self._db

    # -- what the file remembers -----------------------------------------------------------------------------------

    async def state(self) -> QueueState:
        """What the file remembers of this namespace."""
        return await self._run(self._state_here)

    def _state_here(self) -> QueueState:
        state = load_state(self._file, self.namespace)
        if state is None:
            raise sqlite3.DatabaseError(f"the row of {self.namespace!r} in the side table was deleted; start again")
        return state

    def prepare_again(self) -> None:
        """Have the destination made ready once more before the next claim."""
        self._is_prepared = False

    async def sign(self) -> None:
        """Note the signature of this run beside those of earlier ones."""
        await self._run(self._sign_here)

    def _sign_here(self) -> None:
        with transaction(self._file) as db:
            sign(db, self.namespace, self.session)

    async def recognizes(self, applied: int, token: str) -> bool:
        """Whether a mark at a destination is this queue's own: see `seeding.recognizes`."""
        return await self._run(self._recognizes_here, applied, token)

    def _recognizes_here(self, applied: int, token: str) -> bool:
        with transaction(self._file) as db:
            return recognizes(db, self.namespace, applied, token)

    def note_outage(self, reason: str | None) -> None:
        """Remember why nothing can be sent, though no row is to blame; None when it can."""
        if reason == self._outage or self._thread is None:
            return
        if self._outage is not None and reason is not None:
            log.warning("Queue %s: still nothing can be sent, now for another reason: %s", self.name, reason)
        self._outage = reason
        self._thread.submit(self._note_outage_here, reason)

    def _note_outage_here(self, reason: str | None) -> None:
        try:
            with transaction(self._file) as db:
                write_state(db, self.namespace, outage=reason)
        except sqlite3.Error as error:
            log.debug("Queue %s: the outage could not be noted: %s", self.name, error)

    async def adopt(
        self, target: str, *, maximum: int | None, applied: int | None, sent: int | None = None
    ) -> QueueState:
        """Take up the work for a target, as it is known there: see `seeding.adopt`."""
        return await self._run(self._adopt_here, target, maximum, applied, sent)

    def _adopt_here(self, target: str, maximum: int | None, applied: int | None, sent: int | None) -> QueueState:
        with transaction(self._file) as db:
            raised = adopt(
                db, self.namespace, target, maximum=maximum, applied=applied, session=self.session, sent=sent
            )
            state = self._state_here()
        self._forget_numbers()
        if raised:
            log.info("Queue %s: %d rows got numbers above those in use at %s.", self.name, raised, target)
        return state


def _identify(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
