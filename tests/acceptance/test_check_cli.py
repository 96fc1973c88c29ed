"""`pillarbox events check` as an operator runs it."""

from __future__ import annotations

import json
from pathlib import Path

import sqlalchemy as sa
from typer.testing import CliRunner

from pillarbox import Event, Outbox
from pillarbox.cli.commands import app


def test_faults_are_listed_mended_and_told_by_the_exit_code(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(url)
    outbox = Outbox(sa.MetaData())
    outbox.table.metadata.create_all(engine)
    with engine.begin() as db:
        outbox.put(db, Event("order.placed", {}, key="ann"))
    run = CliRunner().invoke
    check = ["events", "check", "--store", url]
    clean = run(app, check)
    assert (clean.exit_code, clean.stdout) == (0, "Every event is as it should be.\n")
    with engine.begin() as db:
        db.execute(sa.update(outbox.table).values(state=3))
    found = run(app, check)
    assert found.exit_code == 1
    assert "Found 1 fault, mended 0." in found.stdout
    mended = run(app, [*check, "--mend", "--actor", "ann", "--json"])
    assert mended.exit_code == 0
    assert (json.loads(mended.stdout)["found"], json.loads(mended.stdout)["mended"]) == (1, 1)
    assert run(app, check).exit_code == 0
    engine.dispose()


def test_all_faults_are_mended_however_many_they_are(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(url)
    outbox = Outbox(sa.MetaData())
    outbox.table.metadata.create_all(engine)
    with engine.begin() as db:
        outbox.put(db, *(Event("order.placed", {}, key=f"key-{number}") for number in range(2500)))
        db.execute(sa.update(outbox.table).values(state=3))
        db.exec_driver_sql("UPDATE outbox SET state = 9 WHERE seq = 1")
        db.exec_driver_sql("UPDATE outbox SET key = X'00ff' WHERE seq = 2")
    check = ["events", "check", "--store", url]
    mended = CliRunner().invoke(app, [*check, "--mend", "--actor", "ann", "--json"])
    assert mended.exit_code == 1
    assert (json.loads(mended.stdout)["found"], json.loads(mended.stdout)["mended"]) == (2500, 2499)
    left = CliRunner().invoke(app, check)
    assert "Found 1 fault, mended 0." in left.stdout
    engine.dispose()
