"""What sources on brokers share, without a broker: pauses between connections, and the task that extends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.errors import StoreUnavailable
from pillarbox.sources.broker import BrokerSource, Pauses
from pillarbox.sources.pending import Entry
from pillarbox.sources.reading import Raw, read_message


class NoLetters:
    async def bury(self, letters: Sequence[Any]) -> None: ...

    async def close(self) -> None: ...


class QuietSource(BrokerSource):
    """Has one message, and is told that everything at hand is extended; `failing` is what that raises."""

    extend_within = timedelta(milliseconds=30)

    def __init__(self) -> None:
        super().__init__("quiet", dead=NoLetters())
        self.connections = 0
        self.extended = 0
        self.failing: BaseException | None = None
        self.is_refused = False

    async def _connect(self) -> None:
        self.connections += 1

    async def _disconnect(self) -> None: ...

    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        if self.is_refused:
            raise StoreUnavailable("Source quiet: this user may not read")
        if len(self.pending):
            await asyncio.sleep(timeout)
            return []
        return [Entry(read_message(Raw("1", "orders", b"{}")), 1)]

    async def _acknowledge(self, entries: Sequence[Entry]) -> None: ...

    async def _extend(self, entries: Sequence[Entry]) -> None:
        self.extended += 1
        if self.failing is not None:
            raise self.failing


async def until(is_true: Any) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.005)


async def claim(source: BrokerSource) -> Any:
    return await source.claim(10, mode="lease", lease=timedelta(seconds=30))


async def count_claims(source: BrokerSource) -> int:
    with suppress(StoreUnavailable):
        return len((await claim(source)).claims)
    return 0


async def test_extending_goes_on_after_an_error_of_any_kind(caplog):
    source = QuietSource()
    source.failing = ValueError("an answer nobody expected")
    await source.open()
    await until(lambda: source.extended >= 2)
    assert "Source quiet: could not extend what is at hand" in caplog.text
    assert "an answer nobody expected" in caplog.text
    await source.close()


async def test_extender_that_ended_is_started_again_with_the_receiver():
    source = QuietSource()
    await source.open()
    assert source._receiver is not None
    assert source._extender is not None
    for task in (source._receiver, source._extender):
        task.cancel()
    await asyncio.wait([source._receiver, source._extender])
    source.extended = 0
    await claim(source)
    await until(lambda: source.extended >= 1)
    await source.close()


async def test_receiving_that_fails_at_once_every_time_is_an_outage_with_pauses():
    now = 1000.0
    source = QuietSource()
    source._pauses = Pauses(lambda: now)
    source.is_refused = True
    await source.open()
    connections: list[int] = []
    for hundredths in range(100):
        await until(lambda: source._receiver is not None and source._receiver.done())
        now = 1000 + hundredths * 0.010001
        with suppress(StoreUnavailable):
            await claim(source)
        connections.append(source.connections)
    # Connected when it was opened, once more at once, and then after 0.1, 0.2 and 0.4 seconds.
    assert connections == [2] * 10 + [3] * 20 + [4] * 40 + [5] * 30
    with pytest.raises(StoreUnavailable, match="Source quiet: this user may not read"):
        await claim(source)
    source.is_refused = False
    now += 60
    async with asyncio.timeout(60):
        while not await count_claims(source):
            await asyncio.sleep(0.01)
    await source.close()


async def test_source_that_received_something_connects_again_at_once():
    source = QuietSource()
    await source.open()
    for connections in range(2, 6):
        await until(lambda: len(source.pending) == 1)
        source.is_refused = True
        await until(lambda: source._receiver is not None and source._receiver.done())
        source.is_refused = False
        await claim(source)
        assert source.connections == connections
    await source.close()


def test_pauses_grow_to_five_seconds_and_end_with_work():
    now = 100.0
    pauses = Pauses(lambda: now)
    found: list[float] = []
    for _ in range(9):
        pauses.start()
        pauses.note_end()
        before = now
        while not pauses.is_over:
            now = round(now + 0.1, 1)
        found.append(round(now - before, 1))
    assert found == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    pauses.start()
    pauses.note_work()
    pauses.note_end()
    assert pauses.is_over


def test_receiver_that_lived_for_a_while_is_followed_at_once():
    now = 100.0
    pauses = Pauses(lambda: now)
    for _ in range(3):
        pauses.start()
        pauses.note_end()
    assert not pauses.is_over
    now += 1
    pauses.start()
    now += 5
    pauses.note_end()
    assert pauses.is_over
