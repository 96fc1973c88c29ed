"""Standard output as a sink: one JSON line per event, for pipes and for looking.

A terminal gets the controls in it as JSON escapes, which mean the same: events are written by others, and a control
could rewrite the screen. A pipe gets the bytes as they were put.

A reader that does not read must not keep the relay from stopping: so a chunk is written only when it fits
without blocking, and between two chunks the delivery can be cancelled.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from typing import Final, TextIO

from pillarbox.errors import SinkUnavailable
from pillarbox.event import Claim, Outcome
from pillarbox.sinks import Sink
from pillarbox.sinks.lines import encode_lines
from pillarbox.sinks.threads import acquire, run_stoppable
from pillarbox.sinks.url import SinkUrl
from pillarbox.wording import escape_json

_GLANCE_MS: Final = 50
_GONE: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL


class StdoutSink(Sink):
    """Writes one JSON line per event to standard output, or to the `stream` given. Url: `stdout:`.

    `Delivered` means that the system has taken the line, not that the reader behind a pipe has read it.
    """

    is_quick: bool = False

    def __init__(self, name: str = "stdout:", *, stream: TextIO | None = None) -> None:
        self.name = name
        self._stream = stream
        self._mutex = threading.Lock()
        self._is_torn = False

    @classmethod
    def from_url(cls, url: SinkUrl) -> StdoutSink:
        url.refuse_location()
        url.refuse_options()
        return cls(url.name)

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        descriptor = _find_descriptor(self._choose_stream())
        if descriptor is None:
            return
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(events & _GONE for _, events in poll.poll(0)):
            raise SinkUnavailable(f"Sink {self.name!r}: nobody reads standard output any more")

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        def write(stop: threading.Event) -> Sequence[Outcome]:
            lines, outcomes = encode_lines(claims)
            if lines and acquire(self._mutex, stop):
                try:
                    self._write(lines, stop)
                except (OSError, ValueError) as error:
                    raise SinkUnavailable(f"Sink {self.name!r}: cannot write to standard output: {error}") from error
                finally:
                    self._mutex.release()
            return outcomes

        return await run_stoppable(write) if claims else []

    async def close(self) -> None:
        """Leave the stream open: it is not ours. Every batch was flushed."""

    def _choose_stream(self) -> TextIO:
        # Looked up each time: a test or a notebook may put another stream in its place.
        stream: TextIO | None = self._stream or sys.stdout
        if stream is None or stream.closed:
            raise SinkUnavailable(f"Sink {self.name!r}: standard output is closed")
        return stream

    def _write(self, lines: bytes, stop: threading.Event) -> None:
        stream = self._choose_stream()
        stream.flush()
        if stream.isatty():
            lines = escape_json(lines.decode()).encode()
        descriptor = _find_descriptor(stream)
        if descriptor is None:
            _write_to_object(stream, lines)
            return
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        left = memoryview(b"\n" + lines if self._is_torn else lines)
        while left and not stop.is_set():
            if not poll.poll(_GLANCE_MS):
                continue
            # A pipe that is ready takes this much without blocking.
            try:
                written = os.write(descriptor, left[: select.PIPE_BUF])
            except BlockingIOError:  # someone made it non-blocking, and it took less than it promised
                continue
            self._is_torn = left[written - 1] != ord("\n")
            left = left[written:]


def _find_descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except OSError:
        return None


def _write_to_object(stream: TextIO, lines: bytes) -> None:
    binary = getattr(stream, "buffer", None)
    if binary is None:
        stream.write(lines.decode())
    else:
        binary.write(lines)
    stream.flush()
