"""`pillarbox demo`: its numbers, its exit code, what it needs, and that it leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from typer.testing import CliRunner

from pillarbox.cli.commands import app
from pillarbox.demo.reader import Reader, Tail, percentile, take_lines
from pillarbox.demo.run import Report
from tests.acceptance.launcher import clean_env
from tests.acceptance.processes import read_lines, until

SMALL = ("--orders", "400", "--writers", "2")
LONGEST = 90.0
"""The demo takes half a minute at most; starting Python on a machine that has much else to do comes on top."""

HIDE_EXTRAS = """
from importlib.machinery import PathFinder

EXTRAS = {"greenlet", "aiosqlite", "asyncpg", "psycopg", "aiomysql", "pymysql", "opentelemetry", "msgspec"}
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in EXTRAS else find_spec(name, *rest)
"""


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    env = {**clean_env(), **options.pop("env", {})}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "pillarbox", "demo", *args], env=env, text=True, **pipes)


def run(*args: str, **options: Any) -> tuple[int, str, str]:
    with start(*args, **options) as process:
        out, err = process.communicate(timeout=LONGEST)
    return process.returncode, out, err


def test_core_alone_runs_it_and_nothing_is_lost(tmp_path: Path) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(HIDE_EXTRAS)
    env = clean_env()
    env["PYTHONPATH"] = os.pathsep.join([str(hiding), env["PYTHONPATH"]])
    missing = subprocess.run([sys.executable, "-c", "import greenlet"], env=env, capture_output=True, check=False)
    assert b"No module named 'greenlet'" in missing.stderr
    # Settings for a relay of the user's own, which would send the demo's events elsewhere.
    env |= {"PILLARBOX_STORE": "postgresql://nowhere/x", "PILLARBOX_TABLE": "mine", "PILLARBOX_LEASE": "1h"}
    (tmp_path / "pillarbox.toml").write_text("[store]\ntable = 'another'\n")
    kept = tmp_path / "kept"
    code, out, err = run(*SMALL, "--json", "--keep", str(kept), env=env, cwd=tmp_path)
    assert code == 0, err
    report = orjson.loads(out)
    assert report["committed"] + report["rolled_back"] == 400
    assert report["rolled_back"] > 0
    assert report["delivered"] == report["committed"]
    assert report["relay_kills"] in (1, 2), "a machine that is too busy skips the second one"
    assert {report[name] for name in ("lost", "waiting", "out_of_order", "rolled_back_delivered")} == {0}
    lines = read_lines(kept / "delivered.jsonl")
    assert len({line["payload"]["id"] for line in lines}) == report["delivered"]
    assert report["delivered_twice"] <= len(lines) - report["delivered"]
    assert report["undisturbed_p50"] > 0
    assert 0 < report["latency_p50"] <= report["latency_p99"] < report["seconds"]
    assert (kept / "shop.db").exists()
    assert err == ""


def test_story_is_told_line_by_line_into_a_pipe() -> None:
    code, out, err = run(*SMALL, "--seed", "2")
    assert (code, err) == (0, ""), out + err
    assert "A shop places 400 orders from 2 processes at once." in out
    kills = out.count("relay killed (SIGKILL) while it held ")
    assert kills in (1, 2), "a machine that is too busy skips the second one"
    assert " orders are delivered, half of them within " in out
    assert "the outbox is empty" in out
    rows = {line[:15].strip(): line[15:].split()[0] for line in out.splitlines() if line[15:].strip()}
    assert (rows["lost"], rows["out of order"]) == ("0", "0")
    assert rows["relay killed"] == {1: "once", 2: "twice"}[kills]
    assert rows["committed"] == rows["delivered"]
    assert "Committed means sent" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_ctrl_c_on_a_terminal_ends_every_process_and_removes_the_files(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    with start("--orders", "5000", env={"TMPDIR": str(tmp_path)}, **terminal, preexec_fn=_take_terminal) as process:
        os.close(theirs)
        shown = _read_until(mine, b" on their way")
        children = psutil.Process(process.pid).children()
        os.write(mine, b"\x03")
        shown += _read_until(mine, None)
        os.close(mine)
        assert process.wait(LONGEST) == 130, shown.decode()
    _assert_ended(children)
    assert list(tmp_path.iterdir()) == []
    assert b"Stopped; every process of the demo has ended." in shown
    assert b"Traceback" not in shown


def _take_terminal() -> None:
    # Whoever runs the tests in the background has it ignored; a process on a terminal has not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(terminal: int, wanted: bytes | None) -> bytes:
    """Read what a terminal shows until it shows this, or until nobody writes to it any more."""
    shown = b""
    with suppress(OSError):  # a terminal's way to say that
        while wanted is None or wanted not in shown:
            shown += os.read(terminal, 65536)
    return shown


def test_sigterm_ends_every_process_and_removes_the_files(tmp_path: Path) -> None:
    with start("--orders", "5000", env={"TMPDIR": str(tmp_path)}) as process:
        demo = psutil.Process(process.pid)
        until(lambda: len(demo.children()) == 5 or process.poll() is not None, "four writers and a relay")
        children = demo.children()
        process.terminate()
        _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 143, err
    _assert_ended(children)
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in err


def _assert_ended(children: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert (len(gone), alive) == (5, [])


def test_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("mine")
    code, out, err = run("--keep", str(tmp_path))
    assert (code, out) == (2, "")
    assert "expected a new or empty folder" in err
    assert (tmp_path / "shop.db").read_text() == "mine"


# -- the exit code, and the judge --------------------------------------------------------------------------

GOOD = {
    "committed": 90,
    "rolled_back": 10,
    "delivered": 90,
    "delivered_twice": 3,
    "waiting": 0,
    "lost": 0,
    "rolled_back_delivered": 0,
    "out_of_order": 0,
    "relay_kills": 2,
    "seconds": 2.0,
    "latency_p50": 0.02,
    "latency_p99": 2.5,
}


@pytest.mark.parametrize(
    ("bad", "code", "conclusion"),
    [
        ({}, 0, "Committed means sent"),
        ({"lost": 1}, 1, "This must not happen"),
        ({"out_of_order": 1}, 1, "This must not happen"),
        ({"rolled_back_delivered": 1}, 1, "This must not happen"),
        ({"waiting": 7}, 1, "7 orders still wait in the outbox"),
    ],
    ids=["good", "lost", "out of order", "rolled back", "waiting"],
)
def test_exit_code_says_whether_the_promise_was_kept(
    monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any], code: int, conclusion: str
) -> None:
    report = Report(**{**GOOD, **bad})
    monkeypatch.setattr(sys.modules["pillarbox.cli.demo"], "_run", lambda *args, **options: report)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == code
    assert conclusion in result.output
    assert "45/s" in result.output
    assert "20 ms" in result.output
    assert "2.5 s" in result.output


@pytest.fixture
def take() -> Callable[..., Reader]:
    def take(*numbers: int) -> Reader:
        reader = Reader()
        for number in numbers:
            order = {"id": f"order-{number}", "customer": "ann", "number": number, "placed_at": 100.0}
            reader.take(order, 100.5)
        return reader

    return take


@pytest.mark.parametrize(
    ("numbers", "delivered", "twice", "out_of_order"),
    [
        ((1, 2, 3), 3, 0, 0),
        ((1, 2, 1, 2, 3), 3, 2, 0),
        ((1, 3, 2), 3, 0, 1),
        ((3, 1, 2), 3, 0, 2),
        ((1, 3, 3, 3), 2, 1, 0),
    ],
)
def test_reader_judges_first_arrivals(
    take: Callable[..., Reader],
    numbers: tuple[int, ...],
    delivered: int,
    twice: int,
    out_of_order: int,
) -> None:
    reader = take(*numbers)
    assert (reader.delivered, reader.delivered_twice, reader.out_of_order) == (delivered, twice, out_of_order)
    assert reader.latencies == [0.5] * delivered


def test_tail_waits_for_the_end_of_a_line_and_skips_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "delivered.jsonl"
    tail, reader = Tail(file), Reader()
    assert tail.read() == []
    line = orjson.dumps({"payload": {"id": "1", "customer": "ann", "number": 1, "placed_at": 0.0}})
    with file.open("ab", buffering=0) as out:
        out.write(line[:20])
        assert tail.read() == []
        out.write(b"\n" + line)
        take_lines(reader, tail.read())
        assert reader.delivered == 0
        out.write(b"\n")
        take_lines(reader, tail.read())
    assert reader.arrivals == {"1": 1}


@pytest.mark.parametrize(("share", "expected"), [(0.5, 51.0), (0.99, 100.0), (0.0, 1.0), (1.0, 100.0)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile(map(float, range(1, 101)), share) == expected
    assert percentile([], share) is None
