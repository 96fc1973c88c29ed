"""Which parameter of a handler is filled with what, and what nobody would fill."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NewType, Optional

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from pillarbox.errors import ConfigError
from pillarbox.event import Claim, Delivered, Event
from pillarbox.handlers import Handlers, HandlerSink
from pillarbox.handlers.arguments import Arguments, read_arguments
from pillarbox.handlers.context import Context
from pillarbox.handlers.payloads import Data

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass
class Order:
    id: int


class Mailer:
    """Something a hook provides."""


class OwnSession(Session):
    pass


OwnContext = NewType("OwnContext", Context)


def read(function: Callable[..., Any], *, has_provider: bool = False) -> Arguments:
    return read_arguments(function, name="mail", has_provider=has_provider)


def load(function: Callable[..., Any], payload: object) -> Any:
    found = read(function)
    assert found.load is not None
    event = Event("order.placed", payload)
    return found.load(Claim(1, event, attempt=1), Data(event, None))


# -- by annotation --------------------------------------------------------------------------------------------------


def test_payload_context_and_session_are_found_in_any_order() -> None:
    def first(order: Order, context: Context, session: Session) -> None: ...
    def last(session: Session, context: Context, order: Order) -> None: ...
    def named(*, session: Session, order: Order, context: Context) -> None: ...

    for function in (first, last, named):
        found = read(function)
        assert (found.payload, found.context, found.session) == ("order", "context", "session")
        assert (found.session_class, found.joins, found.is_async) == (Session, True, False)
        assert found.is_positional is False
        assert found.provided == {}


def test_annotations_may_be_text_or_types() -> None:
    def as_text(order: Order, context: Context) -> None: ...
    def as_types(order: Any, context: Any) -> None: ...

    as_types.__annotations__ = {"order": Order, "context": Context}
    for function in (as_text, as_types):
        assert read(function).context == "context"
        assert load(function, {"id": 7}) == Order(7)


def test_async_handler_takes_an_async_session() -> None:
    async def handle(order: Order, db: AsyncSession) -> None: ...

    found = read(handle)
    assert (found.is_async, found.session, found.session_class) == (True, "db", AsyncSession)


def test_session_may_be_of_a_class_of_ones_own() -> None:
    def handle(order: Order, session: OwnSession) -> None: ...

    assert read(handle).session_class is OwnSession


def test_optional_and_annotated_sessions_and_contexts_are_filled_too() -> None:
    def handle(
        order: Order,
        session: Session | None = None,
        context: Annotated[Context, "of this call"] | None = None,
    ) -> None: ...

    def older(order: Order, session: Optional[Session] = None, context: OwnContext = ...) -> None: ...  # noqa: UP045

    for function in (handle, older):
        found = read(function)
        assert (found.session, found.session_class, found.context) == ("session", Session, "context")


def test_handler_without_parameters_takes_nothing() -> None:
    def handle() -> None: ...

    found = read(handle)
    assert (found.payload, found.load, found.context, found.session, found.joins) == (None, None, None, None, False)


def test_handler_may_take_the_context_alone() -> None:
    def handle(context: Context) -> None: ...

    assert (read(handle).payload, read(handle).context) == (None, "context")


def test_payload_may_be_positional_only() -> None:
    def handle(order: Order, /, context: Context) -> None: ...

    found = read(handle)
    assert (found.payload, found.is_positional, found.context) == ("order", True, "context")


def test_parameters_with_defaults_keep_them() -> None:
    def handle(order: Order, limit: int = 3, *, is_loud: bool = False) -> None: ...
    def ping(*, is_loud: bool = False) -> None: ...

    assert (read(handle).payload, read(handle, has_provider=True).provided) == ("order", {})
    assert read(ping).payload is None


def test_further_arguments_do_no_harm_beside_a_payload() -> None:
    def handle(order: Order, *args: Any, **options: Any) -> None: ...

    assert read(handle).payload == "order"


# -- kinds of functions ---------------------------------------------------------------------------------------------


class Callables:
    def __call__(self, order: Order) -> None: ...

    async def send(self, order: Order, session: AsyncSession) -> None: ...


class AsyncCallable:
    async def __call__(self, order: Order) -> None: ...


def take_two(prefix: str, order: Order, session: Session) -> None: ...


def repeat(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return wrapper


def hide(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: function(*args, **options)


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (Callables(), False),
        (Callables().send, True),
        (AsyncCallable(), True),
        (functools.partial(AsyncCallable()), True),
        (functools.partial(functools.partial(Callables().send), session=None), True),
        (functools.partial(take_two, "dear"), False),
        (functools.partial(take_two, prefix="dear"), False),
        (repeat(functools.partial(take_two, "dear")), False),
    ],
    ids=[
        *("object", "method", "async object", "partial of an async object", "partial of a partial of a method"),
        *("partial by position", "partial by name", "wrapped"),
    ],
)
def test_callables_of_every_kind_are_read(function: Any, is_async: bool) -> None:
    found = read(function)
    assert (found.payload, found.is_async) == ("order", is_async)
    assert load(function, {"id": 7}) == Order(7)


def test_decorator_that_hides_the_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes \*args, which does not say what it is called with.*functools.wraps"):
        read(hide(take_two))


# -- refused --------------------------------------------------------------------------------------------------------


def default_first(order: Order | None = None) -> None: ...
def default_after_context(context: Context, limit: int = 3) -> None: ...
def two_payloads(order: Order, mailer: Mailer) -> None: ...
def second_event(order: Order, event: Event) -> None: ...
def second_claim(order: Order, claim: Claim) -> None: ...
def two_sessions(order: Order, session: Session, other: OwnSession) -> None: ...
def two_contexts(order: Order, context: Context, other: Context) -> None: ...
def positional_session(order: Order, session: Session, /) -> None: ...
def positional_context(context: Context, order: Order, /) -> None: ...
def async_session(order: Order, session: AsyncSession) -> None: ...
def connection(connection: sa.Connection, order: Order) -> None: ...
def second_connection(order: Order, connection: AsyncConnection) -> None: ...
def only_keywords(**options: Any) -> None: ...
def unreadable(order: Decimal) -> None: ...
def missing_attribute(order: sa.Nothing) -> None: ...  # type: ignore[name-defined]
def broken(order: Order | 7) -> None: ...  # type: ignore[valid-type]


async def plain_session(order: Order, session: Session) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (default_first, "nobody would fill its parameter 'order', which has a default. Remove the default"),
        (default_after_context, "nobody would fill its parameter 'limit', which has a default"),
        (two_payloads, r"nobody fills its parameter 'mailer'. .* give Handlers\(provide=…\)"),
        (second_event, "nobody fills its parameter 'event'. Take a Context, which has the event"),
        (second_claim, "nobody fills its parameter 'claim'. Take a Context, which has the claim"),
        (two_sessions, "'session' and 'other' both ask for the session; expected one"),
        (two_contexts, "'context' and 'other' both ask for the context; expected one"),
        (positional_session, "its parameter 'session' cannot be given by name"),
        (positional_context, "its parameter 'context' cannot be given by name"),
        (async_session, "expected Session for this plain function, got AsyncSession"),
        (plain_session, "expected AsyncSession for this async function, got Session"),
        (connection, r"expected a session, whose connection\(\) is at hand; got Connection"),
        (second_connection, r"expected a session, whose connection\(\) is at hand; got AsyncConnection"),
        (only_keywords, r"takes \*\*options: .*Any, which does not say what it is called with"),
        (unreadable, "an annotation cannot be read, name 'Decimal' is not defined.*not under TYPE_CHECKING"),
        (missing_attribute, "its parameters cannot be read: AttributeError: module 'sqlalchemy' has no attribute"),
        (broken, "its parameters cannot be read: TypeError"),
        (dict.update, "its parameters cannot be read: ValueError: no signature found"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_parameters_that_cannot_be_filled_are_refused(function: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^Handler 'mail': {reason}"):
        read(function)


def test_type_of_a_function_is_unknown_outside_it() -> None:
    @dataclass
    class Local:
        id: int

    def handle(order: Local) -> None: ...

    with pytest.raises(ConfigError, match=r"name 'Local' is not defined.*inside a function"):
        read(handle)


# -- the hook -------------------------------------------------------------------------------------------------------


def test_hook_is_asked_for_what_is_left() -> None:
    def handle(order: Order, mailer: Mailer, *, context: Context, clock: Annotated[Mailer, "clock"]) -> None: ...

    found = read(handle, has_provider=True)
    assert found.provided == {"mailer": Mailer, "clock": Annotated[Mailer, "clock"]}
    assert (found.payload, found.context) == ("order", "context")


def test_hook_cannot_fill_what_has_no_name() -> None:
    def handle(order: Order, mailer: Mailer, /) -> None: ...

    with pytest.raises(ConfigError, match="its parameter 'mailer' cannot be given by name"):
        read(handle, has_provider=True)


def test_hook_does_not_make_a_payload_of_what_is_none() -> None:
    def handle(mailer: Mailer, order: Order) -> None: ...

    text = "Handler 'mail' parameter 'mailer': Mailer cannot be read from JSON"
    with pytest.raises(ConfigError, match=f"^{text}. The payload's parameter comes before those that are provided$"):
        read(handle, has_provider=True)
    with pytest.raises(ConfigError, match=f"^{text}$"):
        read(handle)


# -- called ---------------------------------------------------------------------------------------------------------

called: list[tuple[Any, ...]] = []
MAILER = Mailer()


def plainly(order: Order, context: Context, mailer: Mailer) -> None:
    called.append((order, context.handler, mailer))


def by_position(order: Order, /, context: Context, mailer: Mailer) -> None:
    called.append((order, context.handler, mailer))


def by_name(*, context: Context, order: Order, mailer: Mailer) -> None:
    called.append((order, context.handler, mailer))


def with_more(context: Context, order: Order, mailer: Mailer, *args: Any, loud: bool = False, **more: Any) -> None:
    assert (args, loud, more) == ((), False, {})
    called.append((order, context.handler, mailer))


async def asynchronously(order: Order, context: Context, mailer: Mailer) -> None:
    called.append((order, context.handler, mailer))


class Called:
    def method(self, order: Order, context: Context, mailer: Mailer) -> None:
        called.append((order, context.handler, mailer))

    async def __call__(self, order: Order, context: Context, mailer: Mailer) -> None:
        called.append((order, context.handler, mailer))


@pytest.mark.parametrize(
    "function",
    [
        *(plainly, by_position, by_name, with_more, asynchronously, Called().method, Called()),
        *(functools.partial(plainly), functools.partial(Called()), repeat(plainly)),
    ],
    ids=lambda each: getattr(each, "__qualname__", type(each).__name__),
)
async def test_handler_of_any_form_is_called_with_what_it_asks_for(function: Any) -> None:
    def provide(context: Context, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        assert wanted == {"mailer": Mailer}
        return {"mailer": MAILER}

    handlers = Handlers(provide=provide)
    handlers.on("order.placed", name="mail")(function)
    sink = HandlerSink(handlers, "mail")
    called.clear()
    outcomes = await sink.deliver([Claim(1, Event("order.placed", {"id": 7}), attempt=1)])
    await sink.close()
    assert (outcomes, called) == ([Delivered()], [(Order(7), "mail", MAILER)])


async def test_handler_without_parameters_is_called() -> None:
    def handle() -> None:
        called.append(())

    handlers = Handlers()
    handlers.on("order.placed")(handle)
    sink = HandlerSink(handlers, "handle")
    called.clear()
    outcomes = await sink.deliver([Claim(1, Event("order.placed", b"\xff"), attempt=1)])
    await sink.close()
    assert (outcomes, called) == ([Delivered()], [()])


# -- missing libraries ----------------------------------------------------------------------------------------------

WITHOUT = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from dataclasses import dataclass
from pillarbox.errors import MissingExtra
from pillarbox.event import Claim, Event
from pillarbox.handlers import Handlers
from pillarbox.handlers.payloads import Data

@dataclass
class Order:
    id: int

handlers = Handlers()

@handlers.on("order.placed")
def plain(order: dict) -> None: ...

@handlers.on("order.placed")
def loose(order) -> None: ...

try:
    @handlers.on("order.placed")
    def typed(order: Order) -> None: ...
except MissingExtra as error:
    print(error)
else:
    load = handlers["typed"].arguments.load
    for payload in ({{"id": 7}}, {{"id": "7"}}):
        event = Event("order.placed", payload)
        try:
            print(load(Claim(1, event, 1), Data(event, None)))
        except Exception as error:
            print(error)
print([name for name in ("msgspec", "pydantic") if sys.modules.get(name)])
"""


@pytest.mark.parametrize(
    ("hidden", "printed"),
    [
        (
            ["msgspec", "pydantic"],
            "Typed payloads (Order) support is not installed. Run: pip install 'pillarbox[msgspec]'\n[]\n",
        ),
        (
            ["msgspec"],
            "Order(id=7)\nPayload does not fit Order: id: Input should be a valid integer\n['pydantic']\n",
        ),
        (
            ["pydantic"],
            "Order(id=7)\nPayload does not fit Order: Expected `int`, got `str` - at `$.id`\n['msgspec']\n",
        ),
        (
            [],
            "Order(id=7)\nPayload does not fit Order: Expected `int`, got `str` - at `$.id`\n['msgspec']\n",
        ),
    ],
    ids=["neither", "pydantic alone", "msgspec alone", "both"],
)
def test_typed_payload_needs_one_library_at_registration(hidden: list[str], printed: str) -> None:
    code = WITHOUT.format(hidden=hidden)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (printed, "", 0)
