"""What a handler's parameters are filled with, read once from its signature.

By annotation: `Context`, and a session of the transaction that settles the event. The first other parameter without a
default is the payload's. What is left goes to the user's hook; whatever nobody would fill is refused at registration.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox.errors import ConfigError
from pillarbox.event import Claim, Event
from pillarbox.handlers.context import Context
from pillarbox.handlers.payloads import Load, make_loader, unwrap
from pillarbox.targets import is_async_class

_COLLECTING: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a handler is called."""

    is_async: bool
    payload: str | None = None
    """The parameter for the payload, if there is one."""
    is_positional: bool = False
    """Whether the payload can be given by position alone."""
    load: Load | None = None
    context: str | None = None
    session: str | None = None
    """The parameter for the session, if the handler wants to join the transaction that settles its event."""
    session_class: Any = None
    provided: Mapping[str, Any] = field(default_factory=dict)
    """Names and annotations of what is left to the user's hook."""

    @property
    def joins(self) -> bool:
        return self.session is not None

    @property
    def session_kind(self) -> Literal["sync", "async"] | None:
        """The kind of its session, if it has one."""
        return None if self.session is None else "async" if self.is_async else "sync"


def read_arguments(function: Callable[..., Any], *, name: str, has_provider: bool) -> Arguments:
    what = f"Handler {name!r}"
    is_async = _is_async(function, what)
    parameters = list(_read_signature(function, what).parameters.values())
    _check_self(function, parameters, what)
    found: dict[str, Any] = {}
    provided: dict[str, Any] = {}
    for parameter in parameters:
        kind = unwrap(parameter.annotation)
        if parameter.kind in _COLLECTING:
            continue
        if kind is Context:
            _fill(found, "context", parameter, what)
        elif _is_session(kind):
            _check_session(kind, is_async=is_async, what=what)
            _fill(found, "session", parameter, what)
            found["session_class"] = kind
        elif parameter.default is not parameter.empty:
            _check_default(parameter, "payload" in found, what)
        elif "payload" in found:
            _check_provided(parameter, has_provider=has_provider, what=what)
            provided[parameter.name] = parameter.annotation
        else:
            _check_connection(kind, what)
            found |= {
                "payload": parameter.name,
                "load": _make_loader(parameter, has_provider=has_provider, what=what),
                "is_positional": parameter.kind is Parameter.POSITIONAL_ONLY,
            }
    _check_collecting(parameters, "payload" in found, what)
    return Arguments(is_async=is_async, provided=provided, **found)


def _make_loader(parameter: Parameter, *, has_provider: bool, what: str) -> Load:
    try:
        return make_loader(parameter.annotation, what=f"{what} parameter {parameter.name!r}")
    except ConfigError as error:
        if not has_provider:
            raise
        raise ConfigError(f"{error}. The payload's parameter comes before those that are provided") from error


def _is_async(function: Any, what: str) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"{what}: a generator does not run when it is called; expected a function without yield")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _read_signature(function: Callable[..., Any], what: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as error:
        raise ConfigError(
            f"{what}: an annotation cannot be read, {error}. Types that handlers take must be importable when they are "
            "registered, not under TYPE_CHECKING or inside a function"
        ) from error
    except Exception as error:
        raise ConfigError(f"{what}: its parameters cannot be read: {type(error).__name__}: {error}") from error


def _fill(found: dict[str, Any], use: str, parameter: Parameter, what: str) -> None:
    if use in found:
        raise ConfigError(f"{what}: {found[use]!r} and {parameter.name!r} both ask for the {use}; expected one")
    _check_keyword(parameter, what)
    found[use] = parameter.name


def _is_session(kind: Any) -> bool:
    return inspect.isclass(kind) and (issubclass(kind, Session) or is_async_class(kind, "AsyncSession"))


def _check_session(kind: Any, *, is_async: bool, what: str) -> None:
    if is_async_class(kind) is not is_async:
        function, wanted = ("async", "AsyncSession") if is_async else ("plain", "Session")
        raise ConfigError(f"{what}: expected {wanted} for this {function} function, got {kind.__name__}")


def _check_connection(kind: Any, what: str) -> None:
    if inspect.isclass(kind) and (issubclass(kind, sa.Connection) or is_async_class(kind, "AsyncConnection")):
        raise ConfigError(f"{what}: expected a session, whose connection() is at hand; got {kind.__name__}")


def _check_self(function: Any, parameters: list[Parameter], what: str) -> None:
    if inspect.isfunction(function) and parameters and parameters[0].name in ("self", "cls"):
        raise ConfigError(
            f"{what}: a method without its object. Register that of an object: handlers.on(…)(object.method)"
        )


def _check_default(parameter: Parameter, has_payload: bool, what: str) -> None:
    # Such a parameter could be meant for the payload, which would then be silently ignored.
    if not has_payload and parameter.kind is not Parameter.KEYWORD_ONLY:
        raise ConfigError(
            f"{what}: nobody would fill its parameter {parameter.name!r}, which has a default. Remove the "
            "default if it is for the payload, else make it keyword-only"
        )


def _check_provided(parameter: Parameter, *, has_provider: bool, what: str) -> None:
    kind = unwrap(parameter.annotation)
    if not has_provider:
        _check_connection(kind, what)
        hint = (
            f"Take a Context, which has the {kind.__name__.lower()}"
            if kind in (Event, Claim)
            else "A handler takes a payload, and by annotation a Context and a session; "
            "give Handlers(provide=…) for anything else"
        )
        raise ConfigError(f"{what}: nobody fills its parameter {parameter.name!r}. {hint}")
    _check_keyword(parameter, what)


def _check_keyword(parameter: Parameter, what: str) -> None:
    if parameter.kind is Parameter.POSITIONAL_ONLY:
        raise ConfigError(
            f"{what}: its parameter {parameter.name!r} cannot be given by name. Only the payload may stand before a '/'"
        )


def _check_collecting(parameters: list[Parameter], has_payload: bool, what: str) -> None:
    collecting = [each for each in parameters if each.kind in _COLLECTING]
    if collecting and not has_payload:
        raise ConfigError(
            f"{what}: takes {collecting[0]}, which does not say what it is called with. Expected a parameter for the "
            "payload; a decorator keeps the parameters of its function with functools.wraps"
        )
