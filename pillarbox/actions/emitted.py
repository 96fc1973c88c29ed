"""An event that an action emitted: named and encoded at once, its subject's key read when the action ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from pillarbox.actions.names import EventNames
from pillarbox.actions.namespaces import check_text
from pillarbox.actions.subject import id_of, key_text, type_of
from pillarbox.codec import decode_json, encode_json, is_json
from pillarbox.errors import InvalidAction, InvalidEvent
from pillarbox.event import Event, uuid7
from pillarbox.layouts.shared import has_zero

_HOMELESS: Final = (
    *("headers", "due_at", "delay", "dedup_key", "schema_version", "correlation_id", "causation_id", "trace_id"),
    "max_attempts",
)


@dataclass(frozen=True, slots=True)
class Emitted:
    """One event of an action, as `act.events` lists it."""

    id: UUID
    type: str
    payload: dict[str, Any]
    model_type: str
    _model_id: str | None
    _subject: object | None
    _claimed: tuple[str, ...] = ()
    """What an `Event` says itself of its key: it must be the subject's."""

    @property
    def model_id(self) -> str:
        """The subject's id; one that the database makes is known after the flush."""
        if self._model_id is None and self._subject is None:
            raise InvalidAction(f"Event {self.type!r}: {_NO_SUBJECT}")
        found = id_of(self._subject) if self._model_id is None and self._subject is not None else str(self._model_id)
        check_text(f"Event {self.type!r}, model_id", found)
        for own in self._claimed:
            if own != found:
                raise InvalidEvent(
                    f"Event {self.type!r} ({self.id}): it says that its key is {own!r}, its subject's is {found!r}; "
                    "leave one out"
                )
        return found


_NO_SUBJECT: Final = "the action log needs to know what it is about; give subject=, or model_type= and model_id="


def make_emitted(
    event: object,
    names: EventNames,
    namespace: str,
    *,
    subject: object | None,
    model_type: str | None,
    model_id: object | None,
) -> Emitted:
    """Check and encode what `emit` was given; raises before anything is written."""
    own = event if isinstance(event, Event) else None
    kind = _check_own(own, namespace).type if own is not None else _name(event, names)
    what = f"Event {kind!r}, payload"
    payload = _decode(own, what) if own is not None else encode_object(event, what)
    own_type = None if subject is None else type_of(subject)
    claimed = () if own is None else tuple(each for each in (own.key, own.aggregate_id) if each is not None)
    chosen_id = None if model_id is None else key_text(model_id)
    if chosen_id is None and subject is None and claimed:
        chosen_id = claimed[0]
    chosen_type = model_type or own_type or (None if own is None else own.aggregate_type)
    if chosen_type is None or (chosen_id is None and subject is None):
        raise InvalidAction(f"Event {kind!r}: {_NO_SUBJECT}")
    check_text(f"Event {kind!r}, model_type", chosen_type)
    return Emitted(uuid7() if own is None else own.id, kind, payload, chosen_type, chosen_id, subject, claimed)


def encode_object(value: object, what: str) -> dict[str, Any]:
    """A value as the JSON object that it becomes, or `InvalidEvent`."""
    return _object(encode_json(value, what=what), what)


def _object(text: bytes, what: str) -> dict[str, Any]:
    found = decode_json(text)
    if not isinstance(found, dict):
        raise InvalidEvent(f"{what}: expected a JSON object, such as a dict or a dataclass makes; got {text[:80]!r}")
    if has_zero(text):
        raise InvalidEvent(f"{what}: it has the character U+0000 in a text, which PostgreSQL cannot hold; leave it out")
    return found


def _refuse_rounding(text: bytes, what: str) -> None:
    def check(number: str) -> None:
        is_kept = number.lstrip("-").isdigit() and -(2**63) <= int(number) < 2**64
        if not is_kept and Decimal(repr(float(number))) != Decimal(number):
            raise InvalidEvent(
                f"{what}: the number {number} would be rounded to {float(number)!r}; write it as text, or with fewer "
                "digits"
            )

    json.loads(text, parse_float=check, parse_int=check)


def _decode(event: Event, what: str) -> dict[str, Any]:
    if not is_json(event.content_type):
        raise InvalidEvent(f"{what}: expected a JSON object, got content type {event.content_type!r}")
    try:
        found = _object(event.payload, what)
        _refuse_rounding(event.payload, what)
        return found
    except InvalidEvent:
        raise
    except ValueError as error:
        raise InvalidEvent(f"{what}: expected a JSON object, got what is no JSON: {error}") from error


def _name(event: object, names: EventNames) -> str:
    kind = type(event)
    if kind.__module__ == "builtins":
        raise InvalidEvent(
            f"emit: expected an Event, or an object of a class whose name is the event's type; got {event!r}. Give it "
            "a type: Event('MoneyDeposited', {…})"
        )
    return names.find(kind)


def _check_own(event: Event, namespace: str) -> Event:
    homeless = [name for name in _HOMELESS if getattr(event, name)]
    if event.topic != event.type:
        homeless.append("topic")
    if event.source not in (None, namespace):
        homeless.append("source")
    if homeless:
        raise InvalidEvent(
            f"Event {event.type!r} ({event.id}): the action log has no place for its {', '.join(homeless)}; "
            "leave it out"
        )
    return event
