"""The relays from an action log to handlers: a fan-out on the events, and one relay a handler on its notifications."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError, Reject
from pillarbox.event import LIMITS, Claim
from pillarbox.group import RelayGroup, Waking, check_wrapped
from pillarbox.handlers.registry import Handler, Handlers
from pillarbox.handlers.sink import HandlerSink
from pillarbox.hooks import Hook
from pillarbox.layouts import Layout, get_layout
from pillarbox.layouts.exact import is_one_of
from pillarbox.notifications.fan_out import NotificationFanOut
from pillarbox.notifications.log import LogSource, limit_layout, log_layout
from pillarbox.relay import Relay
from pillarbox.retry import Exponential, RetryPolicy
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.sql import SqlStore

OpenStore = Callable[..., SqlStore]
"""Makes a store; called with `layout`, and for the fan-out with `topics`: `partial(open_store, url)`."""

FIRST_DELAY: Final = timedelta(seconds=30)
LONGEST_DELAY: Final = timedelta(minutes=5)
MAX_AGE: Final = timedelta(days=7)

# That of the index on MySQL and MariaDB, which has rows of every state: in the order of their times those of two states
# would be sorted for each claim, and all of them locked for it.
_INDEX_ORDER: Final = ("state", "next_retry_at", "id")


def notification_relays(
    open_store: OpenStore,
    handlers: Handlers,
    *,
    namespace: str,
    layout: str | Layout = "actions",
    retry: RetryPolicy | None = None,
    fans_out: bool = True,
    handles: bool = True,
    prefix: str = "",
    hook: Hook | None = None,
    make_relay: Callable[..., Relay] = Relay,
) -> RelayGroup:
    """The relays that give the events of an action log to every handler of their type, each with its own progress.

    Only events of this namespace are taken; those of types without a handler stay undelivered until one is deployed.
    `layout` is that of the events, `actions` or `ekbatan`. Any number of processes may run them at once. A process may
    leave out one half: `fans_out=False` handles what others fan out, `handles=False` the other way round.

    `retry` is for handlers that have no policy of their own. Without, they are called again within 30 seconds, then
    within twice as long each time up to 5 minutes, until their notification is as old as their `max_age`, or 7 days.
    A notification that was tried before and is older than its policy's `max_age` is given up without a call.
    `make_relay` makes each relay, with options of your choice: `partial(Relay, poll=…)`.
    """
    notified = find_notifications(layout)
    _check(handlers, namespace, fans_out or handles)
    handlers.seal()
    # What is not opened connects to nothing.
    dialect = open_store(layout=notified).dialect
    relays: dict[str, Relay] = {}
    for handler in handlers if handles else ():
        store = open_store(layout=limit_to_handler(notified, handler, namespace=namespace, dialect=dialect))
        policy = handler.retry or retry or retry_policy(handler)
        sink = _NotificationSink(handlers, handler, policy)
        relays[prefix + handler.name] = check_wrapped(make_relay(store, sink, retry=policy, hook=hook), sink)
    if not fans_out:
        return RelayGroup(relays)
    types = list(handlers.types)
    log = log_layout(notified, namespace=namespace, types=types, dialect=dialect)
    source = LogSource(open_store(layout=log, **({"topics": types} if log.scope is not None else {})))
    fan_out = NotificationFanOut(source.store.tables, notified, handlers)
    waking = Waking(None, list(relays.values()), hook)
    feeding = make_relay(source, fan_out, claim="auto", in_flight=source.in_flight, hook=waking)
    check_wrapped(feeding, fan_out)
    return RelayGroup({f"{prefix}fan-out": feeding, **relays}, feeds={f"{prefix}fan-out": list(relays)})


def find_notifications(layout: str | Layout) -> Layout:
    """The layout of the notifications beside an event log; refuses any other table."""
    chosen = get_layout(layout)
    if chosen.name in ("actions", "ekbatan"):
        return get_layout(f"{chosen.name}-notifications")
    if chosen.name in ("actions-notifications", "ekbatan-notifications"):
        return chosen
    raise ConfigError(f"Notifications: expected layout actions or ekbatan, which have them; got {chosen.name!r}")


def limit_to_handler(notified: Layout, handler: Handler, *, namespace: str, dialect: str) -> Layout:
    """The notifications for one handler, also those under its former names, of one namespace."""
    names = (handler.name, *handler.aliases)
    layout = limit_layout(notified, lambda c: is_one_of(c.handler_name, names) & is_one_of(c.namespace, [namespace]))
    return replace(layout, order_by=_INDEX_ORDER) if is_mysql(dialect) else layout


def retry_policy(handler: Handler) -> RetryPolicy:
    """When the failed notifications of a handler without a policy are tried again: as the other system does."""
    return Exponential(FIRST_DELAY, cap=LONGEST_DELAY, max_attempts=None, max_age=handler.max_age or MAX_AGE)


class _NotificationSink(HandlerSink):
    """Gives up for the policy too: a call that ends its process reports no failure that a policy could judge."""

    def __init__(self, handlers: Handlers, handler: Handler, policy: RetryPolicy) -> None:
        super().__init__(handlers, handler)
        self._again_within: timedelta | None = getattr(policy, "max_age", None)

    def _check_age(self, claim: Claim) -> None:
        super()._check_age(claim)
        # One that nobody had time for is still called, however old.
        put_at, most = claim.event.created_at, self._again_within
        if claim.attempt > 1 and put_at is not None and most is not None and datetime.now(UTC) - put_at > most:
            raise Reject(
                f"Handler {self.name!r}: the notification was tried {claim.attempt - 1} times and is older than "
                f"{format_duration(most)}"
            )


def _check(handlers: Handlers, namespace: object, does_something: bool) -> None:
    if not len(handlers):
        raise ConfigError("Handlers: expected at least one handler, got none")
    if not does_something:
        raise ConfigError("Notifications: expected fans_out, handles or both; got neither")
    if not isinstance(namespace, str) or not namespace.strip() or len(namespace) > LIMITS["source"]:
        raise ConfigError(f"Notifications: expected a namespace, the one that the actions have; got {namespace!r}")
    _check_names(handlers)


def _check_names(handlers: Handlers) -> None:
    # Some collations take these for one name, and the second of two notifications for a repetition of the first.
    known: dict[str, str] = {}
    for name in (each for handler in handlers for each in (handler.name, *handler.aliases)):
        plain = "".join(c for c in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(c))
        other = known.setdefault(plain.strip(), name)
        if other != name:
            raise ConfigError(
                f"Handlers {other!r} and {name!r}: expected names that differ in more than case, accents and spaces, "
                "as some databases take these for one; rename one of them"
            )
