"""What the registry takes and what it refuses, before any event is there."""

from __future__ import annotations

import dataclasses
import re
from datetime import timedelta
from enum import Enum, StrEnum
from functools import partial
from typing import Any, ClassVar, assert_type

import msgspec
import pydantic
import pytest

from pillarbox.errors import ConfigError
from pillarbox.event import Claim, Event
from pillarbox.handlers import Context, Handlers, Next
from pillarbox.retry import Constant, Exponential


def handle(order: dict[str, Any]) -> None:
    pass


class Mailer:
    def __call__(self, order: dict[str, Any]) -> None:
        pass

    def send(self, order: dict[str, Any]) -> None:
        pass

    @staticmethod
    def send_static(order: dict[str, Any]) -> None:
        pass

    def send_unbound(self, order: dict[str, Any]) -> None:
        pass


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


def names(handlers: Handlers) -> list[str]:
    return [handler.name for handler in handlers]


# -- names and aliases ----------------------------------------------------------------------------------------------


def test_function_is_registered_by_its_own_name_and_returned_unchanged(handlers: Handlers) -> None:
    assert handlers.on("order.placed")(handle) is handle
    assert names(handlers) == ["handle"]
    assert handlers["handle"].function is handle
    assert handlers["handle"].types == ("order.placed",)


def test_decorated_function_keeps_its_type(handlers: Handlers) -> None:
    @handlers.on("order.placed")
    def double(count: int) -> int:
        return 2 * count

    @handlers.upcast("order.placed", 1, 2)
    def add_total(order: dict[str, int]) -> dict[str, int]:
        return {**order, "total": 0}

    @handlers.use
    async def note(context: Context, call_next: Next) -> object:
        return await call_next()

    assert_type(double(4), int)
    assert_type(add_total({}), dict[str, int])
    assert double(4) == 8
    assert add_total({}) == {"total": 0}
    assert handlers.middleware == [note]


def test_iteration_is_in_the_order_of_registration(handlers: Handlers) -> None:
    for name in ("zebra", "ant", "mole"):
        handlers.on("order.placed", name=name)(handle)
    assert names(handlers) == ["zebra", "ant", "mole"]
    assert [handler.name for handler in handlers.types["order.placed"]] == ["zebra", "ant", "mole"]
    assert len(handlers) == 3


def test_one_function_can_be_two_handlers(handlers: Handlers) -> None:
    handlers.on("order.placed", name="mail")(handle)
    handlers.on("order.packed", name="mail-again")(handle)
    assert handlers["mail"].function is handlers["mail-again"].function


def test_alias_finds_its_handler_but_is_no_handler(handlers: Handlers) -> None:
    handlers.on("order.placed", name="mail", aliases=["send_mail", "notify"])(handle)
    assert handlers["send_mail"] is handlers["notify"] is handlers["mail"]
    assert ("notify" in handlers, "mail" in handlers, "post" in handlers) == (True, True, False)
    assert names(handlers) == ["mail"]
    assert handlers.types == {"order.placed": (handlers["mail"],)}
    assert len(handlers) == 1


@pytest.mark.parametrize(
    ("name", "aliases"),
    [
        ("mail", []),
        ("Old-Mail", []),
        ("post", ["mail"]),
        ("post", ["Old-Mail"]),
        ("MAIL", []),
        ("post", ["old-mail"]),
    ],
    ids=["name-name", "name-alias", "alias-name", "alias-alias", "name in another case", "alias in another case"],
)
def test_taken_name_or_alias_is_refused(handlers: Handlers, name: str, aliases: list[str]) -> None:
    handlers.on("order.placed", name="mail", aliases=["Old-Mail"])(handle)
    with pytest.raises(ConfigError, match=rf"Handler '{name}': expected a name and aliases that no other handler has"):
        handlers.on("order.placed", name=name, aliases=aliases)(handle)
    assert names(handlers) == ["mail"]
    assert "post" not in handlers


@pytest.mark.parametrize(
    ("aliases", "reason"),
    [
        (["mail"], "expected former names, got its own name 'mail'"),
        (["MAIL"], "expected former names, got its own name 'MAIL'"),
        (["post", "post"], "expected each name once, got 'post' twice"),
        ("post", "expected a list of names, got 'post'"),
        (7, "expected a list of names, got 7"),
        ([""], "got ''"),
        ([None], "got None"),
    ],
)
def test_bad_aliases_are_refused(handlers: Handlers, aliases: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"Handler 'mail' aliases: .*{re.escape(reason)}"):
        handlers.on("order.placed", name="mail", aliases=aliases)(handle)


@pytest.mark.parametrize("name", ["", "  ", " mail", "mail ", "#mail", "ma\nil", "x" * 101, 7, b"mail"])
def test_bad_name_is_refused(handlers: Handlers, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"Handler name: expected text of 1 to 100 characters .* got"):
        handlers.on("order.placed", name=name)(handle)


def test_name_of_the_relay_that_feeds_handlers_is_refused(handlers: Handlers) -> None:
    with pytest.raises(ConfigError, match="'fan-out' is the name of a relay of ours"):
        handlers.on("order.placed", name="fan-out")(handle)


def test_name_of_a_hundred_characters_is_taken(handlers: Handlers) -> None:
    handlers.on("order.placed", name="x" * 100)(handle)
    assert names(handlers) == ["x" * 100]


def test_unknown_name_is_told_with_those_that_are_known(handlers: Handlers) -> None:
    handlers.on("order.placed")(handle)
    with pytest.raises(ConfigError, match="there is no handler 'mail'; registered are handle"):
        handlers["mail"]


# -- what can be registered -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [(Mailer(), "Mailer"), (Mailer().send, "send"), (Mailer.send_static, "send_static")],
    ids=["callable object", "method", "static method"],
)
def test_other_callables_have_a_name_too(handlers: Handlers, function: Any, name: str) -> None:
    handlers.on("order.placed")(function)
    assert names(handlers) == [name]


@pytest.mark.parametrize("function", [lambda order: None, partial(handle)], ids=["lambda", "partial"])
def test_function_without_a_name_needs_one(handlers: Handlers, function: Any) -> None:
    with pytest.raises(ConfigError, match="expected a name for a function that has none of its own"):
        handlers.on("order.placed")(function)
    handlers.on("order.placed", name="mail")(function)
    assert names(handlers) == ["mail"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Mailer, "expected a function or an object that can be called, got the class"),
        (7, "expected a function, got 7"),
        (None, "expected a function, got None"),
        (Mailer.send_unbound, "a method without its object"),
    ],
    ids=["class", "number", "None", "unbound method"],
)
def test_what_cannot_be_called_with_an_event_is_refused(handlers: Handlers, function: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        handlers.on("order.placed", name="mail")(function)
    assert len(handlers) == 0


def test_generator_is_refused_since_calling_it_runs_nothing(handlers: Handlers) -> None:
    def produce(order: dict[str, Any]) -> Any:
        yield order

    async def produce_async(order: dict[str, Any]) -> Any:
        yield order

    for function in (produce, produce_async, partial(produce)):
        with pytest.raises(ConfigError, match="Handler 'mail': a generator does not run when it is called"):
            handlers.on("order.placed", name="mail")(function)


# -- types ----------------------------------------------------------------------------------------------------------


class Text(str, Enum):  # noqa: UP042 -- its str() is its name
    PLACED = "order.placed"


class Modern(StrEnum):
    PLACED = "order.placed"


class Named:
    event_type: ClassVar[str] = "order.placed"


class NamedModel(pydantic.BaseModel):
    event_type: ClassVar[str] = "order.placed"


class NamedStruct(msgspec.Struct):
    event_type: ClassVar[str] = "order.placed"


@dataclasses.dataclass
class OrderPlaced:
    id: int


@pytest.mark.parametrize("kind", [Text.PLACED, Modern.PLACED, Named, NamedModel, NamedStruct])
def test_type_may_be_an_enum_member_or_a_class_that_names_it(handlers: Handlers, kind: Any) -> None:
    handlers.on(kind)(handle)
    (found,) = handlers.types
    assert (found, type(found)) == ("order.placed", str)


def test_class_stands_for_its_name(handlers: Handlers) -> None:
    handlers.on(OrderPlaced)(handle)
    assert list(handlers.types) == ["OrderPlaced"]


def test_two_classes_of_one_name_are_refused(handlers: Handlers) -> None:
    other = Handlers()
    handlers.on(OrderPlaced, name="first")(handle)
    handlers.on(OrderPlaced, name="second")(handle)
    namesake = type("OrderPlaced", (), {"__module__": "warehouse"})
    with pytest.raises(
        ConfigError, match=r"Handler 'third': .* got warehouse.OrderPlaced where .*registry.OrderPlaced"
    ):
        handlers.on(namesake, name="third")(handle)
    other.on(namesake, name="third")(handle)
    with pytest.raises(ConfigError, match=r"Handlers.include: .* got warehouse.OrderPlaced"):
        handlers.include(other)
    assert names(handlers) == ["first", "second"]
    named = type("OrderPlaced", (), {"__module__": "warehouse", "event_type": "OrderPlaced"})
    handlers.on(named, name="fourth")(handle)
    including = Handlers()
    including.include(other)
    with pytest.raises(ConfigError, match=r"where warehouse.OrderPlaced is the type 'OrderPlaced'"):
        including.on(OrderPlaced, name="first")(handle)


class FieldOfModel(pydantic.BaseModel):
    event_type: str = "order.placed"


class FieldOfStruct(msgspec.Struct):
    event_type: str = "order.placed"


class Unset(Named):
    event_type: ClassVar[Any] = 7


class Computed:
    @property
    def event_type(self) -> str:
        return "order.placed"


@pytest.mark.parametrize("kind", [FieldOfModel, FieldOfStruct, Unset, Computed])
def test_class_whose_event_type_is_no_text_of_the_class_is_refused(handlers: Handlers, kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Handler 'handle': expected event_type of {kind.__name__} to be text"):
        handlers.on(kind)(handle)


def test_handler_of_several_types_has_each_once(handlers: Handlers) -> None:
    handlers.on("order.placed", "order.packed", "order.placed")(handle)
    assert handlers["handle"].types == ("order.placed", "order.packed")
    assert list(handlers.types) == ["order.placed", "order.packed"]


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        ([], "expected an event type, or several, got none"),
        ([""], "expected event types that are text of 1 to 255 characters, got ''"),
        ([7], "got 7"),
        ([["order.placed"]], r"got \['order.placed'\]"),
        (["x" * 256], "got 'xxx"),
        (["a\nb"], "got 'a"),
        (["order.*"], r"not a pattern; got 'order.\*'"),
    ],
)
def test_bad_types_are_refused(handlers: Handlers, types: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"Handler 'handle': .*{reason}"):
        handlers.on(*types)(handle)


def test_decorator_without_types_is_refused(handlers: Handlers) -> None:
    with pytest.raises(ConfigError, match="expected an event type, or several, got none"):

        @handlers.on()
        def mail(order: dict[str, Any]) -> None:
            pass


# -- options --------------------------------------------------------------------------------------------------------


def test_options_are_kept_and_durations_may_be_text(handlers: Handlers) -> None:
    retry = Constant()
    handlers.on("order.placed", timeout="1m30s", max_age=timedelta(days=2), concurrency=3, retry=retry)(handle)
    found = handlers["handle"]
    assert (found.timeout, found.max_age) == (timedelta(seconds=90), timedelta(days=2))
    assert (found.concurrency, found.retry) == (3, retry)


def test_options_have_defaults(handlers: Handlers) -> None:
    handlers.on("order.placed")(handle)
    found = handlers["handle"]
    assert (found.timeout, found.max_age, found.concurrency, found.retry) == (None, None, 16, None)


@pytest.mark.parametrize("option", ["timeout", "max_age"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (timedelta(0), "expected a duration above zero or None"),
        ("0s", "expected a duration above zero or None, got '0s'"),
        (timedelta(seconds=-1), "expected a duration of zero or more"),
        (30, "expected a duration with its unit, such as '30s'; got the number 30"),
        ("soon", "got 'soon'"),
        (True, "got True"),
    ],
)
def test_bad_duration_is_refused(handlers: Handlers, option: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"Handler 'handle' {option}: .*{reason}"):
        handlers.on("order.placed", **{option: value})(handle)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4", None])
def test_bad_concurrency_is_refused(handlers: Handlers, value: Any) -> None:
    with pytest.raises(ConfigError, match="Handler 'handle' concurrency: expected a whole number of 1 or more"):
        handlers.on("order.placed", concurrency=value)(handle)


@pytest.mark.parametrize("value", [3, "exponential", Exponential, {"kind": "none"}, False])
def test_retry_that_is_no_policy_is_refused(handlers: Handlers, value: Any) -> None:
    with pytest.raises(ConfigError, match="Handler 'handle' retry: expected a retry policy such as Exponential"):
        handlers.on("order.placed", retry=value)(handle)


def test_middleware_that_cannot_be_called_is_refused(handlers: Handlers) -> None:
    no_function: Any = "logging"
    with pytest.raises(ConfigError, match=r"Middleware: expected a function .* got 'logging'"):
        handlers.use(no_function)


def test_provide_that_cannot_be_called_is_refused() -> None:
    no_function: Any = {"mailer": 7}
    with pytest.raises(ConfigError, match=r"Handlers provide: expected a function .* got {'mailer': 7}"):
        Handlers(provide=no_function)


# -- several registries ---------------------------------------------------------------------------------------------


def test_included_handlers_come_after_those_that_are_there(handlers: Handlers) -> None:
    other = Handlers()
    handlers.on("order.placed", name="mail")(handle)
    other.on("order.placed", name="post", aliases=["letter"])(handle)
    other.on("order.packed", name="count")(handle)
    handlers.include(other)
    assert names(handlers) == ["mail", "post", "count"]
    assert handlers["letter"] is other["post"]
    assert [each.name for each in handlers.types["order.placed"]] == ["mail", "post"]


def test_included_upcasters_work(handlers: Handlers) -> None:
    other = Handlers()
    handlers.upcast("order.placed", 1, 2)(lambda order: [*order, 2])
    other.upcast("order.placed", 2, 3)(lambda order: [*order, 3])
    handlers.include(other)
    event = Event("order.placed", [], schema_version=1)
    upcast = handlers.upcasters.find(event)
    assert upcast is not None
    assert upcast(event, []) == [2, 3]


def test_collision_includes_nothing(handlers: Handlers) -> None:
    other = Handlers()
    handlers.on("order.placed", name="mail")(handle)
    other.on("order.placed", name="post")(handle)
    other.on("order.placed", name="letter", aliases=["mail"])(handle)
    with pytest.raises(ConfigError, match=r"Handler 'letter': .* got 'mail', and there is 'mail'"):
        handlers.include(other)
    assert names(handlers) == ["mail"]


def test_collision_of_upcasters_includes_nothing(handlers: Handlers) -> None:
    other = Handlers()
    handlers.upcast("order.placed", 2, 1)(lambda order: order)
    other.on("order.placed", name="post")(handle)
    other.upcast("order.packed", 1, 2)(lambda order: order)
    other.upcast("order.placed", 1, 2)(lambda order: order)
    with pytest.raises(ConfigError, match=r"Upcaster of 'order.placed': from '1' to '2' would lead round"):
        handlers.include(other)
    assert names(handlers) == []
    assert handlers.upcasters.find(Event("order.packed", {}, schema_version=1)) is None


def test_included_registry_takes_no_more(handlers: Handlers) -> None:
    other = Handlers()
    handlers.include(other)
    for late in (
        lambda: other.on("order.placed")(handle),
        lambda: other.upcast("order.placed", 1, 2)(lambda order: order),
        lambda: other.use(lambda context, call_next: call_next()),
        lambda: other.include(Handlers()),
    ):
        with pytest.raises(ConfigError, match="this registry is included in another already"):
            late()
    assert len(other) == 0


def test_registry_can_be_included_in_two_but_not_twice_in_one(handlers: Handlers) -> None:
    other, third = Handlers(), Handlers()
    other.on("order.placed")(handle)
    handlers.include(other)
    third.include(other)
    assert names(handlers) == names(third) == ["handle"]
    with pytest.raises(ConfigError, match="Handler 'handle': "):
        handlers.include(other)


def test_registry_does_not_include_itself(handlers: Handlers) -> None:
    with pytest.raises(ConfigError, match="expected another registry"):
        handlers.include(handlers)


def test_middleware_of_an_included_registry_is_refused_rather_than_dropped(handlers: Handlers) -> None:
    other = Handlers()
    other.use(lambda context, call_next: call_next())
    with pytest.raises(ConfigError, match="the other registry has middleware"):
        handlers.include(other)


def test_provide_of_an_included_registry_must_be_that_of_the_including_one(handlers: Handlers) -> None:
    def provide(context: Context, wanted: Any) -> Any:
        return {}

    other = Handlers(provide=provide)
    with pytest.raises(ConfigError, match="the other registry has another provide"):
        handlers.include(other)
    same = Handlers(provide=provide)
    same.include(other)
    same.include(Handlers())


# -- context --------------------------------------------------------------------------------------------------------


def test_context_tells_of_the_event_and_cannot_be_changed() -> None:
    event = Event("order.placed", {"id": 7}, key="ann", headers={"tenant": "north"})
    context: Any = Context(Claim(1, event, attempt=3), "mail")
    assert (context.handler, context.attempt, context.id, context.type) == ("mail", 3, event.id, "order.placed")
    assert (context.key, context.headers, context.put_at, context.event) == ("ann", {"tenant": "north"}, None, event)
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.handler = "post"
