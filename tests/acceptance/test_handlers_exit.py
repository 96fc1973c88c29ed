"""A stop does not wait for calls that were given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from pillarbox import Event, Outbox
from tests.acceptance.processes import until

APPLICATION = """
import time
from pathlib import Path

from pillarbox import Handlers

handlers = Handlers()


@handlers.on("slow", timeout="200ms")
def sleep():
    Path("called").touch()
    time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="needs POSIX signals")
def test_stop_leaves_a_call_behind_that_takes_longer_than_its_timeout(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APPLICATION)
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(url)
    metadata = sa.MetaData()
    outbox = Outbox(metadata)
    metadata.create_all(engine)
    with engine.begin() as db:
        outbox.put(db, Event("slow", {}))
    engine.dispose()
    command = [sys.executable, "-m", "pillarbox", "handlers", "run", "--store", url, "--handlers", "shop:handlers"]
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, text=True
    )
    try:
        until((tmp_path / "called").exists, "the call")
        until(lambda: _is_retried(url), "the event's retry")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "Left behind: 1 call beyond the timeout." in told


def _is_retried(url: str) -> bool:
    engine = sa.create_engine(url)
    with engine.connect() as db:
        found = db.execute(sa.text("SELECT error FROM outbox WHERE sink = 'sleep'")).scalars().all()
    engine.dispose()
    return any(found)
