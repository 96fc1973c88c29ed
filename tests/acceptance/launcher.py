"""Starts the command line as processes without the second that every new interpreter spends on imports.

A launcher is a process that has imported the command line, has no threads and no event loop, and forks for each
command: the child runs `pillarbox.cli.main` exactly as `python -m pillarbox` does. Requests and answers are lines of
JSON on the launcher's standard input and output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

from tests.servers import ROOT


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

    def start(self, *args: str, cwd: Path, out: Path, err: Path) -> Command:
        """Run `pillarbox` with these arguments, its output going to files."""
        pid = self.ask({"args": args, "cwd": str(cwd), "out": str(out), "err": str(err)})
        return Command(self, pid)

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
                raise subprocess.TimeoutExpired(f"pillarbox ({self.pid})", timeout)
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


def _serve() -> None:
    import pillarbox.cli
    import pillarbox.stores.mysql
    import pillarbox.stores.postgres
    import pillarbox.stores.sqlite  # noqa: F401  only so that no child has to

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
    from pillarbox.cli import main

    os.chdir(request["cwd"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, flags if number else os.O_RDONLY, 0o666), number)
    sys.argv = ["pillarbox", *request["args"]]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    _serve()
