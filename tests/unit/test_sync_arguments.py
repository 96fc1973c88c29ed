"""The arguments of a queued statement: what is stored for each kind of value, and what is refused."""

from __future__ import annotations

import json
import math
from collections import UserList
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.errors import QueueError
from pillarbox.sync.arguments import decode_arguments, encode_arguments


class Color(str, Enum):  # noqa: UP042 -- its str() is not its content
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Plain(Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, "null"),
        (True, "true"),
        (0, "0"),
        (-(2**63), "-9223372036854775808"),
        (2**63 - 1, "9223372036854775807"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        ("", '""'),
        ("grüße 'you' \"too\" 😀", '"grüße \'you\' \\"too\\" 😀"'),
        ("a\0b", '"a\\u0000b"'),
        ([1, [None, "x"]], '[1,[null,"x"]]'),
        ((1, 2), "[1,2]"),
        ({"a": {"b": [1.5]}}, '{"a":{"b":[1.5]}}'),
        (datetime(2026, 1, 2, 3, 4, 5, 6), '"2026-01-02T03:04:05.000006"'),  # noqa: DTZ001 -- columns without a zone exist
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), '"2026-01-02T03:04:05+00:00"'),
        (datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=-5))), '"2026-01-02T03:00:00-05:00"'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (time(3, 4, 5), '"03:04:05"'),
        (Decimal("12.340"), '"12.340"'),
        (UUID("12345678-1234-5678-1234-567812345678"), '"12345678-1234-5678-1234-567812345678"'),
        (b"\x00\xff", '{"$base64":"AP8="}'),
        (bytearray(b"hi"), '{"$base64":"aGk="}'),
        (memoryview(b"hi"), '{"$base64":"aGk="}'),
        (b"", '{"$base64":""}'),
        (Color.RED, '"red"'),
        (Level.HIGH, "3"),
        ({"when": date(2026, 1, 2), "how": [Decimal("1.5")]}, '{"when":"2026-01-02","how":["1.5"]}'),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0][:40],
)
def test_value_is_stored_as_json(value: object, stored: str) -> None:
    assert encode_arguments([value]) == f"[{stored}]"
    assert encode_arguments((1, value)) == f"[1,{stored}]"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "nan has no JSON form"),
        (math.inf, "inf has no JSON form"),
        (-math.inf, "-inf has no JSON form"),
        ([1, {"a": math.nan}], "nan has no JSON form"),
        (Decimal("NaN"), "has no JSON form"),
        (Decimal("-Infinity"), "has no JSON form"),
        (2**63, "9223372036854775808 does not fit into 64 bits"),
        (-(2**63) - 1, "-9223372036854775809 does not fit into 64 bits"),
        ([2**64], "does not fit into 64 bits"),
        ("lone \ud800", "surrogates"),
        ({"\udfff": 1}, "surrogates"),
        ({1: 2}, "the dict's key 1 is not text"),
        ([b"x"], "builtins.bytes has no JSON form"),
        ({"a": b"x"}, "builtins.bytes has no JSON form"),
        ({"$base64": "aGk="}, "is how bytes are stored"),
        ({1, 2}, "builtins.set has no JSON form"),
        (object(), "builtins.object has no JSON form"),
        (1j, "builtins.complex has no JSON form"),
        (Plain.ONE, "Plain has no JSON form"),
        (timedelta(1), "datetime.timedelta has no JSON form"),
    ],
    ids=lambda value: ascii(value).partition(" at 0x")[0][:40],
)
def test_value_that_json_would_change_is_refused_by_its_position(value: object, problem: str) -> None:
    with pytest.raises(QueueError) as caught:
        encode_arguments(["first", value, "third"])
    assert str(caught.value).startswith("Argument 2 of 3: ")
    assert problem in str(caught.value)
    assert str(caught.value).endswith("Nothing was stored.")


def test_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(QueueError, match=r"Argument 1 of 1: this list contains itself"):
        encode_arguments([loop])


@pytest.mark.parametrize(
    "args", ["text", b"bytes", {"a": 1}, 5, None, {1, 2}, iter([1])], ids=lambda args: repr(args).partition(" ")[0][:12]
)
def test_arguments_that_are_not_in_a_list_are_refused(args: Any) -> None:
    with pytest.raises(QueueError, match="expected a list or tuple"):
        encode_arguments(args)


def test_any_sequence_of_arguments_is_a_list() -> None:
    assert encode_arguments(UserList([1, "a"])) == '[1,"a"]'
    assert encode_arguments(()) == "[]"


def test_bytes_come_back_as_bytes_and_only_where_they_are_an_argument() -> None:
    assert decode_arguments('[{"$base64": "AP8="}, {"$base64": "aGk=", "more": 1}, [{"$base64": "aGk="}]]') == [
        b"\x00\xff",
        {"$base64": "aGk=", "more": 1},
        [{"$base64": "aGk="}],
    ]


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[1,", "{}", '"text"', "12", "null", "[NaN]", '["\\ud800"]', '[{"$base64": "!"}]', b"\xff"]
)
def test_payload_that_is_no_list_of_values_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^The arguments "):
        decode_arguments(text)


def test_integer_of_any_length_is_read_exactly() -> None:
    assert decode_arguments("[123456789012345678901234567890, [18446744073709551617], 9223372036854775807]") == [
        123456789012345678901234567890,
        [18446744073709551617],
        9223372036854775807,
    ]


_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
_values = st.recursive(_leaves, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=8)


@given(st.lists(_values | st.binary()))
def test_what_was_encoded_is_decoded_alike_by_us_and_by_sqloutbox(args: list[Any]) -> None:
    if any(isinstance(value, dict) and set(value) == {"$base64"} for value in args):
        return
    text = encode_arguments(args)
    assert decode_arguments(text) == args
    plain = [value for value in args if not isinstance(value, bytes)]
    assert [value for value in json.loads(text) if not (isinstance(value, dict) and set(value) == {"$base64"})] == plain
