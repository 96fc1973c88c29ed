"""MySQL from Debian sid, as the stable release has none.

It is not installed: it runs from a cache folder, on the C library of its own release.
"""

from functools import cached_property
from pathlib import Path

from . import packages
from .mariadb import SETTINGS, TEST_USER, MariadbServer
from .server import PASSWORD

SETUP = f"{TEST_USER}ALTER USER 'root'@'localhost' IDENTIFIED BY '{PASSWORD}';\n"


class MysqlServer(MariadbServer):
    name = "mysql"
    # It names the server's pid, which any thread of any program may have after the machine was started again.
    leftovers = ("server.sock.lock",)

    @cached_property
    def tree(self) -> Path:
        return packages.unpack("mysql-server-core", "mysql-client-core", release="sid")

    def install(self) -> None:
        _ = self.tree

    def initialize(self) -> None:
        self.run(*self._mysqld(), "--initialize-insecure", f"--datadir={self.data}")

    def command(self) -> list[str]:
        return [*self._mysqld(), *SETTINGS, "--mysqlx=OFF", *self.own_options(SETUP)]

    def client(self) -> list[str]:
        return self._program("usr/bin/mysql")

    def _mysqld(self) -> list[str]:
        return [
            *self._program("usr/sbin/mysqld"),
            "--no-defaults",
            f"--basedir={self.tree / 'usr'}",
            f"--lc-messages-dir={self.tree / 'usr/share/mysql'}",
            f"--character-sets-dir={self.tree / 'usr/share/mysql/charsets'}",
            f"--plugin-dir={self.tree / 'usr/lib/mysql/plugin'}",
            "--secure-file-priv=NULL",
        ]

    def _program(self, path: str) -> list[str]:
        libraries = next(self.tree.glob("usr/lib/*/libc.so.6")).parent
        loader = next(libraries.glob("ld-linux*.so.*"))
        search = f"{libraries}:{self.tree / 'usr/lib/mysql/private'}"
        return [str(loader), "--library-path", search, str(self.tree / path)]
