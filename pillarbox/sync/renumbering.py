"""A queue file that came back from a backup: what waits in it goes out under new numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from pillarbox.sync.lock import NAME, FolderLocks
from pillarbox.sync.queues import QueueRef, edit
from pillarbox.sync.state import NO_HEAD, ensure_state, write_state
from pillarbox.sync.tables import QUEUE


def renumber(ref: QueueRef) -> int:
    """Let the next service take the queue for a new one; returns how many rows wait.

    Their numbers are raised above the target's maximum before the first is sent. What had been delivered after the
    backup was made, and waits here again, is then delivered again: of a file whose rows are copied to several targets,
    to all of them; of a copy, to its own. Refused while a service works on the folder.
    """
    locks = FolderLocks(_service_folders(ref))
    locks.take()
    try:
        with edit(ref) as db:
            ensure_state(db, ref.namespace)
            changed = {"queue_id": str(uuid4()), "seeded_for": "", "sessions": "", "ceiling": 0, "sent": 0}
            write_state(db, ref.namespace, **changed, **NO_HEAD)
            (count,) = db.execute(
                f"SELECT count(*) FROM {QUEUE} WHERE namespace = ? AND synced = 0", (ref.namespace,)
            ).fetchone()
    finally:
        locks.release()
    return int(count)


def _service_folders(ref: QueueRef) -> Iterator[Path]:
    """The folders whose service may work on the file: its own and, if it may be a copy for a target, that of all."""
    folder = ref.path.absolute().parent
    yield folder
    if folder.parent.name == "targets" or folder.parent.name.endswith(".targets"):
        outer = folder.parent.parent
        # A folder of that name may also be nobody's but the operator's; what is above it is then none of ours.
        if ref.target == folder.name or (outer / NAME).exists():
            yield outer
