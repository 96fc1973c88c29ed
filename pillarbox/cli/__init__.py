"""The command line: `pillarbox`, or `python -m pillarbox`.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed (one line says why), 2
the command line was not understood; 129, 130 or 143 ended by SIGHUP, SIGINT or SIGTERM. What runs until it is stopped
takes these three alike: the first one is its regular end, with 0, also before it has begun.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    # What the commands import takes a second, and many on a busy machine: a signal may come before.
    from pillarbox.cli import signals

    signals.take_early(sys.argv[1:])
    from pillarbox.cli.commands import run

    signals.take_over(sys.argv[1:])
    run()
