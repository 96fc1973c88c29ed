"""A routed relay as a process: killed in the middle of a fan-out and of a delivery, with one destination stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pillarbox import Event
from tests.acceptance.launcher import Launcher
from tests.acceptance.processes import (
    DATABASES,
    Database,
    RelayProcess,
    Writers,
    await_progress,
    count_delivered,
    is_delivered,
    judge,
    locked,
    read_lines,
    temporary_database,
    until,
)

SETTINGS = """
[store]
url = "{store}"

[sinks.first]
url = "file:{folder}/first.jsonl?lock_timeout=60s"

[sinks.second]
url = "file:{folder}/second.jsonl?lock_timeout=60s"

[relay]
batch_size = 40
lease = "2s"

[[routes]]
to = ["first", "second"]
"""


class RoutedRelay(RelayProcess):
    """`pillarbox relay` with a settings file."""

    def __init__(self, launcher: Launcher, folder: Path, number: int) -> None:
        self.file = folder / "first.jsonl"
        self.log_file = folder / f"relay-{number}.log"
        args = ["relay", "--config", str(folder / "pillarbox.toml"), "-vv"]
        self.process = launcher.start(*args, cwd=folder, out=self.log_file, err=self.log_file)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    with temporary_database(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def start(launcher: Launcher, database: Database, tmp_path: Path) -> Iterator[Callable[[], RoutedRelay]]:
    (tmp_path / "pillarbox.toml").write_text(SETTINGS.format(store=database.url, folder=tmp_path))
    started: list[RoutedRelay] = []

    def start() -> RoutedRelay:
        started.append(RoutedRelay(launcher, tmp_path, len(started)))
        return started[-1]

    yield start
    for relay in started:
        relay.kill()


def test_killed_relays_lose_nothing_for_any_sink(
    database: Database, start: Callable[[], RoutedRelay], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    crew = [start(), start()]
    with Writers(database, first) as writers:
        for _ in range(3):
            await_progress(first)
            await_progress(second)
            crew.pop(0).kill()
            assert database.faults() == []
            crew.append(start())
    for file in (first, second):
        until(lambda file=file: is_delivered(file, writers), f"every committed event in {file.name}")  # type: ignore[misc]
    until(database.is_empty, "an empty outbox")
    for relay in crew:
        relay.wait_for_start()
    assert [relay.terminate() for relay in crew] == [0, 0]
    for file in (first, second):
        judge(read_lines(file), writers)
    assert database.dead() == []


def test_stuck_destination_does_not_stop_the_other(
    database: Database, start: Callable[[], RoutedRelay], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with locked(second):
        relay = start()
        with Writers(database, first) as writers:
            await_progress(first)
        until(lambda: is_delivered(first, writers), "every committed event in the free file")
        assert count_delivered(second) == 0
        delivered = [line["id"] for line in read_lines(first)]
    until(database.is_empty, "an empty outbox")
    assert relay.terminate() == 0
    assert sorted(line["id"] for line in read_lines(first)) == sorted(delivered)
    judge(read_lines(second), writers)


def test_rows_of_a_sink_that_is_no_longer_configured_are_named(
    database: Database, launcher: Launcher, tmp_path: Path
) -> None:
    settings, log = tmp_path / "pillarbox.toml", tmp_path / "relay.log"
    settings.write_text(SETTINGS.format(store=database.url, folder=tmp_path).replace("second", "gone/second"))
    routed = settings.read_text().replace("sinks.gone/second", "sinks.second").replace('"gone/second"', '"second"')
    settings.write_text(routed)
    database.put(Event("order.placed", {}))
    command = ["relay", "--drain", "--config", str(settings)]
    # Nobody answers at the second destination, so its copy stays.
    settings.write_text(routed.replace(f"file:{tmp_path}/gone/second.jsonl?lock_timeout=60s", "nats://127.0.0.1:1"))
    assert launcher.run(*command, cwd=tmp_path, out=log, err=log) == 1
    settings.write_text(routed.replace('["first", "second"]', '["first"]'))
    assert launcher.run(*command, cwd=tmp_path, out=log, err=log) == 0
    assert "there are events for sink 'second', which nobody delivers here." in log.read_text()
    assert count_delivered(tmp_path / "first.jsonl") == 1
    (tmp_path / "gone").mkdir()
    settings.write_text(routed)
    assert launcher.run(*command, cwd=tmp_path, out=log, err=log) == 0
    assert count_delivered(tmp_path / "gone" / "second.jsonl") == 1
    assert database.is_empty()
