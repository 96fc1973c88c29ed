from __future__ import annotations

import copy
import pickle
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.errors import InvalidEvent, PillarboxError
from pillarbox.event import (
    DELIVERED,
    EVENT_FIELDS,
    LIMITS,
    RELEASED,
    Dead,
    Delivered,
    Event,
    Released,
    Retry,
    load_event,
    uuid7,
)

ID = UUID("0190a8a0-7b1c-7000-8000-000000000001")


def test_event_needs_only_a_type_and_a_payload():
    event = Event("order.placed", {"total": 3})
    assert event.type == "order.placed"
    assert event.topic == "order.placed"
    assert event.payload == b'{"total":3}'
    assert event.content_type == "application/json"
    assert event.id.version == 7
    assert event.headers == {}
    assert event.key is None
    assert event.created_at is None


def test_event_keeps_everything_it_is_given():
    event = Event(
        "order.placed",
        b"\x00\x01",
        id=ID,
        topic="orders",
        key="42",
        headers={"tenant": "a", "tries": 1, "ratio": 0.5, "urgent": True, "note": None},
        content_type="application/x-protobuf",
        due_at=datetime(2026, 1, 2, 12, tzinfo=timezone(timedelta(hours=2))),
        dedup_key="once",
        aggregate_type="order",
        aggregate_id=42,
        schema_version=3,
        correlation_id=ID,
        causation_id="cause",
        trace_id="00-ab",
        source="shop",
        max_attempts=5,
    )
    assert event.payload == b"\x00\x01"
    assert event.content_type == "application/x-protobuf"
    assert (event.id, event.topic, event.key) == (ID, "orders", "42")
    assert event.headers == {"tenant": "a", "tries": 1, "ratio": 0.5, "urgent": True, "note": None}
    assert event.due_at == datetime(2026, 1, 2, 10, tzinfo=UTC)
    assert event.due_at.tzinfo is UTC
    assert (event.aggregate_type, event.aggregate_id, event.schema_version) == ("order", "42", "3")
    assert event.correlation_id == "0190a8a0-7b1c-7000-8000-000000000001"
    assert (event.causation_id, event.trace_id, event.source) == ("cause", "00-ab", "shop")
    assert (event.dedup_key, event.max_attempts) == ("once", 5)


@pytest.mark.parametrize(
    "payload", [b"raw", bytearray(b"raw"), memoryview(b"raw")], ids=["bytes", "bytearray", "memoryview"]
)
def test_bytes_are_kept_as_they_are(payload):
    event = Event("t", payload)
    assert event.payload == b"raw"
    assert type(event.payload) is bytes
    assert event.content_type == "application/octet-stream"


def test_object_may_say_which_json_it_is():
    assert Event("t", {}, content_type="application/cloudevents+json").content_type == "application/cloudevents+json"


def test_object_cannot_have_a_content_type_that_is_not_json():
    with pytest.raises(
        InvalidEvent, match="Event payload: str is encoded as JSON, which content_type 'text/plain' is not"
    ):
        Event("t", "hello", content_type="text/plain")


def test_event_is_immutable():
    event = Event("t", 1, headers={"a": 1})
    with pytest.raises(AttributeError):
        event.key = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        event.headers["a"] = 2  # type: ignore[index]


def test_headers_are_a_copy():
    headers = {"a": 1}
    event = Event("t", 1, headers=headers)
    headers["a"] = 2
    assert event.headers == {"a": 1}


def test_events_are_equal_by_value_and_hash_by_id():
    one, other = Event("t", 1, id=ID), Event("t", 1, id=ID)
    assert one == other
    assert len({one, other}) == 1
    assert one != Event("t", 2, id=ID)
    assert one != "t"


def test_time_of_creation_does_not_make_events_differ():
    one = Event("t", 1, id=ID)
    values = {name: getattr(one, name) for name in EVENT_FIELDS}
    loaded = load_event(*{**values, "created_at": datetime(2026, 1, 2, tzinfo=UTC)}.values())
    assert loaded.created_at == datetime(2026, 1, 2, tzinfo=UTC)
    assert loaded == one


def test_loaded_event_is_not_checked():
    values = dict.fromkeys(EVENT_FIELDS)
    loaded = load_event(*{**values, "id": ID, "type": "", "headers": {"nested": {"a": [1]}}}.values())
    assert (loaded.id, loaded.type, loaded.headers) == (ID, "", {"nested": {"a": [1]}})


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda event: pickle.loads(pickle.dumps(event))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_event_can_be_copied_and_pickled(duplicate):
    event = Event("t", {"a": 1}, key="k", headers={"h": 1}, due_at=datetime(2026, 1, 2, tzinfo=UTC))
    twin = duplicate(event)
    assert twin == event
    assert isinstance(twin.headers, MappingProxyType)


@pytest.mark.parametrize("name", ["type", "topic", "key", "content_type"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "expected text, got an empty string"),
        (7, "expected text, got 7"),
        ("a\nb", r"control character '\\n' in 'a\\nb'; remove it"),
        ("a\0b", r"control character '\\x00'"),
        ("a\x85b", r"control character '\\x85'"),
        ("\ud83d", r"control character '\\ud83d'"),
    ],
)
def test_bad_text_is_refused(name, value, reason):
    given = {"type": "t", "payload": b"", name: value}
    with pytest.raises(InvalidEvent, match=rf"^Event {name}: {reason}"):
        Event(**given)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_text_longer_than_its_column_is_refused(name):
    given: dict[str, Any] = {"type": "t", "payload": b"", name: "x" * LIMITS[name]}
    Event(**given)
    with pytest.raises(
        InvalidEvent, match=rf"^Event {name}: {LIMITS[name] + 1} characters, at most {LIMITS[name]} fit"
    ):
        Event(**{**given, name: "x" * (LIMITS[name] + 1)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": "not-a-uuid"}, "Event id: expected a uuid.UUID, got 'not-a-uuid'"),
        ({"headers": ["a"]}, r"Event headers: expected a mapping of names to values, got \['a'\]"),
        ({"headers": {"": 1}}, "Event headers: expected a name, got ''"),
        ({"headers": {1: 1}}, "Event headers: expected a name, got 1"),
        ({"headers": {"a\n": 1}}, "Event header name: control character"),
        ({"headers": {"a": "x\r\ny"}}, "Event header 'a': control character"),
        ({"headers": {"a": b"x"}}, "Event header 'a': expected text, a number, a boolean or None, got b'x'"),
        ({"headers": {"a": {}}}, "Event header 'a': expected text, a number, a boolean or None, got {}"),
        ({"headers": {"a": float("nan")}}, "Event header 'a': expected a finite number, got nan"),
        ({"headers": {"a": 2**64}}, "Event header 'a': expected a number of at most 64 bits"),
        ({"due_at": datetime(2026, 1, 1)}, "Event due_at: .* has no time zone"),  # noqa: DTZ001
        ({"due_at": "tomorrow"}, "Event due_at: expected an aware datetime, got 'tomorrow'"),
        (
            {"due_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))},
            "Event due_at: .* has no form in UTC; expected a year up to 9999",
        ),
        ({"delay": 5}, "Event delay: expected a timedelta, got 5"),
        ({"delay": timedelta(seconds=-1)}, "Event delay: expected between 0 and 3650 days"),
        ({"delay": timedelta(days=3651)}, "Event delay: expected between 0 and 3650 days"),
        (
            {"delay": timedelta(1), "due_at": datetime(2026, 1, 1, tzinfo=UTC)},
            "Event: give due_at or delay, not both",
        ),
        ({"max_attempts": 0}, "Event max_attempts: expected a whole number from 1 to 1000000, got 0"),
        ({"max_attempts": True}, "Event max_attempts: .* got True"),
        ({"aggregate_id": True}, "Event aggregate_id: expected text, got True"),
        ({"source": ""}, "Event source: expected text, got an empty string"),
    ],
)
def test_bad_value_is_refused_before_any_sql(given, message):
    with pytest.raises(InvalidEvent, match=rf"^{message}"):
        Event("t", {}, **given)


def test_refusal_is_an_error_of_ours_and_a_value_error():
    with pytest.raises(PillarboxError) as refusal:
        Event("", {})
    assert isinstance(refusal.value, ValueError)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=255))
def test_any_printable_text_is_a_key(key):
    assert Event("t", 1, key=key).key == key


def test_subclass_of_uuid_becomes_a_plain_one():
    class DriverUUID(UUID):
        pass

    event = Event("t", 1, id=DriverUUID(int=ID.int))
    assert type(event.id) is UUID
    assert event.id == ID


def test_uuid7_has_its_version_its_variant_and_the_time():
    before = time.time_ns() // 1_000_000
    made = uuid7()
    after = time.time_ns() // 1_000_000
    assert made.version == 7
    assert made.variant == RFC_4122
    assert before <= made.int >> 80 <= after + 1


def test_uuid7_sorts_in_the_order_of_making_across_threads():
    made: list[list[UUID]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda ids=ids: ids.extend(uuid7() for _ in range(2000))) for ids in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in made)
    assert len({one for ids in made for one in ids}) == 8000


def test_uuid7_goes_on_when_the_clock_stands_still_or_jumps_back(monkeypatch):
    first = uuid7()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    later = [uuid7() for _ in range(5000)]
    assert [first, *later] == sorted([first, *later])
    assert len(set(later)) == 5000


def test_outcomes_are_compared_by_value():
    assert Delivered() == DELIVERED
    assert Released() == RELEASED
    assert Retry("x", cause=ValueError()) == Retry("x")
    assert Retry("x") != Retry("x", timedelta(seconds=1))
    assert Dead("x") not in (Retry("x"), Dead("y"))
