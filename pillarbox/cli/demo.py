"""`pillarbox demo`: see that nothing is lost, on this machine, in a few seconds."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pillarbox.cli.options import JsonOption, UsageError
from pillarbox.cli.output import print_json, print_table
from pillarbox.demo.run import LEASE, Report, Run

Tell = Callable[[str], None]
Show = Callable[[Run], None]


def demo(
    orders: Annotated[int, typer.Option(min=1, metavar="N", help="How many orders are tried.")] = 5000,
    writers: Annotated[int, typer.Option(min=1, max=32, metavar="N", help="Processes that place them.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Which customers order, which cards fail.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the database, the delivered lines and the log.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a shop's orders arrive although the relay is killed twice."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        report = _run(orders, writers, seed, keep, tells=not as_json)
    except KeyboardInterrupt:
        typer.echo("Stopped; every process of the demo has ended.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json({**asdict(report), "throughput": round(report.throughput, 1)})
    else:
        _print_report(report)
        if keep is not None:
            typer.echo(f"\nshop.db, delivered.jsonl and processes.log are in {keep}")
    if not report.is_good:
        raise typer.Exit(1)


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _run(orders: int, writers: int, seed: int, keep: Path | None, *, tells: bool) -> Report:
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pillarbox-demo-")))
        if keep is not None:
            _prepare(keep)
        tell, show = stack.enter_context(_narrator(orders, writers)) if tells else (_ignore, _ignore)
        options = {"orders": orders, "writers": writers, "seed": seed}
        run = stack.enter_context(Run(folder.absolute(), tell=tell, show=show, **options))
        return run.run()


def _prepare(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--keep: expected a new or empty folder, got {str(folder)!r}, which has files in it."
        )
    folder.mkdir(parents=True, exist_ok=True)


def _ignore(what: object) -> None:
    pass


@contextmanager
def _narrator(orders: int, writers: int) -> Iterator[tuple[Tell, Show]]:
    """Tell the story line by line and, on a terminal, show how far it is."""
    from rich.console import Console

    processes = "1 process" if writers == 1 else f"{writers} processes"
    console = Console(highlight=False)
    console.print(
        f"A shop takes {orders:,} orders in {processes}. Each order and its event are one SQLite transaction;\n"
        "one in ten is rolled back after its event was put. A relay delivers the events to a file.\n"
    )
    with ExitStack() as stack:
        status = stack.enter_context(console.status("opening the shop")) if console.is_terminal else None
        runs: list[Run] = []

        def tell(sentence: str) -> None:
            at = f"{runs[0].age:5.1f} s" if runs else "      "
            console.print(f"{at}  {sentence}")

        def show(run: Run) -> None:
            runs[:] = [run]
            if status is not None:
                killed = f", relay killed {_times(run.kills)}" if run.kills else ""
                status.update(f"{run.reader.delivered:,} delivered, {run.pending:,} on their way{killed}")

        yield tell, show


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _print_report(report: Report) -> None:
    typer.echo()
    kills = _times(report.relay_kills) if report.relay_kills else "never"
    rows = [
        ("committed", f"{report.committed:,}", "orders in the shop's table"),
        ("rolled back", f"{report.rolled_back:,}", f"of which {report.rolled_back_delivered} were delivered"),
        ("delivered", f"{report.delivered:,}", "different orders in the file"),
        ("delivered twice", f"{report.delivered_twice:,}", "the relay died before it could settle them"),
        ("lost", f"{report.lost:,}", "committed but not in the file"),
        ("out of order", f"{report.out_of_order:,}", "after a later order of the same customer"),
        ("relay killed", kills, f"what it held is free again after {LEASE} s"),
        ("throughput", f"{report.throughput:,.0f}/s", f"delivered orders, over {report.seconds:.1f} s"),
        (
            "latency p50",
            _format_seconds(report.latency_p50),
            "from the put until a reader of the file sees it",
        ),
        ("latency p99", _format_seconds(report.latency_p99), "the orders that the killed relays held"),
    ]
    print_table(["", "orders", ""], rows, right=["orders"])


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
