"""Pushing into a queue file, over the bare statement on the same file; and the same with ever more rows waiting."""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

from benchmarks.common import ROUNDS, Result, alternate
from pillarbox.sync.queue import SqlQueue, Statement

T = TypeVar("T")

DEPTHS = (0, 10_000, 100_000, 500_000)
PUSHES = 400
BATCH = 1000
BATCHES = 20

SQL = "INSERT INTO orders (id, customer, amount, note) VALUES (?, ?, ?, ?)"
ARGS = [4711, "customer-0815", 99.95, None]
PAYLOAD = '[4711,"customer-0815",99.95,null]'

_COLUMNS = "created_at, namespace, source, tag, payload, prev_seq"
_BARE = f"INSERT INTO outbox_queue ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
_NOW = "2026-01-02T03:04:05.678901+00:00"
_BARE_ROW = (_NOW, "bare", "SqlQueue", SQL, PAYLOAD, None)


async def sync_push() -> Result:
    """The median push at each depth, over a bare INSERT that commits on the same file; the worst depth counts."""
    pushed, bare = _measure_depths()
    worst = max(DEPTHS, key=lambda depth: pushed[depth] / bare[depth])
    ratio = pushed[worst] / bare[worst]
    return Result("sync_push", pushed[worst], "us", bare[worst], ratio, 3.0, at_most=True, parts=_parts(pushed, bare))


async def sync_push_depth() -> Result:
    """The slowest median over that of an empty queue."""
    pushed, bare = _measure_depths()
    slowest = max(pushed.values())
    parts = _parts(pushed, bare)
    return Result("sync_push_depth", slowest, "us", pushed[0], slowest / pushed[0], 1.5, at_most=True, parts=parts)


async def sync_push_many() -> Result:
    """Batches of a thousand with their arguments, over executemany of rows that are ready."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = count()

        async def ours() -> float:
            with SqlQueue(Path(folder) / str(next(numbers))) as queue:
                queue.push("orders", SQL, ARGS)
                return _rows_a_second(lambda batch: queue.push_many("orders", batch), [[(SQL, ARGS)] * BATCH] * BATCHES)

        async def bare() -> float:
            with SqlQueue(Path(folder) / str(next(numbers))) as queue:
                queue.push("orders", SQL, ARGS)
                with _connect(queue.queue_file("orders").path) as db:
                    return _rows_a_second(lambda batch: _execute_many(db, batch), _bare_batches())

        value, baseline, ratio = await alternate(ours, bare)
    return Result("sync_push_many", value, "rows/s", baseline, ratio, 0.6)


def _measure_depths() -> tuple[dict[int, float], dict[int, float]]:
    """Medians in microseconds, of pushes and of bare statements, with the depths taken by turns."""
    pushed: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    bare: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    with tempfile.TemporaryDirectory() as folder:
        for depth in DEPTHS:
            _fill(Path(folder) / str(depth), depth)
        for _ in range(ROUNDS):
            for depth in DEPTHS:
                with SqlQueue(Path(folder) / str(depth)) as queue:
                    pushed[depth] += _time_each(lambda: queue.push("orders", SQL, ARGS))
                    with _connect(queue.queue_file("orders").path) as db:
                        bare[depth] += _time_each(lambda: db.execute(_BARE, _BARE_ROW))
    return {d: statistics.median(pushed[d]) for d in DEPTHS}, {d: statistics.median(bare[d]) for d in DEPTHS}


def _fill(folder: Path, depth: int) -> None:
    with SqlQueue(folder) as queue:
        statements: list[Statement] = [(SQL, ARGS)] * 10_000
        for _ in range(depth // len(statements)):
            queue.push_many("orders", statements)


def _time_each(call: Callable[[], object]) -> list[float]:
    spent = []
    for _ in range(PUSHES):
        started = time.perf_counter()
        call()
        spent.append((time.perf_counter() - started) * 1e6)
    return spent


def _rows_a_second(push: Callable[[T], object], batches: list[T]) -> float:
    started = time.perf_counter()
    for batch in batches:
        push(batch)
    return BATCHES * BATCH / (time.perf_counter() - started)


def _bare_batches() -> list[list[tuple[object, ...]]]:
    rows: list[tuple[object, ...]] = [
        (_NOW, "orders", "SqlQueue", SQL, PAYLOAD, number) for number in range(1, BATCH * BATCHES + 1)
    ]
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def _execute_many(db: sqlite3.Connection, rows: list[tuple[object, ...]]) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.executemany(_BARE, rows)
    db.execute("COMMIT")


@contextmanager
def _connect(path: str) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous = NORMAL")
        yield db
    finally:
        db.close()


def _parts(pushed: dict[int, float], bare: dict[int, float]) -> dict[str, float]:
    return {f"at_{depth}": pushed[depth] for depth in DEPTHS} | {f"bare_{depth}": bare[depth] for depth in DEPTHS}


BENCHMARKS = (sync_push, sync_push_depth, sync_push_many)
