"""A target's writer as the sink of a relay: one table's statements, in order, once.

With an atomic writer a batch is one remote transaction that also moves this queue's mark; when the outcome of a call is
not known, the mark is read again and tells what is there. With other writers a statement may be sent twice, and only
INSERTs that carry their number are known by the second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pillarbox.errors import SinkUnavailable, StoreUnavailable, UnsupportedStatement
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Outcome, Retry
from pillarbox.sinks import Sink
from pillarbox.sync import remote_sql
from pillarbox.sync.marks import TRIES, Mark
from pillarbox.sync.remote import Remote
from pillarbox.sync.rewrite import Plan, plan_statement
from pillarbox.sync.settling import queued_of
from pillarbox.sync.source import QueueSource
from pillarbox.sync.state import QueueState
from pillarbox.sync.writers import Statement

_CLASSES: Final = {"bad": "DETERMINISTIC", "later": "TRANSIENT"}
_SINGLES_AT_ONCE: Final = 20
_LONGEST_ERROR: Final = 2000


class WriterSink(Sink):
    """Sends the statements of one table to one target."""

    is_quick: bool = False

    def __init__(self, remote: Remote, table: str, *, inject: bool) -> None:
        self.name = remote.name
        self.table = table
        self._remote = remote
        self._inject = inject
        self._mark = Mark(remote, table)
        self._columns: tuple[str, ...] | None = None
        self._sent: int | None = None
        self._source: QueueSource
        self._state: QueueState

    @property
    def most(self) -> int | None:
        """How many statements a batch may have: what was sent one by one comes again when the service is ended."""
        return _SINGLES_AT_ONCE if self._remote.batches == "single" else None

    async def prepare(self, source: QueueSource) -> None:
        """Make the remote table ready and give the queue numbers that are free there."""
        remote = self._remote
        await remote.ensure_schema(self.table, inject=self._inject)
        applied = await self._mark.take(source) if remote.is_atomic else None
        maximum = await remote.read_maximum(self.table) if self._inject else None
        self._source = source
        self._state = await source.adopt(self.name, maximum=maximum, applied=applied, sent=self._sent)
        if remote.is_atomic and applied is None:
            await self._mark.create()
        source.notes_sent = self._inject and not remote.is_atomic

    async def open(self) -> None:
        await self._remote.open()

    async def check(self) -> None:
        await self._remote.open()

    async def close(self) -> None:
        """The writer is shared by the tables of its target; the service closes it."""

    # -- delivering --------------------------------------------------------------------------------------------------

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        try:
            outcomes = await self._deliver(claims)
        except SinkUnavailable as error:
            known = list(error.outcomes or [])
            error.outcomes = [*known, *[RELEASED] * (len(claims) - len(known))]
            raise
        return [*outcomes, *[RELEASED] * (len(claims) - len(outcomes))]

    async def _deliver(self, claims: Sequence[Claim]) -> list[Outcome]:
        statements: list[Statement] = []
        refused: Outcome | None = None
        for claim in claims:
            try:
                statements.append(await self._plan(claim))
            except UnsupportedStatement as error:
                queued_of(claim).error_class = "UNSUPPORTED"
                refused = Dead(str(error))
                break
            except StoreUnavailable as error:
                raise SinkUnavailable(str(error)) from error
        outcomes = list(await self._write(claims[: len(statements)], statements))
        if refused is not None and all(outcome is DELIVERED for outcome in outcomes):
            outcomes.append(refused)
        return outcomes

    async def _plan(self, claim: Claim) -> Statement:
        queued, seq = queued_of(claim), claim.row
        was_known = self._columns is not None
        try:
            plan = self._rewrite(claim)
            if plan.needs_columns:
                self._columns = await self._remote.read_columns(self.table)
                plan = self._rewrite(claim)
            return plan.sql, plan.bind(queued.args, seq)
        except UnsupportedStatement:
            if not was_known:
                raise
        # The table may have got a column since we looked.
        self._columns = None
        return await self._plan(claim)

    def _rewrite(self, claim: Claim) -> Plan:
        # Without a mark, what this run has sent may be there as well; what no run has sent must not be taken for it.
        repeats = claim.row <= max(self._state.ceiling, self._sent or 0)
        return plan_statement(
            claim.event.topic,
            dialect=self._remote.dialect,
            inject=self._inject,
            on_repeat="ignore" if repeats else "error",
            columns=self._columns,
            table=self.table,
        )

    async def _write(self, claims: Sequence[Claim], statements: Sequence[Statement]) -> Sequence[Outcome]:
        if not claims:
            return []
        if self._remote.is_atomic:
            return await self._write_once(claims, statements)
        if self._remote.batches == "ordered":
            return await self._write_some(claims, statements)
        outcomes: list[Outcome] = []
        for claim, statement in zip(claims, statements, strict=True):
            try:
                outcomes += await self._write_some([claim], [statement])
            except SinkUnavailable as error:
                error.outcomes = [*outcomes, *(error.outcomes or [])]
                raise
            if outcomes[-1] is not DELIVERED:
                break
        return outcomes

    async def _write_some(self, claims: Sequence[Claim], statements: Sequence[Statement]) -> list[Outcome]:
        """One call of a writer without a mark; outcomes up to the first failure, or up to where it answered."""
        before = self._sent
        # Never lower: after a lost answer the first row is tried alone, and the others may be there all the same.
        self._sent = max(before or 0, claims[-1].row)
        results = await self._remote.write(statements)
        outcomes: list[Outcome] = []
        for claim, result in zip(claims, results, strict=False):
            if not result["ok"]:
                # It says what it did: what stands from here on was not done.
                self._sent = before if claim is claims[0] else max(before or 0, claim.row - 1)
                if result.get("kind") == "down":
                    raise SinkUnavailable(f"Target {self.name}: {_error_of(result)}", outcomes=outcomes)
                outcomes.append(await self._fail(claim, result))
                break
            outcomes.append(DELIVERED)
        if not outcomes:
            raise SinkUnavailable(f"Target {self.name}: its writer answered for none of {len(claims)} statements")
        return outcomes

    # -- once --------------------------------------------------------------------------------------------------------

    async def _write_once(self, claims: Sequence[Claim], statements: Sequence[Statement]) -> Sequence[Outcome]:
        """Write what the mark does not cover yet; after a failure, all that stands before it."""
        done, end = 0, len(claims)
        bad: tuple[int, Mapping[str, Any]] | None = None
        misses = 0
        while True:
            applied = await self._mark.read()
            done = max(done, sum(1 for claim in claims if claim.row <= applied))
            if done >= (len(claims) if bad is None else bad[0]):
                break
            end = max(end, done + 1)
            failed = await self._try_all(claims[done:end], statements[done:end], applied)
            if failed is None:
                done, end = end, len(claims) if bad is None else bad[0]
                continue
            position, result = failed
            if position < 0:
                # The mark is not where it was: an earlier call of ours, whose answer was lost, has moved it.
                self._mark.applied = None
                misses += 1
                if misses >= TRIES:
                    raise SinkUnavailable(f"Target {self.name}: the queue's mark cannot be moved: {_error_of(result)}")
            elif position == end - done - 1 > 0:
                # The last one is also blamed for what the commit finds: only alone it is surely to blame.
                end = done + (end - done) // 2
            else:
                bad, end = (done + position, result), done + position
        if bad is None:
            return [DELIVERED] * len(claims)
        at, result = bad
        return [*[DELIVERED] * at, await self._fail(claims[at], result)]

    async def _try_all(
        self, claims: Sequence[Claim], statements: Sequence[Statement], applied: int
    ) -> tuple[int, Mapping[str, Any]] | None:
        """Write the statements and the mark in one call; the first failure's position, below zero for the mark's."""
        first, token = self._mark.move(applied, claims[-1])
        results = await self._remote.write([*first, *statements])
        for position, result in enumerate(results):
            if not result["ok"]:
                if result.get("kind") == "down":
                    raise SinkUnavailable(f"Target {self.name}: {_error_of(result)}")
                self._mark.settle(applied)
                return position - len(first), result
        if len(results) != len(first) + len(statements):
            raise SinkUnavailable(
                f"Target {self.name}: its writer answered for {len(results)} of {len(first) + len(statements)} "
                "statements, none of them failed; what was done is not known"
            )
        self._mark.settle(claims[-1].row, token)
        return None

    async def _fail(self, claim: Claim, result: Mapping[str, Any]) -> Outcome:
        if await self._is_taken(claim.row, result):
            return RELEASED
        queued_of(claim).error_class = _CLASSES.get(str(result.get("kind")), "UNKNOWN")
        return Retry(_error_of(result))

    async def _is_taken(self, seq: int, result: Mapping[str, Any]) -> bool:
        """Whether a row failed because another queue has used its number; then the rows get new ones."""
        names = (remote_sql.SEQ_COLUMN, *self._remote.indexes.get(self.table, ()))
        if not self._inject or not any(name in _error_of(result) for name in names):
            return False
        try:
            maximum = await self._remote.read_maximum(self.table)
        except StoreUnavailable:
            return False
        if seq <= self._state.ceiling or seq > maximum:
            return False
        self._source.prepare_again()
        return True


def _error_of(result: Mapping[str, Any]) -> str:
    return str(result.get("error") or "the writer gave no reason")[:_LONGEST_ERROR]
