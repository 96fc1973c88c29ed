"""Durations as people write them ("30s", "1h30m") to timedelta and back, and delays that grow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final

from pillarbox.errors import ConfigError

_MICROSECONDS: Final[Mapping[str, int]] = MappingProxyType(
    {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
)
_PATTERN: Final = re.compile(r"\s*".join(rf"(?:([0-9]{{1,15}}){unit})?" for unit in _MICROSECONDS))
_MOST_STEPS: Final = 10**15


def parse_duration(value: object, *, what: str = "Duration") -> timedelta:
    """Read "30s", "1500ms", "5m", "2h", "7d" or several, largest unit first ("1h30m").

    A timedelta is returned as it is. A bare number is refused, because it does not say its unit. `what` names
    the value in errors.
    """
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise ConfigError(f"{what}: expected a duration of zero or more, got {value!r}")
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ConfigError(f"{what}: expected a duration with its unit, such as '30s'; got the number {value!r}")
    match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match.lastindex is None:
        raise ConfigError(
            f"{what}: expected whole numbers with the units d, h, m, s, ms or us, largest first, "
            f"such as '30s' or '1h30m'; got {value!r}"
        )
    counts = map(int, match.groups("0"))
    total = sum(count * size for count, size in zip(counts, _MICROSECONDS.values(), strict=True))
    try:
        return timedelta(microseconds=total)
    except OverflowError as error:
        raise ConfigError(f"{what}: expected less than a billion days, got {value!r}") from error


def format_duration(duration: timedelta) -> str:
    """Write a duration the way `parse_duration` reads it, exactly; a negative one gets a minus sign."""
    left = abs(duration) // timedelta(microseconds=1)
    parts = ["-"] if duration < timedelta(0) else []
    for unit, size in _MICROSECONDS.items():
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def grow(first: timedelta, *, factor: float, steps: int, cap: timedelta) -> timedelta:
    """Multiply `first` by `factor` once a step, up to `cap`; any number of steps is fine."""
    steps = max(0, min(steps, _MOST_STEPS))
    # Compared as logarithms: factor ** steps has no float for a large number of steps.
    if first >= cap or steps * math.log(factor) >= math.log(cap / first):
        return cap
    return min(cap, first * factor**steps)
