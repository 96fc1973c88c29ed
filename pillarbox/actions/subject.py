"""What an event is about: the type and id of a mapped object, as text.

Keys are read when the action ends, after the flush: a key that the database makes is not known before.
"""

from __future__ import annotations

from datetime import date, datetime, time
from enum import Enum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import InstanceState

from pillarbox.errors import InvalidAction

SEPARATOR: Final = ":"
"""Between the parts of a composite key; inside a part it is written %3A, and a percent sign %25."""


def check_subject(subject: object) -> InstanceState[Any]:
    """The mapped state of an object, or `InvalidAction` when it has none."""
    state = None if isinstance(subject, type) else sa.inspect(subject, raiseerr=False)
    if not isinstance(state, InstanceState):
        raise InvalidAction(
            f"emit: expected as subject an object of a mapped class, got {subject!r}. For anything else give "
            "model_type= and model_id="
        )
    return state


def type_of(subject: object) -> str:
    return check_subject(subject).class_.__name__


def id_of(subject: object) -> str:
    """The primary key as text; the parts of a composite one joined."""
    state = check_subject(subject)
    key = state.identity or state.mapper.primary_key_from_instance(subject)
    if any(part is None for part in key):
        raise InvalidAction(
            f"emit: the subject {subject!r} has no primary key, although the session was flushed. Add it to the "
            "action's session, or give model_id="
        )
    if len(key) == 1:
        return key_text(key[0])
    return SEPARATOR.join(key_text(part).replace("%", "%25").replace(SEPARATOR, "%3A") for part in key)


def key_text(value: object) -> str:
    """A part of a key as text."""
    if isinstance(value, Enum):
        return key_text(value.value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)
