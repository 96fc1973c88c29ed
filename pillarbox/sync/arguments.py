"""The arguments of a queued statement: a JSON list, as sqloutbox writes and reads it.

What JSON would change silently is refused before anything is stored: NaN, infinities, integers that no database
holds, text that is no Unicode. Bytes travel as `{"$base64": "…"}`; dates, decimals and UUIDs as text.

A datetime keeps its offset, and no text suits the columns of every database. Push for PostgreSQL's `timestamptz` and
for SQLite an aware one, for `timestamp` a naive one, since an offset is ignored there. MySQL turns an aware one into
UTC and takes a naive one for UTC; MariaDB takes naive ones alone: `value.astimezone(UTC).replace(tzinfo=None)`.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from types import NoneType
from typing import Any, Final
from uuid import UUID

import orjson

from pillarbox.errors import QueueError

BYTES_KEY: Final = "$base64"

_MIN, _MAX = -(2**63), 2**63 - 1
_AS_THEY_ARE: Final = frozenset({str, bool, NoneType})
_EXPECTED: Final = (
    "None, bool, an integer of 64 bits, a finite float, str, bytes, datetime, date, time, Decimal, UUID, "
    "or a list or dict of them"
)
# orjson reads an integer that is too long for 64 bits as a float.
_LONG_NUMBER: Final = re.compile(r"\d{19}")


def encode_arguments(args: Sequence[Any]) -> str:
    """Encode the arguments of one statement; raises `QueueError` naming the argument that has no JSON form."""
    kind = type(args)
    if kind is not list and kind is not tuple:
        args = _as_list(args)
    for value in args:
        kind = type(value)
        if kind in _AS_THEY_ARE or (kind is int and _MIN <= value <= _MAX) or (kind is float and math.isfinite(value)):
            continue
        args = [_encode_argument(value, f"Argument {place} of {len(args)}") for place, value in enumerate(args, 1)]
        break
    try:
        return orjson.dumps(args).decode()
    except TypeError as error:
        raise _refuse_text(args) from error


def decode_arguments(text: str | bytes) -> list[Any]:
    """Decode what `encode_arguments` or sqloutbox wrote; raises `ValueError` when it is not a JSON list."""
    try:
        found = orjson.loads(text)
        if _LONG_NUMBER.search(text if isinstance(text, str) else text.decode()):
            found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"The arguments are not JSON: {error}. Expected a list of values; got {_shorten(text)}"
        ) from None
    if not isinstance(found, list):
        kind = type(found).__name__
        raise ValueError(f"The arguments are a JSON {kind}. Expected a list of values; got {_shorten(text)}")
    return [_decode_bytes(value) if type(value) is dict and BYTES_KEY in value else value for value in found]


def _as_list(args: object) -> list[Any]:
    if isinstance(args, str | bytes | bytearray | Mapping) or not isinstance(args, Sequence):
        raise QueueError(
            f"The arguments of a statement are given by position: expected a list or tuple, one value for each '?'; "
            f"got {type(args).__name__}. Nothing was stored."
        )
    return list(args)


def _encode_argument(value: object, where: str) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES_KEY: b64encode(value).decode()}
    if isinstance(value, dict) and set(value) == {BYTES_KEY}:
        raise _refuse(where, f"a dict with the only key {BYTES_KEY!r} is how bytes are stored", "pass bytes or text")
    try:
        return _plain(value, where)
    except RecursionError:
        raise _refuse(where, f"this {type(value).__name__} contains itself or is nested too deeply") from None


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, bool):
        return value
    # The content of an enumeration's member or of another subclass, whatever its __str__ says.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if not _MIN <= value <= _MAX:
            raise _refuse(where, f"{_shorten(repr(int(value)))} does not fit into 64 bits", "pass it as text")
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refuse(where, f"{float(value)!r} has no JSON form", "pass None or text")
        return float.__float__(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise _refuse(where, f"{value!r} has no JSON form", "pass None or text")
        return str(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each, where) for each in value]
    if isinstance(value, dict):
        return {_key(key, where): _plain(each, where) for key, each in value.items()}
    raise _refuse(
        where, f"{type(value).__module__}.{type(value).__qualname__} has no JSON form", f"expected {_EXPECTED}"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise _refuse(where, f"the dict's key {key!r} is not text", "use str keys")
    return str.__str__(key)


def _decode_bytes(value: dict[str, Any]) -> object:
    text = value[BYTES_KEY]
    if len(value) != 1 or not isinstance(text, str):
        return value
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"The arguments hold bytes that are not base64: {error}; got {_shorten(text)}") from None


def _refuse_text(args: Sequence[object]) -> QueueError:
    for place, value in enumerate(args, 1):
        try:
            orjson.dumps(value)
        except TypeError as error:
            return _refuse(f"Argument {place} of {len(args)}", str(error), "pass text without lone surrogates")
    return _refuse("The arguments", "they have no JSON form")


def _refuse(where: str, problem: str, hint: str = "") -> QueueError:
    return QueueError(f"{where}: {problem}{'; ' if hint else ''}{hint}. Nothing was stored.")


def _shorten(text: object) -> str:
    shown = repr(text) if not isinstance(text, str) else text
    return shown if len(shown) <= 80 else f"{shown[:77]}…"
