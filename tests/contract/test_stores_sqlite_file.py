"""A SQLite file that is replaced or removed under a store that has it open."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from pillarbox import Event, Outbox, Relay, StoreUnavailable
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores.url import open_store
from tests.contract.stores import claim, names, until


class File:
    """An outbox in a file; connections of its own are closed after each use."""

    def __init__(self, path: Path, layout: str = "pillarbox") -> None:
        self.path = path
        self._metadata = sa.MetaData()
        self._outbox = Outbox(self._metadata, layout)
        self._engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
        self.make_tables()

    def make_tables(self) -> None:
        self._metadata.create_all(self._engine)

    def put(self, name: str) -> None:
        with self._engine.begin() as db:
            self._outbox.put(db, Event(name, {}))

    def back_up(self, to: Path) -> None:
        with closing(sqlite3.connect(self.path)) as ours, closing(sqlite3.connect(to)) as theirs:
            ours.backup(theirs)

    def remove_wal(self) -> None:
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "shop.db")


def arrived(sink: MemorySink) -> str:
    return " ".join(claim.event.type for claim in sink.claims)


async def test_a_relay_goes_on_with_the_file_that_replaced_its_own(
    file: File, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.put("saved")
    file.back_up(tmp_path / "backup.db")
    sink = MemorySink()
    relay = Relay(open_store(f"sqlite:///{file.path}"), sink)
    run = asyncio.create_task(relay.run())
    try:
        await until(lambda: _is(arrived(sink) == "saved"))
        os.replace(tmp_path / "backup.db", file.path)
        file.remove_wal()
        await until(lambda: _is(arrived(sink) == "saved saved"))
        file.put("after")
        await until(lambda: _is(arrived(sink) == "saved saved after"))
    finally:
        relay.stop()
        await run
        await relay.close()
    assert caplog.text.count("the file was replaced; using the one that is there now") == 1


async def test_a_removed_file_is_an_outage_told_once_and_is_not_made_anew(
    file: File, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.back_up(tmp_path / "backup.db")
    sink = MemorySink()
    relay = Relay(open_store(f"sqlite:///{file.path}"), sink)
    with caplog.at_level(logging.INFO, "pillarbox"):
        run = asyncio.create_task(relay.run())
        try:
            await until(lambda: _is(relay._is_open))
            file.path.unlink()
            file.remove_wal()
            await until(lambda: _is("the file is gone" in caplog.text))
            assert not file.path.exists()
            os.replace(tmp_path / "backup.db", file.path)
            file.put("after")
            await until(lambda: _is(arrived(sink) == "after"))
        finally:
            relay.stop()
            await run
            await relay.close()
    assert caplog.text.count("The store is down") == 1


@pytest.mark.parametrize("layout", ["pillarbox", "openoutbox"])
async def test_a_new_file_without_tables_is_an_outage_until_it_has_them(tmp_path: Path, layout: str) -> None:
    file = File(tmp_path / "shop.db", layout)
    store = open_store(f"sqlite:///{file.path}", layout=layout)
    await store.open()
    try:
        file.path.unlink()
        file.remove_wal()
        file.path.touch()
        with pytest.raises(StoreUnavailable, match="the file is another one, not ready yet: no such table"):
            await claim(store)
        file.make_tables()
        file.put("after")
        assert [each.event.topic for each in (await claim(store)).claims] == ["after"]
    finally:
        await store.close()


async def test_a_wal_of_the_file_before_is_not_mixed_into_the_new_one(file: File, tmp_path: Path) -> None:
    file.put("saved")
    file.back_up(tmp_path / "backup.db")
    store = open_store(f"sqlite:///{file.path}")
    await store.open()
    try:
        file.put("lost")
        assert names(await claim(store)) == "saved lost"
        os.replace(tmp_path / "backup.db", file.path)
        with pytest.raises(StoreUnavailable, match=r"the WAL of the one before is still beside it. Delete .*-wal"):
            await store.counts()
        file.remove_wal()
        assert names(await claim(store)) == "saved"
    finally:
        await store.close()


async def test_who_makes_the_tables_makes_the_file(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/new.db")
    try:
        await store.run(lambda db: db.exec_driver_sql("CREATE TABLE made (number integer)"), writes=True)
        assert await store.run(lambda db: db.exec_driver_sql("SELECT count(*) FROM made").scalar_one()) == 0
        (tmp_path / "new.db").unlink()
        with pytest.raises(StoreUnavailable, match="the file is gone"):
            await store.run(lambda db: db.exec_driver_sql("SELECT 1").scalar_one())
    finally:
        await store.close()


async def _is(condition: object) -> bool:
    return bool(condition)
