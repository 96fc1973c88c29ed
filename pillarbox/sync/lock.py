"""One service a folder: a lock on the same file that sqloutbox 0.6 locks, so that the two exclude each other as well.

The lock belongs to the process that took it and is gone with it, however it ends. A process forked from it has no part
in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from weakref import WeakSet

from pillarbox.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME: Final = ".sqloutbox.lock"
_LONGEST_OWNER: Final = 100


class FolderLocks:
    """The locks of all folders of a service, taken together or not at all."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = sorted({folder.resolve() for folder in folders})
        self._held: list[int] = []

    def take(self) -> None:
        """Take the locks; raises `ConfigError` when another service has one of them."""
        if fcntl is None:
            raise ConfigError("pillarbox sync: needs file locks (fcntl), which this system does not have")
        if self._held:
            return
        _taken.add(self)
        try:
            for folder in self._folders:
                self._held.append(_lock(folder))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for file in self._held:
            # Closing alone would leave it locked as long as a forked process has the file open.
            fcntl.flock(file, fcntl.LOCK_UN)
        self._forget()

    def _forget(self) -> None:
        while self._held:
            os.close(self._held.pop())


_taken: Final[WeakSet[FolderLocks]] = WeakSet()


def _forget_in_child() -> None:
    # The lock is the parent's: not unlocked here, and not kept when the parent is gone.
    for locks in _taken:
        locks._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _lock(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
    except BlockingIOError:
        owner = os.read(file, _LONGEST_OWNER).decode(errors="replace").strip()
        os.close(file)
        who = f"process {owner}" if owner.isdigit() else "another process"
        raise ConfigError(
            f"{path}: a service works on this folder already ({who}). Only one may: stop it, or use another db_dir"
        ) from None
    except OSError:
        os.close(file)
        raise
    return file
