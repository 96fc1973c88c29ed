"""What holds for every destination with a server: bytes, headers, bad messages, logins, and a relay behind it all."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from pillarbox import Relay
from pillarbox.breaker import Breaker
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Event, Outcome, Retry, load_event
from pillarbox.sinks import Sink
from pillarbox.stores import Counts
from tests.contract.broker_kits import named_claim
from tests.contract.sinks import sink_kit, sinks_that
from tests.contract.stores import Database, make_database

__all__ = ["sink_kit"]

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def claim_of(**fields: Any) -> Claim:
    """A claim as the store loads it: with the time it was put."""
    created_at = fields.pop("created_at", None)
    event = Event(fields.pop("type", "order.placed"), fields.pop("payload", {"name": "a"}), **fields)
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    return Claim(row=1, event=load_event(*{**values, "created_at": created_at}.values()), attempt=1)


# -- bytes and headers -----------------------------------------------------------------------------------------------


@sinks_that("keeps bytes")
@pytest.mark.parametrize(
    "payload",
    [
        pytest.param('{"grüße": "日本語 🎈",  "n": 1.0}'.encode(), id="unicode"),
        pytest.param(b"", id="empty"),
        pytest.param(bytes(range(256)) * 2, id="binary"),
        pytest.param(b"\r\n\r\n\0", id="line ends"),
    ],
)
async def test_payload_arrives_byte_for_byte(kit, payload):
    assert await kit.sink.deliver([claim_of(payload=payload)]) == [DELIVERED]
    assert [message.body for message in kit.received()] == [payload]


@sinks_that("takes a megabyte")
async def test_payload_of_a_megabyte_arrives(kit):
    payload = bytes(range(256)) * 3906  # just below 1 MB, so that headers fit where that is the limit
    assert await kit.sink.deliver([claim_of(payload=payload)]) == [DELIVERED]
    assert [message.body for message in kit.received()] == [payload]


@sinks_that("carries headers")
async def test_what_the_event_says_of_itself_becomes_headers(kit):
    sent = claim_of(
        id=ID,
        key="order-7",
        payload={"name": "a"},
        correlation_id="c-1",
        causation_id="c-0",
        source="shop",
        schema_version="2",
        created_at=datetime(2026, 3, 1, 12, 30, 0, 250_000, tzinfo=UTC),
        headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tenant": "acme"},
    )
    assert await kit.sink.deliver([sent]) == [DELIVERED]
    (message,) = kit.received()
    assert message.content_type == "application/json"
    expected = {
        "event-id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "event-type": "order.placed",
        "event-time": "2026-03-01T12:30:00.250000+00:00",
        "event-key": "order-7",
        "correlation-id": "c-1",
        "causation-id": "c-0",
        "event-source": "shop",
        "schema-version": "2",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tenant": "acme",
    }
    assert {name: message.headers.get(name) for name in expected} == expected


@sinks_that("carries headers")
async def test_header_that_is_no_text_arrives_as_json_text(kit):
    headers = {"count": 3, "share": 0.5, "is-new": True, "nothing": None, "city": "Zürich"}
    assert await kit.sink.deliver([claim_of(headers=headers)]) == [DELIVERED]
    (message,) = kit.received()
    expected = {"count": "3", "share": "0.5", "is-new": "true", "nothing": "null", "city": "Zürich"}
    assert {name: message.headers.get(name) for name in expected} == expected


@sinks_that("carries headers")
async def test_events_own_header_wins_a_clash(kit):
    await kit.sink.deliver([claim_of(id=ID, headers={"event-id": "mine"})])
    (message,) = kit.received()
    assert message.headers["event-id"] == "mine"
    assert message.headers["pillarbox-event-id"] == str(ID)


@sinks_that("carries headers")
async def test_binary_cloudevent(kit):
    sink = kit.make_sink(cloudevents="binary", cloudevents_source="/shop")
    sent = claim_of(
        id=ID,
        key="order-7",
        aggregate_type="order",
        aggregate_id="7",
        payload=b"<order/>",
        content_type="application/xml",
        created_at=datetime(2026, 3, 1, 12, 30, tzinfo=UTC),
        headers={"tenant": "acme"},
    )
    assert await sink.deliver([sent]) == [DELIVERED]
    await sink.close()
    (message,) = kit.received()
    assert message.body == b"<order/>"
    assert message.content_type == "application/xml"
    expected = {
        "specversion": "1.0",
        "id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "source": "/shop",
        "type": "order.placed",
        "time": "2026-03-01T12:30:00+00:00",
        "subject": "7",
        "partitionkey": "order-7",
    }
    assert {name: message.headers.get(kit.ce_prefix + name) for name in expected} == expected
    assert message.headers["tenant"] == "acme"


@sinks_that("carries headers")
async def test_structured_cloudevent(kit):
    sink = kit.make_sink(cloudevents="structured")
    sent = [
        claim_of(id=ID, key="order-7", source="/shop", payload={"name": "a"}),
        claim_of(payload=b"\xff\x00", key="order-7"),
    ]
    assert await sink.deliver(sent) == [DELIVERED, DELIVERED]
    await sink.close()
    first, second = kit.received()
    assert first.content_type == "application/cloudevents+json"
    assert json.loads(first.body) == {
        "specversion": "1.0",
        "id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "source": "/shop",
        "type": "order.placed",
        "partitionkey": "order-7",
        "datacontenttype": "application/json",
        "data": {"name": "a"},
    }
    assert b64decode(json.loads(second.body)["data_base64"]) == b"\xff\x00"


# -- errors ----------------------------------------------------------------------------------------------------------


@sinks_that("refuses late")
async def test_message_the_server_refuses_is_dead_and_its_neighbours_arrive(kit):
    bad = kit.refused_by_server("bad", "k")
    outcomes = await kit.sink.deliver([named_claim("a"), bad, named_claim("after", "k"), named_claim("b", "j")])
    assert isinstance(outcomes[1], Dead)
    assert [outcomes[0], *outcomes[2:]] == [DELIVERED, RELEASED, DELIVERED]
    # One window: a successor may have been on its way, but it is not counted as delivered.
    assert {"a", "b"} <= set(kit.arrived()) <= {"a", "b", "after"}
    assert await kit.sink.deliver([named_claim("after", "k")]) == [DELIVERED]
    assert kit.arrived()[-1] == "after"


@sinks_that("asks for a login")
async def test_wrong_login_is_a_clear_error_without_the_secret(kit):
    sink = kit.make_stranger()
    with pytest.raises(SinkUnavailable) as refused:
        await sink.open()
    with pytest.raises(SinkUnavailable):
        await sink.deliver([named_claim("a")])
    await sink.close()
    text = str(refused.value).lower()
    assert "not-the-password" not in text
    assert any(word in text for word in ("auth", "login", "password", "credential", "denied", "authoriz"))


@sinks_that("carries headers")
async def test_unknown_option_is_refused(kit):
    with pytest.raises(ConfigError, match="unknown option 'tpoic'"):
        kit.make_sink(tpoic="x")
    with pytest.raises(ConfigError, match="expected binary or structured, got 'yes'"):
        kit.make_sink(cloudevents="yes")


# -- with a relay ----------------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path):
    made = make_database("postgres", tmp_path)
    yield made
    made.drop()


class FlakySink:
    """The sink behind it, but every 25th event fails once."""

    def __init__(self, sink: Sink) -> None:
        self.name, self.is_quick = sink.name, sink.is_quick
        self.open, self.check, self.close = sink.open, sink.check, sink.close
        self._sink = sink
        self._failed: set[UUID] = set()
        self.failures = 0

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        stopped: dict[str | None, Outcome] = {}
        outcomes: list[Outcome | None] = []
        for claim in claims:
            event = claim.event
            if event.key in stopped:
                outcomes.append(RELEASED)
            elif event.headers["number"] % 25 == 0 and event.id not in self._failed:
                self._failed.add(event.id)
                self.failures += 1
                stopped[event.key] = RELEASED
                outcomes.append(Retry("once", after=timedelta(0)))
            else:
                outcomes.append(None)
        good = [claim for claim, outcome in zip(claims, outcomes, strict=True) if outcome is None]
        results = iter(await self._sink.deliver(good))
        return [next(results) if outcome is None else outcome for outcome in outcomes]


def put_numbers(database: Database, count: int, *, keys: int) -> None:
    events = [
        Event("order.placed", {"name": f"{number}"}, key=f"key-{number % keys}", headers={"number": number})
        for number in range(count)
    ]
    for start in range(0, count, 1000):
        with database.engine.begin() as db:
            database.outbox.put(db, *events[start : start + 1000])


def assert_order(names: list[str], count: int, *, keys: int) -> None:
    """Every event once, or again in a row of its successors; and the events of a key in order."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for name in names:
        by_key[int(name) % keys].append(int(name))
    for key in range(keys):
        assert list(dict.fromkeys(by_key[key])) == list(range(key, count, keys))


@sinks_that("arrives", "serves a relay")
@pytest.mark.parametrize("is_flaky", [False, True], ids=["sound", "flaky"])
async def test_thousands_of_events_of_a_hundred_keys_keep_their_order(kit, database, is_flaky):
    put_numbers(database, kit.many, keys=100)
    sink = FlakySink(kit.sink) if is_flaky else kit.sink
    async with Relay(database.outbox.store(database.url), sink, batch_size=500) as relay:
        remains = await relay.drain()
    assert remains == Counts()
    names = kit.arrived()
    assert len(names) == kit.many
    assert_order(names, kit.many, keys=100)
    if is_flaky:
        assert sink.failures == kit.many // 25


@sinks_that("goes down", "serves a relay")
async def test_server_killed_in_the_middle_loses_nothing_and_spends_no_attempt(kit, database):
    put_numbers(database, 3_000, keys=50)
    kills_at = {500, 1700}
    delivered = 0

    class Killing(FlakySink):
        async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
            nonlocal delivered
            attempts.update(claim.attempt for claim in claims)
            due = {number for number in kills_at if delivered >= number}
            kills_at.difference_update(due)
            if 500 in due and kit.falls_silent:
                await asyncio.to_thread(kit.fall_silent)
            sending = asyncio.ensure_future(self._sink.deliver(claims))
            if due:
                await asyncio.sleep(0)
                await asyncio.to_thread(kit.go_down)
                back.append(asyncio.ensure_future(asyncio.to_thread(kit.come_back)))
            try:
                outcomes = await sending
            except SinkUnavailable:
                cut_off.extend(due)
                raise
            delivered += outcomes.count(DELIVERED)
            return outcomes

    attempts: set[int] = set()
    cut_off: list[int] = []
    """At which numbers a kill met a batch under way."""
    back: list[asyncio.Future[None]] = []
    breaker = Breaker("killed", first=timedelta(milliseconds=50), cap=timedelta(milliseconds=500))
    store = database.outbox.store(database.url)
    relay = Relay(store, Killing(kit.sink), batch_size=100, claim="lease", breaker=breaker)
    async with relay:
        running = asyncio.create_task(relay.run())
        async with asyncio.timeout(100):
            while (counts := await store.counts()) != Counts():
                assert not running.done(), running.exception()
                assert counts.dead == 0
                for restart in back:
                    # A server that does not come back is the reason for everything else.
                    assert not restart.done() or restart.exception() is None, restart.exception()
                await asyncio.sleep(0.05)
        relay.stop()
        await running
    await asyncio.gather(*back)
    assert kills_at == set()
    assert 500 in cut_off or not kit.falls_silent
    assert attempts == {1}
    names = kit.arrived()
    assert set(map(int, names)) == set(range(3_000))
    assert_order_of_last(names, keys=50)


def assert_order_of_last(names: list[str], *, keys: int) -> None:
    """What a kill made uncertain comes again; the last thing heard of each event is in order."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for name in reversed(names):
        number = int(name)
        if number not in by_key[number % keys]:
            by_key[number % keys].append(number)
    for found in by_key.values():
        assert found == sorted(found, reverse=True)
