"""Relays as processes beside each other: killed, stopped, terminated, their database restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from pillarbox import Event
from tests.acceptance.launcher import Launcher
from tests.acceptance.processes import (
    DATABASES,
    Database,
    RelayProcess,
    StartRelay,
    Writers,
    await_progress,
    count_delivered,
    is_delivered,
    judge,
    locked,
    read_lines,
    relay_processes,
    run_command,
    temporary_database,
    until,
)
from tests.private import private_server
from tools.servers.server import Server

LEASE = ("--claim", "lease", "--lease", "2s")
AUTO = ("--claim", "auto", "--lease", "2s")
HOLD = ("--claim", "hold", "--batch-size", "1")
"""A relay holds rows from its first batch on when that is as large as its batches get."""


@pytest.fixture
def start_relay(launcher: Launcher, tmp_path: Path) -> Iterator[StartRelay]:
    with relay_processes(launcher, tmp_path) as start:
        yield start


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Callable[..., Any]:
    """Run a command to its end."""
    return partial(run_command, launcher, tmp_path)


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    with temporary_database(request.param, tmp_path) as made:
        yield made


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("database", names, indirect=True)


def steps(count: int, key: str) -> list[Event]:
    return [Event("stepped", {"number": number}, key=key) for number in range(1, count + 1)]


# -- several relays ----------------------------------------------------------------------------------------


@on(*DATABASES)
def test_relays_that_are_killed_and_stopped_lose_nothing(
    database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    file = tmp_path / "delivered.jsonl"
    crew = [start_relay(database, "--batch-size", "40", *options) for options in (AUTO, LEASE, AUTO, LEASE)]
    with Writers(database, file) as writers:
        await_progress(file)
        for _ in range(3):
            with locked(file):
                until(database.leased, "a relay in the middle of a batch")
                killed = crew.pop(0)
                killed.kill()
                assert database.faults() == []
            crew.append(start_relay(database, "--batch-size", "40", *(AUTO if len(crew) % 2 else LEASE)))
            await_progress(file)
        for relay in crew:
            relay.wait_for_start()
        with locked(file):
            until(database.leased, "a relay in the middle of a batch")
            for relay in crew[:2]:
                relay.freeze(database)
        await_progress(file)
    until(lambda: is_delivered(file, writers), "every committed event in the file")
    assert database.backend == "sqlite" or database.connections()
    for relay in crew[:2]:
        relay.thaw()
    until(database.is_empty, "an empty outbox")
    assert [relay.terminate() for relay in crew] == [0, 0, 0, 0]
    judge(read_lines(file), writers)
    assert database.is_empty()
    assert database.dead() == []
    until(lambda: not database.connections(), "no connection of a relay left on the server", seconds=10)


@on(*DATABASES)
def test_relay_that_lost_its_lease_changes_nothing(database: Database, start_relay: StartRelay, tmp_path: Path) -> None:
    late_file, file = tmp_path / "late.jsonl", tmp_path / "delivered.jsonl"
    database.put(*steps(3, "a"))
    with locked(late_file):
        late = start_relay(database, "--claim", "lease", "--lease", "1s", file=late_file)
        until(database.leased, "the first event under lease")
        late.freeze(database)
    lost = database.leased()
    with locked(file):
        taker = start_relay(database, "--claim", "lease", "--lease", "60s", file=file)
        until(lambda: _is_taken_over(database, lost), "the event under another lease")
        before = _first_row(database)
        late.thaw()
        said = "had lapsed before the settlement"
        until(lambda: said in late.log or _first_row(database) != before, "the late relay's settlement")
        assert len(read_lines(late_file)) == 1, "the late relay's delivery cannot be undone"
        assert late.terminate() == 0
        assert _first_row(database) == before, late.log
        assert said in late.log
    until(database.is_empty, "an empty outbox")
    assert taker.terminate() == 0
    found = [(line["payload"]["number"], line["attempt"]) for line in read_lines(file)]
    assert found == [(1, 2), (2, 1), (3, 1)]


def _first_row(database: Database) -> tuple[object, ...]:
    return database.rows("seq", "state", "token", "attempts", "error")[0]


def _is_taken_over(database: Database, lost: list[tuple[object, ...]]) -> bool:
    now = database.leased()
    return [seq for seq, _ in now] == [seq for seq, _ in lost] and not set(now) & set(lost)


@on("pgbouncer")
def test_two_relays_deliver_through_a_pooler(database: Database, start_relay: StartRelay, tmp_path: Path) -> None:
    file = tmp_path / "delivered.jsonl"
    relays = [start_relay(database, "--batch-size", "20") for _ in range(2)]
    with Writers(database, file, ahead=200) as writers:
        for _ in range(5):
            await_progress(file, lines=50)
    until(lambda: is_delivered(file, writers), "every committed event in the file")
    until(database.is_empty, "an empty outbox")
    assert [relay.terminate() for relay in relays] == [0, 0]
    judge(read_lines(file), writers)
    assert len(read_lines(file)) == len(writers.committed), "nobody died, so nothing is delivered twice"
    until(lambda: _clients_of_pooler(database) == 0, "no client of the pooler left", seconds=10)


def _clients_of_pooler(database: Database) -> int:
    url = sa.make_url(database.url)
    admin = url.set(database="pgbouncer").render_as_string(hide_password=False)
    with psycopg.connect(admin, autocommit=True, cursor_factory=psycopg.ClientCursor) as db:
        found = db.execute("SHOW CLIENTS")
        assert found.description is not None
        names = [column.name for column in found.description]
        return sum(row[names.index("database")] == url.database for row in found.fetchall())


# -- SIGTERM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "options"),
    [
        pytest.param("sqlite", LEASE, id="sqlite"),
        pytest.param("postgres", LEASE, id="postgres-lease"),
        pytest.param("postgres", HOLD, id="postgres-hold"),
        pytest.param("mariadb", HOLD, id="mariadb-hold"),
        pytest.param("mysql", LEASE, id="mysql-lease"),
    ],
    indirect=["database"],
)
def test_sigterm_gives_back_what_is_under_way(
    database: Database,
    options: tuple[str, ...],
    start_relay: StartRelay,
    run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    file = tmp_path / "delivered.jsonl"
    database.put(*steps(5, "a"), Event("stepped", {"number": 1}))
    with locked(file):
        relay = start_relay(database, *options, "--lease", "60s", "--stop-timeout", "1s")
        relay.wait_for_delivery()
        started_at = time.monotonic()
        assert relay.terminate(within=10) == 0
        assert time.monotonic() - started_at >= 0.9, "it gave up before the time it was given"
        status = run("status", "--store", database.url)
        assert (status["held"], status["new"]) == (0, 6)
        assert read_lines(file) == []
    until(lambda: not database.connections(), "no connection left on the server", seconds=10)
    run("relay", "--drain", "--store", database.url, "--sink", f"file:{file}")
    lines = read_lines(file)
    assert [line["payload"]["number"] for line in lines if line["key"] == "a"] == [1, 2, 3, 4, 5]
    assert [line["attempt"] for line in lines] == [1, 1, 1, 1, 1, 1]


@on("sqlite", "postgres")
def test_sigterm_settles_what_it_delivered(
    database: Database, start_relay: StartRelay, run: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "delivered.jsonl"
    events = [event for number in range(200) for event in steps(10, f"key-{number}")]
    database.put(*events)
    relay = start_relay(database, "--batch-size", "20", "--lease", "60s")
    await_progress(file)
    assert relay.terminate() == 0
    assert run("status", "--store", database.url)["held"] == 0
    assert count_delivered(file) + len(database.rows("seq")) == 2000
    assert 0 < count_delivered(file) < 2000
    run("relay", "--drain", "--store", database.url, "--sink", f"file:{file}")
    delivered = [(line["key"], line["payload"]["number"]) for line in read_lines(file)]
    assert len(delivered) == 2000
    assert sorted(delivered, key=lambda each: each[0]) == [
        (key, number) for key in sorted({f"key-{n}" for n in range(200)}) for number in range(1, 11)
    ]


# -- a database that goes away -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [LEASE, HOLD], ids=["lease", "hold"])
@on("postgres", "mariadb", "mysql")
def test_relay_goes_on_when_its_sessions_are_ended(
    database: Database, options: tuple[str, ...], start_relay: StartRelay, tmp_path: Path
) -> None:
    file = tmp_path / "delivered.jsonl"
    database.put(*steps(3, "a"))
    with locked(file):
        relay = start_relay(database, *options)
        relay.wait_for_delivery()
        database.end_connections()
    until(database.is_empty, f"an empty outbox; the relay said: {relay.log}")
    numbers = [line["payload"]["number"] for line in read_lines(file)]
    assert list(dict.fromkeys(numbers)) == [1, 2, 3]
    assert relay.terminate() == 0
    assert "Traceback" not in relay.log


@pytest.fixture
def private_postgres(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A PostgreSQL that a test may stop, by a signal of its choice, without disturbing anybody."""
    server = private_server("postgres")
    monkeypatch.setattr(server, "stop_signal", server.stop_signal)
    return server


@pytest.fixture
def private_database(private_postgres: Server) -> Iterator[Database]:
    private_postgres.start()
    database = Database(sa.make_url(private_postgres.url))
    yield database
    private_postgres.start()
    with database.engine.begin() as db:
        db.exec_driver_sql("DROP SCHEMA public CASCADE")
        db.exec_driver_sql("CREATE SCHEMA public")


def test_relays_go_on_when_their_database_restarts(
    private_postgres: Server, private_database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    file = tmp_path / "delivered.jsonl"
    relays = [start_relay(private_database, "--batch-size", "20", *options) for options in (AUTO, LEASE)]
    writers = Writers(private_database, file)
    with writers:
        await_progress(file)
    for stop_signal in (signal.SIGINT, signal.SIGQUIT):  # a shutdown that ends sessions, and one like a crash
        private_postgres.stop_signal = stop_signal
        with locked(file):
            private_database.put(*_more_steps(private_database, writers))
            until(private_database.leased, "a relay in the middle of a batch")
            private_postgres.stop()
        for relay in relays:
            relay.wait_for_log("The store is down")
        private_postgres.start()
        until(lambda: is_delivered(file, writers), "every committed event in the file")
        until(private_database.is_empty, "an empty outbox")
    assert [relay.terminate() for relay in relays] == [0, 0]
    judge(read_lines(file), writers)
    assert private_database.dead() == []


def _more_steps(database: Database, writers: Writers) -> list[Event]:
    """Events that follow the writers' own in each key, noted as committed."""
    with database.engine.begin() as db:
        db.execute(sa.update(database.counters).values(number=database.counters.c.number + 1))
        numbers = db.execute(sa.select(database.counters.c.name, database.counters.c.number)).all()
    events = [Event("stepped", {"number": number}, key=key) for key, number in numbers]
    writers.committed |= {str(event.id): (key, number) for event, (key, number) in zip(events, numbers, strict=True)}
    return events


def test_relay_waits_for_a_database_that_is_not_up_yet(
    private_postgres: Server, private_database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    private_database.put(*steps(3, "a"))
    private_postgres.stop()
    relay = start_relay(private_database)
    relay.wait_for_log("The store is down, trying again until it is back")
    private_postgres.start()
    until(private_database.is_empty, "an empty outbox")
    assert [line["payload"]["number"] for line in read_lines(tmp_path / "delivered.jsonl")] == [1, 2, 3]
    assert relay.terminate() == 0


def test_relay_that_waits_for_its_database_ends_at_sigterm(
    private_postgres: Server, private_database: Database, start_relay: StartRelay
) -> None:
    private_postgres.stop()
    relay: RelayProcess = start_relay(private_database)
    relay.wait_for_log("The store is down")
    assert relay.terminate(within=10) == 0
