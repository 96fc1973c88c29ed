"""Single values of a configuration: the variables in them, their types, and the `.env` file.

Errors say where a value was given. They show it without the password of a url; of a `.env` file they show
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from pillarbox.durations import parse_duration
from pillarbox.errors import ConfigError
from pillarbox.sizes import parse_size
from pillarbox.urls import MASK, is_secret_name, mask_url


class Given(NamedTuple):
    """A value and where it was given; `is_text` when it came from where there is only text: a variable.

    `rank` says which of several values counts: the lowest.
    """

    value: object
    where: str
    rank: int = 0
    is_text: bool = False


Read = Callable[[Given], Any]


# -- types -------------------------------------------------------------------------------------------------


def read_text(given: Given) -> str:
    if not isinstance(given.value, str) or not given.value.strip():
        raise _wrong(given, "text")
    return given.value


def read_texts(given: Given) -> tuple[str, ...]:
    value = given.value.split(",") if given.is_text and isinstance(given.value, str) else given.value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise _wrong(given, "a list of texts" if not given.is_text else "texts with commas between them")
    return tuple(each.strip() for each in value)


def read_number(given: Given) -> int:
    value = as_number(given.value) if given.is_text else given.value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(given, "a whole number of 1 or more")
    return value


def as_number(value: object) -> object:
    """Turn a text of digits into the number it means; anything else stays as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value.strip()) else value


_SWITCH: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_switch(given: Given) -> bool:
    value = given.value
    if given.is_text and isinstance(value, str):
        value = _SWITCH.get(value.strip().lower())
    if not isinstance(value, bool):
        raise _wrong(given, "true or false")
    return value


def read_duration(given: Given) -> timedelta:
    return parse_duration(given.value, what=given.where)


def read_size(given: Given) -> int:
    return parse_size(given.value, what=given.where)


def read_pause(given: Given) -> timedelta:
    pause = read_duration(given)
    if not pause:
        raise _wrong(given, "a duration above zero")
    return pause


def one_of(*choices: str) -> Read:
    def read(given: Given) -> str:
        if given.value not in choices:
            hint = _did_you_mean(given.value, choices)
            raise _wrong(given, f"{', '.join(choices[:-1])} or {choices[-1]}", hint)
        return str(given.value)

    return read


def _wrong(given: Given, expected: str, hint: str = "") -> ConfigError:
    # A place ends in the option's name.
    is_secret = is_secret_name(given.where.rpartition(" ")[2])
    return ConfigError(f"{given.where}: expected {expected}, got {MASK if is_secret else show(given.value)}{hint}")


def show(value: object) -> str:
    """Return a value as it may be shown."""
    if isinstance(value, str):
        return repr(mask_url(value))
    shown = repr(value)
    return f"one of type {type(value).__name__}" if "://" in shown else shown


# -- names -------------------------------------------------------------------------------------------------


def check_known(name: str, known: Iterable[str], where: str, *, kind: str = "key") -> None:
    """Refuse a name that is not known, with the one that may have been meant."""
    names = list(known)
    if name not in names:
        hint = _did_you_mean(name, names)
        raise ConfigError(f"{where}: unknown {kind} {name!r}; expected {', '.join(names)}{hint}")


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f". Did you mean {near[0]!r}?" if near else ""


# -- variables ---------------------------------------------------------------------------------------------

_NAME: Final = "[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE: Final = re.compile(rf"\$\$\{{|\$\{{(?:({_NAME})(?::-([^}}]*))?\}})?")


def fill(value: Any, variables: Mapping[str, str], where: str) -> Any:
    """Fill in every `${NAME}` and `${NAME:-default}` of a text, or of the texts in a table or list."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _look_up(match, variables, where), value)
    if isinstance(value, dict):
        return {key: fill(item, variables, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, variables, where) for item in value]
    return value


def _look_up(match: re.Match[str], variables: Mapping[str, str], where: str) -> str:
    if match[0] == "$${":
        return "${"
    name, default = match.groups()
    if name is None:
        raise ConfigError(f"{where}: expected ${{NAME}} or ${{NAME:-default}}; write '$${{' for a plain '${{'")
    value = variables.get(name)
    if default is not None:
        return value or default
    if value is None:
        raise ConfigError(f"{where}: the environment variable {name} is not set. Set it, or write ${{{name}:-default}}")
    return value


_ASSIGNMENT: Final = re.compile(rf"(?:export\s+)?({_NAME})\s*=\s*(.*)")
_SINGLE_QUOTED: Final = re.compile(r"'([^']*)'\s*(?:#.*)?")
_DOUBLE_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r"}


def read_dotenv(path: Path) -> dict[str, str]:
    """Read a file of KEY=value lines and comments; a value may be in quotes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    values: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        assignment = read_assignment(line)
        if assignment is None:
            raise ConfigError(f"{path}, line {number}: expected KEY=value, KEY='value' or KEY=\"value\"")
        name, value = assignment
        values[name] = value
    return values


def read_assignment(line: str) -> tuple[str, str] | None:
    """Read one line KEY=value; None when it is something else."""
    match = _ASSIGNMENT.fullmatch(line.strip())
    value = None if match is None else _unquote(match[2])
    return None if match is None or value is None else (match[1], value)


def _unquote(text: str) -> str | None:
    if text.startswith("'"):
        single = _SINGLE_QUOTED.fullmatch(text)
        return None if single is None else single[1]
    if text.startswith('"'):
        double = _DOUBLE_QUOTED.fullmatch(text)
        if double is None:
            return None
        return re.sub(r"\\(.)", lambda escaped: _ESCAPED.get(escaped[1], escaped[1]), double[1])
    # A comment begins after a blank: a '#' inside a value belongs to it.
    return re.split(r"(?:^|\s+)#", text, maxsplit=1)[0].rstrip()
