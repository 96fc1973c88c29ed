"""What is particular to MQTT: properties, QoS, acknowledgements with a reason, and connections that end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Event, Retry, load_event
from pillarbox.sinks import open_sink
from pillarbox.sinks.mqtt import MqttSink
from pillarbox.sinks.mqtt_wire import Answer
from tests.brokers import PrivateBroker
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_mqtt import Program, Published, Subscriber, acknowledge, disconnect, scripted_server
from tests.servers import certificates, server_url
from tools.servers.mosquitto import MosquittoServer

FORBIDDEN = "The server refused the message: not authorized (0x87)"
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


class Place:
    """One topic and all below it on the shared server."""

    def __init__(self, url: str | None = None) -> None:
        self.url = url or server_url("mosquitto")
        self.root = make_place()
        self._sinks: list[Any] = []
        self._subscribers: list[Subscriber] = []

    def sink(self, *, url: str | None = None, **options: Any) -> Any:
        self._sinks.append(open_sink(url or self.url, **{"topic": f"{self.root}/{{topic}}", **options}))
        return self._sinks[-1]

    def subscribe(self, topic: str | None = None, *, qos: int = 1) -> Subscriber:
        subscriber = Subscriber(self.url, topic or f"{self.root}/#", qos=qos)
        subscriber.read()
        self._subscribers.append(subscriber)
        return subscriber

    async def end(self) -> None:
        for sink in self._sinks:
            await sink.close()
        for subscriber in self._subscribers:
            subscriber.end()


@pytest.fixture
async def place():
    made = Place()
    yield made
    await made.end()


@pytest.fixture
async def own_place(private_broker):
    """A place on a server that the test may stop; its sinks give up quickly."""
    server = private_broker("mosquitto")
    made = Place(server.url)
    yield made, server
    server.start()
    await made.end()


@contextmanager
def broker_with(settings: str) -> Iterator[PrivateBroker]:
    class Mosquitto(MosquittoServer):
        def write_settings(self, text: str) -> Path:
            return super().write_settings(text + settings)

    with tempfile.TemporaryDirectory(prefix="pillarbox-broker-") as folder:
        Path(folder).chmod(0o755)
        broker = PrivateBroker(Mosquitto(Path(folder)))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


def foreign_claim(name: str, **fields: Any) -> Claim:
    """A claim with values that only a row of another system can hold."""
    event = named_claim(name).event
    values = {field: getattr(event, field) for field in EVENT_FIELDS}
    return Claim(row=name, event=load_event(*{**values, **fields}.values()), attempt=1)


def names(found: list[Published]) -> list[str]:
    return [each.topic.rpartition("/")[2] for each in found]


# -- what others read ----------------------------------------------------------------------------------------


async def test_mosquitto_sub_reads_what_was_delivered(place):
    program = Program(place.url, f"{place.root}/#")
    events = [
        Event("order.placed", {"name": 'Zoë ☕ "x"\n'}, id=ID, topic="a", key="kü", headers={"tenant": "Ünï: ☕ = 1"}),
        Event("order.placed", b"", id=ID, topic="b", content_type="text/plain"),
        Event("order.placed", b"\x00\xff\n", id=ID, topic="c", content_type="image/x-tiny", headers={"a b": ""}),
    ]
    claims = [Claim(row=event.topic, event=event, attempt=1) for event in events]
    assert await place.sink().deliver(claims) == [DELIVERED] * 3
    own = {"event-id": "01890a5d-ac96-774b-bcce-b302099a8057", "event-type": "order.placed"}

    def published(name: str, body: bytes, content_type: str, user: dict[str, str]) -> Published:
        return Published(f"{place.root}/{name}", body, 1, False, {**own, **user}, content_type, None)

    assert await asyncio.to_thread(program.read, 3) == [
        published(
            "a",
            b'{"name":"Zo\xc3\xab \xe2\x98\x95 \\"x\\"\\n"}',
            "application/json",
            {"event-key": "kü", "tenant": "Ünï: ☕ = 1"},
        ),
        published("b", b"", "text/plain", {}),
        published("c", b"\x00\xff\n", "image/x-tiny", {"a b": ""}),
    ]


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
async def test_message_has_the_quality_of_service_asked_for(place, qos):
    subscriber = place.subscribe(qos=2)
    batch = [named_claim(f"{n}", f"k{n % 7}", topic=f"{n}") for n in range(300)]
    assert await place.sink(qos=qos).deliver(batch) == [DELIVERED] * 300
    found = subscriber.read()
    assert names(found) == [f"{n}" for n in range(300)]
    assert {each.qos for each in found} == {qos}
    assert {each.is_retained for each in found} == {False}


async def test_retained_message_is_there_for_later_subscribers(place):
    await place.sink(retain=True).deliver([named_claim("a", topic="kept")])
    await place.sink().deliver([named_claim("a", topic="gone")])
    (found,) = place.subscribe().read()
    assert (found.topic, found.is_retained) == (f"{place.root}/kept", True)


async def test_message_expires(place):
    subscriber = place.subscribe()
    await place.sink(message_expiry="1h").deliver([named_claim("a")])
    await place.sink().deliver([named_claim("b")])
    first, second = subscriber.read()
    assert 3540 < first.expiry <= 3600
    assert second.expiry is None


async def test_topic_is_made_from_the_event(place):
    subscriber = place.subscribe()
    sink = place.sink(topic=f"{place.root}/{{headers.tenant}}/{{type}}")
    batch = [named_claim("a", headers={"tenant": "acme"}), named_claim("b")]
    outcomes = await sink.deliver(batch)
    assert outcomes[0] == DELIVERED
    assert isinstance(outcomes[1], Dead)
    assert "needs headers.tenant" in outcomes[1].error
    assert [each.topic for each in subscriber.read()] == [f"{place.root}/acme/order.placed"]


async def test_second_client_of_one_id_throws_the_first_out(place):
    first, second = place.sink(client_id=place.root), place.sink(client_id=place.root)
    await first.open()
    lost = first._connection
    await second.open()
    await asyncio.wait_for(lost._closed, 30)
    assert str(lost.lost) == "the server closed the connection"


async def test_sinks_have_ids_of_their_own_unless_told(place):
    first, second = place.sink(), place.sink()
    await first.open()
    await second.open()
    connection = first._connection
    await connection.ping()
    assert await first.deliver([named_claim("a")]) == [DELIVERED]
    assert await second.deliver([named_claim("b")]) == [DELIVERED]
    assert first._connection is connection


async def test_event_that_nobody_is_subscribed_to(place):
    wants, does_not = place.sink(require_subscribers=True), place.sink()
    assert await does_not.deliver([named_claim("a")]) == [DELIVERED]
    assert await wants.deliver([named_claim("a")]) == [
        Dead("The server refused the message: no matching subscribers (0x10)")
    ]
    place.subscribe()
    assert await wants.deliver([named_claim("a")]) == [DELIVERED]


async def test_sink_made_in_python():
    parts = urlsplit(server_url("mosquitto"))
    sink = MqttSink("127.0.0.1", parts.port, user="pillarbox", password="pillarbox", topic="contract/python", qos=2)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    assert "pillarbox" not in repr(sink).replace("pillarbox.sinks", "")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("mqtt://h", {"qos": 0}, "qos: expected 1 or 2, which are acknowledged, got 0"),
        ("mqtt://h?qos=3", {}, "qos: expected 1 or 2, which are acknowledged, got 3"),
        ("mqtt://h", {"qos": True}, "expected 1 or 2, which are acknowledged, got True"),
        ("mqtt://h/shop", {}, "expected one server and nothing after it: mqtt://host:port"),
        ("mqtt://h,i", {}, "expected one server"),
        ("mqtt://h", {"qos": 2, "require_subscribers": True}, "require_subscribers: a server knows that with QoS 1"),
        ("mqtt://h", {"message_expiry": "100ms"}, "message_expiry: expected 1 second to"),
        ("mqtt://h", {"keepalive": "1d"}, "keepalive: expected 1 to 65535 seconds, got 1 day"),
        ("mqtt://h", {"retain": "maybe"}, "retain: expected true or false"),
        ("mqtt://h", {"tls_ca": "x"}, "unknown option 'tls_ca'"),
        ("mqtts://h", {"tls_ca": "missing.pem"}, "there is no file 'missing.pem'"),
        ("mqtt://h", {"topic": "{tpoic}"}, "unknown field 'tpoic'"),
        ("mqtt://u:se%0Acret@h", {}, "client_id, user or password is too long or has a control character"),
    ],
)
def test_bad_option_is_refused(url, options, message):
    with pytest.raises(ConfigError) as refused:
        open_sink(url, **options)
    assert message in str(refused.value)
    assert "cret" not in str(refused.value)


# -- bad messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("position", [0, 7, 59])
async def test_refused_message_is_found_wherever_it_stands(place, qos, position):
    """This server ends the connection over it, and its answer may be lost with what came after."""
    subscriber = place.subscribe()
    sink = place.sink(topic="{topic}", qos=qos)
    batch = [named_claim(f"{n}", topic=f"{place.root}/{n}") for n in range(60)]
    batch[position] = named_claim("bad", topic=f"forbidden/{place.root}")
    outcomes = await sink.deliver(batch)
    assert outcomes == [Dead(FORBIDDEN) if n == position else DELIVERED for n in range(60)]
    assert set(names(subscriber.read())) == {f"{n}" for n in range(60) if n != position}


async def test_refused_messages_of_several_batches_at_once(place):
    sink = place.sink(topic="{topic}")

    def batch(key: str) -> list[Claim]:
        made = [named_claim(f"{n}", key, topic=f"{place.root}/{key}") for n in range(40)]
        return [*made, named_claim("bad", key, topic="forbidden/x"), named_claim("after", key, topic=place.root)]

    results = await asyncio.gather(*(sink.deliver(batch(key)) for key in "abcdefgh"))
    assert list(results) == [[*[DELIVERED] * 40, Dead(FORBIDDEN), RELEASED]] * 8


@pytest.mark.parametrize("topic", ["a/+/b", "#", "a\0b", "a\nb", "\udc00"])
async def test_topic_that_cannot_be_published_to_is_dead(place, topic):
    outcomes = await place.sink().deliver([foreign_claim("a", topic=topic)])
    assert isinstance(outcomes[0], Dead)
    assert outcomes[0].error.startswith("Topic ")


async def test_levels_of_a_topic_may_be_empty(place):
    subscriber = place.subscribe()
    await place.sink().deliver([named_claim("a", topic="/a//b.c d/")])
    assert [each.topic for each in subscriber.read()] == [f"{place.root}//a//b.c d/"]


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"x": "one\ntwo"}, "Header 'x' cannot be sent: it has the character '\\n'"),
        ({"x": "\ufffe"}, "Header 'x' cannot be sent: it has the character '\\ufffe'"),
        ({"x\0": "1"}, "Header's name cannot be sent: it has the character '\\x00'"),
        ({"x": "ü" * 32768}, "Header 'x' is too large: it has 65536 bytes, MQTT texts 65535 at most"),
        ({"x": "u" * 65536}, "Header 'x' is too large: it has 65536 bytes, MQTT texts 65535 at most"),
    ],
)
async def test_header_that_would_end_the_connection_is_dead(place, headers, error):
    subscriber = place.subscribe()
    sink = place.sink()
    outcomes = await sink.deliver(
        [named_claim("a", topic="a"), foreign_claim("b", topic="b", headers=headers), named_claim("c", topic="c")]
    )
    assert (outcomes[0], outcomes[2]) == (DELIVERED, DELIVERED)
    assert isinstance(outcomes[1], Dead)
    assert outcomes[1].error.startswith(error)
    assert names(subscriber.read()) == ["a", "c"]


async def test_longest_header_arrives(place):
    subscriber = place.subscribe()
    assert await place.sink().deliver([named_claim("a", headers={"x": "u" * 65535, "y": "a b:c"})]) == [DELIVERED]
    (found,) = subscriber.read()
    assert found.user["x"] == "u" * 65535
    assert found.user["y"] == "a b:c"


async def test_message_that_is_too_large_for_the_server_is_dead():
    with broker_with("max_packet_size 2000\nmessage_size_limit 1000\n") as server:
        place = Place(server.url)
        subscriber = place.subscribe()
        outcomes = await place.sink().deliver(
            [
                named_claim("a", topic="a"),
                named_claim("x" * 2000, topic="b"),  # never sent: the server would end the connection
                named_claim("x" * 1200, topic="c"),
                named_claim("d", topic="d"),
            ]
        )
        assert names(subscriber.read()) == ["a", "d"]
        await place.end()
    assert (outcomes[0], outcomes[3]) == (DELIVERED, DELIVERED)
    assert isinstance(outcomes[1], Dead)
    assert outcomes[1].error.endswith("bytes is too large: the server takes 2000 bytes at most")
    assert outcomes[2] == Dead("The server refused the message: packet too large (0x95)")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0x00, "delivered"),
        (0x10, "delivered"),
        (0x80, Retry),
        (0x83, Retry),
        (0x87, Dead),
        (0x90, Dead),
        (0x91, Retry),
        (0x92, Retry),
        (0x95, Dead),
        (0x97, Retry),
        (0x99, Dead),
        (0xA5, Retry),
    ],
)
def test_reason_decides(code, kind):
    outcome = MqttSink()._judge(Answer(code, "as it says"))
    if kind == "delivered":
        assert outcome == DELIVERED
    else:
        assert isinstance(outcome, kind)
        assert f"(0x{code:02x}): as it says" in outcome.error


async def test_later_events_of_a_key_that_wait_for_their_turn_are_not_sent_after_a_failure(place):
    subscriber = place.subscribe(f"{place.root}/heard/#")
    batch = [named_claim(f"{n}", "k", topic=f"heard/{n}") for n in range(200)]
    batch[0] = named_claim("bad", "k", topic="unheard")
    outcomes = await place.sink(require_subscribers=True).deliver(batch)
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1:] == [RELEASED] * 199
    assert names(subscriber.read()) == [f"{n}" for n in range(1, 20)]


# -- servers that end the connection over a message ----------------------------------------------------------


@pytest.mark.parametrize(
    "reason",
    ["not authorized (0x87)", "topic name invalid (0x90)", "packet too large (0x95)", "payload format invalid (0x99)"],
)
async def test_message_that_the_server_disconnects_over_is_dead(reason):
    code = int(reason[-5:-1], 16)
    heard = []

    def answer(topic: str, identifier: bytes) -> bytes:
        heard.append(topic)
        return disconnect(code) if topic.startswith("bad") else acknowledge(identifier)

    topics = ["0", "1", "bad1", "3", "4", "5", "bad2"]
    async with scripted_server(answer) as url:
        sink = open_sink(url)
        batch = [named_claim(topic, "k" if topic in ("bad1", "4") else None, topic=topic) for topic in topics]
        outcomes = await sink.deliver(batch)
        dead = Dead(f"The server refused the message: {reason}")
        assert outcomes == [DELIVERED, DELIVERED, dead, DELIVERED, RELEASED, DELIVERED, dead]
        assert await sink.deliver([named_claim("next", topic="next")]) == [DELIVERED]
        await sink.close()
    # Once among others and once alone; the neighbours arrive once.
    assert heard == ["0", "1", "bad1", "bad1", "3", "5", "bad2", "bad2", "next"]


@pytest.mark.parametrize("code", [0x00, 0x81, 0x8B, 0x97])
async def test_disconnect_for_another_reason_is_an_outage(code):
    heard = []

    def answer(topic: str, identifier: bytes) -> bytes:
        heard.append(topic)
        return disconnect(code) if topic == "b" else acknowledge(identifier)

    async with scripted_server(answer) as url:
        sink = open_sink(url)
        with pytest.raises(SinkUnavailable, match=rf"the server ended the connection: .* \(0x{code:02x}\)") as outage:
            await sink.deliver([named_claim(topic, topic=topic) for topic in "abc"])
        await sink.close()
    assert outage.value.outcomes == [DELIVERED, RELEASED, RELEASED]
    assert heard == ["a", "b"]


async def test_disconnect_after_a_refusal_does_not_blame_the_next_message():
    heard = []

    def answer(topic: str, identifier: bytes) -> bytes | None:
        heard.append(topic)
        script = [None, acknowledge(identifier, 0x87), disconnect(0x87), acknowledge(identifier)]
        return script[len(heard) - 1]

    async with scripted_server(answer) as url:
        sink = open_sink(url)
        assert await sink.deliver([named_claim(name, topic=name) for name in "ab"]) == [Dead(FORBIDDEN), DELIVERED]
        await sink.close()
    assert heard == ["a", "a", "b", "b"]


async def test_disconnect_does_not_blame_a_message_that_shares_the_connection():
    heard = []

    def answer(topic: str, identifier: bytes) -> bytes | None:
        heard.append(topic)
        if heard == ["good"]:
            return None
        if heard == ["good", "bad"]:
            return b""  # the good one is under way as well when this is answered
        return disconnect(0x99) if topic == "bad" or len(heard) == 3 else acknowledge(identifier)

    async with scripted_server(answer) as url:
        sink: Any = open_sink(url)
        await sink.open()
        good = asyncio.create_task(sink.deliver([named_claim("a", topic="good")]))
        await asyncio.sleep(0)
        async with sink._alone:
            bad = asyncio.create_task(sink.deliver([named_claim("b", topic="bad")]))
            await asyncio.wait_for(sink._connection._closed, 30)
        assert await good == [DELIVERED]
        assert await bad == [Dead("The server refused the message: payload format invalid (0x99)")]
        await sink.close()
    assert heard == ["good", "bad", "good", "good", "bad"]


# -- connections ---------------------------------------------------------------------------------------------


async def test_nothing_is_sent_after_the_sink_gave_up(own_place):
    place, server = own_place
    subscriber = place.subscribe()
    sink = place.sink(timeout="300ms")
    await sink.open()
    server.pause()
    with pytest.raises(SinkUnavailable, match=r"no acknowledgement within 0\.3 s") as outage:
        await sink.deliver([named_claim(f"{n}", topic=f"{n}") for n in range(100)])
    assert outage.value.outcomes == [RELEASED] * 100
    server.resume()
    assert await sink.deliver([named_claim("last", topic="last")]) == [DELIVERED]
    found = names(subscriber.read())
    # What the server's system had taken before may come: one window, and nothing more of it after the next event.
    assert found[-1] == "last"
    assert found[:-1] == [f"{n}" for n in range(20)][: len(found) - 1]


async def test_cancelled_delivery_leaves_nothing_behind(own_place):
    place, server = own_place
    subscriber = place.subscribe()
    sink = place.sink()
    await sink.open()
    server.pause()
    delivery = asyncio.create_task(sink.deliver([named_claim(f"{n}", topic=f"{n}") for n in range(100)]))
    await asyncio.sleep(0)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    server.resume()
    assert await sink.deliver([named_claim("last", topic="last")]) == [DELIVERED]
    found = names(subscriber.read())
    assert found[-1] == "last"
    assert found[:-1] == [f"{n}" for n in range(20)][: len(found) - 1]


async def test_server_killed_in_the_middle_of_a_batch(own_place):
    place, server = own_place
    sink = place.sink()
    await sink.open()
    delivery = asyncio.create_task(sink.deliver([named_claim(f"{n}", "k") for n in range(20_000)]))
    while sink._connection.answered < 100:
        await asyncio.sleep(0)
    server.kill()
    with pytest.raises(SinkUnavailable) as outage:
        await delivery
    assert outage.value.outcomes is not None
    won = list(outage.value.outcomes).count(DELIVERED)
    assert 100 <= won < 20_000
    assert outage.value.outcomes == [DELIVERED] * won + [RELEASED] * (20_000 - won)


async def test_check_of_a_server_that_hangs(own_place):
    place, server = own_place
    sink = place.sink(timeout="200ms")
    await sink.check()
    server.pause()
    with pytest.raises(SinkUnavailable, match=r"no answer to a ping within 0\.2 s"):
        await sink.check()
    with pytest.raises(SinkUnavailable, match=r"no connection within 0\.2 s"):
        await sink.check()
    server.resume()
    await sink.check()


async def test_idle_connection_is_kept_alive_and_its_loss_noticed(own_place):
    place, server = own_place
    sink = place.sink(keepalive="1s")
    await sink.open()
    connection = sink._connection
    ping = connection._start_ping()
    await asyncio.wait_for(asyncio.shield(ping), 30)
    server.pause()
    await asyncio.wait_for(connection._closed, 30)
    assert str(connection.lost) == "no answer to a ping within 0.5 s"
    server.resume()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]


async def test_no_more_is_under_way_than_the_server_takes(own_place):
    place, server = own_place
    sink = place.sink(timeout="200ms")
    await sink.open()
    connection = sink._connection
    server.pause()
    delivery = asyncio.create_task(sink.deliver([named_claim(f"{n}") for n in range(100)]))
    await asyncio.sleep(0)
    assert (len(connection._sent), len(connection._waiting)) == (20, 80)
    with pytest.raises(SinkUnavailable):
        await delivery


async def test_server_that_speaks_something_else_is_unavailable():
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    sink = MqttSink("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(SinkUnavailable, match="the server does not speak MQTT 5"):
        await sink.open()
    server.close()
    await server.wait_closed()


async def test_server_without_mqtt_5_is_unavailable():
    # Refused, as MQTT 3.1.1 does it: unacceptable protocol version.
    async with scripted_server(lambda *_: None, greeting=b"\x20\x02\x00\x01") as url:
        sink = open_sink(url)
        for attempt in (sink.open, sink.check, lambda: sink.deliver([named_claim("a")])):
            with pytest.raises(SinkUnavailable, match=r"does not speak MQTT 5 \(it answered with code 1\)"):
                await attempt()
        await sink.close()


async def test_delivery_that_is_going_to_fail_does_not_wait_for_another():
    async with scripted_server(lambda *_: disconnect(0x8B)) as url:
        sink: Any = open_sink(url)
        await sink.open()
        delivery = asyncio.create_task(sink.deliver([named_claim("a")]))
        await asyncio.sleep(0)
        async with sink._alone:  # as a delivery that sends one by one
            with pytest.raises(SinkUnavailable, match=r"server shutting down \(0x8b\)"):
                await asyncio.wait_for(delivery, 30)
        await sink.close()


async def test_setting_that_the_server_does_not_offer_is_said():
    with broker_with("max_qos 1\nretain_available false\n") as server:
        place = Place(server.urls["mosquitto_tls"])
        with pytest.raises(SinkUnavailable, match="takes messages up to QoS 1, the option qos is 2"):
            await place.sink(qos=2, tls_verify=False).open()
        with pytest.raises(SinkUnavailable, match="the server retains no messages"):
            await place.sink(retain=True, tls_verify=False).open()
        await place.end()


# -- TLS and names -------------------------------------------------------------------------------------------


async def test_tls():
    folder = certificates()
    place = Place()
    secure = server_url("mosquitto_tls")
    for options in ({"tls_ca": str(folder / "ca.pem")}, {"tls_verify": False}):
        sink = place.sink(url=secure, **options)
        assert await sink.deliver([named_claim(f"{n}") for n in range(100)]) == [DELIVERED] * 100
        await sink.check()
    with pytest.raises(SinkUnavailable, match="certificate verify failed"):
        await place.sink(url=secure).open()
    await place.end()


async def test_client_certificate():
    with broker_with("require_certificate true\n") as server:
        place, folder = Place(server.urls["mosquitto_tls"]), server.certificates
        trusted = {"tls_ca": str(folder / "ca.pem")}
        own = {"tls_certificate": str(folder / "client.pem"), "tls_key": str(folder / "client.key")}
        assert await place.sink(**trusted, **own).deliver([named_claim("a")]) == [DELIVERED]
        with pytest.raises(SinkUnavailable):
            await place.sink(**trusted).open()
        await place.end()


def test_ports_are_the_usual_ones():
    def port(url: str) -> Any:
        return vars(open_sink(url))["_port"]

    assert (port("mqtt://h"), port("mqtts://h"), port("mqtt://h:7")) == (1883, 8883, 7)


async def test_attribute_of_a_cloudevent_cannot_be_forged_by_a_header(place):
    subscriber = place.subscribe()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"id": "mine", "traceparent": trace, "tenant": "acme"}
    await place.sink(cloudevents="binary").deliver([named_claim("a", id=ID, headers=headers)])
    (found,) = subscriber.read()
    assert found.content_type == "application/json"
    assert found.user == {
        "specversion": "1.0",
        "id": str(ID),
        "source": "pillarbox",
        "type": "order.placed",
        "traceparent": trace,
        "header-id": "mine",
        "tenant": "acme",
    }
