"""From an event's bytes to the type that a handler's parameter names, or a rejection that says why not."""

from __future__ import annotations

import inspect
import ipaddress
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypeAliasType

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Claim, Event
from pillarbox.handlers.payloads import Data, make_loader

JSON = "application/json"
ID = UUID("01a1e115-f0c5-76c2-926d-204b6e3d11d7")
AT = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)


def load(annotation: Any, payload: object, *, content_type: str | None = JSON) -> Any:
    event = Event("order.placed", payload, content_type=content_type)
    return make_loader(annotation)(Claim(1, event, attempt=1), Data(event, None))


def refusal(annotation: Any, payload: object) -> str:
    with pytest.raises(Reject) as caught:
        load(annotation, payload)
    return str(caught.value)


class Color(Enum):
    RED = "red"


@dataclass
class Item:
    sku: str
    count: int


@dataclass
class Order:
    id: UUID
    at: datetime
    total: Decimal
    color: Color
    items: list[Item]
    weight: float = 0.0
    note: str | None = None


class OrderModel(pydantic.BaseModel):
    id: UUID
    at: datetime
    total: Decimal
    color: Color
    items: list[Item]
    weight: float = 0.0
    note: str | None = None


class OrderStruct(msgspec.Struct):
    id: UUID
    at: datetime
    total: Decimal
    color: Color
    items: list[Item]
    weight: float = 0.0
    note: str | None = None


@pydantic_dataclass
class OrderChecked:
    id: UUID
    at: datetime
    total: Decimal
    color: Color
    items: list[Item]
    weight: float = 0.0
    note: str | None = None


RAW = (
    b'{"id":"01a1e115-f0c5-76c2-926d-204b6e3d11d7","at":"2026-01-31T12:30:00Z","total":"9.90","color":"red",'
    b'"items":[{"sku":"pen","count":2}],"weight":3}'
)
ORDERS = [Order, OrderModel, OrderStruct, OrderChecked]


# -- as they are ----------------------------------------------------------------------------------------------------


def test_event_and_claim_are_given_as_they_are() -> None:
    event = Event("order.placed", b"\xff", content_type="avro/binary")
    claim = Claim(1, event, attempt=1)
    for annotation in (Event, Event | None, Annotated[Event, "whole"]):
        assert make_loader(annotation)(claim, Data(event, None)) is event
    assert make_loader(Claim)(claim, Data(event, None)) is claim


@pytest.mark.parametrize("annotation", [bytes, Optional[bytes], Annotated[bytes, "raw"], NewType("Raw", bytes)])  # noqa: UP045
def test_bytes_are_the_payload_itself_whatever_its_content_type(annotation: Any) -> None:
    assert load(annotation, b"\xff\x00", content_type="avro/binary") == b"\xff\x00"
    assert load(annotation, b'{"id": 7}') == b'{"id": 7}'


def test_alias_of_a_type_is_that_type() -> None:
    assert load(TypeAliasType("Raw", bytes), b"{}") == b"{}"
    assert load(TypeAliasType("Items", list[Item]), b'[{"sku":"pen","count":2}]') == [Item("pen", 2)]
    # By pydantic's own rules, as its types are.
    assert load(TypeAliasType("Positives", list[pydantic.PositiveInt]), b'["7"]') == [7]


@pytest.mark.parametrize("annotation", [str, str | None, NewType("Text", str)])
def test_text_is_the_payload_itself(annotation: Any) -> None:
    assert load(annotation, "grüße".encode(), content_type="text/plain") == "grüße"
    assert load(annotation, b'"quoted"') == '"quoted"'


def test_payload_that_is_no_text_is_rejected() -> None:
    assert refusal(str, b"\xff").startswith("Payload is no UTF-8 text: ")


# -- JSON without a shape -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [{"id": 7}, [1], "text", 7, 1.5, True, None])
def test_anything_may_come_where_anything_is_asked_for(payload: object) -> None:
    for annotation in (Any, object, inspect.Parameter.empty):
        assert load(annotation, payload) == payload


@pytest.mark.parametrize(
    "annotation",
    [dict, dict[str, Any], dict[str, object], Mapping, Mapping[str, Any], Annotated[dict[str, Any], "order"]],
)
def test_object_is_given_as_a_dict_and_nothing_else_passes(annotation: Any) -> None:
    assert load(annotation, b'{"id":7,"a":[null]}') == {"id": 7, "a": [None]}
    assert refusal(annotation, b"[1]").endswith("expected an object, got an array")
    assert refusal(annotation, b"null").endswith("expected an object, got null")
    assert refusal(annotation, b"7").endswith("expected an object, got a number")


@pytest.mark.parametrize("annotation", [list, list[Any], Sequence[Any]])
def test_array_is_given_as_a_list_and_nothing_else_passes(annotation: Any) -> None:
    assert load(annotation, b'[1,"a"]') == [1, "a"]
    assert refusal(annotation, b'{"id":7}').endswith("expected an array, got an object")
    assert refusal(annotation, b'"text"').endswith("expected an array, got text")
    assert refusal(annotation, b"true").endswith("expected an array, got a boolean")


def test_types_inside_containers_are_checked() -> None:
    assert load(dict[str, str], b'{"a":"b"}') == {"a": "b"}
    assert load(list[str], b'["a"]') == ["a"]
    assert "Expected `str`, got `int`" in refusal(dict[str, str], b'{"a":7}')
    assert "Expected `str`, got `int`" in refusal(list[str], b'["a",7]')


def test_each_reader_gets_values_of_its_own() -> None:
    event = Event("order.placed", {"items": []})
    data = Data(event, None)
    loader = make_loader(dict)
    loader(Claim(1, event, 1), data)["items"].append("changed")
    assert loader(Claim(1, event, 1), data) == {"items": []}


@pytest.mark.parametrize("annotation", [dict, Order, OrderModel, OrderStruct, Any])
@pytest.mark.parametrize("payload", [b"", b"{", b"order", b"\xef\xbb\xbf{}", b'{"weight":NaN}', b'{"weight":Infinity}'])
def test_payload_that_is_no_json_is_rejected(annotation: Any, payload: bytes) -> None:
    assert refusal(annotation, payload).startswith("Payload ")


class Weight(pydantic.BaseModel):
    kilos: float
    note: str = ""


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity"])
def test_words_for_numbers_that_json_lacks_are_rejected_but_fine_inside_text(word: bytes) -> None:
    assert refusal(Weight, b'{"kilos":%s}' % word).startswith("Payload does not fit Weight: ")
    assert refusal(dict[str, float], b'{"kilos":%s}' % word).startswith("Payload does not fit dict[str, float]: ")
    assert load(Weight, b'{"kilos":1,"note":"%s"}' % word).note == word.decode()


def test_payload_deeper_than_can_be_read_is_rejected() -> None:
    for annotation in (Any, list[list[Any]]):
        assert refusal(annotation, b"[" * 100_000 + b"]" * 100_000).startswith("Payload ")


@pytest.mark.parametrize("content_type", ["application/octet-stream", "text/plain", "avro/binary"])
@pytest.mark.parametrize("annotation", [dict, Order, Any])
def test_other_content_types_are_rejected_where_json_is_asked_for(annotation: Any, content_type: str) -> None:
    event = Event("order.placed", RAW, content_type=content_type)
    with pytest.raises(Reject, match=f"Payload is {content_type}; expected JSON, or a handler that takes bytes"):
        make_loader(annotation)(Claim(1, event, 1), Data(event, None))


@pytest.mark.parametrize("content_type", ["application/cloudevents+json", "application/json; charset=utf-8"])
def test_content_types_that_are_json_are_read(content_type: str) -> None:
    assert load(dict, RAW, content_type=content_type)["color"] == "red"
    assert load(Order, RAW, content_type=content_type).color is Color.RED


BIG = 123456789012345678901234567890


def test_whole_numbers_of_any_size_are_exact() -> None:
    class Big(pydantic.BaseModel):
        count: int

    raw = b'{"count":123456789012345678901234567890}'
    assert load(dict, raw) == {"count": BIG}
    assert load(dict[str, int], raw) == {"count": BIG}
    assert load(Big, raw).count == BIG
    assert load(list, b"[18446744073709551616]") == [2**64]
    assert load(list, b"[-9223372036854775809]") == [-(2**63) - 1]


# -- types ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotation", ORDERS)
def test_fields_become_what_they_are_declared_as(annotation: Any) -> None:
    order = load(annotation, RAW)
    assert type(order) is annotation
    assert (order.id, order.at, order.total, order.color) == (ID, AT, Decimal("9.90"), Color.RED)
    assert (order.items, order.note) == ([Item("pen", 2)], None)
    assert (order.weight, type(order.weight)) == (3.0, float)


@pytest.mark.parametrize("annotation", ORDERS)
def test_what_an_event_encodes_a_handler_decodes(annotation: Any) -> None:
    order = annotation(ID, AT, Decimal("9.90"), Color.RED, [Item("pen", 2)]) if annotation is not OrderModel else None
    order = order or OrderModel(id=ID, at=AT, total=Decimal("9.90"), color=Color.RED, items=[Item("pen", 2)])
    assert load(annotation, order, content_type=None) == order


class Row(NamedTuple):
    sku: str
    amount: int


class Loose(TypedDict):
    sku: str
    count: NotRequired[int]


class Times(msgspec.Struct):
    day: date
    wait: timedelta


T = TypeVar("T")


@dataclass
class Page(Generic[T]):
    items: list[T]


@pytest.mark.parametrize(
    ("annotation", "raw", "expected"),
    [
        (Loose, b'{"sku":"pen","unknown":1}', {"sku": "pen"}),
        (Row, b'["pen",2]', Row("pen", 2)),
        (list[Item], b'[{"sku":"pen","count":2}]', [Item("pen", 2)]),
        (dict[str, Item], b'{"a":{"sku":"pen","count":2}}', {"a": Item("pen", 2)}),
        (dict[int, str], b'{"7":"pen"}', {7: "pen"}),
        (Item | None, b"null", None),
        (Item | None, b'{"sku":"pen","count":2}', Item("pen", 2)),
        (Optional[Item], b"null", None),  # noqa: UP045
        (int | str, b'"pen"', "pen"),
        (str | int, b'"pen"', "pen"),
        (bytes | int, b"7", 7),
        (dict[str, Any] | None, b"null", None),
        (Annotated[int, msgspec.Meta(gt=0)], b"7", 7),
        (NewType("OrderId", int), b"7", 7),
        (Literal["red", "blue"], b'"red"', "red"),
        (tuple[int, str], b'[1,"a"]', (1, "a")),
        (Times, b'{"day":"2026-01-31","wait":"PT90S"}', Times(date(2026, 1, 31), timedelta(seconds=90))),
        (Page[Item], b'{"items":[{"sku":"pen","count":2}]}', Page([Item("pen", 2)])),
        (int, b"7", 7),
        (UUID, b'"01a1e115-f0c5-76c2-926d-204b6e3d11d7"', ID),
        (ipaddress.IPv4Address, b'"10.0.0.1"', ipaddress.IPv4Address("10.0.0.1")),
        (list[OrderModel], b"[]", []),
        (Item | dict[str, Any], b'{"a":1}', {"a": 1}),
    ],
    ids=lambda each: getattr(each, "__name__", None) or str(each),
)
def test_other_types_are_read(annotation: Any, raw: bytes, expected: object) -> None:
    found = load(annotation, raw)
    assert (found, type(found)) == (expected, type(expected))


# -- whose rules count ----------------------------------------------------------------------------------------------


class Lax(pydantic.BaseModel):
    count: int = pydantic.Field(alias="Count", gt=0)


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    id: UUID
    count: int = 0


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    order_id: UUID
    count: int = 0


@pydantic_dataclass
class Positive:
    count: int = pydantic.Field(gt=0)


@dataclass
class Constrained:
    count: Annotated[int, pydantic.Field(gt=0)]


@dataclass
class Box(Generic[T]):
    item: T
    count: Annotated[int, pydantic.Field(gt=0)]


@dataclass
class Shelf:
    models: list[Lax]


class Checked(pydantic.BaseModel):
    count: int
    size: int = 1

    @pydantic.field_validator("count")
    @classmethod
    def _check_count(cls, value: int) -> int:
        if value > 7:
            raise ValueError("at most seven fit")
        return value

    @pydantic.field_validator("size")
    @classmethod
    def _check_size(cls, value: int) -> int:
        if value == 3:
            raise AssertionError("three is no size")
        return value


def test_errors_of_a_models_own_validators_are_told_in_their_words() -> None:
    assert refusal(Checked, b'{"count": 8, "size": 3}') == (
        "Payload does not fit Checked: count: at most seven fit; size: three is no size"
    )


def test_pydantic_types_follow_their_own_rules() -> None:
    assert load(Lax, b'{"Count":"7"}').count == 7
    assert refusal(Lax, b'{"Count":0}') == "Payload does not fit Lax: Count: Input should be greater than 0"
    assert refusal(Lax, b'{"count":7}') == "Payload does not fit Lax: Count: Field required"
    assert refusal(Strict, b'{"id":"01a1e115-f0c5-76c2-926d-204b6e3d11d7","count":"7"}').endswith(
        "count: Input should be a valid integer"
    )
    assert refusal(Strict, b'{"id":"01a1e115-f0c5-76c2-926d-204b6e3d11d7","more":1}').endswith(
        "more: Extra inputs are not permitted"
    )


@pytest.mark.parametrize(
    ("annotation", "raw"),
    [
        *((Positive, b'{"count":-1}'), (Positive | None, b'{"count":-1}'), (list[Positive], b'[{"count":-1}]')),
        *((Constrained, b'{"count":-1}'), (Page[Positive], b'{"items":[{"count":-1}]}')),
        (Box[str], b'{"item":"pen","count":-1}'),
        *((pydantic.PositiveInt, b"-1"), (NewType("Count", pydantic.PositiveInt), b"-1")),
    ],
)
def test_pydantic_constraints_count_wherever_they_stand(annotation: Any, raw: bytes) -> None:
    assert refusal(annotation, raw).endswith("Input should be greater than 0")


def test_models_inside_other_types_are_read_by_pydantic() -> None:
    assert load(Shelf, b'{"models":[{"Count":"7"}]}').models[0].count == 7
    assert load(dict[str, Lax], b'{"a":{"Count":7}}')["a"].count == 7


def test_structs_follow_their_own_rules() -> None:
    raw = b'{"orderId":"01a1e115-f0c5-76c2-926d-204b6e3d11d7","more":1}'
    assert refusal(StrictStruct, raw) == ("Payload does not fit StrictStruct: Object contains unknown field `more`")
    assert refusal(StrictStruct, b'{"count":1}').endswith("Object missing required field `orderId`")


@pytest.mark.parametrize("annotation", ORDERS)
def test_unknown_fields_are_ignored_by_default(annotation: Any) -> None:
    assert load(annotation, RAW[:-1] + b',"more":1}') == load(annotation, RAW)


@pytest.mark.parametrize("raw", [b'{"sku":"pen","count":"2"}', b'{"sku":7,"count":2}', b'{"sku":"pen","count":true}'])
def test_plain_types_are_strict_with_either_library(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "count" in refusal(Item, raw) or "sku" in refusal(Item, raw)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert "Input should be a valid" in refusal(Item, raw)


def test_plain_types_are_the_same_with_either_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with_msgspec = load(Order, RAW)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert load(Order, RAW) == with_msgspec


# -- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotation", ORDERS)
@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (b'"01a1e115-f0c5-76c2-926d-204b6e3d11d7"', b'"secret"', "id"),
        (b'"2026-01-31T12:30:00Z"', b'"secret"', "at"),
        (b'"9.90"', b'"secret"', "total"),
        (b'"red"', b'"secret"', "color"),
        (b'"count":2', b'"count":"secret"', "count"),
        (b'"weight":3', b'"weight":"secret"', "weight"),
        (b'"pen"', b'{"secret":1}', "sku"),
    ],
)
def test_rejection_names_the_field_and_keeps_its_value_to_itself(
    annotation: Any, old: bytes, new: bytes, field: str
) -> None:
    event = Event("order.placed", RAW.replace(old, new), content_type=JSON)
    with pytest.raises(Reject) as caught:
        make_loader(annotation)(Claim(1, event, 1), Data(event, None))
    text = str(caught.value)
    assert text.startswith(f"Payload does not fit {annotation.__name__}: ")
    assert field in text
    assert "secret" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("annotation", ORDERS)
def test_missing_field_is_named(annotation: Any) -> None:
    assert "total" in refusal(annotation, RAW.replace(b'"total":"9.90",', b""))


def test_only_the_first_faults_of_many_are_told() -> None:
    many = "; ".join(f"{n}: Input should be a valid integer, unable to parse string as an integer" for n in range(5))
    expected = f"Payload does not fit list[pydantic.types.PositiveInt]: {many}; and 2 more"
    assert refusal(list[pydantic.PositiveInt], b'["a","b","c","d","e","f","g"]').endswith(expected.partition(": ")[2])


def test_tag_that_is_unknown_is_not_told() -> None:
    class Cat(msgspec.Struct, tag=True):
        name: str

    class Dog(msgspec.Struct, tag=True):
        name: str

    text = refusal(Cat | Dog, b'{"type":"secret - at `x`","name":"a"}')
    assert text.endswith(": Invalid enum value - at `$.type`")


def test_error_of_a_types_own_check_is_a_rejection() -> None:
    assert refusal(Even, b'{"count":3}').startswith("Payload does not fit Even: ")
    assert "expected an even count" in refusal(Even, b'{"count":3}')


@dataclass
class Even:
    count: int

    def __post_init__(self) -> None:
        if self.count % 2:
            raise ValueError("expected an even count")


# -- refused at registration ----------------------------------------------------------------------------------------


class Mailer:
    pass


@dataclass
class WithMailer:
    mailer: Mailer


class StructWithMailer(msgspec.Struct):
    mailer: Mailer


@dataclass
class Unresolved:
    total: Missing  # type: ignore[name-defined]  # noqa: F821


class UnresolvedModel(pydantic.BaseModel):
    total: Missing  # type: ignore[name-defined]  # noqa: F821


class Mixed(msgspec.Struct):
    model: Lax


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        (Mailer, "Mailer cannot be read from JSON$"),
        (WithMailer, "Mailer cannot be read from JSON$"),
        (StructWithMailer, "Mailer cannot be read from JSON$"),
        (list[Mailer], "cannot be read from JSON"),
        (Mailer | Item, "cannot be read from JSON: PydanticSchemaGenerationError: "),
        (Unresolved, "Unresolved cannot be read from JSON: NameError: name 'Missing' is not defined"),
        (UnresolvedModel, "UnresolvedModel cannot be read from JSON: "),
        (Annotated[ipaddress.IPv4Address, msgspec.Meta(title="IP")], "IPv4Address cannot be read from JSON$"),
        (Mixed, "Mixed mixes types of msgspec and pydantic; expected one of them"),
        (OrderStruct | Lax, "mixes types of msgspec and pydantic"),
        (7, "7 cannot be read from JSON"),
    ],
    ids=lambda each: getattr(each, "__name__", None) or str(each),
)
def test_type_that_no_library_reads_is_refused(annotation: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^Handler 'mail': .*{reason}"):
        make_loader(annotation, what="Handler 'mail'")


class Later(pydantic.BaseModel):
    inner: LaterInner


class LaterInner(pydantic.BaseModel):
    count: int


def test_model_may_name_one_that_is_declared_after_it() -> None:
    assert load(Later, b'{"inner":{"count":7}}').inner.count == 7
