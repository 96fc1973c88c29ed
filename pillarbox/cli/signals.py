"""Signals before a command has handlers of its own: while modules load, nothing is under way that could be finished.

This module imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SERVICES: Final = (("relay",), ("consume",), ("handlers", "run"), ("sync", "run"))


def obeyed() -> list[signal.Signals]:
    """The signals that stop a command: SIGHUP unless whoever started us has it ignored, as nohup does."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOPPING if number is not signal.SIGHUP or not is_deaf]


def take_early(args: Sequence[str]) -> None:
    """End at once from now on: regularly when the command is one that runs until it is stopped."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"pillarbox: stopped before it began\n")
        os._exit(0 if _is_service(args) else 128 + number)

    for number in obeyed():
        signal.signal(number, end)


def take_over(args: Sequence[str]) -> None:
    """Let a command that ends by itself clean up when it is stopped; a service sets handlers of its own."""
    if _is_service(args):
        return

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for number in obeyed():
        signal.signal(number, end)


def _is_service(args: Sequence[str]) -> bool:
    words = tuple(arg for arg in args if not arg.startswith("-"))
    return any(words[: len(service)] == service for service in _SERVICES) and not {"-h", "--help"} & set(args)
