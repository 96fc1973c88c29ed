"""The Source contract: one suite, run on every broker; `Source`'s docstring lists what is asked of it."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import pytest

from pillarbox.errors import ConfigError, StoreUnavailable, Unsupported
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Event, Outcome, Released, Retry, load_event
from pillarbox.inbox.message import make_event_id
from pillarbox.stores import Settlement
from tests.contract.sources import (
    GROUP,
    OTHER,
    claim,
    claims_of,
    every_source,
    is_silent,
    name_of,
    names_of,
    number_names,
    settle,
    source_kit,
    sources_that,
    take,
    take_names,
    until,
    until_told,
)

__all__ = ["source_kit"]

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
SOON = timedelta(milliseconds=50)


def claim_of(created_at: datetime | None = None, **fields) -> Claim:
    """A claim as a store loads it for our own sink: with the time it was put."""
    event = Event(fields.pop("type", "order.placed"), fields.pop("payload", {"name": "a"}), **fields)
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    return Claim(row=1, event=load_event(*{**values, "created_at": created_at}.values()), attempt=1)


# -- messages --------------------------------------------------------------------------------------------------------


@every_source
async def test_each_message_is_given_once_and_acknowledged(kit):
    names = number_names(50)
    kit.send_named(*names)
    source = await kit.open_source()
    assert sorted(await take_names(source, 50), key=int) == names
    assert await is_silent(source)
    await until_told(kit.remaining, 0)


@every_source
async def test_message_sent_while_nobody_listened_is_given_later(kit):
    first = await kit.open_source()
    kit.send_named("a")
    assert await take_names(first, 1) == ["a"]
    await first.close()
    kit.send_named("b")
    second = await kit.open_source()
    assert await take_names(second, 1) == ["b"]


@every_source
@pytest.mark.parametrize("form", [None, "binary", "structured"], ids=["plain", "binary", "structured"])
async def test_event_of_our_own_sink_arrives_as_it_was_put(kit, form):
    sent = claim_of(
        id=ID,
        key="order-7",
        payload=b'{"total": 12.50,  "n": 123456789012345678901234567890}',
        content_type="application/json",
        headers={"tenant": "acme", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        created_at=datetime(2026, 3, 1, 12, 30, 0, 250_000, tzinfo=UTC),
        correlation_id="c-1",
        causation_id="c-0",
        source="shop",
        schema_version="2",
        aggregate_id="7",
    )
    sink = kit.make_sink(**({} if form is None else {"cloudevents": form}))
    source = await kit.open_source()
    await sink.open()
    assert await sink.deliver([sent]) == [DELIVERED]
    (received,) = claims_of(await take(source, 1))
    event = received.event
    assert received.defect is None
    assert received.attempt == 1
    assert (event.id, event.type, event.key) == (ID, "order.placed", "order-7")
    assert event.payload == b'{"total": 12.50,  "n": 123456789012345678901234567890}'
    assert event.content_type == "application/json"
    assert event.created_at == datetime(2026, 3, 1, 12, 30, 0, 250_000, tzinfo=UTC)
    assert dict(event.headers) == {
        "tenant": "acme",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    assert (event.correlation_id, event.causation_id, event.source) == ("c-1", "c-0", "shop")
    assert (event.schema_version, event.aggregate_id) == ("2", "7")


@every_source
async def test_bytes_of_any_kind_arrive(kit):
    payload = bytes(range(256))
    sink = kit.make_sink()
    source = await kit.open_source()
    await sink.open()
    sent = [claim_of(payload=payload), claim_of(payload=b"", content_type="text/plain")]
    assert await sink.deliver(sent) == [DELIVERED] * 2
    received = claims_of(await take(source, 2))
    found = {each.event.payload: each.event.content_type for each in received}
    assert found == {payload: "application/octet-stream", b"": "text/plain"}


@every_source
async def test_message_of_a_stranger_is_readable(kit):
    source = await kit.open_source()
    kit.send(b'{"name": "a"}', headers={"city": "Zürich"})
    (received,) = claims_of(await take(source, 1))
    assert received.defect is None
    assert received.event.payload == b'{"name": "a"}'
    assert received.event.headers["city"] == "Zürich"
    assert kit.place in received.event.topic
    # What makes the message known again is the broker's own name for it.
    assert received.row.read.id
    assert received.event.id == make_event_id(received.row.read.id)


@every_source
async def test_messages_of_strangers_have_ids_of_their_own_that_stay(kit):
    kit.send_named("a", "b")
    first = await kit.open_source()
    before = {name_of(each.event): each.event.id for each in claims_of(await take(first, 2))}
    assert len(set(before.values())) == 2
    await first.close()
    second = await kit.open_source()
    again = claims_of(await take(second, 2, within=kit.patience))
    assert {name_of(each.event): each.event.id for each in again} == before


@sources_that("has keys")
async def test_key_of_a_stranger_is_the_events_key(kit):
    source = await kit.open_source()
    kit.send_named("a", key="order-7")
    kit.send_named("b")
    found = {name_of(each.event): each.event.key for each in claims_of(await take(source, 2))}
    assert found == {"a": "order-7", "b": None}


# -- acknowledging ---------------------------------------------------------------------------------------------------


@every_source
async def test_message_is_not_acknowledged_before_it_is_settled(kit):
    kit.send_named("a", "b", "c")
    first = await kit.open_source()
    batches = await take(first, 3)
    assert await asyncio.to_thread(kit.remaining) == 3
    await first.close()
    assert await settle(batches) == Settlement(lost=3)
    second = await kit.open_source()
    assert sorted(await take_names(second, 3, within=kit.patience)) == ["a", "b", "c"]
    await until_told(kit.remaining, 0)


@every_source
async def test_closing_keeps_what_was_settled_and_gives_back_the_rest(kit):
    for name in number_names(10):
        kit.send_named(name, key=f"key-{name}")
    first = await kit.open_source()
    batches = await take(first, 10, limit=1)
    done = batches[3:7]
    assert await settle(done) == Settlement(delivered=4)
    await first.close()
    second = await kit.open_source()
    rest = set(number_names(10)) - set(names_of(done))
    again = await take_names(second, 6, within=kit.patience)
    while await asyncio.to_thread(kit.remaining):
        batch = await claim(second)
        again += names_of([batch])
        await batch.settle([DELIVERED] * len(batch.claims))
    assert rest <= set(again)
    if not kit.keeps_one_offset:
        assert rest == set(again)


@every_source
async def test_released_message_comes_again_at_once_and_is_not_counted_as_tried(kit):
    kit.send_named("a")
    source = await kit.open_source()
    assert await settle(await take(source, 1), RELEASED) == Settlement(released=1)
    (again,) = claims_of(await take(source, 1, within=2))
    assert again.attempt == 1


@every_source
async def test_released_of_a_sinks_own_making_is_as_good(kit):
    kit.send_named("a", key="k")
    source = await kit.open_source()
    assert await settle(await take(source, 1), Released()) == Settlement(released=1)
    assert await take_names(source, 1) == ["a"]


@every_source
async def test_retry_comes_again_after_its_delay_as_the_next_attempt(kit):
    kit.send_named("a")
    source = await kit.open_source()
    batches = await take(source, 1)
    failed_at = time.monotonic()
    assert await settle(batches, Retry("no", timedelta(seconds=0.5))) == Settlement(retried=1)
    due = await source.next_due()
    assert due is not None
    assert due <= timedelta(seconds=0.5)
    (again,) = claims_of(await take(source, 1))
    assert time.monotonic() - failed_at >= 0.5
    assert again.attempt == 2
    assert await asyncio.to_thread(kit.remaining) == 1


@every_source
async def test_abandoned_batch_comes_again(kit):
    kit.send_named("a", "b")
    source = await kit.open_source()
    for batch in await take(source, 2):
        await batch.abandon()
    assert sorted(await take_names(source, 2)) == ["a", "b"]


@every_source
async def test_what_a_batch_says_after_it_was_given_back_changes_nothing(kit):
    kit.send_named("a")
    source = await kit.open_source()
    (batch,) = await take(source, 1)
    await batch.abandon()
    (current,) = await take(source, 1)
    assert await batch.settle([DELIVERED]) == Settlement(lost=1)
    assert await batch.renew(timedelta(seconds=30)) == list(batch.claims)
    assert await asyncio.to_thread(kit.remaining) == 1
    assert await current.settle([DELIVERED]) == Settlement(delivered=1)
    await until_told(kit.remaining, 0)


@every_source
async def test_source_has_no_transaction_for_an_effect(kit):
    kit.send_named("a")
    source = await kit.open_source()
    (batch,) = await take(source, 1)
    with pytest.raises(Unsupported, match="no transaction"):
        await batch.settle([DELIVERED], effect=lambda db: None)
    with pytest.raises(Unsupported, match="no transaction"):
        await batch.settle_one(batch.claims[0], lambda db: None)
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


# -- order -----------------------------------------------------------------------------------------------------------


@every_source
async def test_failed_message_holds_back_its_key_and_no_other(kit):
    source = await kit.open_source()
    kit.send_named("k1", key="k")
    (first,) = await take(source, 1)
    await first.settle([Retry("no", timedelta(seconds=3))])
    kit.send_named("k2", "k3", key="k")
    kit.send_named("j1", "j2", key="j")
    assert await take_names(source, 2) == ["j1", "j2"]
    await until(lambda: len(source.pending) == 3)
    assert (await claim(source)).claims == []
    assert await take_names(source, 3) == ["k1", "k2", "k3"]


@every_source
async def test_key_under_way_is_in_no_second_batch(kit):
    kit.send_named("k1", "k2", key="k")
    kit.send_named("j1", key="j")
    source = await kit.open_source()
    await until(lambda: len(source.pending) == 3)
    batches = [await claim(source, 1), await claim(source, 1), await claim(source)]
    assert sorted(names_of(batches)) == ["j1", "k1"]
    await settle(batches)
    assert await take_names(source, 1) == ["k2"]


@every_source
async def test_released_successors_follow_their_failed_predecessor(kit):
    kit.send_named(*number_names(5), key="k")
    source = await kit.open_source()
    await until(lambda: len(source.pending) == 5)
    batch = await claim(source)
    assert names_of([batch]) == number_names(5)
    outcomes: list[Outcome] = [DELIVERED, Retry("no", SOON), RELEASED, RELEASED, RELEASED]
    assert await batch.settle(outcomes) == Settlement(delivered=1, retried=1, released=3)
    again = await take(source, 4)
    assert names_of(again) == ["1", "2", "3", "4"]
    assert [each.attempt for each in claims_of(again)] == [2, 1, 1, 1]


# -- dead letters ----------------------------------------------------------------------------------------------------


@every_source
async def test_dead_message_is_buried_as_it_came_and_then_acknowledged(kit):
    kit.send(b'{"name": "a"}', headers={"city": "Zürich"})
    source = await kit.open_source()
    batches = await take(source, 1)
    unacknowledged: list[int] = []
    kit.letters.before = lambda: unacknowledged.append(kit.remaining())
    assert await settle(batches, Dead("it is bad")) == Settlement(dead=1)
    assert unacknowledged == [1]
    await until_told(kit.remaining, 0)
    (letter,) = kit.letters.letters
    assert letter.error == "it is bad"
    assert letter.claim is batches[0].claims[0]
    assert letter.raw is not None
    assert letter.raw.body == b'{"name": "a"}'
    assert kit.place in letter.raw.topic
    assert letter.raw.headers["city"] in ("Zürich", "Zürich".encode())
    assert await is_silent(source)


@every_source
async def test_dead_message_that_cannot_be_buried_is_not_acknowledged(kit):
    kit.send_named("a", key="k")
    kit.send_named("b", key="k")
    source = await kit.open_source()
    (batch,) = await take(source, 1)
    kit.letters.is_down = True
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        await batch.settle([Dead("it is bad")])
    assert await asyncio.to_thread(kit.remaining) == 2
    kit.letters.is_down = False
    assert await batch.settle([Dead("it is bad")]) == Settlement(dead=1)
    assert [letter.claim for letter in kit.letters.letters] == list(batch.claims)
    assert await take_names(source, 1) == ["b"]
    await until_told(kit.remaining, 0)


@every_source
async def test_message_that_could_not_be_buried_comes_again_to_another_consumer(kit):
    kit.send_named("a")
    first = await kit.open_source()
    (batch,) = await take(first, 1)
    kit.letters.is_down = True
    with pytest.raises(StoreUnavailable):
        await batch.settle([Dead("it is bad")])
    await batch.abandon()
    await first.close()
    second = await kit.open_source()
    assert await take_names(second, 1, within=kit.patience) == ["a"]


@every_source
async def test_what_was_delivered_is_acknowledged_although_its_neighbour_cannot_be_buried(kit):
    kit.send_named("a")
    kit.send_named("b")
    source = await kit.open_source()
    await until(lambda: len(source.pending) == 2)
    batch = await claim(source)
    assert len(batch.claims) == 2
    outcomes = [Dead("it is bad") if name == "b" else DELIVERED for name in names_of([batch])]
    kit.letters.is_down = True
    with pytest.raises(StoreUnavailable):
        await batch.settle(outcomes)
    kit.letters.is_down = False
    assert await batch.settle(outcomes) == Settlement(delivered=1, dead=1)
    assert len(kit.letters.letters) == 1
    await until_told(kit.remaining, 0)


@every_source
async def test_message_that_cannot_be_read_is_a_defect_with_its_bytes(kit):
    broken = b'{"specversion": "1.0", "id"'
    source = await kit.open_source()
    kit.send(broken, headers={"content-type": "application/cloudevents+json"})
    kit.send_named("after")
    received = claims_of(await take(source, 2))
    (bad,) = [each for each in received if each.defect is not None]
    assert str(bad.defect).startswith("Message cannot be read: ")
    assert bad.event.payload == broken
    assert bad.row.read.raw.body == broken
    assert [name_of(each.event) for each in received if each is not bad] == ["after"]


@sources_that("carries any header")
async def test_header_that_is_no_text_is_a_defect_and_kept(kit):
    source = await kit.open_source()
    kit.send(b"{}", headers={"stamp": b"\xff\xfe"})
    (bad,) = claims_of(await take(source, 1))
    assert "header 'stamp' is no text" in str(bad.defect)
    assert bad.row.read.raw.headers["stamp"] == b"\xff\xfe"


# -- several consumers -----------------------------------------------------------------------------------------------


@every_source
async def test_prefetch_bounds_what_is_at_hand_while_nothing_is_settled(kit):
    kit.send_named(*number_names(60))
    source = await kit.open_source(prefetch=10)
    held = await take(source, 10)
    assert await is_silent(source)
    assert len(source.pending) == 10
    # The first keeps failing: still no more than ten are at hand.
    for _ in range(3):
        await held[0].settle([Retry("no", timedelta(0))] * len(held[0].claims))
        held[0] = (await take(source, len(held[0].claims)))[0]
        assert len(source.pending) <= 10
    await settle(held)
    assert len(await take_names(source, 50)) == 50


@every_source
async def test_each_group_gets_everything(kit):
    kit.send_named("a", "b")
    one, two = await kit.open_source(group=GROUP), await kit.open_source(group=OTHER)
    assert sorted(await take_names(one, 2)) == ["a", "b"]
    assert sorted(await take_names(two, 2)) == ["a", "b"]
    for group in (GROUP, OTHER):
        await until_told(partial(kit.remaining, group), 0)


@sources_that("asks for a login")
async def test_wrong_login_is_a_clear_error_without_the_secret(kit):
    source = kit.make_stranger()
    with pytest.raises(StoreUnavailable) as refused:
        await source.open()
    text = str(refused.value).lower()
    assert "not-the-password" not in text
    assert "not-the-password" not in source.name
    assert any(word in text for word in ("auth", "login", "password", "credential", "denied"))


@sources_that("misses its place")
async def test_missing_place_is_a_clear_error(kit):
    source = kit.make_missing()
    with pytest.raises(ConfigError, match="nowhere") as refused:
        await source.open()
    assert "does not exist" in str(refused.value)


@every_source
async def test_unknown_option_and_bad_prefetch_are_refused(kit):
    with pytest.raises(ConfigError, match=r"Source .*unknown option 'prefech'.*Did you mean 'prefetch'\?"):
        kit.make_source(prefech=10)
    with pytest.raises(ConfigError, match=r"Source .*prefetch: expected a whole number of 1 or more, got 0"):
        kit.make_source(prefetch=0)


@every_source
async def test_opening_and_closing_again_is_harmless(kit):
    source = await kit.open_source()
    await source.open()
    await source.close()
    await source.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await claim(source)
    kit.send_named("a")
    await source.open()
    assert await take_names(source, 1) == ["a"]


@sources_that("counts attempts")
async def test_broker_remembers_that_a_message_was_tried(kit):
    kit.send_named("a")
    first = await kit.open_source()
    for _ in range(2):
        await settle(await take(first, 1), Retry("no", timedelta(0)))
    await take(first, 1)
    await first.close()
    second = await kit.open_source()
    (again,) = claims_of(await take(second, 1, within=kit.patience))
    assert again.attempt > 1


@every_source
async def test_message_as_json_of_ours_needs_no_header(kit):
    """A structured CloudEvent of anybody is read by its content type alone."""
    source = await kit.open_source()
    document = {"specversion": "1.0", "id": "x-1", "source": "/them", "type": "paid", "data": {"name": "a"}}
    kit.send(json.dumps(document).encode(), headers={"content-type": "application/cloudevents+json"})
    (received,) = claims_of(await take(source, 1))
    assert received.row.read.id == "/them x-1"
    assert received.event.type == "paid"
    assert received.event.payload == b'{"name": "a"}'
