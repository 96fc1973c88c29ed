"""From messages to events, without a broker."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from pillarbox.event import EVENT_FIELDS, Event, load_event
from pillarbox.inbox.message import make_event_id
from pillarbox.sinks.message import MessageForm
from pillarbox.sources.reading import Raw, read_message

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
AT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def raw(body: bytes = b"{}", headers: dict[str, Any] | None = None, **fields) -> Raw:
    return Raw(**{"id": "orders:0:7", "topic": "orders", "body": body, "headers": headers or {}, **fields})


def put(**fields) -> Event:
    event = Event("order.placed", b'{"a": 1.0}', content_type="application/json", id=ID, topic="orders", **fields)
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    return load_event(*{**values, "created_at": AT}.values())


@pytest.mark.parametrize("has_header", [True, False], ids=["content type as header", "content type apart"])
@pytest.mark.parametrize(
    "headers",
    [
        {"tenant": "acme"},
        {"event-id": "mine", "event-type": "mine", "content-type": "mine"},
        {"event-id": "mine", "pillarbox-event-id": "mine too", "correlation-id": "mine"},
    ],
    ids=["own", "of our names", "of our names with prefix"],
)
def test_our_message_gives_back_the_event(headers, has_header):
    event = put(key="k", headers=headers, correlation_id="c", trace_id="t", aggregate_type="order", aggregate_id="7")
    message = MessageForm(has_content_type_header=has_header).render(event)
    content_type = None if has_header else message.content_type
    read = read_message(raw(message.body, dict(message.headers), content_type=content_type))
    assert read.defect is None
    assert read.event == event
    assert read.event.created_at == AT


@pytest.mark.parametrize("mode", ["binary", "structured"])
@pytest.mark.parametrize("prefix", ["ce-", "ce_", "cloudEvents:"])
@pytest.mark.parametrize("headers", [{"tenant": "acme"}, {"ce-id": "forged", "ce_id": "forged", "content-type": "x"}])
def test_our_cloudevent_gives_back_the_event(mode, prefix, headers):
    event = put(key="k", headers=headers, correlation_id="c", source="shop", aggregate_id="7", schema_version="2")
    message = MessageForm(cloudevents=mode, ce_prefix=prefix).render(event)
    read = read_message(raw(message.body, dict(message.headers)), ce_prefix=prefix)
    assert read.defect is None
    assert read.event == event
    assert read.event.created_at == AT


def test_stranger_without_headers_has_the_brokers_names():
    read = read_message(raw(b"hello", key="k", sent_at=AT))
    event = read.event
    assert (read.id, read.defect) == ("orders:0:7", None)
    assert (event.id, event.type, event.topic, event.key) == (make_event_id("orders:0:7"), "orders", "orders", "k")
    assert (event.payload, event.content_type, event.created_at) == (b"hello", "application/octet-stream", AT)


def test_headers_of_a_stranger_are_kept_also_without_a_value():
    read = read_message(raw(headers={"X-City": "Zürich".encode(), "nothing": None, "Content-Type": "text/plain"}))
    assert dict(read.event.headers) == {"X-City": "Zürich", "nothing": None}
    assert read.event.content_type == "text/plain"


def structured(**attributes) -> Raw:
    document = {"specversion": "1.0", "id": "x-1", "source": "/them", "type": "paid", **attributes}
    return raw(json.dumps(document).encode(), {"content-type": "application/cloudevents+json; charset=utf-8"})


def test_structured_cloudevent_keeps_numbers_as_they_were_written():
    body = b'{"specversion":"1.0","id":"x","data" : {"n": 1.10,  "big": 123456789012345678901234567890} ,"type":"t"}'
    read = read_message(raw(body, {"content-type": "application/cloudevents+json"}))
    assert read.event.payload == b'{"n": 1.10,  "big": 123456789012345678901234567890}'


@pytest.mark.parametrize(
    ("attributes", "payload", "content_type"),
    [
        ({"data": {"a": [1, "}"]}}, b'{"a": [1, "}"]}', "application/json"),
        ({"data": "hi", "datacontenttype": "text/plain"}, b"hi", "text/plain"),
        ({"data": "hi"}, b'"hi"', "application/json"),
        ({"data_base64": b64encode(b"\xff\0").decode(), "datacontenttype": "image/png"}, b"\xff\0", "image/png"),
        ({}, b"", "application/json"),
        ({"data": None}, b"null", "application/json"),
    ],
)
def test_data_of_a_structured_cloudevent(attributes, payload, content_type):
    event = read_message(structured(**attributes)).event
    assert (event.payload, event.content_type) == (payload, content_type)


def test_extensions_of_a_cloudevent_become_headers():
    read = read_message(structured(time="2026-03-01T13:30:00+01:00", tenant="acme", level=3, dataschema="/s", odd=[1]))
    assert dict(read.event.headers) == {"tenant": "acme", "level": 3, "dataschema": "/s", "odd": "[1]"}
    assert (read.id, read.event.type, read.event.source, read.event.created_at) == ("/them x-1", "paid", "/them", AT)


def binary(event_id: str | None, source: str = "/them") -> Raw:
    return raw(headers={"ce-specversion": "1.0", "ce-id": event_id, "ce-source": source, "ce-type": "paid"})


@pytest.mark.parametrize(
    "make", [lambda source, id: structured(source=source, id=id), lambda source, id: binary(id, source)]
)
def test_cloudevent_is_known_by_its_source_and_id(make):
    one, other = read_message(make("/a", "1")), read_message(make("/b", "1"))
    assert (one.id, other.id) == ("/a 1", "/b 1")
    assert one.event.id == make_event_id("/a 1")
    assert one.event.id != other.event.id
    assert (one.defect, other.defect) == (None, None)


def test_cloudevent_with_a_uuid_is_known_by_that_alone():
    assert read_message(structured(id=str(ID))).id == str(ID)
    assert read_message(structured(id=str(ID))).event.id == ID


def test_long_name_of_a_cloudevent_is_hashed():
    one, other = read_message(structured(id="x" * 250 + "1")), read_message(structured(id="x" * 250 + "2"))
    assert len(one.id) == len(other.id) == 64
    assert one.id != other.id
    assert one.id == hashlib.sha256(b"/them " + b"x" * 250 + b"1").hexdigest()
    assert read_message(structured(id="x" * 249)).id == "/them " + "x" * 249


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (raw(b"{", {"content-type": "application/cloudevents+json"}), "unexpected end"),
        (raw(b"[]", {"content-type": "application/cloudevents+json"}), "expected a CloudEvent"),
        (structured(data_base64="%%"), "base64"),
        (structured(data_base64=5), "expected|argument"),
        (structured(datacontenttype=5), "expected datacontenttype to be text"),
        (structured(time="yesterday"), "yesterday"),
        (structured(time=5), "fromisoformat"),
        (structured(time="0001-01-01T00:00:00+14:00"), "range"),
        (raw(headers={"event-time": "soon"}), "soon"),
        (raw(headers={"stamp": b"\xff"}), "header 'stamp' is no text"),
        (raw(headers={"content-type": 5}), "header 'content-type' is no text: 5"),
        (structured(id=None), "expected the CloudEvent's id to be text, got None"),
        (structured(id=""), "expected the CloudEvent's id to be text, got ''"),
        (structured(id=7), "expected the CloudEvent's id to be text, got 7"),
        (binary(None), "expected the CloudEvent's id to be text, got None"),
    ],
)
def test_message_that_cannot_be_read_says_why_and_keeps_everything(message, reason):
    read = read_message(message)
    assert read.defect is not None
    assert read.defect.startswith("Message cannot be read: ")
    assert re.search(reason, read.defect)
    assert read.event.payload == message.body
    assert read.event.headers.keys() == message.headers.keys()
    assert read.raw is message
    assert read.id == "orders:0:7"
