"""Older versions of a payload, brought up to date one version at a time before a handler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Event

Upcast = Callable[[Any], Any]


class Upcasters:
    """The steps of every event type, each from one schema version to the next."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[str | None, tuple[str, Upcast]]] = {}

    def add(self, type: str, old: str | int | None, new: str | int, upcast: Upcast) -> None:
        steps = self._steps.setdefault(type, {})
        start, end = None if old is None else str(old), str(new)
        if start in steps:
            raise ConfigError(
                f"Upcaster of {type!r}: there is one from version {old!r} already, to {steps[start][0]!r}"
            )
        steps[start] = (end, upcast)
        seen, version = {start}, end
        while version in steps:
            if version in seen:
                del steps[start]
                raise ConfigError(f"Upcaster of {type!r}: from {old!r} to {new!r} would lead round in a circle")
            seen.add(version)
            version = steps[version][0]

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
            try:
                data = upcast(data)
            except Exception as error:
                raise Reject(
                    f"Payload of version {version!r} cannot be brought to version {end!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            version = end
        return data
