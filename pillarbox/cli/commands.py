"""Every command, and how a failure is told."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

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
from pillarbox.cli.terminal import echo, forget_secrets, hide_in_error, hide_secrets, keep_secret
from pillarbox.errors import PillarboxError, SinkUnavailable, StoreUnavailable

# click's, or that of the copy of click in newer releases of Typer.
_Misuse: Final = cast(type[Any], typer.BadParameter.__base__)


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _Misuse as error:
            # It quotes what it did not expect, such as a url without its --store.
            # Newer releases of Typer also say which library refused the value.
            error.message = hide_secrets(error.message.removeprefix("Value error, "))
            raise


app = typer.Typer(
    name="pillarbox",
    cls=_Commands,
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


def run() -> None:
    """Run the command line and exit."""
    forget_secrets()
    given = (arg.partition("=")[2] if arg.startswith("--") else arg for arg in sys.argv[1:])
    # Also a url that stands where none belongs; without : and = it is an address such as ann@example.
    keep_secret(*(each for each in given if ":" in each or "=" in each))
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
            _complain(f"{type(error).__name__}: {hide_secrets(str(error))}")
            _advise("this is a defect; run again with -vv for the traceback")
        else:
            _print_traceback(error)
        sys.exit(1)


def _fail(error: Exception, *, code: int) -> None:
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has seen enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if wants_tracebacks():
        _print_traceback(error)
    _complain(hide_in_error(" ".join(str(error).split())))
    hint = _hint(error)
    if hint:
        _advise(hint)
    sys.exit(code)


def _complain(text: str) -> None:
    echo(f"pillarbox: {text}", err=True)


def _advise(text: str) -> None:
    # Not hidden: a mask of a word of ours would tell that it is the password.
    echo(f"hint: {text}", err=True)


def _print_traceback(error: Exception) -> None:
    echo(hide_secrets("".join(traceback.format_exception(error))), err=True)


def _hint(error: Exception) -> str | None:
    if isinstance(error, StoreUnavailable):
        return "is the database up, and are its url, user and password right?"
    if isinstance(error, SinkUnavailable):
        return "the events stay in the outbox; run again when the destination is back"
    if isinstance(error, UsageError):
        return "pillarbox COMMAND --help lists the options"
    return None
