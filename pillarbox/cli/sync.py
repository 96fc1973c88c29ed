"""`pillarbox sync`: the service that replays queued statements on remote databases, and its queue files.

Only `run` and `schema` import writers and need secrets; the others look at files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from pillarbox.cli import sync_dead
from pillarbox.cli.options import JsonOption
from pillarbox.cli.output import format_age, format_time, print_json, print_table
from pillarbox.cli.records import ERROR_WIDTH
from pillarbox.cli.sync_options import (
    ConfigOption,
    Find,
    FindOne,
    check_config,
    describe_place,
    shorten,
    takes_one_queue,
    takes_queues,
)
from pillarbox.cli.sync_run import init, run
from pillarbox.cli.terminal import echo
from pillarbox.errors import PillarboxError
from pillarbox.sync.health import QueueHealth, read_health
from pillarbox.sync.migrating import Migration, check_migration, migrate
from pillarbox.sync.queues import QueueRef
from pillarbox.sync.renumbering import renumber
from pillarbox.sync.toml import load_sync_config
from pillarbox.sync.verify import VerifyResult, verify_queues
from pillarbox.wording import say_count

app = typer.Typer(
    help="SQL write-behind: replay queued statements on remote databases.", no_args_is_help=True, rich_markup_mode=None
)
app.command()(run)
app.command()(init)


def _say_none() -> None:
    echo("There are no queue files here.", err=True)


# -- status ------------------------------------------------------------------------------------------------------------


@app.command()
@takes_queues
def status(find: Find, as_json: JsonOption = False) -> None:
    """Show what waits in each queue and what holds it up."""
    found = [read_health(queue) for queue in find()]
    if as_json:
        print_json([_health_to_json(each) for each in found])
    elif found:
        _print_status(found)
    else:
        _say_none()


# The last column: a terminal may break it, and why nothing is sent stands at its end.
_LONG = 4 * ERROR_WIDTH


def _print_status(found: Sequence[QueueHealth]) -> None:
    headings = ["target", "table", "state", "waiting", "oldest", "head", "attempts", "next try", "dead", "error"]
    rows = [
        [
            *(each.target, each.table, each.state, each.waiting, format_age(each.age), each.head, each.attempts),
            *(format_time(each.due_at), each.dead, shorten(each.error, _LONG)),
        ]
        for each in found
    ]
    if any(each.capacity is not None for each in found):
        headings.insert(4, "full")
        for row, each in zip(rows, found, strict=True):
            row.insert(4, None if each.capacity is None else f"{each.capacity:g}%")
    print_table(headings, rows, right=["waiting", "full", "oldest", "head", "attempts", "dead"])


def _health_to_json(health: QueueHealth) -> dict[str, Any]:
    values = {each.name: getattr(health, each.name) for each in fields(health)}
    age = None if health.age is None else round(health.age.total_seconds(), 3)
    return {**values, "path": str(health.path), "age_seconds": age, "capacity_percent": health.capacity}


# -- verify ------------------------------------------------------------------------------------------------------------


@app.command()
@takes_queues
def verify(find: Find, as_json: JsonOption = False) -> None:
    """Check that nothing of the queues is lost; changes nothing, and exits with 1 if something is."""
    results = verify_queues(find())
    is_ok = all(each.is_ok for each in results)
    if as_json:
        print_json({"is_ok": is_ok, "queues": [_result_to_json(each) for each in results]})
    elif results:
        for each in results:
            echo(_describe_result(each))
    else:
        _say_none()
    if not is_ok:
        raise typer.Exit(1)


def _describe_result(result: VerifyResult) -> str:
    name = f"{result.target}/{result.table}" if result.target else result.table
    place = "" if result.first is None else f" (rows {result.first} to {result.last})"
    counts = f"{result.waiting} waiting{place}, {result.logged} in the sync log, {result.dead} dead"
    lines = [f"{'ok    ' if result.is_ok else 'FAILED'}  {name}: {counts}"]
    for kind in ("problems", "warnings", "notes"):
        lines += [f"        {kind[:-1]}: {text}" for text in getattr(result, kind)]
    return "\n".join(lines)


def _result_to_json(result: VerifyResult) -> dict[str, Any]:
    values = {each.name: getattr(result, each.name) for each in fields(result)}
    return {"is_ok": result.is_ok, **values, "path": str(result.path)}


# -- dead --------------------------------------------------------------------------------------------------------------

app.add_typer(sync_dead.app, name="dead")
app.command()(sync_dead.skip)


# -- migrate -----------------------------------------------------------------------------------------------------------


@app.command("migrate")
@takes_queues
def migrate_files(
    find: Find,
    check: Annotated[
        bool,
        typer.Option("--check", help="Change nothing; exit 1 if there is something to do, 2 if it cannot be done."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring queue files of older releases to what the service needs; sqloutbox goes on using them."""
    files = {queue.path: queue for queue in find()}
    done = [_check(queue) if check else _migrate(queue) for queue in files.values()]
    if as_json:
        print_json([{"path": str(each.path), **{name: getattr(each, name) for name in _SHOWN}} for each in done])
    for each in [] if as_json else done:
        echo(_describe_migration(each))
    if not done and not as_json:
        _say_none()
    code = _exit_code(done, check)
    if code:
        raise typer.Exit(code)


_SHOWN = ("status", "steps", "problem")


def _check(queue: QueueRef) -> Migration:
    return check_migration(queue.path, is_application_file=queue.is_application_file)


def _migrate(queue: QueueRef) -> Migration:
    found = _check(queue)
    if found.status != "pending":
        return found
    try:
        return migrate(queue.path, is_application_file=queue.is_application_file)
    except PillarboxError as error:
        # The other files are none the worse for it.
        return Migration(queue.path, "incompatible", problem=str(error))


def _describe_migration(migration: Migration) -> str:
    words = ", ".join(migration.steps) or migration.problem or ""
    return f"{migration.status:<12}  {migration.path}{': ' if words else ''}{words}"


def _exit_code(done: Sequence[Migration], is_check: bool) -> int:
    if any(each.status == "incompatible" for each in done):
        return 2 if is_check else 1
    return int(any(each.status == "pending" for each in done))


@app.command("renumber")
@takes_one_queue
def renumber_queue(find: FindOne, as_json: JsonOption = False) -> None:
    """Let what waits in a file that came back from a backup go out under new numbers; the service must be stopped."""
    queue = find()
    count = renumber(queue)
    if as_json:
        print_json({**describe_place(queue), "waiting": count})
    else:
        echo(f"{queue}: {say_count(count, 'row')} will go out under new numbers.")


# -- schema ------------------------------------------------------------------------------------------------------------


@app.command()
def schema(
    config: ConfigOption = None,
    target: Annotated[str | None, typer.Option("--target", metavar="APP.DB", help="Only this target's.")] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="What takes outbox_seq from the tables that do not have it any more.")
    ] = False,
) -> None:
    """Print the SQL that prepares the remote tables, for those who do it themselves (auto_schema = false)."""
    settings = load_sync_config(check_config(config))
    statements = settings.drop_schema_sql() if drop else settings.schema_sql()
    if target is not None and target not in statements:
        raise PillarboxError(f"There is no target {target!r}; there is: {', '.join(statements)}.")
    for name, texts in statements.items():
        if target in (None, name):
            echo("\n".join([f"-- {name}: {say_count(len(texts), 'statement')}", *(f"{text};" for text in texts)]))
