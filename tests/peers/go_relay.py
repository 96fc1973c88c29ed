"""The real Open Outbox Relay beside us: the program that the variable PILLARBOX_GO_RELAY names.

It is built from its own repository with Go 1.25 or newer. Where there is none, what it wrote once is compared instead:
the expected values of these tests are recorded from it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

VARIABLE: Final = "PILLARBOX_GO_RELAY"
_SETTINGS: Final = {
    "SERVER_PORT": "127.0.0.1:0",
    "POLL_INTERVAL": "20ms",
    "BATCH_SIZE": "50",
    # Its own is 10 ms, too short on a busy machine.
    "KAFKA_CONNECTION_TIMEOUT": "10s",
    "PUBLISHER_CONNECT_RETRY_INTERVAL": "100ms",
    # Nothing leaves the machine.
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
}


def find_go_relay() -> Path:
    """The program, or skip the test."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"the Open Outbox Relay is not on this machine: {VARIABLE} names its program")
    program = Path(given)
    assert program.is_file(), f"{VARIABLE}: there is no file {given}"
    return program


@contextmanager
def running_go_relay(folder: Path, *, store: str, table: str, publisher: str, url: str) -> Iterator[None]:
    """Run it on a table of PostgreSQL until the block ends; fails when it has ended by itself."""
    settings: Mapping[str, str] = {
        **_SETTINGS,
        "STORAGE_URL": store,
        "STORAGE_TABLE_NAME": table,
        "PUBLISHER_TYPE": publisher,
        "PUBLISHER_URL": url,
    }
    log = folder / "go-relay.log"
    with log.open("wb") as output:
        # The folder has no .env, which it would read.
        process = subprocess.Popen([find_go_relay()], cwd=folder, env=settings, stdout=output, stderr=output)
    try:
        yield
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    finally:
        process.terminate()
        process.wait(timeout=30)
