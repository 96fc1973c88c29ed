"""The single values of a sync configuration: each check returns the value as it is kept, or says what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError
from pillarbox.values import show

_MOST: Final = 2**63 - 1
LONGEST_DAYS: Final = 365_000
LONGEST_SECONDS: Final = 366 * 86_400.0

Check = Callable[[object], Any]


def whole(least: int, most: int = _MOST) -> Check:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"a whole number of {least} or more" + (f", at most {most}" if most < _MOST else ""))
        return value

    return check


def number(most: float, *, can_be_zero: bool = False) -> Check:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN is not between any two numbers.
        if is_number and 0 <= value <= most and (value or can_be_zero):
            return float(value)
        raise ValueError(f"a number {'of 0 or more' if can_be_zero else 'above 0'}, at most {most:.0f}")

    return check


def limit(value: object) -> int | None:
    if value is None or value is False:
        return None
    try:
        return int(whole(1)(value))
    except ValueError:
        raise ValueError("a whole number of 1 or more, or false for no limit") from None


def override_limit(value: object) -> int | Literal[False] | None:
    return False if value is False else limit(value)


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def choice(*choices: str) -> Check:
    def check(value: object) -> object:
        if value not in choices:
            raise ValueError(f"{', '.join(choices[:-1])} or {choices[-1]}")
        return value

    return check


def or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def file_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("a path")
    return Path(value)


def plain_name(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or any(each in " ./\\" for each in value):
        raise ValueError("a name without dots, blanks and slashes")
    return value


def target_name(value: object) -> str:
    parts = value.split(".", maxsplit=1) if isinstance(value, str) else [""]
    try:
        return ".".join(plain_name(each) for each in parts)
    except ValueError:
        raise ValueError("a name without dots, blanks and slashes, or app.db of two such names") from None


def table_name(value: object) -> str:
    # It is also the name of a file in the queue's folder.
    if isinstance(value, str) and value.isprintable() and re.fullmatch(r"[^ ./\\]([^/\\]*[^ /\\])?", value):
        return value
    raise ValueError("the name of a table, without slashes, outer blanks and a leading dot")


def class_path(value: object) -> str:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (module.strip() and colon and name.strip()):
        raise ValueError("module.path:ClassName")
    return f"{module}:{name}"


def checked(check: Check, default: Any = None) -> Any:
    """A field of a dataclass that `check_fields` looks at."""
    return field(default=default, metadata={"check": check})


def check_fields(owner: str, config: Any) -> None:
    """Check every field that was declared as `checked`, and keep what its check returns."""
    for item in fields(config):
        if "check" not in item.metadata:
            continue
        value = getattr(config, item.name)
        try:
            object.__setattr__(config, item.name, item.metadata["check"](value))
        except ValueError as expected:
            raise ConfigError(f"{owner}, {item.name}: expected {expected}, got {show(value)}") from None
