"""`pillarbox consume`: take each message of a broker once and give it to the handlers of its type."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import sqlalchemy as sa
import typer

from pillarbox.cli.handlers import RegistryOption, load_handlers
from pillarbox.cli.options import JsonOption, Load, UsageError, check_stores, takes_settings
from pillarbox.cli.output import print_json
from pillarbox.cli.relay import Tally, run_group, summarize
from pillarbox.config import Config
from pillarbox.errors import MissingExtra
from pillarbox.group import RelayGroup
from pillarbox.handlers import Handlers
from pillarbox.hooks import Hook
from pillarbox.inbox import Inbox
from pillarbox.relay import Relay
from pillarbox.urls import Secrets, mask_url

log = logging.getLogger("pillarbox.cli")


@takes_settings
def consume(
    load: Load,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="URL", help="The broker: kafka://…, nats://…, amqp://… or redis://…."),
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="The consumer group, which shares the messages.")
    ] = None,
    stored: Annotated[
        bool | None, typer.Option("--stored/--at-once", help="Store messages first, or handle them at once (at once).")
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take messages from a broker into the inbox, once each, and call their handlers until stopped."""
    config = load({"source.url": source, "source.group": group, "source.stored": stored, "handlers.registry": registry})
    handlers = load_handlers(config)
    check_stores(config)
    tally = Tally()
    relays = _make_relays(config, handlers, tally)
    asyncio.run(run_group(relays, tally, drains=False, tell_start=partial(_tell_start, config, handlers)))
    log.info("%s", summarize(tally, None))
    if as_json:
        print_json({**asdict(tally.total), "dropped": tally.dropped})


def _make_relays(config: Config, handlers: Handlers, hook: Hook) -> RelayGroup:
    # What it needs of SQLAlchemy is not there in every installation.
    try:
        from pillarbox.inbox.consuming import consumer_relays
    except ImportError as error:
        raise MissingExtra("Consuming", "asyncio") from error

    source, store = config.source, config.store
    if source.url is None:
        raise UsageError("No source given: use --source URL, PILLARBOX_SOURCE, or url under [source].")
    if source.group is None:
        raise UsageError("No consumer group given: use --group NAME, PILLARBOX_GROUP, or group under [source].")
    if config.stores:
        raise UsageError("A consumer has one inbox: choose a store with --store NAME.")
    if store.url is None:
        raise UsageError("No inbox given: use --store URL, PILLARBOX_STORE, or url under [store].")
    inbox = Inbox(sa.MetaData(), store.layout, table=store.table, schema=store.schema, retention=source.remember)
    named: dict[str, Any] = {} if source.name is None else {"name": source.name}
    relay = partial(
        Relay,
        batch_size=config.relay.batch_size,
        batch_bytes=config.relay.batch_bytes,
        lease=config.relay.lease,
        poll=config.relay.poll,
        stop_timeout=config.relay.stop_timeout,
    )
    with Secrets(store.url).hidden():
        return consumer_relays(
            source.url,
            handlers,
            inbox=inbox,
            url=store.url,
            group=source.group,
            stored=source.stored,
            unmatched=source.unmatched,
            retry=config.retry,
            redelivery=config.retry,
            hook=hook,
            make_relay=relay,
            **named,
            **source.options,
        )


async def _tell_start(config: Config, handlers: Handlers) -> None:
    source = config.source
    how = "stored first" if source.stored else "handled at once"
    log.info("Consuming: source %s, group %s, %s", mask_url(source.url or ""), source.group, how)
    for handler in handlers:
        log.info("Handling: %s for %s", handler.name, ", ".join(handler.types))
