"""Older versions of a payload, brought up to date one version at a time before a handler sees it.

A version is what the event's `schema_version` says, compared as text; None is that of an event that says nothing. A
version that no step leads on from is the newest, or newer than this program: its payload passes as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import LIMITS, Event
from pillarbox.retry import describe_error

Upcast = Callable[[Any], Any]


class Upcasters:
    """The steps of every event type, each from one schema version to the next."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[str | None, tuple[str, Upcast]]] = {}

    def add(self, type: str, old: str | int | None, new: str | int, upcast: Upcast) -> None:
        what = f"Upcaster of {type!r}"
        start, end = None if old is None else _check_version(old, what), _check_version(new, what)
        if not _is_plain(upcast):
            raise ConfigError(f"{what}: expected a plain function that returns the newer payload, got {upcast!r}")
        steps = self._steps.get(type, {})
        if start in steps:
            raise ConfigError(f"{what}: there is one from version {start!r} already, to {steps[start][0]!r}")
        version = end
        while version in steps and version != start:
            version = steps[version][0]
        if version == start:
            raise ConfigError(f"{what}: from {start!r} to {end!r} would lead round in a circle")
        self._steps.setdefault(type, {})[start] = (end, upcast)

    def add_all(self, other: Upcasters) -> None:
        """Take over the steps of another registry: all of them, or none if one of them does not fit."""
        merged = Upcasters()
        for each in (self, other):
            for type, steps in each._steps.items():
                for old, (new, upcast) in steps.items():
                    merged.add(type, old, new, upcast)
        self._steps = merged._steps

    def find(self, event: Event) -> Callable[[Event, Any], Any] | None:
        """What brings this event up to date, None when it is."""
        steps = self._steps.get(event.type)
        if steps is None or event.schema_version not in steps:
            return None
        return self._apply

    def _apply(self, event: Event, data: Any) -> Any:
        steps = self._steps[event.type]
        version = event.schema_version
        while version in steps:
            end, upcast = steps[version]
            what = f"Payload of version {version!r} cannot be brought to version {end!r}"
            was_null = data is None
            try:
                data = upcast(data)
            except Exception as error:
                raise Reject(f"{what}: {describe_error(error)}") from error
            if data is None and not was_null:
                raise Reject(f"{what}: the upcaster returned None; expected the newer payload")
            version = end
        return data


def _check_version(version: object, what: str) -> str:
    if isinstance(version, int) and not isinstance(version, bool):
        version = str(version)
    if not isinstance(version, str) or not 0 < len(version) <= LIMITS["schema_version"]:
        raise ConfigError(
            f"{what}: expected a version that is text of at most {LIMITS['schema_version']} characters or a whole "
            f"number, got {version!r}"
        )
    return str.__str__(version)


def _is_plain(function: Any) -> bool:
    is_lazy = inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function)
    return callable(function) and not inspect.isclass(function) and not is_lazy
