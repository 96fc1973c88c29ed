"""How long a message is remembered: forgetting old ones, and whether that is long enough for whoever sends them again.

A message that comes again after it was forgotten is taken a second time. So an inbox must remember messages for longer
than the outbox they come from goes on delivering them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import orjson
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pillarbox.durations import format_duration
from pillarbox.errors import PillarboxError
from pillarbox.inbox.takes import list_given
from pillarbox.layouts.clock import later
from pillarbox.retry import ByException, Constant, Exponential, Failure, Linear, RetryPolicy
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.hot import Hot
from pillarbox.stores.transitions import DEFAULT_LEASE

log = logging.getLogger("pillarbox.inbox")

PRUNE_EVERY: Final = timedelta(hours=1)
PRUNED_AT_ONCE: Final = 1000
_SUMMED: Final = 1000
"""After so many attempts the delay of a policy does not grow any more."""


class Pruning:
    """Deletes old rows of an inbox table, one batch a transaction; rows that others have locked are left for later."""

    def __init__(self, table: sa.Table, *, is_own: bool) -> None:
        c = table.c
        moment = c.taken_at if is_own else c.completed_at
        age: sa.BindParameter[float] = sa.bindparam("age", type_=sa.Float())
        is_old = moment < later(age)
        if not is_own:
            # What is still to be handled, or failed, is not forgotten.
            is_old &= c.status == sa.literal_column("'completed'")
        self._key = list(table.primary_key)
        self._find = sa.select(*self._key).where(is_old).order_by(moment).limit(sa.bindparam("most"))
        self._find = self._find.with_for_update(skip_locked=True)
        self._table = table
        self._removals: dict[bool, Hot] = {}

    def run(self, db: sa.Connection, age: timedelta, batch: int) -> int:
        """Delete up to `batch` rows older than `age` in the caller's transaction; returns how many."""
        found = db.execute(self._find, {"age": -age.total_seconds(), "most": batch}).all()
        if found and is_mysql(db.dialect.name):
            rows = orjson.dumps([tuple(row) for row in found]).decode()
            self._removal(db.dialect).execute(db, {"g_rows": rows}).close()
        elif found:
            key: Any = sa.tuple_(*self._key) if len(self._key) > 1 else self._key[0]
            keys = [tuple(row) if len(self._key) > 1 else row[0] for row in found]
            db.execute(sa.delete(self._table).where(key.in_(keys)))
        return len(found)

    def _removal(self, dialect: Any) -> Hot:
        # For a list of keys MySQL and MariaDB walk the whole table, and wait there for rows that others hold.
        if dialect.is_mariadb not in self._removals:
            given = list_given(self._table, [column.name for column in self._key], dialect)
            is_given = sa.and_(*(column == given.c[column.name] for column in self._key))
            self._removals[dialect.is_mariadb] = Hot(sa.delete(self._table).where(is_given))
        return self._removals[dialect.is_mariadb]


class Forgetting:
    """Forgets a few old messages now and then, beside other work: at the next call again while there are more."""

    def __init__(self, pruning: Pruning, retention: timedelta) -> None:
        self._pruning = pruning
        self._retention = retention
        self._next = 0.0

    async def run(self, run: Callable[[Callable[[sa.Connection], int]], Awaitable[int]]) -> None:
        """Forget some if it is time, in a transaction of `run`; what goes wrong is said, and puts it off.

        The messages of the caller are done by then: nothing that fails here may be held against them.
        """
        if time.monotonic() < self._next:
            return
        try:
            count = await run(lambda db: self._pruning.run(db, self._retention, PRUNED_AT_ONCE))
        except (PillarboxError, SQLAlchemyError) as error:
            log.warning("Could not forget old messages: %s", error)
            count = 0
        if count < PRUNED_AT_ONCE:
            self._next = time.monotonic() + PRUNE_EVERY.total_seconds()


def longest_redelivery(policy: RetryPolicy, *, lease: timedelta = DEFAULT_LEASE) -> timedelta | None:
    """For how long a relay with this policy may deliver one event again; None when there is no end.

    Every try may take its delay, and the time until the claim of a relay that died has lapsed.
    """
    policies = [*policy.policies.values(), policy.default] if isinstance(policy, ByException) else [policy]
    longest = timedelta(0)
    for each in policies:
        found = _longest(each, lease)
        if found is None:
            return None
        longest = max(longest, found)
    return longest


def _longest(policy: RetryPolicy, lease: timedelta) -> timedelta | None:
    most, oldest = policy.max_attempts, getattr(policy, "max_age", None)
    if most is None and oldest is None:
        return None
    if isinstance(policy, Exponential | Linear | Constant):
        policy = replace(policy, jitter=False)
    total, delay = lease, timedelta(0)
    for attempt in range(1, min(most or _SUMMED, _SUMMED)):
        delay = policy.next_delay(Failure(attempt)) or timedelta(0)
        total += delay + lease
    if most is not None and most > _SUMMED:
        total += (most - _SUMMED) * (delay + lease)
    # An event that is just not too old is tried once more after its delay.
    end = None if oldest is None else oldest + delay + lease
    return total if end is None else end if most is None else min(total, end)


def check_window(retention: timedelta, longest: timedelta | None) -> str | None:
    """Say why an inbox forgets too early; None when it does not. `longest` is None when redelivery has no end."""
    kept = format_duration(retention)
    if longest is None:
        return (
            f"The inbox remembers messages for {kept}, but the outbox's retry policy has no end: a message that is "
            "delivered again later than that is handled twice. Set max_attempts or max_age in the policy."
        )
    if longest <= retention:
        return None
    return (
        f"The inbox remembers messages for {kept}, but the outbox may deliver them again for "
        f"{format_duration(longest)}: a message that comes after it was forgotten is handled twice. Give the inbox a "
        "longer retention, or the retry policy an earlier end."
    )


def warn_window(
    retention: timedelta, policy: RetryPolicy, *, lease: timedelta = DEFAULT_LEASE, name: str = "inbox"
) -> str | None:
    """Log a warning when an inbox forgets too early for an outbox with this policy; returns its text."""
    problem = check_window(retention, longest_redelivery(policy, lease=lease))
    if problem is not None:
        log.warning("Inbox %s: %s", name, problem)
    return problem
