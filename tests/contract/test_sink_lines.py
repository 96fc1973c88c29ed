"""What the file, stdout and memory sinks promise beyond the port."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import (
    DELIVERED,
    EVENT_FIELDS,
    Claim,
    Event,
    Retry,
    load_event,
)
from pillarbox.sinks.file import FileSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.sinks.stdout import StdoutSink
from tests.contract.sinks import StdoutKit, claim, names, sink_kit, sinks_that

# What the file and stdout sinks write

__all__ = ["sink_kit"]


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
