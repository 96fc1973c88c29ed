"""Whether anything of a queue is lost: the chain of its waiting rows against the queue, the logs and what was settled.

A row says which row was pushed before it. Numbers alone prove nothing: they jump when a queue is numbered above its
target, when namespaces share a file, and when the audit log is pruned. So a missing number is only reported when a
waiting row names it and nobody knows what became of it. Read-only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from pillarbox.sync.health import count_rows
from pillarbox.sync.queues import QueueRef, Shape, describe_failure, look, read_shape
from pillarbox.sync.state import find_missing, highest_number, parse_time, read_state
from pillarbox.sync.tables import DEAD, LOG, QUEUE
from pillarbox.wording import say_count

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Gap:
    """A waiting row whose predecessor is nowhere; rows from `first` on may be lost with it."""

    seq: int
    missing: int
    first: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Several rows that name the same predecessor."""

    prev_seq: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was found in a queue; `problems` need an operator, `warnings` an eye, `notes` nothing.

    `marked` are rows that sqloutbox had marked as delivered and left behind, `orphans` entries of the audit log above
    the last waiting row, `first` and `last` the numbers of the waiting rows.
    """

    target: str
    table: str
    path: Path
    namespace: str
    waiting: int = 0
    marked: int = 0
    logged: int = 0
    dead: int = 0
    settled: int = 0
    first: int | None = None
    last: int | None = None
    gaps: tuple[Gap, ...] = ()
    forks: tuple[Fork, ...] = ()
    orphans: int = 0
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether there is no problem; warnings and notes do not count."""
        return not self.problems


def verify_queue(ref: QueueRef) -> VerifyResult:
    """Check one queue in one snapshot; whatever is wrong with its file is in the result."""
    nothing = VerifyResult(ref.target, ref.table, ref.path, ref.namespace)
    if not ref.path.exists():
        return replace(nothing, notes=("Nothing was pushed yet: there is no file.",))
    try:
        return look(ref.path, partial(_verify, nothing, ref))
    except sqlite3.Error as error:
        return replace(nothing, problems=(describe_failure(ref.path, error),))


def verify_queues(refs: Iterable[QueueRef]) -> tuple[VerifyResult, ...]:
    """Check several queues, one after the other."""
    return tuple(verify_queue(ref) for ref in refs)


def find_forks(db: sqlite3.Connection) -> list[Fork]:
    """Predecessors that are named more than once in a file; a file with its unique index has none."""
    rows = db.execute(
        f"SELECT prev_seq, seq FROM {QUEUE} WHERE prev_seq IN "
        f"(SELECT prev_seq FROM {QUEUE} WHERE prev_seq IS NOT NULL GROUP BY prev_seq HAVING count(*) > 1) "
        "ORDER BY prev_seq, seq"
    )
    forks: dict[int, list[int]] = {}
    for prev, seq in rows:
        forks.setdefault(prev, []).append(seq)
    return [Fork(prev, tuple(seqs)) for prev, seqs in forks.items()]


def describe_fork(fork: Fork) -> str:
    seqs = ", ".join(map(str, fork.seqs))
    return f"The chain forks: rows {seqs} all name row {fork.prev_seq} as the one before them."


def _verify(nothing: VerifyResult, ref: QueueRef, db: sqlite3.Connection) -> VerifyResult:
    shape = read_shape(db, is_application_file=ref.is_application_file)
    if ref.is_unused(shape):
        return replace(nothing, notes=(f"Nothing was pushed yet: the file has no table {QUEUE}.",))
    problem = shape.describe_problem(ref.path)
    if problem is not None:
        # Another program's database that happens to lie in the folder is none of ours; an empty one may have been.
        is_stranger = shape.is_foreign and not shape.is_empty and not ref.is_expected
        return replace(nothing, warnings=(problem,)) if is_stranger else replace(nothing, problems=(problem,))
    result = _count(nothing, shape, db)
    links = _broken_links(db, ref.namespace)
    result = replace(result, gaps=_find_gaps(db, shape, links, result.settled), forks=_own_forks(db, ref.namespace))
    return replace(
        result,
        problems=_list_problems(ref, result),
        warnings=tuple(_list_warnings(db, shape, result, links)),
        notes=tuple(_list_notes(result)),
    )


def _count(nothing: VerifyResult, shape: Shape, db: sqlite3.Connection) -> VerifyResult:
    namespace = nothing.namespace
    waiting, first, last = db.execute(
        f"SELECT count(*), min(seq), max(seq) FROM {QUEUE} WHERE namespace = ? AND synced = 0", (namespace,)
    ).fetchone()
    (marked,) = db.execute(f"SELECT count(*) FROM {QUEUE} WHERE namespace = ? AND synced = 1", (namespace,)).fetchone()
    state = read_state(db, namespace)
    orphans = 0
    if shape.has(LOG):
        above = highest_number(db) if last is None else last
        (orphans,) = db.execute(
            f"SELECT count(*) FROM {LOG} WHERE namespace = ? AND seq > ?", (namespace, above)
        ).fetchone()
    return replace(
        nothing,
        waiting=waiting,
        first=first,
        last=last,
        marked=marked,
        logged=count_rows(db, shape, LOG, namespace),
        dead=count_rows(db, shape, DEAD, namespace),
        settled=0 if state is None else state.settled,
        orphans=orphans,
    )


# -- the chain ---------------------------------------------------------------------------------------------------------

Link = tuple[int, int | None, int | None]  # a row, the row it names as the one before it, and the row that is


def _broken_links(db: sqlite3.Connection, namespace: str) -> list[Link]:
    """Waiting rows that do not name the waiting row before them."""
    return db.execute(
        "SELECT seq, prev_seq, before FROM (SELECT seq, prev_seq, lag(seq) OVER (ORDER BY seq) AS before "
        f"FROM {QUEUE} WHERE namespace = ? AND synced = 0) WHERE prev_seq IS NOT before ORDER BY seq",
        (namespace,),
    ).fetchall()


def _find_gaps(db: sqlite3.Connection, shape: Shape, links: Sequence[Link], settled: int) -> tuple[Gap, ...]:
    named = [prev for _, prev, _ in links if prev is not None]
    if shape.has(LOG):
        missing = set(find_missing(db, named, settled=settled))
    else:
        known = {seq for (seq,) in db.execute(f"SELECT seq FROM {QUEUE}")} if named else set()
        missing = set(named) - known
    return tuple(
        Gap(seq, prev, _first_lost(db, shape, prev, before, settled))
        for seq, prev, before in links
        if prev is not None and prev in missing
    )


def _first_lost(db: sqlite3.Connection, shape: Shape, missing: int, before: int | None, settled: int) -> int:
    known = [seq for seq in (before, settled) if seq and seq < missing]
    for table in (QUEUE, LOG, DEAD):
        if shape.has(table):
            (seq,) = db.execute(f"SELECT max(seq) FROM {table} WHERE seq < ?", (missing,)).fetchone()
            known += [] if seq is None else [seq]
    # With nothing known before it, no more can be said than that this one is lost.
    return max(known) + 1 if known else missing


def _own_forks(db: sqlite3.Connection, namespace: str) -> tuple[Fork, ...]:
    forks = find_forks(db)
    return tuple(
        fork
        for fork in forks
        if db.execute(
            f"SELECT 1 FROM {QUEUE} WHERE namespace = ? AND prev_seq = ? LIMIT 1", (namespace, fork.prev_seq)
        ).fetchone()
    )


# -- in words ----------------------------------------------------------------------------------------------------------


def _list_problems(ref: QueueRef, result: VerifyResult) -> tuple[str, ...]:
    texts = [_describe_gap(ref, gap) for gap in result.gaps[:_SHOWN]]
    if len(result.gaps) > _SHOWN:
        texts.append(f"There are {len(result.gaps) - _SHOWN} more gaps.")
    texts += [f"{describe_fork(fork)} Move all but one out of the way with: {_skip(ref)}" for fork in result.forks]
    return tuple(texts)


def _describe_gap(ref: QueueRef, gap: Gap) -> str:
    lost = f"row {gap.missing}" if gap.first == gap.missing else f"up to {gap.missing - gap.first + 1} rows"
    return (
        f"Row {gap.seq} names row {gap.missing} as the one before it, which neither queue, sync log nor dead log has; "
        f"{lost} may be lost. Restore what is missing, or accept the loss with: "
        f"pillarbox sync skip {ref.options} --lost {gap.missing}"
    )


def _skip(ref: QueueRef) -> str:
    return f"pillarbox sync skip {ref.options} --seq SEQ"


def _list_warnings(db: sqlite3.Connection, shape: Shape, result: VerifyResult, links: Sequence[Link]) -> Iterable[str]:
    alone = [seq for seq, prev, before in links if prev is None and before is not None]
    if alone:
        yield f"Row {alone[0]} names no row before it, although others wait before it; its place is that of its number."
    late = [(seq, prev) for seq, prev, _ in links if prev is not None and prev >= seq]
    if late:
        yield f"Row {late[0][0]} names row {late[0][1]} as the one before it, which is not before it."
    backwards = _first_backwards(db, result.namespace)
    if backwards is not None:
        yield f"Time goes backwards at row {backwards}: it was made before the row ahead of it. A clock was set back."
    if result.first is not None and result.first <= result.settled:
        yield f"Row {result.first} waits, although all rows up to {result.settled} have left the queue before."
    twice = _first_in_both(db, shape, result.namespace)
    if twice is not None:
        yield f"Row {twice} waits, although the sync log has it as delivered or given up: it is sent again."


def _first_backwards(db: sqlite3.Connection, namespace: str) -> int | None:
    rows = db.execute(
        "SELECT seq, created_at, before FROM (SELECT seq, created_at, lag(created_at) OVER (ORDER BY seq) AS before "
        f"FROM {QUEUE} WHERE namespace = ? AND synced = 0) WHERE created_at < before ORDER BY seq",
        (namespace,),
    )
    for seq, created, before in rows:
        # As text a time may come later that is earlier: the forms differ in fractions and offsets.
        times = parse_time(created), parse_time(before)
        if None not in times and times[0] < times[1]:  # type: ignore[operator]
            return int(seq)
    return None


def _first_in_both(db: sqlite3.Connection, shape: Shape, namespace: str) -> int | None:
    if not shape.has(LOG):
        return None
    (seq,) = db.execute(
        f"SELECT min(seq) FROM {LOG} WHERE namespace = ? AND seq IN "
        f"(SELECT seq FROM {QUEUE} WHERE namespace = ? AND synced = 0)",
        (namespace, namespace),
    ).fetchone()
    return None if seq is None else int(seq)


def _list_notes(result: VerifyResult) -> Iterable[str]:
    if result.marked:
        yield (
            f"{result.marked} delivered rows were left in the queue by a drain that died; "
            "the service moves them to the sync log when it starts, `pillarbox sync migrate` does it now."
        )
    if result.orphans:
        yield f"{result.orphans} entries of the sync log are above the last waiting row."
    if result.dead:
        yield f"{say_count(result.dead, 'row')} in the dead log; see `pillarbox sync dead list`."
