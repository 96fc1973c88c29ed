"""What a user writes passes pyright at its strictest: it compares protocols in its own way, and mypy does not tell.

The checker is basedpyright, which brings its own runtime and needs no network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import MetaData
from sqlalchemy.orm import Session

from pillarbox import Claim, Delivered, Event, Handlers, LimitedSink, Outbox, Outcome, Relay, RelayGroup, Sink, Store
from pillarbox import handler_relays, open_sink, open_store
from pillarbox.testing import MemorySink, MemoryStore

outbox = Outbox(MetaData())
handlers = Handlers()


def place(session: Session) -> None:
    outbox.put(session, Event("order.placed", {"id": 7}, key="7"))


@handlers.on("order.placed")
async def send_mail(event: Event) -> None:
    print(event.payload)


class Quiet(Sink):
    name = "quiet"

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [Delivered() for _ in claims]


def drive(store: Store) -> Relay:
    print(store.name, store.modes, store.in_flight, store.joins)
    return Relay(store, LimitedSink(Quiet(), rate=10), lease=timedelta(seconds=30))


def handle() -> RelayGroup:
    return handler_relays(outbox, handlers, url="sqlite:///shop.db")


async def main() -> None:
    await Relay(MemoryStore(), MemorySink()).run_once()
    await Relay(open_store("sqlite:///shop.db"), open_sink("stdout:")).run_once()
    await drive(MemoryStore()).run_once()
    await drive(open_store("sqlite:///shop.db")).run_once()


asyncio.run(main())
"""


def check(folder: Path, mode: str) -> list[str]:
    settings = {"typeCheckingMode": mode, "pythonVersion": "3.11", "include": ["."]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run([*command, "-p", str(folder)], cwd=folder, capture_output=True, text=True, check=False)
    report = json.loads(ran.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, ran
    return [f"{each['range']['start']['line']}: {each['message']}" for each in report["generalDiagnostics"]]


@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_program_of_a_user_passes_pyright(mode: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert check(tmp_path, mode) == []


def test_pyright_sees_a_wrong_argument(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("from pillarbox import Relay\n\nRelay(7, 8)\n")
    assert len(check(tmp_path, "standard")) == 2
