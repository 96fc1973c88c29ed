"""Mosquitto as Debian packages it: no anonymous client, and nobody may use the topics `forbidden/#`."""

from .broker import Broker
from .server import PASSWORD, USER


class MosquittoServer(Broker):
    name = "mosquitto"
    programs = ("mosquitto", "mosquitto_pub")
    packages = ("mosquitto", "mosquitto-clients")
    scheme = "mqtt"
    tls_scheme = "mqtts"

    def initialize(self) -> None:
        super().initialize()
        self.run("mosquitto_passwd", "-b", "-c", self.data / "passwords", USER, PASSWORD)

    def command(self) -> list[str]:
        rights = self.folder / "rights"
        rights.write_text(f"user {USER}\ntopic readwrite #\ntopic read $SYS/#\ntopic deny forbidden/#\n")
        # It saves when it ends. Saving at each change would not help a killed one, which acknowledges first, and makes
        # it slow. And it queues without limit for a subscriber that is away: past a limit it drops messages that it
        # acknowledged.
        settings = self.write_settings(
            f"""\
listener {self.port} 127.0.0.1
listener {self.port_for("tls")} 127.0.0.1
cafile {self.certificates}/ca.pem
certfile {self.certificates}/server.pem
keyfile {self.certificates}/server.key
allow_anonymous false
password_file {self.data}/passwords
acl_file {rights}
persistence true
persistence_location {self.data}/
max_queued_messages 0
log_dest stderr
"""
        )
        return ["/usr/sbin/mosquitto", "-c", str(settings)]

    def probe(self) -> list[str]:
        login = ["-h", "127.0.0.1", "-p", str(self.port), "-u", USER, "-P", PASSWORD]
        return ["mosquitto_pub", *login, "-V", "5", "-q", "1", "-t", "pillarbox/probe", "-n"]
