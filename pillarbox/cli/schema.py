"""`pillarbox schema`: print, create, check and mend the tables."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
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
from pillarbox.cli.terminal import echo, show_page
from pillarbox.config import Config
from pillarbox.schema import DIALECTS, Comparison, Created, Drift, compare_store, create_tables, ddl, migration
from pillarbox.stores.url import parse_store_url

app = typer.Typer(help="Print, create, check and mend the tables.", no_args_is_help=True, rich_markup_mode=None)


VariantOption = Annotated[
    str | None,
    typer.Option("--variant", metavar="NAME", help="One spelling of the layout's tables, such as that of a release."),
]


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
    variant: VariantOption = None,
) -> None:
    """Print the statements that create the tables; nothing is connected to."""
    config = load()
    chosen = dialect.value if dialect is not None else _dialect_of(config)
    text = ddl(config.get_layout(), chosen, config.store.table, config.store.schema, variant=variant)
    typer.echo(text, nl=False)


@app.command()
@takes_settings
def create(
    load: Load, variant: VariantOption = None, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> None:
    """Create the tables that are missing; an existing one is left as it is, or refused if it is another."""
    created = asyncio.run(_create(load(), variant=variant, dry_run=dry_run))
    if as_json:
        print_json([_describe(each, dry_run) for each in created])
        return
    for each in created:
        verb = "exists" if not each.is_new else "would be created" if dry_run else "created"
        typer.echo(f"{each.table}: {verb}")


AutovacuumOption = Annotated[
    bool, typer.Option("--autovacuum", help="Look at the outbox table's vacuum settings too (PostgreSQL).")
]


@app.command()
@takes_settings
def check(
    load: Load, variant: VariantOption = None, autovacuum: AutovacuumOption = False, as_json: JsonOption = False
) -> None:
    """Compare the tables with what the layout declares; exit 1 when they differ."""
    config = load()
    found = asyncio.run(_compare(config, variant=variant, autovacuum=autovacuum))
    if as_json:
        print_json(_describe_comparison(config.get_layout().name, found))
    else:
        _print_comparison(config.get_layout().name, found)
    if found.drifts:
        raise typer.Exit(1)


def _print_comparison(layout: str, found: Comparison) -> None:
    for drift in found.drifts:
        _print_drift(str(drift), drift)
    variant = "" if found.variant is None else f", variant {found.variant!r}"
    if not found.drifts:
        typer.echo(f"The tables are as layout {layout!r} declares them{variant}.")
    elif variant:
        typer.echo(f"Compared with layout {layout!r}{variant}.")
    for hint in found.hints:
        _print_drift(f"Hint: {hint}", hint)


def _print_drift(text: str, drift: Drift) -> None:
    echo(text)
    for line in show_page(drift.statement).splitlines():
        echo(f"    {line}")


@app.command()
@takes_settings
def diff(
    load: Load,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the migration here; else it is printed.")
    ] = None,
    revises: Annotated[
        str | None, typer.Option("--revises", metavar="REVISION", help="The revision that it follows.")
    ] = None,
    variant: VariantOption = None,
    autovacuum: AutovacuumOption = False,
) -> None:
    """Write an Alembic migration to what the layout declares, and back to what was found."""
    drifts = asyncio.run(_compare(load(), variant=variant, autovacuum=autovacuum)).drifts
    if not drifts:
        typer.echo("There are no differences and no migration is needed.", err=True)
    elif output is None:
        typer.echo(migration(drifts, revises=revises), nl=False)
    elif output.exists():
        raise UsageError(f"File {str(output)!r} exists; choose another --output.")
    else:
        output.write_text(migration(drifts, revises=revises))
        typer.echo(f"Wrote {output} for {len(drifts)} difference{'' if len(drifts) == 1 else 's'}.", err=True)


async def _compare(config: Config, *, variant: str | None, autovacuum: bool) -> Comparison:
    store = open_configured_store(config, variant=variant)
    try:
        return await compare_store(store, autovacuum=autovacuum)
    finally:
        await store.close()


def _describe_comparison(layout: str, found: Comparison) -> dict[str, object]:
    return {
        "layout": layout,
        "variant": found.variant,
        "drifts": [_describe_drift(drift) for drift in found.drifts],
        "hints": [_describe_drift(hint) for hint in found.hints],
    }


def _describe_drift(drift: Drift) -> dict[str, object]:
    return {
        "table": drift.table,
        "kind": drift.kind,
        "name": drift.name,
        "expected": drift.expected,
        "found": drift.found,
        "statements": drift.statements,
    }


async def _create(config: Config, *, variant: str | None, dry_run: bool) -> list[Created]:
    store = open_configured_store(config, variant=variant)
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
