"""Two services with queues of their own write to one remote table, and neither takes a row from the other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from pillarbox.sync import SqlQueue
from pillarbox.sync.service import SyncService
from tests.contract.sync_services import Faulty, Remote, make_config, running, until


def is_empty(queue: SqlQueue) -> bool:
    return queue.waiting("orders") == 0


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT OR IGNORE INTO orders (id, total) VALUES (?, ?)",
        "INSERT OR REPLACE INTO orders (id, total) VALUES (?, ?)",
        "REPLACE INTO orders VALUES (?, ?)",
        "INSERT INTO orders (id, total) VALUES (?, ?) ON CONFLICT DO NOTHING",
        "INSERT INTO orders (id, total) VALUES (?, ?) ON CONFLICT DO UPDATE SET total = -1",
    ],
)
async def test_equal_numbers_of_two_queues_cost_no_row_whatever_the_conflict_clause(tmp_path: Path, sql: str) -> None:
    remote = Remote(tmp_path / "remote.db")
    async with AsyncExitStack() as stack:
        queues = [await start(tmp_path / name, remote, stack) for name in ("first", "second")]
        for service, queue in enumerate(queues, 1):
            statements = [(sql, (10 * service + place, service)) for place in range(3)]
            assert queue.push_many("orders", statements) == [2, 3, 4]
            await until(partial(is_empty, queue))
    assert remote.run("SELECT id, total FROM orders ORDER BY id") == [
        (10, 1), (11, 1), (12, 1), (20, 2), (21, 2), (22, 2),
    ]  # fmt: skip


async def start(folder: Path, remote: Remote, stack: AsyncExitStack) -> SqlQueue:
    """Run a service until it has taken up its queue, while the table is empty."""
    queue = stack.enter_context(SqlQueue(folder))
    queue.push("orders", "DELETE FROM orders WHERE id = ?", (0,))
    config = make_config(folder, flush_interval=0.05, table_max_wait=0.1)
    await stack.enter_async_context(running(SyncService(config, {"shop.main": Faulty(remote.path)})))
    await until(lambda: not queue.waiting("orders"))
    return queue
