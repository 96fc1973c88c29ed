"""What is special to the NATS source: consumers, lapsing, what killed processes leave behind, ids and logins."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import nats
import pytest

from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.event import DELIVERED, RELEASED, Retry
from pillarbox.sources.nats import NatsSource
from pillarbox.sources.url import open_source
from pillarbox.stores import Settlement
from tests.contract.kit_nats import ask, make_stream
from tests.contract.source_kit_nats_client import publish
from tests.contract.sources import (
    GROUP,
    Letters,
    claim,
    claims_of,
    is_silent,
    names_of,
    settle,
    source_kit,
    take,
    take_names,
    until,
    until_told,
)
from tests.servers import certificates, server_url

__all__ = ["source_kit"]

shared_server = pytest.mark.parametrize("kit", [pytest.param(("nats", frozenset()), id="nats")], indirect=True)
own_server = pytest.mark.parametrize(
    "kit", [pytest.param(("nats", frozenset({"goes down"})), id="nats")], indirect=True
)


def consumer_of(kit: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(kit.url, f"CONSUMER.INFO.{kit.place}.{GROUP}")
    assert "error" not in found, found
    return found


def make_consumer(kit: Any, **settings: Any) -> None:
    config = {"durable_name": GROUP, "ack_policy": "explicit", "deliver_policy": "all", "max_ack_pending": 1000}
    request = {"stream_name": kit.place, "config": {**config, **settings}}
    answer = ask(kit.url, f"CONSUMER.DURABLE.CREATE.{kit.place}.{GROUP}", request)
    assert "error" not in answer, answer


@asynccontextmanager
async def fetched(kit: Any, count: int):
    """Messages that another client has fetched; it is gone when the test goes on."""
    client = await nats.connect(kit.url)
    try:
        pull = await client.jetstream().pull_subscribe_bind(GROUP, kit.place)
        yield await pull.fetch(count, timeout=5)
    finally:
        await client.close()


SECONDS = 10**9


# -- lapsing ---------------------------------------------------------------------------------------------------------


@shared_server
async def test_message_that_waits_or_is_under_way_does_not_lapse(kit):
    kit.send_named("waits", "under way", "ready")
    source = await kit.open_source(lease="1s")
    waits, under_way = await take(source, 2, limit=1)
    await waits.settle([Retry("no", timedelta(seconds=2.5))])
    (again,) = claims_of(await take(source, 2, limit=1))[1:]
    assert again.attempt == 2
    assert consumer_of(kit)["num_redelivered"] == 0
    assert await under_way.settle([DELIVERED]) == Settlement(delivered=1)


@shared_server
async def test_message_that_comes_again_while_under_way_is_not_handled_beside_itself(kit):
    kit.send_named("a", "b")
    source = await kit.open_source(lease="30s")
    batches = await take(source, 2, limit=1)
    # The consumer is told to wait for a moment only: the server gives both messages out again and again.
    config = consumer_of(kit)["config"] | {"ack_wait": SECONDS // 10}
    make_consumer(kit, **config)
    await until_told(lambda: consumer_of(kit)["delivered"]["consumer_seq"] > 4, True)
    assert (await claim(source)).claims == []
    assert await settle(batches) == Settlement(delivered=2)
    await until_told(kit.remaining, 0)
    assert await is_silent(source)


@shared_server
async def test_process_that_stood_still_has_lost_its_messages(kit):
    kit.send_named("a")
    source = await kit.open_source(lease="1s")
    batches = await take(source, 1)
    time.sleep(1.2)  # noqa: ASYNC251 - the standing still
    assert await settle(batches) == Settlement(lost=1)
    assert await asyncio.to_thread(kit.remaining) == 1
    assert names_of(await take(source, 1)) == ["a"]


@own_server
async def test_settlement_that_the_server_does_not_confirm_fails_and_the_message_comes_again(kit):
    kit.send_named("a")
    source = await kit.open_source(lease="30s", timeout="500ms")
    batches = await take(source, 1)
    kit.server.pause()
    with pytest.raises(StoreUnavailable, match=r"no confirmation of an acknowledgement within 0\.5 s"):
        await settle(batches)
    assert await settle(batches) == Settlement(lost=1)
    kit.server.resume()
    await until(lambda: source._receiver.done())
    # The acknowledgement was on its way when the connection was given up: it may have arrived.
    if await asyncio.to_thread(kit.remaining):
        assert await take_names(source, 1) == ["a"]
    assert await is_silent(source)


# -- what others leave behind ----------------------------------------------------------------------------------------


@shared_server
async def test_what_a_killed_process_had_comes_before_newer_messages(kit, caplog):
    make_consumer(kit, ack_wait=2 * SECONDS)
    kit.send_named("k1", "k2", key="k")
    async with fetched(kit, 2):
        pass
    kit.send_named("k3", "k4", key="k")
    caplog.set_level("INFO", "pillarbox.source")
    source = await kit.open_source()
    assert "waits up to 4 s for 2 messages that the last process left; give shared=true" in caplog.text
    assert await take_names(source, 4, within=10) == ["k1", "k2", "k3", "k4"]
    assert await is_silent(source)


@shared_server
async def test_many_newer_messages_do_not_fill_the_memory_while_old_ones_are_awaited(kit):
    make_consumer(kit, ack_wait=2 * SECONDS)
    names = [f"{number}" for number in range(100)]
    kit.send_named(*names[:5], key="k")
    async with fetched(kit, 5):
        pass
    kit.send_named(*names[5:], key="k")
    source = await kit.open_source(prefetch=5)
    held: list[int] = []

    def is_given() -> bool:
        held.append(len(source._held))
        return len(source.pending) > 0

    await until(is_given)
    # Those that were left, and newer ones until the room was full, which come five at a time.
    assert max(held) <= 5 + 5 + 4
    assert await take_names(source, 100, within=10) == names


@shared_server
async def test_process_that_shares_its_consumer_waits_for_nobody(kit):
    make_consumer(kit, ack_wait=30 * SECONDS)
    kit.send_named("k1", key="k")
    async with fetched(kit, 1):
        kit.send_named("k2", key="k")
        source = await kit.open_source(shared=True)
        assert not source.keeps_order
        assert await take_names(source, 1, within=5) == ["k2"]


@shared_server
async def test_processes_that_share_a_consumer_both_get_messages(kit):
    one = await kit.open_source(shared=True, prefetch=10)
    two = await kit.open_source(shared=True, prefetch=10)
    kit.send_named(*(f"{number}" for number in range(20)))
    await until(lambda: len(one.pending) + len(two.pending) == 20)
    assert (len(one.pending), len(two.pending)) == (10, 10)


@shared_server
async def test_process_that_shares_is_told_of_a_limit_that_one_may_use_up(kit, caplog):
    make_consumer(kit, max_ack_pending=10)
    await kit.open_source(shared=True, prefetch=10)
    assert "allows 10 unacknowledged messages for all processes, and prefetch is 10: one may" in caplog.text


@shared_server
async def test_newer_messages_do_not_wait_for_ever_for_a_message_of_a_living_neighbour(kit):
    make_consumer(kit, ack_wait=2 * SECONDS)
    kit.send_named("theirs", key="k")
    async with fetched(kit, 1) as (message,):
        kit.send_named("ours", key="k")
        source = await kit.open_source()
        taking = asyncio.create_task(take_names(source, 1, within=15))
        while not taking.done():
            await message.in_progress()
            await asyncio.wait([taking], timeout=0.3)
        assert await taking == ["ours"]


@shared_server
async def test_closing_hands_over_at_once_and_in_order(kit):
    kit.send_named(*(f"{number}" for number in range(20)), key="k")
    first = await kit.open_source(lease="30s")
    await until(lambda: len(first.pending) == 20)
    await (await claim(first, 3)).settle([DELIVERED, Retry("no", timedelta(minutes=1)), RELEASED])
    await first.close()
    second = await kit.open_source(lease="30s")
    assert await take_names(second, 19, within=5) == [f"{number}" for number in range(1, 20)]
    await until_told(kit.remaining, 0)


@shared_server
async def test_prefetch_of_one_keeps_order_across_processes(kit):
    kit.send_named("1", "2", "3", key="k")
    one = await kit.open_source(shared=True, prefetch=1)
    two = await kit.open_source(shared=True, prefetch=1)
    assert one.keeps_order
    assert consumer_of(kit)["config"]["max_ack_pending"] == 1
    handled: list[str] = []
    for _ in range(3):
        await until(lambda: len(one.pending) + len(two.pending) == 1)
        holder, other = (one, two) if len(one.pending) else (two, one)
        batches = await take(holder, 1)
        assert await is_silent(other, for_seconds=0.3)
        handled += names_of(batches)
        await settle(batches)
    assert handled == ["1", "2", "3"]


# -- outages ---------------------------------------------------------------------------------------------------------


@own_server
async def test_restarted_server_gives_everything_again_at_once_and_in_order(kit):
    kit.send_named("1", "2", "3", key="k")
    source = await kit.open_source(lease="30s")
    batches = await take(source, 1)
    kit.go_down()
    await until(lambda: source._receiver.done())
    with pytest.raises(StoreUnavailable, match="Source nats: "):
        await claim(source)
    assert await settle(batches) == Settlement(lost=1)
    kit.come_back()
    kit.send_named("4", key="k")
    again: list[str] = []
    deadline = time.monotonic() + 15
    while len(again) < 4 and time.monotonic() < deadline:
        try:
            again += await take_names(source, 1, within=5)
        except StoreUnavailable:
            await asyncio.sleep(0.1)
    assert again == ["1", "2", "3", "4"]


@own_server
async def test_full_source_notices_that_its_connection_is_gone(kit):
    kit.send_named("1", "2", "3")
    source = await kit.open_source(prefetch=2)
    batches = await take(source, 2)
    kit.go_down()
    await until(lambda: source._receiver.done(), within=5)
    assert await settle(batches) == Settlement(lost=2)


@shared_server
async def test_deleted_consumer_is_made_again(kit):
    kit.send_named("a", "b")
    source = await kit.open_source()
    (batch,) = await take(source, 1)
    ask(kit.url, f"CONSUMER.DELETE.{kit.place}.{GROUP}")
    await until(lambda: source._receiver.done())
    assert await batch.settle([DELIVERED]) == Settlement(lost=1)
    assert sorted(await take_names(source, 2)) == ["a", "b"]


@shared_server
async def test_deleted_consumer_of_new_messages_skips_nothing(kit, caplog, monkeypatch):
    kit.send_named("before")
    source = await kit.open_source(start="new")
    kit.send_named("a", "b", "c", key="k")
    await until(lambda: len(source.pending) == 3)
    await (await claim(source, 1)).settle([DELIVERED])
    under_way = await claim(source, 1)
    ask(kit.url, f"CONSUMER.DELETE.{kit.place}.{GROUP}")
    kit.send_named("d", key="k")
    await until(lambda: source._receiver.done())
    tell = source._tell

    async def tell_late(connection, tokens, what):
        if what == b"-NAK" and source._pull is not None:
            # The new consumer minds only what it has given out itself by then.
            await until(lambda: source._pull._messages)
        await tell(connection, tokens, what)

    monkeypatch.setattr(source, "_tell", tell_late)
    assert await take_names(source, 3) == ["b", "c", "d"]
    assert await under_way.settle([DELIVERED]) == Settlement(lost=1)
    assert "was gone and is made again, to begin with message 3" in caplog.text
    assert await is_silent(source)
    # What the old consumer gave out is not given back to the new one, which would send it a second time.
    assert ask(kit.url, f"CONSUMER.INFO.{kit.place}.{GROUP}")["delivered"]["consumer_seq"] == 3


@shared_server
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
async def test_deleted_consumer_that_had_seen_nothing_new_begins_where_it_stood(kit, shared):
    kit.send_named("before")
    source = await kit.open_source(start="new", shared=shared)
    ask(kit.url, f"CONSUMER.DELETE.{kit.place}.{GROUP}")
    kit.send_named("a")
    await until(lambda: source._receiver.done())
    assert await take_names(source, 1) == ["a"]
    assert await is_silent(source)


@shared_server
async def test_deleted_consumer_gives_again_what_another_process_had(kit):
    one = await kit.open_source(start="new", shared=True, prefetch=3)
    two = await kit.open_source(start="new", shared=True, prefetch=3)
    names = [f"{number}" for number in range(6)]
    kit.send_named(*names)
    await until(lambda: len(one.pending) + len(two.pending) == 6)
    # Whoever has not the first message does not know of it, and makes the consumer again.
    other = two if any(entry.place == 1 for entry in one.pending) else one
    ask(kit.url, f"CONSUMER.DELETE.{kit.place}.{GROUP}")
    await until(lambda: two._receiver.done() and one._receiver.done())
    assert sorted(await take_names(other, 6)) == names


@shared_server
async def test_stream_that_is_made_again_is_read_from_its_beginning(kit):
    source = await kit.open_source(start="new")
    kit.send_named("a", "b")
    assert await take_names(source, 2) == ["a", "b"]
    ask(kit.url, f"STREAM.DELETE.{kit.place}")
    make_stream(kit.url, kit.place, subjects=[f"{kit.place}.>"])
    kit.send_named("c")
    await until(lambda: source._receiver.done())
    assert await take_names(source, 1) == ["c"]


@shared_server
async def test_acknowledgement_to_a_deleted_consumer_is_none(kit):
    kit.send_named("a")
    source = await kit.open_source()
    batches = await take(source, 1)
    ask(kit.url, f"CONSUMER.DELETE.{kit.place}.{GROUP}")
    with pytest.raises(StoreUnavailable, match="acknowledgements are not taken: the consumer is gone"):
        await settle(batches)
    assert await settle(batches) == Settlement(lost=1)


@shared_server
async def test_deleted_stream_is_an_outage_until_it_is_back(kit):
    source = await kit.open_source()
    ask(kit.url, f"STREAM.DELETE.{kit.place}")
    await until(lambda: source._receiver.done())
    with pytest.raises(StoreUnavailable, match="does not exist"):
        await claim(source)
    make_stream(kit.url, kit.place, subjects=[f"{kit.place}.>"])
    kit.send_named("a")
    assert await take_names(source, 1) == ["a"]


# -- attempts --------------------------------------------------------------------------------------------------------


@shared_server
async def test_deliveries_of_others_count_as_attempts(kit):
    make_consumer(kit, ack_wait=30 * SECONDS)
    kit.send_named("a")
    for _ in range(3):
        async with fetched(kit, 1) as (message,):
            await message.nak()
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.attempt == 4


@shared_server
async def test_lost_connection_leaves_attempts_as_they_were(kit):
    kit.send_named("tried", key="k")
    kit.send_named("untried", key="k")
    source = await kit.open_source()
    for _ in range(2):
        await (await take(source, 1))[0].settle([Retry("no", timedelta(0))])
    source._connection.client._transport._io_writer.transport.abort()
    await until(lambda: source._receiver.done())
    received = claims_of(await take(source, 2))
    assert [each.attempt for each in received] == [3, 1]


# -- consumers -------------------------------------------------------------------------------------------------------


@shared_server
async def test_consumer_is_made_as_it_is_needed(kit):
    await kit.open_source(prefetch=7, lease="12s", subjects=f"{kit.place}.order")
    config = consumer_of(kit)["config"]
    expected = {
        "durable_name": GROUP,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": 12 * SECONDS,
        "max_deliver": -1,
        "max_ack_pending": 7,
        "filter_subject": f"{kit.place}.order",
    }
    assert {name: config[name] for name in expected} == expected


@shared_server
async def test_subject_filters_and_start_is_honoured(kit):
    kit.send_named("before")
    source = await kit.open_source(subjects=f"{kit.place}.order", start="new")
    publish(kit.url, [(f"{kit.place}.other", b'{"name": "other"}', {})])
    kit.send_named("after")
    assert await take_names(source, 1) == ["after"]
    assert await is_silent(source)


@shared_server
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"deliver_subject": "push.here"}, "is a push consumer; expected a pull consumer"),
        ({"ack_policy": "none", "max_ack_pending": 0}, "expected ack policy explicit"),
        ({"max_deliver": 5}, "max_deliver 5 would let JetStream drop messages"),
        ({"inactive_threshold": 60 * SECONDS}, "inactive_threshold 60 s would let JetStream delete it"),
        ({"headers_only": True}, "gives out headers without payloads"),
        ({"filter_subject": "PLACE.order"}, r"filters by contract-\w+\.order, the source asks for all subjects"),
    ],
    ids=["push", "no acks", "drops", "goes away", "headers only", "other subjects"],
)
async def test_consumer_that_would_lose_messages_is_refused(kit, settings, complaint):
    make_consumer(
        kit,
        **{
            name: str(each).replace("PLACE", kit.place) if name == "filter_subject" else each
            for name, each in settings.items()
        },
    )
    source = kit.make_source()
    with pytest.raises(ConfigError, match=complaint):
        await source.open()


@shared_server
async def test_order_across_processes_needs_a_consumer_that_keeps_it(kit):
    make_consumer(kit)
    with pytest.raises(ConfigError, match="order across processes needs max_ack_pending 1, it has 1000"):
        await kit.open_source(shared=True, prefetch=1)


@shared_server
async def test_several_subjects_are_refused_where_the_server_would_ignore_them(kit):
    source = kit.make_source(subjects=f"{kit.place}.a,{kit.place}.b")
    with pytest.raises(ConfigError, match=r"several subjects need a server of version 2\.10, this one has 2\.9"):
        await source.open()
    assert "error" in ask(kit.url, f"CONSUMER.INFO.{kit.place}.{GROUP}")


@shared_server
async def test_consumer_that_allows_less_than_prefetch_is_told(kit, caplog):
    make_consumer(kit, max_ack_pending=3)
    kit.send_named(*"abcde")
    source = await kit.open_source(prefetch=10)
    assert "allows 3 unacknowledged messages, fewer than prefetch 10" in caplog.text
    assert sorted(await take_names(source, 5)) == list("abcde")


# -- reading ---------------------------------------------------------------------------------------------------------


@shared_server
async def test_id_is_the_senders_or_the_place_in_the_stream(kit):
    publish(
        kit.url, [(f"{kit.place}.x", b"{}", {"Nats-Msg-Id": "theirs", "city": "Bern"}), (f"{kit.place}.x", b"{}", {})]
    )
    source = await kit.open_source()
    named, unnamed = claims_of(await take(source, 2))
    assert named.row.read.id == "theirs"
    # The server's own headers are no part of the event: a sink could not send them on.
    assert dict(named.event.headers) == {"city": "Bern"}
    stream, _, rest = unnamed.row.read.id.partition(":")
    assert (stream, rest.partition(":")[2]) == (kit.place, "2")


@shared_server
async def test_stream_that_is_made_again_has_other_ids(kit):
    ids: list[str] = []
    for _ in range(2):
        kit.send_named("a")
        source = await kit.open_source()
        (received,) = claims_of(await take(source, 1))
        ids.append(received.row.read.id)
        await source.close()
        ask(kit.url, f"STREAM.DELETE.{kit.place}")
        make_stream(kit.url, kit.place, subjects=[f"{kit.place}.>"])
    assert ids[0] != ids[1]


@shared_server
async def test_header_that_is_no_text_is_a_defect(kit):
    publish(kit.url, [(f"{kit.place}.x", b"body", {"stamp": b"\xff\xfe"})])
    source = await kit.open_source()
    (bad,) = claims_of(await take(source, 1))
    assert bad.defect == "Message cannot be read: header 'stamp' is no text"
    assert bad.event.payload == b"body"


@shared_server
async def test_subject_that_is_no_text_is_a_defect_and_blocks_nobody(kit):
    publish(kit.url, [(f"{kit.place}.\udcff", b"body", {}), (f"{kit.place}.x", b'{"name": "after"}', {})])
    source = await kit.open_source()
    bad, good = claims_of(await take(source, 2))
    assert bad.defect == "Message cannot be read: its subject is no text"
    assert (bad.event.topic, bad.event.payload) == (f"{kit.place}.\\xff", b"body")
    assert good.defect is None


@shared_server
async def test_subject_is_the_key_where_that_is_asked_for(kit):
    publish(kit.url, [(f"{kit.place}.7", b"{}", {}), (f"{kit.place}.8", b"{}", {"event-key": "k"})])
    source = await kit.open_source(key_from="subject")
    assert [each.event.key for each in claims_of(await take(source, 2))] == [f"{kit.place}.7", "k"]


# -- logins and options ----------------------------------------------------------------------------------------------


async def test_tls_and_a_client_certificate_log_in():
    folder = certificates()
    files = {
        "tls_ca": str(folder / "ca.pem"),
        "tls_certificate": str(folder / "client.pem"),
        "tls_key": str(folder / "client.key"),
    }
    url = server_url("nats_tls")
    with pytest.raises(ConfigError, match="stream 'nowhere' does not exist"):
        await open_source(url, group=GROUP, dead=Letters(), stream="nowhere", **files).open()
    with pytest.raises(StoreUnavailable, match="certificate verify failed"):
        await open_source(url, group=GROUP, dead=Letters(), stream="nowhere").open()


async def test_token_logs_in_and_is_not_shown():
    url = server_url("nats_token")
    with pytest.raises(ConfigError, match="stream 'nowhere' does not exist"):
        await open_source(url, group=GROUP, dead=Letters(), stream="nowhere").open()
    stranger = open_source(url.replace("//pillarbox@", "//hidden@"), group=GROUP, dead=Letters(), stream="nowhere")
    with pytest.raises(StoreUnavailable) as refused:
        await stranger.open()
    assert "hidden" not in stranger.name + str(refused.value) + repr(stranger)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "Source 'here': give stream, the name of the stream to read"),
        ({"stream": "a.b"}, "Source 'here' stream: expected letters, digits, - and _, got 'a.b'"),
        ({"stream": "s", "key_from": "body"}, "Source 'here' key_from: expected subject or header, got 'body'"),
        ({"stream": "s", "start": "old"}, "Source 'here' start: expected all or new, got 'old'"),
        ({"stream": "s", "lease": "10ms"}, "Source 'here' lease: expected at least a second"),
        ({"stream": "s", "domain": "d", "api_prefix": "p"}, "Source 'here': expected domain or api_prefix, got both"),
        ({"stream": "s", "tls_ca": "x"}, "unknown option 'tls_ca'"),
        ({"stream": "s", "nkey_seed": "SUHIDDEN"}, "Source 'here' nkey_seed: expected the seed of a user"),
    ],
    ids=["no stream", "stream", "key", "start", "lease", "domain", "tls", "seed"],
)
async def test_bad_option_is_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        open_source("nats://127.0.0.1", group=GROUP, dead=Letters(), name="here", **options)
    assert "HIDDEN" not in str(refused.value)


async def test_source_is_made_without_a_url(private_broker):
    server = private_broker("nats")
    make_stream(server.url, "direct", subjects=["direct.>"])
    publish(server.url, [("direct.x", b'{"name": "a"}', {})])
    host = server.url.rpartition("@")[2]
    source = NatsSource(
        [f"nats://{host}"],
        stream="direct",
        durable="mine",
        dead=Letters(),
        connect={"user": "pillarbox", "password": "pillarbox"},
    )
    await source.open()
    assert await take_names(source, 1) == ["a"]
    await source.close()
