"""The reader of the demo: follows the file that the relay appends to, and judges what it saw."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(slots=True)
class Reader:
    """What has arrived so far.

    An order may arrive again after a relay was killed: only its first arrival is judged. Latency is the time
    from the put, inside the shop's transaction, until the line is read here.
    """

    arrivals: dict[str, int] = field(default_factory=dict)
    """How often each order came, by its id."""
    out_of_order: int = 0
    latencies: list[float] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)

    def take(self, order: Mapping[str, Any], now: float) -> None:
        """Note one delivered order."""
        key, customer, number = order["id"], order["customer"], order["number"]
        self.arrivals[key] = self.arrivals.get(key, 0) + 1
        if self.arrivals[key] > 1:
            return
        if number <= self._last.get(customer, 0):
            self.out_of_order += 1
        self._last[customer] = max(number, self._last.get(customer, 0))
        self.latencies.append(max(0.0, now - order["placed_at"]))

    @property
    def delivered(self) -> int:
        return len(self.arrivals)

    @property
    def delivered_twice(self) -> int:
        return sum(count > 1 for count in self.arrivals.values())


class Tail:
    """The lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        return lines


def take_lines(reader: Reader, lines: Iterable[bytes]) -> None:
    """Note what the lines say; one that a killed relay left unfinished says nothing, it comes again."""
    now = time.time()
    for line in lines:
        try:
            reader.take(orjson.loads(line)["payload"], now)
        except orjson.JSONDecodeError:
            continue


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value that this share of all values does not exceed; None when there is none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None
