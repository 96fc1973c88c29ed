"""A function between the relay and a sink that changes events on their way, or leaves them out."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib import import_module

from pillarbox.errors import ConfigError, SinkUnavailable, Unsupported
from pillarbox.errortext import describe_failure
from pillarbox.event import DELIVERED, RELEASED, Claim, Delivered, Event, Outcome, Retry
from pillarbox.sinks import SinkLike
from pillarbox.sinks.limit import LONGEST_CALL
from pillarbox.sinks.order import Deliver, release_successors
from pillarbox.sinks.wrapper import SinkWrapper
from pillarbox.wording import say_count

log = logging.getLogger("pillarbox.relay")

Transform = Callable[[Event], Event | Awaitable[Event | None] | None]


class TransformSink(SinkWrapper):
    """Delivers what a function makes of each event.

    The function takes the event and returns one, made with `event.replace(…)` as a rule. None leaves the event out: it
    counts as delivered, and `left_out` counts it. What the function raises is that event's failure, to be retried.

    Order is kept by the key the event was put with, whatever key it gets: where events of one key get different keys or
    none, each is sent when the one before it is delivered, in a batch of its own to the sink below. What is not sent
    after `LONGEST_CALL` is released. With an async function the sink is not quick: rows must not stay locked while it
    looks something up.

    A fan-out and a handler with a session are refused: they settle the events that were claimed, as they were claimed.
    """

    def __init__(self, sink: SinkLike, transform: Transform) -> None:
        if not callable(transform):
            raise ConfigError(f"Sink {sink.name!r} transform: expected a function of an event, got {transform!r}")
        super().__init__(sink)
        if self._sink.joins_settlement:
            raise Unsupported(
                f"Sink {sink.name!r} transform: it settles events together with what it does, so it takes them as "
                "they were put. Transform them before the sinks that it feeds, or in the handler"
            )
        self.is_quick = sink.is_quick and not _is_async(transform)
        self.left_out = 0
        self._transform = transform
        self._clock = time.monotonic

    async def pass_on(self, claims: Sequence[Claim], deliver: Deliver) -> Sequence[Outcome]:
        decided: list[Outcome | None] = []
        changed: list[Claim] = []
        stopped: set[str] = set()
        for claim in claims:
            key = claim.event.key
            outcome, event = (RELEASED, None) if key in stopped else await self._call(claim.event)
            if key is not None and isinstance(outcome, Retry):
                stopped.add(key)
            decided.append(outcome)
            changed.append(claim if event is None else replace(claim, event=event))
        outcomes = [RELEASED if outcome is None else outcome for outcome in decided]
        try:
            await self._send(deliver, claims, changed, outcomes, _split(claims, changed, decided))
        except SinkUnavailable as outage:
            outage.outcomes = self._finish(claims, decided, outcomes)
            raise
        return self._finish(claims, decided, outcomes)

    async def _send(
        self,
        deliver: Deliver,
        claims: Sequence[Claim],
        changed: Sequence[Claim],
        outcomes: list[Outcome],
        steps: list[list[int]],
    ) -> None:
        stopped: set[str] = set()

        def note(sent: Sequence[int], found: Sequence[Outcome]) -> None:
            for position, outcome in zip(sent, found, strict=True):
                outcomes[position] = outcome
                key = claims[position].event.key
                if key is not None and not isinstance(outcome, Delivered):
                    stopped.add(key)

        ends_at = self._clock() + LONGEST_CALL.total_seconds()
        for step in steps:
            if self._clock() > ends_at:
                return
            sent = [position for position in step if claims[position].event.key not in stopped]
            try:
                note(sent, await deliver([changed[position] for position in sent]) if sent else [])
            except SinkUnavailable as outage:
                if outage.outcomes is not None:
                    note(sent, outage.outcomes)
                raise

    def _finish(
        self, claims: Sequence[Claim], decided: Sequence[Outcome | None], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        # By the original keys: the sink below knows only the new ones.
        ordered = release_successors(claims, outcomes)
        left_out = sum(decision == outcome == DELIVERED for decision, outcome in zip(decided, ordered, strict=True))
        if left_out:
            log.info("Sink %s: left out %s, as its transform says.", self.name, say_count(left_out, "event"))
        self.left_out += left_out
        return ordered

    async def _call(self, event: Event) -> tuple[Outcome | None, Event | None]:
        try:
            made: object = self._transform(event)
            if inspect.isawaitable(made):
                made = await made
        except Exception as error:
            return Retry(f"The transform failed: {describe_failure(error)}", cause=error), None
        if made is None:
            return DELIVERED, None
        if not isinstance(made, Event):
            return Retry(f"The transform returned {made!r}; expected an Event or None"), None
        return None, made


def _split(claims: Sequence[Claim], changed: Sequence[Claim], decided: Sequence[Outcome | None]) -> list[list[int]]:
    """The positions to send, step by step: what the sink below would not keep in order is in different steps."""
    steps: list[list[int]] = []
    last: dict[str, tuple[int, str | None]] = {}
    for position, (claim, made) in enumerate(zip(claims, changed, strict=True)):
        if decided[position] is not None:
            continue
        key, step = claim.event.key, 0
        if key is not None:
            step, before = last.get(key, (-1, None))
            step += before is None or before != made.event.key
            last[key] = step, made.event.key
        if step == len(steps):
            steps.append([])
        steps[step].append(position)
    return steps


def _is_async(function: Transform) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_function(text: str, *, what: str) -> Transform:
    """Import a function named as `module:function`."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{what}: expected module:function, got {text!r}")
    try:
        found: object = import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}: module {module!r} cannot be imported: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{what}: {module!r} has no function {name!r}")
    return found
