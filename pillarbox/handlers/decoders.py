"""The libraries that read JSON into a type: msgspec for its structs, pydantic for its models, either for the rest.

Types that belong to neither, such as dataclasses, are read strictly by both, so that a payload does not fit or fail by
what else happens to be installed. What does not fit is told by its field and never by its value: the text goes into
logs and dead letters.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, get_args, get_origin, get_type_hints, is_typeddict

import orjson

from pillarbox.errors import ConfigError, MissingExtra, PillarboxError

Decode = Callable[[bytes], Any]
"""Makes a value of JSON text, or raises `Misfit`."""

_OWNERS: Final = {
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic",
    "annotated_types": "pydantic",
}
_MOST_ERRORS: Final = 5


class Misfit(Exception):
    """A payload is not of the type that was asked for."""


def find_decoder(annotation: Any, *, what: str) -> Decode:
    """What reads JSON into this type; one that no library can read is refused, with `what` in the error."""
    try:
        return _choose(annotation, what)
    except PillarboxError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: {name_type(annotation)} cannot be read from JSON: {type(error).__name__}: {error}"
        ) from error


def name_type(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


def _choose(annotation: Any, what: str) -> Decode:
    owners = {owner for part in _walk(annotation, {}) if (owner := _find_owner(part)) is not None}
    if len(owners) > 1:
        raise ConfigError(f"{what}: {name_type(annotation)} mixes types of msgspec and pydantic; expected one of them")
    if owners == {"pydantic"}:
        return _use_pydantic(importlib.import_module("pydantic"), annotation, strict=None)
    msgspec = _import("msgspec")
    foreign: list[Any] = []
    if msgspec is not None:
        try:
            foreign = list(_find_foreign(msgspec.inspect.type_info(annotation), {}))
            if not foreign:
                return _use_msgspec(msgspec, annotation)
        except TypeError:
            # Some unions are beyond msgspec.
            if owners or _import("pydantic") is None:
                raise
    pydantic = None if owners else _import("pydantic")
    if pydantic is not None:
        try:
            return _use_pydantic(pydantic, annotation, strict=True)
        except pydantic.errors.PydanticSchemaGenerationError:
            # Its text is about models; where msgspec has named the class, that is enough.
            if not foreign:
                raise
    if msgspec is None:
        raise MissingExtra(f"Typed payloads ({name_type(annotation)})", "msgspec")
    raise ConfigError(f"{what}: {name_type(foreign[0])} cannot be read from JSON")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# -- whose types they are ------------------------------------------------------------------------------------------


def _walk(part: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The parts of a type: arguments, what it is annotated with, the types of its fields."""
    if id(part) in seen:
        return
    seen[id(part)] = part
    yield part
    inner = [*get_args(part), get_origin(part), getattr(part, "__supertype__", None), getattr(part, "__value__", None)]
    if _has_fields(part):
        inner += get_type_hints(part, include_extras=True).values()
    for each in inner:
        yield from _walk(each, seen)


def _has_fields(part: Any) -> bool:
    if not isinstance(part, type) or get_args(part):
        return False
    marks = ("__struct_fields__", "__attrs_attrs__", "_fields")
    return dataclasses.is_dataclass(part) or is_typeddict(part) or any(hasattr(part, mark) for mark in marks)


def _find_owner(part: Any) -> str | None:
    kind = part if isinstance(part, type) else type(part)
    dataclass_module = sys.modules.get("pydantic.dataclasses")
    if dataclass_module is not None and dataclass_module.is_pydantic_dataclass(kind):
        return "pydantic"
    roots = (base.__module__.partition(".")[0] for base in getattr(kind, "__mro__", ()))
    return next((_OWNERS[root] for root in roots if root in _OWNERS), None)


def _find_foreign(node: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The classes that msgspec knows only as somebody else's."""
    if isinstance(node, tuple):
        for each in node:
            yield from _find_foreign(each, seen)
    elif type(node).__module__ == "msgspec.inspect" and id(node) not in seen:
        seen[id(node)] = node
        if type(node).__name__ == "CustomType":
            yield node.cls
        for name in node.__struct_fields__:
            yield from _find_foreign(getattr(node, name), seen)


# -- the libraries -------------------------------------------------------------------------------------------------


def _use_msgspec(msgspec: Any, annotation: Any) -> Decode:
    decoder = msgspec.json.Decoder(annotation)

    def decode(raw: bytes) -> Any:
        try:
            return decoder.decode(raw)
        except (ValueError, RecursionError) as error:
            text = str(error)
        if text.startswith(("Invalid enum value", "Invalid value")):
            _, at, place = text.rpartition(" - at ")
            text = f"Invalid enum value{at}{place}"
        raise Misfit(text)

    return decode


def _use_pydantic(pydantic: Any, annotation: Any, *, strict: bool | None) -> Decode:
    adapter = pydantic.TypeAdapter(annotation)
    if not getattr(adapter, "pydantic_complete", True):
        adapter.rebuild(force=True, raise_errors=True)

    def decode(raw: bytes) -> Any:
        try:
            # pydantic takes these words for numbers; JSON does not have them.
            if b"NaN" in raw or b"Infinity" in raw:
                orjson.loads(raw)
            return adapter.validate_json(raw, strict=strict)
        except pydantic.ValidationError as error:
            text = _explain(error)
        except (ValueError, RecursionError) as error:
            text = str(error)
        raise Misfit(text)

    return decode


def _explain(error: Any) -> str:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [": ".join(filter(None, (".".join(map(str, each["loc"])), _say(each)))) for each in errors]
    rest = [] if len(texts) <= _MOST_ERRORS else [f"and {len(texts) - _MOST_ERRORS} more"]
    return "; ".join([*texts[:_MOST_ERRORS], *rest])


def _say(error: Any) -> str:
    # What a validator of the user's raises comes with pydantic's name for it in front.
    prefix = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}.get(error["type"], "")
    return str(error["msg"]).removeprefix(prefix)
