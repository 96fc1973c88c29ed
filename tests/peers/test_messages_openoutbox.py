"""Messages as the Open Outbox Relay writes them: what it wrote once, what it writes now, and what we write."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.contract.kit_kafka import make_topic, read_topic
from tests.contract.kit_nats import ask, make_stream, read_stream
from tests.contract.kit_redis import Wire
from tests.peers.go_relay import running_go_relay
from tests.peers.openoutbox_rows import Row, Table, drain
from tests.servers import server_url

ONE = UUID("018f3f7a-0000-7000-8000-000000000001")
TWO = UUID("018f3f7a-0000-7000-8000-000000000002")
THREE = UUID("018f3f7a-0000-7000-8000-000000000003")
FOUR = UUID("018f3f7a-0000-7000-8000-000000000004")
ROWS = [
    Row(ONE, b'{"total": 990}', "ann", {"content-type": "application/json", "tenant": "ac me ü"}),
    Row(TWO, b"\x00\xff\r\n", "", {}),
    # As an event that was put through Pillarbox.
    Row(THREE, b"{}", None, {"pillarbox-type": "order.shipped", "pillarbox-correlation-id": "c-1", "empty": ""}),
]

pytestmark = pytest.mark.parametrize("writer", ["pillarbox", "the Go relay"])


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.drop()


@pytest.fixture
def topic() -> str:
    return f"t{uuid4().hex[:10]}.orders"


def test_messages_to_redis(writer: str, table: Table, topic: str, tmp_path: Path) -> None:
    table.insert(topic, ROWS)
    url = server_url("redis")
    table.deliver(writer, "redis", url, tmp_path)
    # These and the ones to other brokers have different keys or none, so there is no order among them.
    assert sorted(read_redis(url, topic), key=lambda fields: fields[b"id"]) == [
        {
            b"id": str(ONE).encode(),
            b"payload": b'{"total": 990}',
            b"partition_key": b"ann",
            b"h:content-type": b"application/json",
            b"h:tenant": "ac me ü".encode(),
        },
        {b"id": str(TWO).encode(), b"payload": b"\x00\xff\r\n"},
        {
            b"id": str(THREE).encode(),
            b"payload": b"{}",
            b"h:pillarbox-type": b"order.shipped",
            b"h:pillarbox-correlation-id": b"c-1",
            b"h:empty": b"",
        },
    ]


def test_messages_to_nats(writer: str, table: Table, topic: str, tmp_path: Path) -> None:
    url = server_url("nats")
    stream = topic.partition(".")[0]
    make_stream(url, stream, subjects=[f"{stream}.>"])
    table.insert(topic, [*ROWS, Row(FOUR, b"", "k", {"two": " lines\nin one "})])
    table.deliver(writer, "nats", url, tmp_path)
    found = sorted(read_stream(url, stream), key=lambda each: each[1]["Nats-Msg-Id"])
    ask(url, f"STREAM.DELETE.{stream}")
    # The order of the headers is that on the wire.
    assert [(body, list(headers.items()), subject) for body, headers, subject in found] == [
        (
            b'{"total": 990}',
            [
                ("Nats-Msg-Id", str(ONE)),
                ("X-Partition-Key", "ann"),
                ("content-type", "application/json"),
                ("tenant", "ac me ü"),
            ],
            topic,
        ),
        (b"\x00\xff\r\n", [("Nats-Msg-Id", str(TWO))], topic),
        (
            b"{}",
            [
                ("Nats-Msg-Id", str(THREE)),
                ("empty", ""),
                ("pillarbox-correlation-id", "c-1"),
                ("pillarbox-type", "order.shipped"),
            ],
            topic,
        ),
        (b"", [("Nats-Msg-Id", str(FOUR)), ("X-Partition-Key", "k"), ("two", "lines in one")], topic),
    ]


def test_messages_to_kafka(writer: str, table: Table, topic: str, tmp_path: Path) -> None:
    url = server_url("kafka")
    make_topic(url, topic)
    table.insert(topic, ROWS)
    table.deliver(writer, "kafka", url, tmp_path)
    found = sorted(read_topic(url, topic), key=lambda each: each.headers["X-Event-ID"])
    assert [(each.key, each.body, each.headers) for each in found] == [
        (
            "ann",
            b'{"total": 990}',
            {"content-type": "application/json", "tenant": "ac me ü", "X-Event-ID": str(ONE)},
        ),
        (None, b"\x00\xff\r\n", {"X-Event-ID": str(TWO)}),
        (
            None,
            b"{}",
            {
                "pillarbox-type": "order.shipped",
                "pillarbox-correlation-id": "c-1",
                "empty": "",
                "X-Event-ID": str(THREE),
            },
        ),
    ]


def test_keys_stay_in_their_partitions_of_kafka(writer: str, table: Table, topic: str, tmp_path: Path) -> None:
    url = server_url("kafka")
    make_topic(url, topic, partitions=6)
    table.insert(topic, [Row(uuid4(), b"{}", f"key-{number}") for number in range(12)])
    table.deliver(writer, "kafka", url, tmp_path)
    found = [" ".join(sorted(str(each.key) for each in read_topic(url, topic, partition=n))) for n in range(6)]
    assert found == [
        "key-3 key-5",
        "key-6 key-8",
        "key-10 key-7 key-9",
        "key-0 key-11",
        "key-1",
        "key-2 key-4",
    ]


def test_both_on_one_table_lose_and_repeat_nothing(writer: str, table: Table, topic: str, tmp_path: Path) -> None:
    if writer == "pillarbox":
        pytest.skip("it takes both")
    url = server_url("redis")
    rows = [Row(uuid4(), b"{}", f"k-{number % 50}", {"n": str(number)}) for number in range(3000)]
    with running_go_relay(tmp_path, store=table.url, table=table.name, publisher="redis", url=url):
        for start in range(0, len(rows), 500):
            table.insert(topic, rows[start : start + 500])
            asyncio.run(drain(table.config(url)))
        table.wait_until_done()
    found = read_redis(url, topic)
    assert Counter(each[b"id"].decode() for each in found) == Counter(str(row.id) for row in rows)
    assert {tuple(sorted(each)) for each in found} == {(b"h:n", b"id", b"partition_key", b"payload")}
    assert table.count("DELIVERED") == len(rows)


def read_redis(url: str, stream: str) -> list[dict[bytes, bytes]]:
    """The entries of a stream, which then is deleted. Go's relay writes the fields of each in an order of its own."""
    with Wire(url) as wire:
        found: list[Any] = wire.call("XRANGE", stream, "-", "+")
        wire.call("DEL", stream)
    return [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in found]


def test_relay_says_at_its_start_whose_messages_it_writes(
    writer: str, table: Table, topic: str, tmp_path: Path
) -> None:
    if writer != "pillarbox":
        pytest.skip("it is ours that says so")
    options = ["--store", table.url, "--layout", "openoutbox", "--table", table.name]
    for url, expected in (
        (server_url("redis"), ": messages as openoutbox, the form of the table's own publisher"),
        (server_url("mosquitto"), ": messages as pillarbox, because openoutbox has no form for mqtt"),
    ):
        command = [sys.executable, "-m", "pillarbox", "relay", *options, "--sink", url, "--drain"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert expected in done.stderr
        assert "pillarbox:pillarbox@" not in done.stderr
