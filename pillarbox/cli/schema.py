"""`pillarbox schema`: print or create the tables."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from pillarbox.cli.options import (
    DryRunOption,
    JsonOption,
    Load,
    UsageError,
    open_configured_store,
    takes_settings,
)
from pillarbox.cli.output import print_json
from pillarbox.config import Config
from pillarbox.schema import DIALECTS, Created, create_tables, ddl
from pillarbox.stores.url import parse_store_url

app = typer.Typer(help="Print or create the tables.", no_args_is_help=True, rich_markup_mode=None)


class Database(StrEnum):
    """A database that DDL is written for."""

    POSTGRESQL = "postgresql"
    MYSQL = "mysql"
    MARIADB = "mariadb"
    SQLITE = "sqlite"


@app.command()
@takes_settings
def sql(
    load: Load,
    dialect: Annotated[Database | None, typer.Option(help="The database; else that of the store's url.")] = None,
) -> None:
    """Print the statements that create the tables; nothing is connected to."""
    config = load()
    chosen = dialect.value if dialect is not None else _dialect_of(config)
    typer.echo(ddl(config.get_layout(), chosen, config.store.table, config.store.schema), nl=False)


@app.command()
@takes_settings
def create(load: Load, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Create the tables that are missing; an existing table is left as it is."""
    created = asyncio.run(_create(load(), dry_run=dry_run))
    if as_json:
        print_json([_describe(each, dry_run) for each in created])
        return
    for each in created:
        verb = "exists" if not each.is_new else "would be created" if dry_run else "created"
        typer.echo(f"{each.table}: {verb}")


async def _create(config: Config, *, dry_run: bool) -> list[Created]:
    store = open_configured_store(config)
    try:
        return await create_tables(store, dry_run=dry_run)
    finally:
        await store.close()


def _describe(each: Created, dry_run: bool) -> dict[str, object]:
    return {
        "table": each.table,
        "existed": not each.is_new,
        "created": each.is_new and not dry_run,
        "statements": each.statements,
    }


def _dialect_of(config: Config) -> str:
    if config.store.url is None:
        raise UsageError(f"No database given: use --dialect with {', '.join(DIALECTS)}, or --store URL.")
    return parse_store_url(config.store.url).get_backend_name()
