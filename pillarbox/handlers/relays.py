"""The relays that run the handlers of one outbox: a fan-out to a row for each event and handler, and one relay each."""

from __future__ import annotations

import re
from collections.abc import Callable

from pillarbox.errors import ConfigError
from pillarbox.group import RelayGroup, route_relays
from pillarbox.handlers.registry import Handlers
from pillarbox.handlers.sink import HandlerSink
from pillarbox.hooks import Hook
from pillarbox.outbox import Outbox
from pillarbox.relay import Relay
from pillarbox.routing import Route, Routes
from pillarbox.sinks import Sink
from pillarbox.stores.sql import SqlStore

MakeRelay = Callable[[SqlStore, Sink, Hook | None], Relay]


def handler_relays(
    open_store: Callable[[str], SqlStore],
    handlers: Handlers,
    *,
    unmatched: str = "dead",
    into: Outbox | None = None,
    prefix: str = "",
    hook: Hook | None = None,
) -> RelayGroup:
    """The relays that give each event of an outbox to every handler of its type, each with its own progress.

    `open_store` makes the store for the rows of one handler; the fan-out's are those of "". `unmatched` says what
    becomes of events without a handler: `dead` or `drop`. `into` is an outbox of ours in the same database, where
    the table is another system's.
    """
    if not len(handlers):
        raise ConfigError("Handlers: expected at least one handler, got none")
    routes = Routes(
        [Route(to=[handler.name for handler in found], type=[_escape(type)]) for type, found in handlers.types.items()],
        unmatched=unmatched,
    )
    sinks = {handler.name: HandlerSink(handlers, handler) for handler in handlers}

    def make_relay(store: SqlStore, sink: Sink, hook: Hook | None) -> Relay:
        retry = sink.handler.retry if isinstance(sink, HandlerSink) else None
        return Relay(store, sink, retry=retry, hook=hook)

    return route_relays(open_store, sinks, routes, make_relay=make_relay, into=into, prefix=prefix, hook=hook)


def _escape(type: str) -> str:
    """A pattern that matches this text alone."""
    return re.sub(r"([*?[])", r"[\1]", type)
