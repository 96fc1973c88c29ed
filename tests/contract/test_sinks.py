"""The obligations of the Sink port, one test each, over every sink that needs no server.

A kit puts a sink before a destination that the test can look into, break and block without asking the sink.
What a destination cannot do (nothing arrives at `null:`) its kit does not list among its features. What one sink
promises beyond the port stands below the suite.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import (
    DELIVERED,
    EVENT_FIELDS,
    RELEASED,
    Claim,
    Dead,
    Event,
    Outcome,
    Retry,
    load_event,
)
from pillarbox.sinks import Sink
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.file import FileSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.sinks.null import NullSink
from pillarbox.sinks.order import group_by_key, release_successors
from pillarbox.sinks.stdout import StdoutSink

FAILED = (Retry, Dead)


def event(name: str, key: str | None = None, **headers: Any) -> Event:
    """An event whose topic is its name: what the kits find at the destination."""
    return Event("order.placed", {"name": name}, topic=name, key=key, headers=headers)


def claim(name: str, key: str | None = None, **headers: Any) -> Claim:
    return Claim(row=name, event=event(name, key, **headers), attempt=1)


def unwritable(name: str, key: str | None = None) -> Claim:
    """A claim with a header that has no JSON form, as only a row of another system can hold it."""
    fields = {field: getattr(event(name, key), field) for field in EVENT_FIELDS}
    return Claim(row=name, event=load_event(*{**fields, "headers": {"x": object()}}.values()), attempt=1)


def names(lines: str) -> list[str]:
    return [json.loads(line)["topic"] for line in lines.splitlines() if line]


class NullKit:
    features: ClassVar[set[str]] = set()

    def __init__(self, folder: Path) -> None:
        self.sink: Sink = NullSink()

    def dispose(self) -> None:
        pass


class FileKit:
    features: ClassVar = {"arrives", "refuses", "goes down", "is checked", "blocks", "writes lines"}
    refused = staticmethod(unwritable)

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "out"
        self.folder.mkdir()
        self.path = self.folder / "events.jsonl"
        self.path.touch()
        self.sink: Sink = FileSink(self.path)

    def read(self) -> bytes:
        return self.path.read_bytes()

    def arrived(self) -> list[str]:
        return names(self.read().decode())

    def go_down(self) -> None:
        self.folder.rename(self.folder.with_name("away"))

    def come_back(self) -> None:
        self.folder.with_name("away").rename(self.folder)

    def block(self) -> None:
        self.lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def unblock(self) -> None:
        os.close(self.lock)

    def dispose(self) -> None:
        pass


class StdoutKit:
    """The sink writes into a pipe; the kit reads the other end."""

    features: ClassVar = {"arrives", "refuses", "goes down", "is checked", "blocks", "writes lines"}
    refused = staticmethod(unwritable)

    def __init__(self, folder: Path) -> None:
        self.reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w")
        self.sink: Sink = StdoutSink(stream=self.stream)
        self.text = b""

    def read(self) -> bytes:
        os.set_blocking(self.reader, False)
        found = b""
        while True:
            try:
                found += os.read(self.reader, 65536)
            except BlockingIOError:
                return found

    def arrived(self) -> list[str]:
        self.text += self.read()
        return names(self.text.decode())

    def go_down(self) -> None:
        os.close(self.reader)

    def come_back(self) -> None:
        self.reader, writer = os.pipe()
        os.dup2(writer, self.stream.fileno())
        os.close(writer)

    def block(self) -> None:
        os.set_blocking(self.stream.fileno(), False)
        with suppress(BlockingIOError):
            while os.write(self.stream.fileno(), b"\n" * 4096):
                pass
        os.set_blocking(self.stream.fileno(), True)

    def unblock(self) -> None:
        self.read()

    def dispose(self) -> None:
        os.close(self.reader)
        self.stream.close()


class MemoryKit:
    features: ClassVar = {"arrives", "refuses", "goes down", "goes down midway", "is checked", "blocks"}

    def __init__(self, folder: Path) -> None:
        self.memory = MemorySink()
        self.memory.fail(lambda event: "refuse" in event.headers, Retry("no"), times=None)
        self.sink: Sink = self.memory
        self.go_down, self.come_back = self.memory.go_down, self.memory.come_back
        self.block, self.unblock = self.memory.block, self.memory.unblock

    def refused(self, name: str, key: str | None = None) -> Claim:
        return claim(name, key, refuse=True)

    def arrived(self) -> list[str]:
        return [event.topic for event in self.memory.events]

    def go_down_at(self, name: str) -> None:
        self.memory.go_down_at(lambda event: event.topic == name)

    def dispose(self) -> None:
        pass


class CallableKit:
    features: ClassVar = {"arrives", "refuses", "goes down", "goes down midway", "blocks"}

    def __init__(self, folder: Path) -> None:
        self.sink: Sink = CallableSink(self.handle, concurrency=4)
        self.found: list[str] = []
        self.down_at: str | None = None
        self.gate = asyncio.Event()
        self.unblock, self.block = self.gate.set, self.gate.clear
        self.unblock()

    async def handle(self, event: Event) -> None:
        await self.gate.wait()
        if self.down_at in ("all", event.topic):
            raise SinkUnavailable("the service is down")
        if "refuse" in event.headers:
            raise ValueError("no")
        self.found.append(event.topic)

    def refused(self, name: str, key: str | None = None) -> Claim:
        return claim(name, key, refuse=True)

    def arrived(self) -> list[str]:
        return self.found

    def go_down(self) -> None:
        self.down_at = "all"

    def go_down_at(self, name: str) -> None:
        self.down_at = name

    def come_back(self) -> None:
        self.down_at = None

    def dispose(self) -> None:
        pass


KITS: dict[str, Any] = {
    "null": NullKit,
    "file": FileKit,
    "stdout": StdoutKit,
    "memory": MemoryKit,
    "callable": CallableKit,
}


def sinks_that(*features: str) -> pytest.MarkDecorator:
    chosen = [name for name, kit in KITS.items() if kit.features >= set(features)]
    return pytest.mark.parametrize("kit", chosen, indirect=True)


every_sink = sinks_that()


@pytest.fixture
async def kit(request, tmp_path):
    made = KITS[request.param](tmp_path)
    yield made
    await made.sink.close()
    made.dispose()


@every_sink
async def test_each_claim_gets_its_outcome(kit):
    assert list(await kit.sink.deliver([claim("a"), claim("b", "k"), claim("c", "k")])) == [DELIVERED] * 3


@every_sink
async def test_empty_batch_gets_no_outcome(kit):
    assert list(await kit.sink.deliver([])) == []


@every_sink
async def test_sink_says_what_it_is(kit):
    assert isinstance(kit.sink.name, str)
    assert kit.sink.name
    assert isinstance(kit.sink.is_quick, bool)


@sinks_that("refuses")
async def test_outcomes_come_in_the_order_of_the_claims(kit):
    outcomes = await kit.sink.deliver(
        [claim("a"), kit.refused("b"), claim("c"), kit.refused("d"), claim("e")]
    )
    assert [isinstance(outcome, FAILED) for outcome in outcomes] == [False, True, False, True, False]


@sinks_that("arrives")
async def test_delivered_event_is_at_the_destination(kit):
    await kit.sink.open()
    assert await kit.sink.deliver([claim("a"), claim("b")]) == [DELIVERED, DELIVERED]
    assert sorted(kit.arrived()) == ["a", "b"]


@sinks_that("arrives")
async def test_event_delivered_again_arrives_again(kit):
    again = claim("a")
    await kit.sink.deliver([again])
    await kit.sink.deliver([again])
    assert kit.arrived() == ["a", "a"]


@sinks_that("arrives")
async def test_events_of_one_key_arrive_in_order(kit):
    await kit.sink.deliver([claim(f"{n:02}{key}", key) for n in range(20) for key in "xyz"])
    await kit.sink.deliver([claim(f"{n:02}{key}", key) for n in range(20, 40) for key in "xyz"])
    found = kit.arrived()
    for key in "xyz":
        assert [name for name in found if name.endswith(key)] == [f"{n:02}{key}" for n in range(40)]


@sinks_that("refuses")
async def test_after_a_failure_later_events_of_that_key_are_released_and_never_arrive(kit):
    batch = [claim("k1", "k"), kit.refused("k2", "k"), claim("k3", "k"), claim("k4", "k"), claim("j1", "j")]
    outcomes = await kit.sink.deliver(batch)
    assert isinstance(outcomes[1], FAILED)
    assert [outcomes[0], *outcomes[2:]] == [DELIVERED, RELEASED, RELEASED, DELIVERED]
    assert sorted(kit.arrived()) == ["j1", "k1"]


@sinks_that("refuses")
async def test_failure_of_an_event_without_a_key_holds_nobody_back(kit):
    outcomes = await kit.sink.deliver([kit.refused("a"), claim("b"), claim("c")])
    assert isinstance(outcomes[0], FAILED)
    assert outcomes[1:] == [DELIVERED, DELIVERED]
    assert sorted(kit.arrived()) == ["b", "c"]


@sinks_that("refuses")
async def test_answer_about_one_message_is_its_outcome_with_the_reason(kit):
    (outcome,) = await kit.sink.deliver([kit.refused("a")])
    assert isinstance(outcome, FAILED)
    assert outcome.error
    assert await kit.sink.deliver([claim("b")]) == [DELIVERED]


@sinks_that("goes down")
async def test_destination_that_is_down_raises_and_blames_no_message(kit):
    kit.go_down()
    with pytest.raises(SinkUnavailable) as outage:
        await kit.sink.deliver([claim("a", "k"), claim("b", "k"), claim("c")])
    assert str(outage.value)
    assert outage.value.outcomes in (None, [RELEASED] * 3)
    kit.come_back()
    assert kit.arrived() == []


@sinks_that("goes down")
async def test_destination_that_is_back_takes_events_again(kit):
    await kit.sink.deliver([claim("before")])
    assert kit.arrived() == ["before"]
    kit.go_down()
    with pytest.raises(SinkUnavailable):
        await kit.sink.deliver([claim("a")])
    kit.come_back()
    assert await kit.sink.deliver([claim("a")]) == [DELIVERED]
    assert kit.arrived() == ["before", "a"]


@sinks_that("is checked")
async def test_open_and_check_raise_while_the_destination_is_down(kit):
    await kit.sink.open()
    await kit.sink.check()
    kit.go_down()
    with pytest.raises(SinkUnavailable):
        await kit.sink.check()
    with pytest.raises(SinkUnavailable):
        await kit.sink.open()
    kit.come_back()
    await kit.sink.open()
    await kit.sink.check()


@sinks_that("goes down midway")
async def test_outcomes_won_before_an_outage_are_not_lost(kit):
    kit.go_down_at("k3")
    batch = [claim("k1", "k"), claim("k2", "k"), claim("k3", "k"), claim("k4", "k")]
    with pytest.raises(SinkUnavailable) as outage:
        await kit.sink.deliver(batch)
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
    assert kit.arrived() == ["k1", "k2"]


@sinks_that("arrives")
async def test_deliver_may_be_called_while_earlier_calls_run(kit):
    batches = [[claim(f"{n}{key}", key) for n in range(5)] for key in "abcdefgh"]
    results = await asyncio.gather(*(kit.sink.deliver(batch) for batch in batches))
    assert list(results) == [[DELIVERED] * 5] * 8
    found = kit.arrived()
    for key in "abcdefgh":
        assert [name for name in found if name.endswith(key)] == [f"{n}{key}" for n in range(5)]


@sinks_that("blocks")
async def test_slow_destination_does_not_stop_the_event_loop(kit):
    kit.block()
    delivery = asyncio.create_task(kit.sink.deliver([claim("a")]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not delivery.done()
    kit.unblock()
    assert await delivery == [DELIVERED]


@sinks_that("blocks")
async def test_cancellation_is_passed_on_and_nothing_arrives_after_it(kit):
    kit.block()
    delivery = asyncio.create_task(kit.sink.deliver([claim("a", "k")]))
    await asyncio.sleep(0)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    kit.unblock()
    assert await kit.sink.deliver([claim("b", "k")]) == [DELIVERED]
    assert kit.arrived() == ["b"]


@every_sink
async def test_close_may_come_first_and_twice(kit):
    await kit.sink.close()
    await kit.sink.open()
    await kit.sink.deliver([claim("a")])
    await kit.sink.close()
    await kit.sink.close()


@sinks_that("arrives")
async def test_everything_is_there_after_close(kit):
    await kit.sink.deliver([claim(f"{n}") for n in range(50)])
    await kit.sink.close()
    assert sorted(kit.arrived()) == sorted(str(n) for n in range(50))


# What the file and stdout sinks write


def payload_claim(payload: bytes, content_type: str = "application/json") -> Claim:
    return Claim(row=1, event=Event("t", payload, content_type=content_type), attempt=1)


@sinks_that("writes lines")
async def test_line_holds_the_whole_event(kit):
    given = {
        **dict.fromkeys(EVENT_FIELDS),
        "id": UUID("0190a8a0-7b1c-7000-8000-000000000001"),
        "type": "order.placed",
        "topic": "orders",
        "key": "42",
        "payload": b'{"total": 3}',
        "content_type": "application/json",
        "headers": {"tenant": "Grün"},
        "due_at": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "dedup_key": "once",
        "aggregate_type": "order",
        "aggregate_id": "42",
        "schema_version": "3",
        "correlation_id": "c1",
        "causation_id": "c0",
        "trace_id": "00-ab",
        "source": "shop",
        "max_attempts": 5,
        "created_at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    }
    await kit.sink.deliver([Claim(row=1, event=load_event(*given.values()), attempt=2)])
    text = kit.read()
    assert text.endswith(b"\n")
    assert json.loads(text) == {
        "id": "0190a8a0-7b1c-7000-8000-000000000001",
        "type": "order.placed",
        "topic": "orders",
        "key": "42",
        "payload": {"total": 3},
        "content_type": "application/json",
        "headers": {"tenant": "Grün"},
        "attempt": 2,
        "created_at": "2026-01-02T03:04:05.000006+00:00",
        "due_at": "2026-01-02T03:04:00+00:00",
        "dedup_key": "once",
        "aggregate_type": "order",
        "aggregate_id": "42",
        "schema_version": "3",
        "correlation_id": "c1",
        "causation_id": "c0",
        "trace_id": "00-ab",
        "source": "shop",
        "max_attempts": 5,
    }


@sinks_that("writes lines")
async def test_line_leaves_out_what_is_not_set(kit):
    await kit.sink.deliver([payload_claim(b"null")])
    keys = ["id", "type", "topic", "key", "payload", "content_type", "headers", "attempt"]
    assert list(json.loads(kit.read())) == keys


@sinks_that("writes lines")
@pytest.mark.parametrize(
    ("payload", "content_type", "base64"),
    [
        (b"\x00\xff", "application/octet-stream", "AP8="),
        (b"plain", "text/plain", "cGxhaW4="),
        (b"{broken", "application/json", "e2Jyb2tlbg=="),
        (b"", "application/json", ""),
        (b'"\xff"', "application/json", "Iv8i"),
    ],
)
async def test_payload_that_is_not_json_is_written_as_base64(kit, payload, content_type, base64):
    await kit.sink.deliver([payload_claim(payload, content_type)])
    line = json.loads(kit.read())
    assert line["payload_base64"] == base64
    assert "payload" not in line


@sinks_that("writes lines")
async def test_json_payload_stays_as_it_was_put_on_one_line(kit):
    await kit.sink.deliver(
        [payload_claim(b'{\n\r\n "n": 12345678901234567890123, "price": 1.10, "text": "a\\nb"\n}')]
    )
    text = kit.read()
    assert text.count(b"\n") == 1
    assert b'"n": 12345678901234567890123, "price": 1.10, "text": "a\\nb"' in text
    assert json.loads(text)["payload"] == {"n": 12345678901234567890123, "price": 1.1, "text": "a\nb"}


# FileSink


async def test_file_batch_is_one_write_and_on_disk_before_it_is_delivered(tmp_path, monkeypatch):
    sink = FileSink(tmp_path / "out")
    await sink.open()
    calls: list[str] = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: (calls.append("write"), write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), sync(fd))[1])
    await sink.deliver([claim(f"{n}") for n in range(100)])
    assert calls == ["write", "fsync"]
    await sink.close()


async def test_file_short_writes_are_continued(tmp_path, monkeypatch):
    sink = FileSink(tmp_path / "out")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    assert await sink.deliver([claim("a"), claim("b")]) == [DELIVERED, DELIVERED]
    await sink.close()
    assert names((tmp_path / "out").read_text()) == ["a", "b"]


async def test_file_line_is_not_glued_to_a_torn_one(tmp_path):
    path = tmp_path / "out"
    path.write_text('{"topic":"whole"}\n{"topic":"to')
    sink = FileSink(path)
    await sink.deliver([claim("a")])
    await sink.deliver([claim("b")])
    await sink.close()
    whole, torn, *ours = path.read_text().splitlines()
    assert (whole, torn) == ('{"topic":"whole"}', '{"topic":"to')
    assert names("\n".join(ours)) == ["a", "b"]


@pytest.mark.parametrize(
    "move", [lambda path: path.rename(path.with_name("old")), Path.unlink], ids=["renamed", "deleted"]
)
async def test_file_that_was_moved_away_is_made_anew(tmp_path, move):
    path = tmp_path / "out"
    sink = FileSink(path)
    await sink.deliver([claim("a")])
    move(path)
    await sink.deliver([claim("b")])
    await sink.close()
    assert names(path.read_text()) == ["b"]


async def test_file_path_is_fixed_when_the_sink_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = FileSink("out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await sink.deliver([claim("a")])
    await sink.close()
    assert names((tmp_path / "out").read_text()) == ["a"]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (
            lambda path: path.parent.rmdir(),
            r"cannot append to '.*/dir/out': the folder '.*/dir' does not exist; create it",
        ),
        (lambda path: path.mkdir(), r"cannot append to '.*/dir/out': Is a directory"),
        (os.mkfifo, r"'.*/dir/out' is not a regular file"),
    ],
    ids=["missing folder", "directory", "fifo"],
)
async def test_file_that_cannot_be_written_is_named_with_the_reason(tmp_path, prepare, reason):
    path = tmp_path / "dir" / "out"
    path.parent.mkdir()
    prepare(path)
    sink = FileSink(path, "orders")
    for attempt in (sink.open(), sink.check(), sink.deliver([claim("a")])):
        with pytest.raises(SinkUnavailable, match=rf"^Sink 'orders': {reason}$"):
            await attempt
    await sink.close()


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_file_on_a_full_disk_makes_the_sink_unavailable_and_loses_nothing(tmp_path):
    path = tmp_path / "out"
    sink = FileSink(path)
    await sink.deliver([claim("a")])
    with no_file_above(path.stat().st_size + 50), pytest.raises(SinkUnavailable, match="File too large"):
        await sink.deliver([claim("b"), claim("c")])
    assert await sink.deliver([claim("b"), claim("c")]) == [DELIVERED, DELIVERED]
    await sink.close()
    first, torn, *others = path.read_text().splitlines()
    assert len(torn) == 50
    assert names("\n".join([first, *others])) == ["a", "b", "c"]


async def test_file_that_another_process_keeps_locked_makes_the_sink_unavailable(tmp_path):
    path = tmp_path / "out"
    sink = FileSink(path, "orders", lock_timeout=timedelta(milliseconds=30))
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            SinkUnavailable, match=r"^Sink 'orders': another process has kept '.*' locked for 30ms$"
        ):
            await sink.deliver([claim("a")])
    assert await sink.deliver([claim("a")]) == [DELIVERED]
    await sink.close()


APPEND = """
import asyncio, sys
from pillarbox.event import Claim, Event
from pillarbox.sinks import open_sink

async def main(url, who):
    sink = open_sink(url)
    for batch in range(20):
        events = [Event("t", "x" * 3000, topic=f"{who}-{batch}-{n}") for n in range(10)]
        await sink.deliver([Claim(row=n, event=event, attempt=1) for n, event in enumerate(events)])
    await sink.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_file_takes_lines_of_several_processes_without_mixing_them(tmp_path):
    path = tmp_path / "out"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, f"file:{path}", who]) for who in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = names(path.read_text())
    for who in "abc":
        mine = [name for name in found if name.startswith(who)]
        assert mine == [f"{who}-{batch}-{n}" for batch in range(20) for n in range(10)]


# StdoutSink

PRINT = """
import asyncio, sys
from pillarbox.errors import SinkUnavailable
from pillarbox.event import Claim, Event
from pillarbox.sinks import open_sink

async def main():
    print("printed before")
    sink = open_sink("stdout:")
    await sink.deliver([Claim(row=n, event=Event("t", "Grüße", topic=f"{n}"), attempt=1) for n in range(3)])
    print("printed after")

try:
    asyncio.run(main())
except SinkUnavailable as error:
    sys.exit(f"unavailable: {error}")
"""


def test_stdout_of_a_process_has_the_lines_in_their_place():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, env=environment, check=True)
    first, *lines, last = found.stdout.decode().splitlines()
    assert (first, last) == ("printed before", "printed after")
    assert [(json.loads(line)["topic"], json.loads(line)["payload"]) for line in lines] == [
        ("0", "Grüße"),
        ("1", "Grüße"),
        ("2", "Grüße"),
    ]


def test_stdout_that_nobody_reads_makes_the_sink_unavailable():
    reader, writer = os.pipe()
    os.close(reader)
    script = PRINT.replace('print("printed before")', "pass")
    found = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (
        found.stderr.decode()
        == "unavailable: Sink 'stdout:': cannot write to standard output: [Errno 32] Broken pipe\n"
    )
    assert found.returncode == 1


async def test_stdout_replaced_by_a_test_is_written_too(capsys):
    await StdoutSink().deliver([claim("a")])
    assert names(capsys.readouterr().out) == ["a"]


async def test_stdout_line_torn_by_a_cancellation_is_ended_first(tmp_path):
    kit = StdoutKit(tmp_path)
    big = payload_claim(b'"' + b"x" * 500_000 + b'"')
    delivery = asyncio.create_task(kit.sink.deliver([big]))
    await asyncio.get_running_loop().run_in_executor(None, os.read, kit.reader, 1)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    kit.read()
    await kit.sink.deliver([claim("a")])
    assert kit.read().startswith(b'\n{"id":')
    kit.dispose()


# MemorySink


async def test_memory_fails_matching_events_as_often_as_told():
    sink = MemorySink()
    sink.fail(lambda event: event.topic == "a", Retry("busy"), times=2)
    batch = [claim("a"), claim("b")]
    outcomes = [await sink.deliver(batch) for _ in range(3)]
    assert outcomes == [[Retry("busy"), DELIVERED], [Retry("busy"), DELIVERED], [DELIVERED, DELIVERED]]
    assert [event.topic for event in sink.events] == ["b", "b", "a", "b"]
    assert sink.batches == [batch] * 3


async def test_memory_tells_when_a_delivery_is_held_back():
    sink = MemorySink()
    sink.block()
    delivery = asyncio.create_task(sink.deliver([claim("a")]))
    await sink.until_blocked()
    assert sink.claims == []
    sink.unblock()
    assert await delivery == [DELIVERED]


async def test_memory_passes_on_what_the_destination_asks_for():
    sink = MemorySink()
    sink.go_down("over quota", after=timedelta(minutes=1))
    with pytest.raises(SinkUnavailable, match="over quota") as outage:
        await sink.deliver([claim("a")])
    assert outage.value.after == timedelta(minutes=1)
