"""What the commands of `pillarbox sync` share: the options that choose queues, and how a queue is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pillarbox.cli.logs import set_up_logging
from pillarbox.cli.options import LOGGING, Command, UsageError, add_options
from pillarbox.cli.records import ERROR_WIDTH
from pillarbox.errors import ConfigError
from pillarbox.sync.queues import QueueRef, choose_queues, find_queues
from pillarbox.sync.toml import FILE_NAME, load_sync_layout

Find = Callable[[], list[QueueRef]]
"""Finds the queues that the options of a command choose."""

FindOne = Callable[[], QueueRef]
"""Finds the one queue that they name."""

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help=f"The service's settings ({FILE_NAME}).")
]

_QUEUES: Final[Mapping[str, tuple[Any, Any]]] = {
    "config": (ConfigOption, None),
    "db_dir": (
        Annotated[
            Path | None,
            typer.Option("--db-dir", "-d", metavar="FOLDER", help="The queue files in a folder, or one file, instead."),
        ],
        None,
    ),
    "target": (
        Annotated[str | None, typer.Option("--target", metavar="APP.DB", help="Only the queues of this target.")],
        None,
    ),
    "table": (
        Annotated[str | None, typer.Option("--table", metavar="NAME", help="Only the queue of this table.")],
        None,
    ),
}


def takes_queues(function: Command) -> Command:
    """Add the options that choose queues; the command's parameter `find` finds them. No secret is needed."""
    return add_options(function, "find", _make_find, first=_QUEUES, last=LOGGING)


def takes_one_queue(function: Command) -> Command:
    """The same for a command that changes what becomes of statements: `find` finds one, and its table must be named."""

    def make(chosen: Mapping[str, Any]) -> FindOne:
        find = _make_find(chosen)

        def find_one() -> QueueRef:
            queues = find()
            if queues and chosen["table"] is None:
                # Even of a single one: what a statement is lost by must not be typed by mistake.
                raise UsageError(f"No table is given: choose a queue with --table: {_list(queues)}.")
            return expect_one(queues)

        return find_one

    return add_options(function, "find", make, first=_QUEUES, last=LOGGING)


def _make_find(chosen: Mapping[str, Any]) -> Find:
    set_up_logging(chosen["verbose"] - chosen["quiet"])

    def find() -> list[QueueRef]:
        queues = find_queues(_choose_place(chosen["config"], chosen["db_dir"]))
        # A folder without any queue is no error, whatever was to be chosen of it.
        return choose_queues(queues, target=chosen["target"], table=chosen["table"]) if queues else []

    return find


def takes_logging(function: Command) -> Command:
    """Add the options for logging; the command's parameter `verbosity` is what they come to."""
    return add_options(
        function, "verbosity", lambda chosen: chosen["verbose"] - chosen["quiet"], first={}, last=LOGGING
    )


def _choose_place(config: Path | None, db_dir: Path | None) -> Any:
    if db_dir is not None:
        if config is not None:
            raise UsageError("Both --config and --db-dir are given: expected one of them.")
        return db_dir
    return load_sync_layout(check_config(config, instead=", or --db-dir FOLDER for queue files without settings"))


def check_config(config: Path | None, *, instead: str = "") -> Path:
    """The settings file to read; it is an error when there is none."""
    path = config or Path(FILE_NAME)
    if not path.is_file():
        raise ConfigError(f"There is no settings file {str(path)!r}: give --config FILE{instead}.")
    return path


def expect_one(queues: Sequence[QueueRef]) -> QueueRef:
    """The only queue; it is a usage error, which lists the choices, when there are several or none."""
    if len(queues) == 1:
        return queues[0]
    if not queues:
        raise UsageError("There is no queue here.")
    raise UsageError(f"Several queues are meant: choose one with --table, --target or --db-dir FILE: {_list(queues)}.")


def _list(queues: Sequence[QueueRef]) -> str:
    return ", ".join(f"{each.options} ({each.path})" for each in queues)


def shorten(text: str | None, width: int = ERROR_WIDTH) -> str:
    """A text in one line of at most so many characters."""
    line = " ".join((text or "").split())
    return line if len(line) <= width else line[: width - 1] + "…"


def describe_place(queue: QueueRef) -> dict[str, Any]:
    """What names a queue in JSON."""
    return {"target": queue.target, "table": queue.table, "namespace": queue.namespace, "path": str(queue.path)}
