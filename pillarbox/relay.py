"""The relay: claim, deliver, settle; the only loop.

One event's way: `_claim` takes a batch from the store, by hold or by lease; `_deliver` hands it to the sink, renewing a
lease meanwhile, judges what came back with the retry policy, and settles it. Several batches may be under way, in a
backlog two of them still being claimed (`ahead.py`); the store sees to it that no key is in two of them.

What happens when the process dies: before the claim commits, nothing was claimed. After it and before settlement a
hold's rows are free at once, a lease's when it lapses, and their events are delivered again. Settlement is one
transaction: it happened or it did not.

A relay starts carefully: with leases, which count an attempt before the delivery, and with one event, then two, four,
and so on; only then by hold, which counts nothing for a process that dies. So an event that kills its relay spends its
attempts, and few others' with it. For the same reason a hold takes only events that were never tried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

from pillarbox.ahead import Ahead, give_back, start_claim
from pillarbox.breaker import Breaker
from pillarbox.errors import ConfigError, PillarboxError, SinkUnavailable, StoreRefused, StoreUnavailable, Unsupported
from pillarbox.errortext import describe_failure, without_calls
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Delivered, Outcome, Retry
from pillarbox.hooks import Hook
from pillarbox.judging import Failures, check_outcomes, decide, read_pause, without_name
from pillarbox.opening import Opening
from pillarbox.outage import Outage
from pillarbox.retry import Exponential, RetryPolicy, describe_error
from pillarbox.sinks import Effect, Sink, SinkLike, adopt
from pillarbox.sinks.order import release_successors
from pillarbox.sources import Source
from pillarbox.stores import Batch, Counts, Mode, Settlement
from pillarbox.wording import say_count

log = logging.getLogger("pillarbox.relay")

T = TypeVar("T")

HOLD_TIMEOUT = timedelta(seconds=5)
FIRST_POLL = timedelta(milliseconds=20)
SETTLE_TRIES_FIRST = 0.05
SETTLE_AT_LEAST = 10.0
"""Seconds for which a settlement is tried, however short the lease: nobody else may have the claims yet."""
HOUSEKEEPING = timedelta(minutes=1)
BATCH_BYTES = 64_000_000
GRACE = 5.0
"""How long the end of something may take that had its time: giving claims back, closing connections."""


class Relay(Opening):
    """Delivers the events of one store, or of one source of messages, to one sink.

    `claim` is `hold`, `lease`, or `auto`: hold where the sink is quick and the store allows it. `in_flight` batches of
    up to `batch_size` events are under way at once, by default as many as pay off on that store. The payloads of a
    batch weigh at most `batch_bytes`, or it is one event alone. `dead` says what a dead event does to its key: `park`
    lets the later ones wait, `skip` lets them pass. `poll` bounds how long an idle relay sleeps between looks.
    `stop_timeout` bounds how long `stop` waits for what is under way before it gives claims back; what does not end
    even then, because a database or a destination says nothing, is left behind.
    """

    def __init__(
        self,
        store: Source,
        sink: SinkLike,
        *,
        batch_size: int = 500,
        batch_bytes: int = BATCH_BYTES,
        in_flight: int | None = None,
        claim: Literal["auto", "hold", "lease"] = "auto",
        lease: timedelta | None = None,
        retry: RetryPolicy | None = None,
        dead: Literal["park", "skip"] = "park",
        poll: timedelta = timedelta(seconds=1),
        stop_timeout: timedelta = timedelta(seconds=10),
        breaker: Breaker | None = None,
        hook: Hook | None = None,
    ) -> None:
        in_flight = store.in_flight if in_flight is None else in_flight
        if batch_size < 1 or in_flight < 1:
            raise ConfigError(f"Relay: expected a positive batch_size and in_flight, got {batch_size} and {in_flight}")
        if batch_bytes < 1:
            raise ConfigError(f"Relay: expected a positive batch_bytes, got {batch_bytes}")
        if lease is not None and lease < timedelta(seconds=1):
            raise ConfigError(f"Relay: expected a lease of at least a second, got {lease}")
        if poll <= timedelta(0):
            raise ConfigError(f"Relay: expected a poll above zero, got {poll}")
        if claim not in ("auto", "hold", "lease") or dead not in ("park", "skip"):
            raise ConfigError(
                f"Relay: expected claim auto, hold or lease and dead park or skip, got {claim!r} and {dead!r}"
            )
        self.store = store
        self.sink: Sink = adopt(sink)
        self.breaker = breaker or Breaker(sink.name)
        self._batch_size = batch_size
        self._batch_bytes = batch_bytes
        self._in_flight = in_flight
        self._claim_by = claim
        self._lease: timedelta = store.lease if lease is None else lease
        self._retry = retry or Exponential()
        self._parks = dead == "park"
        self._poll = poll
        self._stop_timeout = stop_timeout
        self._hook = hook or Hook()
        self.total = Settlement()
        """What was settled so far."""
        self.mode: Mode = "lease"
        """How the relay claims once it has started; known when it is open."""
        self._was_opened = False
        self._is_open = False
        self._is_sink_open = False
        self._sink_opening = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._stop_at: float | None = None
        self._woken = asyncio.Event()
        self._size = batch_size
        self._use_lease_next = False
        self._ahead = Ahead()
        self._is_backlog = False
        self._no_hold_before = 0.0
        self._pause = FIRST_POLL
        self._sink_error: str | None = None
        self._outage = Outage()
        self._failures = Failures()

    # -- what callers do --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect the store; the sink connects when it is first needed, and may be down."""
        if not self._is_open:
            self._was_opened = True
            await self.store.open()
            self.mode = self._choose_mode()
            self.sink.check_store(self.store)
            self._is_open = True

    async def close(self) -> None:
        """Disconnect store and sink."""
        is_sink_open, self._is_sink_open = self._is_sink_open, False
        was_opened, self._was_opened, self._is_open = self._was_opened, False, False
        try:
            if is_sink_open:
                await self._end(self.sink.close(), f"Sink {self.sink.name} was not closed")
        finally:
            if was_opened:
                await self._end(self.store.close(), f"Store {self.store.name} was not closed")

    async def _end(self, ending: Coroutine[Any, Any, None], failure: str) -> None:
        """Await an ending in the time that is left for the stop, or in a moment."""
        task = asyncio.ensure_future(ending)
        _, late = await asyncio.wait([task], timeout=self._time_left() + GRACE)
        if late:
            task.cancel()
            log.error("%s in time and is left behind.", failure)
        else:
            task.result()

    async def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Await an answer of the store, after a `stop` no longer than that waits."""
        task = asyncio.create_task(question, name="pillarbox-question")
        try:
            if not await self._is_done_before_stop(task):
                await asyncio.wait([task], timeout=self._time_left())
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=GRACE)
            raise StoreUnavailable(f"Store {self.store.name}: it did not answer before the relay had to stop")
        return task.result()

    def _time_left(self) -> float:
        """The seconds until a stop gives up waiting."""
        timeout = self._stop_timeout.total_seconds()
        return timeout if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())

    async def run_once(self) -> Settlement:
        """Claim, deliver and settle one batch; a paused destination and an empty outbox settle nothing."""
        await self.open()
        if self.breaker.is_open:
            return Settlement()
        batch = await self._claim(is_prefetch=False)
        if not batch.claims and batch.has_tried:
            batch = await self._claim(is_prefetch=False)
        return await self._deliver(batch) if batch.claims else Settlement()

    async def drain(self) -> Counts:
        """Deliver until nothing can be claimed now; returns what remains.

        Raises `SinkUnavailable` or `StoreUnavailable` instead of waiting for one that is down.
        """
        await self.open()
        self._size = 1
        self._sink_error = None
        await self._loop(drains=True)
        return await self._ask(self.store.counts())

    async def run(self) -> None:
        """Deliver until `stop` is called; survives a store or a destination that is down for a while."""
        await self._open_patiently()
        self._size = 1
        housekeeping = asyncio.create_task(self._keep_house(), name="pillarbox-housekeeping")
        try:
            await self._loop(drains=False)
        finally:
            housekeeping.cancel()
            await asyncio.wait([housekeeping], timeout=GRACE)
            if housekeeping.done() and not housekeeping.cancelled():
                housekeeping.result()

    def stop(self) -> None:
        """Let `run` or `drain` end: claim nothing more, finish what is under way, give back what takes too long."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_timeout.total_seconds()
        self._stopping.set()

    def wake(self) -> None:
        """Look for events now rather than when the pause is over."""
        self._woken.set()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _loop(self, *, drains: bool) -> None:
        tasks: set[asyncio.Task[Settlement]] = set()
        try:
            while not self._stopping.is_set():
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    task.result()
                if drains and self._sink_error is not None and not tasks:
                    raise SinkUnavailable(self._sink_error)
                if len(tasks) >= self._in_flight:
                    await self._wait(tasks, None)
                elif self._ahead and self.breaker.state != "closed":
                    self._ahead.give_back(tasks)
                elif self.breaker.is_open:
                    # Never without a bound: the pause may be over by now, and nothing else would end the wait.
                    await self._wait(tasks, max(0.001, self.breaker.wait()))
                elif self.breaker.is_probing and tasks:
                    await self._wait(tasks, None)
                elif not await self._advance(tasks, drains=drains):
                    return
        finally:
            self._ahead.give_back(tasks)
            await self._finish(tasks)

    async def _advance(self, tasks: set[asyncio.Task[Settlement]], *, drains: bool) -> bool:
        """Claim one batch and start it, or wait for a reason to look again; false when a drain is done."""
        was_ahead = bool(self._ahead)
        try:
            batch = await self._claim_next(tasks)
        except (StoreUnavailable, StoreRefused) as error:
            if drains:
                raise
            self._ahead.give_back(tasks)
            await self._wait(tasks, self._outage.note(error))
            return True
        if batch is None:
            return True
        self._outage.end()
        if batch.claims:
            tasks.add(asyncio.create_task(self._deliver(batch), name="pillarbox-delivery"))
            self._pause = FIRST_POLL
        # Of two claims that ran beside each other, one may have found nothing because of the other.
        if batch.is_full or batch.has_tried or was_ahead or self._ahead:
            return True
        if tasks:
            await self._wait(tasks, None if drains else self._poll.total_seconds(), wakes=not drains)
            return True
        if drains:
            return await self._is_something_due()
        await self._idle()
        return True

    async def _is_something_due(self) -> bool:
        due = await self._ask(self.store.next_due())
        if due is None or due > timedelta(0):
            return False
        await self._pause_before_locked()
        return True

    async def _pause_before_locked(self) -> None:
        """What is due now and was not claimed is locked by somebody: asking without a pause would not help."""
        pause, self._pause = self._pause, min(self._poll, self._pause * 2)
        await self._wait(set(), pause.total_seconds())

    async def _idle(self) -> None:
        """Sleep until woken, until the next row is due, or for a while that grows with every look in vain."""
        try:
            due = await self._ask(self.store.next_due())
        except (StoreUnavailable, StoreRefused) as error:
            await self._wait(set(), self._outage.note(error))
            return
        longest = self._poll if getattr(self.store, "is_notified", False) else min(self._pause, self._poll)
        # What is due now and was not claimed is locked by somebody: asking without a pause would not help.
        timeout = longest if due is None else min(longest, due if due > timedelta(0) else self._pause)
        self._pause = min(self._poll, self._pause * 2)
        await self._wait(set(), timeout.total_seconds(), wakes=True)

    async def _wait(self, tasks: set[asyncio.Task[Settlement]], seconds: float | None, *, wakes: bool = False) -> None:
        """Wait for a batch to end, for `stop`, for the time, and if asked for the store's wake-up."""
        waiting: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._stopping.wait())}
        if wakes:
            timeout = timedelta(seconds=60 if seconds is None else seconds)
            waiting |= {asyncio.ensure_future(self.store.wait(timeout)), asyncio.ensure_future(self._woken.wait())}
        try:
            await asyncio.wait({*tasks, *waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.wait(waiting, timeout=GRACE)
            for future in waiting:
                future.add_done_callback(_ignore_result)
            self._woken.clear()

    async def _finish(self, tasks: set[asyncio.Task[Settlement]]) -> None:
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._time_left())
        for task in late:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=GRACE)
        if left:
            log.error("Left behind: batches that do not end, %d of them; their events are sent again.", len(left))
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=GRACE)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                log.error("A batch under way at the end failed: %s", error)

    # -- claiming ---------------------------------------------------------------------------------------------------

    def _choose_mode(self) -> Mode:
        wanted = self._claim_by
        if wanted == "auto":
            return "hold" if self.sink.is_quick and "hold" in self.store.modes else "lease"
        if wanted not in self.store.modes:
            offered = ", ".join(sorted(self.store.modes))
            raise Unsupported(f"Store {self.store.name}: cannot claim by {wanted}; it offers {offered}")
        if wanted == "hold" and not self.sink.is_quick:
            raise Unsupported(f"Sink {self.sink.name}: too slow to hold rows locked meanwhile; claim by lease")
        return wanted

    async def _claim_next(self, tasks: set[asyncio.Task[Settlement]]) -> Batch | None:
        """The next batch, None when a stop came first.

        In a backlog another is claimed beside it, so that the database works while rows load.
        """
        claiming = self._ahead.take() or start_claim(self._claim(is_prefetch=bool(tasks)))
        if self._is_backlog and len(tasks) + 2 <= self._in_flight and self.breaker.state == "closed":
            self._ahead.start(self._claim(is_prefetch=True))
        try:
            is_done = await self._is_done_before_stop(claiming)
        except asyncio.CancelledError:
            # What commits all the same would be held until its lease lapses.
            give_back(claiming, tasks)
            raise
        if not is_done:
            give_back(claiming, tasks)
            return None
        batch = claiming.result()
        self._is_backlog = batch.is_full and self._size == self._batch_size
        return batch

    async def _is_done_before_stop(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task, but not longer than for `stop`: what hangs must not keep us from ending."""
        if task.done() or self._stopping.is_set():
            return task.done()
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        return task.done()

    async def _claim(self, *, is_prefetch: bool) -> Batch:
        limit = 1 if self.breaker.is_probing else min(self._size, self.sink.most or self._size)
        holds = self.mode == "hold" and limit == self._batch_size and time.monotonic() >= self._no_hold_before
        mode: Mode = "hold" if holds and not self._use_lease_next else "lease"
        self._use_lease_next = False
        batch = await self.store.claim(
            limit,
            mode=mode,
            lease=self._lease,
            max_attempts=self._retry.max_attempts,
            park=self._parks,
            is_prefetch=is_prefetch,
            max_bytes=self._batch_bytes,
        )
        self._use_lease_next |= batch.has_tried
        return batch

    # -- delivering -------------------------------------------------------------------------------------------------

    async def _deliver(self, batch: Batch) -> Settlement:
        try:
            self._hook.claimed(batch)
            if batch.mode == "hold":
                outcomes = await self._send_in_time(batch)
            else:
                outcomes = await self._send_renewing(batch)
            judged = self._judge(batch.claims, outcomes)
            size = self._size
            settlement = await self._settle(batch, judged)
        except TimeoutError:
            await batch.abandon()
            self._no_hold_before = time.monotonic() + HOUSEKEEPING.total_seconds()
            log.warning("Sink %s: slower than %s, claiming by lease for a while.", self.sink.name, HOLD_TIMEOUT)
            return Settlement(released=len(batch.claims))
        except BaseException:
            await batch.abandon()
            raise
        if self._size >= size:
            self._size = min(self._batch_size, self._size * 2)
        self.total += settlement
        self._hook.settled(batch, judged, settlement)
        return settlement

    async def _send_in_time(self, batch: Batch) -> Sequence[Outcome]:
        async with asyncio.timeout(HOLD_TIMEOUT.total_seconds()):
            return await self._send(batch)

    async def _send_renewing(self, batch: Batch) -> Sequence[Outcome]:
        renewing = asyncio.create_task(self._renew(batch), name="pillarbox-renewal")
        try:
            return await self._send(batch)
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing

    async def _renew(self, batch: Batch) -> None:
        pause = regular = self._lease.total_seconds() / 3
        while True:
            await asyncio.sleep(pause)
            try:
                lost = await self._renew_once(batch)
            except PillarboxError as error:
                log.warning("Could not renew %s: %s", say_count(len(batch.claims), "claim"), error)
                # Soon again: what took long has used up much of the lease.
                pause = min(regular, 1.0)
                continue
            pause = regular
            if lost:
                self._hook.lost(lost)
                claims = say_count(len(batch.claims), "claim")
                log.warning("Lost %d of %s: the lease lapsed unrenewed.", len(lost), claims)

    async def _renew_once(self, batch: Batch) -> Sequence[Claim]:
        """Renew; the end of the delivery waits for it, because a fence that moved half-way would lose the claims."""
        renewal = asyncio.ensure_future(batch.renew(self._lease))
        try:
            return await asyncio.shield(renewal)
        except asyncio.CancelledError:
            renewal.add_done_callback(_ignore_result)
            await asyncio.wait([renewal], timeout=1.0 if self._stopping.is_set() else None)
            renewal.cancel()
            raise

    async def _send(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome a claim; a destination that is down releases what it did not take."""
        claims = batch.claims
        good = _without_defects(claims)
        try:
            await self._open_sink()
            outcomes = await self._send_good(batch, good)
            self.breaker.succeeded()
            self._sink_error = None
        except SinkUnavailable as error:
            self._sink_error = str(error)
            self.breaker.failed(read_pause(error.after), reason=str(error))
            self._hook.paused(self.sink.name, str(error))
            outcomes = [RELEASED] * len(good)
            if error.outcomes is not None:
                try:
                    outcomes = check_outcomes(error.outcomes, len(good), self.sink.name)
                except PillarboxError as wrong:
                    log.error("%s; all of them are sent again.", wrong)
        if len(good) == len(claims):
            return outcomes
        sent = dict(zip(map(id, good), outcomes, strict=True))
        return [sent.get(id(claim), RELEASED if claim.defect is None else Dead(claim.defect)) for claim in claims]

    async def _open_sink(self) -> None:
        if self._is_sink_open:
            return
        async with self._sink_opening:
            if not self._is_sink_open:
                await self._connect_sink()

    async def _connect_sink(self) -> None:
        try:
            await self.sink.open()
        except SinkUnavailable:
            raise
        except Exception as error:
            log.exception("Sink %s could not be opened.", self.sink.name)
            raise SinkUnavailable(f"Sink {self.sink.name}: could not be opened: {describe_error(error)}") from error
        self._is_sink_open = True

    async def _send_good(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if not claims:
            return []
        try:
            outcomes = await self.sink.deliver_in(batch, claims)
            return check_outcomes(outcomes, len(claims), self.sink.name)
        except SinkUnavailable:
            raise
        except Exception as error:
            if len(claims) == 1:
                return [Retry(describe_failure(error), cause=error)]
            log.exception("Sink %s failed on a batch of %d; sending one by one.", self.sink.name, len(claims))
        return await self._send_one_by_one(batch, claims)

    async def _send_one_by_one(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        stopped: set[str] = set()
        for claim in claims:
            key = claim.event.key
            if key is not None and key in stopped:
                outcomes.append(RELEASED)
                continue
            try:
                outcomes.extend(await self._send_good(batch, [claim]))
            except SinkUnavailable as error:
                known = [*outcomes, *(error.outcomes or [])]
                error.outcomes = [*known, *[RELEASED] * (len(claims) - len(known))]
                raise
            if key is not None and outcomes[-1] != DELIVERED:
                stopped.add(key)
        return outcomes

    def _judge(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> list[Outcome]:
        if all(type(outcome) is Delivered for outcome in outcomes):
            return list(outcomes)
        ordered = release_successors(claims, outcomes)
        judged = [
            decide(self._retry, claim, outcome) if isinstance(outcome, Retry) else outcome
            for claim, outcome in zip(claims, ordered, strict=True)
        ]
        self._failures.note(self.sink.name, claims, judged)
        return judged

    async def _settle(self, batch: Batch, outcomes: Sequence[Outcome]) -> Settlement:
        """Settle; a lease is worth several tries, because what was delivered would else be delivered again."""
        effect: Effect | None = self.sink.effect(batch.claims, outcomes)
        events = say_count(len(outcomes), "event")
        deadline = time.monotonic() + max(SETTLE_AT_LEAST, self._lease.total_seconds())
        pause = SETTLE_TRIES_FIRST
        while True:
            try:
                settlement = await batch.settle(outcomes, park=self._parks, effect=effect)
            except StoreUnavailable as error:
                if batch.mode == "hold" or time.monotonic() + pause > deadline or self._stopping.is_set():
                    log.warning("Could not settle %s, to be sent again: %s", events, error)
                    await batch.abandon()
                    return Settlement(lost=len(outcomes))
                if pause == SETTLE_TRIES_FIRST:
                    log.warning("Could not settle %s yet, trying again: %s", events, error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
                continue
            except StoreRefused as error:
                return await self._settle_refused(batch, outcomes, error)
            if settlement.lost and batch.mode == "hold":
                # Rows that cannot leave their table: only a lease counts their attempts.
                self._no_hold_before = time.monotonic() + HOUSEKEEPING.total_seconds()
            elif settlement.lost:
                lost = say_count(settlement.lost, "claim")
                log.warning("%s had lapsed before the settlement; others have them.", lost)
            # A queue's rows have numbers; it names them by itself.
            if settlement.dead and not getattr(self.store, "tells_dead", False):
                self._tell_dead(batch.claims, outcomes)
            return settlement

    async def _settle_refused(self, batch: Batch, outcomes: Sequence[Outcome], error: StoreRefused) -> Settlement:
        """A batch that only settles as a whole was refused: take it in smaller parts, until the culprit is alone."""
        log.error("Could not settle %s: %s", say_count(len(outcomes), "event"), error)
        self._size = max(1, len(outcomes) // 2)
        self._no_hold_before = time.monotonic() + HOUSEKEEPING.total_seconds()
        if len(outcomes) == 1 and batch.mode == "lease":
            told = f"Could not be settled as {type(outcomes[0]).__name__}: {error}"
            others: tuple[Outcome, ...] = (Dead(told), Retry(told, after=HOUSEKEEPING))
            for outcome in others:
                with suppress(StoreRefused, StoreUnavailable):
                    settlement = await batch.settle([outcome], park=self._parks)
                    if settlement.dead:
                        self._tell_dead(batch.claims, [outcome])
                    return settlement
            # It would be claimed again at once, without end.
            await self._wait(set(), self._poll.total_seconds())
        await batch.abandon()
        return Settlement(released=len(outcomes))

    def _tell_dead(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> None:
        """Say which event died; of many, which one was the first, since they may all say the same."""
        dead = [(claim, outcome) for claim, outcome in zip(claims, outcomes, strict=True) if isinstance(outcome, Dead)]
        claim, outcome = dead[0]
        more = f" (and {len(dead) - 1} more of this batch)" if len(dead) > 1 else ""
        error = without_name(without_calls(outcome.error), self.sink.name)
        log.warning("Sink %s: event %s is dead%s: %s", self.sink.name, claim.event.id, more, error)

    # -- a store that is down, and what is done now and then --------------------------------------------------------

    async def _open_patiently(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._ask(self.open())
                return
            except StoreUnavailable as error:
                await self._wait(set(), self._outage.note(error))

    async def _keep_house(self) -> None:
        retention: timedelta | None = getattr(self.store, "retention", None)
        while retention is not None:
            try:
                await self.store.prune(delivered_age=retention)  # type: ignore[attr-defined]
            except (StoreUnavailable, StoreRefused) as error:
                log.debug("Could not prune: %s", error)
            await asyncio.sleep(HOUSEKEEPING.total_seconds())


def _without_defects(claims: Sequence[Claim]) -> Sequence[Claim]:
    """The claims that can be sent: what follows one that cannot be read waits with its key, lest it pass it."""
    if all(claim.defect is None for claim in claims):
        return claims
    stopped: set[str] = set()
    good: list[Claim] = []
    for claim in claims:
        key = claim.event.key
        if claim.defect is not None:
            stopped |= {key} if key is not None else set()
        elif key is None or key not in stopped:
            good.append(claim)
    return good


def _ignore_result(future: asyncio.Future[Any]) -> None:
    # asyncio complains about an exception that nobody asked for.
    if not future.cancelled():
        future.exception()
