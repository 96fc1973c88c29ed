"""Claiming from a table whose claims stand in its own columns, and which keeps no order per key.

A claim reads due rows in the order of the table's own index and locks them, skipping those that others have locked;
a lease then writes itself into them. Rows whose lease has lapsed are let go first, so that there is one way to claim:
an OR of the two would spoil the index. Events go out in the order of the table's times, as far as one relay and one
batch keep it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.event import Claim
from pillarbox.layouts.exact import is_one_of
from pillarbox.layouts.layout import Layout, Scope
from pillarbox.stores import Mode
from pillarbox.stores.dialect import Given, is_mysql
from pillarbox.stores.fields import ClaimLoader, as_read, claimed_fields
from pillarbox.stores.hot import Hot
from pillarbox.stores.transitions import Taken, Transitions
from pillarbox.stores.weighing import Scale


class ScanTransitions(Transitions):
    """The statements of a layout without order per key."""

    def __init__(self, layout: Layout, tables: Mapping[str, sa.Table], **options: Any) -> None:
        super().__init__(layout, tables, **options)
        self._width = len(layout.rows)
        is_listed = is_mysql(self.dialect) and self.scopes is not None
        self._has_heads = layout.scope is not None and (self.dialect == "postgresql" or is_listed)
        self._is_walked = self.dialect == "postgresql" and bool(layout.indexed)
        # The id of a row tells nothing of when others were put.
        rest = [name for name in layout.order_by[len(layout.indexed) :] if name != layout.row]
        self._told = [*layout.indexed, *rest] if self._is_walked and rest else []
        self._find = Hot(self._build_find())
        self._find_exactly = Hot(self._build_find(is_exact=True))
        self._find_scopes: Hot | None = None
        if layout.scope is not None and self._has_heads and self.scopes is None:
            self._find_scopes = Hot(self._build_scopes(layout.scope))
        self._loader = ClaimLoader(layout, self.outbox, self.dialect, self._width + 2)
        self.scale = Scale(layout, self.outbox, self.dialect, self._width + 2, as_given=self._as_given)

    def claim(
        self, db: sa.Connection, limit: int, mode: Mode, lease: timedelta, *, busy: Collection[int] = ()
    ) -> Taken:
        # What nobody can claim must not hide the others.
        depth = limit = self.scale.narrow(limit) + len(self._unclaimable)
        params: dict[str, Any] = {"limit": limit, "light": self.scale.light(limit)}
        if self._has_heads:
            scopes = self._scopes_now(db)
            # Twice an even share of each: every row that is read is locked too.
            depth = limit if len(scopes) <= 1 else max(10, -(-2 * limit // len(scopes)))
            params |= {"scopes": scopes, "depth": depth}
        rows = self._fetch(db, params)
        if self.layout.lease.is_found_by_claim:
            self.is_stuck = False
            while self._let_found_go(db, rows):
                rows = self._fetch(db, params)
            rows = [row for row in rows if not row[-2]] if self.is_stuck else rows
        chosen, has_tried = self._choose(self._leave_out(rows), mode)
        chosen, is_cut = self.scale.cut(db, chosen[: limit - len(self._unclaimable)] if self._unclaimable else chosen)
        width, make = self._width, self._loader.make
        claims = [make(row, row[0] if width == 1 else tuple(row[:width]), row[width]) for row in chosen]
        if mode == "lease" and claims:
            self._lease_out(db, claims, lease)
        return Taken(claims, is_full=is_cut or len(rows) >= min(limit, depth), has_tried=has_tried)

    def _fetch(self, db: sa.Connection, params: Mapping[str, Any]) -> Sequence[Any]:
        limit = params["limit"]
        if not self._told or limit < 1:
            return self._find.fetch(db, params)
        rows = self._find.fetch(db, {**params, "limit": limit + 1})
        if len(rows) <= limit:
            return rows
        # The batch may end among rows of one time. Where these tell their order, others of that time may come first.
        width, count = len(self.layout.indexed), len(self._told)
        orders = [tuple(row[-count:]) for row in rows]
        last = orders[-1]
        is_cut = orders[-2][:width] == last[:width] and any(
            order[:width] == last[:width] and order != last for order in orders
        )
        return self._find_exactly.fetch(db, params) if is_cut else rows[:-1]

    def _let_found_go(self, db: sa.Connection, rows: Sequence[Any]) -> int:
        """Let go those of the rows whose claim has lapsed; they are found again when they are due."""
        width = self._width
        lapsed = [(*row[:width], row[width], row[-1], row[width + 1], None) for row in rows if row[-2]]
        return self._let_go(db, lapsed, self.max_attempts, self.parks) if lapsed else 0

    def _scopes_now(self, db: sa.Connection) -> list[str]:
        if self._find_scopes is None:
            return list(self.scopes or ())
        return [row[0] for row in self._find_scopes.fetch(db, {}) if row[0] is not None]

    def _choose(self, rows: Sequence[Any], mode: Mode) -> tuple[Sequence[Any], bool]:
        chosen: list[Any] = []
        left: set[str | None] = set()
        has_tried = False
        width, is_hold = self._width, mode == "hold"
        for row in rows:
            attempts, key = row[width], row[width + 1]
            # A hold does not count an attempt when its process dies, so it takes no row that was tried before.
            if is_hold and attempts:
                has_tried = True
                left.add(key)
            elif key is None or key not in left:
                chosen.append(row)
        return chosen, has_tried

    def _lease_out(self, db: sa.Connection, claims: Sequence[Claim], lease: timedelta) -> None:
        token: Any = None
        if self.layout.lease.token != "wrote":
            token = uuid4() if self.layout.lease.token == "uuid" else f"{owner_name()}/{uuid4().hex}"
        seconds = lease.total_seconds()
        self._write_claims(db, [Given(claim.row, token, claim.attempt, seconds) for claim in claims])
        if token is None:
            token = self._read_fence(db, claims)
        for claim in claims:
            claim.fence = token

    def wake(self, db: sa.Connection, max_attempts: int | None, park: bool) -> int:
        return self._let_lapsed_go(db, max_attempts, park)

    # -- building -----------------------------------------------------------------------------------------------------

    def _columns(self) -> list[Any]:
        attempts = self.outbox.c[self.layout.attempts] if self.layout.attempts is not None else sa.literal_column("0")
        [key] = self._key_columns()
        found = [*self._identity(), attempts.label("tried"), key.label("event_key")]
        found += claimed_fields(self.layout, self.outbox)
        lease = self.layout.lease
        if lease.is_found_by_claim and lease.lapsed is not None:
            is_lapsed = sa.case((lease.lapsed(self.outbox.c, sa.literal(0.0)), sa.true()), else_=sa.false())
            found += [is_lapsed.label("is_lapsed"), as_read(self.outbox.c[lease.fence]).label("found_fence")]
        return found

    def _build_find(self, *, is_exact: bool = False) -> sa.Select[Any]:
        layout, c = self.layout, self.outbox.c
        order = [c[name] for name in layout.order_by]
        if layout.scope is not None and self._has_heads:
            is_postgres = self.dialect == "postgresql"
            return (self._build_scoped_find if is_postgres else self._build_listed_find)(layout.scope)
        columns = self._columns()
        query = sa.select(*columns).where(self.is_mine(self.outbox), layout.ready(c))
        if layout.scope is not None and self.scopes is not None:
            query = query.where(c[layout.scope.column].in_(list(self.scopes)))
        if not self._is_walked or is_exact:
            return query.order_by(*order).limit(sa.bindparam("limit")).with_for_update(skip_locked=True)
        query = query.add_columns(*(column.label(f"order_{column.name}") for column in order))
        walked = query.order_by(*order[: len(layout.indexed)]).limit(sa.bindparam("limit"))
        head = walked.with_for_update(skip_locked=True).cte("head").prefix_with("MATERIALIZED")
        listed = list(head.c)
        told = [as_read(head.c[f"order_{name}"]).label(f"told_{name}") for name in self._told]
        return sa.select(*listed[: len(columns)], *told).order_by(*listed[len(columns) :])

    def _build_scoped_find(self, scope: Scope) -> sa.Select[Any]:
        """One index range a scope: without its leading column the claim index is of no use."""
        layout, c = self.layout, self.outbox.c
        given = sa.func.unnest(sa.bindparam("scopes", type_=postgresql.ARRAY(sa.Text)))
        scopes = given.table_valued(sa.column("scope", sa.Text), name="scopes").render_derived()
        order = [c[name] for name in layout.order_by]
        columns = self._columns()
        inner = sa.select(*columns, *(column.label(f"order_{column.name}") for column in order)).where(
            c[scope.column] == scopes.c.scope, layout.ready(c)
        )
        ordered = inner.order_by(*order).limit(sa.bindparam("depth", type_=sa.Integer))
        head = ordered.with_for_update(skip_locked=True).lateral("head")
        query = sa.select(*list(head.c)[: len(columns)]).select_from(scopes.join(head, sa.true()))
        return query.order_by(*list(head.c)[len(columns) :]).limit(sa.bindparam("limit", type_=sa.Integer))

    def _build_listed_find(self, scope: Scope) -> sa.Select[Any]:
        """The same where LATERAL is not to be had: one branch a scope."""
        layout, c = self.layout, self.outbox.c
        order = [c[name] for name in layout.order_by]
        columns = self._columns()
        fields = [*columns, *(column.label(f"order_{column.name}") for column in order)]

        def head(value: str) -> sa.Select[Any]:
            # Exactly this one: a row that two branches find would be claimed twice.
            query = sa.select(*fields).where(is_one_of(c[scope.column], [value]), layout.ready(c))
            return query.order_by(*order).limit(sa.bindparam("depth")).with_for_update(skip_locked=True)

        heads = sa.union_all(*(head(value) for value in dict.fromkeys(self.scopes or ()))).subquery("heads")
        query = sa.select(*list(heads.c)[: len(columns)]).order_by(*list(heads.c)[len(columns) :])
        return query.limit(sa.bindparam("limit"))

    def _build_scopes(self, scope: Scope) -> sa.Select[Any]:
        """The scopes that have rows, from one to the next by the index: DISTINCT would read every row."""
        first, then = self.outbox.alias(), self.outbox.alias()
        start = sa.select(sa.func.min(first.c[scope.column]).label("scope")).where(scope.where(first.c))
        found = start.cte("scopes", recursive=True)
        following = (
            sa.select(sa.func.min(then.c[scope.column]))
            .where(scope.where(then.c), then.c[scope.column] > found.c.scope)
            .scalar_subquery()
        )
        listed = found.union_all(sa.select(following).where(found.c.scope.is_not(None)))
        return sa.select(listed.c.scope)


def owner_name() -> str:
    """This process, in letters that the other systems take for an owner of claims."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid()}"
