"""Database servers that a test may kill without disturbing anybody; made once a session, ended with it."""

from __future__ import annotations

import atexit
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.servers import ServerName, miss, server_url
from tools.servers.mariadb import SERVER, MariadbServer
from tools.servers.postgres import PostgresServer
from tools.servers.server import Server


def private_server(name: ServerName) -> Server:
    """A running PostgreSQL or MariaDB of this session's own, or skip the test where its programs are missing."""
    server = _make_server(name)
    # The last test may have left it dead.
    server.start()
    return server


@cache
def _make_server(name: ServerName) -> Server:
    server_url(name)  # skips where there is none
    is_installed = list(Path("/usr/lib/postgresql").glob("*/bin/initdb")) if name == "postgres" else SERVER.exists()
    if not is_installed:
        miss(f"the programs of {name} are not on this machine")
    folder = tempfile.TemporaryDirectory(prefix="pillarbox-server-")
    Path(folder.name).chmod(0o755)
    server = (PostgresServer if name == "postgres" else MariadbServer)(Path(folder.name))
    server.dies_with_starter = True
    atexit.register(folder.cleanup)
    atexit.register(_end, server)
    return server


def _end(server: Server) -> None:
    with suppress(ProcessLookupError):
        server.kill()
