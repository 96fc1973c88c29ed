"""Runs what a page tells its reader to run: `pillarbox …` and `python …`, each in a process of its own.

As `launcher` does for the command line, a process that has imported everything forks for each command:
a page full of commands would else spend its time on imports.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from tests.acceptance.launcher import Command, Launcher, clean_env
from tests.servers import ROOT

TIMEOUT = 60
IMPORTED = (
    *("pillarbox.cli", "pillarbox.stores.postgres", "pillarbox.stores.sqlite"),
    *("rich.console", "rich.table", "sqlalchemy.ext.asyncio", "sqlalchemy.orm"),
)


class Terminal(Launcher):
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.docs_launcher"],
            cwd=ROOT,
            env=clean_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def type(self, command: str, *, cwd: Path, env: dict[str, str]) -> str:
        """Run a command line until it ends; what it prints, on standard output and standard error."""
        program, *args = shlex.split(command)
        assert program in ("pillarbox", "python"), f"expected pillarbox or python, got {command!r}"
        out = cwd / ".printed"
        out.unlink(missing_ok=True)
        pid = self.ask({"program": program, "args": args, "cwd": str(cwd), "env": env, "out": str(out)})
        Command(self, pid).wait(TIMEOUT)
        return out.read_text()


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
    output = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(descriptor, number)
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


def _call(program: str, args: list[str]) -> None:
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
