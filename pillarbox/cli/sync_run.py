"""`pillarbox sync run`: send what is pushed until a signal comes, or with `--drain` until nothing can be sent now.

Signals are as those of `pillarbox relay`; SIGUSR1 has all queues verified, and what is found goes into the log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pillarbox.cli.logs import set_up_logging
from pillarbox.cli.options import JsonOption
from pillarbox.cli.output import print_json
from pillarbox.cli.relay import SIGNALS, Tally, stop_on_signals, summarize
from pillarbox.cli.sync_options import ConfigOption, check_config, takes_logging
from pillarbox.cli.terminal import echo, keep_secret
from pillarbox.errors import ConfigError, PillarboxError, SinkUnavailable, StoreUnavailable
from pillarbox.sync.config import SyncConfig
from pillarbox.sync.health import QueueHealth, read_health
from pillarbox.sync.queues import find_queues
from pillarbox.sync.toml import load_sync_config
from pillarbox.sync.verify import VerifyResult

if TYPE_CHECKING:
    from pillarbox.sync.service import SyncService

log = logging.getLogger("pillarbox.cli")

LEVELS: Final = ("VERBOSE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STUCK: Final = ("retrying", "blocked", "dead", "gap", "foreign", "unreadable")


@takes_logging
def run(
    verbosity: int,
    config: ConfigOption = None,
    drain: Annotated[bool, typer.Option("--drain", help="Send what waits, whatever the thresholds, and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send what is pushed into the queue files to their databases until stopped."""
    # By default it would end the process; the service is not there yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    set_up_logging(verbosity)
    if verbosity == 0:
        set_level(os.environ.get("LOG_LEVEL"))
    settings = load_sync_config(check_config(config))
    keep_secret(*(target.connection for target in settings.targets))
    tally = Tally()
    outage = asyncio.run(_run(settings, tally, drains=drain))
    stuck = [read for read in map(read_health, find_queues(settings)) if read.state in _STUCK] if drain else []
    log.info("%s", summarize(tally, None))
    if as_json:
        print_json({**asdict(tally.total), "stuck": [f"{each.target}/{each.table}" for each in stuck]})
    if (stuck or outage) and not tally.is_stopped:
        raise PillarboxError(_describe_stuck(stuck, outage))


def set_level(name: str | None) -> None:
    """Log from this level on, as LOG_LEVEL names it."""
    if not name:
        return
    level = name.strip().upper()
    if level not in LEVELS:
        raise ConfigError(f"LOG_LEVEL: expected one of {', '.join(LEVELS)}; got {name!r}")
    logging.getLogger("pillarbox").setLevel(logging.DEBUG if level == "VERBOSE" else level)


async def _run(settings: SyncConfig, tally: Tally, *, drains: bool) -> str | None:
    """Run the service; returns what a drain found to be down, if anything was."""
    # What it needs is not there in every installation; looking at queues needs none of it.
    from pillarbox.sync.service import SyncService

    service = SyncService(settings, hook=tally)
    stop_on_signals(service.stop, tally)
    verification = _Verification(service)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, verification.start)
    log.info("%s", _describe_start(settings, drains=drains))
    gc.collect()
    # What is loaded by now stays to the end, and need not be looked through again and again.
    gc.freeze()
    try:
        if drains:
            logging.getLogger("pillarbox.breaker").setLevel(logging.ERROR)
            await service.drain()
        else:
            await service.run()
            if not tally.is_stopped:
                raise PillarboxError("The sync service ended although nobody stopped it.")
    except (SinkUnavailable, StoreUnavailable) as outage:
        return str(outage)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        await verification.finish()
        # Nothing is left to stop: a late signal must not make a failure of it.
        for number in (*SIGNALS, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    return None


def _describe_start(settings: SyncConfig, *, drains: bool) -> str:
    places = ", ".join(dict.fromkeys(str(app.db_file or app.db_dir) for app in settings.apps))
    targets = ", ".join(f"{target.name} ({', '.join(target.table_names)})" for target in settings.targets)
    return f"{'Draining' if drains else 'Syncing'}: queues in {places}, targets {targets}"


def _describe_stuck(stuck: Sequence[QueueHealth], outage: str | None) -> str:
    parts = [f"{each.target}/{each.table} ({each.state}: {each.error})" for each in stuck]
    named = f"These queues are not drained: {'; '.join(parts)}. `pillarbox sync status` has the rest." if parts else ""
    # A file that cannot be opened, or a database that is down while nothing waits for it, has no queue to stand with.
    is_told = outage is not None and any(each.error and each.error in outage for each in stuck)
    return named if outage is None or is_told else f"{outage.rstrip('.')}. {named}".rstrip()


class _Verification:
    """Verifies the queues, one time after the other, beside the service."""

    def __init__(self, service: SyncService) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._verify())

    async def finish(self) -> None:
        if self._task is not None:
            await self._task

    async def _verify(self) -> None:
        try:
            results = await self._service.verify()
        except (PillarboxError, OSError) as error:
            log.error("Verified: failed: %s", error)
            return
        for result in results:
            log_result(result)


def log_result(result: VerifyResult) -> None:
    """Log what was found in a queue: a line if it is fine, and one for each problem and warning."""
    name = f"{result.target}/{result.table}"
    level: Callable[..., None] = log.info if result.is_ok else log.error
    words = "ok" if result.is_ok else " ".join(result.problems)
    level("Verified: %s: %s (%d waiting, %d dead)", name, words, result.waiting, result.dead)
    for warning in result.warnings:
        log.warning("Verified: %s: %s", name, warning)


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where the files go.")] = Path("outbox"),
) -> None:
    """Write settings and a runnable Python configuration for a new service; nothing is overwritten."""
    from pillarbox.sync.scaffold import write_scaffold

    for path in write_scaffold(folder):
        echo(f"Made {path}")
    echo(f"Next: pillarbox sync run --config {folder / 'outbox.toml'}")
