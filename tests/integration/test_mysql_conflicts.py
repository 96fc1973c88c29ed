"""Conflicts that MySQL and MariaDB end by undoing a transaction whole, savepoints and all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox.stores.dialect import Given
from pillarbox.stores.refusals import write_apart
from tests.contract.stores import SqlKit, event, make_database


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
async def test_deadlock_within_a_savepoint_is_tried_again(name: str, tmp_path: Path) -> None:
    database = make_database(name, tmp_path)
    kit = SqlKit(database)
    store = await kit.open()
    kit.put(event("one"), event("two"), *(event("more") for _ in range(50)))
    table = database.outbox.table
    with database.engine.connect() as db:
        first, second = db.execute(sa.select(table.c.seq).order_by(table.c.seq).limit(2)).scalars()

    def change(*rows: int) -> sa.Update:
        return sa.update(table).where(table.c.seq.in_(rows)).values(error="changed")

    tries = 0

    def work(db: sa.Connection) -> Any:
        nonlocal tries
        tries += 1
        if tries > 1:
            return "again"
        db.execute(change(first))
        # The other one waits for us, and has changed more: of the two we are undone.
        waiting.start()
        return write_apart(db, lambda rows: db.execute(change(second)).rowcount, [Given(second)])

    try:
        with database.engine.connect() as other:
            other.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 60")
            other.execute(sa.update(table).where(table.c.seq >= second).values(error="theirs"))
            waiting = threading.Thread(target=other.execute, args=(change(first),))
            assert await store.run_soon(work) == "again"
            waiting.join()
            other.rollback()
        assert tries == 2
        await kit.close()
    finally:
        database.drop()
