"""From an event's payload to what a handler's annotation names.

A payload that does not fit is the message's fault: it is rejected, never tried again.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NewType, Union, get_args, get_origin

import orjson

from pillarbox.codec import encode_json, is_json
from pillarbox.errors import InvalidEvent, Reject
from pillarbox.event import Claim, Event
from pillarbox.handlers.decoders import Misfit, find_decoder, name_type

Load = Callable[[Claim, "Data"], Any]
"""Makes a handler's argument of a claim."""

_ANYTHING: Final = (inspect.Parameter.empty, Any, object)
_SHAPES: Final[Mapping[Any, type]] = {dict: dict, Mapping: dict, MutableMapping: dict, list: list, Sequence: list}
_NAMES: Final[Mapping[type, str]] = {
    dict: "an object",
    list: "an array",
    str: "text",
    bool: "a boolean",
    NoneType: "null",
}
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")


class Data:
    """The JSON of an event, brought to its newest version; each reader gets values of its own."""

    def __init__(self, event: Event, upcast: Callable[[Event, Any], Any] | None) -> None:
        self._event = event
        self._upcast = upcast

    def encode(self) -> bytes:
        """The JSON text: as it was put, or written anew when an older version was brought up to date."""
        self._check()
        return self._event.payload if self._upcast is None else _encode(self.decode())

    def decode(self) -> Any:
        """The JSON as Python has it."""
        self._check()
        data = _decode(self._event.payload)
        return data if self._upcast is None else self._upcast(self._event, data)

    def _check(self) -> None:
        if not is_json(self._event.content_type):
            raise Reject(f"Payload is {self._event.content_type}; expected JSON, or a handler that takes bytes")


def make_loader(annotation: Any, *, what: str = "Payload") -> Load:
    """How the argument with this annotation is made; `what` names it in errors."""
    plain = unwrap(annotation)
    if plain is Event:
        return lambda claim, data: claim.event
    if plain is Claim:
        return lambda claim, data: claim
    if plain is bytes:
        return lambda claim, data: claim.event.payload
    if plain is str:
        return lambda claim, data: _decode_text(claim.event.payload)
    if plain in _ANYTHING:
        return lambda claim, data: data.decode()
    name = name_type(annotation)
    shape = _find_shape(unwrap(annotation, optional=False))
    if shape is not None:
        return lambda claim, data: _check_shape(data.decode(), shape, name)
    decode = find_decoder(annotation, what=what)

    def load(claim: Claim, data: Data) -> Any:
        raw = data.encode()
        try:
            return decode(raw)
        except Misfit as misfit:
            # Not "from" the library's error, which carries the payload's values into every traceback.
            raise Reject(f"Payload does not fit {name}: {misfit}") from None

    return load


def unwrap(annotation: Any, *, optional: bool = True) -> Any:
    """The type inside `Annotated`, a `NewType` or a named alias, and with `optional` inside `… | None`."""
    while True:
        others = [each for each in get_args(annotation) if each is not NoneType]
        if get_origin(annotation) is Annotated or (
            optional and get_origin(annotation) in (Union, UnionType) and len(others) == 1
        ):
            annotation = others[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def _find_shape(annotation: Any) -> type | None:
    """Whether it is JSON's own object or array, with anything in it."""
    origin = get_origin(annotation) or annotation
    shape = _SHAPES.get(origin) if isinstance(origin, type) else None
    keys_and_values = [*get_args(annotation)]
    if shape is dict and keys_and_values[:1] == [str]:
        keys_and_values.pop(0)
    return shape if all(each in (Any, object) for each in keys_and_values) else None


def _check_shape(value: Any, shape: type, name: str) -> Any:
    if not isinstance(value, shape):
        raise Reject(
            f"Payload does not fit {name}: expected {_NAMES[shape]}, got {_NAMES.get(type(value), 'a number')}"
        )
    return value


def _decode_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise Reject(f"Payload is no UTF-8 text: {error}") from error


def _decode(payload: bytes) -> Any:
    try:
        data = orjson.loads(payload)
        # orjson makes a float of a whole number that has more than 64 bits.
        return json.loads(payload) if _LONG_NUMBER.search(payload) else data
    except (ValueError, RecursionError) as error:
        raise Reject(f"Payload is no JSON: {error}") from None


def _encode(data: Any) -> bytes:
    try:
        return encode_json(data)
    except InvalidEvent as error:
        try:
            # What orjson cannot write: whole numbers of more than 64 bits.
            return json.dumps(data, allow_nan=False).encode()
        except (TypeError, ValueError):
            raise Reject(f"What the upcasters made of the payload is no JSON: {error}") from error
