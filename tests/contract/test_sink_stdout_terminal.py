"""What the stdout sink writes to a terminal: the same JSON, without characters that would steer it."""

from __future__ import annotations

import json
import os
import pty
import tty
from collections.abc import Iterator
from typing import TextIO
from uuid import UUID

import pytest

from pillarbox.event import DELIVERED, EVENT_FIELDS, Claim, load_event
from pillarbox.sinks.stdout import StdoutSink

STEERING = "\x9b2J\x7f\u202egnp\u2066\u2028\ufeff"
PAYLOAD = f'{{"text":"a{STEERING}","n":1.000000000000000000001,\t"e":"é"}}'.encode()
# As another program may have written its row.
FIELDS = {
    **dict.fromkeys(EVENT_FIELDS),
    "id": UUID("0190a8a0-7b1c-7000-8000-000000000001"),
    "type": f"made{STEERING}",
    "topic": "orders",
    "key": f"k{STEERING}",
    "payload": PAYLOAD,
    "content_type": "application/json",
    "headers": {f"h{STEERING}": f"v{STEERING}"},
}
EVENT = load_event(*FIELDS.values())


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    screen, ours = pty.openpty()
    tty.setraw(ours)
    with os.fdopen(ours, "w") as stream:
        yield screen, stream
    os.close(screen)


def read_line(descriptor: int) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        found += os.read(descriptor, 65536)
    return found


async def test_terminal_gets_controls_as_escapes_of_the_same_meaning(terminal: tuple[int, TextIO]) -> None:
    screen, stream = terminal
    assert await StdoutSink(stream=stream).deliver([Claim(row=1, event=EVENT, attempt=1)]) == [DELIVERED]
    line = read_line(screen)
    text = line.decode().removesuffix("\n")
    assert text.replace("\t", "").isprintable()
    assert '"a\\u009b2J\\u007f\\u202egnp\\u2066\\u2028\\ufeff","n":1.000000000000000000001,' in text
    assert '"é"' in text
    found = json.loads(line)
    assert (found["type"], found["key"]) == (f"made{STEERING}", f"k{STEERING}")
    assert found["headers"] == {f"h{STEERING}": f"v{STEERING}"}
    assert found["payload"]["text"] == f"a{STEERING}"


async def test_pipe_gets_the_payload_as_it_was_put() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        await StdoutSink(stream=stream).deliver([Claim(row=1, event=EVENT, attempt=1)])
        line = read_line(reader)
    os.close(reader)
    assert PAYLOAD in line
