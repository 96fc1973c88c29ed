"""The relay as a process before a database that says nothing any more: it goes on, and it ends when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pillarbox import Event
from tests.acceptance.launcher import Launcher
from tests.acceptance.processes import (
    Database,
    StartRelay,
    count_delivered,
    relay_processes,
    temporary_database,
    until,
)
from tests.freezing import freezing_before


@pytest.fixture
def start_relay(launcher: Launcher, tmp_path: Path) -> Iterator[StartRelay]:
    with relay_processes(launcher, tmp_path) as start:
        yield start


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    with temporary_database(request.param, tmp_path) as made:
        yield made


@pytest.mark.parametrize("database", ["postgres", "mariadb", "mysql"], indirect=True)
def test_a_silent_database_neither_stops_the_relay_nor_keeps_it_from_ending(
    database: Database, start_relay: StartRelay
) -> None:
    with freezing_before(database.url) as proxy:
        database.url = proxy.url
        relay = start_relay(database, "--stop-timeout", "2s")
        database.put(Event("first", {}))
        until(lambda: count_delivered(relay.file) == 1)
        # A settlement is tried again without a word.
        until(database.is_empty)
        # Not at any time: a pool may replace an idle connection that froze without having asked it anything.
        proxy.freeze_at(b"COMMIT")
        until(proxy.has_frozen.is_set)
        database.put(Event("second", {}))
        until(lambda: count_delivered(relay.file) >= 2)
        assert relay.log.count("The store is down") == 1

        proxy.freeze(also_new=True)
        database.put(Event("third", {}))
        # Two seconds, and a moment for giving back and closing.
        assert relay.terminate(within=20) == 0


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_silent_database_stops_no_relay_that_starts(database: Database, start_relay: StartRelay) -> None:
    with freezing_before(database.url) as proxy:
        database.url = proxy.url
        # The last question before the first claim: which sinks have rows.
        proxy.freeze_at(b"DISTINCT")
        relay = start_relay(database)
        until(proxy.has_frozen.is_set)
        database.put(Event("first", {}))
        until(lambda: count_delivered(relay.file) == 1)
        assert relay.terminate(within=20) == 0


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_stop_ends_a_relay_that_cannot_start(database: Database, start_relay: StartRelay, tmp_path: Path) -> None:
    with database.engine.begin():  # keeps SQLite's write lock, for which the relay would wait half a minute
        relay = start_relay(database, "--stop-timeout", "1s")
        until(lambda: str(tmp_path / "outbox.db") in relay.process.open_files)
        assert relay.terminate(within=20) == 0
