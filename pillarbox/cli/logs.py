"""Logging of the command line: plain lines on standard error; standard output is for results and events."""

from __future__ import annotations

import logging
import sys

from pillarbox.cli.terminal import hide_secrets, show_page

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
        # Only a line of ours begins at the margin: what others wrote cannot pass for one.
        return show_page(hide_secrets(super().format(record))).replace("\n", "\n  ")


def wants_tracebacks() -> bool:
    return _verbosity > 1
