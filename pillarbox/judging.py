"""What becomes of an event that failed, as a retry policy has it; and how failures are told."""

from __future__ import annotations

import logging
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pillarbox.errors import PillarboxError
from pillarbox.errortext import without_calls
from pillarbox.event import Claim, Dead, Delivered, Outcome, Released, Retry, check_after
from pillarbox.retry import Exponential, Failure, RetryPolicy

log = logging.getLogger("pillarbox.relay")

_KINDS: Final = frozenset({Delivered, Retry, Dead, Released})
_FALLBACK: Final = Exponential()
_MOST_KINDS: Final = 1000


def check_outcomes(outcomes: Any, count: int, name: str) -> Sequence[Outcome]:
    """One outcome per claim, as a sink gave them; what is no outcome becomes a retry that says so."""
    if len(outcomes) != count:
        raise PillarboxError(f"Sink {name}: expected {count} outcomes, one a claim, got {len(outcomes)}")
    if _KINDS.issuperset(map(type, outcomes)):
        found: Sequence[Outcome] = outcomes
        return found
    return [
        outcome
        if isinstance(outcome, Delivered | Retry | Dead | Released)
        else Retry(f"Sink {name}: expected an outcome, got one of type {type(outcome).__name__!r}")
        for outcome in outcomes
    ]


def read_pause(after: object) -> timedelta | None:
    """The pause that a destination asked for; one that cannot be read is none."""
    try:
        return check_after("SinkUnavailable", after)
    except TypeError as error:
        log.warning("%s; the pause is chosen as if it had asked for none.", error)
        return None


def decide(policy: RetryPolicy, claim: Claim, retry: Retry) -> Outcome:
    """The retry with its delay, the one it asks for or else the policy's; or the end."""
    put_at = claim.event.created_at
    age = None if put_at is None else datetime.now(UTC) - put_at
    failure = Failure(claim.attempt, retry.error, retry.cause, age, claim.event.max_attempts)
    try:
        delay = check_after("Retry policy", policy.next_delay(failure))
    except Exception:
        log.exception("Retry policy %r failed; event %s is retried as by default.", policy, claim.event.id)
        delay = _FALLBACK.next_delay(failure)
    if delay is None:
        return Dead(retry.error, retry.cause)
    return Retry(retry.error, delay if retry.after is None else retry.after, retry.cause)


class Failures:
    """Tells the first failure of each kind, an exception with its traceback, and counts the others.

    A kind is the type of an exception and the place that raised it, or an error text without its numbers.
    """

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def note(self, sink: str, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> None:
        for claim, outcome in zip(claims, outcomes, strict=True):
            if isinstance(outcome, Retry) or (isinstance(outcome, Dead) and outcome.cause is not None):
                self._note(sink, claim, outcome)

    def _note(self, sink: str, claim: Claim, outcome: Retry | Dead) -> None:
        kind, place = _kind_of(outcome)
        if len(self._counts) > _MOST_KINDS:
            self._counts.clear()
        self._counts[kind] += 1
        count = self._counts[kind]
        error = without_name(without_calls(outcome.error), sink)
        if count == 1:
            what = "failed and is tried again" if isinstance(outcome, Retry) else "failed"
            trace = None if outcome.cause is None else (type(outcome.cause), outcome.cause, outcome.cause.__traceback__)
            log.warning("Sink %s: event %s %s: %s", sink, claim.event.id, what, error, exc_info=trace)
        elif str(count).strip("0") == "1":  # at 10, 100, 1000 and so on
            log.warning(
                "Sink %s: %d failures%s so far, the last of event %s: %s", *(sink, count, place), claim.event.id, error
            )


def without_name(error: str, sink: str) -> str:
    """An error without the name of its sink in front, for a line that begins with it."""
    for name in (f"Sink {sink!r}: ", f"Sink {sink}: "):
        if error.startswith(name):
            return error.removeprefix(name)
    return error


def _kind_of(outcome: Retry | Dead) -> tuple[object, str]:
    cause = outcome.cause
    if cause is None:
        return re.sub(r"[0-9a-f-]*[0-9][0-9a-f-]*", "#", outcome.error)[:120], " like this"
    frames = traceback.extract_tb(cause.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (type(cause), place), f" at {place}" if place else ""
