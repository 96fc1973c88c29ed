"""How one table spells the life cycle of an event: the declaration that all layouts share.

A layout is data: names of columns, predicates over them, and what each transition writes. A store compiles it into
statements and never asks which layout it has. Predicates are functions of a table's columns, so that one declaration
serves the table itself, an alias of it in a sub-select, and a mapped class.

Three kinds of table are told apart by what the declaration has:

- with `order`, events of one key wait for each other (a sequence, a key and lanes: only Pillarbox's own table);
- without, claims walk the table's own index of due rows and write themselves into the row's columns;
- with `side`, the table has no columns for that, and claims, retries and deaths stand in a side table of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.sql import ColumnElement

from pillarbox.errors import LayoutError, Unsupported

Columns = Any
"""A table's or an alias's column collection."""

Predicate = Callable[[Columns], ColumnElement[bool]]
Values = Mapping[str, Any]
Write = Callable[[Columns, Columns], Values]
"""The new column values, from the row's columns and the given ones.

The given columns of a settlement are `row_id`, `fence`, `attempt`, `delay` (seconds), `error` and `parks`. MariaDB and
MySQL evaluate a SET from left to right: an expression must not read a column that the same write sets before it.
"""

Declare = Callable[[sa.MetaData, str, str | None], Mapping[str, sa.Table]]
"""Declares tables by role on a `MetaData`, under a name and in a schema."""

DATABASES = frozenset({"postgresql", "mysql", "mariadb", "sqlite"})


class Feature(StrEnum):
    """What a layout can do; asking one for more is an error."""

    HOLD = "hold"
    LEASE = "lease"
    ORDER = "order"
    DEDUP = "dedup"
    SCHEDULE = "schedule"
    DEAD = "dead"
    RETENTION = "retention"
    AUDIT = "audit"


@dataclass(frozen=True)
class Update:
    """The row stays and its columns change."""

    values: Write


@dataclass(frozen=True)
class Delete:
    """The row goes."""


@dataclass(frozen=True)
class Move:
    """The row goes into another of the layout's tables; columns of the same name travel, `values` adds the rest."""

    into: str
    values: Write


@dataclass(frozen=True)
class Wait:
    """Rows that want attention when their `column` says so; with `plus_lease` that much after it."""

    column: str
    where: Predicate
    plus_lease: bool = False


@dataclass(frozen=True)
class Lease:
    """How a claim is written into the row, and the fence that settlement compares.

    `token` says where the fence comes from: a `uuid` of the claim, the `owner`'s name with one, or whatever the claim
    `wrote`, which is read back.
    """

    fence: str
    at: str
    """The column in whose order lapsed claims are looked for."""
    claim: Write
    renew: Write
    lapsed: Callable[[Columns, Any], ColumnElement[bool]] | None
    """Whether a claim has lapsed, given the lease in seconds. None: a lapsed row is a due one like any other."""
    lapse: Update
    """What a lapsed claim with attempts left becomes."""
    token: Literal["uuid", "owner", "wrote"] = "uuid"
    is_found_by_claim: bool = False
    """Whether lapsed claims are among the rows that a claim finds, because no index tells them apart."""
    length: timedelta | None = None
    """The lease of the system whose table this is; nobody's claim is taken before."""


@dataclass(frozen=True)
class Front:
    """Rows that others of their key wait behind: `column`, the next one of the index of keys, has this `value`."""

    column: str
    value: ColumnElement[Any]
    besides: Predicate
    """What else holds for them: the condition of a partial index."""

    def __call__(self, c: Any) -> ColumnElement[bool]:
        is_front: ColumnElement[bool] = (c[self.column] == self.value) & self.besides(c)
        return is_front

    def as_range(self, c: Any) -> ColumnElement[bool]:
        """The same for a planner that knows nothing of the table: an order by the column then means something to it."""
        is_front: ColumnElement[bool] = c[self.column].between(self.value, self.value) & self.besides(c)
        return is_front


@dataclass(frozen=True)
class Order:
    """Order per key: which rows block others, and how rows wait behind them.

    A row belongs to the `sink` that delivers it and to one of `lanes`, the latches for claiming. `in_flight` rows
    exclude every other row of their key, `blocking` rows the later ones, and so do rows of the dead table for which
    `parking` holds. Rows found behind them are taken out of the claim index by `block` and return by `unblock` when
    their key is free. Rows that wait for a time which has come are found by `due`, one predicate an index range, and
    made ready by `promote`.
    """

    key: str
    sink: str
    lane: str
    lanes: int
    due: tuple[Predicate, ...]
    promote: Update
    in_flight: Front
    blocking: Front
    parking: Front
    blocked: Predicate
    block: Update
    unblock: Update


@dataclass(frozen=True)
class Scope:
    """The leading column of the claim index, which every claim must name, and the rows that this index has."""

    column: str
    where: Predicate


@dataclass(frozen=True)
class Side:
    """A table of ours, of the role `state`, beside one that has no columns for claims.

    A row there has the id of the row it tells of, and is leased, waiting or dead; the layout's lease and its retry,
    release, dead and redrive are written there. With `is_serial` a row is claimed only when no earlier row has one.
    """

    is_serial: bool = False


@dataclass(frozen=True)
class Counts:
    """Which rows each line of `status` counts; a part of life that the table does not have is None."""

    new: Predicate
    retrying: Predicate | None = None
    held: Predicate | None = None
    scheduled: Predicate | None = None
    blocked: Predicate | None = None
    delivered: Predicate | None = None


@dataclass(frozen=True)
class Grave:
    """Where dead rows are, and the names of their columns there."""

    role: str
    row: str
    died_at: str
    error: str | None = None
    attempts: str | None = None
    where: Predicate | None = None
    """Which rows of the table are dead; None: all."""
    origin: str | None = None
    """What identified the row before it died, where that is another column."""


@dataclass(frozen=True)
class History:
    """Where delivered rows are moved to, the names of their columns there, and the way back.

    The table may be partitioned by the time of delivery. For rows that no partition takes the layout's `kept` is
    written instead, and they stay where they are.
    """

    role: str
    row: str
    delivered_at: str
    replay: Move


@dataclass(frozen=True)
class Variant:
    """One true spelling of a layout's tables: that of a release, of a migration file or of a page."""

    name: str
    origin: str
    """Where tables of this form come from, for people."""
    declare: Declare
    better: str | None = None
    """The variant whose indexes are worth having too: what a table lacks of them is a hint and no drift."""


Fallback = Callable[[Any, Any], Any]
"""A field's value from what else of the event was read, and from the row's identity."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One table's contract; see the module's docstring."""

    name: str
    table: str
    """The table's name unless the user gives another."""
    schema: str | None = None
    """The schema that the table is in unless the user gives another."""
    databases: frozenset[str] = DATABASES
    declare: Declare
    """Declares the tables by role: `outbox`, and as the layout needs `dead`, `lanes`, `audit`, `state` and others."""
    variants: tuple[Variant, ...] = ()
    """The spellings that a check accepts where there are several; `declare` is that of the first."""

    # -- events and columns -------------------------------------------------------------------------------------------

    rows: tuple[str, ...]
    """The columns that identify a row; several when the table is partitioned."""
    fields: Mapping[str, str]
    """The column of each event field that the table has."""
    message: str = "pillarbox"
    """The form of the messages that the table's own publisher sends: what a relay's sink sends by default."""
    carried: Mapping[str, str] = field(default_factory=dict)
    """The header in which an event field travels for which the table has no column."""
    fallbacks: Mapping[str, Fallback] = field(default_factory=dict)
    """What a field is that neither a column nor a header gives."""
    extra: tuple[str, ...] = ()
    """Columns that are no fields of an event but that handlers want: a claim has their values by name."""
    told: Mapping[str, str] = field(default_factory=dict)
    """Event fields that the other system's handlers read from the payload, by their names there: a put adds those that
    the payload, a JSON object, does not have."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What is written for an event field that is None, where the column does not take NULL."""
    check: Callable[[Any], None] | None = None
    """Refuses an event that the other system could not read, by raising `InvalidEvent`."""
    has_text_headers: bool = False
    """Whether the other system takes text for headers only."""
    refuse_headers: Callable[[Mapping[str, Any]], str | None] | None = None
    """Says what is wrong with headers that the other system could not read, as they are written: with the fields that
    travel there."""
    furthest: timedelta | None = None
    """How long after its creation a row may be due; the other system cannot read one that is due later."""
    put: Callable[[ColumnElement[Any] | None], Values] | None
    """The life cycle's columns of a new row, from the expression of its due time if it has one. None: the table's rows
    are written by the other system only."""
    dedup_within: str | None = None
    """The column within whose values dedup keys are unique; None: within the table."""
    is_locked_at_put: bool = False
    """Whether ids and dedup keys are locked at a put because no index of the table can keep them apart."""
    channel: Callable[[sa.Table], str] | None = None
    """The PostgreSQL channel on which the other system is told of new rows; its messages are the rows' topics."""
    attempts: str | None
    is_counted_at_claim: bool = False
    """Whether an attempt counts when it is claimed; else when it fails or its lease lapses."""
    created: str | None = None
    """When a row was put."""
    error: str | None = None
    """Why it failed last."""
    delivered_at: str | None = None

    # -- claiming -----------------------------------------------------------------------------------------------------

    ready: Predicate
    """Rows that a claim may take now."""
    order_by: tuple[str, ...]
    """The order of claims."""
    indexed: tuple[str, ...] = ()
    """The first columns of that order, where PostgreSQL's index has no more of them: it is walked by these alone, as
    sorting rows that are alike in them costs as much as there are such rows. Not where the ids tell the order."""
    scope: Scope | None = None
    recipient: str | None = None
    """The column that says which sink a row is for."""
    beside: Callable[[sa.Table], tuple[str, str | None]] | None = None
    """A table whose presence means that others deliver these rows: a relay then refuses them."""
    waits: tuple[Wait, ...]
    lease: Lease
    order: Order | None = None
    side: Side | None = None

    # -- what becomes of a row ----------------------------------------------------------------------------------------

    delivered: Delete | Update | Move
    """A `Move` goes into the table of the `history`."""
    kept: Update | None = None
    """What delivered rows become when they are retained, where they would else be deleted; or what they become when
    they cannot be moved into the history."""
    history: History | None = None
    retry: Update
    longest_delay: timedelta = timedelta(days=3650)
    """The most by which a retry may be put off: further ahead the other system would not read the row."""
    dead: Move | Update
    grave: Grave
    release: Update
    redrive: Move | Update
    replay: Update | None = None
    cancellable: Predicate | None = None
    reschedule: Update | None = None
    """Reads the new time from `given.due`."""
    counts: Counts
    features: frozenset[Feature] = field(default_factory=frozenset)

    @property
    def row(self) -> str:
        return self.rows[0]

    def as_variant(self, name: str) -> Layout:
        """This layout with the tables of one variant; no other is accepted then."""
        for variant in self.variants:
            if variant.name == name:
                return replace(self, declare=variant.declare, variants=(variant,))
        known = ", ".join(f"{variant.name} ({variant.origin})" for variant in self.variants)
        expected = f"expected variant {known}" if known else "it has no variants"
        raise LayoutError(f"Layout {self.name!r}: {expected}; got {name!r}")

    @property
    def keyed(self) -> Order:
        """The order per key, of a layout that has one."""
        if self.order is None:
            raise Unsupported(f"Layout {self.name!r}: its table keeps no order per key")
        return self.order
