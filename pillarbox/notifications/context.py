"""The action that an event came from, as its notification tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pillarbox.event import Claim


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What was done, with what parameters and when, and which object the event is about."""

    event_id: UUID
    namespace: str
    action_id: UUID
    action_name: str
    params: Mapping[str, Any]
    started_at: datetime
    completed_at: datetime
    event_at: datetime
    model_type: str | None
    model_id: str | None


def read_action(claim: Claim) -> ActionContext | None:
    """The action of a claimed notification; None where the claim is of another table."""
    extra = claim.extra
    if extra is None or "action_id" not in extra:
        return None
    return ActionContext(
        event_id=claim.event.id,
        namespace=extra["namespace"],
        action_id=extra["action_id"],
        action_name=extra["action_name"],
        params=extra["action_params"],
        started_at=extra["started_date"],
        completed_at=extra["completion_date"],
        event_at=extra["event_date"],
        model_type=extra["model_type"],
        model_id=extra["model_id"],
    )
