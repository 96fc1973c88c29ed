"""From an event's payload to the type that a handler's annotation names.

Decoding is left to the libraries: msgspec for its structs, pydantic for its models, either of them for dataclasses and
whatever else has a shape. A payload that does not fit is the message's fault: it is rejected, never tried again.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, get_origin

import orjson

from pillarbox.codec import is_json
from pillarbox.errors import MissingExtra, Reject
from pillarbox.event import Claim, Event

Load = Callable[[Claim, "Data"], Any]
"""Makes a handler's argument of a claim."""

T = TypeVar("T")
_PLAIN: Final = (inspect.Parameter.empty, Any, object, dict, list, Mapping)


class Data:
    """The JSON of an event, brought to its newest version; decoded when it is first needed."""

    def __init__(self, event: Event, upcast: Callable[[Event, Any], Any] | None) -> None:
        self._event = event
        self._upcast = upcast

    @property
    def raw(self) -> bytes | None:
        """The bytes as they are, where no older version has to be brought up to date."""
        self._check()
        return self._event.payload if self._upcast is None else None

    def decode(self) -> Any:
        self._check()
        try:
            data = orjson.loads(self._event.payload)
        except orjson.JSONDecodeError as error:
            raise Reject(f"Payload is no JSON: {error}") from error
        return data if self._upcast is None else self._upcast(self._event, data)

    def _check(self) -> None:
        if not is_json(self._event.content_type):
            raise Reject(f"Payload is {self._event.content_type}; expected JSON, or a handler that takes bytes")


def make_loader(annotation: Any) -> Load:
    """How the argument with this annotation is made."""
    if annotation is Event:
        return lambda claim, data: claim.event
    if annotation is Claim:
        return lambda claim, data: claim
    if annotation is bytes:
        return lambda claim, data: claim.event.payload
    if annotation is str:
        return lambda claim, data: _decode_text(claim.event.payload)
    if annotation in _PLAIN or _is_loose(annotation):
        return lambda claim, data: data.decode()
    decode, convert = _find_library(annotation)

    def load(claim: Claim, data: Data) -> Any:
        raw = data.raw
        value = data.decode() if raw is None else None
        try:
            return convert(value) if raw is None else decode(raw)
        except ValueError as error:
            # Both libraries' errors are ValueErrors; the first lines say what is wrong with which field.
            raise Reject(f"Payload does not fit {_name(annotation)}: {error}") from error

    return load


def _decode_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise Reject(f"Payload is no UTF-8 text: {error}") from error


def _is_loose(annotation: Any) -> bool:
    arguments = getattr(annotation, "__args__", ())
    return get_origin(annotation) in (dict, list, Mapping) and all(each in (str, Any, object) for each in arguments)


def _find_library(annotation: Any) -> tuple[Callable[[bytes], Any], Callable[[Any], Any]]:
    pydantic, msgspec = _import("pydantic"), _import("msgspec")
    is_class = inspect.isclass(annotation)
    is_model = pydantic is not None and is_class and issubclass(annotation, pydantic.BaseModel)
    if msgspec is not None and not is_model:
        decoder = msgspec.json.Decoder(annotation)
        return decoder.decode, lambda value: msgspec.convert(value, annotation, strict=True, builtin_types=())
    if pydantic is not None:
        adapter = pydantic.TypeAdapter(annotation)
        return adapter.validate_json, adapter.validate_python
    raise MissingExtra(f"Typed payloads ({_name(annotation)})", "msgspec")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _name(annotation: Any) -> str:
    return getattr(annotation, "__qualname__", None) or str(annotation)
