"""Payload objects to JSON bytes and back.

Refuses what JSON or a reader in another time zone would silently change: NaN, infinities and naive datetimes.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any

import orjson

from pillarbox.errors import InvalidEvent

JSON = "application/json"

_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_NON_STR_KEYS


def encode_json(value: object, *, what: str = "payload") -> bytes:
    """Encode `value` as JSON; `what` names it in errors."""
    try:
        encoded = orjson.dumps(value, default=_encode_other, option=_OPTIONS)
    except TypeError as error:
        raise InvalidEvent(f"{what}: cannot be encoded as JSON: {error.__cause__ or error}") from error
    # orjson writes NaN and infinities as null: only a document with a null can hide one.
    if b"null" in encoded:
        _refuse_nan(value, what)
    return encoded


def decode_json(text: bytes | str) -> Any:
    """Decode JSON text; raises `ValueError` when it is not JSON."""
    return orjson.loads(text)


def is_json(content_type: str) -> bool:
    """Whether a content type says that the bytes are JSON."""
    base = content_type.partition(";")[0].strip().lower()
    return base == JSON or base.endswith("+json")


def _encode_other(value: object) -> object:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidEvent(
                f"datetime {value!r} has no time zone; expected an aware datetime, e.g. datetime.now(UTC)"
            )
        return value.isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise InvalidEvent(f"{value!r} has no JSON form; expected a finite number")
        return str(value)
    if isinstance(value, set | frozenset):
        return list(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):  # pydantic
        return dump(mode="python")
    if hasattr(type(value), "__struct_fields__"):  # msgspec
        names: tuple[str, ...] = getattr(value, "__struct_fields__")  # noqa: B009 -- mypy does not know it
        return {name: getattr(value, name) for name in names}
    raise InvalidEvent(
        f"{type(value).__name__} has no JSON form; expected a dict, list, dataclass, pydantic model, "
        "msgspec struct, str, number, bool, None, UUID, Decimal or aware datetime"
    )


def _refuse_nan(value: object, what: str) -> None:
    def plain(other: object) -> object:
        if isinstance(other, Enum):
            return other.value
        if dataclasses.is_dataclass(other) and not isinstance(other, type):
            return {field.name: getattr(other, field.name) for field in dataclasses.fields(other)}
        try:
            return _encode_other(other)
        except InvalidEvent:
            return str(other)

    def named(other: object) -> object:
        # The standard library refuses keys that orjson writes as text, such as a UUID.
        if isinstance(other, dict):
            return [[named(key), named(item)] for key, item in other.items()]
        if isinstance(other, list | tuple):
            return [named(item) for item in other]
        return other

    try:
        try:
            json.dumps(value, allow_nan=False, default=plain)
        except TypeError:
            json.dumps(named(value), allow_nan=False, default=lambda other: named(plain(other)))
    except ValueError as error:
        raise InvalidEvent(f"{what}: NaN and infinities have no JSON form; expected finite numbers") from error
