"""The lock of a folder: one service at a time, and none of it for the processes that a service forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.lock import FolderLocks


@contextmanager
def forked(folder: Path, *steps: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock and forks another, which lives on; `steps` follow in the first."""
    program = "\n".join(
        [
            "import ctypes, os, signal, sys",
            "from pathlib import Path",
            "from pillarbox.sync.lock import FolderLocks",
            "locks = FolderLocks([Path(sys.argv[1])])",
            "locks.take()",
            *steps,
        ]
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


FORK = "child = os.fork()\nif child == 0: os.close(1); signal.pause()\nprint(child, flush=True)"
# As a library does it that knows nothing of Python.
FORK_UNNOTICED = FORK.replace("os.fork()", "ctypes.PyDLL(None).fork()")


def test_second_lock_is_refused_and_its_owner_named(tmp_path: Path) -> None:
    first, second = FolderLocks([tmp_path]), FolderLocks([tmp_path / "other", tmp_path])
    first.take()
    with pytest.raises(ConfigError, match=rf"works on this folder already \(process {os.getpid()}\)"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_locks_are_taken_together_or_not_at_all(tmp_path: Path) -> None:
    held, both, other = (
        FolderLocks(folders) for folders in ([tmp_path / "b"], [tmp_path / "a", tmp_path / "b"], [tmp_path / "a"])
    )
    held.take()
    with pytest.raises(ConfigError):
        both.take()
    other.take()
    held.release()
    other.release()


def test_forked_process_does_not_keep_the_lock_of_one_that_died(tmp_path: Path) -> None:
    with forked(tmp_path, FORK) as process:
        assert process.wait(30) == 0
        locks = FolderLocks([tmp_path])
        locks.take()
        locks.release()


def test_released_lock_is_free_although_a_process_has_its_file_open(tmp_path: Path) -> None:
    steps = (FORK_UNNOTICED, "locks.release()", "FolderLocks([Path(sys.argv[1])]).take()", "print('taken')")
    with forked(tmp_path, *steps) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"


def test_forked_process_cannot_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    locks = FolderLocks([tmp_path])
    locks.take()
    child = os.fork()
    if child == 0:
        locks.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ConfigError, match="works on this folder already"):
        FolderLocks([tmp_path]).take()
    locks.release()
