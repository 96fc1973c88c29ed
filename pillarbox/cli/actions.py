"""`pillarbox events redrive`, `drop` and `replay`: what operators do to events that are over.

The work goes in chunks of one transaction each, so that a large one locks little at a time. What dies or is
delivered again meanwhile is not taken a second time: only events that were over when the command began are.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Literal, NamedTuple

import sqlalchemy as sa
import typer

from pillarbox.cli.options import (
    ActorOption,
    DryRunOption,
    JsonOption,
    Load,
    UsageError,
    connect_parts,
    default_actor,
    takes_filter,
    takes_rows,
)
from pillarbox.cli.output import print_json, progress
from pillarbox.cli.terminal import echo
from pillarbox.config import Config
from pillarbox.layouts.clock import now
from pillarbox.stores import Filter
from pillarbox.stores.sql import SqlStore
from pillarbox.wording import say_count

CHUNK = 1000

Action = Literal["redrive", "drop", "replay"]


def _parse_rate(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)/(s|m|h)", text)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"expected events a time, such as 100/s, 10/m or 1/h; got {text!r}")
    return float(match[1]) / {"s": 1, "m": 60, "h": 3600}[match[2]]


AllOption = Annotated[bool, typer.Option("--all", help="Every event; needed when no filter is given.")]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="At most this many, the oldest first.")
]
RateOption = Annotated[
    float | None, typer.Option("--rate", parser=_parse_rate, metavar="N/s", help="Not faster than this.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class Task(NamedTuple):
    """What an operator wants done."""

    action: Action
    where: Filter
    actor: str
    limit: int | None = None
    rate: float | None = None
    dry_run: bool = False
    asks: bool = False


@takes_filter
@takes_rows
def redrive(
    load: Load,
    where: Filter,
    actor: ActorOption = None,
    everything: AllOption = False,
    limit: LimitOption = None,
    rate: RateOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Return dead events to the outbox, the oldest first."""
    _check_choice(where, everything)
    _run(load(), Task("redrive", where, actor or default_actor(), limit, rate, dry_run), as_json)


@takes_filter
@takes_rows
def drop(
    load: Load,
    where: Filter,
    actor: ActorOption = None,
    everything: AllOption = False,
    limit: LimitOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete dead events for good, which frees their keys."""
    _check_choice(where, everything)
    asks = not yes and not dry_run
    if asks and not sys.stdin.isatty():
        raise UsageError("drop deletes events for good: without a terminal to ask on, give --yes.")
    _run(load(), Task("drop", where, actor or default_actor(), limit, None, dry_run, asks), as_json)


@takes_filter
@takes_rows
def replay(
    load: Load,
    where: Filter,
    actor: ActorOption = None,
    everything: AllOption = False,
    limit: LimitOption = None,
    rate: RateOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Deliver kept events again; they carry a header that says so."""
    _check_choice(where, everything)
    _run(load(), Task("replay", where, actor or default_actor(), limit, rate, dry_run), as_json)


def _check_choice(where: Filter, everything: bool) -> None:
    if where.is_empty and not everything:
        raise UsageError("No events chosen: give a filter such as --type or --error, or --all for every event.")
    if everything and not where.is_empty:
        raise UsageError("--all chooses every event, and a filter some of them: give one or the other.")


_DONE = {"redrive": "Redrove", "drop": "Dropped", "replay": "Replayed"}


def _run(config: Config, task: Task, as_json: bool) -> None:
    matched, done = asyncio.run(_act(config, task))
    if as_json:
        print_json({"action": task.action, "matched": matched, "events": done, "dry_run": task.dry_run})
        return
    kind = "delivered event" if task.action == "replay" else "dead event"
    if task.dry_run:
        echo(f"Would {task.action} {say_count(matched, kind)}.")
    elif matched:
        echo(f"{_DONE[task.action]} {done} of {say_count(matched, kind)}.")
    else:
        echo(f"No {kind}s match.")


async def _act(config: Config, task: Task) -> tuple[int, int]:
    async with connect_parts(config) as parts:
        matches = {name: await _count(store, task) for name, store in parts.items()}
        matched = sum(matches.values()) if task.limit is None else min(task.limit, sum(matches.values()))
        if task.dry_run or not matched:
            return matched, 0
        if task.asks:
            typer.confirm(f"Delete {say_count(matched, 'dead event')} for good?", abort=True, err=True)
        done = 0
        for name, store in parts.items():
            if matches[name] and done < matched:
                done += await _act_in_chunks(store, task, min(matches[name], matched - done))
        return matched, done


async def _count(store: SqlStore, task: Task) -> int:
    count: int = await getattr(store, task.action)(task.where, actor=task.actor, limit=task.limit, dry_run=True)
    return count


async def _act_in_chunks(store: SqlStore, task: Task, matched: int) -> int:
    """Do it a chunk at a time, not faster than asked for."""
    perform = getattr(store, task.action)
    where = replace(task.where, until=await _not_after(store, task.where.until))
    chunk = CHUNK if task.rate is None else min(CHUNK, math.ceil(task.rate))
    loop = asyncio.get_running_loop()
    started, done = loop.time(), 0
    with progress(task.action, matched) as advance:
        while done < matched:
            limit = min(chunk, matched - done)
            count: int = await perform(where, actor=task.actor, limit=limit)
            if not count:
                break
            done += count
            advance(count)
            if task.rate is not None and done < matched:
                await asyncio.sleep(started + done / task.rate - loop.time())
    return done


async def _not_after(store: SqlStore, until: datetime | None) -> datetime:
    """The database's time now, unless the operator gave an earlier one."""
    moment: datetime = await store.run(lambda db: db.execute(sa.select(now())).scalar_one(), writes=False)
    return moment if until is None else min(until, moment)
