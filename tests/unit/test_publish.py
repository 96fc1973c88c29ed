"""One window of unacknowledged messages: outcomes, order, outages."""

from __future__ import annotations

import asyncio

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.sinks.publish import Refused, publish


def claims(*names: str) -> list[Claim]:
    """Claims named after their keys: `k1` and `k2` are of key `k`, `-1` has none."""
    keys = [None if name[0] == "-" else name[0] for name in names]
    return [Claim(row=name, event=Event(name, b"", key=key), attempt=1) for name, key in zip(names, keys, strict=True)]


class Client:
    """Keeps what it is given, and answers what it was told to answer."""

    def __init__(self, **answers: BaseException) -> None:
        self.answers = answers
        self.sent: list[str] = []

    async def start(self, claim: Claim) -> asyncio.Future[None]:
        name = claim.event.type
        answer = self.answers.get(name)
        if isinstance(answer, Refused | ConnectionError):
            raise answer
        self.sent.append(name)
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if isinstance(answer, asyncio.TimeoutError):
            return ack  # never
        if answer is None:
            asyncio.get_running_loop().call_soon(ack.set_result, None)
        else:
            asyncio.get_running_loop().call_soon(ack.set_exception, answer)
        return ack


def judge(error: BaseException) -> Outcome:
    if isinstance(error, OSError):
        raise SinkUnavailable(str(error))
    return Dead(str(error)) if isinstance(error, ValueError) else Retry(str(error))


async def send(client: Client, *names: str, timeout: float = 5.0) -> list[Outcome]:
    return await publish(claims(*names), client.start, judge, name="test", timeout=timeout)


async def test_everything_acknowledged_is_delivered():
    client = Client()
    assert await send(client, "k1", "j1", "k2") == [DELIVERED] * 3
    assert client.sent == ["k1", "j1", "k2"]


async def test_nothing_is_nothing():
    assert await send(Client()) == []


async def test_answer_about_one_message_is_its_outcome():
    client = Client(j1=ValueError("too large"), i1=KeyError("later"))
    outcomes = await send(client, "k1", "j1", "i1", "k2")
    assert outcomes == [DELIVERED, Dead("too large"), Retry("'later'"), DELIVERED]


async def test_successor_that_was_on_its_way_is_released():
    client = Client(k1=ValueError("no"))
    assert await send(client, "k1", "k2", "j1") == [Dead("no"), RELEASED, DELIVERED]
    assert client.sent == ["k1", "k2", "j1"]


async def test_successor_of_a_refused_message_is_not_sent():
    client = Client(k1=Refused("no header"))
    assert await send(client, "k1", "k2", "j1") == [Dead("no header"), RELEASED, DELIVERED]
    assert client.sent == ["j1"]


async def test_refused_message_without_a_key_holds_nobody_back():
    assert await send(Client(**{"-1": Refused("no")}), "-1", "-2") == [Dead("no"), DELIVERED]


async def test_outage_while_sending_keeps_what_was_won():
    client = Client(i1=ConnectionError("gone"))
    with pytest.raises(SinkUnavailable, match="gone") as outage:
        await send(client, "k1", "j1", "i1", "h1")
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
    assert client.sent == ["k1", "j1"]


async def test_outage_in_an_acknowledgement_blames_no_message():
    client = Client(j1=OSError("closed"), i1=ValueError("bad"))
    with pytest.raises(SinkUnavailable, match="closed") as outage:
        await send(client, "k1", "j1", "i1")
    assert outage.value.outcomes == [DELIVERED, RELEASED, Dead("bad")]


async def test_missing_acknowledgement_is_an_outage():
    client = Client(j1=TimeoutError())
    with pytest.raises(SinkUnavailable, match=r"Sink test: no acknowledgement within 0.05 s") as outage:
        await send(client, "k1", "j1", "j2", timeout=0.05)
    assert outage.value.outcomes == [DELIVERED, RELEASED, RELEASED]


async def test_timeout_of_the_clients_own_is_judged_like_any_error():
    async def start(claim: Claim) -> asyncio.Future[None]:
        raise TimeoutError("the client's own")

    with pytest.raises(SinkUnavailable, match="the client's own"):
        await publish(claims("k1"), start, judge, name="test", timeout=5)


async def test_cancellation_is_passed_on_and_forgets_what_is_not_acknowledged():
    client = Client(k1=TimeoutError())
    sending = asyncio.create_task(send(client, "k1"))
    while not client.sent:
        await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
