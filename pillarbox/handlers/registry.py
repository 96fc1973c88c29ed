"""Functions registered for event types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from pillarbox.durations import parse_duration
from pillarbox.errors import ConfigError
from pillarbox.event import LIMITS
from pillarbox.handlers.arguments import Arguments, read_arguments
from pillarbox.handlers.context import Middleware, Provide
from pillarbox.handlers.upcasting import Upcast, Upcasters
from pillarbox.retry import RetryPolicy
from pillarbox.routing import MAX_SINK_NAME

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=Middleware)
U = TypeVar("U", bound=Upcast)
CONCURRENCY: Final = 16
# The relay that feeds those of the handlers goes by this name.
_RESERVED: Final = "fan-out"


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
        if provide is not None and not callable(provide):
            raise ConfigError(f"Handlers provide: expected a function of a context and annotations, got {provide!r}")
        self.provide = provide
        self.middleware: list[Middleware] = []
        self.upcasters = Upcasters()
        self._by_name: dict[str, Handler] = {}
        self._aliases: dict[str, Handler] = {}
        self._classes: dict[str, str] = {}
        self._sealed_by = ""

    def on(
        self,
        *types: str | type,
        name: str | None = None,
        aliases: Iterable[str] = (),
        timeout: timedelta | str | None = None,
        concurrency: int = CONCURRENCY,
        retry: RetryPolicy | None = None,
        max_age: timedelta | str | None = None,
    ) -> Callable[[F], F]:
        """Register a function for these event types; a class stands for its `event_type`, or else its name.

        `name` is what its rows say, so it must stay the same; a former one goes into `aliases`, until nothing is left
        under it. Without a name it is the function's own. `concurrency` is how many of its calls run at once, of
        different keys; an event whose call takes longer than `timeout` is tried again, as `retry` says or else the
        relay's policy; one older than `max_age` is given up without being called.
        """

        def register(function: F) -> F:
            _check_function(function, "Handler" if name is None else f"Handler {name!r}")
            own = _find_name(function) if name is None else _check_name(name, "Handler name")
            what = f"Handler {own!r}"
            self._check_open(what)
            handler = Handler(
                own,
                _check_types(types, what),
                function,
                read_arguments(function, name=own, has_provider=self.provide is not None),
                _check_aliases(aliases, own),
                _check_time(timeout, f"{what} timeout"),
                _check_count(concurrency, f"{what} concurrency"),
                _check_retry(retry, f"{what} retry"),
                _check_time(max_age, f"{what} max_age"),
            )
            classes = _list_classes(types)
            self._check_names([handler])
            self._check_classes(classes, what)
            self._add(handler)
            self._classes |= classes
            return function

        return register

    def use(self, middleware: M) -> M:
        """Wrap every call of every handler; the one added first is the outermost."""
        self._check_open("Middleware")
        if not callable(middleware):
            raise ConfigError(f"Middleware: expected a function of a context and what to call next, got {middleware!r}")
        self.middleware.append(middleware)
        return middleware

    def upcast(self, type: str | type, old: str | int | None, new: str | int) -> Callable[[U], U]:
        """Register a function that brings payloads of this type from one schema version to the next."""

        def register(function: U) -> U:
            self._check_open(f"Upcaster of {type!r}")
            self.upcasters.add(_read_type(type, "Upcaster"), old, new, function)
            return function

        return register

    def include(self, other: Handlers) -> None:
        """Take over all handlers and upcasters of another registry, or none if one of them does not fit.

        The other then takes no more. Middleware belongs to the registry that is run, `provide` is the same in both.
        """
        if other is self:
            raise ConfigError("Handlers.include: expected another registry, got the same one")
        self._check_open("Handlers.include")
        if other.middleware:
            raise ConfigError(
                "Handlers.include: the other registry has middleware. Use it on the including one instead"
            )
        if other.provide is not None and other.provide is not self.provide:
            raise ConfigError(
                "Handlers.include: the other registry has another provide. Give the same one to both, or to the "
                "including one alone"
            )
        self._check_names(list(other))
        self._check_classes(other._classes, "Handlers.include")
        self.upcasters.add_all(other.upcasters)
        for handler in other:
            self._add(handler)
        self._classes |= other._classes
        other.seal("included in another")

    def seal(self, by: str = "run by relays") -> None:
        """Take no more: what is registered from now on would not be run."""
        self._sealed_by = self._sealed_by or by

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name or name in self._aliases

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

    def _check_open(self, what: str) -> None:
        if self._sealed_by:
            raise ConfigError(f"{what}: this registry is {self._sealed_by} already. Register everything before that")

    def _check_names(self, handlers: list[Handler]) -> None:
        # Not every database tells upper case from lower: rows of one handler would count as another's.
        taken = {each.casefold(): each for each in (*self._by_name, *self._aliases)}
        for handler in handlers:
            for each in (handler.name, *handler.aliases):
                if each.casefold() in taken:
                    raise ConfigError(
                        f"Handler {handler.name!r}: expected a name and aliases that no other handler has, also in "
                        f"another case; got {each!r}, and there is {taken[each.casefold()]!r}"
                    )

    def _check_classes(self, classes: Mapping[str, str], what: str) -> None:
        for name, place in classes.items():
            if self._classes.get(name, place) != place:
                raise ConfigError(
                    f"{what}: expected classes of different names, got {place} where {self._classes[name]} is the "
                    f"type {name!r}. Give one of them an event_type"
                )

    def _add(self, handler: Handler) -> None:
        self._by_name[handler.name] = handler
        self._aliases |= dict.fromkeys(handler.aliases, handler)


def _find_name(function: Any) -> str:
    called = getattr(function, "__name__", None)
    if called is None and type(function).__module__ not in ("functools", "builtins"):
        called = type(function).__name__
    if not isinstance(called, str) or not called.isidentifier():
        raise ConfigError(f"Handler: expected a name for a function that has none of its own, name=…; got {function!r}")
    return _check_name(called, "Handler name")


def _check_function(function: Any, what: str) -> None:
    if inspect.isclass(function):
        raise ConfigError(f"{what}: expected a function or an object that can be called, got the class {function!r}")
    if not callable(function):
        raise ConfigError(f"{what}: expected a function, got {function!r}")


def _check_types(types: tuple[object, ...], what: str) -> tuple[str, ...]:
    if not types:
        raise ConfigError(f"{what}: expected an event type, or several, got none")
    return tuple(dict.fromkeys(_read_type(type, what) for type in types))


def _read_type(type: object, what: str) -> str:
    name = _read_class(type, what) if inspect.isclass(type) else type
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > LIMITS["type"]:
        raise ConfigError(
            f"{what}: expected event types that are text of 1 to {LIMITS['type']} characters, got {type!r}"
        )
    if "*" in name:
        raise ConfigError(f"{what}: expected the names of event types, not a pattern; got {name!r}. List all of them")
    # Not str(): that of an enum's member may be its name.
    return str.__str__(name)


def _read_class(kind: type, what: str) -> object:
    found = getattr(kind, "event_type", None)
    is_field = any("event_type" in inspect.get_annotations(base) for base in kind.__mro__)
    if not isinstance(found, str) and (found is not None or is_field):
        raise ConfigError(
            f"{what}: expected event_type of {kind.__qualname__} to be text of the class: event_type: ClassVar[str] = …"
        )
    return kind.__name__ if found is None else found


def _list_classes(types: tuple[object, ...]) -> dict[str, str]:
    """Where the classes are from whose names are types."""
    named = [kind for kind in types if inspect.isclass(kind) and getattr(kind, "event_type", None) is None]
    return {kind.__name__: f"{kind.__module__}.{kind.__qualname__}" for kind in named}


def _check_name(name: object, what: str) -> str:
    is_text = isinstance(name, str) and name.isprintable() and name == name.strip()
    if not isinstance(name, str) or not is_text or not 0 < len(name) <= MAX_SINK_NAME or name.startswith("#"):
        raise ConfigError(
            f"{what}: expected text of 1 to {MAX_SINK_NAME} characters without blanks around it or # before it, "
            f"got {name!r}"
        )
    if name.casefold() == _RESERVED:
        raise ConfigError(f"{what}: {name!r} is the name of a relay of ours; expected another")
    return str.__str__(name)


def _check_aliases(aliases: Iterable[str], name: str) -> tuple[str, ...]:
    what = f"Handler {name!r} aliases"
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise ConfigError(f"{what}: expected a list of names, got {aliases!r}")
    names = [_check_name(alias, what) for alias in aliases]
    for each in names:
        if each.casefold() == name.casefold():
            raise ConfigError(f"{what}: expected former names, got its own name {each!r}")
        if [other.casefold() for other in names].count(each.casefold()) > 1:
            raise ConfigError(f"{what}: expected each name once, got {each!r} twice")
    return tuple(names)


def _check_time(time: timedelta | str | None, what: str) -> timedelta | None:
    if time is None:
        return None
    duration = parse_duration(time, what=what)
    if not duration:
        raise ConfigError(f"{what}: expected a duration above zero or None, got {time!r}")
    return duration


def _check_count(count: object, what: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{what}: expected a whole number of 1 or more, got {count!r}")
    return count


def _check_retry(retry: Any, what: str) -> RetryPolicy | None:
    is_policy = callable(getattr(retry, "next_delay", None)) and hasattr(retry, "max_attempts")
    if retry is not None and (inspect.isclass(retry) or not is_policy):
        raise ConfigError(f"{what}: expected a retry policy such as Exponential(), NoRetry() for none; got {retry!r}")
    policy: RetryPolicy | None = retry
    return policy
