"""What only the source on Redis Streams does: consumers by name, taking over, counts, and entries as Redis has them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.event import DELIVERED, Retry
from pillarbox.sources.broker import Pauses
from pillarbox.sources.url import open_source
from pillarbox.stores import Settlement
from tests.contract.source_kit_redis import RedisSourceKit
from tests.contract.sources import (
    GROUP,
    claim,
    claims_of,
    is_silent,
    name_of,
    names_of,
    number_names,
    settle,
    take,
    take_names,
    until,
    until_told,
)
from tests.contract.test_sources import claim_of


@pytest.fixture
async def kit():
    made = RedisSourceKit(None)
    yield made
    for each in reversed(made.made):
        await each.close()


def read_as(kit: RedisSourceKit, consumer: str, count: int, *, group: str = GROUP) -> list[str]:
    """Be another consumer that reads and then says nothing more; returns the ids."""
    answer = kit.call("XREADGROUP", "GROUP", group, consumer, "COUNT", str(count), "STREAMS", kit.stream, ">")
    return [entry[0].decode() for entry in answer[0][1]]


def make_group(kit: RedisSourceKit) -> None:
    kit.call("XGROUP", "CREATE", kit.stream, GROUP, "0", "MKSTREAM")


def consumers(kit: RedisSourceKit) -> list[str]:
    return [each[1].decode() for each in kit.call("XINFO", "CONSUMERS", kit.stream, GROUP)]


def owners(kit: RedisSourceKit) -> dict[str, str]:
    pending = kit.call("XPENDING", kit.stream, GROUP, "-", "+", "100")
    return {each[0].decode(): each[1].decode() for each in pending}


# -- consumers -------------------------------------------------------------------------------------------------------


async def test_consumer_that_comes_back_begins_with_what_it_had(kit):
    kit.send_named(*number_names(4), key="k")
    make_group(kit)
    read_as(kit, "shop-1", 2)
    source = await kit.open_source(consumer="shop-1", lease="60s")
    await until(lambda: len(source.pending) == 4)
    assert names_of(await take(source, 4)) == number_names(4)


async def test_what_another_consumer_has_is_taken_over_when_its_lease_is_over(kit):
    kit.send_named("a", "b")
    make_group(kit)
    ids = read_as(kit, "other", 1)
    source = await kit.open_source(lease="2s")
    assert await take_names(source, 1) == ["b"]
    assert owners(kit) == {ids[0]: "other"}
    (taken,) = claims_of(await take(source, 1))
    assert name_of(taken.event) == "a"
    assert taken.row.token[1] == ids[0]
    assert owners(kit)[ids[0]].startswith("pillarbox-")


async def test_what_was_taken_over_stands_before_its_successors(kit):
    kit.send_named("a", "b", "c", key="k")
    make_group(kit)
    read_as(kit, "other", 1)
    source = await kit.open_source(lease="1s")
    (batch,) = await take(source, 1)
    assert names_of([batch]) == ["b"]
    await batch.settle([Retry("no", timedelta(seconds=3))])
    await until(lambda: len(source.pending) == 3)
    assert await take_names(source, 3) == ["a", "b", "c"]


async def test_consumer_goes_when_it_has_nothing_left(kit):
    kit.send_named("a", "b")
    source = await kit.open_source()
    await take_names(source, 2)
    assert len(consumers(kit)) == 1
    await source.close()
    assert consumers(kit) == []


async def test_consumer_with_unfinished_messages_stays_until_they_are_taken_over(kit):
    kit.send_named("a", "b")
    first = await kit.open_source(lease="60s")
    batches = await take(first, 2)
    await first.close()
    assert len(consumers(kit)) == 1
    # They need not wait for the lease: the first has said that it is gone.
    second = await kit.open_source(lease="60s")
    assert sorted(await take_names(second, 2, within=5)) == ["a", "b"]
    assert await settle(batches) == Settlement(lost=2)


async def test_consumers_of_ours_that_are_gone_are_cleared_away(kit):
    kit.send_named("a", "b")
    make_group(kit)
    for name in ("pillarbox-old-1-x", "pillarbox-busy-1-x", "stranger"):
        kit.call("XGROUP", "CREATECONSUMER", kit.stream, GROUP, name)
    read_as(kit, "pillarbox-busy-1-x", 1)
    await asyncio.sleep(0.02)  # so that they are idle for a while; there is no other way to make them so
    source = kit.make_source()
    await source._group.join(kit.stream, start="0", creates=True)
    await source._group.clear_away(kit.stream, prefix="pillarbox-", idle=timedelta(milliseconds=5))
    assert sorted(consumers(kit)) == ["pillarbox-busy-1-x", "stranger"]


# -- counts ----------------------------------------------------------------------------------------------------------


async def test_attempts_are_counted_by_the_server(kit):
    kit.send_named("a", "b")
    first = await kit.open_source(prefetch=1)
    for _ in range(2):
        await settle(await take(first, 1), Retry("no", timedelta(0)))
    await take(first, 1)
    await first.close()
    second = await kit.open_source()
    found = {name_of(each.event): each.attempt for each in claims_of(await take(second, 2))}
    # The third try was under way; the other message was never tried.
    assert found == {"a": 4, "b": 1}


async def test_attempt_is_counted_before_it_is_made(kit):
    kit.send_named("a")
    source = await kit.open_source(lease="60s")
    await until(lambda: len(source.pending) == 1)
    assert delivery_count(kit) == 1
    await take(source, 1)
    assert delivery_count(kit) == 2


def delivery_count(kit: RedisSourceKit) -> int:
    """One more than the number of tries."""
    ((_, _, _, count),) = kit.call("XPENDING", kit.stream, GROUP, "-", "+", "10")
    return int(count)


async def test_message_given_back_was_not_tried(kit):
    kit.send_named("a")
    first = await kit.open_source()
    for batch in await take(first, 1):
        await batch.abandon()
    await first.close()
    second = await kit.open_source()
    (again,) = claims_of(await take(second, 1))
    assert again.attempt == 1


async def test_message_that_ended_its_consumers_too_often_is_a_defect(kit):
    kit.send_named("a")
    make_group(kit)
    (entry,) = read_as(kit, "other", 1)
    kit.call("XCLAIM", kit.stream, GROUP, "other", "0", entry, "IDLE", "60000", "RETRYCOUNT", "21", "JUSTID")
    source = await kit.open_source()
    (taken,) = claims_of(await take(source, 1))
    assert taken.attempt == 21
    assert taken.defect == "Not settled after 20 attempts: whoever made the last one ended in the middle"


# -- entries ---------------------------------------------------------------------------------------------------------


async def test_entry_without_a_payload_is_an_object_of_its_fields(kit):
    kit.call("XADD", kit.stream, "*", "name", "a", "city", "Zürich")
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.defect is None
    assert received.event.payload == '{"name":"a","city":"Zürich"}'.encode()
    assert received.event.content_type == "application/json"
    assert dict(received.event.headers) == {}


async def test_entry_without_a_payload_that_is_no_text_is_a_defect(kit):
    kit.call("XADD", kit.stream, "*", "name", b"\xff")
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert "no field 'payload'" in str(received.defect)
    assert received.row.read.raw.headers == {"name": b"\xff"}


async def test_header_named_payload_comes_back_under_its_name(kit):
    sink = kit.make_sink()
    source = await kit.open_source()
    await sink.open()
    assert await sink.deliver([claim_of(headers={"payload": "mine"})]) == [DELIVERED]
    (received,) = claims_of(await take(source, 1))
    assert dict(received.event.headers) == {"payload": "mine"}
    assert received.event.payload == b'{"name":"a"}'


async def test_entry_deleted_before_it_was_handled_is_a_defect(kit):
    kit.send_named("a")
    make_group(kit)
    (entry,) = read_as(kit, "shop-1", 1)
    kit.call("XDEL", kit.stream, entry)
    source = await kit.open_source(consumer="shop-1")
    (received,) = claims_of(await take(source, 1))
    assert received.defect == "Message was deleted from its stream before it was handled"
    assert received.row.read.id == f"{kit.stream}:{entry}"


async def test_time_and_id_are_those_of_the_entry(kit):
    kit.call("XADD", kit.stream, "1772368200250-3", "payload", "{}")
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.event.created_at is not None
    assert received.event.created_at.isoformat() == "2026-03-01T12:30:00.250000+00:00"
    assert received.row.read.id == f"{kit.stream}:1772368200250-3"


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delete", [False, True], ids=["kept", "deleted"])
async def test_done_entry_is_deleted_when_asked_for(kit, delete):
    kit.send_named("a", "b")
    source = await kit.open_source(delete=delete)
    first, second = await take(source, 2, limit=1)
    await settle([first])
    assert int(kit.call("XLEN", kit.stream)) == (1 if delete else 2)
    await settle([second], Retry("no", timedelta(seconds=60)))
    assert int(kit.call("XLEN", kit.stream)) == (1 if delete else 2)


async def test_latest_begins_with_what_comes_after(kit):
    kit.send_named("before")
    source = await kit.open_source(start="latest")
    kit.send_named("after")
    assert await take_names(source, 1) == ["after"]
    assert await is_silent(source)


async def test_several_streams_are_read_within_one_prefetch(kit):
    streams = [kit.stream, f"{kit.place}:returns", f"{kit.place}:refunds"]
    for stream in streams:
        for number in range(10):
            kit.call("XADD", stream, "*", "payload", f'{{"name": "{stream}-{number}"}}')
    source = await kit.open_source(streams=streams, prefetch=4)
    held = await take(source, 4)
    assert len(source.pending) == 4
    await settle(held)
    assert len({*names_of(held), *await take_names(source, 26)}) == 30


async def test_key_that_is_no_stream_is_a_clear_error(kit):
    kit.call("SET", kit.stream, "not a stream")
    with pytest.raises(ConfigError, match="cannot be consumed: WRONGTYPE"):
        await kit.open_source()


async def test_group_that_is_destroyed_is_made_again(kit, caplog):
    kit.send_named("a")
    source = await kit.open_source()
    assert await take_names(source, 1) == ["a"]
    kit.call("XGROUP", "DESTROY", kit.stream, GROUP)
    # From the start: nobody knows any more what was done.
    kit.send_named("b")
    await until(lambda: source._receiver.done())
    assert await take_names(source, 2) == ["a", "b"]
    assert "the group was gone from stream" in caplog.text
    await until_told(kit.remaining, 0)


@pytest.mark.parametrize("is_seen", [False, True], ids=["nothing seen", "one seen"])
async def test_latest_group_that_is_destroyed_skips_nothing(kit, is_seen):
    kit.send_named("before")
    source = await kit.open_source(start="latest")
    if is_seen:
        kit.send_named("a")
        assert await take_names(source, 1) == ["a"]
    kit.call("XGROUP", "DESTROY", kit.stream, GROUP)
    kit.send_named("b", "c")
    await until(lambda: source._receiver.done())
    # From where the group stood when it was joined: nobody knows any more what was done since.
    assert await take_names(source, 2 + is_seen) == ["a", "b", "c"][not is_seen :]
    assert await is_silent(source)


async def test_latest_group_that_is_destroyed_gives_again_what_was_at_hand(kit):
    source = await kit.open_source(start="latest")
    kit.send_named("a", "b", "c", key="k")
    await until(lambda: len(source.pending) == 3)
    batch = await claim(source, 2)
    await batch.settle([DELIVERED, Retry("no", timedelta(0))])
    under_way = await claim(source, 1)
    kit.call("XGROUP", "DESTROY", kit.stream, GROUP)
    kit.send_named("d", key="k")
    await until(lambda: source._receiver.done())
    assert await take_names(source, 4) == ["a", "b", "c", "d"]
    assert await under_way.settle([DELIVERED]) == Settlement(lost=1)
    assert await is_silent(source)
    await until_told(kit.remaining, 0)


async def test_latest_group_that_is_destroyed_gives_again_what_another_consumer_had(kit):
    kit.send_named("before")
    kit.call("XGROUP", "CREATE", kit.stream, GROUP, "$")
    kit.send_named("theirs")
    read_as(kit, "other", 1)
    source = await kit.open_source(start="latest", lease="60s")
    kit.send_named("ours")
    assert await take_names(source, 1) == ["ours"]
    kit.call("XGROUP", "DESTROY", kit.stream, GROUP)
    await until(lambda: source._receiver.done())
    assert await take_names(source, 2) == ["theirs", "ours"]
    assert await is_silent(source)


async def test_latest_group_of_a_stream_that_is_made_again_begins_with_its_first_entry(kit):
    source = await kit.open_source(start="latest")
    kit.send_named("a")
    assert await take_names(source, 1) == ["a"]
    kit.call("DEL", kit.stream)
    kit.call("XADD", kit.stream, "1-1", "payload", '{"name": "b"}')
    await until(lambda: source._receiver.done())
    assert await take_names(source, 1) == ["b"]


async def test_stream_that_is_gone_is_an_outage_until_it_is_back(kit):
    kit.send_named("a")
    source = await kit.open_source(create=False)
    assert await take_names(source, 1) == ["a"]
    kit.call("DEL", kit.stream)
    await until(lambda: source._receiver.done())
    with pytest.raises(StoreUnavailable, match="does not exist"):
        await claim(source)
    kit.send_named("b")
    assert await take_names(source, 1) == ["b"]


# -- what others do meanwhile ----------------------------------------------------------------------------------------


async def test_what_another_consumer_has_done_meanwhile_is_not_handled_again(kit):
    kit.send_named("a", "b")
    source = await kit.open_source(lease="60s")
    await until(lambda: len(source.pending) == 2)
    first, second = [entry.token[1] for entry in source.pending]
    # It stood still for a lease: another one took over the first and is done with it. The second was trimmed.
    kit.call("XACK", kit.stream, GROUP, first)
    kit.call("XACK", kit.stream, GROUP, second)
    kit.call("XDEL", kit.stream, second)
    await source._extend(list(source.pending))
    assert [entry.token[1] for entry in source.pending] == [second]
    assert names_of([await claim(source)]) == ["b"]


@pytest.mark.parametrize("question", ["history", "steal"])
async def test_answer_that_is_late_brings_back_nothing_that_is_done_by_then(kit, question):
    kit.send_named("a")
    source = await kit.open_source(lease="1s")
    batches = await take(source, 1)
    ask = getattr(source._group, question)
    answers: list[Any] = []

    async def answer_late(*words: Any, **options: Any) -> Any:
        if answers:
            return await ask(*words, **options)
        if question == "steal":
            ((entry, _, _, _),) = kit.call("XPENDING", kit.stream, GROUP, "-", "+", "1")
            kit.call("XCLAIM", kit.stream, GROUP, source._consumer, "0", entry, "IDLE", "60000", "JUSTID")
        answers.append(await ask(*words, **options))
        assert await settle(batches) == Settlement(delivered=1)
        return answers[0]

    setattr(source._group, question, answer_late)
    source._history, source._steal_at = {kit.stream: None}, 0.0
    await until(lambda: answers)
    assert answers[0] if question == "history" else answers[0][1]
    assert await is_silent(source)


async def test_user_who_may_not_read_is_an_outage_and_no_endless_connecting(kit, caplog):
    user = kit.place
    kit.call("ACL", "SETUSER", user, "on", ">secret", "~*", "+@all", "-xreadgroup")
    try:
        caplog.set_level("INFO", "pillarbox.source")
        address = kit.url.rpartition("@")[2]
        source = kit.keep(open_source(f"redis://{user}:secret@{address}", group=GROUP, dead=kit.letters, **kit.options))
        now = 1000.0
        source._pauses = Pauses(lambda: now)
        await source.open()
        connections = []
        for _ in range(6):
            await until(lambda: source._receiver.done())
            with suppress(StoreUnavailable):
                await claim(source)
            connections.append(caplog.text.count("connected again"))
        # Once more at once, and then not before its pause is over.
        assert connections == [1] * 6
        with pytest.raises(StoreUnavailable, match="NoPermissionError"):
            await claim(source)
        now += 60
        kit.call("ACL", "SETUSER", user, "+xreadgroup")
        kit.send_named("a")

        async def is_there() -> bool:
            with suppress(StoreUnavailable):
                return bool((await claim(source)).claims)
            return False

        async with asyncio.timeout(60):
            while not await is_there():
                await asyncio.sleep(0.05)
        await source.close()
    finally:
        kit.call("ACL", "DELUSER", user)
