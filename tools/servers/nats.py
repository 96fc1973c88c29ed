"""NATS with JetStream, three times: with passwords and nkeys, with TLS, and with a token.

A server has one way to listen and one way to log in, so each has its own process. It is Debian's server: it is
installed as the others are, where a newer one would need the test environment; what works on 2.9 works later.
"""

import json
import socket
import ssl

from .broker import Broker
from .server import PASSWORD, USER

TOKEN = "pillarbox"
NKEY = "UC3G5VZAFHX563JANHAXCY6KX23UGLTWJAFBCP6X6BIUQ4J75ISXJXJW"
NKEY_SEED = "SUAL5KFIFMDZEP2C6VWFQ4O6RWBAP2BZZCMQXRDS2RALMGMVC6UPQPYIKI"


class NatsServer(Broker):
    """It knows the user of the url, the owner of NKEY_SEED, and `limited`, who cannot publish to `forbidden.>`."""

    name = "nats"
    programs = ("nats-server",)
    packages = ("nats-server",)
    scheme = "nats"
    other_ports = ()

    def urls(self) -> dict[str, str]:
        return {self.name: self.url}

    def command(self) -> list[str]:
        settings = self.write_settings(
            f"""\
listen: 127.0.0.1:{self.port}
jetstream {{ store_dir: "{self.data}", max_mem: 256M, max_file: 2G }}
{self.login_settings()}"""
        )
        return ["/usr/sbin/nats-server", "-c", str(settings)]

    def login_settings(self) -> str:
        return f"""\
authorization {{
  users = [
    {{ user: {USER}, password: {PASSWORD} }}
    {{ nkey: {NKEY} }}
    {{ user: limited, password: limited, permissions: {{ publish: {{ deny: "forbidden.>" }} }} }}
  ]
}}
"""

    def login(self) -> dict[str, str]:
        return {"user": USER, "pass": PASSWORD}

    def answers(self) -> bool:
        # Debian has no client for NATS; its protocol is lines of text.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain:
                greeting = plain.recv(4096)
                with self.secure(plain) as connection:
                    connection.sendall(f"CONNECT {json.dumps({'verbose': False, **self.login()})}\r\nPING\r\n".encode())
                    return b'"jetstream":true' in greeting and connection.recv(4096).startswith(b"PONG")
        except OSError:
            return False

    def secure(self, connection: socket.socket) -> socket.socket:
        return connection


class NatsTlsServer(NatsServer):
    """It asks for a client certificate, too."""

    name = "nats-tls"
    scheme = "tls"

    def login_settings(self) -> str:
        return f"""\
authorization {{ user: {USER}, password: {PASSWORD} }}
tls {{
  ca_file: "{self.certificates}/ca.pem"
  cert_file: "{self.certificates}/server.pem"
  key_file: "{self.certificates}/server.key"
  verify: true
}}
"""

    def secure(self, connection: socket.socket) -> socket.socket:
        context = ssl.create_default_context(cafile=self.certificates / "ca.pem")
        context.load_cert_chain(self.certificates / "client.pem", self.certificates / "client.key")
        return context.wrap_socket(connection, server_hostname="127.0.0.1")


class NatsTokenServer(NatsServer):
    name = "nats-token"

    @property
    def url(self) -> str:
        return f"nats://{TOKEN}@127.0.0.1:{self.port}"

    def login_settings(self) -> str:
        return f"authorization {{ token: {TOKEN} }}\n"

    def login(self) -> dict[str, str]:
        return {"auth_token": TOKEN}
