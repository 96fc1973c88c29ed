"""What a database refuses to store, told from a database that is away; and settling around it.

A refusal is about values: waiting does not help, and the other rows of the batch are not to blame. So a settlement that
is refused is made again in halves, each in a savepoint, until the row at fault is alone; that one is made dead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from pillarbox.errortext import describe_error
from pillarbox.event import Claim, Dead, Outcome
from pillarbox.stores import Settlement
from pillarbox.stores.dialect import Given
from pillarbox.stores.moving import has_no_partition

log = logging.getLogger("pillarbox.store")

Settle = Callable[[sa.Connection, Sequence[Claim], Sequence[Outcome]], Settlement]

# Bad data, violated constraints and views, texts too long for an index, errors raised by triggers.
_STATES: Final = ("22", "23", "44", "54", "P0")
# The classes that PostgreSQL leaves to whoever raises an error. MySQL's own say nothing, its numbers do.
_OWN_STATES: Final = re.compile("[689I-OQ-WYZ]")
# Checks, wrong and truncated values, character sets, JSON, SIGNAL: PyMySQL takes these for trouble of the server.
_NUMBERS: Final = frozenset(
    {1048, 1062, 1264, 1265, 1292, 1300, 1366, 1367, 1406, 1411, 1441, 1644, 1690}
    | {3140, 3141, 3144, 3146, 3156, 3819, 3903, 4025, 4038, 4078}
)
# What encoders raise for a value before it reaches the database: half a surrogate pair, too large a number.
UNWRITABLE: Final = (ValueError, TypeError, OverflowError)
_SHOWN: Final = 300


def is_refusal(error: BaseException) -> bool:
    """Whether a database, or its driver, refused a value."""
    if isinstance(error, UNWRITABLE):
        # A certificate that does not verify is one of these as well.
        return not isinstance(error, OSError)
    if not isinstance(error, DBAPIError) or error.connection_invalidated or has_no_partition(error):
        return False
    cause: Any = error.orig
    if cause is None:
        return False
    number = cause.args[0] if cause.args else None
    state = str(getattr(cause, "sqlstate", "") or "")
    if isinstance(error, DataError | IntegrityError) or state.startswith(_STATES):
        return True
    if not isinstance(number, int) and _OWN_STATES.match(state):
        return True
    # asyncpg's own for a parameter that it cannot write is an error of the interface, as one on a lost connection is.
    is_unwritable = isinstance(cause.__cause__, ValueError) and not isinstance(cause.__cause__, OSError)
    return number in _NUMBERS or is_unwritable or "malformed JSON" in str(cause)


def write_apart(
    db: sa.Connection, write: Callable[[Sequence[Given]], int], rows: Sequence[Given]
) -> tuple[int, list[tuple[Given, str]]]:
    """Write the rows that can be written; returns their number, and the others with the reason of each."""
    if not rows:
        return 0, []
    try:
        with db.begin_nested():
            return write(rows), []
    except (DBAPIError, *UNWRITABLE) as error:
        if not is_refusal(error):
            raise
        why = describe_refusal(error)
    if len(rows) == 1:
        return 0, [(rows[0], why)]
    half = len(rows) // 2
    first, second = write_apart(db, write, rows[:half]), write_apart(db, write, rows[half:])
    return first[0] + second[0], first[1] + second[1]


def describe_refusal(refused: Exception) -> str:
    """Why something was refused, in plain letters: the table's character set may be what refused the first text."""
    why = describe_error(getattr(refused, "orig", None) or refused).partition("\n")[0]
    return why.encode("ascii", "backslashreplace").decode()[:_SHOWN]


def settle_apart(db: sa.Connection, settle: Settle, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Settlement:
    """Settle what can be settled as it is; a claim whose outcome is refused is dead and says so."""
    try:
        with db.begin_nested():
            return settle(db, claims, outcomes)
    except (DBAPIError, *UNWRITABLE) as error:
        if not is_refusal(error):
            raise
        refused = error
    if len(claims) > 1:
        half = len(claims) // 2
        first = settle_apart(db, settle, claims[:half], outcomes[:half])
        return first + settle_apart(db, settle, claims[half:], outcomes[half:])
    return _bury_alone(db, settle, claims, outcomes[0], refused)


def _bury_alone(
    db: sa.Connection, settle: Settle, claims: Sequence[Claim], outcome: Outcome, refused: Exception
) -> Settlement:
    told = f"The database refused to settle this event as {type(outcome).__name__}: {describe_refusal(refused)}"
    dead = Dead(told[:_SHOWN])
    try:
        with db.begin_nested():
            settlement = settle(db, claims, [dead])
    except (DBAPIError, *UNWRITABLE) as error:
        if not is_refusal(error):
            raise
        log.error("Event %s can be settled neither so nor as dead; its row stays: %s", claims[0].event.id, dead.error)
        return Settlement(lost=1)
    log.error("Event %s is dead: %s", claims[0].event.id, dead.error)
    return settlement
