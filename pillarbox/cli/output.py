"""How results are shown: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from typing import IO, Any, Final

import orjson

from pillarbox.cli.terminal import show_line
from pillarbox.durations import format_duration
from pillarbox.stores import Counts
from pillarbox.wording import escape_json

WIDEST = 10_000


# rich is imported where it is used: most commands print a line or two and should start quickly.


def print_json(value: object, *, file: IO[str] | None = None) -> None:
    """Print one JSON document; keys keep their order."""
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_UTC_Z, default=str).decode()
    print(escape_json(text), file=file or sys.stdout, flush=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table of one line a row, as wide as it needs: what is cut or folded cannot be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for row in rows:
        # As Text: an event's own words must not be read as markup.
        table.add_row(*(Text("" if cell is None else show_line(str(cell))) for cell in row))
    console = Console(width=WIDEST, highlight=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


@contextmanager
def progress(action: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar that the yielded function moves on, when somebody watches."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(action, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something of unknown length is going on, when somebody watches."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


STATES: Final = {"new": "ready", "retrying": "waiting", "held": "leased"}
"""What the parts of `Counts` are called for operators, as `events list` calls them; the others have the same name."""


def counts_to_json(counts: Counts) -> dict[str, Any]:
    values = asdict(counts)
    oldest: timedelta | None = values.pop("oldest_pending")
    # Under their former names too, until the next release.
    states = {STATES.get(name, name): count for name, count in values.items()}
    return {
        **states,
        **{name: values[name] for name in STATES},
        "oldest_pending_seconds": None if oldest is None else round(oldest.total_seconds(), 3),
    }


_REMAINS = {
    "new": "ready",
    "retrying": "waiting",
    "held": "leased by others",
    "scheduled": "scheduled",
    "blocked": "blocked",
    "dead": "dead",
}


def describe_counts(counts: Counts) -> str:
    """What remains, as part of a sentence."""
    parts = [f"{getattr(counts, name)} {words}" for name, words in _REMAINS.items() if getattr(counts, name)]
    return ", ".join(parts) or "nothing"


def format_age(age: timedelta | None) -> str:
    """A duration in its two largest units, as people say it."""
    if age is None:
        return "-"
    whole = timedelta(seconds=int(age.total_seconds()))
    if whole >= timedelta(days=1):
        whole -= whole % timedelta(hours=1)
    elif whole >= timedelta(hours=1):
        whole -= whole % timedelta(minutes=1)
    return format_duration(whole)


def format_time(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def add_counts(counts: Iterable[Counts]) -> Counts:
    """All counts together, with the age of the oldest."""
    listed = list(counts)
    ages = [each.oldest_pending for each in listed if each.oldest_pending is not None]
    names = [item.name for item in fields(Counts) if item.name != "oldest_pending"]
    total = {name: sum(getattr(each, name) for each in listed) for name in names}
    return Counts(**total, oldest_pending=max(ages, default=None))
