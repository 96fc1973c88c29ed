"""Events as messages, and names made from templates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from cloudevents.core.formats.json import JSONFormat

from pillarbox.errors import ConfigError
from pillarbox.event import EVENT_FIELDS, Event, load_event
from pillarbox.sinks.message import MessageForm
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def stored(**fields: Any) -> Event:
    created_at = fields.pop("created_at", datetime(2026, 3, 1, 12, 30, tzinfo=UTC))
    loaded = fields.pop("loaded", {})
    event = Event(fields.pop("type", "order.placed"), fields.pop("payload", {"n": 1}), id=ID, **fields)
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    return load_event(*{**values, "created_at": created_at, **loaded}.values())


def test_fields_that_are_none_make_no_header():
    assert MessageForm().render(stored(created_at=None)).headers == {
        "event-id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "event-type": "order.placed",
        "content-type": "application/json",
    }


def test_every_field_makes_a_header():
    event = stored(
        key="k",
        correlation_id="c",
        causation_id="b",
        trace_id="t",
        source="s",
        schema_version="2",
        aggregate_type="order",
        aggregate_id="7",
    )
    assert MessageForm().render(event).headers == {
        "event-id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "event-type": "order.placed",
        "event-key": "k",
        "event-time": "2026-03-01T12:30:00+00:00",
        "event-source": "s",
        "correlation-id": "c",
        "causation-id": "b",
        "trace-id": "t",
        "schema-version": "2",
        "aggregate-type": "order",
        "aggregate-id": "7",
        "content-type": "application/json",
    }


def test_content_type_may_be_left_to_the_destination():
    message = MessageForm(has_content_type_header=False).render(stored(payload=b"<a/>", content_type="text/xml"))
    assert "content-type" not in message.headers
    assert message.content_type == "text/xml"


def test_clash_counts_without_case_where_the_destination_has_none():
    headers = MessageForm(folds_case=True).render(stored(headers={"Event-Id": "mine"})).headers
    assert headers["Event-Id"] == "mine"
    assert headers["pillarbox-event-id"] == str(ID)
    assert "event-id" not in headers


def test_clash_counts_with_case_elsewhere():
    headers = MessageForm().render(stored(headers={"Event-Id": "mine"})).headers
    assert (headers["Event-Id"], headers["event-id"]) == ("mine", str(ID))


def test_header_that_has_our_prefixed_name_as_well_is_kept():
    mine = {"event-id": "a", "pillarbox-event-id": "b"}
    headers = MessageForm().render(stored(headers=mine)).headers
    assert {name: value for name, value in headers.items() if name.endswith("event-id")} == {
        "event-id": "a",
        "pillarbox-event-id": "b",
        "pillarbox-pillarbox-event-id": str(ID),
    }


def test_prefixed_name_is_found_without_case_where_the_destination_has_none():
    mine = {"Event-Id": "a", "Pillarbox-Event-Id": "b"}
    headers = MessageForm(folds_case=True).render(stored(headers=mine)).headers
    assert {name: value for name, value in headers.items() if name.lower().endswith("event-id")} == {
        "Event-Id": "a",
        "Pillarbox-Event-Id": "b",
        "pillarbox-pillarbox-event-id": str(ID),
    }


@pytest.mark.parametrize("names", [("id", "header-id"), ("header-id", "id")])
def test_header_that_makes_way_for_an_attribute_takes_no_other_headers_name(names):
    mine = {name: f"my {name}" for name in names}
    headers = MessageForm(cloudevents="binary", ce_prefix="").render(stored(headers=mine)).headers
    assert {name: value for name, value in headers.items() if name.endswith("id")} == {
        "id": str(ID),
        "header-id": "my header-id",
        "header-header-id": "my id",
    }


def test_header_that_says_what_the_attribute_says_is_not_sent_twice():
    form = MessageForm(cloudevents="binary", ce_prefix="")
    headers = form.render(stored(headers={"traceparent": "00-1-2-01"})).headers
    assert [name for name in headers if name.endswith("traceparent")] == ["traceparent"]


def test_header_of_another_system_without_a_json_form_is_refused():
    with pytest.raises(Refused, match="Header 'x' cannot be sent"):
        MessageForm().render(stored(loaded={"headers": {"x": object()}}))


def test_nested_header_of_another_system_is_json_text():
    headers = MessageForm().render(stored(loaded={"headers": {"x": {"a": [1, None]}}})).headers
    assert headers["x"] == '{"a":[1,null]}'


def test_payload_is_never_altered():
    payload = b'{ "a" : 1.0,\n"b":"\xc3\xbc" }'
    for form in (MessageForm(), MessageForm(cloudevents="binary")):
        assert form.render(stored(payload=payload, content_type="application/json")).body == payload


def test_independent_reader_understands_a_binary_cloudevent():
    form = MessageForm(cloudevents="binary", folds_case=True)
    event = stored(key="k", source="/shop", headers={"traceparent": "00-1-2-01"}, payload={"a": "ü"})
    message = form.render(event)
    read = from_http_event(HTTPMessage(headers=message.headers, body=message.body), JSONFormat())
    assert read.get_id() == str(ID)
    assert (read.get_source(), read.get_type()) == ("/shop", "order.placed")
    assert read.get_time() == datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    assert read.get_extension("partitionkey") == "k"
    assert read.get_extension("traceparent") == "00-1-2-01"
    assert read.get_data() == {"a": "ü"}


def test_independent_reader_understands_a_structured_cloudevent():
    message = MessageForm(cloudevents="structured").render(stored(payload={"a": "ü"}, correlation_id="c"))
    read = from_http_event(HTTPMessage(headers=message.headers, body=message.body), JSONFormat())
    assert (read.get_source(), read.get_type()) == ("pillarbox", "order.placed")
    assert read.get_extension("correlationid") == "c"
    assert read.get_data() == {"a": "ü"}


def test_structured_cloudevent_of_text_that_has_no_bytes_is_refused():
    with pytest.raises(Refused, match="Event has no form as a CloudEvent: "):
        MessageForm(cloudevents="structured").render(stored(loaded={"key": "\ud800"}))


def test_structured_cloudevent_keeps_the_digits_of_json_and_wraps_what_claims_to_be_json():
    form = MessageForm(cloudevents="structured")
    assert b'"data":{"n":1.00}' in form.render(stored(payload=b'{"n":1.00}', content_type="application/json")).body
    broken = json.loads(form.render(stored(payload=b"{oops", content_type="application/json")).body)
    assert broken["data_base64"] == "e29vcHM="


# -- templates ---------------------------------------------------------------------------------------------------------


def fill(text: str, **fields: Any) -> str:
    return Template(text, what="Sink 'x' topic").fill(stored(**fields))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{topic}", "orders"),
        ("shop.{type}.v1", "shop.order.placed.v1"),
        ("plain", "plain"),
        ("{{{key}}}", "{k}"),
        ("{headers.tenant}/{aggregate_id}", "acme/7"),
        ("{id}", "01890a5d-ac96-774b-bcce-b302099a8057"),
    ],
)
def test_template_is_filled_from_the_event(text, expected):
    assert fill(text, topic="orders", key="k", aggregate_id="7", headers={"tenant": "acme"}) == expected


@pytest.mark.parametrize("text", ["{key}", "a.{headers.tenant}"])
def test_event_without_a_field_the_template_needs_is_refused(text):
    with pytest.raises(Refused, match=f"needs .*, which event {ID} has not"):
        fill(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{topik}", "Sink 'x' topic: unknown field 'topik'; expected topic, .* Did you mean 'topic'?"),
        ("{}", "unknown field ''"),
        ("a{", "'{' alone in 'a{'; write it twice for a plain one"),
        ("a}b", "'}' alone"),
        (" ", "Sink 'x' topic: expected text, got ' '"),
    ],
)
def test_bad_template_is_refused_at_once(text, message):
    with pytest.raises(ConfigError, match=message):
        Template(text, what="Sink 'x' topic")


def test_unknown_cloudevents_mode_is_refused():
    with pytest.raises(ConfigError, match="cloudevents: expected binary or structured, got 'batch'"):
        MessageForm(cloudevents="batch")
