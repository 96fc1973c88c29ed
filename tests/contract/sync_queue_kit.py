"""Queue files of every origin, and the real sqloutbox of both releases as a neighbour in another process."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import ROOT
from tests.sqloutbox06 import sqloutbox06

NAMESPACE = "orders"
APPLICATION = "application"
KINDS = ("new", "sqloutbox-0.4", "sqloutbox-0.6", APPLICATION, "oldest")

# As the first releases made it: without `source`, without the log, with nothing unique.
_OLDEST = """
CREATE TABLE outbox_queue (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, created_at TEXT NOT NULL, namespace TEXT NOT NULL, tag TEXT NOT NULL,
    payload TEXT NOT NULL, prev_seq INTEGER, synced INTEGER NOT NULL DEFAULT 0
)
"""

# Reads calls of the other system's Outbox, one JSON list a line, and answers with a line each.
_NEIGHBOUR = """
import json, sys
from pathlib import Path
from sqloutbox import Outbox
path, namespace = sys.argv[1:]
outbox = Outbox(db_path=Path(path), namespace=namespace)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    verb, *given = json.loads(line)
    if verb == "enqueue":
        answer = outbox.enqueue(given[0], given[1].encode(), source="Neighbour")
    elif verb == "enqueue_batch":
        answer = outbox.enqueue_batch([(tag, payload.encode()) for tag, payload in given[0]], source="Neighbour")
    elif verb == "fetch":
        rows = outbox.fetch_unsynced(9999)
        answer = [[row.seq, row.tag, row.payload.decode(), row.prev_seq, row.source] for row in rows]
    elif verb == "verify":
        answer = outbox.verify_chain(outbox.fetch_unsynced(9999))
    elif verb == "confirm":
        outbox.mark_synced(given[0])
        outbox.delete_synced(given[0])
        answer = None
    else:
        answer = getattr(outbox, verb)(*given)
    print(json.dumps(answer), flush=True)
"""


class Neighbour:
    """An `Outbox` of the real sqloutbox in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._answer() == "ready"

    def call(self, verb: str, *given: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *given]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other system ended"
        return json.loads(line)


@contextmanager
def neighbour(release: str, path: Path, namespace: str = NAMESPACE) -> Iterator[Neighbour]:
    """Run the real sqloutbox on a file: release "0.4" or "0.6"."""
    folders = [] if release == "0.4" else [str(sqloutbox06())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", _NEIGHBOUR, str(path), namespace]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=path.parent
    ) as process:
        try:
            yield Neighbour(process)
        finally:
            if process.stdin is not None:
                process.stdin.close()


def make_file(kind: str, path: Path) -> None:
    """Make a file as others leave it; "new" makes none."""
    if kind.startswith("sqloutbox"):
        with neighbour(kind.removeprefix("sqloutbox-"), path):
            return
    if kind == "new":
        return
    with sql(path) as execute:
        if kind == "oldest":
            execute(_OLDEST)
        else:
            execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT UNIQUE)")
            execute("PRAGMA user_version = 77")


@contextmanager
def sql(path: str | Path) -> Iterator[Callable[..., list[Any]]]:
    """Statements on a file through a connection of the test's own, each committed."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        yield lambda text, *given: db.execute(text, given).fetchall()
    finally:
        db.close()


def links(path: str | Path, namespace: str = NAMESPACE) -> list[tuple[int, int | None]]:
    with sql(path) as execute:
        return execute("SELECT seq, prev_seq FROM outbox_queue WHERE namespace = ? ORDER BY seq", namespace)


def assert_whole(path: str | Path, seqs: Sequence[int], namespace: str = NAMESPACE) -> None:
    """Each of these rows is there and names the one before it; the first names none."""
    ordered = sorted(seqs)
    assert links(path, namespace) == list(zip(ordered, [None, *ordered[:-1]], strict=True))


def run_python(program: str, *given: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a program of a test with our package in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", program, *map(str, given)]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=timeout, check=False)
