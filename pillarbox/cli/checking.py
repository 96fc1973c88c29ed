"""`pillarbox events check`: rows that would wait for ever, or out of order, and their mend."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from pillarbox.cli.options import ActorOption, JsonOption, Load, connect_parts, default_actor, takes_rows
from pillarbox.cli.output import print_json, print_table
from pillarbox.config import Config
from pillarbox.stores.checking import Fault
from pillarbox.wording import say_count

MendOption = Annotated[bool, typer.Option("--mend", help="Mend what can be mended.")]


@takes_rows
def check(load: Load, mend: MendOption = False, actor: ActorOption = None, as_json: JsonOption = False) -> None:
    """Look for events that would wait for ever or out of order; relays may run meanwhile."""
    found, mended = asyncio.run(_check(load(), actor or default_actor() if mend else None))
    left = len(found) - len(mended)
    if as_json:
        faults = [{**asdict(fault), "meaning": fault.meaning, "mended": fault in mended} for fault in found]
        print_json({"faults": faults, "found": len(found), "mended": len(mended)})
    elif not found:
        typer.echo("Every event is as it should be.")
    else:
        rows = [(f.kind, f.seq, f.id, f.key or "", f"{f.meaning}{' (mended)' if f in mended else ''}") for f in found]
        print_table(("fault", "seq", "id", "key", "meaning"), rows, right=["seq"])
        typer.echo(f"Found {say_count(len(found), 'fault')}, mended {len(mended)}.")
    if left:
        raise typer.Exit(1)


async def _check(config: Config, actor: str | None) -> tuple[list[Fault], list[Fault]]:
    found: dict[Fault, None] = {}
    mended: list[Fault] = []
    async with connect_parts(config) as parts:
        for store in parts.values():
            # So many of a kind are found at once; when those are mended, there may be others.
            while new := [fault for fault in await store.find_faults() if fault not in found]:
                found |= dict.fromkeys(new)
                if actor is None:
                    break
                mended += await store.mend_faults(new, actor=actor)
    return list(found), mended
