"""A sync service that is killed, anywhere and at any time: nothing is lost, repeated or out of order."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.sync.queues import find_queues
from pillarbox.sync.service import SyncService
from pillarbox.sync.verify import verify_queues
from pillarbox.sync.writers import open_writer
from tests.acceptance.processes import SLACK, until
from tests.acceptance.sync_worker import (
    LOCAL_STEPS,
    REMOTE_STEPS,
    TABLES,
    Remote,
    Shop,
    Tables,
    drain_until_call,
    drain_until_statement,
    drain_until_step,
    expect,
    fork,
    produce,
    pushes,
    remote_database,
    serve,
)
from tests.contract.sqloutbox_files import GAPS

DATABASES = ("sqlite", "postgresql", "mariadb", "mysql", "libsql")
# The page's query for gaps.


@pytest.fixture
def main(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    with remote_database(request.param, tmp_path / "main.db") as made:
        yield made


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Remote]:
    with remote_database("sqlite", tmp_path / "second.db") as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path, main: Remote, second: Remote) -> Shop:
    return Shop(tmp_path, {"main": main.url, "second": second.url})


def on(*databases: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("main", databases, indirect=True)


def kill(process: BaseProcess) -> None:
    """Kill a process, which must not have ended by itself."""
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def queue_files(shop: Shop) -> list[Path]:
    return sorted((shop.folder / "queues").rglob("*.db"))


def ask(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def judge(shop: Shop, main: Remote, second: Remote, counts: Sequence[int]) -> None:
    """Everything arrived once and in order; the queues are empty and whole."""
    assert set(shop.drain().values()) == {0}, (shop.folder / "errors.log").read_text()
    wanted, copied = expect(counts), second.read()
    assert copied.log == wanted.log
    assert copied.accounts == wanted.accounts
    judge_main(main, wanted)
    for path in queue_files(shop):
        assert ask(path, "SELECT count(*) FROM outbox_queue") == [(0,)]
        assert ask(path, GAPS) == []
        assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    assert [result.problems for result in verify_queues(find_queues(shop.config)) if not result.is_ok] == []


def judge_main(main: Remote, wanted: Tables) -> None:
    there = main.read()
    assert there.log == wanted.log
    assert there.plain == wanted.plain
    assert there.accounts == wanted.accounts
    assert there.orders == wanted.orders


# -- at any time -------------------------------------------------------------------------------------------------------

COUNTER = "SELECT seq FROM sqlite_sequence WHERE name = 'outbox_queue'"
ROUNDS = 3
PUSHES = 350


@on(*DATABASES)
def test_kills_at_random_lose_nothing_and_apply_nothing_twice(shop: Shop, main: Remote, second: Remote) -> None:
    """In each round another producer pushes; the service dies several times, and every other producer as well."""
    chance = random.Random()
    kills = 0
    counts: list[int] = []
    for producer in range(1, ROUNDS + 1):
        pushing = fork(produce, shop, producer, PUSHES)
        dies_at = chance.randrange(PUSHES // 4, PUSHES) if producer % 2 else None
        service = fork(serve, shop)
        while pushing.exitcode is None:
            pushing.join(chance.uniform(0.02, 0.25))
            if dies_at is not None and shop.acknowledged(producer) >= dies_at:
                pushing.kill()
                pushing.join()
            kill(service)
            kills += 1
            service = fork(serve, shop)
        # It goes on until something of the round is there, and dies once more amid the rest.
        await_progress(shop, main)
        kill(service)
        counts.append(count_pushes(shop, counts, producer))
        assert pushing.exitcode in (0, -signal.SIGKILL)
    assert kills >= ROUNDS
    judge(shop, main, second, counts)


def count_pushes(shop: Shop, before: Sequence[int], producer: int) -> int:
    """How many pushes a producer stored: those it acknowledged, and perhaps one more when it was killed."""
    files = [shop.folder / "queues" / f"{table}.db" for table in TABLES]
    stored = sum(int(str(ask(path, COUNTER)[0][0])) for path in files)
    acknowledged = shop.acknowledged(producer)
    found = [count for count in (acknowledged, acknowledged + 1) if count_statements([*before, count]) == stored]
    assert found, f"{stored} statements were stored, {acknowledged} pushes acknowledged"
    return found[0]


def count_statements(counts: Sequence[int]) -> int:
    return sum(
        len(statements)
        for producer, count in enumerate(counts, 1)
        for _, statements in itertools.islice(pushes(producer), count)
    )


def await_progress(shop: Shop, main: Remote) -> None:
    before = main.count("plain")
    until(lambda: main.count("plain") != before or is_empty(shop), "something to arrive")


def is_empty(shop: Shop) -> bool:
    return all(ask(path, "SELECT 1 FROM outbox_queue LIMIT 1") == [] for path in queue_files(shop))


# -- at a given step ---------------------------------------------------------------------------------------------------

FILLED = 41
STRIDE = 97


@pytest.mark.parametrize(
    ("main", "step"),
    [
        pytest.param(name, step, id=f"{name}-{step}")
        for name in DATABASES
        for step in REMOTE_STEPS
        # libSQL gets a batch and its commit in one request.
        if (name, step) != ("libsql", "before-the-remote-commit")
    ],
    indirect=["main"],
)
def test_service_that_dies_at_a_call_loses_and_repeats_nothing(
    shop: Shop, main: Remote, second: Remote, step: str
) -> None:
    shop.fill(FILLED)
    dying = fork(drain_until_call, shop, step)
    dying.join(SLACK)
    assert dying.exitcode == -signal.SIGKILL, (shop.folder / "errors.log").read_text()
    judge(shop, main, second, [FILLED])


@on("sqlite")
@pytest.mark.parametrize("step", LOCAL_STEPS)
def test_service_that_dies_at_a_step_loses_and_repeats_nothing(
    shop: Shop, main: Remote, second: Remote, step: str
) -> None:
    orders = shop.folder / "queues" / "orders.db"
    shop.fill(FILLED)
    if step == "while-numbers-are-raised":
        # Somebody else has used numbers in the table.
        main.run("ALTER TABLE orders ADD COLUMN outbox_seq INTEGER NOT NULL DEFAULT 0")
        main.run("INSERT INTO orders (id, total, outbox_seq) VALUES (100000, 0, 20)")
    before = ask(orders, "SELECT seq, prev_seq FROM outbox_queue")
    dying = fork(drain_until_step, shop, step)
    dying.join(SLACK)
    assert dying.exitcode == -signal.SIGKILL, (shop.folder / "errors.log").read_text()
    if step == "while-numbers-are-raised":
        assert ask(orders, "SELECT seq, prev_seq FROM outbox_queue") == before
        shop.drain()
        assert main.run("SELECT min(outbox_seq) FROM orders WHERE id < 100000 AND outbox_seq > 0")[0][0] > 20
        main.run("DELETE FROM orders WHERE id = 100000")
    judge(shop, main, second, [FILLED])


def test_service_that_dies_before_some_statement_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Every so manieth statement on any file is once the last one; which they are differs from run to run."""
    first = random.randrange(1, STRIDE + 1)
    for last in itertools.count(first, STRIDE):
        folder = tmp_path / str(last)
        folder.mkdir()
        with (
            remote_database("sqlite", folder / "main.db") as main,
            remote_database("sqlite", folder / "second.db") as second,
        ):
            shop = Shop(folder, {"main": main.url, "second": second.url})
            shop.fill(5)
            dying = fork(drain_until_statement, shop, last)
            dying.join(SLACK)
            judge(shop, main, second, [5])
        if dying.exitcode == 0:
            break
        assert dying.exitcode == -signal.SIGKILL
    # Some died; how many statements there are depends on how often the service looks while it waits.
    assert last > first


# -- a batch that outlives the service ---------------------------------------------------------------------------------


def drain_with(shop: Shop, see: Callable[[Sequence[Any]], Awaitable[None]]) -> None:
    """Drain, and have `see` called before each call of the first target's writer."""
    writers = shop.make_writers()
    writer: Any = writers["shop.main"]
    write = writer.write_batch

    async def write_batch(statements: Sequence[Any]) -> Any:
        await see(statements)
        return await write(statements)

    writer.write_batch = write_batch
    asyncio.run(SyncService(shop.config, writers).drain())


@on("sqlite")
@pytest.mark.parametrize(
    "arrives", ["before the mark is read", "between mark and maximum", "after the numbers were raised"]
)
def test_batch_that_commits_after_its_service_died_is_not_sent_again(
    shop: Shop, main: Remote, second: Remote, arrives: str
) -> None:
    """As when the server has the batch, and is slow, while the service is killed and started again."""
    shop.fill(FILLED)
    late: list[Any] = []

    async def hold_back(statements: Sequence[Any]) -> None:
        if "INSERT INTO log" in str(statements[-1]):
            late.extend(statements)
            raise ConnectionError("killed")

    async def let_arrive(statements: Sequence[Any]) -> None:
        if late and start in str(statements[-1]):
            writer = open_writer(main.url)
            # It may be refused by now, or be applied.
            await writer.write_batch(late)
            late.clear()
            await cast(Any, writer).close()

    with pytest.raises(SinkUnavailable, match="killed"):
        drain_with(shop, hold_back)
    if arrives == "after the numbers were raised":
        # Another queue has used the numbers meanwhile.
        main.run("INSERT INTO log (n, outbox_seq) VALUES (0, 1000)")
    start = {
        "before the mark is read": "SELECT applied, token",
        "between mark and maximum": 'MAX(outbox_seq), 0) FROM "log"',
        "after the numbers were raised": "INSERT INTO log",
    }[arrives]
    drain_with(shop, let_arrive)
    assert late == []
    main.run("DELETE FROM log WHERE n = 0")
    judge(shop, main, second, [FILLED])


@on("sqlite")
def test_target_added_after_a_crash_repeats_nothing_at_the_first(shop: Shop, main: Remote) -> None:
    alone = Shop(shop.folder, {"main": main.url})
    alone.fill(FILLED)
    dying = fork(drain_until_call, alone, "after-the-call")
    dying.join(SLACK)
    assert dying.exitcode == -signal.SIGKILL
    assert set(shop.drain().values()) == {0}
    judge_main(main, expect([FILLED]))


# -- the server --------------------------------------------------------------------------------------------------------


SOME = 1500


@on("postgresql", "mariadb", "mysql")
def test_sessions_that_are_ended_again_and_again_lose_and_repeat_nothing(
    shop: Shop, main: Remote, second: Remote
) -> None:
    shop.fill(SOME)
    service = fork(serve, shop)
    ended = 0

    def end_some() -> bool:
        nonlocal ended
        ended += main.end_sessions() > 0
        return ended >= 6 or is_empty(shop)

    until(end_some, "sessions to end")
    kill(service)
    assert ended
    judge(shop, main, second, [SOME])
