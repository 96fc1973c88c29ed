"""Which event goes to which sinks, and the fan-out that gives each sink rows of its own.

A fan-out is an ordinary relay whose sink writes to the source's own database: a row for each sink that the routes
name, in the transaction that settles the original. From then on every sink has its own progress: relays claim
the rows of one sink, and a destination that is down stops nobody else and repeats nothing.

Crash before that transaction commits, and the original is routed again; after it, the new rows are there. One
that is there already stays: each event is unique within a sink.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import translate as translate_pattern
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from pillarbox.errors import ConfigError, Unsupported
from pillarbox.event import DELIVERED, LIMITS, Claim, Dead, Delivered, Event, Outcome
from pillarbox.layouts import Layout
from pillarbox.outbox import Outbox
from pillarbox.sinks import Sink, refuse_alone
from pillarbox.stores import Effect
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.sql import SqlStore
from pillarbox.wakeup import channel_name
from pillarbox.wording import say_count

log = logging.getLogger("pillarbox.relay")

MAX_SINK_NAME: Final = 100
# What a copy does not take over: its own number, its sink, and the life that begins anew.
_NOT_COPIED: Final = frozenset({"seq", "sink", "state", "attempts", "error", "until_at", "token", "delivered_at"})


@dataclass(frozen=True, slots=True)
class Route:
    """Events that match every given condition go to the sinks named in `to`.

    `topic`, `type` and the values of `headers` are patterns with `*`, `?` and `[…]`; of several one must match. A
    header that the event has not matches nothing.
    """

    to: Sequence[str]
    topic: Sequence[str] = ()
    type: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)


class Routes:
    """The routes of one store; the first that matches counts.

    `unmatched` says what becomes of an event that none matches: `dead`, `drop` (it is done with, and counted), or the
    name of a sink.
    """

    def __init__(self, routes: Sequence[Route], *, unmatched: str = "dead") -> None:
        if not routes:
            raise ConfigError("Routes: expected at least one route, got none")
        for number, route in enumerate(routes, start=1):
            _check_route(route, f"Route {number}")
        self.routes = tuple(routes)
        self.unmatched = unmatched
        named = [name for route in routes for name in route.to]
        if unmatched not in ("dead", "drop"):
            _check_sink_name(unmatched, "Routes unmatched")
            named.append(unmatched)
        self.sinks = tuple(dict.fromkeys(named))
        """The names of all sinks, in the order they are named."""
        self._matchers = [(_Matcher(route), tuple(dict.fromkeys(route.to))) for route in routes]

    def match(self, event: Event) -> tuple[str, ...] | None:
        """The sinks an event goes to: none when it is dropped, None when it has no route."""
        for matcher, sinks in self._matchers:
            if matcher.matches(event):
                return sinks
        if self.unmatched == "dead":
            return None
        return () if self.unmatched == "drop" else (self.unmatched,)


class _Matcher:
    def __init__(self, route: Route) -> None:
        self._topic = _compile(route.topic)
        self._type = _compile(route.type)
        self._headers = [(name, _compile([pattern])) for name, pattern in route.headers.items()]

    def matches(self, event: Event) -> bool:
        if self._topic is not None and self._topic.match(event.topic) is None:
            return False
        if self._type is not None and self._type.match(event.type) is None:
            return False
        return all(
            name in event.headers and pattern is not None and pattern.match(_as_text(event.headers[name])) is not None
            for name, pattern in self._headers
        )


def _compile(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(translate_pattern(pattern) for pattern in patterns)) if patterns else None


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _check_route(route: Route, what: str) -> None:
    if not route.to:
        raise ConfigError(f"{what} to: expected the name of a sink, or several; got none")
    for name in route.to:
        _check_sink_name(name, f"{what} to")
    patterns: list[object] = [*route.topic, *route.type, *route.headers.values()]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{what}: expected patterns that are text, got {pattern!r}")


def _check_sink_name(name: object, what: str) -> None:
    # `#` begins the names that lanes use for themselves.
    if not isinstance(name, str) or not name or len(name) > MAX_SINK_NAME or name.startswith("#"):
        raise ConfigError(f"{what}: expected a sink's name of at most {MAX_SINK_NAME} characters, got {name!r}")


class FanOut(Sink):
    """The sink that gives events to their sinks: as rows of the outbox they are in, or of an outbox beside it.

    The table of another system cannot say which sink a row is for. Its events go `into` an outbox of ours in the same
    database, in the transaction that settles the originals.
    """

    is_quick: bool = True

    def __init__(self, store: SqlStore, routes: Routes, *, into: Outbox | None = None) -> None:
        if into is None and store.layout.order is None:
            raise Unsupported(
                f"Layout {store.layout.name!r}: its table has no column for the sink. Make an outbox of layout "
                "'pillarbox' in the same database and name it: [routing] table"
            )
        if into is not None and into.layout.order is None:
            raise Unsupported(
                f"Routes: expected to route into an outbox of layout 'pillarbox', got {into.layout.name!r}"
            )
        self.name = "fan-out"
        self.dropped = 0
        """How many events had no route and were dropped."""
        self._routes = routes
        self._store = store
        self._into = into
        self._layout = store.layout if into is None else into.layout
        self._outbox = store.tables["outbox"] if into is None else into.table
        self._statements: dict[str, Any] = {}

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        raise refuse_alone(self)

    async def deliver_in(self, batch: Any, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [self._decide(claim.event) for claim in claims]

    def _decide(self, event: Event) -> Outcome:
        sinks = self._routes.match(event)
        if sinks is None:
            return Dead(f"No route matches topic {event.topic!r} and type {event.type!r}. Add a route, then redrive.")
        if self._into is not None and sinks:
            for name, limit in LIMITS.items():
                value = getattr(event, name)
                if value is not None and len(value) > limit:
                    return Dead(
                        f"Table {self._outbox.fullname!r}: at most {limit} characters of {name}, got {len(value)}"
                    )
        return DELIVERED

    def effect(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Effect:
        """What must commit with the settlement: the rows for each sink."""
        chosen: dict[str, list[Claim]] = defaultdict(list)
        for claim, outcome in zip(claims, outcomes, strict=True):
            if isinstance(outcome, Delivered):
                for sink in self._routes.match(claim.event) or ():
                    chosen[sink].append(claim)

        def write(db: sa.Connection) -> None:
            for sink, routed in chosen.items():
                self._write(db, sink, routed)
            if chosen and db.dialect.name == "postgresql":
                channel = channel_name(self._outbox, self._layout)
                db.execute(sa.select(sa.cast(sa.func.pg_notify(channel, ""), sa.Text)))

        return write

    def settled(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> None:
        """Count what was dropped, now that the settlement has been committed."""
        if self._routes.unmatched == "drop":
            done = (claim for claim, outcome in zip(claims, outcomes, strict=True) if isinstance(outcome, Delivered))
            dropped = sum(not self._routes.match(claim.event) for claim in done)
            self.dropped += dropped
            if dropped:
                log.info("Dropped %s that no route matches.", say_count(dropped, "event"))

    def _write(self, db: sa.Connection, sink: str, claims: Sequence[Claim]) -> None:
        dialect = db.dialect.name
        if dialect not in self._statements:
            build = build_copy if self._into is None else build_insert
            self._statements[dialect] = build(self._layout, self._outbox, dialect)
        if self._into is None:
            params: Any = {"to_sink": sink, "rows": sorted(claim.row for claim in claims)}
        else:
            params = [self._row(claim.event, sink, as_hex=is_mysql(dialect)) for claim in claims]
        db.execute(self._statements[dialect], params)

    def _row(self, event: Event, sink: str, *, as_hex: bool) -> dict[str, Any]:
        order = self._layout.keyed
        values = {column: getattr(event, name) for name, column in self._layout.fields.items()}
        key = event.id.bytes if event.key is None else event.key.encode()
        return {
            **values,
            self._layout.fields["payload"]: event.payload.hex() if as_hex else event.payload,
            self._layout.fields["headers"]: dict(event.headers) or None,
            self._layout.fields["created_at"]: event.created_at or datetime.now(UTC),
            order.sink: sink,
            order.lane: zlib.crc32(key) % order.lanes,
        }


def build_copy(layout: Layout, outbox: sa.Table, dialect: str) -> Any:
    """The statement that copies `rows` for `to_sink`, in their order; what is there already stays as it is."""
    order = layout.keyed
    kept = [column for column in outbox.c if column.name not in _NOT_COPIED]
    sink: sa.BindParameter[str] = sa.bindparam("to_sink", type_=outbox.c[order.sink].type)
    row = outbox.c[layout.row]
    if dialect == "postgresql":
        chosen: Any = row == sa.any_(sa.bindparam("rows", type_=postgresql.ARRAY(row.type)))
    else:
        chosen = row.in_(sa.bindparam("rows", expanding=True))
    source = sa.select(*kept, sink.label(order.sink)).where(chosen).order_by(row)
    names = [*(column.name for column in kept), order.sink]
    return _keep_what_is_there(_insert(outbox, dialect).from_select(names, source), layout, sink)


def build_insert(layout: Layout, outbox: sa.Table, dialect: str) -> Any:
    """The statement that inserts rows of their columns' values; what is there already stays as it is."""
    order, payload = layout.keyed, layout.fields["payload"]
    names = [*layout.fields.values(), order.sink, order.lane]
    values: dict[str, Any] = {name: sa.bindparam(name, type_=outbox.c[name].type) for name in names}
    if is_mysql(dialect):
        # aiomysql cannot write bytes into a statement.
        values[payload] = sa.func.unhex(sa.bindparam(payload, type_=sa.Text()))
    return _keep_what_is_there(_insert(outbox, dialect).values(values), layout, outbox.c[order.sink])


def _insert(outbox: sa.Table, dialect: str) -> Any:
    return {"postgresql": postgresql.insert, "sqlite": sqlite.insert}.get(dialect, mysql.insert)(outbox)


def _keep_what_is_there(insert: Any, layout: Layout, sink: Any) -> Any:
    if isinstance(insert, mysql.Insert):
        # Not IGNORE, which would also swallow errors of other kinds. The sink is what it was: it is part of the key.
        return insert.on_duplicate_key_update({layout.keyed.sink: sink})
    return insert.on_conflict_do_nothing()
