"""Starts `pillarbox …` and `python …` as processes without the second that every new interpreter spends on imports.

A launcher is a process that has imported what the commands need, has no threads and no event loop, and forks for each
command: the child runs `pillarbox.cli.main` exactly as `python -m pillarbox` does. Requests and answers are lines of
JSON on the launcher's standard input and output.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import orjson
import psutil

from tests.servers import ROOT

IMPORTED = (
    *("pillarbox.cli.commands", "pillarbox.stores.mysql", "pillarbox.stores.postgres", "pillarbox.stores.sqlite"),
    *("rich.console", "rich.table", "sqlalchemy.ext.asyncio", "sqlalchemy.orm"),
    *("asyncpg", "psycopg", "pillarbox.inbox.consuming", "pillarbox.sinks.kafka", "pillarbox.sources.kafka"),
    *("pillarbox.sync.service", "pillarbox.sync.writers.sqlite"),
)

Program = Literal["pillarbox", "python"]


def clean_env() -> dict[str, str]:
    """The environment without settings of Pillarbox, in which this tree's package comes first."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
    return {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])}


class Launcher:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.launcher"],
            cwd=ROOT,
            env=clean_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(
        self,
        *args: str,
        cwd: Path,
        out: Path,
        err: Path,
        env: Mapping[str, str] = MappingProxyType({}),
        program: Program = "pillarbox",
    ) -> Command:
        """Run a program with these arguments and these more variables, its output going to files."""
        where = {"cwd": str(cwd), "out": str(out), "err": str(err)}
        pid = self.ask({"program": program, "args": args, "env": dict(env), **where})
        return Command(self, pid)

    def run(self, *args: str, timeout: float = 60.0, **options: Any) -> int:
        """Run a program until it ends; returns its exit code."""
        command = self.start(*args, **options)
        try:
            return command.wait(timeout)
        finally:
            command.kill()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(request) + b"\n")
        self._process.stdin.flush()
        return orjson.loads(self._process.stdout.readline())

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


class Command:
    """A command that was started, like a `subprocess.Popen`."""

    def __init__(self, launcher: Launcher, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._launcher = launcher

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._launcher.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        # The launcher keeps the pid of a dead child until it is polled, so that no stranger gets the signal.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def is_stopped(self) -> bool:
        return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    @property
    def open_files(self) -> set[str]:
        return {each.path for each in psutil.Process(self.pid).open_files()}


# -- in the launcher ---------------------------------------------------------------------------------------


def _serve() -> None:
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        answer = _poll(request["poll"]) if "poll" in request else _fork(request)
        os.write(1, orjson.dumps(answer) + b"\n")


def _poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _run(request)
        finally:
            os._exit(code)
    return pid


def _run(request: dict[str, Any]) -> int:
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, flags if number else os.O_RDONLY, 0o666), number)
    code: Any = 0
    try:
        _call(request["program"], request["args"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)


def _call(program: Program, args: list[str]) -> None:
    from pillarbox.cli import main

    sys.path.insert(0, os.getcwd())
    if program == "pillarbox":
        sys.argv = ["pillarbox", *args]
        main()
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
