from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.codec import decode_json, encode_json, is_json
from pillarbox.errors import InvalidEvent

ID = UUID("0190a8a0-7b1c-7000-8000-000000000001")
NAN = float("nan")


@dataclass
class Line:
    sku: str
    price: float | None


class Order(pydantic.BaseModel):
    total: Decimal
    placed_at: datetime | None = None


class Parcel(msgspec.Struct):
    weight: float
    placed_at: datetime | None = None


class Colour(Enum):
    RED = "red"
    VOID = NAN


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, b"null"),
        ("Grüße", '"Grüße"'.encode()),
        ({"a": [1, 2.5, True, None]}, b'{"a":[1,2.5,true,null]}'),
        ((1, 2), b"[1,2]"),
        ({3: "int key"}, b'{"3":"int key"}'),
        (ID, b'"0190a8a0-7b1c-7000-8000-000000000001"'),
        (Decimal("10.10"), b'"10.10"'),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), b'"2026-01-02T03:04:05+00:00"'),
        (datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2))), b'"2026-01-02T00:00:00+02:00"'),
        (date(2026, 1, 2), b'"2026-01-02"'),
        (time(3, 4), b'"03:04:00"'),
        ({7}, b"[7]"),
        (frozenset(["x"]), b'["x"]'),
        (Line("a", 1.5), b'{"sku":"a","price":1.5}'),
        (Line("a", None), b'{"sku":"a","price":null}'),
        (Order(total=Decimal("1.50")), b'{"total":"1.50","placed_at":null}'),
        ([Parcel(0.5)], b'[{"weight":0.5,"placed_at":null}]'),
        (Colour.RED, b'"red"'),
        ({ID: None}, b'{"0190a8a0-7b1c-7000-8000-000000000001":null}'),
    ],
    ids=repr,
)
def test_object_becomes_json(value, expected):
    assert encode_json(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        NAN,
        float("inf"),
        {"deep": [{"er": -float("inf")}]},
        {ID: NAN},
        {date(2026, 1, 2): [NAN]},
        {NAN: 1},
        Line("a", NAN),
        [Line("a", NAN)],
        [Parcel(NAN)],
        {ID: Parcel(NAN)},
        Colour.VOID,
        {Colour.RED: Colour.VOID},
    ],
    ids=repr,
)
def test_nan_and_infinity_are_refused_wherever_they_hide(value):
    with pytest.raises(InvalidEvent, match=r"^payload: NaN and infinities have no JSON form"):
        encode_json(value)


def test_text_null_is_not_taken_for_nan():
    assert encode_json({"note": "null and void", "none": None}) == b'{"note":"null and void","none":null}'


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 2),  # noqa: DTZ001
        {"at": [datetime(2026, 1, 2)]},  # noqa: DTZ001
        Order(total=Decimal(1), placed_at=datetime(2026, 1, 2)),  # noqa: DTZ001
        Parcel(1, datetime(2026, 1, 2)),  # noqa: DTZ001
    ],
    ids=lambda value: type(value).__name__,
)
def test_naive_datetime_is_refused(value):
    with pytest.raises(InvalidEvent, match=r"has no time zone; expected an aware datetime"):
        encode_json(value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "object has no JSON form; expected a dict, list"),
        ({"raw": b"bytes"}, "bytes has no JSON form"),
        ([timedelta(1)], "timedelta has no JSON form"),
        (Decimal("NaN"), r"Decimal\('NaN'\) has no JSON form; expected a finite number"),
        (2**64, "Integer exceeds 64-bit range"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_value_without_a_json_form_is_refused_by_name(value, reason):
    with pytest.raises(InvalidEvent, match=rf"^headers: cannot be encoded as JSON: .*{reason}"):
        encode_json(value, what="headers")


def test_endless_object_is_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidEvent, match="cannot be encoded as JSON"):
        encode_json(endless)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_json_value_survives_the_way_there_and_back(value):
    encoded = encode_json(value)
    assert json.loads(encoded) == value
    assert decode_json(encoded) == value
    assert decode_json(encoded.decode()) == value


@pytest.mark.parametrize("text", [b"", b"{", b"NaN", b"\xff", "nope", b"[1,]"])
def test_what_is_not_json_raises_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011
        decode_json(text)


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/cloudevents+json", True),
        ("application/json-patch", False),
        ("application/octet-stream", False),
        ("text/plain", False),
        ("", False),
    ],
)
def test_content_type_says_whether_bytes_are_json(content_type, expected):
    assert is_json(content_type) is expected
