"""How one table spells the life cycle of an event: the declaration that all layouts share.

A layout is data: names of columns, predicates over them, and what each transition writes. A store compiles it into
statements and never asks which layout it has. Predicates are functions of a table's columns, so that one declaration
serves the table itself, an alias of it in a sub-select, and a mapped class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql import ColumnElement

Columns = Any
"""A table's or an alias's column collection."""

Predicate = Callable[[Columns], ColumnElement[bool]]
Values = Mapping[str, Any]
Write = Callable[[Columns, Columns], Values]
"""The new column values, from the row's columns and the given ones.

The given columns of a settlement are `row`, `fence`, `attempt`, `delay` (seconds), `error` and `parks`. MariaDB and
MySQL evaluate a SET from left to right: an expression must not read a column that the same write sets before it.
"""


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
class Lease:
    """How a claim is written into the row, and the fence that settlement compares."""

    fence: str
    claim: Write
    renew: Write
    lapsed: Predicate
    lapse: Update
    """What a lapsed claim with attempts left becomes."""


@dataclass(frozen=True)
class Order:
    """Order per key: which rows block others, and how rows wait behind them.

    `in_flight` rows exclude every other row of their key, `blocking` rows the later ones, and so do rows of the dead
    table for which `parking` holds. Rows found behind them are taken out of the claim index by `block` and return by
    `unblock` when their key is free.
    """

    key: str
    in_flight: Predicate
    blocking: Predicate
    parking: Predicate
    blocked: Predicate
    block: Update
    unblock: Update


@dataclass(frozen=True)
class Counts:
    """Which rows each line of `status` counts."""

    new: Predicate
    retrying: Predicate
    held: Predicate
    scheduled: Predicate
    blocked: Predicate
    delivered: Predicate


@dataclass(frozen=True)
class Layout:
    """One table's contract; see the module's docstring."""

    name: str
    table: str
    """The table's name unless the user gives another."""
    declare: Callable[[sa.MetaData, str, str | None], Mapping[str, sa.Table]]
    """Declares the tables by role: `outbox`, and as the features ask `dead`, `lanes`, `audit`."""
    row: str
    """The column that identifies a row and orders the claims."""
    sink: str
    lane: str
    lanes: int
    fields: Mapping[str, str]
    """The column of each event field that the table has."""
    put: Callable[[ColumnElement[Any] | None], Values]
    """The life cycle's columns of a new row, from the expression of its due time if it has one."""
    attempts: str
    ready: Predicate
    due: tuple[Predicate, ...]
    """Rows that wait for a time which has come: one predicate an index range."""
    promote: Update
    until: str
    """The column that says when a waiting or leased row wants attention."""
    times: tuple[Predicate, ...]
    """Rows whose `until` counts: one predicate an index range."""
    lease: Lease
    order: Order
    delivered: Delete | Update
    kept: Update
    """What delivered rows become when they are retained."""
    retry: Update
    dead: Move
    release: Update
    redrive: Move
    replay: Update
    cancellable: Predicate
    reschedule: Update
    """Reads the new time from `given.due`."""
    counts: Counts
    features: frozenset[Feature] = field(default_factory=frozenset)
