"""`pillarbox partitions`: make and drop monthly partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Annotated

import sqlalchemy as sa
import typer

from pillarbox.cli.options import DryRunOption, JsonOption, Load, UsageError, connect, takes_settings
from pillarbox.cli.output import print_json
from pillarbox.cli.terminal import echo
from pillarbox.config import Config
from pillarbox.errors import SchemaError, Unsupported
from pillarbox.schema.cron import partitions_sql
from pillarbox.schema.gather import gather_delivered
from pillarbox.schema.partitions import drop_partitions, ensure_partitions, is_partitioned, split_name
from pillarbox.stores.sql import SqlStore
from pillarbox.wording import say_count

app = typer.Typer(help="Make and drop monthly partitions.", no_args_is_help=True, rich_markup_mode=None)

KeepOption = Annotated[
    int, typer.Option("--keep", metavar="MONTHS", min=1, help="Months to keep, the current one included.")
]
Change = Callable[[sa.Connection, sa.Table], list[str]]


@app.command()
@takes_settings
def ensure(
    load: Load,
    months_ahead: Annotated[
        int, typer.Option("--months-ahead", metavar="MONTHS", min=0, help="Months after the current one.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Make the partitions of this month and the next; safe to run at any time."""

    def change(db: sa.Connection, table: sa.Table) -> list[str]:
        return ensure_partitions(db, table.name, schema=table.schema, months_ahead=months_ahead)

    made, moved = asyncio.run(_ensure(load(), change))
    if as_json:
        # How many were moved is said of a table that delivered events are moved to.
        extra = {table: {"moved": number} for table, number in moved.items()}
        print_json([{"table": table, "made": names, **extra.get(table, {})} for table, names in made.items()])
        return
    _print_lines(made, "made", "nothing to make")
    for table, number in moved.items():
        if number:
            echo(f"{table}: {say_count(number, 'delivered event')} moved here from the outbox")


@app.command()
@takes_settings
def drop(load: Load, keep: KeepOption = 12, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Drop every monthly partition before the kept months, with its rows."""

    def change(db: sa.Connection, table: sa.Table) -> list[str]:
        return drop_partitions(db, table.name, schema=table.schema, keep=keep, dry_run=dry_run)

    dropped = asyncio.run(_drop(load(), change))
    if as_json:
        print_json([{"table": table, "dropped": names, "dry_run": dry_run} for table, names in dropped.items()])
        return
    _print_lines(dropped, "would be dropped" if dry_run else "dropped", "nothing to drop")


@app.command()
@takes_settings
def sql(load: Load, keep: KeepOption = 12) -> None:
    """Print a statement for pg_cron that does both; nothing is connected to."""
    config = load()
    declared = [each for each in _declare_tables(config).values() if each.dialect_options["postgresql"]["partition_by"]]
    for table in declared:
        echo(partitions_sql(table.name, schema=table.schema, keep=keep), nl=False)
    if declared:
        return
    if config.store.table is None:
        raise UsageError(f"Layout {config.store.layout!r} declares no partitioned table: use --table [SCHEMA.]NAME.")
    echo(partitions_sql(config.store.table, schema=config.store.schema, keep=keep), nl=False)


def _declare_tables(config: Config) -> Mapping[str, sa.Table]:
    layout = config.get_layout()
    schema, name = split_name(config.store.table or layout.table, config.store.schema)
    # Only names are wanted: the layout's own limit on their length does not matter here.
    return layout.declare(sa.MetaData(), name, schema)


async def _ensure(config: Config, change: Change) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Make partitions, then move what has waited for them; returns both by table."""
    async with _connect(config) as store:
        made = await _change(store, config, change)
        layout, tables = config.get_layout(), _declare_tables(config)
        history = None if layout.history is None else tables[layout.history.role].fullname
        if history is None or history not in made:
            return made, {}
        moved = 0
        while batch := await store.run(lambda db: gather_delivered(db, layout, tables)):
            moved += batch
        return made, {history: moved}


async def _drop(config: Config, change: Change) -> dict[str, list[str]]:
    async with _connect(config) as store:
        return await _change(store, config, change)


def _connect(config: Config) -> AbstractAsyncContextManager[SqlStore]:
    # The store only connects, so that the table may have any name.
    return connect(replace(config, store=replace(config.store, table=None, schema=None)))


async def _change(store: SqlStore, config: Config, change: Change) -> dict[str, list[str]]:
    """Change each of the layout's tables that is partitioned, one transaction a table."""
    if store.dialect != "postgresql":
        raise Unsupported(f"Store {store.name}: partitions are for PostgreSQL only, got {store.dialect}")
    tables = list(_declare_tables(config).values())
    partitioned = [table for table in tables if await store.run(_asks(table), writes=False)]
    if not partitioned:
        raise SchemaError(
            f"Table {tables[0].fullname!r}: expected a partitioned table; neither it nor another table of layout "
            f"{config.store.layout!r} is there and partitioned. "
            "`convert_to_partitioned` makes it so in a migration."
        )
    return {table.fullname: await store.run(_changes(change, table)) for table in partitioned}


def _asks(table: sa.Table) -> Callable[[sa.Connection], bool]:
    return lambda db: is_partitioned(db, table.name, schema=table.schema)


def _changes(change: Change, table: sa.Table) -> Callable[[sa.Connection], list[str]]:
    return lambda db: change(db, table)


def _print_lines(changed: dict[str, list[str]], verb: str, nothing: str) -> None:
    for table, names in changed.items():
        for name in names:
            echo(f"{table}: {name} {verb}")
        if not names:
            echo(f"{table}: {nothing}")
