"""Redis as Debian packages it.

The append-only file is on: Redis answers after it wrote there, so a killed server has all that it confirmed. It leaves
the syncing to the system: while a sync of its own runs on a busy disk, it answers first and writes up to 2 s later.
"""

from .broker import Broker
from .server import PASSWORD, USER


class RedisServer(Broker):
    name = "redis"
    programs = ("redis-server", "redis-cli")
    packages = ("redis-server", "redis-tools")
    scheme = "redis"
    tls_scheme = "rediss"
    path = "/0"

    def command(self) -> list[str]:
        settings = self.write_settings(
            f"""\
bind 127.0.0.1
port {self.port}
dir {self.data}
set-proc-title no
save ""
appendonly yes
appendfsync no
user default off
user {USER} on >{PASSWORD} ~* &* +@all
{self.more_settings()}"""
        )
        return ["redis-server", str(settings)]

    def more_settings(self) -> str:
        return f"""\
tls-port {self.port_for("tls")}
tls-ca-cert-file {self.certificates}/ca.pem
tls-cert-file {self.certificates}/server.pem
tls-key-file {self.certificates}/server.key
tls-auth-clients optional
"""

    def probe(self) -> list[str]:
        return self.client("ping")

    def client(self, *command: str) -> list[str]:
        return ["redis-cli", "-e", "--no-auth-warning", "-u", self.url, *command]
