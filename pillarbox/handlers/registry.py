"""Functions registered for event types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from pillarbox.errors import ConfigError
from pillarbox.handlers.arguments import Arguments, read_arguments
from pillarbox.handlers.context import Middleware, Provide
from pillarbox.handlers.upcasting import Upcast, Upcasters
from pillarbox.retry import RetryPolicy
from pillarbox.routing import MAX_SINK_NAME

F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """A function and what it was registered with. Its name stands in the rows that wait for it."""

    name: str
    types: tuple[str, ...]
    function: Callable[..., Any]
    arguments: Arguments
    aliases: tuple[str, ...] = ()
    timeout: timedelta | None = None
    concurrency: int = CONCURRENCY
    retry: RetryPolicy | None = None
    max_age: timedelta | None = None


class Handlers:
    """A registry of handlers, used by the relays that run them.

    `provide` fills parameters that are neither payload, `Context` nor session: called with the context and the
    annotations by name, it returns the values by name.
    """

    def __init__(self, *, provide: Provide | None = None) -> None:
        self.provide = provide
        self.middleware: list[Middleware] = []
        self.upcasters = Upcasters()
        self._by_name: dict[str, Handler] = {}
        self._aliases: dict[str, Handler] = {}

    def on(
        self,
        *types: str,
        name: str | None = None,
        aliases: Iterable[str] = (),
        timeout: timedelta | None = None,
        concurrency: int = CONCURRENCY,
        retry: RetryPolicy | None = None,
        max_age: timedelta | None = None,
    ) -> Callable[[F], F]:
        """Register a function for these event types.

        `name` is what its rows say, so it must stay the same; a former one goes into `aliases`, until nothing is left
        under it. Without a name it is the function's own. `concurrency` is how many of its calls run at once, of
        different keys; an event whose call takes longer than `timeout` is tried again, as `retry` says or else the
        relay's policy; one older than `max_age` is given up without being called.
        """

        def register(function: F) -> F:
            own: str = getattr(function, "__name__", type(function).__name__) if name is None else name
            self._add(
                Handler(
                    own,
                    _check_types(types, own),
                    function,
                    read_arguments(function, name=own, has_provider=self.provide is not None),
                    tuple(_check_name(alias, f"Handler {own!r} aliases") for alias in _as_names(aliases, own)),
                    _check_time(timeout, f"Handler {own!r} timeout"),
                    _check_count(concurrency, f"Handler {own!r} concurrency"),
                    retry,
                    _check_time(max_age, f"Handler {own!r} max_age"),
                )
            )
            return function

        return register

    def use(self, middleware: Middleware) -> Middleware:
        """Wrap every call of every handler; the one added first is the outermost."""
        self.middleware.append(middleware)
        return middleware

    def upcast(self, type: str, old: str | int | None, new: str | int) -> Callable[[Upcast], Upcast]:
        """Register a function that brings payloads of this type from one schema version to the next."""

        def register(function: Upcast) -> Upcast:
            self.upcasters.add(type, old, new, function)
            return function

        return register

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Handler:
        """The handler of this name or former name."""
        try:
            return self._by_name.get(name) or self._aliases[name]
        except KeyError:
            known = ", ".join(self._by_name) or "none"
            raise ConfigError(f"Handlers: there is no handler {name!r}; registered are {known}") from None

    @property
    def types(self) -> dict[str, tuple[Handler, ...]]:
        """The handlers of each event type."""
        found: dict[str, list[Handler]] = {}
        for handler in self:
            for type in handler.types:
                found.setdefault(type, []).append(handler)
        return {type: tuple(each) for type, each in found.items()}

    def _add(self, handler: Handler) -> None:
        _check_name(handler.name, "Handler name")
        for each in (handler.name, *handler.aliases):
            if each in self._by_name or each in self._aliases or (handler.name, *handler.aliases).count(each) > 1:
                raise ConfigError(f"Handler {handler.name!r}: {each!r} is a handler's name or alias already")
        self._by_name[handler.name] = handler
        self._aliases |= dict.fromkeys(handler.aliases, handler)


def _check_types(types: tuple[object, ...], name: str) -> tuple[str, ...]:
    if not types:
        raise ConfigError(f"Handler {name!r}: expected an event type, or several, got none")
    for type in types:
        if not isinstance(type, str) or not type:
            raise ConfigError(f"Handler {name!r}: expected event types that are text, got {type!r}")
    return tuple(dict.fromkeys(str(type) for type in types))


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_SINK_NAME or name.startswith("#"):
        raise ConfigError(f"{what}: expected a name of at most {MAX_SINK_NAME} characters, got {name!r}")
    return name


def _as_names(aliases: Iterable[str], name: str) -> Iterable[str]:
    if isinstance(aliases, str):
        raise ConfigError(f"Handler {name!r} aliases: expected a list of names, got the text {aliases!r}")
    return aliases


def _check_time(time: object, what: str) -> timedelta | None:
    if time is not None and not (isinstance(time, timedelta) and time > timedelta(0)):
        raise ConfigError(f"{what}: expected a timedelta above zero or None, got {time!r}")
    return time


def _check_count(count: object, what: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{what}: expected a whole number of 1 or more, got {count!r}")
    return count
