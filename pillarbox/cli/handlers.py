"""`pillarbox handlers`: list the handlers of an application, run them, and give one the history it missed."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, cast

import typer

from pillarbox.cli.options import (
    DryRunOption,
    JsonOption,
    Load,
    UsageError,
    check_stores,
    parse_moment_option,
    takes_settings,
)
from pillarbox.cli.output import add_counts, counts_to_json, print_json, print_table
from pillarbox.cli.relay import Tally, run_group, summarize
from pillarbox.cli.terminal import echo
from pillarbox.config import Config
from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError
from pillarbox.group import RelayGroup
from pillarbox.handlers import Handler, Handlers, handler_relays
from pillarbox.handlers.backfill import backfill as run_backfill
from pillarbox.hooks import Hook
from pillarbox.layouts import Feature, Layout
from pillarbox.notifications.relays import find_notifications, notification_relays
from pillarbox.relay import Relay
from pillarbox.retry import describe_error
from pillarbox.stores.sql import SqlStore
from pillarbox.wording import say_count

log = logging.getLogger("pillarbox.cli")

app = typer.Typer(help="List and run the handlers of an application.", no_args_is_help=True, rich_markup_mode=None)

RegistryOption = Annotated[
    str | None,
    typer.Option("--handlers", metavar="MODULE:NAME", help="Where the Handlers object is, e.g. shop.events:handlers."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="The namespace of the action log's events.")
]


@app.command("list")
@takes_settings
def list_handlers(load: Load, registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """List the handlers that are registered."""
    handlers = load_handlers(load({"handlers.registry": registry}))
    if as_json:
        print_json([_to_json(handler) for handler in handlers])
        return
    headings = ("name", "types", "former names", "at once", "timeout", "max age")
    print_table(headings, [_to_row(handler) for handler in handlers], right=["at once"])


@app.command()
@takes_settings
def run(
    load: Load,
    registry: RegistryOption = None,
    namespace: NamespaceOption = None,
    drain: Annotated[bool, typer.Option("--drain", help="Exit when nothing can be claimed now.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Call the handlers with events of the store until stopped."""
    config = load({"handlers.registry": registry, "handlers.namespace": namespace})
    handlers = load_handlers(config)
    check_stores(config)
    tally = Tally()
    group = _make_group(config, handlers, tally)
    remains = asyncio.run(run_group(group, tally, drains=drain, tell_start=lambda: _tell_start(handlers, drain)))
    log.info("%s", summarize(tally, remains))
    if as_json:
        left = {} if remains is None else {"remaining": counts_to_json(add_counts(remains.values()))}
        print_json({**asdict(tally.total), "dropped": tally.dropped, **left})


@app.command()
@takes_settings
def backfill(
    load: Load,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The handler's name.")],
    since: Annotated[
        datetime,
        typer.Option(parser=parse_moment_option, metavar="TIME|AGO", help="Events since this UTC time, or 7d ago."),
    ],
    until: Annotated[
        datetime | None,
        typer.Option(parser=parse_moment_option, metavar="TIME|AGO", help="And before this time (no end)."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Go further back than the retention: what was pruned is told again.")
    ] = False,
    registry: RegistryOption = None,
    namespace: NamespaceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Notify a new handler of events that were fanned out before it came."""
    config = load({"handlers.registry": registry, "handlers.namespace": namespace})
    handler = load_handlers(config)[name]
    count = asyncio.run(_backfill(config, handler, since=since, until=until, again=again, dry_run=dry_run))
    if as_json:
        print_json({"handler": handler.name, "events": count, "dry_run": dry_run})
    else:
        would = "Would notify" if dry_run else "Notified"
        echo(f"{would} handler {handler.name!r} of {say_count(count, 'event')}.")


async def _backfill(config: Config, handler: Handler, **options: Any) -> int:
    check_stores(config)
    total = 0
    for each in _each_store(config):
        store = _open_store(each, find_notifications(each.get_layout()))
        try:
            await store.open()
            total += await run_backfill(store, handler, namespace=_need_namespace(config), **options)
        finally:
            await store.close()
    return total


# -- the registry ----------------------------------------------------------------------------------------------------


def load_handlers(config: Config) -> Handlers:
    """Import the registry, also from the current folder."""
    text = config.handlers.registry
    if text is None:
        raise UsageError(
            "No handlers given: use --handlers MODULE:NAME, PILLARBOX_HANDLERS, or registry under [handlers] in "
            "pillarbox.toml."
        )
    module, _, attribute = text.partition(":")
    if not module or not attribute:
        raise UsageError(f"Handlers {text!r}: expected a module and a name in it, such as shop.events:handlers.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = _import(module, text)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"Handlers {text!r}: module {module!r} has no {attribute!r}.")
        found = getattr(found, part)
    if not isinstance(found, Handlers):
        raise ConfigError(f"Handlers {text!r}: expected a Handlers object, got {type(found).__name__}.")
    if not len(found):
        raise ConfigError(f"Handlers {text!r}: no handler is registered; import the modules that register them.")
    return found


def _import(module: str, text: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                f"Handlers {text!r}: there is no module {error.name!r} in the current folder or among the installed "
                "packages."
            ) from error
        raise ConfigError(f"Handlers {text!r}: its module cannot be imported: {describe_error(error)}") from error
    except Exception as error:
        raise ConfigError(f"Handlers {text!r}: its module cannot be imported: {describe_error(error)}") from error


def _to_json(handler: Handler) -> dict[str, Any]:
    return {
        "name": handler.name,
        "types": list(handler.types),
        "aliases": list(handler.aliases),
        "concurrency": handler.concurrency,
        "timeout_seconds": None if handler.timeout is None else handler.timeout.total_seconds(),
        "max_age_seconds": None if handler.max_age is None else handler.max_age.total_seconds(),
    }


def _to_row(handler: Handler) -> Sequence[object]:
    times = (None if each is None else format_duration(each) for each in (handler.timeout, handler.max_age))
    return (handler.name, ", ".join(handler.types), ", ".join(handler.aliases), handler.concurrency, *times)


async def _tell_start(handlers: Handlers, drains: bool) -> None:
    for handler in handlers:
        log.info("%s: %s for %s", "Draining" if drains else "Handling", handler.name, ", ".join(handler.types))


# -- the relays ------------------------------------------------------------------------------------------------------


def _make_group(config: Config, handlers: Handlers, hook: Hook) -> RelayGroup:
    group = RelayGroup({})
    for each in _each_store(config):
        prefix = f"{each.store_name}." if each.store_name else ""
        layout = each.get_layout()
        if layout.order is not None:
            group.add(_make_own(each, handlers, prefix, hook))
            continue
        group.add(_make_notified(each, layout, handlers, prefix, hook))
    return group


def _make_own(config: Config, handlers: Handlers, prefix: str, hook: Hook) -> RelayGroup:
    return handler_relays(
        _part_opener(config),
        handlers,
        unmatched=config.unmatched,
        retry=config.retry,
        prefix=prefix,
        hook=hook,
        make_relay=_relay_maker(config),
    )


def _make_notified(config: Config, layout: Layout, handlers: Handlers, prefix: str, hook: Hook) -> RelayGroup:
    if layout.name.removesuffix("-notifications") not in ("actions", "ekbatan"):
        raise ConfigError(f"Handlers: expected a store of layout pillarbox, actions or ekbatan; got {layout.name!r}.")
    return notification_relays(
        lambda **options: _open_store(config, **options),
        handlers,
        namespace=_need_namespace(config),
        layout=layout,
        prefix=prefix,
        hook=hook,
        make_relay=_relay_maker(config),
    )


def _relay_maker(config: Config) -> Callable[..., Relay]:
    names = ("batch_size", "batch_bytes", "in_flight", "lease", "poll", "dead", "stop_timeout")
    return partial(Relay, **{name: getattr(config.relay, name) for name in names})


def _each_store(config: Config) -> list[Config]:
    return [config.choose_store(name) for name in config.stores] or [config]


def _part_opener(config: Config) -> Any:
    def open_part(recipient: str) -> SqlStore:
        # What was given to handlers is not kept: its copies are.
        retention = config.relay.retention if recipient else None
        part = config.choose_recipient(recipient)
        return replace(part, relay=replace(config.relay, retention=retention)).open_store()

    return open_part


def _open_store(config: Config, layout: Layout, topics: Sequence[str] | None = None) -> SqlStore:
    retention = config.relay.retention if Feature.RETENTION in layout.features else None
    # A layout may be given as it is wherever its name may.
    store = replace(config.store, layout=cast(Any, layout), topics=None if topics is None else tuple(topics))
    return replace(config, store=store, relay=replace(config.relay, retention=retention)).open_store()


def _need_namespace(config: Config) -> str:
    if config.handlers.namespace is None:
        raise UsageError(
            "No namespace given: use --namespace NAME, PILLARBOX_NAMESPACE, or namespace under [handlers] in "
            "pillarbox.toml; only events of this namespace are handled."
        )
    return config.handlers.namespace
