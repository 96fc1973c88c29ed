"""Every exception Pillarbox raises.

    PillarboxError
    ├── InvalidEvent            an event was refused before any SQL (also a ValueError)
    │   └── PayloadTooLarge
    ├── ConfigError             a bad option, file, URL or environment variable
    ├── MissingExtra            an optional package is not installed (also an ImportError)
    ├── LayoutError             a layout is unknown or misdeclared
    │   └── Unsupported         a layout, database or sink cannot do what was asked
    ├── SchemaError             a table is missing or is not what its layout declares
    ├── TransactionError        the caller's transaction cannot take the statement
    ├── ReceiptPending          a receipt was read before its flush
    ├── StoreUnavailable        the database cannot be reached; nothing was changed
    ├── StoreRefused            the database refused a value; waiting would not help
    ├── SinkUnavailable         a destination is down; no message is to blame
    ├── ActionError             an action was used where, when or by whom it cannot be
    │   ├── InvalidAction       its name, its parameters or its events cannot be stored (also a ValueError)
    │   └── ActionRepeated      its idempotency key was used before
    ├── InvalidChange           a change record is none of the action log (also a ValueError)
    ├── UnsupportedStatement    a SQL statement cannot be replayed on its database as asked (also a ValueError)
    ├── QueueError              a statement could not be pushed into a queue file; nothing was stored
    │   └── QueueFull           as many statements wait as the queue may hold
    └── Verdict                 raised by handlers, about the event they were given
        ├── RetryLater          try it again
        ├── Reject              it can never be handled
        └── Skip                there is nothing to do

A message says what failed, on which thing, with its value; what was expected; what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from pillarbox.event import Outcome


class PillarboxError(Exception):
    """The root of everything raised on purpose."""


class InvalidEvent(PillarboxError, ValueError):
    """An event cannot be stored as given; nothing was written."""


class PayloadTooLarge(InvalidEvent):
    """A payload is above the outbox's limit."""


class ConfigError(PillarboxError):
    """An option, a file, a URL or an environment variable is not understood."""


class MissingExtra(PillarboxError, ImportError):
    """An adapter's package is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} support is not installed. Run: pip install 'pillarbox[{extra}]'")


class LayoutError(PillarboxError):
    """A layout is unknown or its declaration is inconsistent."""


class Unsupported(LayoutError):
    """A layout, database or sink cannot do what was asked."""


class SchemaError(PillarboxError):
    """A table is missing or differs from its layout."""


class TransactionError(PillarboxError):
    """The caller's transaction cannot take the statement."""


class ReceiptPending(PillarboxError):
    """A receipt was read before the flush that fills it."""


class StoreUnavailable(PillarboxError):
    """The database cannot be reached; what was not committed did not happen."""


class StoreRefused(PillarboxError):
    """The database refused what was to be written: a value that it cannot hold, a violated constraint, a trigger."""


class SinkUnavailable(PillarboxError):
    """A destination is down: its messages are released and their attempts stay untouched.

    `after` is when the destination asked to be tried again, if it said so. `outcomes`, one for each claim of
    the batch, is given when the destination went down in the middle of it: what was answered before is not
    lost.
    """

    def __init__(
        self,
        message: str,
        *,
        after: timedelta | None = None,
        outcomes: Sequence[Outcome] | None = None,
    ) -> None:
        super().__init__(message)
        self.after = after
        self.outcomes = outcomes


class ActionError(PillarboxError):
    """An action was used outside its block, by another task or thread, or in a transaction that it cannot share."""


class InvalidAction(ActionError, ValueError):
    """An action's name, parameters, subject or event name cannot be stored as given; nothing was written."""


class ActionRepeated(ActionError):
    """An action with this idempotency key was done before: `action_id` is its id. Nothing was done again."""

    def __init__(self, message: str, *, action_id: UUID, idempotency_key: str) -> None:
        super().__init__(message)
        self.action_id = action_id
        self.idempotency_key = idempotency_key


class InvalidChange(PillarboxError, ValueError):
    """A change record is malformed, or is not one of the action log's table."""


class QueueError(PillarboxError):
    """A statement could not be pushed: it has no stored form, or its file is locked, full, damaged or foreign."""


class QueueFull(QueueError):
    """A queue holds as many waiting statements as it may; nothing was stored."""

    def __init__(self, message: str, *, namespace: str, max_waiting: int) -> None:
        super().__init__(message)
        self.namespace = namespace
        self.max_waiting = max_waiting


class UnsupportedStatement(PillarboxError, ValueError):
    """A SQL statement cannot be read, rewritten or given its arguments; nothing was sent."""


class Verdict(PillarboxError):
    """What a handler says of its event by raising it; whatever it wrote in the event's transaction is undone."""


class RetryLater(Verdict):
    """Try the event again, after this time or as the retry policy says."""

    def __init__(self, reason: str = "The handler asked to be called again", *, after: timedelta | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Reject(Verdict):
    """The event can never be handled: it is dead at once."""


class Skip(Verdict):
    """There is nothing to do for this event: it counts as delivered."""
