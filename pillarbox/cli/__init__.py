"""The command line: `pillarbox`, or `python -m pillarbox`.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed (one line says
why), 2 the command line was not understood, 130 or 143 ended by a second signal.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from pillarbox import __version__
from pillarbox.cli.bench import bench
from pillarbox.cli.consume import consume
from pillarbox.cli.demo import demo
from pillarbox.cli.events import app as events
from pillarbox.cli.handlers import app as handlers
from pillarbox.cli.logs import wants_tracebacks
from pillarbox.cli.options import UsageError
from pillarbox.cli.partitions import app as partitions
from pillarbox.cli.relay import leave_threads_behind, relay
from pillarbox.cli.schema import app as schema
from pillarbox.cli.status import audit, prune, status
from pillarbox.cli.sync import app as sync
from pillarbox.errors import PillarboxError, SinkUnavailable, StoreUnavailable

app = typer.Typer(
    name="pillarbox",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"pillarbox {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A transactional outbox: an event put in a transaction is delivered at least once, in order per key."""


app.command()(relay)
app.command()(consume)
app.command()(status)
app.add_typer(events, name="events")
app.add_typer(handlers, name="handlers")
app.command()(prune)
app.command()(audit)
app.add_typer(schema, name="schema")
app.add_typer(partitions, name="partitions")
app.add_typer(sync, name="sync")
app.command()(bench)
app.command()(demo)


def main() -> None:
    """Run the command line and exit."""
    try:
        app(prog_name="pillarbox")
    except SystemExit as ended:
        leave_threads_behind(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    except UsageError as error:
        _fail(error, code=2)
    except (PillarboxError, OSError) as error:
        _fail(error, code=1)
    except Exception as error:
        if not wants_tracebacks():
            print(f"pillarbox: {type(error).__name__}: {error}", file=sys.stderr)
            print("hint: this is a defect; run again with -vv for the traceback", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.exit(1)


def _fail(error: Exception, *, code: int) -> None:
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has seen enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if wants_tracebacks():
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    print(f"pillarbox: {text}", file=sys.stderr)
    hint = _hint(error)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    sys.exit(code)


def _hint(error: Exception) -> str | None:
    if isinstance(error, StoreUnavailable):
        return "is the database up, and are its url, user and password right?"
    if isinstance(error, SinkUnavailable):
        return "the events stay in the outbox; run again when the destination is back"
    if isinstance(error, UsageError):
        return "pillarbox COMMAND --help lists the options"
    return None
