"""Logging of the command line: plain lines on standard error; standard output is for results and events."""

from __future__ import annotations

import logging
import sys
from copy import copy
from typing import Any

from pillarbox.cli.terminal import hide_in_error, hide_secrets, show_page

_LEVELS = {-1: logging.WARNING, 0: logging.INFO}
_verbosity = 0


def set_up_logging(verbosity: int) -> None:
    """Log to standard error: 0 what happens, above all details, below zero only what is wrong."""
    global _verbosity
    _verbosity = verbosity
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    level = logging.ERROR if verbosity < -1 else _LEVELS.get(verbosity, logging.DEBUG)
    logging.getLogger("pillarbox").setLevel(level)
    # It logs each failed connection with its traceback; the sink raises the same, and the relay says so once.
    logging.getLogger("aiormq").setLevel(logging.CRITICAL if verbosity < 1 else logging.WARNING)
    logging.captureWarnings(True)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        shown = copy(record)
        # What another handler made of the traceback is not hidden.
        shown.exc_text = None
        # The words of ours stay: a mask of one would tell that it is the password.
        if record.name.partition(".")[0] == "pillarbox" and isinstance(record.args, tuple):
            shown.args = tuple(map(_hide_argument, record.args))
        else:
            shown.msg, shown.args = hide_secrets(record.getMessage()), None
        # Only a line of ours begins at the margin: what others wrote cannot pass for one.
        return show_page(super().format(shown)).replace("\n", "\n  ")

    def formatException(self, ei: Any) -> str:  # noqa: N802 -- logging's name
        return hide_secrets(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 -- logging's name
        return hide_secrets(super().formatStack(stack_info))


def _hide_argument(value: object) -> object:
    if isinstance(value, str):
        return hide_in_error(value)
    if isinstance(value, Exception):
        return hide_in_error(str(value))
    is_clean = isinstance(value, int | float) or all(hide_secrets(text) == text for text in (str(value), repr(value)))
    return value if is_clean else hide_secrets(str(value))


def wants_tracebacks() -> bool:
    return _verbosity > 1
