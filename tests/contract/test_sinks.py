"""The obligations of the Sink port, one test each, over every sink that needs no server.

A kit puts a sink before a destination that the test can look into, break and block without asking the sink.
What a destination cannot do (nothing arrives at `null:`) its kit does not list among its features. What one
sink promises beyond the port stands below the suite.
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
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
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
from pillarbox.sinks import Sink, list_schemes, open_sink
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.file import FileSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.sinks.null import NullSink
from pillarbox.sinks.order import group_by_key, release_successors
from pillarbox.sinks.stdout import StdoutSink
from pillarbox.sinks.url import mask_url

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
        self.sink: Sink = FileSink(self.path, lock_timeout=timedelta(hours=1))

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
    outcomes = await kit.sink.deliver([claim("a"), kit.refused("b"), claim("c"), kit.refused("d"), claim("e")])
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
    await kit.sink.deliver([payload_claim(b'{\n\r\n "n": 12345678901234567890123, "price": 1.10, "text": "a\\nb"\n}')])
    text = kit.read()
    assert text.count(b"\n") == 1
    assert b'"n": 12345678901234567890123, "price": 1.10, "text": "a\\nb"' in text
    assert json.loads(text)["payload"] == {"n": 12345678901234567890123, "price": 1.1, "text": "a\nb"}


# FileSink


async def test_file_batch_is_one_write_and_on_disk_before_it_is_delivered(tmp_path, monkeypatch):
    sink = FileSink(tmp_path / "out")
    await sink.open()
    calls: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def noted(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        return noted

    monkeypatch.setattr(os, "write", note("write"))
    monkeypatch.setattr(os, "fsync", note("fsync"))
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


async def test_file_that_is_rotated_before_it_could_be_locked_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "out"
    sink = FileSink(path)
    await sink.deliver([claim("a")])
    flock = fcntl.flock

    def rotate_and_lock(descriptor: int, operation: int) -> None:
        if not path.with_name("old").exists():
            path.rename(path.with_name("old"))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", rotate_and_lock)
    await sink.deliver([claim("b")])
    await sink.close()
    assert names(path.with_name("old").read_text()) == ["a"]
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
        with pytest.raises(SinkUnavailable, match=r"^Sink 'orders': another process has kept '.*' locked for 30ms$"):
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
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
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


# CallableSink


async def outcome_of(function: Callable[..., Any], **options: Any) -> Outcome:
    sink = CallableSink(function, **options)
    (outcome,) = await sink.deliver([claim("a")])
    await sink.close()
    return outcome


async def test_function_may_be_sync_and_runs_in_a_thread_with_the_callers_context():
    tenant: ContextVar[str] = ContextVar("tenant")
    tenant.set("a")
    found: list[tuple[str, str, bool]] = []

    def handle(event: Event) -> None:
        found.append((event.topic, tenant.get(), threading.current_thread() is threading.main_thread()))

    assert await outcome_of(handle) == DELIVERED
    assert found == [("a", "a", False)]


def taking_event(event):
    return Dead(type(event).__name__)


def taking_claim(claim: Claim):
    return Dead(type(claim).__name__)


def taking_quoted_claim(claim: Claim, other: Unknown = None):  # type: ignore[name-defined]  # noqa: F821
    return Dead(type(claim).__name__)


class TakingClaim:
    async def __call__(self, claim: Claim):
        return Dead(type(claim).__name__)

    def method(self, claim: Claim):
        return Dead(type(claim).__name__)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (taking_event, "Event"),
        (lambda event: Dead(type(event).__name__), "Event"),
        (taking_claim, "Claim"),
        (taking_quoted_claim, "Claim"),
        (TakingClaim(), "Claim"),
        (TakingClaim().method, "Claim"),
        (partial(taking_claim), "Claim"),
    ],
    ids=[
        "bare",
        "lambda",
        "annotated",
        "annotated with names unknown at run time",
        "object",
        "method",
        "partial",
    ],
)
async def test_function_gets_the_claim_when_its_parameter_is_annotated_so(function, expected):
    assert await outcome_of(function) == Dead(expected)


@pytest.mark.parametrize(
    "outcome", [DELIVERED, RELEASED, Retry("later", timedelta(seconds=5)), Dead("never")], ids=repr
)
async def test_function_may_return_an_outcome(outcome: Outcome):
    async def handle(event: Event) -> Outcome:
        return outcome

    assert await outcome_of(handle) == outcome


async def test_function_may_hand_back_a_coroutine():
    async def handle(event: Event) -> Outcome:
        return Dead(event.topic)

    assert await outcome_of(lambda event: handle(event)) == Dead("a")


@pytest.mark.parametrize("result", [False, 0, "", [DELIVERED]])
async def test_function_that_returns_anything_else_has_not_delivered(result):
    outcome = await outcome_of(lambda event: result, name="orders")
    text = f"TypeError: Sink 'orders': expected None or an outcome from its function, got {result!r}"
    assert outcome == Retry(text)


async def test_function_that_raises_is_retried_with_the_exception():
    error = ValueError("bad\0 amount")

    async def handle(event: Event) -> None:
        raise error

    outcome = await outcome_of(handle)
    assert outcome == Retry("ValueError: bad amount")
    assert isinstance(outcome, Retry)
    assert outcome.cause is error


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StopIteration("x"), "RuntimeError: function raised StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError("mine"), "CancelledError: mine"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (ValueError("y" * 3000), "ValueError: " + "y" * 1987 + "…"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_no_exception_of_a_function_ends_the_relay(is_async, error, text):
    def fail(event: Event) -> None:
        raise error

    async def fail_async(event: Event) -> None:
        raise error

    if is_async and isinstance(error, StopIteration):
        text = "RuntimeError: coroutine raised StopIteration"
    assert await outcome_of(fail_async if is_async else fail) == Retry(text)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_keys_run_in_parallel_up_to_the_concurrency(is_async):
    running, most = 0, 0
    lock = threading.Lock()
    # Nobody goes on before three run at the same time.
    barrier, meeting = threading.Barrier(3, timeout=10), asyncio.Barrier(3)

    def count(step: int) -> None:
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)

    def handle(event: Event) -> None:
        count(1)
        barrier.wait()
        count(-1)

    async def handle_async(event: Event) -> None:
        count(1)
        await meeting.wait()
        count(-1)

    sink = CallableSink(handle_async if is_async else handle, concurrency=3)
    batches = [[claim(f"{n}", f"{n}") for n in range(5)], [claim(f"{n}") for n in range(4)]]
    results = await asyncio.gather(*(sink.deliver(batch) for batch in batches))
    assert list(results) == [[DELIVERED] * 5, [DELIVERED] * 4]
    assert most == 3
    await sink.close()


async def test_events_of_one_key_never_run_at_the_same_time():
    running: set[str | None] = set()

    async def handle(event: Event) -> None:
        assert event.key not in running
        running.add(event.key)
        for _ in range(3):
            await asyncio.sleep(0)
        running.remove(event.key)

    batch = [claim(f"{key}{n}", key) for n in range(5) for key in "abc"]
    assert await CallableSink(handle).deliver(batch) == [DELIVERED] * 15


async def test_calls_that_run_when_the_destination_goes_down_keep_their_outcomes():
    started, down = asyncio.Event(), asyncio.Event()

    async def handle(event: Event) -> None:
        if event.topic == "slow":
            started.set()
            await down.wait()
        elif event.topic == "down":
            await started.wait()
            down.set()
            raise SinkUnavailable("refused", after=timedelta(seconds=9))

    sink = CallableSink(handle, concurrency=2)
    with pytest.raises(SinkUnavailable, match=r"^refused$") as outage:
        await sink.deliver([claim("slow", "k"), claim("down"), claim("next", "k"), claim("later")])
    assert outage.value.outcomes == [DELIVERED, RELEASED, RELEASED, RELEASED]
    assert outage.value.after == timedelta(seconds=9)


async def test_async_function_is_cancelled_at_its_timeout():
    cancelled: list[str] = []

    async def handle(event: Event) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(event.topic)
            raise

    outcome = await outcome_of(handle, timeout=timedelta(milliseconds=5), name="orders")
    assert outcome == Retry("TimeoutError: Sink 'orders': no answer within 5ms")
    assert cancelled == ["a"]


async def test_sync_function_past_its_timeout_is_retried_but_keeps_its_place_until_it_ends():
    go_on = threading.Event()
    sink = CallableSink(
        lambda event: go_on.wait() and None, concurrency=1, timeout=timedelta(milliseconds=5), name="orders"
    )
    assert await sink.deliver([claim("a")]) == [Retry("TimeoutError: Sink 'orders': no answer within 5ms")]
    second = asyncio.create_task(sink.deliver([claim("b")]))
    # Ten times the timeout: it does not count while the second call waits for a place.
    await asyncio.wait([second], timeout=0.05)
    assert not second.done()
    go_on.set()
    assert await second == [DELIVERED]
    await sink.close()


async def test_cancellation_waits_for_a_sync_function_and_starts_no_other():
    started, go_on, seen = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def handle(event: Event) -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()
        seen.append(event.topic)

    sink = CallableSink(handle)
    delivery = asyncio.create_task(sink.deliver([claim("a", "k"), claim("b", "k")]))
    await started.wait()
    delivery.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not delivery.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert seen == ["a"]
    await sink.close()


async def test_second_cancellation_does_not_wait_for_a_sync_function():
    started, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def handle(event: Event) -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()

    sink = CallableSink(handle)
    delivery = asyncio.create_task(sink.deliver([claim("a")]))
    await started.wait()
    delivery.cancel()
    await asyncio.sleep(0)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert not go_on.is_set()
    go_on.set()
    await sink.close()


async def test_function_that_swallows_a_cancellation_does_not_stop_it():
    started, seen = asyncio.Event(), []

    async def handle(event: Event) -> None:
        seen.append(event.topic)
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    delivery = asyncio.create_task(CallableSink(handle).deliver([claim("a", "k"), claim("b", "k")]))
    await started.wait()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert seen == ["a"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: CallableSink(lambda: None, name="x"),
            r"Sink 'x': expected a function .* got one that takes \(\)",
        ),
        (
            lambda: CallableSink(lambda a, b: None, name="x"),
            r"Sink 'x': expected a function .* takes \(a, b\)",
        ),
        (
            lambda: CallableSink(print, name="x", concurrency=0),
            "Sink 'x' concurrency: expected a whole number",
        ),
        (
            lambda: CallableSink(print, name="x", timeout=timedelta(0)),
            "Sink 'x' timeout: expected a timedelta above zero",
        ),
    ],
)
def test_callable_sink_refuses_what_it_cannot_call(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_callable_sink_is_named_for_its_function():
    assert CallableSink(taking_event).name.endswith(".taking_event")


# Order in a batch


def test_claims_are_grouped_by_key_in_batch_order():
    batch = [claim("a", "x"), claim("b"), claim("c", "y"), claim("d", "x"), claim("e")]
    assert group_by_key(batch) == [[0, 3], [1], [2], [4]]


def test_everything_after_an_undelivered_claim_of_its_key_is_released():
    batch = [
        claim("1", "x"),
        claim("2", "y"),
        claim("3", "x"),
        claim("4", "x"),
        claim("5", "y"),
        claim("6"),
        claim("7"),
    ]
    outcomes: list[Outcome] = [DELIVERED, RELEASED, Retry("no"), DELIVERED, Dead("no"), Dead("no"), DELIVERED]
    expected = [DELIVERED, RELEASED, Retry("no"), RELEASED, RELEASED, Dead("no"), DELIVERED]
    assert release_successors(batch, outcomes) == expected


def test_wrong_number_of_outcomes_is_refused():
    with pytest.raises(ValueError, match="Expected one outcome for each of 2 claims, got 1"):
        release_successors([claim("a"), claim("b")], [DELIVERED])


# Sinks by URL


@pytest.mark.parametrize(
    ("url", "kind", "name"),
    [
        ("null:", NullSink, "null:"),
        ("null://", NullSink, "null://"),
        ("stdout:", StdoutSink, "stdout:"),
        ("file:out.jsonl", FileSink, "file:out.jsonl"),
        ("FILE:///tmp/out.jsonl", FileSink, "FILE:///tmp/out.jsonl"),
    ],
)
def test_url_opens_its_sink(url, kind, name):
    sink = open_sink(url)
    assert type(sink) is kind
    assert sink.name == name
    assert open_sink(url, name="orders").name == "orders"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:/tmp/a%20b%23.jsonl", "/tmp/a b#.jsonl"),
        ("file:///tmp/x", "/tmp/x"),
        ("file:/x?lock_timeout=5s", "/x"),
    ],
)
def test_file_url_names_its_path(url, path):
    sink = open_sink(url)
    assert isinstance(sink, FileSink)
    assert sink.path == Path(path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafak://b:9092", "expected a url with scheme null, stdout or file; got 'kafak://b:9092'"),
        (
            "flie:/tmp/x",
            "expected a url with scheme null, stdout or file; got 'flie:/tmp/x'. Did you mean 'file'?",
        ),
        ("orders.jsonl", "expected a url with scheme null, stdout or file; got 'orders.jsonl'"),
        ("", "expected a url with scheme null, stdout or file; got ''"),
        ("stdout:x", "expected 'stdout:' alone, got 'stdout:x'"),
        ("null://host", "expected 'null:' alone, got 'null://host'"),
        ("file:", "expected 'file:PATH' or 'file:///PATH', got 'file:'"),
        ("file://out/x", "expected 'file:PATH' or 'file:///PATH', got 'file://out/x'"),
        ("file:%00", "expected the path of a file, got '\\x00'"),
        ("file:/x#1", "expected a url without a fragment, got 'file:/x#1'; write '#' as '%23'"),
        ("file:/x\n", "expected a url without control characters and outer blanks, got 'file:/x\\n'"),
        (
            "file:/x?lock_timeot=1s",
            "unknown option 'lock_timeot'; scheme 'file' takes the options lock_timeout. Did you mean 'lock_timeout'?",
        ),
        ("null:?a=1", "unknown option 'a'; scheme 'null' takes no options."),
        (
            "file:/x?lock_timeout=1s&lock_timeout=2s",
            "option 'lock_timeout' is given twice; give it in the url or beside it, once",
        ),
        ("http://[bad", "the url 'http://[bad' cannot be read; escape special characters with %"),
    ],
)
def test_bad_url_is_refused_with_what_was_expected(url, message):
    with pytest.raises(ConfigError) as refusal:
        open_sink(url, name="orders")
    assert str(refusal.value) == f"Sink 'orders': {message}"


def test_option_beside_the_url_is_checked_too():
    with pytest.raises(ConfigError, match="unknown option 'colour'; scheme 'stdout' takes no options"):
        open_sink("stdout:", colour=True)
    with pytest.raises(ConfigError, match="Sink 'file:/x' lock_timeout: expected a duration with its unit"):
        open_sink("file:/x", lock_timeout=5)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://user:hunter2@host/vhost", "amqp://user:***@host/vhost"),
        ("amqp://user:hun/te?r@2@host", "amqp://user:***@host"),
        ("https://hunter2@host/x", "https://***@host/x"),
        ("redis://:hunter2@host", "redis://:***@host"),
        ("redis:user:hunter2@host", "redis:user:***@host"),
        ("kafka://b?sasl_password=hunter2&acks=all", "kafka://b?sasl_password=***&acks=all"),
        ("https://host/x?a=1&API_KEY=hunter2#f", "https://host/x?a=1&API_KEY=***#f"),
        ("nats://host:4222/subject", "nats://host:4222/subject"),
    ],
)
def test_secrets_of_a_url_are_masked(url, shown):
    assert mask_url(url) == shown
    with pytest.raises(ConfigError) as refusal:
        open_sink(url)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    "url", ["amqp://u:hunter2@[bad", "amqp://u:hunter2@host\n", "null://u:hunter2@x", "file://u:hunter2@x/y"]
)
def test_secrets_of_a_broken_url_are_masked(url):
    with pytest.raises(ConfigError) as refusal:
        open_sink(url)
    assert "hunter2" not in str(refusal.value)


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    info = tmp_path / "carrier_pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier-pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pillarbox.sinks]\npigeon = carrier_pigeon:open_pigeon\nowl = carrier_pigeon:missing\n"
    )
    (tmp_path / "carrier_pigeon.py").write_text(
        "from pillarbox.sinks.memory import MemorySink\n"
        "def open_pigeon(url):\n"
        "    url.refuse_options('ring')\n"
        "    return MemorySink(f'{url.name} to {url.location} with {url.options}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("carrier_pigeon", None)


def test_another_package_may_add_a_scheme(other_package):
    assert open_sink("pigeon://loft/3?ring=7", name="orders").name == "orders to //loft/3 with {'ring': '7'}"
    assert list_schemes() == ["null", "stdout", "file", "owl", "pigeon"]
    with pytest.raises(ConfigError, match=r"Did you mean 'pigeon'\?$"):
        open_sink("pidgeon://loft")


def test_adapter_that_cannot_be_loaded_is_named(other_package):
    with pytest.raises(ConfigError, match="the adapter 'carrier_pigeon:missing' of scheme 'owl' cannot be loaded"):
        open_sink("owl:")


def test_adapters_are_imported_only_when_asked_for():
    script = (
        "import sys; from pillarbox.sinks import open_sink; open_sink('null:');"
        "print([name for name in sys.modules if name.startswith('pillarbox.sinks.')])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pillarbox.sinks.null" in found.stdout
    assert "pillarbox.sinks.file" not in found.stdout
    assert "pillarbox.sinks.stdout" not in found.stdout
