"""What a handler can know of the event it was given, besides the payload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pillarbox.event import Claim, Event
from pillarbox.inbox.message import ID_HEADER
from pillarbox.notifications.context import ActionContext, read_action


@dataclass(frozen=True, slots=True)
class Context:
    """One call of a handler: whose, for which event, and the how manieth try it is."""

    claim: Claim
    handler: str

    @property
    def event(self) -> Event:
        return self.claim.event

    @property
    def id(self) -> UUID:
        """The event's id, the same at every try: what an effect elsewhere is made unique by."""
        return self.claim.event.id

    @property
    def type(self) -> str:
        return self.claim.event.type

    @property
    def key(self) -> str | None:
        return self.claim.event.key

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.claim.event.headers

    @property
    def put_at(self) -> datetime | None:
        return self.claim.event.created_at

    @property
    def attempt(self) -> int:
        """Counts from 1."""
        return self.claim.attempt

    @property
    def message_id(self) -> str:
        """The id of the message that a broker delivered the event with; without one it is the event's own."""
        read = getattr(self.claim.row, "read", None)
        return str(self.headers.get(ID_HEADER, self.id) if read is None else read.id)

    @property
    def action(self) -> ActionContext | None:
        """The action that emitted the event, where it comes from an action log."""
        return read_action(self.claim)


Next = Callable[[], Awaitable[object]]
"""Calls the next middleware, or the handler."""

Middleware = Callable[[Context, Next], Awaitable[object]]
"""Wraps the calls of all handlers: what it returns or raises counts instead of what the handler did."""

Provide = Callable[[Context, Mapping[str, Any]], Any]
"""Given the names and annotations of the parameters nobody else fills, returns their values by name, or awaits them."""
