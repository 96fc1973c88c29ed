"""What becomes of an event that failed, as a retry policy has it."""

from __future__ import annotations

from datetime import UTC, datetime

from pillarbox.event import Claim, Dead, Outcome, Retry
from pillarbox.retry import Failure, RetryPolicy


def decide(policy: RetryPolicy, claim: Claim, retry: Retry) -> Outcome:
    """The retry with its delay, the one it asks for or else the policy's; or the end."""
    put_at = claim.event.created_at
    age = None if put_at is None else datetime.now(UTC) - put_at
    delay = policy.next_delay(Failure(claim.attempt, retry.error, retry.cause, age, claim.event.max_attempts))
    if delay is None:
        return Dead(retry.error)
    return Retry(retry.error, delay if retry.after is None else retry.after, retry.cause)
