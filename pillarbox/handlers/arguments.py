"""What a handler's parameters are filled with, read once from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox.errors import ConfigError
from pillarbox.handlers.context import Context
from pillarbox.handlers.payloads import Load, make_loader

_SKIPPED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a handler is called."""

    is_async: bool
    payload: str | None
    """The parameter for the payload, if there is one."""
    is_positional: bool
    """Whether the payload can be given by position alone."""
    load: Load | None
    context: str | None
    session: str | None
    """The parameter for the session, if the handler wants to join the transaction that settles its event."""
    session_class: Any
    provided: Mapping[str, Any]
    """Names and annotations of what is left to the user's hook."""

    @property
    def joins(self) -> bool:
        return self.session is not None


def read_arguments(function: Callable[..., Any], *, name: str, has_provider: bool) -> Arguments:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    found: dict[str, Any] = dict.fromkeys(("payload", "load", "context", "session", "session_class"))
    found["is_positional"] = False
    provided: dict[str, Any] = {}
    for parameter in _read_signature(function, name).parameters.values():
        annotation = parameter.annotation
        if parameter.kind in _SKIPPED:
            continue
        if annotation is Context:
            found["context"] = parameter.name
        elif _is_session(annotation):
            _check_session(annotation, is_async=is_async, name=name)
            found |= {"session": parameter.name, "session_class": annotation}
        elif found["payload"] is None and parameter.default is parameter.empty:
            found |= {
                "payload": parameter.name,
                "load": make_loader(annotation),
                "is_positional": parameter.kind is parameter.POSITIONAL_ONLY,
            }
        elif parameter.default is parameter.empty:
            provided[parameter.name] = annotation
    if provided and not has_provider:
        names = ", ".join(repr(each) for each in provided)
        raise ConfigError(
            f"Handler {name!r}: nobody fills its parameter {names}. A handler takes a payload, and by annotation a "
            "Context and a session; give Handlers(provide=…) for anything else"
        )
    return Arguments(is_async=is_async, provided=provided, **found)


def _read_signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as error:
        raise ConfigError(
            f"Handler {name!r}: an annotation cannot be read, {error}. Types that handlers take must be importable "
            "when they are registered, not under TYPE_CHECKING or inside a function"
        ) from error


def _is_session(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, Session | AsyncSession)


def _check_session(annotation: Any, *, is_async: bool, name: str) -> None:
    if issubclass(annotation, AsyncSession) is not is_async:
        kind, wanted = ("async", "AsyncSession") if is_async else ("plain", "Session")
        raise ConfigError(f"Handler {name!r}: expected {wanted} for this {kind} function, got {annotation.__name__}")
