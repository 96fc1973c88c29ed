"""`pillarbox events`: look at events, and redrive, drop or replay them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, cast, get_args
from uuid import UUID

import typer

from pillarbox.cli.actions import drop, redrive, replay
from pillarbox.cli.checking import check
from pillarbox.cli.options import (
    JsonOption,
    Load,
    connect_parts,
    parse_id_option,
    takes_filter,
    takes_rows,
)
from pillarbox.cli.output import STATES as FORMER_STATES
from pillarbox.cli.output import print_json, print_table
from pillarbox.cli.records import HEADINGS, describe_record, record_to_json, summarize_record
from pillarbox.cli.terminal import echo
from pillarbox.config import Config
from pillarbox.errors import PillarboxError
from pillarbox.stores import Filter, Record, State

app = typer.Typer(help="List, show, redrive, drop and replay events.", no_args_is_help=True, rich_markup_mode=None)


_STATES: Final[tuple[str, ...]] = get_args(State)
_LISTED: Final = f"{', '.join(_STATES[:-1])} or {_STATES[-1]}"


def parse_state_option(text: str) -> str:
    """Read a part of an event's life, also under its former name."""
    if text not in (*_STATES, *FORMER_STATES):
        raise typer.BadParameter(f"expected {_LISTED}; got {text!r}")
    return text


@app.command("list")
@takes_filter
@takes_rows
def list_events(
    load: Load,
    where: Filter,
    state: Annotated[
        str | None,
        typer.Option(parser=parse_state_option, metavar="STATE", help=f"{_LISTED}."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many, the newest first.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List events, the newest first."""
    records = asyncio.run(_find(load(), where, state, limit))
    if as_json:
        print_json([record_to_json(*each) for each in records])
        return
    if not records:
        echo("No events match.", err=True)
        return
    # The last column, where there is anything in it: an outbox without routes has one destination.
    has_recipients = any(name for name, _ in records)
    rows = [(*summarize_record(record), *([name] if has_recipients else [])) for name, record in records]
    print_table([*HEADINGS, *(["recipient"] if has_recipients else [])], rows, right=["attempts", "age"])


@app.command()
@takes_rows
def show(
    load: Load,
    event_id: Annotated[UUID, typer.Argument(parser=parse_id_option, metavar="ID", help="The event's id.")],
    as_json: JsonOption = False,
) -> None:
    """Show everything about one event."""
    config = load()
    # An id that died may have been put again, and each sink has a row of its own: all are shown.
    records = asyncio.run(_find(config, Filter(ids=(event_id,)), None, 100))
    if not records:
        raise PillarboxError(
            f"Event {event_id} is not in table {config.store.table or config.get_layout().table!r}. "
            "Delivered events are deleted unless the relay runs with --retention."
        )
    if as_json:
        print_json([record_to_json(*each, with_payload=True) for each in records])
        return
    echo("\n\n".join(describe_record(*each) for each in records))


app.command()(redrive)
app.command()(drop)
app.command()(replay)
app.command()(check)


async def _find(config: Config, where: Filter, state: str | None, limit: int) -> Sequence[tuple[str, Record]]:
    """The events that match, each with the sink or handler whose row it is; "" is nobody's yet."""
    wanted = None if state is None else _read_state(state)
    async with connect_parts(config) as parts:
        found = [
            (name, record)
            for name, store in parts.items()
            for record in await store.events(where, state=wanted, limit=limit)
        ]
    return found[:limit] if len(parts) == 1 else sorted(found, key=_put_at, reverse=True)[:limit]


def _read_state(state: str) -> State:
    current = FORMER_STATES.get(state, state)
    if current != state:
        echo(f"hint: --state {state} is now called {current}; the old word goes with the next release", err=True)
    return cast(State, current)


def _put_at(found: tuple[str, Record]) -> datetime:
    put_at: datetime | None = found[1].event.created_at
    return datetime.min.replace(tzinfo=UTC) if put_at is None else put_at
