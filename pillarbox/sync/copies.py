"""A table that goes to several targets: each gets a copy of its queue, with progress of its own.

A relay moves rows from the shared file into one file a target, in order; each of those is drained like any other. A
copy remembers, in the transaction that adds rows, the last one it took: from which queue, its number and what it was.
So rows that come again after a crash are known, and those of a file that was replaced or restored are not taken for
them. A copy numbers its rows itself, because each target has numbers of its own.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pillarbox.errors import QueueError, SinkUnavailable, StoreUnavailable
from pillarbox.event import DELIVERED, Claim, Outcome
from pillarbox.sinks import Sink
from pillarbox.sync.opening import open_connection
from pillarbox.sync.queues import ALL_TARGETS, look
from pillarbox.sync.settling import newest_number, queued_of
from pillarbox.sync.source import QueueSource
from pillarbox.sync.state import (
    NO_HEAD,
    QueueState,
    digest_row,
    ensure_state,
    find_gap,
    highest_number,
    is_untouched,
    raise_counter,
    transaction,
    write_state,
)
from pillarbox.sync.tables import LOG, QUEUE

_COLUMNS = "seq, created_at, namespace, source, tag, payload"
_SHARED = {"seeded_for": "", "ceiling": 0, "sessions": "", "sent": 0, **NO_HEAD}
"""The state of a queue whose numbers mean nothing at any target."""


class CopySink(Sink):
    """Adds rows of a shared queue to its copies, which are by target."""

    is_quick: bool = False

    def __init__(self, source: QueueSource, copies: Mapping[str, Path]) -> None:
        self.name = source.name
        self._source = source
        self._copies = copies

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        source = self._source
        try:
            queue_id = (await source.state()).queue_id
        except StoreUnavailable as error:
            raise SinkUnavailable(str(error)) from error
        for path in self._copies.values():
            try:
                await asyncio.to_thread(
                    add_copies, path, source.namespace, claims=claims, queue=source.path, queue_id=queue_id
                )
            except (sqlite3.Error, OSError, QueueError) as error:
                raise SinkUnavailable(f"Copy {path}: {error}") from error
        return [DELIVERED] * len(claims)


def add_copies(path: Path, namespace: str, *, claims: Sequence[Claim], queue: Path, queue_id: str) -> int:
    """Add the rows of a queue that a copy does not have yet; how many these were."""
    with closing(_open_copy(path)) as db, transaction(db):
        state = ensure_state(db, namespace)
        # Another queue has numbers of its own, whatever this copy took before.
        origin = state.origin if state.origin_queue == queue_id else 0
        if claims[0].row <= origin and not _has_row(queue, namespace, origin, digest=state.origin_digest):
            raise QueueError(_describe_stranger(queue, namespace, origin))
        new = [claim for claim in claims if claim.row > origin]
        if not new:
            return 0
        if state.origin_queue is None:
            raise_counter(db, new[0].row - 1)
        for claim in new:
            _add_row(db, namespace, claim)
        write_state(
            db, namespace, origin=new[-1].row, origin_queue=queue_id, origin_digest=digest_row(*_content(new[-1]))
        )
        return len(new)


def _open_copy(path: Path) -> sqlite3.Connection:
    _make_folder(path.parent)
    # A row must be on the disk here before it leaves the shared queue.
    return open_connection(path, durability="full")


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _has_row(queue: Path, namespace: str, seq: int, *, digest: str | None) -> bool:
    def read(db: sqlite3.Connection) -> Any:
        where = "WHERE namespace = ? AND seq = ? AND synced = 0"
        return db.execute(f"SELECT created_at, tag, payload FROM {QUEUE} {where}", (namespace, seq)).fetchone()

    row = look(queue, read)
    return row is not None and digest_row(*row) == digest


def _describe_stranger(queue: Path, table: str, number: int) -> str:
    return (
        f"the rows of {table} up to number {number} were copied before, but in {str(queue)!r}, where some of these "
        f"numbers wait, row {number} is not the one that was copied: the file comes from a backup, or is another one. "
        f"Nothing is copied until you decide: pillarbox sync renumber --table {table} --target {ALL_TARGETS} sends all "
        "that waits in it to every target"
    )


def _content(claim: Claim) -> tuple[str, str, str | bytes]:
    payload = claim.event.payload
    try:
        return queued_of(claim).created_at, claim.event.topic, payload.decode()
    except UnicodeDecodeError:
        # Nobody can read it, and each target's policy says what becomes of it then.
        return queued_of(claim).created_at, claim.event.topic, payload


def _add_row(db: sqlite3.Connection, namespace: str, claim: Claim) -> None:
    created, sql, payload = _content(claim)
    db.execute(
        f"INSERT INTO {QUEUE} (created_at, namespace, source, tag, payload, prev_seq, synced) VALUES (?, ?, ?, ?, ?, "
        f"(SELECT seq FROM {QUEUE} WHERE namespace = ? AND synced = 0 ORDER BY seq DESC LIMIT 1), 0)",
        (created, namespace, claim.event.source or "", sql, payload, namespace),
    )


# -- from one target to several ----------------------------------------------------------------------------------------


class Handover:
    """Makes a queue that was drained to one target the shared one of several, before anything is copied or sent."""

    def __init__(self, source: QueueSource, copies: Mapping[str, Path], *, is_application_file: bool) -> None:
        self._source = source
        self._copies = copies
        self._is_application_file = is_application_file
        self._lock = asyncio.Lock()

    async def finish(self) -> None:
        """Do what is left of it; nothing, nearly always."""
        source = self._source
        async with self._lock:
            await asyncio.to_thread(
                hand_over,
                source.path,
                source.namespace,
                copies=self._copies,
                is_application_file=self._is_application_file,
            )


def hand_over(queue: Path, namespace: str, *, copies: Mapping[str, Path], is_application_file: bool = False) -> None:
    """Let the copy for the target that a queue was drained to go on where the queue stands.

    It becomes that queue, under its id: with its waiting rows and their numbers, what was in doubt and the row that
    failed. The shared queue gets another id. The copy comes first: after a crash in between it is known by its id.
    Raises `QueueError` where nobody knows what a target has.
    """
    journal: Literal["wal"] | None = None if is_application_file else "wal"
    with closing(
        open_connection(queue, is_application_file=is_application_file, durability="full", journal=journal)
    ) as db:
        with transaction(db):
            state = ensure_state(db, namespace)
            if state.seeded_for == "":
                return
            heir = None if state.seeded_for is None else copies.get(state.seeded_for)
            if heir is None:
                _refuse_doubt(db, queue, namespace, state, copies)
                write_state(db, namespace, **_SHARED)
                return
        queue_id = _inherit(db, queue, namespace, state=state, heir=heir)
        # Those that were fed from this queue before go on being fed from it.
        for path in copies.values():
            if path != heir and path.exists():
                _follow(path, namespace, state.queue_id, queue_id)
        with transaction(db):
            write_state(db, namespace, queue_id=queue_id, **_SHARED)


def _refuse_doubt(
    db: sqlite3.Connection, queue: Path, namespace: str, state: QueueState, copies: Mapping[str, Path]
) -> None:
    newest = newest_number(db, namespace)
    if state.seeded_for is None and newest and not is_untouched(db, namespace):
        # Taken as new for all targets a row may arrive twice; taken as old it may be lost where it was never sent.
        raise QueueError(
            f"{str(queue)!r} was drained by sqloutbox and rows up to number {newest} wait in it. Which of the targets "
            f"{', '.join(copies)} it was drained to is not known, so nobody can say what is there already. Nothing is "
            "sent; run the service once with that target alone in the settings, then add the others"
        )


def _inherit(db: sqlite3.Connection, queue: Path, namespace: str, *, state: QueueState, heir: Path) -> str:
    with transaction(db, "BEGIN"), closing(_open_copy(heir)) as copy, transaction(copy):
        own = ensure_state(copy, namespace)
        if own.queue_id == state.queue_id and own.origin_queue is not None:
            return own.origin_queue
        if own.origin_queue is not None or newest_number(copy, namespace):
            if not newest_number(db, namespace):
                return state.queue_id
            raise QueueError(_describe_stranger(queue, namespace, own.origin))
        queue_id = str(uuid4())
        last, digest = _copy_rows(db, copy, namespace, settled=state.settled)
        inherited = {**asdict(state), "origin": last, "origin_queue": queue_id, "origin_digest": digest}
        write_state(copy, namespace, **inherited)
        return queue_id


def _copy_rows(
    db: sqlite3.Connection, copy: sqlite3.Connection, namespace: str, *, settled: int
) -> tuple[int, str | None]:
    where = f"FROM {QUEUE} WHERE namespace = ? AND synced = 0"
    links = db.execute(f"SELECT seq, prev_seq {where} ORDER BY seq", (namespace,)).fetchall()
    gap = find_gap(db, links, settled=settled)
    # What stands behind a lost row was never sent; it comes when the shared queue goes on.
    seqs = [seq for seq, _ in (links if gap is None else links[: gap[0]])]
    rows = db.execute(f"SELECT {_COLUMNS} {where} ORDER BY seq LIMIT ?", (namespace, len(seqs)))
    copy.executemany(
        f"INSERT INTO {QUEUE} ({_COLUMNS}, prev_seq, synced) VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
        ((*row, before) for row, before in zip(rows, [None, *seqs], strict=False)),
    )
    # What left the queue out of turn tells whether somebody else has drained it.
    copy.executemany(
        f"INSERT OR IGNORE INTO {LOG} (seq, namespace, synced_at) VALUES (?, ?, ?)",
        db.execute(
            f"SELECT seq, namespace, synced_at FROM {LOG} WHERE namespace = ? AND seq > ?", (namespace, settled)
        ),
    )
    raise_counter(copy, max(highest_number(db), settled))
    if not seqs:
        return 0, None
    last = copy.execute(f"SELECT created_at, tag, payload FROM {QUEUE} WHERE seq = ?", (seqs[-1],)).fetchone()
    return seqs[-1], digest_row(*last)


def _follow(path: Path, namespace: str, old: str, new: str) -> None:
    with closing(_open_copy(path)) as db, transaction(db):
        if ensure_state(db, namespace).origin_queue == old:
            write_state(db, namespace, origin_queue=new)
