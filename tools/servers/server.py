"""One server of our own: its folder, ports and process.

A server keeps its data and its ports from one start to the next. Only a process whose command line names the
server's own folder counts as that server, so a stale pid file never leads to a stranger being stopped.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from .errors import ServerError

USER = PASSWORD = DATABASE = "pillarbox"
# A first start of all servers at once, on two slow cores, takes most of a minute.
START_SECONDS = 120
PROBE_SECONDS = 10
PORT_SECONDS = 2
RECOVERY_SECONDS = 10
STOP_SECONDS = 60
# Below the range of ephemeral ports: a client cannot take the port while its server restarts.
PORTS = range(20000, 32000)

# Most servers refuse to run as root.
ACCOUNT = ("nobody", "nogroup")
DEMOTE = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"] if os.geteuid() == 0 else []


class Server:
    name: str
    scheme: str
    stop_signal = signal.SIGTERM
    other_ports: tuple[str, ...] = ()
    """What the server needs ports for besides its main one."""
    leftovers: tuple[str, ...] = ()
    """What a killed server leaves in its data folder and a new one would take for a running one."""
    dies_with_starter = False
    """Whether the server is killed when the thread that started it ends."""

    def __init__(self, home: Path) -> None:
        self.folder = home / self.name
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self._pid_file = self.folder / "pid"
        self._ready_file = self.folder / "initialized"
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """Make the server's programs available. Returns at once when they are."""
        raise NotImplementedError

    def initialize(self) -> None:
        """Create what the server keeps in `self.data`, which does not exist yet."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Return the command that runs the server in the foreground; it names a path in `self.folder`."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return what the server's environment has besides our own."""
        return {}

    def probe(self) -> list[str]:
        """Return the command that asks the server something as the test user, through the port."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"{self.scheme}://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{DATABASE}"

    def urls(self) -> dict[str, str]:
        """Return every url that tests can use, by the end of its name in the environment."""
        return {self.name: self.url}

    @property
    def port(self) -> int:
        return self.port_for("")

    def port_for(self, purpose: str) -> int:
        return int(self._port_file(purpose).read_text())

    def pid(self) -> int | None:
        """Return the id of the running server, or None."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        try:
            pid = int(self._pid_file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        # A zombie has an empty command line.
        return pid if f"{self.folder}/".encode() in command else None

    def is_answering(self) -> bool:
        return self.pid() is not None and self.answers()

    def answers(self) -> bool:
        try:
            result = subprocess.run(
                self.probe(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0

    def start(self) -> None:
        """Start the server and wait until it answers; a server that answers is left alone."""
        with self._starting:
            if not self.is_answering():
                self.install()
                self._prepare()
                self._launch()

    def stop(self) -> None:
        self._end(self.stop_signal)
        self._pid_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the server without giving it a chance to notice."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let the server keep its connections and do nothing. Returns when its last thread has stopped."""
        self._send(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_SECONDS
        while (pid := self.pid()) is not None and _is_active(pid):
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} (pid {pid}) did not pause within {STOP_SECONDS} s.")
            time.sleep(0.01)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def delete(self) -> None:
        """Delete what a stopped server kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str | Path, stdin: str = "") -> None:
        """Run one of the server's own tools as the user the server runs as."""
        with self.log.open("a") as log:
            result = subprocess.run(
                [*DEMOTE, *command],
                input=stdin,
                stdout=log,
                stderr=log,
                text=True,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                check=False,
            )
        if result.returncode != 0:
            raise self._failure(f"{Path(command[0]).name} failed with exit code {result.returncode}")

    def make_folder(self, folder: Path) -> None:
        """Make a folder that only the user the server runs as can enter."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if DEMOTE:
            shutil.chown(folder, *ACCOUNT)

    def _send(self, number: signal.Signals) -> int | None:
        pid = self.pid()
        if pid is not None:
            os.kill(pid, number)
        return pid

    def _end(self, number: signal.Signals) -> None:
        pid = self._send(number)
        if pid is not None:
            deadline = time.monotonic() + STOP_SECONDS
            # Another thread may already be starting the next one.
            while self.pid() == pid:
                if time.monotonic() > deadline:
                    raise ServerError(f"{self.name} (pid {pid}) did not stop within {STOP_SECONDS} s.")
                time.sleep(0.05)

    def _prepare(self) -> None:
        self.make_folder(self.folder)
        if not self._ready_file.exists():
            shutil.rmtree(self.data, ignore_errors=True)
            self._choose_ports()
            self.initialize()
            self._ready_file.touch()

    def _launch(self) -> None:
        # A killed server may leave sessions or a zombie for a moment, beside which the next one refuses to
        # start. It has left its pid file, too.
        was_killed = self._pid_file.exists()
        started_at = time.monotonic()
        process = None if self.pid() else self._spawn()
        while not self.is_answering():
            if process is not None and process.poll() is not None:
                if not was_killed or time.monotonic() > started_at + RECOVERY_SECONDS:
                    self._pid_file.unlink()
                    raise self._failure(f"it ended with exit code {process.returncode}")
                time.sleep(0.5)
                process = self._spawn()
            if time.monotonic() > started_at + START_SECONDS:
                raise self._failure(f"it did not answer within {START_SECONDS} s")
            time.sleep(0.05)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._choose_ports()
        for name in self.leftovers:
            (self.data / name).unlink(missing_ok=True)
        # After the change of user, which would undo it.
        tie = ["setpriv", "--pdeathsig", "KILL", "--"] if self.dies_with_starter else []
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*DEMOTE, *tie, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                start_new_session=True,
            )
        self._pid_file.write_text(f"{self._process.pid}\n")
        return self._process

    def _failure(self, what: str) -> ServerError:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return ServerError("\n    ".join([f"{what}. The end of {self.log}:", *tail]))

    def _port_file(self, purpose: str) -> Path:
        return self.folder / (f"port-{purpose}" if purpose else "port")

    def _choose_ports(self) -> None:
        for purpose in ("", *self.other_ports):
            self._choose_port(self._port_file(purpose))

    def _choose_port(self, file: Path) -> None:
        with _choosing:
            port = int(file.read_text()) if file.exists() else None
            if port is None or not _becomes_free(port):
                candidates = (port for port in random.sample(PORTS, len(PORTS)) if port not in _chosen)
                port = next(port for port in candidates if _is_free(port))
                file.write_text(f"{port}\n")
            _chosen.add(port)


# Servers that start at once each choose a port before any of them listens.
_choosing = threading.Lock()
_chosen: set[int] = set()


def _becomes_free(port: int) -> bool:
    """Return whether nobody listens there; the threads of a process that ended keep its port for a moment."""
    deadline = time.monotonic() + PORT_SECONDS
    while not _is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_active(pid: int) -> bool:
    try:
        states = [file.read_text().rsplit(")", 1)[1].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return True
    return any(state != "T" for state in states)
