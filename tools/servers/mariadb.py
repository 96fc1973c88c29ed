"""MariaDB as Debian packages it."""

from pathlib import Path

from . import packages
from .server import DATABASE, PASSWORD, USER, Server

SERVER = Path("/usr/sbin/mariadbd")
CLIENT = Path("/usr/bin/mariadb")
SETTINGS = ["--bind-address=127.0.0.1", "--max-connections=300", "--skip-name-resolve"]

TEST_USER = f"""\
CREATE DATABASE IF NOT EXISTS {DATABASE} CHARACTER SET utf8mb4;
CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION;
"""


class MariadbServer(Server):
    name = "mariadb"
    scheme = "mysql"

    def install(self) -> None:
        if not SERVER.exists() or not CLIENT.exists():
            packages.install("mariadb-server-core", "mariadb-client-core")

    def initialize(self) -> None:
        self.run(
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={self.data}",
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
        )

    def command(self) -> list[str]:
        return [str(SERVER), "--no-defaults", *SETTINGS, *self.own_options(TEST_USER)]

    def probe(self) -> list[str]:
        return [
            *self.client(),
            "--no-defaults",
            "--protocol=tcp",
            "--host=127.0.0.1",
            f"--port={self.port}",
            f"--user={USER}",
            f"--password={PASSWORD}",
            "--execute=SELECT 1",
        ]

    def client(self) -> list[str]:
        return [str(CLIENT)]

    def own_options(self, setup: str) -> list[str]:
        """Return the options that keep this server apart from others and set up its test user."""
        setup_file = self.folder / "setup.sql"
        setup_file.write_text(setup)
        return [
            f"--datadir={self.data}",
            f"--port={self.port}",
            f"--init-file={setup_file}",
            # Relative to the data folder: an absolute path may exceed what a socket's name can hold.
            "--socket=server.sock",
            f"--pid-file={self.data / 'server.pid'}",
        ]
