"""PgBouncer in transaction mode, in front of our PostgreSQL."""

from pathlib import Path

from . import packages
from .errors import ServerError
from .postgres import PostgresServer
from .server import PASSWORD, USER, Server

PROGRAM = Path("/usr/sbin/pgbouncer")


class PgbouncerServer(Server):
    name = "pgbouncer"
    scheme = "postgresql"

    def __init__(self, home: Path, postgres: PostgresServer) -> None:
        super().__init__(home)
        self.postgres = postgres
        self._config = self.folder / "pgbouncer.ini"

    def start(self) -> None:
        try:
            self.postgres.start()
        except ServerError:
            raise ServerError("it needs postgres, which did not start.") from None
        if self._config.exists() and f" port={self.postgres.port}\n" not in self._config.read_text():
            self.stop()
        super().start()

    def install(self) -> None:
        if not PROGRAM.exists():
            packages.install("pgbouncer")

    def initialize(self) -> None:
        pass

    def command(self) -> list[str]:
        users = self.folder / "users.txt"
        users.write_text(f'"{USER}" "{PASSWORD}"\n')
        self._config.write_text(
            f"""\
[databases]
* = host=127.0.0.1 port={self.postgres.port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
admin_users = {USER}
pool_mode = transaction
default_pool_size = 20
max_client_conn = 200
server_login_retry = 1
"""
        )
        return [str(PROGRAM), str(self._config)]

    def probe(self) -> list[str]:
        return ["psql", "-X", "-c", "SELECT 1", self.url]
