"""`pillarbox status`, `pillarbox prune` and `pillarbox audit`: the table as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated

import orjson
import typer

from pillarbox.cli.options import (
    ActorOption,
    DryRunOption,
    JsonOption,
    Load,
    UsageError,
    connect,
    connect_parts,
    default_actor,
    duration_option,
    takes_rows,
    takes_settings,
)
from pillarbox.cli.output import (
    STATES,
    add_counts,
    counts_to_json,
    format_age,
    format_time,
    print_json,
    print_table,
    working,
)
from pillarbox.cli.terminal import echo, hide_secrets, show_line
from pillarbox.config import Config
from pillarbox.errors import SinkUnavailable
from pillarbox.stores import Counts, Entry, Pruned
from pillarbox.urls import mask_url
from pillarbox.wording import say_count

CHECK_SECONDS = 10
_MEANING = {
    "new": "can be claimed now",
    "retrying": "failed before, will be tried again",
    "held": "claimed by a relay now",
    "scheduled": "put with a later time",
    "blocked": "wait behind an earlier event of their key",
    "delivered": "delivered and kept",
    "dead": "given up; see `pillarbox events list --state dead`",
}


@takes_rows
def status(
    load: Load,
    check: Annotated[bool, typer.Option("--check", help="Ask the destinations too; exit 1 when one is down.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count the events in each part of their life."""
    config = load()
    table, parts = asyncio.run(_count(config))
    answers = asyncio.run(_check(config)) if check else {}
    if as_json:
        counted = counts_to_json(add_counts(parts.values()))
        if len(parts) > 1:
            counted["sinks"] = {name: counts_to_json(counts) for name, counts in parts.items()}
        if check:
            counted["destinations"] = answers
        print_json({"store": mask_url(config.store.url or ""), "table": table, **counted})
    else:
        _print_status(table, parts, answers)
    if any(answer != "up" for answer in answers.values()):
        raise typer.Exit(1)


def _print_status(table: str, parts: Mapping[str, Counts], answers: Mapping[str, str]) -> None:
    columns = list(parts.values())
    rows = [
        (STATES.get(name, name), *(getattr(counts, name) for counts in columns), meaning)
        for name, meaning in _MEANING.items()
    ]
    ages = (format_age(counts.oldest_pending) for counts in columns)
    rows.append(("oldest", *ages, "age of the oldest undelivered event"))
    names = ["events"] if len(parts) == 1 else [name or "not routed" for name in parts]
    print_table([table, *names, ""], rows, right=names)
    for name, answer in answers.items():
        echo(f"{show_line(name)}: {show_line(answer)}")


async def _check(config: Config) -> dict[str, str]:
    """Ask every configured destination whether it can take events now."""
    sinks = [each.open(name) for name, each in config.sinks.items()] or [config.open_sink()]
    answers = {}
    for sink in sinks:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await sink.check()
            answers[sink.name] = "up"
        except (SinkUnavailable, TimeoutError) as error:
            answers[sink.name] = hide_secrets(str(error)) or f"no answer within {CHECK_SECONDS} s"
        finally:
            await sink.close()
    return answers


async def _count(config: Config) -> tuple[str, dict[str, Counts]]:
    async with connect_parts(config) as parts:
        counts = {name: await store.counts() for name, store in parts.items()}
        return next(iter(parts.values())).tables["outbox"].fullname, counts


@takes_rows
def prune(
    load: Load,
    actor: ActorOption = None,
    delivered_age: Annotated[
        timedelta | None,
        duration_option("--delivered-age", example="7d", text="Delete events delivered longer ago than this."),
    ] = None,
    dead_age: Annotated[
        timedelta | None,
        duration_option("--dead-age", example="30d", text="Delete events that died longer ago than this."),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete old delivered and dead events; pending ones never."""
    if delivered_age is None and dead_age is None:
        raise UsageError("Nothing to prune: give --delivered-age, --dead-age or both.")
    pruned = asyncio.run(_prune(load(), delivered_age, dead_age, actor or default_actor(), dry_run))
    if as_json:
        print_json({"delivered": pruned.delivered, "dead": pruned.dead, "dry_run": dry_run})
    else:
        verb = "Would delete" if dry_run else "Deleted"
        echo(f"{verb} {pruned.delivered} delivered and {say_count(pruned.dead, 'dead event')}.")


async def _prune(
    config: Config, delivered_age: timedelta | None, dead_age: timedelta | None, actor: str, dry_run: bool
) -> Pruned:
    total = Pruned()
    async with connect_parts(config) as parts:
        with working("Pruning"):
            for store in parts.values():
                pruned = await store.prune(delivered_age=delivered_age, dead_age=dead_age, actor=actor, dry_run=dry_run)
                total = Pruned(total.delivered + pruned.delivered, total.dead + pruned.dead)
    return total


@takes_settings
def audit(
    load: Load,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many lines, the newest first.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List what operators did: redrive, drop, replay, prune."""
    entries = asyncio.run(_read_audit(load(), limit))
    if as_json:
        fields = ("at", "actor", "action", "events", "detail")
        print_json([{name: getattr(entry, name) for name in fields} for entry in entries])
        return
    rows = [
        (format_time(entry.at), entry.actor, entry.action, entry.events, _describe_detail(entry)) for entry in entries
    ]
    print_table(["at", "actor", "action", "events", "detail"], rows, right=["events"])


async def _read_audit(config: Config, limit: int) -> Sequence[Entry]:
    async with connect(config) as store:
        return await store.audit(limit)


def _describe_detail(entry: Entry) -> str:
    return orjson.dumps(entry.detail, default=str).decode() if entry.detail else ""
