"""What is particular to JetStream: ids, subjects, answers, logins, TLS, and streams that are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, LATE_HEADER, RELEASED, Claim, Dead, Event, Retry, load_event
from pillarbox.relay import Relay
from pillarbox.sinks import open_sink
from pillarbox.stores import Filter
from pillarbox.stores.memory import MemoryStore
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_nats import ask, make_stream, read_stream
from tests.servers import server_url

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


@pytest.fixture
def url() -> str:
    return server_url("nats")


@pytest.fixture
def place(url: str) -> Iterator[str]:
    """A stream that takes `<place>.>`."""
    made = make_place()
    make_stream(url, made, subjects=[f"{made}.>"])
    yield made
    ask(url, f"STREAM.DELETE.{made}")


@pytest.fixture
async def make_sink():
    made = []

    def make(url: str, **options: Any) -> Any:
        made.append(open_sink(url, **{"name": "nats", **options}))
        return made[-1]

    yield make
    for sink in made:
        await sink.close()


def names_of(url: str, stream: str) -> list[str]:
    return [json.loads(body)["name"] for body, _, _ in read_stream(url, stream)]


def ids_of(url: str, stream: str) -> list[str]:
    return [headers["Nats-Msg-Id"] for _, headers, _ in read_stream(url, stream)]


def with_fields(claim: Claim, **fields: Any) -> Claim:
    """The claim as a row of another system may hold it: with fields that an Event would not take."""
    values = {name: getattr(claim.event, name) for name in EVENT_FIELDS}
    return Claim(row=claim.row, event=load_event(*{**values, **fields}.values()), attempt=1)


def limited(url: str) -> str:
    return url.replace("pillarbox:pillarbox@", "limited:limited@")


# -- ids and subjects ------------------------------------------------------------------------------------------------


async def test_id_of_the_event_is_the_id_of_the_message(url, place, make_sink):
    sink = make_sink(url)
    claim = named_claim("a", topic=f"{place}.orders", id=ID)
    assert await sink.deliver([claim, claim]) == [DELIVERED, DELIVERED]
    ((_, headers, subject),) = read_stream(url, place)
    assert headers["Nats-Msg-Id"] == "01890a5d-ac96-774b-bcce-b302099a8057"
    assert subject == f"{place}.orders"


async def test_stream_takes_an_event_from_two_sinks_when_one_has_an_id_suffix(url, place, make_sink):
    first, plain = make_sink(url, subject=f"{place}.first"), make_sink(url, subject=f"{place}.plain")
    second = make_sink(url, subject=f"{place}.second", id_suffix="-second")
    for sink in (first, plain, second, second, first):
        assert await sink.deliver([named_claim("a", id=ID)]) == [DELIVERED]
    assert [(headers["Nats-Msg-Id"], subject) for _, headers, subject in read_stream(url, place)] == [
        ("01890a5d-ac96-774b-bcce-b302099a8057", f"{place}.first"),
        ("01890a5d-ac96-774b-bcce-b302099a8057-second", f"{place}.second"),
    ]


async def test_replayed_event_is_stored_again_at_each_replay(url, place, make_sink):
    store = MemoryStore(retention=timedelta(hours=1))
    store.put(Event("order", {"name": "a"}, id=ID))
    async with Relay(store, make_sink(url, subject=f"{place}.x", id_suffix="-x")) as relay:
        await relay.drain()
        for _ in range(2):
            assert await store.replay(Filter(), actor="ann") == 1
            await relay.drain()
    first, *again = ids_of(url, place)
    assert first == "01890a5d-ac96-774b-bcce-b302099a8057-x"
    assert len(again) == len(set(again)) == 2
    assert all(each.startswith("01890a5d-ac96-774b-bcce-b302099a8057-x-") for each in again)


async def test_late_event_is_stored_again_whatever_became_of_its_neighbours(url, place, make_sink):
    sink = make_sink(url, subject="{topic}")
    late = named_claim("a", topic=f"{place}.x", headers={LATE_HEADER: "true"})
    outcomes = await sink.deliver([late, named_claim("b", topic=make_place())])
    assert outcomes[0] == DELIVERED
    assert isinstance(outcomes[1], Dead)
    assert await sink.deliver([late]) == [DELIVERED]
    assert names_of(url, place) == ["a", "a"]


async def test_late_event_whose_acknowledgement_was_lost_is_stored_once(url, place, make_sink):
    sink = make_sink(url, subject=f"{place}.x", timeout="500ms")
    await sink.open()
    claim, heard = named_claim("a", headers={LATE_HEADER: "true"}), []
    sink._connection.client.on_answer = lambda *answer: heard.append(answer)
    with pytest.raises(SinkUnavailable, match="no acknowledgement"):
        await sink.deliver([claim])
    assert len(heard) == 1
    assert await sink.deliver([claim]) == [DELIVERED]
    assert names_of(url, place) == ["a"]


async def test_subject_comes_from_a_template(url, place, make_sink):
    sink = make_sink(url, subject=f"{place}.{{headers.tenant}}.{{type}}.{{key}}")
    assert await sink.deliver([named_claim("a", "7", headers={"tenant": "acme"})]) == [DELIVERED]
    assert [subject for _, _, subject in read_stream(url, place)] == [f"{place}.acme.order.placed.7"]


@pytest.mark.parametrize(
    "topic",
    ["with blank", "tab\there", "line\r\nPUB x 1", "a.*", "a.*.b", "a.>", ">", ".a", "a.", "a..b", "nul\0", "b" * 4000],
    ids=repr,
)
async def test_bad_subject_is_dead_and_its_neighbours_arrive(url, place, make_sink, topic):
    sink = make_sink(url, subject=f"{place}.{{topic}}")
    bad = with_fields(named_claim("bad"), topic=topic)
    outcomes = await sink.deliver([named_claim("a"), bad, named_claim("b")])
    assert isinstance(outcomes[1], Dead)
    assert outcomes[1].error.startswith("Subject ")
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]
    assert names_of(url, place) == ["a", "b"]


async def test_wildcard_inside_a_word_is_a_plain_character(url, place, make_sink):
    assert await make_sink(url).deliver([named_claim("a", topic=f"{place}.5*5.a>b")]) == [DELIVERED]
    assert [subject for _, _, subject in read_stream(url, place)] == [f"{place}.5*5.a>b"]


@pytest.mark.parametrize("topic", ["$JS.API.STREAM.PURGE.{}", "$SYS.REQ.{}", "$SRV.PING.{}", "_INBOX.{}"])
async def test_event_cannot_order_the_server(url, place, make_sink, topic):
    sink = make_sink(url)
    await sink.deliver([named_claim("a", topic=f"{place}.x")])
    (outcome,) = await sink.deliver([named_claim("bad", topic=topic.format(place))])
    assert isinstance(outcome, Dead)
    assert names_of(url, place) == ["a"]


# -- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"note": "one\r\nNats-Rollup: all"},
        {"note": "one\nnote: two"},
        {"note": "carriage\rreturn"},
        {"na me": "x"},
        {"na:me": "x"},
        {"": "x"},
        {"größe": "x"},
        {"no\r\nte": "x"},
        {"Nats-Rollup": "all"},
        {"nats-msg-id": "other"},
        {"note": "\ud800"},
    ],
    ids=repr,
)
async def test_header_that_could_break_the_message_is_dead(url, place, make_sink, headers):
    sink = make_sink(url, subject=f"{place}.x")
    bad = with_fields(named_claim("bad"), headers=headers)
    outcomes = await sink.deliver([named_claim("a"), bad, named_claim("b")])
    assert isinstance(outcomes[1], Dead)
    assert outcomes[1].error.startswith("Header ")
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]
    assert names_of(url, place) == ["a", "b"]


async def test_line_end_in_another_field_of_the_row_is_dead(url, place, make_sink):
    bad = with_fields(named_claim("bad", "k"), key="k\r\nNats-Rollup: all")
    (outcome,) = await make_sink(url, subject=f"{place}.x").deliver([bad])
    assert outcome == Dead("Header 'event-key' cannot be sent: expected one line, got 'k\\r\\nNats-Rollup: all'")


async def test_header_values_arrive_as_they_are(url, place, make_sink):
    headers = {"blanks": " a  b ", "empty": "", "colon": "a: b", "city": "Zürich 🎈"}
    await make_sink(url, subject=f"{place}.x").deliver([named_claim("a", headers=headers)])
    ((_, found, _),) = read_stream(url, place)
    assert {name: found[name] for name in headers} == headers


# -- answers about one message ---------------------------------------------------------------------------------------


async def test_subject_without_a_stream_is_dead(url, make_sink):
    nowhere = make_place()
    (outcome,) = await make_sink(url).deliver([named_claim("a", topic=nowhere)])
    assert outcome == Dead(f"No stream takes subject '{nowhere}'")


async def test_message_above_the_servers_limit_is_dead_and_the_connection_lives(url, place, make_sink):
    sink = make_sink(url, subject=f"{place}.x")
    # The server counts the headers too, and would end the connection.
    heavy = named_claim("bad", headers={"filler": "x" * 1_048_576})
    large = with_fields(named_claim("bad"), payload=b"x" * 1_048_500)
    outcomes = await sink.deliver([named_claim("a"), heavy, large, named_claim("b")])
    assert [outcomes[0], outcomes[3]] == [DELIVERED, DELIVERED]
    for outcome in outcomes[1:3]:
        assert isinstance(outcome, Dead)
        assert "the server takes at most 1048576" in outcome.error
    assert names_of(url, place) == ["a", "b"]


async def test_largest_message_of_the_server_is_taken(url, place, make_sink):
    sink = make_sink(url, subject=f"{place}.x")
    await sink.deliver([with_fields(named_claim("a"), payload=b"")])
    ((_, headers, _),) = read_stream(url, place)
    head = len("NATS/1.0\r\n\r\n") + sum(len(f"{name}: {value}\r\n") for name, value in headers.items())
    fits = with_fields(named_claim("a"), payload=b"x" * (1_048_576 - head))
    above = with_fields(named_claim("a"), payload=b"x" * (1_048_577 - head))
    outcomes = await sink.deliver([fits, above])
    assert outcomes[0] == DELIVERED
    assert isinstance(outcomes[1], Dead)


async def test_message_above_the_streams_limit_is_dead(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"{place}.x"], max_msg_size=1000)
    outcomes = await make_sink(url, subject=f"{place}.x").deliver(
        [named_claim("a"), named_claim("large" * 300), named_claim("b")]
    )
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]
    assert outcomes[1] == Dead("message size exceeds maximum allowed (JetStream error 10054)")
    ask(url, f"STREAM.DELETE.{place}")


async def test_sealed_stream_is_dead(url, place, make_sink):
    config = {"name": place, "subjects": [f"{place}.>"], "storage": "file", "sealed": True}
    assert "error" not in ask(url, f"STREAM.UPDATE.{place}", config)
    (outcome,) = await make_sink(url, subject=f"{place}.x").deliver([named_claim("a")])
    assert isinstance(outcome, Dead)
    assert "sealed stream" in outcome.error


async def test_full_stream_is_an_outage(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"{place}.x"], max_msgs=2, discard="new")
    claims = [named_claim("a"), named_claim("b", "k"), named_claim("c", "k"), named_claim("d")]
    with pytest.raises(SinkUnavailable, match="maximum messages exceeded") as outage:
        await make_sink(url, subject=f"{place}.x").deliver(claims)
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
    ask(url, f"STREAM.DELETE.{place}")


async def test_full_subject_is_tried_again(url, make_sink):
    place = make_place()
    limits = {"max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": True}
    make_stream(url, place, subjects=[f"{place}.>"], **limits)
    sink = make_sink(url, subject=f"{place}.{{topic}}")
    outcomes = await sink.deliver(
        [named_claim(name, topic=topic) for name, topic in [("a", "x"), ("b", "x"), ("c", "y")]]
    )
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]
    assert isinstance(outcomes[1], Retry)
    ask(url, f"STREAM.DELETE.{place}")


async def test_answer_of_somebody_else_is_no_acknowledgement(url, make_sink):
    import nats

    client = await nats.connect(url)
    subject = make_place()

    async def answer(message: Any) -> None:
        await message.respond(b"thank you")

    await client.subscribe(subject, cb=answer)
    await client.flush()
    (outcome,) = await make_sink(url).deliver([named_claim("a", topic=subject)])
    await client.close()
    assert isinstance(outcome, Retry)
    assert "b'thank you'" in outcome.error


# -- rights ----------------------------------------------------------------------------------------------------------


async def test_forbidden_subject_is_dead_at_once_and_its_neighbours_arrive(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"forbidden.{place}", f"allowed.{place}"])
    sink = make_sink(limited(url), subject=f"{{topic}}.{place}", timeout="30s")
    claims = [
        named_claim("a", topic="allowed"),
        named_claim("b", "k", topic="forbidden"),
        named_claim("c", "k", topic="allowed"),
        named_claim("d", topic="forbidden"),
        named_claim("e", topic="allowed"),
    ]
    async with asyncio.timeout(10):
        outcomes = await sink.deliver(claims)
    refused = Dead(f"This user may not publish to 'forbidden.{place}'")
    assert outcomes == [DELIVERED, refused, RELEASED, refused, DELIVERED]
    assert await sink.deliver([named_claim("f", topic="allowed")]) == [DELIVERED]
    assert names_of(url, place) == ["a", "c", "e", "f"]
    ask(url, f"STREAM.DELETE.{place}")


async def test_forbidden_subject_kills_none_that_differs_by_case_alone(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"forbidden.{place}.*", f"Forbidden.{place}.*"])
    sink = make_sink(limited(url), subject=f"{{topic}}.{place}.Ann")
    names = ["forbidden", "Forbidden", "forbidden", "Forbidden"]
    refused = Dead(f"This user may not publish to 'forbidden.{place}.Ann'")
    assert await sink.deliver([named_claim(name, topic=name) for name in names]) == [refused, DELIVERED] * 2
    assert names_of(url, place) == ["Forbidden", "Forbidden"]
    ask(url, f"STREAM.DELETE.{place}")


async def test_late_word_about_a_forbidden_subject_kills_none_that_differs_by_case_alone(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"Forbidden.{place}"])
    sink = make_sink(limited(url), subject=f"{{topic}}.{place}")
    await sink.open()
    # Nobody waits any more for the answer to the first when the second is sent.
    gone = asyncio.create_task(sink.deliver([named_claim("a", topic="forbidden")]))
    kept = asyncio.create_task(sink.deliver([named_claim("b", topic="Forbidden")]))
    await asyncio.sleep(0)
    gone.cancel()
    assert await kept == [DELIVERED]
    assert gone.cancelled()
    ask(url, f"STREAM.DELETE.{place}")


# -- order -----------------------------------------------------------------------------------------------------------


async def test_event_that_overtook_a_refused_one_is_stored_again_after_it(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"{place}.x"])
    sink = make_sink(url, subject=f"{place}.{{topic}}")
    first, second = named_claim("first", "k", topic="y"), named_claim("second", "k", topic="x")
    outcomes = await sink.deliver([first, second])
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1] == RELEASED
    # Redriven after the stream has learned the subject, well within its memory of ids.
    assert "error" not in ask(
        url, f"STREAM.UPDATE.{place}", {"name": place, "subjects": [f"{place}.x", f"{place}.y"], "storage": "file"}
    )
    assert await sink.deliver([first]) == [DELIVERED]
    assert await sink.deliver([second]) == [DELIVERED]
    assert names_of(url, place) == ["second", "first", "second"]
    assert await sink.deliver([second]) == [DELIVERED]
    assert names_of(url, place) == ["second", "first", "second"]
    ask(url, f"STREAM.DELETE.{place}")


async def test_large_batch_goes_out_in_several_windows_and_in_order(url, place, make_sink):
    claims = [with_fields(named_claim(str(n), "k"), payload=b"%06d" % n + b"x" * 400_000) for n in range(12)]
    assert await make_sink(url, subject=f"{place}.x").deliver(claims) == [DELIVERED] * 12
    assert [body[:6] for body, _, _ in read_stream(url, place)] == [b"%06d" % n for n in range(12)]


async def test_later_windows_leave_out_the_key_of_a_refused_event(url, make_sink):
    place = make_place()
    make_stream(url, place, subjects=[f"{place}.x"])
    sink = make_sink(url, subject=f"{place}.{{topic}}")
    claims = [
        named_claim("a", "k", topic="nowhere"),
        with_fields(named_claim("b", topic="x"), payload=json.dumps({"name": "b" * 1_048_100}).encode()),
        named_claim("c", "k", topic="x"),
        named_claim("d", "j", topic="x"),
    ]
    outcomes = await sink.deliver(claims)
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1:] == [DELIVERED, RELEASED, DELIVERED]
    assert [name[:1] for name in names_of(url, place)] == ["b", "d"]
    ask(url, f"STREAM.DELETE.{place}")
