"""What a relay that delivers large events needs of memory, as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pillarbox import Event
from tests.acceptance.launcher import clean_env
from tests.acceptance.processes import Database, temporary_database

MEGABYTE = 1_000_000
EVENTS = 300
BATCH = 16
# The most that the process had resident, which the kernel notes; and then the command's own end.
RUN = """
import atexit, pathlib, sys
from pillarbox.cli import main
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
main()
"""


def drain(database: Database, folder: Path) -> int:
    """Run a relay until nothing is left; returns the megabytes it had at most."""
    options = ["--sink", "null:", "--drain", "--batch-size", "500", "--batch-bytes", f"{BATCH}MB"]
    command = [sys.executable, "-c", RUN, "relay", "--store", database.url, *options]
    done = subprocess.run(command, cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=60, check=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None, done.stderr
    return int(peak[1]) // 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_events_are_not_all_loaded_at_once(tmp_path: Path) -> None:
    with temporary_database("postgres", tmp_path) as database:
        start = drain(database, tmp_path)
        for _ in range(EVENTS // 20):
            database.put(*(Event("photo.taken", b"x" * MEGABYTE) for _ in range(20)))
        peak = drain(database, tmp_path)
        assert database.rows("seq") == []
    # Two batches under way and one being claimed; all of them would be six times that.
    assert peak - start < 3 * BATCH
