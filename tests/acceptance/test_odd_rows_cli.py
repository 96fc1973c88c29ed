"""Rows that another program wrote as no event can be, as the commands of relays and operators meet them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from pillarbox import Event
from tests.acceptance.commands import Done, Table
from tests.acceptance.commands import run as run_command
from tests.acceptance.launcher import Launcher
from tests.servers import server_url

ODD = {
    "postgres": {
        "far": "created_at = '20000-01-01'",
        "bc": "created_at = '0044-03-15 BC'",
        "endless": "created_at = 'infinity'",
        "tried": "attempts = 2147483647",
        "list": "headers = CAST('[1]' AS jsonb)",
    },
    "mariadb": {"tried": "attempts = 2147483647", "list": "headers = '[1]'"},
    "mysql": {"tried": "attempts = 2147483647", "list": "headers = '[1]'"},
    "sqlite": {
        "type": "type = CAST(X'62ff' AS TEXT)",
        "text": "key = CAST(X'62ff' AS TEXT)",
        "headers": "headers = CAST(X'7bff7d' AS TEXT)",
        "blob": "key = X'00ff'",
        "many": "attempts = 'many'",
        "few": "max_attempts = 'few'",
        "yesterday": "created_at = 'yesterday'",
        "list": "headers = '[1]'",
    },
}
READABLE = {"postgres": ["tried"], "mariadb": ["tried"], "mysql": ["tried"], "sqlite": ["many"]}
"""Odd in its attempts alone, which begin anew when it is redriven."""


@pytest.fixture(params=ODD)
def database(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def table(database: str, launcher: Launcher, tmp_path: Path) -> Iterator[Table]:
    url = f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else server_url(database)  # type: ignore[arg-type]
    made = Table(url, tmp_path, partial(run_command, launcher, cwd=tmp_path))
    yield made.create()
    made.drop()


def spoil(table: Table, event: Event, change: str) -> None:
    with table.engine.begin() as db:
        chosen = db.execute(sa.select(table.outbox.table.c.seq).where(table.outbox.table.c.id == event.id)).scalar_one()
        quoted = change.replace("key =", "`key` =") if table.engine.dialect.name == "mysql" else change
        db.exec_driver_sql(f"UPDATE {table.name} SET {quoted} WHERE seq = {chosen}")


def run(table: Table, *args: str) -> Done:
    """Run a command that must end well, and without a word about itself."""
    done = table.run(*args)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err + done.out
    assert "defect" not in done.err + done.out
    return done


def test_odd_rows_die_at_once_and_operators_see_them(table: Table, database: str) -> None:
    odd = {name: Event(name, {}, key=f"key-{name}") for name in ODD[database]}
    good, fine = Event("good", {}, key="good"), Event("fine", {})
    table.put(good, *odd.values(), fine)
    for name, change in ODD[database].items():
        spoil(table, odd[name], change)
    ids = {str(event.id) for event in odd.values()}

    assert {record["id"] for record in run(table, "events", "list", "--json").json} == ids | {
        str(good.id),
        str(fine.id),
    }
    drained = run(table, "relay", "--sink", "stdout:", "--drain")
    assert sorted(event["type"] for event in drained.events) == ["fine", "good"]
    assert f"Drained: 2 delivered, 0 to retry, {len(odd)} dead." in drained.err

    status = run(table, "status", "--json").json
    assert (status["new"], status["dead"]) == (0, len(odd))
    run(table, "status")
    listed = run(table, "events", "list", "--state", "dead", "--json").json
    assert {record["id"] for record in listed} == ids
    assert all(record["error"].startswith("Row ") for record in listed)
    plain = run(table, "events", "list").out
    assert all(name in plain for name in ids)
    for name in ids:
        [shown] = run(table, "events", "show", name, "--json").json
        assert (shown["id"], shown["state"]) == (name, "dead")
        assert name in run(table, "events", "show", name).out

    redriven = run(table, "events", "redrive", "--all", "--actor", "ann", "--json").json
    assert redriven["events"] == len(odd)
    again = run(table, "relay", "--sink", "stdout:", "--drain")
    assert [event["type"] for event in again.events] == READABLE[database]
    left = len(odd) - len(again.events)
    assert run(table, "events", "drop", "--all", "--yes", "--json").json["events"] == left
    assert table.counts() == {}
    run(table, "events", "check")


def test_blank_type_and_broken_json_are_sent_as_they_are(table: Table) -> None:
    blank, broken = Event("blank", {}), Event("broken", b"{broken", content_type="application/json")
    table.put(blank, broken)
    spoil(table, blank, "type = '  '")
    run(table, "events", "list")
    for event in (blank, broken):
        assert str(event.id) in run(table, "events", "show", str(event.id)).out
    sent = {event["id"]: event for event in run(table, "relay", "--sink", "stdout:", "--drain").events}
    assert sent[str(blank.id)]["type"] == "  "
    assert sent[str(broken.id)]["payload_base64"] == "e2Jyb2tlbg=="
    assert table.counts() == {}
