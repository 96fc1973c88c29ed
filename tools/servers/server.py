"""One database server of our own: its folder, port and process.

A server keeps its data and its port from one start to the next. Only a process whose command line names the
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
START_SECONDS = 60
PROBE_SECONDS = 5
RECOVERY_SECONDS = 10
STOP_SECONDS = 60
# Below the range of ephemeral ports: a client cannot take the port while its server restarts.
PORTS = range(20000, 32000)

# Database servers refuse to run as root.
ACCOUNT = ("nobody", "nogroup")
DEMOTE = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"] if os.geteuid() == 0 else []


class Server:
    name: str
    scheme: str
    stop_signal = signal.SIGTERM

    def __init__(self, home: Path) -> None:
        self.folder = home / self.name
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self._pid_file = self.folder / "pid"
        self._port_file = self.folder / "port"
        self._ready_file = self.folder / "initialized"
        self._starting = threading.Lock()

    def install(self) -> None:
        """Make the server's programs available. Returns at once when they are."""
        raise NotImplementedError

    def initialize(self) -> None:
        """Create an empty database in `self.data`, which does not exist yet."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Return the command that runs the server in the foreground; it names `self.folder`."""
        raise NotImplementedError

    def probe(self) -> list[str]:
        """Return the command that runs `SELECT 1` as the test user, through the port."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"{self.scheme}://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def port(self) -> int:
        return int(self._port_file.read_text())

    def pid(self) -> int | None:
        """Return the id of the running server, or None."""
        try:
            pid = int(self._pid_file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        # A zombie has an empty command line.
        return pid if str(self.folder).encode() in command else None

    def is_answering(self) -> bool:
        if self.pid() is None:
            return False
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
        """Start the server and wait until it answers a query; a server that answers is left alone."""
        with self._starting:
            if not self.is_answering():
                self.install()
                self._prepare()
                self._launch()

    def stop(self) -> None:
        pid = self.pid()
        if pid is None:
            return
        os.kill(pid, self.stop_signal)
        deadline = time.monotonic() + STOP_SECONDS
        while self.pid() is not None:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} (pid {pid}) did not stop within {STOP_SECONDS} s.")
            time.sleep(0.05)
        self._pid_file.unlink()

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
                check=False,
            )
        if result.returncode != 0:
            raise self._failure(f"{Path(command[0]).name} failed with exit code {result.returncode}")

    def _prepare(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if DEMOTE:
            shutil.chown(self.folder, *ACCOUNT)
        if not self._ready_file.exists():
            shutil.rmtree(self.data, ignore_errors=True)
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
                raise self._failure(f"it did not answer a query within {START_SECONDS} s")
            time.sleep(0.05)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._choose_port()
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [*DEMOTE, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self._pid_file.write_text(f"{process.pid}\n")
        return process

    def _failure(self, what: str) -> ServerError:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return ServerError("\n    ".join([f"{what}. The end of {self.log}:", *tail]))

    def _choose_port(self) -> None:
        if not self._port_file.exists() or not _is_free(self.port):
            port = next(port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
            self._port_file.write_text(f"{port}\n")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
