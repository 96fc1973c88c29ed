"""A file of JSON lines that several relays may append to.

One batch is one write, made under a lock on the file, and is on disk before its events are `Delivered`. A
process that dies between the write and the settlement makes lines repeat. One that dies in the middle of a
write leaves a torn line; the next writer ends it with a newline of its own, so that no good line is glued to
it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pillarbox.durations import format_duration, parse_duration
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import Claim, Outcome
from pillarbox.sinks import Sink
from pillarbox.sinks.lines import encode_lines
from pillarbox.sinks.threads import acquire, run_stoppable
from pillarbox.sinks.url import SinkUrl
from pillarbox.urls import mask_url

_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_LOCK_POLL: Final = 0.01


class FileSink(Sink):
    """Appends one JSON line an event. Url: `file:PATH`.

    The file is made when missing, its folder is not. A file that was renamed or deleted meanwhile, as by log
    rotation, is made anew for the next batch. A lock another process keeps for longer than `lock_timeout`
    makes the sink unavailable.
    """

    is_quick: bool = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        lock_timeout: timedelta = timedelta(seconds=3),
    ) -> None:
        text = os.fspath(path)
        if not text or "\0" in text:
            raise ConfigError(f"Sink {name or 'file:'!r}: expected the path of a file, got {text!r}")
        self.path = Path(text).absolute()
        self.name = name or f"file:{text}"
        self._lock_timeout = lock_timeout
        # Guards the descriptor: deliveries run in threads, and closing must wait for the one that writes.
        self._mutex = threading.Lock()
        self._descriptor: int | None = None

    @classmethod
    def from_url(cls, url: SinkUrl) -> FileSink:
        url.refuse_options("lock_timeout")
        if urlsplit(url.text).netloc or not url.location:
            raise ConfigError(f"Sink {url.name!r}: expected 'file:PATH' or 'file:///PATH', got {mask_url(url.text)!r}")
        lock_timeout = parse_duration(url.options.get("lock_timeout", "3s"), what=f"Sink {url.name!r} lock_timeout")
        return cls(url.location, url.name, lock_timeout=lock_timeout)

    @property
    def is_local(self) -> bool:
        return True

    async def open(self) -> None:
        await run_stoppable(self._open)

    async def check(self) -> None:
        """Look whether the file can be appended to; one that is missing is not made yet."""
        try:
            self._look()
        except OSError as error:
            raise self._unavailable(error) from error

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        def append(stop: threading.Event) -> Sequence[Outcome]:
            lines, outcomes = encode_lines(claims)
            if lines:
                self._append(lines, stop)
            return outcomes

        return await run_stoppable(append) if claims else []

    async def close(self) -> None:
        await run_stoppable(self._close)

    def _look(self) -> None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            os.stat(self.path.parent)
            needed, place = os.W_OK | os.X_OK, self.path.parent
        else:
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._refuse_irregular(found)
            needed, place = os.W_OK, self.path
        if not os.access(place, needed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _refuse_irregular(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise SinkUnavailable(f"Sink {self.name!r}: {str(self.path)!r} is not a regular file")

    def _open(self, stop: threading.Event) -> None:
        if not acquire(self._mutex, stop):
            return
        try:
            self._open_current()
        except OSError as error:
            raise self._unavailable(error) from error
        finally:
            self._mutex.release()

    def _append(self, lines: bytes, stop: threading.Event) -> None:
        if not acquire(self._mutex, stop):
            return
        try:
            descriptor = self._lock_current(stop)
            if descriptor is None:
                return
            try:
                _write(descriptor, lines)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            # Outside the lock, so that other relays write meanwhile.
            os.fsync(descriptor)
        except OSError as error:
            self._forget()
            raise self._unavailable(error) from error
        finally:
            self._mutex.release()

    def _close(self, stop: threading.Event) -> None:
        if acquire(self._mutex, stop):
            try:
                self._forget()
            finally:
                self._mutex.release()

    def _lock_current(self, stop: threading.Event) -> int | None:
        deadline = time.monotonic() + self._lock_timeout.total_seconds()
        while not stop.is_set():
            descriptor = self._open_current()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    limit = format_duration(self._lock_timeout)
                    raise SinkUnavailable(
                        f"Sink {self.name!r}: another process has kept {str(self.path)!r} locked for {limit}"
                    ) from None
                stop.wait(_LOCK_POLL)
                continue
            # It may have been rotated while we waited for the lock.
            if self._is_current(descriptor):
                return descriptor
        return None

    def _open_current(self) -> int:
        if self._descriptor is not None and not self._is_current(self._descriptor):
            self._forget()
        if self._descriptor is None:
            descriptor = os.open(self.path, _FLAGS, 0o666)
            self._descriptor = descriptor
            try:
                self._refuse_irregular(os.fstat(descriptor))
            except SinkUnavailable:
                self._forget()
                raise
            self._sync_folder()
        return self._descriptor

    def _is_current(self, descriptor: int) -> bool:
        ours = os.fstat(descriptor)
        try:
            theirs = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def _sync_folder(self) -> None:
        # A new file's name is on disk only after this. A folder we may not read we cannot sync.
        with contextlib.suppress(PermissionError):
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _unavailable(self, error: OSError) -> SinkUnavailable:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            reason = f"the folder {str(self.path.parent)!r} does not exist; create it"
        return SinkUnavailable(f"Sink {self.name!r}: cannot append to {str(self.path)!r}: {reason}")


def _write(descriptor: int, lines: bytes) -> None:
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        lines = b"\n" + lines
    left = memoryview(lines)
    while left:
        left = left[os.write(descriptor, left) :]
