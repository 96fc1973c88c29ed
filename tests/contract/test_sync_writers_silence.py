"""Writers before a database whose connections say nothing any more, while new ones work."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pillarbox.errors import SinkUnavailable
from tests.contract.sync_writers import writer_kit, writers_that
from tests.freezing import HANG, freezing_before

__all__ = ["writer_kit"]

DONE = {"ok": True, "rows_affected": 1}
servers = writers_that(only=["postgresql", "mariadb", "mysql"])


@servers
async def test_a_silent_connection_is_given_up_and_the_next_batch_goes_on(kit):
    with freezing_before(kit.url) as proxy:
        writer = kit.make_writer(proxy.url, timeout="1s")
        assert await writer.write_batch([kit.insert(1)]) == [DONE]
        assert proxy.freeze() == 1
        async with asyncio.timeout(HANG):
            with pytest.raises(SinkUnavailable, match="no answer within 1s; nothing was written"):
                await writer.write_batch([kit.insert(2), kit.insert(3)])
            assert await writer.write_batch([kit.insert(2), kit.insert(3)]) == [DONE, DONE]
    assert kit.ids() == [1, 2, 3]


@servers
async def test_the_neighbours_of_a_silent_connection_are_not_tried(kit):
    with freezing_before(kit.url) as proxy:
        writer = kit.make_writer(proxy.url, timeout="2s")
        with_four = [asyncio.create_task(writer.write_batch([kit.insert(number)])) for number in range(4)]
        await asyncio.gather(*with_four)
        assert proxy.freeze() > 1
        with pytest.raises(SinkUnavailable, match="no answer within 2s"):
            await writer.write_batch([kit.insert(4)])
        assert await writer.write_batch([kit.insert(4)]) == [DONE]


@servers
async def test_a_commit_without_an_answer_says_that_its_outcome_is_unknown(kit):
    with freezing_before(kit.url) as proxy:
        writer = kit.make_writer(proxy.url, timeout="1s")
        await writer.write_batch([kit.insert(1)])
        proxy.freeze_at(b"COMMIT")
        with pytest.raises(SinkUnavailable, match=r"no answer to COMMIT.*as a whole or not at all"):
            await writer.write_batch([kit.insert(2)])
        assert await writer.write_batch([kit.insert(3)]) == [DONE]


@servers
async def test_a_cancelled_batch_does_not_wait_for_a_silent_database(kit):
    with freezing_before(kit.url) as proxy:
        # Waiting for it would be a hang.
        writer = kit.make_writer(proxy.url, timeout="1h")
        await writer.write_batch([kit.insert(1)])
        proxy.freeze(also_new=True)
        running = asyncio.create_task(writer.write_batch([kit.insert(2)]))
        assert await asyncio.to_thread(proxy.has_swallowed.wait, HANG)
        running.cancel()
        async with asyncio.timeout(HANG):
            with pytest.raises(asyncio.CancelledError):
                await running
            await writer.close()
    gc.collect()  # what was left half done would complain now
    assert kit.ids() == [1]
