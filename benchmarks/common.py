"""What the benchmarks share: a result line, a table of their own, and alternating measurements."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from pillarbox import Event, Outbox

PAYLOAD = b"x" * 256
KEYS = 1000
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))


@dataclass(frozen=True)
class Result:
    """One measured figure against its bar; `at_most` turns the comparison round, `parts` are printed beside it."""

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float
    bar: float
    at_most: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar

    def line(self) -> str:
        fields = {
            "name": self.name,
            "value": round(self.value, 3),
            "unit": self.unit,
            "baseline": round(self.baseline, 3),
            "ratio": round(self.ratio, 3),
            "bar": self.bar,
            "ok": self.is_ok,
            **{name: round(value, 3) for name, value in self.parts.items()},
        }
        return json.dumps(fields)


def server_url(name: str) -> str:
    """A server's URL from the environment or from `.services/env`."""
    variable = f"PILLARBOX_TEST_{name.upper()}"
    if variable in os.environ:
        return os.environ[variable]
    path = Path(__file__).parents[1] / ".services" / "env"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        key, _, value = line.partition("=")
        if key == variable:
            return value
    raise SystemExit(f"{variable} is not set. Run `make services` first.")


def make_events(count: int, *, start: int = 0) -> list[Event]:
    return [Event("bench", PAYLOAD, key=f"key-{number % KEYS}") for number in range(start, start + count)]


@contextmanager
def postgres_outbox(table: str = "bench_outbox") -> Iterator[tuple[Outbox, sa.Engine]]:
    """An outbox in fresh tables on PostgreSQL, dropped afterwards."""
    metadata = sa.MetaData()
    outbox = Outbox(metadata, table=table)
    engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    metadata.drop_all(engine)
    metadata.create_all(engine)
    try:
        yield outbox, engine
    finally:
        metadata.drop_all(engine)
        engine.dispose()


def fill(outbox: Outbox, engine: sa.Engine, count: int, *, analyze: bool = True) -> None:
    """Put events in transactions of a thousand."""
    for start in range(0, count, 1000):
        with engine.begin() as connection:
            outbox.put(connection, *make_events(min(1000, count - start), start=start))
    if analyze and engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(f"VACUUM ANALYZE {outbox.table.fullname}")


async def alternate(
    ours: Callable[[], Awaitable[float]], bare: Callable[[], Awaitable[float]], *, rounds: int = ROUNDS
) -> tuple[float, float, float]:
    """Measure both in turn; returns the medians and the median of the rounds' ratios."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            second, first = await bare(), await ours()
        else:
            first, second = await ours(), await bare()
        pairs.append((first, second))
    mine, base = zip(*pairs, strict=True)
    return statistics.median(mine), statistics.median(base), statistics.median(a / b for a, b in pairs)
