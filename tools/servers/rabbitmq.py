"""RabbitMQ as Debian packages it, with an Erlang port mapper (epmd) of its own.

By itself, RabbitMQ would start a port mapper that stays behind and serves every Erlang node of the machine.
"""

import os
from pathlib import Path

from .broker import Broker
from .server import PASSWORD, USER, Server

PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"
EPMD = "/usr/bin/epmd"
PROBE = "/usr/bin/amqp-publish"


class EpmdServer(Server):
    name = "rabbitmq-epmd"

    def install(self) -> None:
        pass

    def initialize(self) -> None:
        # Under a name in our folder, by which its process is known.
        link = self.folder / "epmd"
        link.unlink(missing_ok=True)
        link.symlink_to(EPMD)

    def command(self) -> list[str]:
        return [str(self.folder / "epmd"), "-address", "127.0.0.1", "-port", str(self.port)]

    def probe(self) -> list[str]:
        return [EPMD, "-port", str(self.port), "-names"]


class RabbitmqServer(Broker):
    name = "rabbitmq"
    programs = (PROGRAM, EPMD, PROBE)
    packages = ("rabbitmq-server", "amqp-tools")
    scheme = "amqp"
    tls_scheme = "amqps"
    path = "/"
    other_ports = ("tls", "distribution")

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.epmd = EpmdServer(home)

    def start(self) -> None:
        self.install()
        self.epmd.dies_with_starter = self.dies_with_starter
        self.epmd.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        self.epmd.stop()

    def delete(self) -> None:
        super().delete()
        self.epmd.delete()

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.data),
            "ERL_EPMD_PORT": str(self.epmd.port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_AFLAGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_NODENAME": "pillarbox@localhost",
            "RABBITMQ_DIST_PORT": str(self.port_for("distribution")),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_LOG_BASE": str(self.data),
            "RABBITMQ_LOGS": "-",
            "ERL_CRASH_DUMP_SECONDS": "0",
            # The script then becomes the server, rather than its parent.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def command(self) -> list[str]:
        (self.folder / "plugins").write_text("[].\n")
        self.write_settings(
            f"""\
listeners.tcp.1 = 127.0.0.1:{self.port}
listeners.ssl.1 = 127.0.0.1:{self.port_for("tls")}
ssl_options.cacertfile = {self.certificates}/ca.pem
ssl_options.certfile = {self.certificates}/server.pem
ssl_options.keyfile = {self.certificates}/server.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
default_user = {USER}
default_pass = {PASSWORD}
default_user_tags.administrator = true
disk_free_limit.absolute = 50MB
log.console.level = warning
"""
        )
        return [PROGRAM]

    def probe(self) -> list[str]:
        # Not by its url, where this client reads a virtual host "". No queue has this name: the message is dropped.
        login = ["--server=127.0.0.1", f"--port={self.port}", f"--username={USER}", f"--password={PASSWORD}"]
        return [PROBE, *login, "--vhost=/", "--routing-key=pillarbox.probe", "--body=probe"]
