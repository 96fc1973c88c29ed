"""Names of event classes: two classes never share one in a namespace, so that rows cannot be mistaken."""

from __future__ import annotations

import threading
from typing import Final
from weakref import WeakValueDictionary

from pillarbox.actions.namespaces import check_text
from pillarbox.errors import InvalidAction

_classes: Final[WeakValueDictionary[tuple[str, str], type]] = WeakValueDictionary()
_lock: Final = threading.Lock()


class EventNames:
    """The event classes of a namespace, shared by all its logs in this process."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._given: dict[type, str] = {}

    def add(self, kind: type, name: str | None = None) -> str:
        """Reserve a name for a class; raises `InvalidAction` when it is taken.

        It is the given one, else the class's `event_type`, be it inherited, else its own name: as `Handlers.on` reads
        it.
        """
        chosen = check_text(f"Event class {describe(kind)}: its name", _choose_name(kind, name))
        place = (self._namespace, chosen)
        with _lock:
            known = _classes.get(place)
            # A class that is defined anew under the same name, as in a notebook, is the same class.
            if known is not None and describe(known) != describe(kind):
                raise InvalidAction(
                    f"Event name {chosen!r} of namespace {self._namespace!r}: {describe(known)} has it already, so "
                    f"{describe(kind)} cannot. {_advise(kind)}"
                )
            _classes[place] = kind
            self._given[kind] = chosen
        if name is not None:
            _tell(kind, chosen)
        return chosen

    def find(self, kind: type) -> str:
        """The name of a class; one that was not declared is declared by its first use."""
        return self._given.get(kind) or self.add(kind)


def _choose_name(kind: type, name: str | None) -> str:
    found = getattr(kind, "event_type", None)
    if found is not None and not isinstance(found, str):
        raise InvalidAction(f"Event class {describe(kind)}: expected event_type to be text of the class, got {found!r}")
    own = vars(kind).get("event_type")
    if name is not None and own is not None and own != name:
        raise InvalidAction(f"Event class {describe(kind)}: its event_type is {own!r}, so it cannot be named {name!r}")
    return name or found or kind.__name__


def _advise(kind: type) -> str:
    if vars(kind).get("event_type") is not None:
        return "Change the event_type of one of them."
    if getattr(kind, "event_type", None) is not None:
        return "It inherits its event_type; give it one of its own: @log.event(name=…)"
    return "Rename one, or name it otherwise: @log.event(name=…)"


def _tell(kind: type, name: str) -> None:
    """Let those who handle the class know its name."""
    try:
        kind.event_type = name  # type: ignore[attr-defined]
    except (AttributeError, TypeError) as error:
        raise InvalidAction(
            f"Event class {describe(kind)}: it cannot be given a name. Write it into the class: "
            f"event_type: ClassVar[str] = {name!r}"
        ) from error


def describe(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
