"""The messages of other outboxes' publishers: expected values are recorded from the real programs."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from pillarbox import Event
from pillarbox.config import Config, SinkConfig, StoreConfig
from pillarbox.errors import ConfigError
from pillarbox.routing import Route
from pillarbox.sinks import open_sink
from pillarbox.sinks.forms import Form, choose_form, make_form
from pillarbox.sinks.message import Message
from pillarbox.sources.reading import Raw, read_message
from pillarbox.sources.redis import _read as read_entry
from pillarbox.sources.redis_group import Found
from pillarbox.topology import RouteConfig

ID = UUID("018f3f7a-0000-7000-8000-000000000001")
# As the id that is made from a row of faststream-outbox.
ROW_ID = UUID("018f3f7a-0000-5000-8000-000000000001")


def render(message: str, broker: str, event: Event) -> Message:
    return make_form(message, broker=broker, sink="s")(event)


# -- what the real programs wrote --------------------------------------------------------------------------------------


def test_omnibox_to_kafka() -> None:
    event = Event(
        "order.placed",
        b'{"f": 1.0, "name": "\xc3\xbc", "total": 990}',
        content_type="application/json",
        id=ID,
        key="ann",
        headers={"tenant": "acme", "trace_id": "mine"},
        schema_version="2",
        trace_id="t-1",
        correlation_id="c-1",
        causation_id="d-1",
    )
    headers, _, body = render("omnibox", "kafka", event)
    assert body == b'{"f":1.0,"name":"\xc3\xbc","total":990}'
    # In this order: of two that are named alike, omni-box's own wins.
    assert list(headers.items()) == [
        ("tenant", "acme"),
        ("trace_id", "t-1"),
        ("event_id", str(ID)),
        ("event_type", "order.placed"),
        ("schema_version", "2"),
        ("correlation_id", "c-1"),
        ("causation_id", "d-1"),
    ]


def test_omnibox_keeps_a_number_that_it_could_not_write() -> None:
    event = Event("t", b'{"n": 123456789012345678901234567890}', content_type="application/json")
    assert render("omnibox", "kafka", event).body == b'{"n": 123456789012345678901234567890}'


def test_debezium_to_kafka() -> None:
    event = Event("OrderPlaced", {"a": 1}, id=ID, key="42", aggregate_type="order", topic="outbox.event.order")
    headers, _, body = render("debezium", "kafka", event)
    assert (headers, body) == ({"id": str(ID)}, b'{"a":1}')


def faststream_event(payload: Any = None, **changes: Any) -> Event:
    headers = {"tenant": "acme"}
    fields = {"id": ROW_ID, "headers": headers, "correlation_id": "corr", "topic": "q", **changes}
    return Event("q", {"a": 1, "b": "ü"} if payload is None else payload, **fields)


@pytest.mark.parametrize("broker", ["kafka", "nats", "rabbitmq"])
def test_faststream_to_brokers_with_headers(broker: str) -> None:
    headers, content_type, body = render("faststream", broker, faststream_event())
    assert list(headers.items()) == [
        ("content-type", "application/json"),
        ("correlation_id", "corr"),
        ("tenant", "acme"),
    ]
    assert (content_type, body) == ("application/json", b'{"a":1,"b":"\xc3\xbc"}')


@pytest.mark.parametrize(
    ("broker", "expected"),
    [
        ("kafka", {"content-type": "", "correlation_id": "corr"}),
        ("nats", {"content-type": "", "correlation_id": "corr"}),
        ("rabbitmq", {"correlation_id": "corr"}),
    ],
)
def test_faststream_sends_bytes_without_a_content_type(broker: str, expected: dict[str, str]) -> None:
    headers, content_type, body = render("faststream", broker, faststream_event(b"\x00raw", headers=None))
    assert (headers, content_type, body) == (expected, "", b"\x00raw")


def test_faststream_to_redis() -> None:
    event = faststream_event(correlation_id="corr-redis-True")
    assert render("faststream", "redis", event).body == (
        b"\x89BIN\r\n\x1a\n\x00\x01\x00\x00\x00\x12\x00\x00\x00c\x00\x03"
        b"\x00\x0ecorrelation_id\x00\x0fcorr-redis-True\x00\x0ccontent-type\x00\x10application/json"
        b'\x00\x06tenant\x00\x04acme{"a":1,"b":"\xc3\xbc"}'
    )


def test_faststream_event_that_was_put_by_us_has_its_id_in_a_header() -> None:
    headers = render("faststream", "kafka", faststream_event(id=ID)).headers
    assert headers["pillarbox-id"] == str(ID)


# -- which form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "own", "expected"),
    [
        ("redis://h", {}, "openoutbox", "openoutbox"),
        ("redis://h?message=pillarbox", {}, "openoutbox", None),
        ("redis://h", {"message": "cloudevents"}, "openoutbox", None),
        ("redis://h", {"cloudevents": "binary"}, "openoutbox", None),
        ("redis://h", {"mode": "pubsub"}, "openoutbox", None),
        ("redis://h", {"mode": "pubsub"}, "faststream", "faststream"),
        ("tls://h", {}, "openoutbox", "openoutbox"),
        ("mqtt://h", {}, "openoutbox", None),
        ("kafka://h", {}, "pillarbox", None),
        ("stdout:", {}, "openoutbox", None),
    ],
)
def test_form_by_layout(url: str, options: dict[str, Any], own: str, expected: str | None) -> None:
    assert choose_form(url, options, own=own).name == expected


def test_start_says_which_form_and_why() -> None:
    assert (
        choose_form("kafka://h", {}, own="omnibox").note == "messages as omnibox, the form of the table's own publisher"
    )
    told = choose_form("mqtt://h", {}, own="omnibox").note
    assert told == "messages as pillarbox, because omnibox has no form for mqtt"
    assert choose_form("stdout:", {}, own="omnibox") == Form()


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("mqtt://h", {"message": "omnibox"}, "message: expected pillarbox or cloudevents for mqtt; got 'omnibox'"),
        ("nats://h", {"message": "debezium"}, "expected pillarbox, cloudevents, openoutbox or faststream for nats"),
        ("redis://h", {"message": "openoutbox", "mode": "pubsub"}, "openoutbox has a form for streams only"),
        ("redis://h", {"message": "openoutbox", "cloudevents": "binary"}, "it is for message cloudevents"),
        (
            "redis://h",
            {"message": "openoutbox", "cloudevents_source": "/shop"},
            "cloudevents_source: it is for message",
        ),
        (
            "redis://h?cloudevents_source=/shop",
            {},
            "cloudevents_source: it is for message cloudevents, got 'pillarbox'",
        ),
        (
            "redis://h?message=foo",
            {},
            "message: expected pillarbox, cloudevents, openoutbox or faststream for redis; got 'foo'$",
        ),
        ("mqtt://h?message=pilarbox", {}, "or cloudevents for mqtt; got 'pilarbox'. Did you mean 'pillarbox'"),
        ("redis://h", {"message": 5}, "message: expected text, got 5"),
        ("http://h/x", {"message": "pillarbox", "batch": 5}, "a batch is an array of CloudEvents"),
    ],
)
def test_form_that_there_is_not_is_refused(url: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_sink(url, **options)


def test_stores_whose_messages_differ_need_to_be_told_one() -> None:
    stores = {name: StoreConfig(url="postgresql://h/d", layout=name) for name in ("openoutbox", "pillarbox")}
    with pytest.raises(ConfigError, match=r"\[sink\]: its stores have the layouts openoutbox, pillarbox"):
        Config(stores=stores, sink=SinkConfig(url="redis://h")).choose_forms()
    told = SinkConfig(url="redis://h", options={"message": "openoutbox"})
    assert Config(stores=stores, sink=told).choose_forms() == {"": Form()}


def test_routed_events_keep_the_form_of_the_table_they_come_from() -> None:
    config = Config(
        store=StoreConfig(url="postgresql://h/d", layout="openoutbox"),
        sinks={"a": SinkConfig(url="redis://h"), "b": SinkConfig(url="stdout:")},
        routes=[RouteConfig(Route(to=["a", "b"]))],
        routing_table="outbox",
    )
    assert {name: form.name for name, form in config.choose_forms().items()} == {"a": "openoutbox", "b": None}


# -- read again --------------------------------------------------------------------------------------------------------


def test_our_consumers_read_openoutbox_from_kafka() -> None:
    event = Event("order.shipped", {}, topic="orders", id=ID, key="ann", correlation_id="c-1", headers={"n": "1"})
    headers, _, body = render("openoutbox", "kafka", event)
    read = read_message(Raw("t-0-1", "orders", body, headers, key="ann"))
    assert (read.id, read.event) == (str(ID), event)


def test_our_consumers_read_openoutbox_from_redis() -> None:
    event = Event("orders", {}, id=ID, key="ann", headers={"n": "1"})
    headers, _, body = render("openoutbox", "redis", event)
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    read = read_entry(Found("orders", "1-0", 1, [*fields, (b"payload", body)]), None)
    assert (read.id, read.event) == (str(ID), event)


def test_our_consumers_read_omnibox() -> None:
    event = Event("order.placed", {"a": 1}, topic="orders", id=ID, key="ann", schema_version="2", trace_id="t")
    headers, _, body = render("omnibox", "kafka", event)
    read = read_message(Raw("t-0-1", "orders", body, headers, key="ann", content_type="application/json"))
    assert (read.id, read.event) == (str(ID), event)


def test_id_of_debezium_counts_in_its_own_topics_only() -> None:
    headers = {"id": str(ID)}
    assert read_message(Raw("t-0-1", "outbox.event.order", b"{}", headers)).id == str(ID)
    assert read_message(Raw("t-0-1", "users", b"{}", headers)).id == "t-0-1"
