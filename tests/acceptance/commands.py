"""A table of one's own, and the commands of the real command line on it, each a process.

A command that just runs to its end is forked from a launcher; one that a test talks to, signals or gives a terminal
is an interpreter of its own, with pipes.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import sqlalchemy as sa

from pillarbox import CallableSink, Counts, Dead, Event, Outbox, Outcome, Relay, open_store
from tests.acceptance.launcher import Launcher, clean_env

TIMEOUT = 60
COUNTED = ("new", "retrying", "held", "scheduled", "blocked", "delivered", "dead")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.out)

    @property
    def events(self) -> list[Any]:
        return [orjson.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]


def start(*args: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    env = {**clean_env(), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pillarbox", *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> Done:
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    return Done(process.returncode, out, err)


def end(process: subprocess.Popen[str]) -> None:
    """End a process that a failed test left behind."""
    if process.poll() is None:
        process.kill()
        process.communicate()


def run(launcher: Launcher, *args: str, cwd: Path, env: dict[str, str] | None = None) -> Done:
    """Run a command until it ends."""
    out, err = (cwd / f".{name}_{uuid4().hex[:8]}" for name in ("out", "err"))
    code = launcher.run(*args, cwd=cwd, out=out, err=err, env={"COLUMNS": "200", **(env or {})}, timeout=TIMEOUT)
    return Done(code, out.read_text(), err.read_text())


class Table:
    """An outbox table of one's own, and the commands on it; `run` runs one until it ends."""

    def __init__(self, url: str, folder: Path, run: Run) -> None:
        self.url = url
        self.name = f"cli_{uuid4().hex[:12]}"
        self.folder = folder
        self._run = run
        driver = {"postgresql:": "postgresql+psycopg:", "mysql:": "mysql+pymysql:"}
        scheme, rest = url.split("//", 1)
        self.engine = sa.create_engine(f"{driver.get(scheme, scheme)}//{rest}")
        self.outbox = Outbox(sa.MetaData(), table=self.name)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        process = start(*args, *self._options, cwd=self.folder, **options)
        self._processes.append(process)
        return process

    def run(self, *args: str, **options: Any) -> Done:
        return self._run(*args, *self._options, **options)

    @property
    def _options(self) -> list[str]:
        return ["--store", self.url, "--table", self.name]

    def create(self) -> "Table":
        self.outbox.table.metadata.create_all(self.engine)
        return self

    def put(self, *events: Event) -> None:
        with self.engine.begin() as connection:
            self.outbox.put(connection, *events)

    def relay(self, handle: Callable[[Event], Outcome], retention: timedelta | None = None) -> None:
        """Drain the table in this process."""

        async def drain() -> None:
            store = open_store(self.url, table=self.name, retention=retention)
            async with Relay(store, CallableSink(handle)) as relay:
                await relay.drain()

        asyncio.run(drain())

    def kill(self, *events: Event, error: str = "no such customer") -> None:
        """Put events and let them die."""
        self.put(*events)
        self.relay(lambda event: Dead(error))

    def counts(self) -> dict[str, int]:
        """What is in the table, looked at from this process."""

        async def count() -> Counts:
            store = open_store(self.url, table=self.name)
            try:
                return await store.counts()
            finally:
                await store.close()

        counts = asyncio.run(count())
        return {name: getattr(counts, name) for name in COUNTED if getattr(counts, name)}

    @property
    def is_mariadb(self) -> bool:
        with self.engine.connect() as connection:
            return bool(getattr(connection.dialect, "is_mariadb", False))

    def drop(self) -> None:
        for process in self._processes:
            end(process)
        self.outbox.table.metadata.drop_all(self.engine)
        self.engine.dispose()


def made(number: int, *, key: str | None = None, **options: Any) -> Event:
    return Event("order.made", {"number": number}, key=key, **options)
