"""Events to statements, without a database."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from pillarbox.encoding import Encoder
from pillarbox.event import Event
from pillarbox.insertion import Insertion, Prepared, dialect_of, insertion_for
from pillarbox.layouts import declare_layout, get_layout

LAYOUT = get_layout("pillarbox")
TABLE = declare_layout(LAYOUT, sa.MetaData())["outbox"]
MEGABYTE = 1024 * 1024
DRIVERS = ("asyncpg", "psycopg", "psycopg2", "sqlite3", "pymysql")


def insertion(driver: str, **options: Any) -> Insertion:
    return insertion_for(LAYOUT, TABLE, dialect_of(driver), **options)


def prepare(driver: str, *events: Event, **options: Any) -> list[Prepared]:
    return list(insertion(driver, **options).prepare(events, Encoder(LAYOUT, TABLE).headers(events, {})))


def make_events(count: int, size: int = 10) -> list[Event]:
    payload = bytes(size)
    return [Event("event", payload) for _ in range(count)]


# -- how many statements -------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("count", "expected"), [(1, [1]), (1000, [1000]), (1001, [1000, 1]), (2500, [1000, 1000, 500])]
)
def test_a_statement_takes_a_thousand_events(driver: str, count: int, expected: list[int]) -> None:
    events = make_events(count)
    prepared = prepare(driver, *events)
    assert [len(each.ids) for each in prepared] == expected
    assert [row for each in prepared for row in each.ids] == [event.id for event in events]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg2", "sqlite3"])
def test_a_statement_takes_eight_megabytes(driver: str) -> None:
    assert [len(each.ids) for each in prepare(driver, *make_events(17, MEGABYTE))] == [8, 8, 1]


def test_a_statement_for_mysql_fits_its_packet_when_payloads_are_written_as_digits() -> None:
    for prepared in prepare("pymysql", *make_events(17, MEGABYTE)):
        payloads = sum(len(value) for value in prepared.params if isinstance(value, bytes))
        assert 2 * payloads + len(prepared.sql) < 8 * MEGABYTE


def test_headers_count_towards_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillarbox.insertion.MAX_BYTES", 1000)
    events = [Event("event", b"1234", headers={"h": "x" * 488}) for _ in range(5)]  # 500 bytes each
    assert [len(each.ids) for each in prepare("asyncpg", *events)] == [2, 2, 1]


def test_an_event_larger_than_a_statement_s_share_goes_alone() -> None:
    small, large = make_events(1)[0], make_events(1, 9 * MEGABYTE)[0]
    assert [len(each.ids) for each in prepare("asyncpg", small, large, small)] == [1, 1, 1]


def test_sqlite_s_limits_hold_for_the_longest_rows() -> None:
    events = [Event("event", {}, delay=timedelta(seconds=1)) for _ in range(1000)]
    for prepared in prepare("sqlite3", *events):
        assert len(prepared.params) <= 32_766
        assert len(prepared.sql) <= 1_000_000


# -- what they say -------------------------------------------------------------------------------------------


def test_postgres_gets_arrays_of_the_columns_that_are_used() -> None:
    first, second = Event("a", b"1", key="k"), Event("b", b"2", topic="t")
    [bare] = prepare("asyncpg", first, second)
    binary = "application/octet-stream"
    ids = [first.id, second.id]
    assert bare.params[:6] == (ids, ["a", "b"], ["a", "t"], ["k", None], [b"1", b"2"], [binary, binary])
    assert len(bare.params) == 7  # the lanes
    [full] = prepare("asyncpg", first, Event("b", b"2", source="s", headers={"h": 1}, dedup_key="d"))
    assert all(array in full.params for array in ([None, "s"], [None, '{"h":1}'], [None, "d"]))


def test_postgres_gets_plain_values_for_one_event() -> None:
    event = Event("a", b"1", key="k", dedup_key="d")
    [prepared] = prepare("asyncpg", event)
    assert prepared.params == (event.id, "a", "a", "k", b"1", "application/octet-stream", 29, "d")
    assert "unnest" not in prepared.sql


def test_postgres_has_few_statements_whatever_the_events_use() -> None:
    fields = (
        "aggregate_type",
        "aggregate_id",
        "schema_version",
        "correlation_id",
        "causation_id",
        "trace_id",
    )
    made = insertion("asyncpg")
    found = {
        next(made.prepare([Event("a", {}, **{name: "x"})], [None])).sql  # type: ignore[arg-type]
        for name in fields
    }
    assert len(found) == 1


def test_psycopg_gets_binary_parameters() -> None:
    [prepared] = prepare("psycopg", *make_events(1))
    assert "%(payload)b" in prepared.sql
    assert "%(payload)s" not in prepared.sql


def test_psycopg2_gets_ids_as_text() -> None:
    event = Event("a", {}, id=UUID("0190d0a1-0000-7000-8000-00000000abcd"))
    [prepared] = prepare("psycopg2", event)
    assert prepared.params["id"] == "0190d0a1-0000-7000-8000-00000000abcd"


def test_only_postgres_is_told_to_notify() -> None:
    assert "pg_notify('pillarbox.outbox', '')" in prepare("asyncpg", *make_events(1))[0].sql
    assert "notify" not in prepare("asyncpg", *make_events(1), notify=False)[0].sql
    assert "notify" not in prepare("sqlite3", *make_events(1))[0].sql


def test_a_due_time_goes_to_sqlite_as_utc_text() -> None:
    moment = datetime(2031, 1, 2, 8, 34, 5, 60, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    [prepared] = prepare("sqlite3", Event("a", {}, due_at=moment))
    assert "2031-01-02 03:04:05.000060" in prepared.params


def test_a_sink_s_rows_carry_its_name() -> None:
    assert "'it''s' AS sink" in prepare("asyncpg", *make_events(1), sink="it's")[0].sql
    assert "it's" in prepare("sqlite3", *make_events(1), sink="it's")[0].params


def test_a_table_in_a_schema_is_named_in_full() -> None:
    table = declare_layout(LAYOUT, sa.MetaData(), table="billing.events")["outbox"]
    [prepared] = insertion_for(LAYOUT, table, dialect_of("asyncpg")).prepare(make_events(1), [None])
    assert "INSERT INTO billing.events " in prepared.sql
    assert "pg_notify('pillarbox.billing.events', '')" in prepared.sql


def test_defaults_of_other_columns_stay_out_of_the_statement() -> None:
    metadata = sa.MetaData()
    table = declare_layout(LAYOUT, metadata, table="extended")["outbox"]
    table.append_column(sa.Column("note", sa.String(50), default="python"))
    for driver in DRIVERS:
        [prepared] = insertion_for(LAYOUT, table, dialect_of(driver)).prepare(make_events(1), [None])
        assert "note" not in prepared.sql


# -- what was there ------------------------------------------------------------------------------------------

A, B, C = (UUID(int=number) for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("ids", "rows", "expected"),
    [
        ([A, B], [(str(A),), (str(B),)], []),
        ([A, B], [(str(B),)], [0]),
        ([A, B], [], [0, 1]),
        ([A, B, A], [(A,), (B,)], [2]),
        ([A, B], [(str(A).encode(),)], [1]),
    ],
)
def test_rows_that_did_not_return_were_there(ids: Any, rows: Any, expected: list[int]) -> None:
    assert Prepared("", (), ids).existing(rows) == expected


@pytest.mark.parametrize(
    ("ids", "row", "expected"),
    [
        ([A, B], (None, None), []),
        ([A, B, C], ([str(C), str(A)], None), [1]),
        ([A], ([], None), [0]),
    ],
)
def test_no_ids_return_when_nothing_was_there(ids: Any, row: Any, expected: list[int]) -> None:
    assert Prepared("", (), ids, is_counted=True).existing([row]) == expected


# -- headers -------------------------------------------------------------------------------------------------

TRACE = {"traceparent": "00-aa-bb-01", "tracestate": "x=1"}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, TRACE),
        ({"a": 1}, {"a": 1, **TRACE}),
        ({"traceparent": "00-cc-dd-01"}, {"traceparent": "00-cc-dd-01"}),
        ({"Traceparent": "00-cc-dd-01", "a": 1}, {"Traceparent": "00-cc-dd-01", "a": 1}),
    ],
)
def test_the_trace_joins_the_headers_unless_the_event_has_its_own(own: Any, expected: Any) -> None:
    [text] = Encoder(LAYOUT, TABLE).headers([Event("a", {}, headers=own)], TRACE)
    assert text is not None
    assert json.loads(text) == expected


def test_no_headers_are_stored_as_none() -> None:
    assert Encoder(LAYOUT, TABLE).headers([Event("a", {}), Event("b", {}, headers={"x": "ü"})], {}) == [
        None,
        '{"x":"ü"}',
    ]


def test_times_in_utc_need_no_zone() -> None:
    [prepared] = prepare("pymysql", Event("a", {}, due_at=datetime(31, 1, 1, tzinfo=UTC)))
    assert "0031-01-01 00:00:00.000000" in prepared.params
