"""What writers do when the database is locked, lost, killed or silent: what was not committed did not happen."""

from __future__ import annotations

import asyncio
import threading
import traceback
from contextlib import contextmanager
from typing import Any

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.sync.writers.sqlite import _SqliteSession
from tests.contract.stores import closed_port, until
from tests.contract.sync_proxy import proxy_before
from tests.contract.sync_writers import WriterKit, writer, writer_kit, writers_that
from tests.servers import server_url

__all__ = ["writer", "writer_kit"]

DONE = {"ok": True, "rows_affected": 1}
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@contextmanager
def locked(kit: WriterKit, number: int):
    other = kit.lock_row(number)
    try:
        yield other
    finally:
        other.rollback()
        other.close()


async def outage_of(writer: Any, *statements: Any) -> str:
    with pytest.raises(SinkUnavailable) as outage:
        await writer.write_batch(statements or [("SELECT 1", ())])
    return str(outage.value)


# -- conflicts -------------------------------------------------------------------------------------------------------


@writers_that("locks rows")
async def test_victim_of_a_deadlock_runs_again(kit, writer):
    await writer.write_batch([kit.insert(number) for number in range(30)])
    other = kit.lock_row(1)
    cursor = other.cursor()
    if kit.dialect == "postgresql":
        cursor.execute("SET LOCAL deadlock_timeout = '1min'")  # so that the writer is the one who finds out
    else:
        cursor.execute(f"UPDATE {kit.table} SET amount = 2 WHERE id >= 10")  # who has changed less is the victim
    running = asyncio.create_task(writer.write_batch([kit.insert(100), kit.update(2, "ours"), kit.update(1, "ours")]))
    await kit.until_waiting()
    await asyncio.to_thread(cursor.execute, f"UPDATE {kit.table} SET note = 'theirs' WHERE id = 2")
    cursor.execute("COMMIT")
    other.close()
    assert await running == [DONE] * 3
    assert kit.query(f"SELECT note FROM {kit.table} WHERE id IN (1, 2)") == [("ours",), ("ours",)]


@writers_that(only=["postgresql"])
async def test_conflict_that_stays_is_for_later(kit):
    writer = kit.make_writer(f"{kit.url}?options=-c%20lock_timeout%3D50ms")
    await writer.write_batch([kit.insert(1)])
    with locked(kit, 1):
        *_, last = await writer.write_batch([kit.insert(2), kit.update(1, "x")])
    assert (last["kind"], last["error"]) == ("later", "canceling statement due to lock timeout (SQLSTATE 55P03)")
    assert kit.ids() == [1]


@writers_that(only=["sqlite"])
async def test_sqlite_waits_for_the_lock(kit, writer):
    other = kit.connect()
    other.execute("BEGIN IMMEDIATE")
    running = asyncio.create_task(writer.write_batch([kit.insert(1)]))
    done, _ = await asyncio.wait([running], timeout=0.2)
    assert not done
    other.execute("COMMIT")
    other.close()
    assert await running == [DONE]


@writers_that(only=["sqlite"])
async def test_sqlite_file_that_stays_locked_is_an_outage(kit):
    writer = kit.make_writer(timeout="200ms")
    other = kit.connect()
    other.execute("BEGIN IMMEDIATE")
    assert "the file was locked by another for 200ms; nothing was written" in await outage_of(writer, kit.insert(1))
    other.execute("COMMIT")
    other.close()
    assert await writer.write_batch([kit.insert(1)]) == [DONE]


# -- lost connections ------------------------------------------------------------------------------------------------


@writers_that("kills sessions")
async def test_killed_in_its_transaction_raises_and_leaves_nothing(kit, writer):
    kit.execute(f"INSERT INTO {kit.table} (id, name) VALUES (1, 'a')")
    with locked(kit, 1):
        running = asyncio.create_task(writer.write_batch([kit.insert(2), kit.update(1, "x"), kit.insert(3)]))
        [session] = await kit.until_waiting()
        kit.kill(session)
        with pytest.raises(SinkUnavailable, match=r"the connection was lost: .*; nothing was written"):
            await running
    assert kit.ids() == [1]
    assert await writer.write_batch([kit.insert(2)]) == [DONE]


@writers_that("kills sessions")
async def test_reused_connection_that_is_killed_is_replaced(kit, writer):
    await writer.write_batch([kit.insert(1)])
    with locked(kit, 1):
        running = asyncio.create_task(writer.write_batch([kit.insert(2), kit.update(1, "x")]))
        [session] = await kit.until_waiting()
        kit.kill(session)

        async def waits_anew() -> bool:
            return any(each != session for each in await asyncio.to_thread(kit.waiting))

        await until(waits_anew)
    assert await running == [DONE, DONE]
    assert kit.ids() == [1, 2]


@writers_that("is remote")
@pytest.mark.parametrize("cut", ["before", "after"])
async def test_commit_without_an_answer_raises_and_all_or_nothing_is_there(kit, cut):
    async with proxy_before(kit.url) as proxy:
        writer = kit.make_writer(proxy.url)
        await writer.write_batch([kit.insert(1)])
        # The word as it ends a message of PostgreSQL: its BEGIN says COMMITTED.
        proxy.cut_at, proxy.cut = b"COMMIT\x00" if kit.dialect == "postgresql" else b"COMMIT", cut
        error = await outage_of(writer, kit.insert(2), kit.insert(3))
        assert "no answer to COMMIT" in error
        assert "the batch was written as a whole or not at all" in error
        expected = [1] if cut == "before" else [1, 2, 3]

        async def is_settled() -> bool:
            found: list[int] = await asyncio.to_thread(kit.ids)
            return found == expected

        await until(is_settled)
        assert await writer.write_batch([kit.insert(4)]) == [DONE]
        await writer.close()


@writers_that("kills sessions")
async def test_idle_connection_that_was_killed_is_replaced(kit, writer):
    me = "SELECT pg_backend_pid()" if kit.dialect == "postgresql" else "SELECT CONNECTION_ID()"
    [answer] = await writer.write_batch([(me, [])])
    kit.kill(answer["rows"][0][0])
    assert await writer.write_batch([kit.insert(1), kit.insert(2)]) == [DONE, DONE]
    assert kit.ids() == [1, 2]


@writers_that("goes down")
async def test_database_that_goes_down_raises_and_recovers(kit, writer):
    await writer.write_batch([kit.insert(1)])
    await asyncio.to_thread(kit.go_down)
    try:
        for _ in range(2):
            assert "cannot be reached" in await outage_of(writer, kit.insert(2))
    finally:
        await asyncio.to_thread(kit.come_back)
    assert await writer.write_batch([kit.insert(2)]) == [DONE]
    assert kit.ids() == [1, 2]


@writers_that(only=["sqlite"])
async def test_sqlite_file_that_was_replaced_is_opened_anew(kit, writer):
    await writer.write_batch([kit.insert(1)])
    kit.go_down()
    kit.home.mkdir()
    await kit.start()
    assert await writer.write_batch([kit.insert(2)]) == [DONE]
    assert kit.ids() == [2]


@writers_that(only=["sqlite"])
async def test_sqlite_file_is_made_only_when_asked_for(kit):
    url = f"sqlite:///{kit.home}/new.db"
    assert "there is no file" in await outage_of(kit.make_writer(url))
    maker = kit.make_writer(url, create=True)
    assert (await maker.write_batch([("CREATE TABLE t (id int)", [])]))[0]["ok"]


@writers_that("is remote")
async def test_server_that_does_not_answer_raises(kit):
    async with proxy_before(kit.url) as proxy:
        proxy.delay = 60
        writer = kit.make_writer(proxy.url, timeout="300ms")
        assert "no answer within 300ms" in await outage_of(writer)


# -- cancelling and timeouts -----------------------------------------------------------------------------------------


@writers_that("locks rows")
async def test_transaction_that_takes_too_long_is_given_up(kit):
    writer = kit.make_writer(timeout="500ms")
    await writer.write_batch([kit.insert(1)])
    with locked(kit, 1):
        running = asyncio.create_task(outage_of(writer, kit.insert(2), kit.update(1, "x")))
        [session] = await kit.until_waiting()
        # The lock is still held: nothing but its own bound ended it.
        assert "no answer within 500ms; nothing was written" in await running
    await kit.until_gone(session)
    assert kit.ids() == [1]
    assert await writer.write_batch([kit.update(1, "y")]) == [DONE]


@writers_that("locks rows")
async def test_cancelled_batch_leaves_no_transaction(kit, writer):
    await writer.write_batch([kit.insert(1)])
    with locked(kit, 1):
        running = asyncio.create_task(writer.write_batch([kit.insert(2), kit.update(1, "x"), kit.insert(3)]))
        [session] = await kit.until_waiting()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await kit.until_gone(session)
    assert kit.ids() == [1]
    assert await writer.write_batch([kit.update(1, "y")]) == [DONE]


@writers_that(only=["sqlite"])
async def test_cancelled_batch_does_not_wait_for_the_file(kit, writer):
    await writer.write_batch([kit.insert(1)])
    other = kit.connect()
    other.execute("BEGIN IMMEDIATE")
    running = asyncio.create_task(writer.write_batch([kit.insert(2)]))
    await asyncio.wait([running], timeout=0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    other.execute("COMMIT")
    other.close()
    assert kit.ids() == [1]
    assert await writer.write_batch([kit.insert(3)]) == [DONE]


@writers_that(only=["sqlite"])
async def test_cancelled_sqlite_statement_is_interrupted(kit, writer):
    running = asyncio.create_task(writer.write_batch([kit.insert(1), (ENDLESS, [])]))
    await asyncio.wait([running], timeout=0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert kit.ids() == []
    assert await writer.write_batch([kit.insert(1)]) == [DONE]


@writers_that(only=["sqlite"])
async def test_sqlite_statement_that_begins_after_its_batch_was_given_up_ends(kit, writer, monkeypatch):
    begin = _SqliteSession._patiently

    def begin_and_give_up(session, statement):
        begin(session, statement)
        session.cut()

    monkeypatch.setattr(_SqliteSession, "_patiently", begin_and_give_up)
    with pytest.raises(SinkUnavailable, match="interrupted"):
        await writer.write_batch([kit.insert(1), (ENDLESS, [])])
    monkeypatch.undo()
    assert await writer.write_batch([kit.insert(1)]) == [DONE]


@writers_that(only=["sqlite"])
async def test_closed_writer_leaves_no_thread(kit, writer):
    await writer.write_batch([kit.insert(1)])
    await writer.close()

    async def is_gone() -> bool:
        return not any(thread.name.startswith("pillarbox-sync-writer") for thread in threading.enumerate())

    await until(is_gone)
    assert await writer.write_batch([kit.insert(2)]) == [DONE]


# -- round trips -----------------------------------------------------------------------------------------------------


@writers_that("is remote")
async def test_large_batch_makes_few_round_trips(kit):
    async with proxy_before(kit.url) as proxy:
        writer = kit.make_writer(proxy.url)
        await writer.write_batch([("SELECT 1", [])])
        proxy.round_trips = 0
        alike = [kit.insert(number) for number in range(200)]
        different = [each for number in range(200, 300) for each in (kit.insert(number), kit.update(number, "x"))]
        assert await writer.write_batch([*alike, *different]) == [DONE] * 400
        # One statement after the other would be more than 400.
        assert 0 < proxy.round_trips <= 40
        await writer.close()


# -- secrets ---------------------------------------------------------------------------------------------------------


@writers_that("has a login")
async def test_password_is_in_no_error(kit):
    wrong = kit.url.replace(":pillarbox@", ":s3cr3t%2Fof%3Fours@")
    there = f"127.0.0.1:{closed_port()}"
    scheme = kit.url.partition(":")[0]
    for url in (wrong, f"{scheme}://someone:s3cr3t%2Fof%3Fours@{there}/shop"):
        writer = kit.make_writer(url)
        with pytest.raises(SinkUnavailable) as outage:
            await writer.write_batch([("SELECT 1", [])])
        shown = "".join(traceback.format_exception(outage.value)) + repr(outage.value)
        assert "cannot be reached" in str(outage.value)
        assert "s3cr3t" not in shown


@writers_that("has a login")
async def test_server_refuses_a_login_in_its_own_words(kit):
    writer = kit.make_writer(kit.url.replace(":pillarbox@", ":wrong@"))
    error = await outage_of(writer)
    assert "password" in error
    assert "pillarbox:***@" in error


# -- poolers ---------------------------------------------------------------------------------------------------------


@writers_that(only=["postgresql"])
async def test_pgbouncer_in_transaction_mode_is_no_obstacle(kit):
    writer = kit.make_writer(f"{server_url('pgbouncer')}?pooler=yes")
    batches = [[kit.insert(100 * batch + number) for number in range(50)] for batch in range(12)]
    answers = await asyncio.gather(*(writer.write_batch(batch) for batch in batches))
    assert answers == [[DONE] * 50] * 12
    # Another client of the same server connections, which would find the statements that the first one prepared.
    second = kit.make_writer(server_url("pgbouncer"), pooler=True)
    more = [kit.insert(2000 + number, note="x") for number in range(50)]
    assert await second.write_batch(more) == [DONE] * 50
    results = await writer.write_batch([kit.insert(5000), kit.update(1, "x"), kit.insert(1), kit.insert(5001)])
    assert [result["ok"] for result in results] == [True, True, False]
    assert len(kit.ids()) == 650
