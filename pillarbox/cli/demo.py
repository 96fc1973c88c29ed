"""`pillarbox demo`: see on this machine, in a few seconds, that nothing is lost."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pillarbox.cli.options import JsonOption, UsageError
from pillarbox.cli.output import print_json, print_table
from pillarbox.cli.terminal import echo, show_line
from pillarbox.demo.run import LEASE, Report, Run

Tell = Callable[[float, str], None]
Show = Callable[[Run], None]


def demo(
    orders: Annotated[int, typer.Option(min=1, metavar="N", help="How many orders are tried.")] = 3000,
    writers: Annotated[int, typer.Option(min=1, max=32, metavar="N", help="Processes that place them.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Who orders what, and whose card is declined.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the database, the delivered lines and the log.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a shop's events arrive although the relay is killed twice."""
    ending = _Ending()
    try:
        report = _run(orders, writers, seed, keep, is_told=not as_json, check=ending.check)
    except KeyboardInterrupt:
        echo("Stopped; every process of the demo has ended.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json({**asdict(report), "throughput": report.throughput})
    else:
        _print_report(report)
        if keep is not None:
            echo(f"\nshop.db, delivered.jsonl and relay.log are in {keep}")
    if not report.is_good:
        raise typer.Exit(1)


class _Ending:
    """Ends the demo at a signal, but only where it looks: an exception in the middle of a fork strands a process."""

    def __init__(self) -> None:
        self._number: int | None = None
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._number = number

    def check(self) -> None:
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number is not None:
            raise SystemExit(128 + self._number)


def _run(
    orders: int, writers: int, seed: int, keep: Path | None, *, is_told: bool, check: Callable[[], None]
) -> Report:
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pillarbox-demo-")))
        if keep is not None:
            _prepare(keep)
        tell, show = stack.enter_context(_narrator(orders, writers)) if is_told else (_ignore, _ignore)
        run = Run(folder.absolute(), orders=orders, writers=writers, seed=seed, tell=tell, show=show, check=check)
        return stack.enter_context(run).run()


def _prepare(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"--keep: expected a new or empty folder; {str(folder)!r} has files in it.")
    folder.mkdir(parents=True, exist_ok=True)


def _ignore(*what: object) -> None:
    pass


@contextmanager
def _narrator(orders: int, writers: int) -> Iterator[tuple[Tell, Show]]:
    """Tell the story line by line and, on a terminal, show how far it is."""
    from rich.console import Console

    processes = "one process" if writers == 1 else f"{writers} processes"
    console = Console(highlight=False)
    console.print(
        f"A shop places {orders:,} orders from {processes} at once. An order and its\n"
        "event are one SQLite transaction; one in ten is rolled back at the end.\n"
        "A relay delivers the events to a file, and is killed in the middle of it.\n"
    )
    with ExitStack() as stack:
        status = stack.enter_context(console.status("opening the shop")) if console.is_terminal else None

        def tell(seconds: float, sentence: str) -> None:
            console.print(f"{seconds:5.1f} s  {show_line(sentence)}", soft_wrap=True, markup=False)

        def show(run: Run) -> None:
            if status is not None:
                kills = f", relay killed {_times(run.kills)}" if run.kills else ""
                status.update(f"{run.reader.delivered:,} delivered, {run.pending:,} on their way{kills}")

        yield tell, show


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _print_report(report: Report) -> None:
    rows = [
        ("committed", f"{report.committed:,}", "orders in the shop's table"),
        ("rolled back", f"{report.rolled_back:,}", f"{report.rolled_back_delivered:,} of them delivered"),
        ("delivered", f"{report.delivered:,}", "different orders in the file"),
        ("delivered twice", f"{report.delivered_twice:,}", "a killed relay had no time to settle them"),
        ("lost", f"{report.lost:,}", "committed, and neither in the file nor in the outbox"),
        ("out of order", f"{report.out_of_order:,}", "behind a later order of their customer"),
        ("relay killed", _times(report.relay_kills), f"what it held was free again after {LEASE} s"),
        ("throughput", f"{report.throughput:,.0f}/s", f"delivered orders in {report.seconds:.1f} s"),
        ("latency p50", _format_seconds(report.latency_p50), "from the put to a reader of the file"),
        ("latency p99", _format_seconds(report.latency_p99), "among them those that a kill delayed"),
    ]
    echo()
    print_table(["", "orders", ""], rows, right=["orders"])
    echo()
    echo(_conclude(report))


def _conclude(report: Report) -> str:
    if report.is_good:
        return "Committed means sent: nothing is lost, nothing early, nothing sent that was rolled back."
    if report.lost or report.out_of_order or report.rolled_back_delivered:
        return "This must not happen: please report it, with the files that --keep DIR leaves."
    return (
        f"This machine is too busy: {report.waiting:,} orders still wait in the outbox. Try --orders "
        f"{max(1, report.delivered // 2)}."
    )


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
