"""PostgreSQL as Debian packages it, with logical decoding switched on and durability left as it is."""

import signal
from pathlib import Path

from . import packages
from .server import DATABASE, PASSWORD, USER, Server

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
}


class PostgresServer(Server):
    name = "postgres"
    scheme = "postgresql"
    # The fast shutdown: sessions are ended, not waited for.
    stop_signal = signal.SIGINT

    def install(self) -> None:
        if not _versions():
            packages.install("postgresql")

    def initialize(self) -> None:
        password_file = self.folder / "password"
        password_file.write_text(PASSWORD)
        self.run(
            _program("initdb"),
            f"--pgdata={self.data}",
            f"--username={USER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
        )
        single_user = [_program("postgres"), "--single", "-D", str(self.data), "postgres"]
        self.run(*single_user, stdin=f"CREATE DATABASE {DATABASE}\n")

    def command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        return [_program("postgres"), "-D", str(self.data), f"--port={self.port}", *settings]

    def probe(self) -> list[str]:
        return ["psql", "-X", "-c", "SELECT 1", self.url]


def _versions() -> list[Path]:
    """Return the program folders of the installed versions, the oldest first."""
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    return sorted((f for f in folders if (f / "postgres").exists()), key=lambda f: int(f.parent.name))


def _program(name: str) -> str:
    return str(_versions()[-1] / name)
