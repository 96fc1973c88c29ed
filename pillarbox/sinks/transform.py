"""A function between the relay and a sink that changes events on their way, or leaves them out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib import import_module

from pillarbox.errors import ConfigError
from pillarbox.event import DELIVERED, RELEASED, Claim, Event, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks.order import deliver_rest, release_successors

Transform = Callable[[Event], Event | Awaitable[Event | None] | None]


class TransformSink:
    """Delivers what a function makes of each event.

    The function takes the event and returns one, made with `event.replace(…)` as a rule. None leaves the event out: it
    counts as delivered, and `left_out` counts it. What the function raises is that event's failure, to be retried.
    Order is kept by the key the event was put with, whatever key it gets.
    """

    def __init__(self, sink: Sink, transform: Transform) -> None:
        if not callable(transform):
            raise ConfigError(f"Sink {sink.name!r} transform: expected a function of an event, got {transform!r}")
        self.name, self.is_quick = sink.name, sink.is_quick
        self.open, self.check, self.close = sink.open, sink.check, sink.close
        self.left_out = 0
        self._sink = sink
        self._transform = transform

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
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
        outcomes = await deliver_rest(self._sink.deliver, changed, decided)
        # By the original keys: the sink below knows only the new ones.
        outcomes = release_successors(claims, outcomes)
        self.left_out += sum(
            decision == outcome == DELIVERED for decision, outcome in zip(decided, outcomes, strict=True)
        )
        return outcomes

    async def _call(self, event: Event) -> tuple[Outcome | None, Event | None]:
        try:
            made: object = self._transform(event)
            if inspect.isawaitable(made):
                made = await made
        except Exception as error:
            return Retry(f"The transform failed: {describe_error(error)}", cause=error), None
        if made is None:
            return DELIVERED, None
        if not isinstance(made, Event):
            return Retry(f"The transform returned {made!r}; expected an Event or None"), None
        return None, made


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
