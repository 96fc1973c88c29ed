"""Older payloads reach a handler as its newest version, exactly as if they had been put so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar
from uuid import UUID

import msgspec
import orjson
import pydantic
import pytest

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Claim, Event
from pillarbox.handlers import Handlers
from pillarbox.handlers.payloads import Data, make_loader


def note(version: object) -> Callable[[Any], Any]:
    """An upcaster that writes down the version it leads to."""
    return lambda order: {**order, "steps": [*order.get("steps", []), version]}


def load(handlers: Handlers, annotation: Any, event: Event) -> Any:
    data = Data(event, handlers.upcasters.find(event))
    return make_loader(annotation)(Claim(1, event, attempt=1), data)


def steps(handlers: Handlers, version: str | int | None, *, type: str = "order.placed") -> Any:
    return load(handlers, dict, Event(type, {}, schema_version=version)).get("steps", [])


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


# -- which steps are taken ------------------------------------------------------------------------------------------


def test_payload_takes_one_step_after_the_other_from_its_own_version(handlers: Handlers) -> None:
    handlers.upcast("order.placed", 2, 3)(note(3))
    handlers.upcast("order.placed", 1, 2)(note(2))
    handlers.upcast("order.placed", None, 1)(note(1))
    assert steps(handlers, None) == [1, 2, 3]
    assert steps(handlers, 1) == [2, 3]
    assert steps(handlers, 2) == [3]
    assert steps(handlers, 3) == []


def test_versions_are_compared_as_text(handlers: Handlers) -> None:
    handlers.upcast("order.placed", "1", 2)(note("2"))
    handlers.upcast("order.placed", 2, "2024-01")(note("2024-01"))
    assert steps(handlers, 1) == steps(handlers, "1") == ["2", "2024-01"]
    assert steps(handlers, "1.0") == []


def test_version_that_no_step_leads_on_from_passes_as_it_is(handlers: Handlers) -> None:
    handlers.upcast("order.placed", 1, 2)(note(2))
    handlers.upcast("order.placed", 3, 4)(note(4))
    assert steps(handlers, 5) == []
    assert steps(handlers, None) == []
    assert steps(handlers, 1) == [2]


def test_other_types_are_left_alone(handlers: Handlers) -> None:
    handlers.upcast("order.placed", None, 1)(note(1))
    assert steps(handlers, None, type="order.packed") == []


def test_type_may_be_a_class(handlers: Handlers) -> None:
    class Placed:
        event_type: ClassVar[str] = "order.placed"

    handlers.upcast(Placed, None, 1)(note(1))
    assert steps(handlers, None) == [1]


def test_up_to_date_payload_is_not_decoded_twice(handlers: Handlers) -> None:
    handlers.upcast("order.placed", 1, 2)(note(2))
    assert handlers.upcasters.find(Event("order.placed", {}, schema_version=2)) is None
    event = Event("order.placed", b'{ "a": 1.0 }', content_type="application/json", schema_version=2)
    assert Data(event, handlers.upcasters.find(event)).encode() is event.payload


@pytest.mark.parametrize("annotation", [bytes, str, Event])
def test_handler_of_raw_payloads_gets_them_as_they_were_put(handlers: Handlers, annotation: Any) -> None:
    handlers.upcast("order.placed", None, 1)(note(1))
    event = Event("order.placed", b"{}", content_type="application/json")
    expected: dict[Any, object] = {bytes: b"{}", str: "{}", Event: event}
    assert load(handlers, annotation, event) == expected[annotation]


# -- refused at registration ----------------------------------------------------------------------------------------


def test_second_step_from_one_version_is_refused(handlers: Handlers) -> None:
    handlers.upcast("order.placed", 1, 2)(note(2))
    with pytest.raises(ConfigError, match=r"Upcaster of 'order.placed': there is one from version '1' already, to '2'"):
        handlers.upcast("order.placed", "1", 3)(note(3))
    assert steps(handlers, 1) == [2]


@pytest.mark.parametrize("last", [(3, 1), (3, 2), (3, 3)])
def test_circle_is_refused_and_leaves_what_was_there(handlers: Handlers, last: tuple[int, int]) -> None:
    handlers.upcast("order.placed", 1, 2)(note(2))
    handlers.upcast("order.placed", 2, 3)(note(3))
    with pytest.raises(ConfigError, match=rf"from '3' to '{last[1]}' would lead round in a circle"):
        handlers.upcast("order.placed", *last)(note(0))
    assert steps(handlers, 1) == [2, 3]


@pytest.mark.parametrize("version", ["", True, 1.0, b"1", "x" * 51])
def test_bad_version_is_refused(handlers: Handlers, version: Any) -> None:
    for old, new in ((version, 2), (1, version)):
        with pytest.raises(ConfigError, match=r"Upcaster of 'order.placed': expected a version that is text"):
            handlers.upcast("order.placed", old, new)(note(2))


def test_step_to_no_version_is_refused(handlers: Handlers) -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"expected a version .* got None"):
        handlers.upcast("order.placed", 1, nothing)(note(2))


@pytest.mark.parametrize("type", ["", 7, None, "order.*"])
def test_bad_type_is_refused(handlers: Handlers, type: Any) -> None:
    with pytest.raises(ConfigError, match="Upcaster: expected "):
        handlers.upcast(type, 1, 2)(note(2))


async def upcast_async(order: Any) -> Any:
    return order


def generate(order: Any) -> Any:
    yield order


@pytest.mark.parametrize("function", [upcast_async, generate, dict, None], ids=["async", "generator", "class", "None"])
def test_function_that_does_not_return_the_payload_is_refused(handlers: Handlers, function: Any) -> None:
    with pytest.raises(ConfigError, match="expected a plain function that returns the newer payload"):
        handlers.upcast("order.placed", 1, 2)(function)
    assert handlers.upcasters.find(Event("order.placed", {}, schema_version=1)) is None


# -- what goes wrong ------------------------------------------------------------------------------------------------


@dataclass
class Counted:
    count: int


@pytest.mark.parametrize("annotation", [dict, Counted])
def test_upcaster_that_fails_rejects_the_event_with_both_versions(handlers: Handlers, annotation: Any) -> None:
    handlers.upcast("order.placed", 1, 2)(note(2))
    handlers.upcast("order.placed", 2, 3)(lambda order: order["total"])
    event = Event("order.placed", {}, schema_version=1)
    with pytest.raises(Reject) as caught:
        load(handlers, annotation, event)
    assert str(caught.value) == "Payload of version '2' cannot be brought to version '3': KeyError: 'total'"


def test_upcaster_that_forgets_to_return_rejects_the_event(handlers: Handlers) -> None:
    @handlers.upcast("order.placed", None, 2)
    def rename(order: dict[str, Any]) -> None:
        order["count"] = order.pop("amount")

    with pytest.raises(Reject, match=r"Payload of version None cannot be brought to version '2': .* returned None"):
        load(handlers, dict, Event("order.placed", {"amount": 7}))
    handlers.upcast("order.gone", None, 1)(lambda order: order)
    assert load(handlers, Any, Event("order.gone", None)) is None


def test_result_that_does_not_fit_rejects_the_event(handlers: Handlers) -> None:
    handlers.upcast("order.placed", 1, 2)(lambda order: {"count": "seven"})
    with pytest.raises(Reject, match="Payload does not fit Counted: Expected `int`, got `str`"):
        load(handlers, Counted, Event("order.placed", {}, schema_version=1))


def test_result_without_a_json_form_rejects_the_event(handlers: Handlers) -> None:
    handlers.upcast("order.placed", 1, 2)(lambda order: {"count": object()})
    with pytest.raises(Reject, match=r"What the upcasters made of the payload is no JSON: .*object has no JSON form"):
        load(handlers, Counted, Event("order.placed", {}, schema_version=1))


@pytest.mark.parametrize(
    ("payload", "content_type", "reason"),
    [(b"{", "application/json", "Payload is no JSON"), (b"{}", "text/plain", "Payload is text/plain; expected JSON")],
)
def test_payload_that_is_no_json_is_rejected(
    handlers: Handlers, payload: bytes, content_type: str, reason: str
) -> None:
    handlers.upcast("order.placed", 1, 2)(note(2))
    for annotation in (dict, Counted):
        with pytest.raises(Reject, match=reason):
            load(handlers, annotation, Event("order.placed", payload, content_type=content_type, schema_version=1))


# -- typed after the last step --------------------------------------------------------------------------------------


class Color(Enum):
    RED = "red"


class Size(Enum):
    SMALL = 2


@dataclass
class Item:
    sku: str
    price: Decimal
    tags: set[str] = field(default_factory=set)


@dataclass
class Order:
    id: UUID
    at: datetime
    day: date
    wait: timedelta
    total: Decimal
    rough: Decimal
    body: bytes
    colors: list[Color]
    size: Size
    item: Item
    counts: dict[int, Item]
    pair: tuple[int, str]
    weight: float
    number: int
    either: int | str | None
    big: int


class OrderStruct(msgspec.Struct):
    id: UUID
    at: datetime
    day: date
    wait: timedelta
    total: Decimal
    rough: Decimal
    body: bytes
    colors: list[Color]
    size: Size
    item: Item
    counts: dict[int, Item]
    pair: tuple[int, str]
    weight: float
    number: int
    either: int | str | None
    big: int


class OrderModel(pydantic.BaseModel):
    id: UUID
    at: datetime
    day: date
    wait: timedelta
    total: Decimal
    rough: Decimal
    body: bytes
    colors: list[Color]
    size: Size
    item: Item
    counts: dict[int, Item]
    pair: tuple[int, str]
    weight: float
    number: int
    either: int | str | None
    big: int


class StrictModel(OrderModel):
    model_config = pydantic.ConfigDict(strict=True)


RAW = (
    b'{"id":"01a1e115-f0c5-76c2-926d-204b6e3d11d7","at":"2026-01-31T12:30:00.123456+02:00","day":"2026-01-31",'
    b'"wait":"PT1M30S","total":"9.90","rough":0.1,"body":"aGVsbG8=","colors":["red"],"size":2,'
    b'"item":{"sku":"pen","price":"1.10","tags":["a","b"]},"counts":{"7":{"sku":"ink","price":2}},"pair":[1,"a"],'
    b'"weight":3,"number":9007199254740993,"either":null,"big":%d}'
)


@pytest.mark.parametrize("big", [7, 123456789012345678901234567890], ids=["small", "big"])
@pytest.mark.parametrize("annotation", [Order, OrderStruct, OrderModel, StrictModel])
def test_upcast_payload_is_read_as_if_it_had_been_put_so(handlers: Handlers, annotation: Any, big: int) -> None:
    handlers.upcast("order.placed", 1, 2)(lambda order: order)
    raw = RAW % big
    old = load(handlers, annotation, Event("order.placed", raw, content_type="application/json", schema_version=1))
    new = load(handlers, annotation, Event("order.placed", raw, content_type="application/json", schema_version=2))
    assert old == new
    assert (old.at, old.wait) == (datetime(2026, 1, 31, 10, 30, 0, 123456, tzinfo=UTC), timedelta(seconds=90))
    assert (old.total, old.rough, old.item.tags) == (Decimal("9.90"), Decimal("0.1"), {"a", "b"})
    assert (old.colors, old.size, old.counts) == ([Color.RED], Size.SMALL, {7: Item("ink", Decimal(2))})
    assert (old.number, old.big) == (9007199254740993, big)
    assert (type(old.weight), old.pair) == (float, (1, "a"))


@pytest.mark.parametrize(
    "raw",
    [b'{"count":"7"}', b'{"count":7.0}', b'{"count":true}', b'{"count":null}', b"{}", b"[7]", b'{"count":7.5}'],
    ids=bytes.decode,
)
def test_upcast_payload_is_refused_exactly_where_the_newest_would_be(handlers: Handlers, raw: bytes) -> None:
    class Model(pydantic.BaseModel):
        count: int

    class Struct(msgspec.Struct):
        count: int

    handlers.upcast("order.placed", 1, 2)(lambda order: order)
    for annotation in (Counted, Model, Struct):
        found = []
        for version in (1, 2):
            event = Event("order.placed", raw, content_type="application/json", schema_version=version)
            try:
                found.append(load(handlers, annotation, event))
            except Reject as verdict:
                found.append(str(verdict))
        assert found[0] == found[1]


def test_upcaster_may_return_values_that_an_event_could_be_put_with(handlers: Handlers) -> None:
    item = Item("pen", Decimal("1.10"), {"a"})
    handlers.upcast("order.placed", 1, 2)(lambda order: item)
    assert load(handlers, Item, Event("order.placed", {}, schema_version=1)) == item


def test_upcaster_sees_plain_json(handlers: Handlers) -> None:
    seen = []

    @handlers.upcast("order.placed", 1, 2)
    def keep(order: Any) -> Any:
        seen.append(order)
        return order

    load(
        handlers, Any, Event("order.placed", b'{"a":[1,2.5,"x",null,true]}', content_type="a/b+json", schema_version=1)
    )
    assert seen == [orjson.loads(b'{"a":[1,2.5,"x",null,true]}')]
