"""`pillarbox sync dead` and `pillarbox sync skip`: what cannot be delivered, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pillarbox.cli.options import JsonOption, UsageError
from pillarbox.cli.output import format_time, print_json, print_table
from pillarbox.cli.sync_options import Find, FindOne, describe_place, expect_one, shorten, takes_one_queue, takes_queues
from pillarbox.cli.terminal import echo, show_line
from pillarbox.errors import PillarboxError
from pillarbox.sync import dead as operations
from pillarbox.sync.dead import DeadRow, Replayed
from pillarbox.sync.queues import QueueRef

app = typer.Typer(help="List, show and replay dead statements.", no_args_is_help=True, rich_markup_mode=None)

SeqArgument = Annotated[int, typer.Argument(metavar="SEQ", min=1, help="The row's number.")]


@app.command("list")
@takes_queues
def list_dead(find: Find, as_json: JsonOption = False) -> None:
    """List the statements that were given up: those in the dead log, and those that their tables wait behind."""
    rows, problems = _read_all(find())
    if as_json:
        print_json([_to_json(row) for row in rows])
    elif rows:
        headings = ("target", "table", "seq", "reason", "attempts", "died", "error", "sql")
        print_table(headings, [_summarize(row) for row in rows], right=["seq", "attempts"])
    elif not problems:
        echo("Nothing is dead.", err=True)
    if problems:
        raise PillarboxError(" ".join(problems))


@app.command()
@takes_queues
def show(find: Find, seq: SeqArgument, as_json: JsonOption = False) -> None:
    """Show everything about one dead statement."""
    row = operations.get_dead(_holder(find(), seq), seq)
    if as_json:
        print_json({**_to_json(row), "sql": row.sql, "arguments": row.arguments})
        return
    facts = {
        "target": row.target,
        "table": row.table,
        "seq": row.seq,
        "reason": "parked: the table waits behind it" if row.is_parked else row.reason,
        "attempts": row.attempts,
        "died": format_time(row.dead_at),
        "error": row.error,
        "error class": row.error_class,
        "source": row.source,
        "row before": row.prev_seq,
        "file": row.path,
        "arguments": row.payload,
    }
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    width = max(map(len, known))
    lines = [f"{name:<{width}}  {show_line(str(value))}" for name, value in known.items()]
    echo("\n".join([*lines, "", row.sql]))


@app.command()
@takes_queues
def replay(
    find: Find,
    seqs: Annotated[list[int] | None, typer.Argument(metavar="SEQ", help="The rows' numbers.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead rows of the chosen queues.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Have dead statements delivered after all: a parked one in its place, others at the end of their queue."""
    if bool(seqs) == everything:
        raise UsageError("Nothing to replay: give the numbers of dead rows, or --all.")
    queues = find()
    done: list[tuple[QueueRef, Replayed]] = []
    if everything:
        done = [(queue, each) for queue in queues for each in operations.replay_all(queue)]
    for seq in seqs or ():
        queue = _holder(queues, seq)
        done.append((queue, operations.replay(queue, seq)))
    if as_json:
        print_json([{**describe_place(queue), "seq": each.seq, "new_seq": each.new_seq} for queue, each in done])
        return
    for queue, each in done:
        place = "is due now, in its place" if each.is_in_place else f"is at the end of its queue, as row {each.new_seq}"
        echo(f"{queue}: row {each.seq} {place}.")
    if not done:
        echo("Nothing is dead.", err=True)


@takes_one_queue
def skip(
    find: FindOne,
    seq: Annotated[int | None, typer.Option("--seq", min=1, metavar="SEQ", help="This row, failed or not.")] = None,
    lost: Annotated[
        int | None, typer.Option("--lost", min=1, metavar="SEQ", help="Accept that this row is lost.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a table go on without a statement: move the one that failed to the dead log, or accept that one is lost."""
    if seq is not None and lost is not None:
        raise UsageError("Both --seq and --lost are given: expected one of them.")
    queue = find()
    if lost is not None:
        operations.skip_lost(queue, lost)
        text, skipped = f"row {lost} is accepted as lost; the queue goes on behind it.", lost
    else:
        skipped = operations.skip(queue, seq, only_failed=seq is None).seq
        text = f"row {skipped} is in the dead log; `pillarbox sync dead replay {skipped}` brings it back."
    if as_json:
        print_json({**describe_place(queue), "seq": skipped, "lost": lost is not None})
    else:
        echo(f"{queue}: {text}")


def _holder(queues: Sequence[QueueRef], seq: int) -> QueueRef:
    """The one queue whose row is meant: numbers are each queue's own."""
    if len(queues) == 1:
        return queues[0]
    holders = [queue for queue in queues if any(row.seq == seq for row in _read_all([queue])[0])]
    return expect_one(holders or queues)


def _read_all(queues: Sequence[QueueRef]) -> tuple[list[DeadRow], list[str]]:
    """The dead rows of all queues; a file that cannot be read hides none of the others."""
    rows: list[DeadRow] = []
    problems: list[str] = []
    for queue in queues:
        try:
            rows += operations.list_dead(queue)
        except PillarboxError as error:
            problems.append(str(error))
    return rows, problems


def _summarize(row: DeadRow) -> tuple[object, ...]:
    texts = (shorten(row.error), shorten(row.sql))
    return (row.target, row.table, row.seq, row.reason, row.attempts, format_time(row.dead_at), *texts)


def _to_json(row: DeadRow) -> dict[str, Any]:
    return {
        "target": row.target,
        "table": row.table,
        "namespace": row.namespace,
        "path": str(row.path),
        "seq": row.seq,
        "is_parked": row.is_parked,
        "reason": row.reason,
        "attempts": row.attempts,
        "dead_at": row.dead_at,
        "error": row.error,
        "error_class": row.error_class,
        "source": row.source,
        "prev_seq": row.prev_seq,
    }
