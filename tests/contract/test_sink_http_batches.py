"""Several events in one request of the HTTP sink: its form, and who is to blame for what."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Retry
from tests.contract.broker_kits import named_claim
from tests.contract.http_fixtures import answering, made_sinks, outage_of, running_server
from tests.contract.http_server import Answer, Request, Server

__all__ = ["made_sinks", "running_server"]

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def names_in(server: Server) -> list[list[str]]:
    return [[each["data"]["name"] for each in json.loads(request.body)] for request in server.requests]


def refusing(*bad: str, status: int = 422, most: int = 1000) -> Any:
    def respond(request: Request) -> Answer:
        found = [each["data"]["name"] for each in json.loads(request.body)]
        if len(found) > most:
            return 413, {}, b""
        return (status, {}, b"bad") if set(bad) & set(found) else (200, {}, b"")

    return respond


async def test_batch_is_an_array_of_cloudevents(server, sinks):
    sent = Event("order.placed", {"name": "a"}, id=ID, key="k", headers={"tenant": "ä", "n": 1})
    sink = sinks("/hook?x=1", batch=10, cloudevents_source="/shop")
    assert await sink.deliver([Claim(row=1, event=sent, attempt=1), named_claim("b")]) == [DELIVERED] * 2
    (request,) = server.requests
    assert request.target == "/hook?x=1"
    assert request.headers["content-type"] == "application/cloudevents-batch+json"
    first, second = json.loads(request.body)
    assert json.loads(first.pop("headers")) == {"tenant": "ä", "n": "1"}
    assert first == {
        "specversion": "1.0",
        "id": str(ID),
        "source": "/shop",
        "type": "order.placed",
        "partitionkey": "k",
        "datacontenttype": "application/json",
        "data": {"name": "a"},
    }
    assert "headers" not in second


async def test_batch_has_an_id_that_only_the_same_events_have(server, sinks):
    a, b = named_claim("a"), named_claim("b")
    sink = sinks(batch=2)
    for batch in ([a, b], [a, b], [a], [b, a]):
        await sink.deliver(batch)
    first, again, alone, turned = (request.headers["idempotency-key"] for request in server.requests)
    assert first == again
    assert len({first, alone, turned}) == 3


async def test_batches_hold_as_many_events_as_asked_for_and_keys_stay_together(server, sinks):
    claims = [named_claim(f"{key}{number}", key) for number in range(3) for key in "xyz"] + [named_claim("n")]
    assert await sinks(batch=4, concurrency=1).deliver(claims) == [DELIVERED] * 10
    assert names_in(server) == [["x0", "x1", "x2"], ["y0", "y1", "y2"], ["z0", "z1", "z2", "n"]]


async def test_events_of_several_keys_stay_in_order_in_a_batch(server, sinks):
    claims = [named_claim("x0", "x"), named_claim("y0", "y"), named_claim("x1", "x"), named_claim("y1", "y")]
    assert await sinks(batch=9).deliver(claims) == [DELIVERED] * 4
    assert names_in(server) == [["x0", "y0", "x1", "y1"]]


async def test_long_key_takes_several_requests_in_order(server, sinks):
    assert await sinks(batch=4).deliver([named_claim(f"{n}", "k") for n in range(10)]) == [DELIVERED] * 10
    assert names_in(server) == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


async def test_batch_that_is_too_large_is_halved(server, sinks):
    server.respond = refusing(most=2)
    assert await sinks(batch=8).deliver([named_claim(f"{n}", "k") for n in range(8)]) == [DELIVERED] * 8
    assert [len(each) for each in names_in(server)] == [8, 4, 2, 2, 4, 2, 2]
    server.respond = refusing(most=0)
    assert await sinks(batch=8).deliver([named_claim("a")]) == [Dead("HTTP 413")]


@pytest.mark.parametrize(("status", "failure"), [(422, Dead("HTTP 422: bad")), (500, Retry("HTTP 500: bad"))])
async def test_only_the_bad_one_of_a_batch_fails_and_its_key_waits(server, sinks, status, failure):
    server.respond = refusing("bad", status=status)
    claims = [named_claim("k1", "k"), named_claim("bad", "k"), named_claim("k3", "k"), named_claim("j1", "j")]
    outcomes = await sinks(batch=10).deliver([*claims, *(named_claim(f"{n}") for n in range(4))])
    assert outcomes == [DELIVERED, failure, RELEASED, DELIVERED, *[DELIVERED] * 4]
    assert names_in(server) == [
        ["k1", "bad", "k3", "j1", "0", "1", "2", "3"],
        ["k1", "bad", "k3", "j1"],
        ["k1", "bad"],
        ["k1"],
        ["bad"],
        ["j1"],
        ["0", "1", "2", "3"],
    ]


async def test_batch_without_an_answer_blames_nobody_and_an_event_alone_itself(server, sinks):
    never = asyncio.Event()

    async def respond(request: Request) -> Answer:
        await never.wait()
        return 200, {}, b""

    server.respond = respond
    sink = sinks(batch=5, timeout="2s")
    outage = await outage_of(sink, named_claim("a"), named_claim("b"))
    assert str(outage) == "Sink hooks: no answer within 2s"
    assert outage.outcomes == [RELEASED] * 2
    assert await sink.deliver([named_claim("a")]) == [Retry("no answer within 2s")]


async def test_batch_that_shall_come_later_is_not_sent_in_parts(server, sinks):
    server.respond = answering(500, retry_after="4")
    outage = await outage_of(sinks(batch=5), named_claim("a"), named_claim("b"))
    assert outage.after == timedelta(seconds=4)
    assert len(server.requests) == 1


async def test_outage_in_the_middle_of_halves_keeps_what_was_won(server, sinks):
    def respond(request: Request) -> Answer:
        found = [each["data"]["name"] for each in json.loads(request.body)]
        return {"ab": (200, {}, b""), "cd": (503, {}, b"")}.get("".join(found), (400, {}, b""))

    server.respond = respond
    outage = await outage_of(sinks(batch=4), *map(named_claim, "abcd"))
    assert outage.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
