"""What a batch weighs: payloads are loaded up to so many bytes, and the rows after them wait for the next claim.

A claim's statement loads light payloads and leaves the heavy ones in the database. Only where there are heavy ones, it
asks for their weights, drops the rows that are too many, and loads what is left. The rows are locked meanwhile, so that
nothing changes between these statements. What is dropped is the end of the batch: no row passes an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.event import EVENT_FIELDS
from pillarbox.layouts.layout import Layout
from pillarbox.stores.fields import raw_field, weight

NO_BOUND = 2**62
WIDEST = 100_000
"""No batch has more events than this."""
LIGHT_SHARE = 4
"""The light payloads of a whole batch have this part of its room at most: few bytes are loaded in vain."""


class Scale:
    """Weighs the rows of claims, whose raw event fields start at an offset and whose identity stands first."""

    def __init__(
        self, layout: Layout, table: sa.Table, dialect: str, offset: int, *, as_given: Callable[[Any], Any]
    ) -> None:
        self.max_bytes: int | None = None
        self._most: int | None = None
        self._names = layout.rows
        self._as_given = as_given
        """How a claim reads the columns that identify a row."""
        self._table = table
        self._is_postgres = dialect == "postgresql"
        self._at = offset + EVENT_FIELDS.index("payload")
        self._payload = raw_field(layout, table, "payload") if "payload" in layout.fields else None

    def narrow(self, limit: int) -> int:
        """How many rows to lock: what a batch has no room for is not kept from others, but for one row."""
        return limit if self.max_bytes is None or self._most is None else min(limit, self._most)

    def light(self, limit: int) -> int:
        """Up to how many bytes a payload is loaded with its row."""
        return NO_BOUND if self.max_bytes is None else self.max_bytes // (LIGHT_SHARE * limit)

    def cut(self, db: sa.Connection, rows: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        """The first rows that weigh at most `max_bytes`, one at least, with their payloads; and whether some are left.

        Where all are light there is nothing to do: together they weigh less.
        """
        at, payload = self._at, self._payload
        kept, is_cut = rows, False
        if self.max_bytes is not None and payload is not None and any(row[at] is None for row in rows):
            weights = self._ask(db, weight(payload), [row for row in rows if row[at] is None])
            kept = self._choose(rows, weights, self.max_bytes)
            is_cut = len(kept) < len(rows)
            heavy = [row for row in kept if row[at] is None and weights[self._identify(row)] is not None]
            payloads = self._ask(db, payload, heavy) if heavy else {}
            filled = {id(row): (*row[:at], payloads.pop(self._identify(row)), *row[at + 1 :]) for row in heavy}
            kept = [filled.get(id(row), row) for row in kept]
        if is_cut:
            self._most = len(kept) + 1
        elif self._most is not None:
            self._most = self._most * 2 if rows and self._most < WIDEST else None
        return kept, is_cut

    def _choose(self, rows: Sequence[Any], weights: dict[Any, int | None], max_bytes: int) -> list[Any]:
        kept: list[Any] = []
        for row in rows:
            light = row[self._at]
            weighs = weights[self._identify(row)] or 0 if light is None else _size(light)
            if kept and weighs > max_bytes:
                break
            max_bytes -= weighs
            kept.append(row)
        return kept

    def _ask(self, db: sa.Connection, what: Any, rows: Sequence[Any]) -> dict[Any, Any]:
        columns = [self._table.c[name] for name in self._names]
        first = columns[0]
        numbers = [row[0] for row in rows]
        if self._is_postgres:
            is_asked = first == sa.any_(sa.literal(numbers, postgresql.ARRAY(first.type)))
        else:
            is_asked = sa.type_coerce(first, sa.types.NullType()).in_(numbers)
        found = db.execute(sa.select(*(self._as_given(column) for column in columns), what).where(is_asked))
        return {self._identify(row): row[-1] for row in found}

    def _identify(self, row: Sequence[Any]) -> Any:
        return row[0] if len(self._names) == 1 else tuple(row[: len(self._names)])


def _size(value: Any) -> int:
    # SQLite's columns hold whatever was written into them.
    return len(value) if isinstance(value, (bytes, str)) else 0
