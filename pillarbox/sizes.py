"""Sizes as people write them ("64MB", "512 KiB") to bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pillarbox.errors import ConfigError

_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "kib": 2**10, "kb": 10**3, "b": 1, "": 1}
)
_PATTERN: Final = re.compile(r"([0-9]{1,15})\s*([a-z]*)", re.IGNORECASE)


def parse_size(value: object, *, what: str = "Size") -> int:
    """Read "64MB", "512KiB" or a number of bytes: KB, MB and GB are thousands, KiB, MiB and GiB powers of 1024.

    `what` names the value in errors.
    """
    match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _BYTES.get(match[2].lower()) if match is not None else None
    size = int(match[1]) * unit if match is not None and unit is not None else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f"{what}: expected a size of 1 or more with the unit B, KB, MB, GB, KiB, MiB or GiB, such as '64MB', or a "
            f"number of bytes; got {value!r}"
        )
    return size
