"""The relays that run the handlers of one outbox: a fan-out to a row for each event and handler, and one relay each."""

from __future__ import annotations

import re
from collections.abc import Callable

import sqlalchemy as sa

from pillarbox.errors import ConfigError, Unsupported
from pillarbox.group import RelayGroup, check_wrapped, given, route_relays
from pillarbox.handlers.registry import Handlers
from pillarbox.handlers.sink import HandlerSink
from pillarbox.hooks import Hook
from pillarbox.outbox import Outbox
from pillarbox.relay import Relay
from pillarbox.retry import RetryPolicy
from pillarbox.routing import Route, Routes
from pillarbox.sinks import Sink
from pillarbox.stores.sql import SqlStore


def handler_relays(
    store: Outbox | Callable[[str], SqlStore],
    handlers: Handlers,
    *,
    url: str | sa.URL | None = None,
    unmatched: str = "dead",
    retry: RetryPolicy | None = None,
    into: Outbox | None = None,
    prefix: str = "",
    hook: Hook | None = None,
    make_relay: Callable[..., Relay] = Relay,
) -> RelayGroup:
    """The relays that give each event of an outbox to every handler of its type, each with its own progress.

    `store` is the outbox, with the `url` of its database; or a function that makes the store for the rows of one
    handler, with "" for those of the fan-out. `unmatched` says what becomes of events without a handler: `dead` or
    `drop`. `retry` is for handlers that have no policy of their own. `into` is an outbox of ours in the same database,
    where the table is another system's. Rows under a handler's former names, its aliases, are given to it as well.
    `make_relay` makes each relay, with options of your choice: `partial(Relay, poll=…)`.
    """
    if not len(handlers):
        raise ConfigError("Handlers: expected at least one handler, got none")
    handlers.seal()
    open_store = _opener(store, url)
    routes = Routes(
        [Route(to=[handler.name for handler in found], type=[_escape(type)]) for type, found in handlers.types.items()],
        unmatched=unmatched,
    )
    sinks = {handler.name: HandlerSink(handlers, handler) for handler in handlers}

    def make(store: SqlStore, sink: Sink, hook: Hook | None) -> Relay:
        own = sink.handler.retry if isinstance(sink, HandlerSink) else None
        return make_relay(store, sink, **given(retry=own or retry, hook=hook))

    group = route_relays(open_store, sinks, routes, make_relay=make, into=into, prefix=prefix, hook=hook)
    # Rows that wait under a former name of a handler; nothing new is put there.
    former = {alias: sinks[handler.name] for handler in handlers for alias in handler.aliases}
    waiting = {
        prefix + alias: check_wrapped(make(open_store(alias), sink, hook), sink) for alias, sink in former.items()
    }
    group.add(RelayGroup(waiting))
    return group


def _opener(store: Outbox | Callable[[str], SqlStore], url: str | sa.URL | None) -> Callable[[str], SqlStore]:
    if isinstance(store, Outbox):
        if url is None:
            raise ConfigError("Handlers: expected url, that of the outbox's database, got none")
        return lambda sink: store.store(url, sink=sink)
    if url is not None:
        raise ConfigError("Handlers: a function makes its stores by itself; leave url out, or give the outbox")
    if not callable(store):
        raise Unsupported(
            "Handlers: expected an outbox, or a function that makes the store of each handler; got "
            f"{type(store).__name__}. Without a database, give one handler a relay: "
            "Relay(store, HandlerSink(handlers, name))"
        )

    def open_own(sink: str) -> SqlStore:
        made = store(sink)
        if not isinstance(made, SqlStore):
            raise Unsupported(
                f"Handlers: each handler has rows of its own, which needs a database; got a {type(made).__name__}. "
                "Without one, give one handler a relay: Relay(store, HandlerSink(handlers, name))"
            )
        return made

    return open_own


def _escape(type: str) -> str:
    """A pattern that matches this text alone."""
    return re.sub(r"([*?[])", r"[\1]", type)
