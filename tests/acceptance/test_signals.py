"""A signal while a command still loads its modules: a service ends regularly, another command with the usual code.

`-X importtime` names each module on standard error when it is loaded, so that a test knows the moment.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.launcher import clean_env

SERVICES = [
    ["relay", "--store", "sqlite:///shop.db", "--sink", "null:"],
    ["consume", "--source", "redis://127.0.0.1:1", "--group", "g"],
    ["handlers", "run"],
    ["sync", "run"],
]
OTHERS = [["status"], ["demo"], ["bench"]]
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


def stop_while_loading(args: list[str], number: signal.Signals, module: str, cwd: Path) -> tuple[int, str]:
    command = [sys.executable, "-X", "importtime", "-m", "pillarbox", *args]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=cwd, env=clean_env(), text=True, stdin=null, stdout=null, stderr=pipe
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith(f" {module}"):
                break
        process.send_signal(number)
        said = "".join(line for line in process.stderr if not line.startswith("import time:"))
    return process.returncode, said


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("args", SERVICES, ids=lambda args: args[0])
def test_service_stopped_while_it_loads_ends_regularly(args: list[str], number: signal.Signals, tmp_path: Path) -> None:
    assert stop_while_loading(args, number, "sqlalchemy.exc", tmp_path) == (0, "pillarbox: stopped before it began\n")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("args", OTHERS, ids=lambda args: args[0])
def test_other_command_stopped_while_it_loads_says_so(args: list[str], number: signal.Signals, tmp_path: Path) -> None:
    code, said = stop_while_loading(args, number, "typer", tmp_path)
    assert (code, said) == (128 + number, "pillarbox: stopped before it began\n")


def test_signal_that_is_to_be_ignored_stays_ignored(tmp_path: Path) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "from pillarbox.cli.signals import take_early; take_early(['relay']); "
        "signal.raise_signal(signal.SIGHUP); sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=clean_env(), check=False).returncode == 7


def test_interruption_is_obeyed_also_in_the_background_of_a_script(tmp_path: Path) -> None:
    # A shell without job control starts such processes with SIGINT ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "from pillarbox.cli.signals import take_early; take_early(['relay']); "
        "signal.raise_signal(signal.SIGINT); sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=clean_env(), check=False).returncode == 0


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_relay_stopped_while_it_waits_for_a_silent_database_ends_at_once(scheme: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = f"{scheme}://ann:pw@127.0.0.1:{server.getsockname()[1]}/shop"
        command = [sys.executable, "-m", "pillarbox", "relay", "--store", store, "--sink", "null:"]
        with subprocess.Popen(command, cwd=tmp_path, env=clean_env(), text=True, stderr=subprocess.PIPE) as process:
            connection, _ = server.accept()
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate()
            connection.close()
    assert process.returncode == 0
    # It would have said so once its connection was given up.
    assert "Relaying: " not in said
    assert said.endswith("Stopped: 0 delivered, 0 to retry, 0 dead.\n")
