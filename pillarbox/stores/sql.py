"""What the stores on real databases share: the asynchronous face of `Transitions` and `Operations`."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError, PillarboxError, SchemaError, StoreRefused, StoreUnavailable, Unsupported
from pillarbox.layouts import Feature, Layout, check_database, declare_layout
from pillarbox.silence import OPERATION_TIMEOUT, STATEMENT_TIMEOUT
from pillarbox.stores import Counts, Entry, Filter, Joins, Mode, Pruned, Record, State
from pillarbox.stores.build import build_transitions
from pillarbox.stores.checking import Checking, Fault
from pillarbox.stores.lease import LeaseBatch
from pillarbox.stores.moving import has_no_partition
from pillarbox.stores.operations import Operations
from pillarbox.stores.refusals import is_refusal
from pillarbox.stores.rights import ASK_ACCOUNT, find_grant, is_account_needed
from pillarbox.stores.transitions import DEFAULT_LEASE, Taken
from pillarbox.urls import show_database

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

log = logging.getLogger("pillarbox.store")

WAKE_EVERY = 0.1
LOOK_AGAIN = 1.0
MAX_CONFLICTS = 5


class SqlStore(ABC):
    """A layout on a database; a subclass says how a function runs in a transaction there."""

    dialect: str
    modes: frozenset[Mode]
    joins: frozenset[Joins]
    in_flight = 2

    def __init__(
        self,
        url: sa.URL,
        layout: Layout,
        *,
        table: str | None = None,
        schema: str | None = None,
        sink: str = "",
        retention: timedelta | None = None,
        topics: Sequence[str] | None = None,
        statement_timeout: timedelta = STATEMENT_TIMEOUT,
        operation_timeout: timedelta = OPERATION_TIMEOUT,
    ) -> None:
        check_database(layout, self.dialect)
        if topics is not None and layout.scope is None:
            raise Unsupported(f"Layout {layout.name!r}: its table cannot be claimed by topic; leave topics out")
        if retention is not None and Feature.RETENTION not in layout.features:
            raise Unsupported(f"Layout {layout.name!r}: its table cannot keep delivered rows; leave retention out")
        for name, timeout in (("statement", statement_timeout), ("operation", operation_timeout)):
            if timeout <= timedelta(0):
                raise ConfigError(f"Store: expected a {name}_timeout above zero, got {format_duration(timeout)}")
        self.statement_timeout = statement_timeout
        self.operation_timeout = operation_timeout
        self.url = url
        self.layout = layout
        self.topics = topics
        offered = {mode for mode in self.modes if Feature(mode) in layout.features}
        self.modes: frozenset[Mode] = frozenset(offered)
        self.metadata = sa.MetaData()
        self.tables = declare_layout(layout, self.metadata, table=table, schema=schema)
        self.retention = retention
        self.sink = sink
        self.name = f"{show_database(url)} ({self.tables['outbox'].fullname})"
        self.busy_lanes: Counter[int] = Counter()
        self._look_at = 0.0
        self._is_stuck = False
        self._build(self.dialect)

    def _build(self, dialect: str) -> None:
        self.dialect = dialect
        self.transitions = build_transitions(
            self.layout,
            self.tables,
            dialect=dialect,
            sink=self.sink,
            retain=self.retention is not None,
            scopes=self.topics,
        )
        self.operations = Operations(self.transitions)

    @property
    def lease(self) -> timedelta:
        """How long a claim lasts unless the relay says otherwise."""
        return self.layout.lease.length or DEFAULT_LEASE

    @property
    def keeps_order(self) -> bool:
        """Whether events of one key are delivered in order, whatever fails and however many relays there are."""
        return Feature.ORDER in self.layout.features

    @abstractmethod
    async def _transact(self, work: Work[T], *, writes: bool, is_long: bool) -> T:
        """Run `work` in a READ COMMITTED transaction and commit it; `is_long` says which bound it has."""

    async def _join(self, work: Work[T], session: Joins | None) -> T:
        """Run work that may take as long as `JOIN_DEADLINE` in such a transaction."""
        return await self._transact(work, writes=True, is_long=True)

    @abstractmethod
    async def _hold(self, limit: int) -> Any:
        """Claim by locks that last until settlement; returns a batch and the rows found blocked."""

    @abstractmethod
    async def wait(self, timeout: timedelta) -> bool: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def open(self) -> None:
        if self.layout.order is not None:
            await self.run_soon(self._ensure_lanes)
        if self.layout.order is None or self.layout.history is not None:
            await self.run_soon(self._look, writes=False)

    def _look(self, db: sa.Connection) -> None:
        # A table that is missing or another one is found out now rather than by the first claim.
        for table in self.tables.values():
            db.execute(sa.select(table).limit(0))
        if self.layout.beside is not None:
            name, schema = self.layout.beside(self.tables["outbox"])
            if sa.inspect(db).has_table(name, schema=schema):
                raise Unsupported(
                    f"Store {self.name}: there is a table {name!r} beside it, so handlers deliver these rows. Relay "
                    f"from the notifications instead: layout '{self.layout.name}-notifications'."
                )

    async def run(self, work: Work[T], *, writes: bool = True) -> T:
        """Run a function of a connection in a transaction, again when it lost a deadlock.

        It may take as long as `operation_timeout`.
        """
        return await self._run_again(lambda: self._transact(work, writes=writes, is_long=True))

    async def run_soon(self, work: Work[T], *, writes: bool = True) -> T:
        """The same within `statement_timeout`: what a relay does all the time, and must not wait long for."""
        return await self._run_again(lambda: self._transact(work, writes=writes, is_long=False))

    async def join(self, work: Work[T], *, session: Joins | None = None) -> T:
        """Run somebody else's function, which may take its time, as `run` does; see `Batch.settle_one`.

        What the database has against the work itself is raised as it is.
        """
        if session is not None and session not in self.joins:
            raise Unsupported(f"Store {self.name}: its transactions take no {session} sessions")
        try:
            return await self._run_again(lambda: self._join(work, session))
        except PillarboxError as error:
            cause = error.__cause__
            if isinstance(cause, DBAPIError) and await self._is_its_own_fault(cause):
                raise cause from None
            raise

    async def _is_its_own_fault(self, error: DBAPIError) -> bool:
        """Whether a transaction failed for what was done in it; one that lost its connection, if there are others."""
        if is_refusal(error) or is_conflict(error):
            return True
        if not error.connection_invalidated:
            return False
        try:
            await self.run_soon(lambda db: db.execute(sa.select(1)), writes=False)
        except PillarboxError:
            return False
        return True

    async def _run_again(self, transact: Callable[[], Awaitable[T]]) -> T:
        for conflict in range(MAX_CONFLICTS):
            try:
                return await transact()
            except DBAPIError as error:
                if not is_conflict(error) or conflict == MAX_CONFLICTS - 1:
                    raise translate(error, self, account=await self._ask_account(error)) from error
            except PillarboxError:
                raise
            except Exception as error:
                fault = driver_fault(error, self)
                if fault is None:
                    raise
                raise fault from error
            await asyncio.sleep(0.01 * 2**conflict)
        raise AssertionError("unreachable")

    async def _ask_account(self, error: DBAPIError) -> str | None:
        """Whose right is missing: MySQL and MariaDB say from where the user comes, not which account that is."""
        if not is_account_needed(error):
            return None
        try:
            return await self._transact(
                lambda db: str(db.execute(ASK_ACCOUNT).scalar_one()), writes=False, is_long=False
            )
        except (DBAPIError, sa.exc.TimeoutError, OSError, PillarboxError):
            return None

    async def claim(
        self,
        limit: int,
        *,
        mode: Mode,
        lease: timedelta,
        max_attempts: int | None = None,
        park: bool = True,
        is_prefetch: bool = False,
        max_bytes: int | None = None,
    ) -> Any:
        if mode not in self.modes:
            raise Unsupported(f"Store {self.name}: cannot claim by {mode}; it offers {', '.join(sorted(self.modes))}")
        # Nobody's claim is taken before it lapses by the rule of the system whose table this is.
        self.transitions.lease = max(lease, self.layout.lease.length or lease)
        self.transitions.max_attempts, self.transitions.parks = max_attempts, park
        self.transitions.scale.max_bytes = max_bytes
        await self._wake(max_attempts, park)
        marked = 0
        if mode == "hold":
            batch, blocked = await self._hold(limit)
        else:
            busy = [lane for lane, batches in self.busy_lanes.items() if batches > 0]
            try:
                taken = await self.run_soon(lambda db: self.transitions.claim(db, limit, mode, lease, busy=busy))
            except StoreRefused:
                bury = partial(self.transitions.bury_unclaimable, limit=limit, lease=lease, park=park)
                marked = await self.run_soon(bury)
                if not marked:
                    raise
                taken = Taken([], is_full=True)
            batch, blocked = LeaseBatch(self, taken, is_full=taken.is_full), taken.blocked
        self._is_stuck = self.transitions.is_stuck
        if blocked and not is_prefetch:
            try:
                marked = await self.run_soon(lambda db: self.transitions.block(db, blocked))
            except BaseException:  # nobody would ever settle the claims
                await batch.abandon()
                raise
        batch.is_full = batch.is_full and bool(batch.claims or marked)
        return batch

    async def _wake(self, max_attempts: int | None, park: bool) -> None:
        """Let rows whose time has come be claimed; asks the database now and then, and when it said so itself."""
        if time.monotonic() < self._look_at:
            return
        # Before asking: a claim beside this one need not ask, too.
        self._look_at = time.monotonic() + WAKE_EVERY
        if await self._ask_due() == 0.0:
            await self.run_soon(lambda db: self.transitions.wake(db, max_attempts, park))
            if self.transitions.is_stuck:
                self._look_at = time.monotonic() + LOOK_AGAIN

    async def next_due(self) -> timedelta | None:
        seconds = await self._ask_due()
        if seconds == 0.0 and self._is_stuck:
            seconds = LOOK_AGAIN
        # Soon in any case: a busy relay does not come here again, and what is put or fails meanwhile may be due before.
        self._look_at = time.monotonic() + (LOOK_AGAIN if seconds is None else min(seconds, LOOK_AGAIN))
        return None if seconds is None else timedelta(seconds=seconds)

    async def _ask_due(self) -> float | None:
        return await self.run_soon(self.transitions.next_due, writes=False)

    def _ensure_lanes(self, db: sa.Connection) -> None:
        order, lanes = self.layout.keyed, self.tables["lanes"]
        mine = sa.select(sa.func.count()).select_from(lanes).where(lanes.c.sink == self.sink)
        found = db.execute(mine).scalar_one()
        if found == 0:
            rows = [{"sink": self.sink, "lane": lane} for lane in range(order.lanes)]
            try:
                with db.begin_nested():
                    db.execute(sa.insert(lanes), rows)
            except sa.exc.IntegrityError:
                log.debug("Another relay made the lanes of sink %r first.", self.sink)
        elif found != order.lanes:
            raise SchemaError(
                f"Table {lanes.fullname!r} has {found} lanes for sink {self.sink!r}; expected {order.lanes}. "
                "Writers and relays must use the number of lanes that the table was made with."
            )

    async def sinks(self) -> list[str]:
        """The sinks that relays have claimed rows for: "" is every row that was not routed."""
        if self.layout.order is None:
            return [self.sink]
        lanes = self.tables["lanes"]
        query = sa.select(lanes.c.sink).distinct().where(lanes.c.sink.not_like("#%")).order_by(lanes.c.sink)
        found = await self.run_soon(lambda db: list(db.execute(query).scalars()), writes=False)
        return ["", *(sink for sink in found if sink)]

    async def list_waiting(self, *, besides: Container[str] = ()) -> list[str]:
        """Those of the sinks that have events to claim now or later, except the ones in `besides`."""
        if self.layout.order is None:
            return []
        columns = self.tables["outbox"].c
        sink: sa.BindParameter[str] = sa.bindparam("of_sink", type_=columns[self.layout.order.sink].type)
        # Each of these conditions has an index; that of everything undelivered has none.
        to_claim = [self.layout.ready(columns), *(wait.where(columns) for wait in self.layout.waits)]
        of_sink = columns[self.layout.order.sink] == sink
        any_left = sa.select(sa.or_(*(sa.exists().where(of_sink, each) for each in to_claim)))
        asked = [each for each in await self.sinks() if each not in besides]

        def ask(db: sa.Connection) -> list[str]:
            return [each for each in asked if db.execute(any_left, {"of_sink": each}).scalar_one()]

        return await self.run_soon(ask, writes=False)

    # -- what operators do ------------------------------------------------------------------------------------------

    async def counts(self) -> Counts:
        return await self.run(self.operations.counts, writes=False)

    async def events(self, where: Filter, *, state: State | None = None, limit: int = 50) -> Sequence[Record]:
        return await self.run(lambda db: self.operations.events(db, where, state, limit), writes=False)

    async def redrive(self, where: Filter, *, actor: str, limit: int | None = None, dry_run: bool = False) -> int:
        return await self._act("redrive", where, actor, limit, dry_run)

    async def drop(self, where: Filter, *, actor: str, limit: int | None = None, dry_run: bool = False) -> int:
        return await self._act("drop", where, actor, limit, dry_run)

    async def replay(self, where: Filter, *, actor: str, limit: int | None = None, dry_run: bool = False) -> int:
        return await self._act("replay", where, actor, limit, dry_run)

    async def _act(self, action: str, where: Filter, actor: str, limit: int | None, dry_run: bool) -> int:
        return await self.run(
            lambda db: self.operations.act(db, action, where, actor=actor, limit=limit, dry_run=dry_run),
            writes=not dry_run,
        )

    async def prune(
        self,
        *,
        delivered_age: timedelta | None = None,
        dead_age: timedelta | None = None,
        actor: str | None = None,
        dry_run: bool = False,
        batch: int = 1000,
    ) -> Pruned:
        total = Pruned()
        for what, age in (("delivered", delivered_age), ("dead", dead_age)):
            while age is not None:
                count = await self.run(
                    lambda db, what=what, age=age: self.operations.prune(db, what, age, batch, dry_run)  # type: ignore[misc]
                )
                delivered, dead = (count, 0) if what == "delivered" else (0, count)
                total = Pruned(total.delivered + delivered, total.dead + dead)
                if dry_run or count < batch:
                    break
        if actor is not None and not dry_run and total != Pruned():
            ages = {"delivered_age": str(delivered_age), "dead_age": str(dead_age)}
            await self.run(lambda db: self.operations.record(db, actor, "prune", ages, total.delivered + total.dead))
        return total

    async def find_faults(self, *, limit: int = 1000) -> list[Fault]:
        """What is wrong among the rows, at most `limit` of each kind; see `pillarbox events check`."""
        checking = Checking(self.transitions)
        return await self.run(lambda db: checking.find(db, limit), writes=False)

    async def mend_faults(self, faults: Sequence[Fault], *, actor: str) -> list[Fault]:
        """Mend those of the faults that can be mended; returns them."""
        checking = Checking(self.transitions)

        def mend(db: sa.Connection) -> list[Fault]:
            mended = checking.mend(db, faults)
            if mended:
                kinds = sorted({fault.kind for fault in mended})
                self.operations.record(db, actor, "mend", {"faults": kinds}, len(mended))
            return mended

        return await self.run(mend)

    async def audit(self, limit: int = 50) -> Sequence[Entry]:
        return await self.run(lambda db: self.operations.entries(db, limit), writes=False)


# PostgreSQL: serialization failure, deadlock, lock not available; MySQL and MariaDB: lock wait timeout, deadlock.
_CONFLICTS = ("40001", "40P01", "55P03")
_MYSQL_CONFLICTS = (1205, 1213, 1020)


def is_conflict(error: DBAPIError) -> bool:
    """Whether the database undid a transaction that would succeed when run again."""
    state = getattr(error.orig, "sqlstate", None)
    number = error.orig.args[0] if error.orig is not None and error.orig.args else None
    # A deadlock undoes the savepoints too, and leaving one then says only that it does not exist.
    is_conflict = number in _MYSQL_CONFLICTS or (number == 1305 and "SAVEPOINT" in str(error.orig))
    return state in _CONFLICTS or is_conflict or "database is locked" in str(error.orig)


def is_missing(error: DBAPIError) -> bool:
    """Whether a table or a schema is not there."""
    number = error.orig.args[0] if error.orig is not None and error.orig.args else None
    has_state = getattr(error.orig, "sqlstate", None) in ("42P01", "3F000")
    return has_state or number == 1146 or "no such table" in str(error.orig)


def is_refused(state: str, number: object) -> bool:
    """Whether the server refuses this user or knows no such database: waiting would not help."""
    return state.startswith("28") or state == "3D000" or number in (1044, 1045, 1049)


_DRIVERS = ("asyncpg", "psycopg", "aiomysql", "pymysql")
# What asyncpg says of itself when a connection ends while it is in the middle of something.
_INTERNAL = ("cannot switch to state", "another operation is in progress", "unexpected connection_lost")


def driver_fault(error: Exception, store: SqlStore) -> StoreUnavailable | None:
    """An error of the network or of a driver, which SQLAlchemy did not take for one of the database; else None."""
    is_drivers = type(error).__module__.partition(".")[0] in _DRIVERS
    if is_drivers or isinstance(error, OSError | sa.exc.TimeoutError):
        return StoreUnavailable(f"Store {store.name}: {describe_fault(error)}")
    return None


def describe_fault(error: BaseException | None) -> str:
    """The first line of a driver's error, or what happened where the driver speaks of itself only."""
    text = str(error).strip().partition("\n")[0]
    if any(each in text for each in _INTERNAL):
        return "the connection was lost in the middle of a statement"
    if error is not None and isinstance(error.__cause__, ssl.SSLError) and str(error.__cause__) not in text:
        text = f"{text}: {error.__cause__}"
    return text or type(error).__name__


def translate(error: DBAPIError, store: SqlStore, *, account: str | None = None) -> Exception:
    """A driver's error in our words; `account` is the user's as the server names it, where it was asked."""
    text = describe_fault(error.orig)
    state = str(getattr(error.orig, "sqlstate", "") or "")
    number = error.orig.args[0] if error.orig is not None and error.orig.args else None
    table = store.tables["outbox"].fullname
    if is_missing(error):
        # The fan-out's layout is that of the notifications it writes, seen from the log.
        layout = store.layout.name.removesuffix("-fan-out")
        option = "" if layout == "pillarbox" else f" --layout {layout}"
        return SchemaError(
            f"Store {store.name}: {text}. Run `pillarbox schema create{option}` or your migration first."
        )
    if state == "42703" or number == 1054 or "no such column" in text:
        return SchemaError(f"Table {table!r} is not what layout {store.layout.name!r} declares: {text}.")
    if has_no_partition(error):
        return SchemaError(f"Store {store.name}: {text}. `pillarbox partitions ensure` makes the months' partitions.")
    grant = find_grant(error, account or store.url.username, store.tables.values())
    if grant is not None:
        return SchemaError(f"Store {store.name}: {text.removesuffix('.')}. Let the tables' owner run: {grant}")
    if is_refused(state, number):
        return ConfigError(f"Store {store.name}: {text}")
    if is_refusal(error):
        return StoreRefused(f"Store {store.name}: {text}")
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return StoreUnavailable(f"Store {store.name}: {text}")
    if isinstance(error, ProgrammingError):
        return SchemaError(f"Store {store.name}: {text}")
    # asyncpg's errors on a connection that ended in the middle of a statement are plain DBAPIErrors.
    return StoreUnavailable(f"Store {store.name}: {text}")
