"""Database servers that a test may kill without disturbing anybody; made once a session, ended with it."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.servers import ServerName, server_url
from tools.servers.mariadb import SERVER, MariadbServer
from tools.servers.postgres import PostgresServer
from tools.servers.server import Server


class Private(Server):
    """A server whose processes are this one's children."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._children: list[subprocess.Popen[bytes]] = []

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = super()._spawn()
        self._children.append(process)
        return process

    def stop(self) -> None:
        super().stop()
        for process in self._children:
            process.wait()

    def kill(self) -> None:
        """End it and its sessions as a power cut would; `start` brings back what was stored."""
        pid = self.pid()
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)
        for process in self._children:
            process.wait()


class PrivatePostgres(Private, PostgresServer):
    pass


class PrivateMariadb(Private, MariadbServer):
    pass


@cache
def private_server(name: ServerName) -> Private:
    """Start a PostgreSQL or MariaDB of this session's own, or skip the test where its programs are missing."""
    server_url(name)  # skips where there is none
    is_installed = list(Path("/usr/lib/postgresql").glob("*/bin/initdb")) if name == "postgres" else SERVER.exists()
    if not is_installed:
        missing = f"the programs of {name} are not on this machine"
        if os.environ.get("PILLARBOX_REQUIRE_SERVICES") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    folder = tempfile.TemporaryDirectory(prefix="pillarbox-server-")
    Path(folder.name).chmod(0o755)
    server = (PrivatePostgres if name == "postgres" else PrivateMariadb)(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(_end, server)
    server.start()
    return server


def _end(server: Private) -> None:
    with suppress(ProcessLookupError):
        server.kill()
