"""`pillarbox relay`: deliver until a signal comes, or with `--drain` until nothing can be claimed now.

The first SIGTERM, SIGINT or SIGHUP lets the relay finish what is under way and give back the rest; the second ends at
once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from pillarbox.cli.options import (
    JsonOption,
    Load,
    UsageError,
    check_stores,
    describe_unknown_recipient,
    duration_option,
    parse_size_option,
    takes_rows,
)
from pillarbox.cli.output import add_counts, counts_to_json, describe_counts, print_json
from pillarbox.cli.signals import STOPPING, obeyed
from pillarbox.config import Config
from pillarbox.errors import PillarboxError, SinkUnavailable, StoreUnavailable
from pillarbox.event import Outcome
from pillarbox.group import RelayGroup
from pillarbox.hooks import Hook
from pillarbox.relay import Relay
from pillarbox.stores import Batch, Counts, Settlement
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import mask_url, show_database
from pillarbox.wording import say_count

log = logging.getLogger("pillarbox.cli")

SIGNALS = STOPPING
# `timeout`, terminals and process runners often send one signal twice, to the process and to its group.
ECHO = 0.5
# Threads in which functions of the user's run, or which wait for SQLite's lock, and how long one may take to end.
THREADS = ("pillarbox-sink", "pillarbox-join", "pillarbox-sqlite")
GOODBYE = 1.0


class ClaimBy(StrEnum):
    """How events are claimed."""

    AUTO = "auto"
    HOLD = "hold"
    LEASE = "lease"


class DeadDoes(StrEnum):
    """What a dead event does to its key."""

    PARK = "park"
    SKIP = "skip"


@takes_rows
def relay(
    load: Load,
    sink: Annotated[
        str | None,
        typer.Option("--sink", metavar="URL", help="Destination: stdout:, file:path, null: or another."),
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="Exit when nothing can be claimed now.")] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Events per batch (500).")] = None,
    batch_bytes: Annotated[
        int | None,
        typer.Option(parser=parse_size_option, metavar="SIZE", help="Payloads per batch, such as 64MB (64MB)."),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Batches under way at once (2; SQLite 1).")
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="NAME", help="Only this topic; may be repeated (faststream: queues)."),
    ] = None,
    claim: Annotated[
        ClaimBy | None, typer.Option(help="Hold rows locked, lease them, or as the sink allows (auto).")
    ] = None,
    lease: Annotated[
        timedelta | None,
        duration_option("--lease", example="30s", text="How long a lease lasts (30s, or as the layout has it)."),
    ] = None,
    poll: Annotated[
        timedelta | None, duration_option("--poll", example="1s", text="Longest pause of an idle relay (1s).")
    ] = None,
    dead: Annotated[
        DeadDoes | None, typer.Option(help="After a dead event: park its key, or skip the event (park).")
    ] = None,
    retention: Annotated[
        timedelta | None,
        duration_option("--retention", example="7d", text="Keep delivered events this long (not at all)."),
    ] = None,
    stop_timeout: Annotated[
        timedelta | None,
        duration_option("--stop-timeout", example="10s", text="How long a stop waits for deliveries (10s)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Deliver events from the outbox table to a sink until stopped."""
    config = load(
        {
            "sink.url": sink,
            "store.topics": topics or None,
            "relay.batch_size": batch_size,
            "relay.batch_bytes": batch_bytes,
            "relay.in_flight": in_flight,
            "relay.claim": None if claim is None else claim.value,
            "relay.lease": lease,
            "relay.poll": poll,
            "relay.dead": None if dead is None else dead.value,
            "relay.retention": retention,
            "relay.stop_timeout": stop_timeout,
        }
    )
    if config.sink.url is None and not config.routes:
        raise UsageError("No sink given: use --sink URL, PILLARBOX_SINK, or url under [sink] in pillarbox.toml.")
    if config.routes and config.store.recipient is not None:
        raise UsageError(
            f"--recipient {config.store.recipient!r}: the [[routes]] decide who gets a row; leave it out, also as "
            "PILLARBOX_RECIPIENT and as recipient under [store]."
        )
    tally, remains = asyncio.run(_run(config, drains=drain))
    log.info("%s", summarize(tally, remains))
    if as_json:
        summary = {**asdict(tally.total), "dropped": tally.dropped}
        if remains is not None:
            summary["remaining"] = counts_to_json(add_counts(remains.values()))
        used = [config.sink, *config.sinks.values()]
        is_taken = any((sink.url or "").startswith("stdout:") for sink in used)
        print_json(summary, file=sys.stderr if is_taken else sys.stdout)


class Tally(Hook):
    """Adds up what the relays settle; keeps why a destination was down, and whether they were told to stop."""

    def __init__(self) -> None:
        self.total = Settlement()
        self.reason: str | None = None
        self.is_stopped = False
        self.dropped = 0
        """How many events had no route and were dropped, once all relays have ended."""

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self.total += settlement

    def paused(self, sink: str, reason: str) -> None:
        self.reason = reason


async def _run(config: Config, *, drains: bool) -> tuple[Tally, Mapping[str, Counts] | None]:
    check_stores(config)
    tally = Tally()
    group = config.make_group(hook=tally)
    for relay in group.relays.values():
        if relay.sink.is_local:
            await relay.sink.check()

    async def look_first() -> None:
        for relay in group.relays.values():
            await _warn_of_unknown_recipient(config, relay)

    async def tell_start() -> None:
        for relay in group.relays.values():
            log.info("%s", _describe_start(config, relay, drains=drains))
        for name, form in config.choose_forms().items():
            if form.note:
                log.info("Sink %s: %s", name or mask_url(config.sink.url or ""), form.note)
        await _warn_of_stranded_rows(config, group)

    return tally, await run_group(group, tally, drains=drains, tell_start=tell_start, look_first=look_first)


async def run_group(
    group: RelayGroup,
    tally: Tally,
    *,
    drains: bool,
    tell_start: Callable[[], Awaitable[None]],
    look_first: Callable[[], Awaitable[None]] | None = None,
) -> Mapping[str, Counts] | None:
    """Run relays until a signal comes, or drain them; returns what remains after a drain.

    `look_first` is called before they are opened, `tell_start` thereafter.
    """

    async def start() -> None:
        if look_first is not None:
            await look_first()
        await _open(group, drains=drains)
        await tell_start()

    starting = asyncio.create_task(start(), name="pillarbox-start")

    def stop() -> None:
        group.stop()
        # Nothing is under way yet that could be finished, and a database may say nothing.
        starting.cancel()

    stop_on_signals(stop, tally)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            return None
        starting.result()
        # What is loaded by now stays to the end; a collector that looked through it again and again would cost
        # about a seventh of its time.
        gc.collect()
        gc.freeze()
        if not drains:
            await group.run()
            return None
        # A drain does not wait for a destination that is down, it fails with the reason: once is enough.
        logging.getLogger("pillarbox.breaker").setLevel(logging.ERROR)
        return await group.drain()
    except SinkUnavailable as error:
        raise SinkUnavailable(tally.reason or str(error)) from error
    finally:
        tally.dropped = group.dropped
        await group.close()
        # Nothing is left to stop: a late signal must not make a failure of it.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def _open(group: RelayGroup, *, drains: bool) -> None:
    try:
        await group.open()
    except StoreUnavailable:
        # A relay that runs on says itself that the store is down, and tries again until it is back.
        if drains:
            raise


async def _warn_of_unknown_recipient(config: Config, relay: Relay) -> None:
    """Say that a name may be misspelt. It is no error: its rows may come later."""
    if config.store.recipient is None or not isinstance(relay.store, SqlStore):
        return
    # Before the relay is opened, which makes the name known. What is wrong with the store is said then.
    with suppress(PillarboxError):
        known = await describe_unknown_recipient(relay.store, config)
        if known is not None:
            log.warning("Recipient %r: no sink or handler of this name has rows yet; %s", config.store.recipient, known)


async def _warn_of_stranded_rows(config: Config, group: RelayGroup) -> None:
    """Say which sinks have rows that no relay here delivers: sinks that were taken out of the routes."""
    if config.store.recipient is not None:
        return
    served: dict[str, dict[str, SqlStore]] = {}
    for relay in group.relays.values():
        if isinstance(relay.store, SqlStore):
            served.setdefault(relay.store.name, {})[relay.store.sink] = relay.store
    for name, stores in served.items():
        with suppress(StoreUnavailable):
            for sink in await next(iter(stores.values())).list_waiting(besides=stores):
                log.warning("Store %s: there are events for sink %r, which nobody delivers here.", name, sink)


def _describe_start(config: Config, relay: Relay, *, drains: bool) -> str:
    store, sink = relay.store, relay.sink
    claim = config.relay.claim
    if claim == "auto":
        claim = "hold" if sink.is_quick and "hold" in store.modes else "lease"
    assert isinstance(store, SqlStore)
    return (
        f"{'Draining' if drains else 'Relaying'}: store {show_database(store.url)}, "
        f"table {store.tables['outbox'].fullname}, sink {sink.name}, claim by {claim}, "
        f"{'' if store.keeps_order else 'in the order of their times only, '}"
        f"{say_count(config.relay.in_flight or store.in_flight, 'batch')} of up to {config.relay.batch_size} at once"
    )


def leave_threads_behind(code: int) -> None:
    """Exit at once if functions still run that were given up: the interpreter would wait for them to end."""
    deadline = time.monotonic() + GOODBYE
    for thread in threading.enumerate():
        if thread.name.startswith(THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    if left:
        log.warning("Left behind: %s beyond the timeout.", say_count(len(left), "call"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def summarize(tally: Tally, remains: Mapping[str, Counts] | None) -> str:
    """What was done and what is left, in one line."""
    total = tally.total
    done = f"{total.delivered} delivered, {total.retried} to retry, {total.dead} dead"
    if tally.dropped:
        done += f", {tally.dropped} dropped without a route"
    if total.lost:
        done += f", {total.lost} lost to another relay"
    rest = "" if remains is None else f" Remaining: {describe_counts(add_counts(remains.values()))}."
    return f"{'Stopped' if tally.is_stopped else 'Drained'}: {done}.{rest}"


def stop_on_signals(stop_relays: Callable[[], None], tally: Tally) -> None:
    """Let the first SIGTERM, SIGINT or SIGHUP stop the relays; a second one ends the process."""
    loop = asyncio.get_running_loop()
    stopped_at: float | None = None

    def stop(number: int) -> None:
        log.info("%s: finishing what is under way; once more to end at once.", signal.Signals(number).name)
        tally.is_stopped = True
        stop_relays()

    def handle(number: int, frame: object) -> None:
        nonlocal stopped_at
        if stopped_at is None:
            stopped_at = time.monotonic()
            loop.call_soon_threadsafe(stop, number)
        elif time.monotonic() - stopped_at >= ECHO:
            # Not through the event loop: it may be what hangs.
            os.write(2, b"pillarbox: ended at once; what was under way is sent again when its claims lapse\n")
            os._exit(128 + number)

    for number in obeyed():
        signal.signal(number, handle)
