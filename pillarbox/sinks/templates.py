"""Names at a destination made from an event: `"{topic}"`, `"shop.{type}.v1"`, `"{headers.tenant}.orders"`."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Final

from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.sinks.refused import Refused

FIELDS: Final = (
    *("topic", "type", "key", "id", "aggregate_type", "aggregate_id"),
    *("schema_version", "correlation_id", "causation_id", "source"),
)
_PART: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Template:
    """A text with fields of the event in braces; `{{` and `}}` are plain braces.

    An event that lacks a field the text needs is refused, because it has no place to go. `escape` is applied to what
    is filled in; `shown` is what errors show of a text that may contain secrets.
    """

    def __init__(
        self, text: str, *, what: str, escape: Callable[[str], str] | None = None, shown: str | None = None
    ) -> None:
        self.text = text
        self._what = what
        self._escape = escape
        self._shown = text if shown is None else shown
        self._parts = self._parse()
        self._is_topic = text == "{topic}" and escape is None
        self._constant = None if any(callable(part) for part in self._parts) else "".join(map(str, self._parts))

    @property
    def is_constant(self) -> bool:
        """Whether the text is the same for every event."""
        return self._constant is not None

    def fill(self, event: Event) -> str:
        """Return the text for an event; raises `Refused` when the event lacks a field."""
        if self._is_topic:
            return event.topic
        if self._constant is not None:
            return self._constant
        return "".join(part if isinstance(part, str) else part(event) for part in self._parts)

    def _parse(self) -> list[str | Callable[[Event], str]]:
        if not self.text.strip():
            raise ConfigError(f"{self._what}: expected text, got {self._shown!r}")
        parts: list[str | Callable[[Event], str]] = []
        end = 0
        for match in _PART.finditer(self.text):
            parts.append(self.text[end : match.start()])
            end = match.end()
            if match[0] in ("{{", "}}"):
                parts.append(match[0][0])
            elif match[1] is None:
                raise ConfigError(
                    f"{self._what}: {match[0]!r} alone in {self._shown!r}; write it twice for a plain one"
                )
            else:
                parts.append(self._field(match[1]))
        parts.append(self.text[end:])
        return [part for part in parts if part]

    def _field(self, name: str) -> Callable[[Event], str]:
        if name.startswith("headers."):
            header = name.removeprefix("headers.")
            return lambda event: self._require(event, name, event.headers.get(header))
        if name not in FIELDS:
            near = get_close_matches(name, FIELDS, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{self._what}: unknown field {name!r}; expected {', '.join(FIELDS)} or headers.NAME{hint}"
            )
        return lambda event: self._require(event, name, getattr(event, name))

    def _require(self, event: Event, name: str, value: object) -> str:
        if value is None or value == "":
            raise Refused(f"{self._what} {self._shown!r} needs {name}, which event {event.id} has not")
        return str(value) if self._escape is None else self._escape(str(value))
