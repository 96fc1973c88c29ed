"""A layout's life cycle as statements, run on one connection inside one transaction.

Everything here is synchronous and does no waiting of its own: an asynchronous store runs it through `run_sync`, a
store with its own thread calls it there. Statements are built once, when the store is made.

This is what all layouts share: settling, renewing, and letting lapsed claims go. How rows are claimed differs:
`keyed.py` for tables that keep order per key, `scan.py` for those that do not, `side.py` for tables whose claims
stand in a table beside them.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.errors import InvalidEvent, Unsupported
from pillarbox.event import DELIVERED, MAX_DELAY, Claim, Outcome, Released
from pillarbox.layouts.clock import instant, seconds_until
from pillarbox.layouts.layout import Delete, Layout, Move, Update
from pillarbox.stores import Mode, Settlement
from pillarbox.stores.dialect import (
    Given,
    GivenRows,
    Kinds,
    SameForAll,
    UsedColumns,
    delete_given,
    in_parts,
    is_mysql,
    is_time,
)
from pillarbox.stores.fields import MOST_TRIES, count_tries
from pillarbox.stores.hot import Hot
from pillarbox.stores.moving import Mover, Run, has_no_partition
from pillarbox.stores.outcomes import group_outcomes
from pillarbox.stores.refusals import write_apart
from pillarbox.stores.weighing import Scale

log = logging.getLogger("pillarbox.store")

WAKE_LIMIT = 1000
DEFAULT_LEASE = timedelta(seconds=30)
POSTPONED = timedelta(minutes=1)
LAPSED = "The lease lapsed: the relay that held this event died or stalled."


class Taken(NamedTuple):
    """What one claim found."""

    claims: list[Claim]
    blocked: Sequence[tuple[Any, str]] = ()
    """Rows that wait behind another of their key, with that key."""
    lanes: Collection[int] = ()
    is_full: bool = False
    has_tried: bool = False


class Renewal(NamedTuple):
    """Which claims are somebody else's by now, and the fence of the others."""

    lost: list[Claim]
    fence: Any


class _Write(NamedTuple):
    each: Hot
    given: GivenRows
    alike: Hot
    same: SameForAll


class Transitions(ABC):
    """The statements of one layout on one database, for the rows of one sink."""

    scale: Scale

    def __init__(
        self,
        layout: Layout,
        tables: Mapping[str, sa.Table],
        *,
        dialect: str,
        sink: str = "",
        retain: bool = False,
        scopes: Sequence[str] | None = None,
    ) -> None:
        self.layout = layout
        self.tables = tables
        self.outbox = tables["outbox"]
        self.held = tables["outbox" if layout.side is None else "state"]
        """The table that claims are written into."""
        self.dialect = dialect
        self.sink = sink
        self.scopes = scopes
        self.lease = layout.lease.length or DEFAULT_LEASE
        self.max_attempts: int | None = None
        self.parks = True
        self.is_stuck = False
        """Whether there are lapsed rows that nothing can be done about now."""
        self._postponed: set[Any] = set()
        self._hints = is_mysql(dialect)
        keeps = retain and isinstance(layout.delivered, Delete)
        self._delivered = layout.kept if keeps and layout.kept is not None else layout.delivered
        self._has_stayed = False
        self._deletes = not self._hints and isinstance(self._delivered, Delete)
        self._row = self.outbox.c[layout.row]
        self._names = layout.rows
        self._nameless: set[bytes] = set()
        self._unclaimable: set[Any] = set()
        self._trial: list[tuple[Given, str]] | None = None
        """What was refused of a claim that is only tried."""
        is_raw = layout.lease.token == "wrote"
        self._kinds = Kinds(self.held, self._names, layout.lease.fence, is_raw=is_raw)
        self._given = GivenRows(dialect, self._kinds)
        self._next_due = Hot(self._build_next_due())
        self._lapsed = self._build_lapsed()
        self._writes = {
            fenced: {name: self._build_write(self.held, write, fenced) for name, write in self._updates().items()}
            for fenced in (False, True)
        }
        # With a side table the fence is not in the row that moves, and its claims are checked before.
        moves = {"delivered": self._delivered, "dead": layout.dead} if layout.side is None else {}
        self._moves = {
            fenced: {name: self._build_move(move, fenced) for name, move in moves.items() if isinstance(move, Move)}
            for fenced in (False, True)
        }

    # -- what differs -------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim(
        self, db: sa.Connection, limit: int, mode: Mode, lease: timedelta, *, busy: Collection[int] = ()
    ) -> Taken:
        """Claim rows; `busy` lanes have rows of this relay under way."""

    @abstractmethod
    def wake(self, db: sa.Connection, max_attempts: int | None, park: bool) -> int:
        """Let lapsed claims go and make rows ready whose time has come; returns how many rows moved."""

    def block(self, db: sa.Connection, blocked: Sequence[tuple[Any, str]]) -> int:
        """Take rows that wait behind another out of the claim index."""
        return 0

    def unblock(self, db: sa.Connection, keys: Iterable[str]) -> None:
        """Set rows ready that waited behind these keys."""
        return

    def is_mine(self, table: sa.Table) -> ColumnElement[bool]:
        """Which rows of a table are this store's."""
        scope, recipient = self.layout.scope, self.layout.recipient
        if scope is not None and self.scopes is not None and scope.column in table.c:
            return table.c[scope.column].in_(list(self.scopes))
        if recipient is None or not self.sink or recipient not in table.c:
            return sa.true()
        return table.c[recipient] == self.sink

    def lock_keys(self, db: sa.Connection, keys: Sequence[str]) -> None:
        """Take locks on keys that last until the transaction ends, in one order for everybody."""
        raise Unsupported(f"Layout {self.layout.name!r}: lock_key needs a table that keeps order per key")

    def change(
        self, db: sa.Connection, ids: Sequence[UUID], dedup_key: str | None, given: Any, *, topic: str | None = None
    ) -> int:
        """Cancel events that nobody holds, or reschedule them when `given.due` is a time."""
        layout, c = self.layout, self.outbox.c
        if layout.cancellable is None or layout.reschedule is None:
            raise Unsupported(f"Layout {layout.name!r}: its events cannot be cancelled or rescheduled")
        # As a CASE, so that no index of free rows is read for those that are chosen.
        is_free = sa.case((layout.cancellable(c), sa.true()), else_=sa.false())
        free = sa.select(*self._identity(), *self._key_columns()).where(
            self.is_mine(self.outbox), self._chosen(ids, dedup_key), is_free
        )
        if topic is not None and layout.dedup_within is not None:
            free = free.where(c[layout.dedup_within] == topic)
        rows = db.execute(free.with_for_update(skip_locked=True)).all()
        if not rows:
            return 0
        found = [Given(self._identify(row)) for row in rows]
        if given.due is None:
            self._write(db, "cancel", found)
        else:
            mine = self._is_among(found)
            self._check_due(db, mine, given.due_at)
            change = sa.update(self.outbox).where(mine).values(layout.reschedule.values(c, given))
            db.execute(change.with_hint("FORCE INDEX (PRIMARY)", dialect_name=self.dialect) if self._hints else change)
        self._changed(db, rows)
        return len(rows)

    def _check_due(self, db: sa.Connection, mine: ColumnElement[bool], due_at: datetime) -> None:
        """Refuse a time so long after a row's creation that the table's own system could not read it."""
        furthest, created = self.layout.furthest, self.layout.created
        if furthest is None or created is None:
            return
        # Not by min() of the database, which would walk an index of times from its start to find the first of them.
        oldest = min(db.execute(sa.select(self.outbox.c[created]).where(mine)).scalars(), default=None)
        if oldest is not None and due_at - oldest > furthest:
            raise InvalidEvent(
                f"reschedule: layout {self.layout.name!r} expects an event to be due at most {furthest.days} days "
                f"after it was put; got {due_at.isoformat()} for one that was put at {oldest.isoformat()}"
            )

    def _changed(self, db: sa.Connection, rows: Sequence[Any]) -> None:
        """Called with the rows that were cancelled or rescheduled."""
        return

    def _chosen(self, ids: Sequence[UUID], dedup_key: str | None) -> ColumnElement[bool]:
        fields, c = self.layout.fields, self.outbox.c
        wanted, value = ("id", ids) if dedup_key is None else ("dedup_key", dedup_key)
        if wanted not in fields:
            raise Unsupported(f"Layout {self.layout.name!r}: its table has no column for the event's {wanted}")
        column = c[fields[wanted]]
        return column.in_(ids) if dedup_key is None else column == value

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_due(self, db: sa.Connection) -> float | None:
        """Seconds until a row wants attention."""
        if not self.layout.waits:
            return None
        row = self._next_due.execute(db, {}).one()
        seconds = self.lease.total_seconds()
        moments = [
            float(value) + (seconds if wait.plus_lease else 0.0)
            for wait, value in zip(self.layout.waits, row, strict=True)
            if value is not None
        ]
        # A time may be infinite, and a duration may not.
        return max(0.0, min(*moments, MAX_DELAY.total_seconds())) if moments else None

    def _let_lapsed_go(self, db: sa.Connection, max_attempts: int | None, park: bool) -> int:
        moved = 0
        self.is_stuck = False
        if self._lapsed is not None:
            params = {"limit": WAKE_LIMIT, "lease": self.lease.total_seconds()}
            while lapsed := db.execute(self._lapsed, params).all():
                moved += self._let_go(db, lapsed, max_attempts, park)
                if len(lapsed) < WAKE_LIMIT or self.is_stuck:
                    break
        return moved

    def _let_go(self, db: sa.Connection, lapsed: Sequence[Any], max_attempts: int | None, park: bool) -> int:
        again: list[Given] = []
        last: list[Given] = []
        width = len(self._names)
        for found in lapsed:
            counted, fence, key, own_max = found[width:]
            counted, own_max = count_tries(counted), count_tries(own_max)
            row = self._identify(found)
            attempts = counted if self.layout.is_counted_at_claim else min(counted + 1, MOST_TRIES)
            most = own_max or max_attempts
            if most is not None and attempts >= most:
                last.append(Given(row, fence, attempts, 0.0, LAPSED, park and key is not None))
            else:
                # Rows that lapsed twice may have killed their relay together: they return at different moments, so
                # that the guilty one spends its attempts alone.
                spread = 0.0 if attempts < 2 else random.uniform(0, min(300.0, 2.0 ** min(attempts, 20)))
                again.append(Given(row, fence, attempts, spread, LAPSED, park and key is not None))
        # Their rows are locked, and a claim without a holder has nothing to compare.
        moved, refused = write_apart(db, lambda rows: self._write(db, "lapse", rows), again)
        moved += self._bury_refused(db, last, refused)
        self.unblock(db, {key for *_, key, _ in lapsed if key is not None})
        return moved

    def _bury_refused(self, db: sa.Connection, last: Sequence[Given], refused: Sequence[tuple[Given, str]]) -> int:
        """Let rows be dead, the last of their tries and those that their table does not let be free."""
        told = [given._replace(error=f"The database refused to free this event: {why}") for given, why in refused]
        moved, left = write_apart(db, lambda rows: self._bury(db, rows, fenced=False), [*last, *told])
        return moved + self._postpone(db, left)

    def _postpone(self, db: sa.Connection, refused: Sequence[tuple[Given, str]]) -> int:
        """Let rows wait that their tables let be neither free nor dead: they must not be tried again at once."""
        for given, why in refused:
            if given.row_id not in self._postponed:
                log.error(
                    "Row %s of %s can be neither freed nor dead, so it waits: %s",
                    *(given.row_id, self.outbox.fullname, why),
                )
                self._postponed.add(given.row_id)
        rows = [Given(given.row_id, None, 0, POSTPONED.total_seconds()) for given, _ in refused]
        postponed, left = write_apart(db, lambda rows: self._write(db, "renew", rows), rows)
        self.is_stuck |= bool(left)
        return postponed

    # -- claims that are refused --------------------------------------------------------------------------------------

    def _write_claims(self, db: sa.Connection, rows: Sequence[Given]) -> None:
        if self._trial is None:
            self._write_claim(db, rows)
        else:
            self._trial += write_apart(db, lambda part: self._write_claim(db, part), rows)[1]

    def _write_claim(self, db: sa.Connection, rows: Sequence[Given]) -> int:
        return self._write(db, "claim", rows)

    def bury_unclaimable(self, db: sa.Connection, limit: int, lease: timedelta, *, park: bool) -> int:
        """Let rows be dead into which the database lets no claim be written; returns how many are out of the way.

        They are found by a claim that is undone: what follows them in their keys must not be claimed with them.
        """
        self._trial = []
        try:
            with db.begin_nested() as trial:
                claims = self.claim(db, limit, "lease", lease).claims
                trial.rollback()
            refused = self._trial
        finally:
            self._trial = None
        parks = {claim.row: park and claim.event.key is not None for claim in claims}
        dead = [
            Given(
                row, None, attempt - 1, 0.0, f"The database refused to let anybody claim this event: {why}", parks[row]
            )
            for (row, _, attempt, *_), why in refused
        ]
        _, left = write_apart(db, lambda rows: self._bury(db, rows, fenced=False), dead)
        for given, why in left:
            name = self.outbox.fullname
            log.error("Row %s of %s can be neither claimed nor dead, so it is left: %s", given.row_id, name, why)
            self._unclaimable.add(given.row_id)
        return len(refused)

    # -- settling -----------------------------------------------------------------------------------------------------

    def settle(
        self, db: sa.Connection, claims: Sequence[Claim], outcomes: Sequence[Outcome], *, mode: Mode, park: bool
    ) -> Settlement:
        """Write what became of the claims; a claim whose fence is gone changes nothing."""
        fenced = mode == "lease"
        is_whole = self._deletes and len(outcomes) == len(claims) > 0
        if is_whole and all(outcome is DELIVERED for outcome in outcomes):
            return self._settle_delivered(db, claims, fenced=fenced)
        groups = group_outcomes(claims, outcomes, park, longest=self.layout.longest_delay)
        if mode == "hold":
            groups["release"] = []
        counts = {name: self._write(db, name, groups[name], fenced=fenced) for name in ("retry", "release")}
        for name, write in (("delivered", self._write_delivered), ("dead", self._bury)):
            counts[name] = write(db, groups[name], fenced=fenced) if groups[name] else 0
        if fenced:
            self._settled(db, claims, outcomes, groups, park)
        lost = sum(len(rows) for rows in groups.values()) - sum(counts.values())
        return Settlement(
            counts["delivered"],
            counts["retry"],
            counts["dead"],
            sum(isinstance(outcome, Released) for outcome in outcomes) if mode == "hold" else counts["release"],
            lost,
        )

    def _settled(
        self,
        db: sa.Connection,
        claims: Sequence[Claim],
        outcomes: Sequence[Outcome],
        groups: Mapping[str, Sequence[Given]],
        park: bool,
    ) -> None:
        """Called when the rows of a lease are written."""
        return

    def _settle_delivered(self, db: sa.Connection, claims: Sequence[Claim], *, fenced: bool) -> Settlement:
        """Nearly every settlement: all claims of the batch, which share a fence, are delivered and deleted."""
        write = self._writes[fenced]["delivered"]
        if write.same.is_possible:
            params = write.same.params([claim.row for claim in claims], Given(None, claims[0].fence))
            delivered = write.alike.execute(db, params).rowcount
        else:
            given = write.given.params([Given(claim.row, claim.fence) for claim in claims])
            delivered = write.each.execute(db, given).rowcount
        if fenced:
            self.unblock(db, {claim.event.key for claim in claims if claim.event.key is not None})
        return Settlement(delivered, lost=len(claims) - delivered)

    def renew(self, db: sa.Connection, claims: Sequence[Claim], lease: timedelta) -> Renewal:
        """Extend the claims that are still ours."""
        seconds = lease.total_seconds()
        if self.layout.lease.token == "wrote":
            # The fence moves with the lease, so it must be known before which claims are ours.
            kept = self._ours(db, claims)
            ours = [claim for claim in claims if claim.row in kept]
            self._write(db, "renew", [Given(claim.row, None, 0, seconds) for claim in ours])
            fence = self._read_fence(db, ours) if ours else None
        else:
            fence = claims[0].fence
            rows = [Given(claim.row, claim.fence, 0, seconds) for claim in claims]
            if self._write(db, "renew", rows, fenced=True) == len(claims):
                return Renewal([], fence)
            kept = self._ours(db, claims)
        return Renewal([claim for claim in claims if claim.row not in kept], fence)

    def lock_free(self, db: sa.Connection, claims: Sequence[Claim]) -> set[Any]:
        """Lock those rows of claims that nobody has, and return them."""
        chosen = self._is_among([Given(claim.row) for claim in claims]), self.layout.ready(self.held.c)
        query = sa.select(*self._identity()).where(*chosen).with_for_update(skip_locked=True)
        return {self._identify(row) for row in db.execute(query)}

    def _ours(self, db: sa.Connection, claims: Sequence[Claim]) -> set[Any]:
        query = sa.select(*self._identity()).where(
            self._is_among([Given(claim.row) for claim in claims]), self._fence_column() == claims[0].fence
        )
        return {self._identify(row) for row in db.execute(query.with_for_update())}

    def _read_fence(self, db: sa.Connection, claims: Sequence[Claim]) -> Any:
        """The fence that a write left in the rows of claims, which is the same for all of them."""
        return db.execute(sa.select(self._fence_column()).where(self._is_among([Given(claims[0].row)]))).scalar_one()

    def _bury(self, db: sa.Connection, rows: Sequence[Given], *, fenced: bool) -> int:
        dead = self.layout.dead
        if self.layout.grave.error is None:
            for given in rows:
                log.warning("Row %s of %s is dead: %s", given.row_id, self.outbox.fullname, given.error)
        if isinstance(dead, Move):
            return sum(self._moves[fenced]["dead"](db, part) for part in in_parts(rows))
        return self._write(db, "dead", rows, fenced=fenced)

    def _write_delivered(self, db: sa.Connection, rows: Sequence[Given], *, fenced: bool) -> int:
        if not isinstance(self._delivered, Move):
            return self._write(db, "delivered", rows, fenced=fenced)
        if self.layout.kept is None:
            return self._moves[fenced]["delivered"](db, rows)
        try:
            with db.begin_nested():
                moved = self._moves[fenced]["delivered"](db, rows)
        except sa.exc.IntegrityError as error:
            if not has_no_partition(error):
                raise
            # They were delivered, so they must not stay claimable for want of a place to go.
            if not self._has_stayed:
                log.warning(
                    "Table %s has no partition for events delivered now; they stay in %s until `pillarbox partitions "
                    "ensure` has run.",
                    *(self.tables[self._delivered.into].fullname, self.outbox.fullname),
                )
            self._has_stayed = True
            return self._write(db, "kept", rows, fenced=fenced)
        self._has_stayed = False
        return moved

    # -- building -----------------------------------------------------------------------------------------------------

    def _fence_column(self) -> ColumnElement[Any]:
        fence: ColumnElement[Any] = self.held.c[self.layout.lease.fence]
        # What was read back is compared as it was read.
        return sa.type_coerce(fence, sa.types.NullType()) if self.layout.lease.token == "wrote" else fence

    def _updates(self) -> dict[str, Update | Delete]:
        layout = self.layout
        updates: dict[str, Update | Delete] = {
            "retry": layout.retry,
            "release": layout.release,
            "lapse": layout.lease.lapse,
            "cancel": Delete(),
            "claim": Update(layout.lease.claim),
            "renew": Update(layout.lease.renew),
        }
        if not isinstance(self._delivered, Move):
            updates["delivered"] = self._delivered
        elif layout.kept is not None:
            updates["kept"] = layout.kept
        if isinstance(layout.dead, Update):
            updates["dead"] = layout.dead
        return updates

    def _identity(self) -> list[ColumnElement[Any]]:
        # As the driver gives them: what goes back as a parameter need not be anything else.
        return [self._as_given(self.held.c[name]).label(name) for name in self._names]

    def _as_given(self, column: Any) -> ColumnElement[Any]:
        is_text = self.dialect == "postgresql" and is_time(column.type)
        return sa.cast(column, sa.Text) if is_text else sa.type_coerce(column, sa.types.NullType())

    def _leave_out(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Leave out rows that cannot be claimed, or that no statement could name again: a blob as an id in SQLite."""
        if self._unclaimable:
            rows = [row for row in rows if self._identify(row) not in self._unclaimable]
        if self.dialect != "sqlite" or not any(type(row[0]) is bytes for row in rows):
            return rows
        for name in {row[0] for row in rows if type(row[0]) is bytes} - self._nameless:
            self._nameless.add(name)
            log.error("Row %r of %s has an id that is no text, so nobody can claim it.", name, self.outbox.fullname)
        return [row for row in rows if type(row[0]) is not bytes]

    def _identify(self, row: Sequence[Any]) -> Any:
        return row[0] if len(self._names) == 1 else tuple(row[: len(self._names)])

    def _is_among(self, rows: Sequence[Given]) -> ColumnElement[bool]:
        c, names = self.held.c, self._names
        numbers = [row.row_id if len(names) == 1 else row.row_id[0] for row in rows]
        if self.dialect == "postgresql":  # one parameter, and one text whatever their number
            is_numbered = c[names[0]] == sa.any_(sa.literal(numbers, postgresql.ARRAY(c[names[0]].type)))
        else:
            is_numbered = sa.type_coerce(c[names[0]], sa.types.NullType()).in_(numbers)
        if len(names) == 1:
            return is_numbered
        # By their first column, too: of an OR alone no index is sure to be found.
        pairs = sa.tuple_(*(self._as_given(c[name]) for name in names))
        return is_numbered & pairs.in_([row.row_id for row in rows])

    def _key_columns(self) -> list[ColumnElement[Any]]:
        key = self.layout.fields.get("key") if self.layout.side is None else None
        return [self.outbox.c[key] if key is not None else sa.null().label("key")]

    def _match(self, given: GivenRows, fenced: bool) -> Callable[[Any], ColumnElement[bool]]:
        fence = self.layout.lease.fence

        def match(columns: Any) -> ColumnElement[bool]:
            same = given.is_row(columns)
            return same & (columns[fence] == given.c.fence) if fenced else same

        return match

    def _give(self, table: sa.Table, write: Update | Delete | Move, fenced: bool) -> GivenRows:
        """Of a batch only what a write reads."""
        names = {*self._kinds.row_names, "fence"} if fenced else {*self._kinds.row_names}
        if not isinstance(write, Delete):
            used = UsedColumns(self._given)
            write.values(table.c, used)
            names |= used.names
        return GivenRows(self.dialect, self._kinds, names)

    def _build_move(self, move: Move, fenced: bool) -> Run:
        target, fence = self.tables[move.into], self.layout.lease.fence if fenced else None
        mover = Mover(move, self.outbox, target, dialect=self.dialect, rows=self._names, fence=fence)
        given = self._give(self.outbox, move, fenced)
        return mover.build(given, SameForAll(self.dialect, self._kinds, given.names))

    def _build_write(self, table: sa.Table, write: Update | Delete, fenced: bool) -> _Write:
        given = self._give(table, write, fenced)
        same = SameForAll(self.dialect, self._kinds, given.names)
        match = self._match(given, fenced)
        row = table.c[self._names[0]]
        is_mine = same.is_row(row)
        if fenced:
            is_mine &= self._fence_column() == same.c.fence
        if isinstance(write, Delete):
            each: Any = delete_given(self.dialect, table, row.name, match)
            alike: Any = sa.delete(table).where(is_mine)
        else:
            each = sa.update(table).where(match(table.c)).values(write.values(table.c, given.c))
            alike = sa.update(table).where(is_mine).values(write.values(table.c, same.c))
        return _Write(Hot(each), given, Hot(alike), same)

    def _write(self, db: sa.Connection, name: str, rows: Sequence[Given], *, fenced: bool = False) -> int:
        if not rows:
            return 0
        write = self._writes[fenced][name]
        rest = rows[0][1:]
        # MySQL and MariaDB walk the whole table for a list of numbers, and wait there for rows that others hold.
        is_alike = not is_mysql(self.dialect) and write.same.is_possible
        if is_alike and all(row[1:] == rest for row in rows):
            return write.alike.execute(db, write.same.params([row[0] for row in rows], rows[0])).rowcount
        return sum(write.each.execute(db, write.given.params(part)).rowcount for part in in_parts(rows))

    def _build_lapsed(self) -> sa.Select[Any] | None:
        layout, c = self.layout, self.held.c
        if layout.lease.lapsed is None or layout.attempts is None or layout.lease.is_found_by_claim:
            return None
        own = layout.fields.get("max_attempts") if layout.side is None else None
        query = sa.select(
            *self._identity(),
            *(c[layout.attempts], c[layout.lease.fence], *self._key_columns()),
            (c[own] if own is not None else sa.null()).label("own_max_attempts"),
        ).where(self.is_mine(self.held), layout.lease.lapsed(c, sa.bindparam("lease", type_=sa.Float())))
        ordered = query.order_by(c[layout.lease.at]).limit(sa.bindparam("limit"))
        return ordered.with_for_update(skip_locked=True)

    def _build_next_due(self) -> sa.Select[Any]:
        # One index probe a state; a combined condition would read them all.
        c = self.held.c
        return sa.select(
            *(
                sa.select(seconds_until(instant(c[wait.column], sa.func.min(c[wait.column]))))
                .where(self.is_mine(self.held), wait.where(c))
                .scalar_subquery()
                for wait in self.layout.waits
            )
        )
