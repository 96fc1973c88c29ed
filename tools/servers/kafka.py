"""Kafka from Maven Central, as one node that is controller and broker.

Anybody may do anything on the main port. With SASL (PLAIN or SCRAM) and with TLS, which asks for a client
certificate, clients have names that tests can make rules for: `pillarbox`, who stands above them, `limited`, and
`CN=pillarbox`.
"""

import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from . import packages
from .broker import Broker
from .server import PASSWORD, USER

VERSION = "4.0.0"
LIBRARIES = packages.jar_folder("kafka", VERSION)
POM = Path(__file__).parent / "kafka-pom.xml"
USERS = {USER: PASSWORD, "limited": "limited"}


class KafkaServer(Broker):
    name = "kafka"
    programs = ("java", "kcat")
    packages = ("default-jre-headless", "kcat")
    other_ports = ("sasl", "tls", "controller")

    def is_installed(self) -> bool:
        return super().is_installed() and LIBRARIES.exists()

    def install(self) -> None:
        if not super().is_installed():
            packages.install(*self.packages)
        packages.fetch_jars(POM, "kafka", VERSION)

    def initialize(self) -> None:
        super().initialize()
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        users = [
            f"--add-scram=SCRAM-SHA-{bits}=[name={name},password={word}]"
            for name, word in USERS.items()
            for bits in (256, 512)
        ]
        # In one word with its option: it may begin with a hyphen.
        identity = f"--cluster-id={cluster}"
        self.run(*self._java("kafka.tools.StorageTool"), "format", identity, "-c", self._settings(), *users)

    def command(self) -> list[str]:
        return [*self._java("kafka.Kafka"), str(self._settings())]

    @property
    def url(self) -> str:
        return f"kafka://127.0.0.1:{self.port}"

    def urls(self) -> dict[str, str]:
        others = {f"kafka_{purpose}": f"kafka://127.0.0.1:{self.port_for(purpose)}" for purpose in ("sasl", "tls")}
        return {"kafka": self.url, **others}

    def probe(self) -> list[str]:
        return ["/usr/bin/kcat", "-b", f"127.0.0.1:{self.port}", "-L", "-m", "5"]

    def _java(self, program: str) -> list[str]:
        # The compiler that starts fast: on few cores the better one is a burden for minutes.
        options = ["-Xms256m", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        log = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return ["/usr/bin/java", *options, log, "-cp", f"{LIBRARIES}/*", program]

    def _settings(self) -> Path:
        ports = {purpose: self.port_for(purpose) for purpose in ("", *self.other_ports)}
        keys = self.folder / "server-keys.pem"
        keys.write_text((self.certificates / "server.key").read_text() + (self.certificates / "server.pem").read_text())
        plain = " ".join(f'user_{name}="{word}"' for name, word in USERS.items())
        login = "org.apache.kafka.common.security"
        return self.write_settings(
            f"""\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{ports["controller"]}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listeners=PLAINTEXT://127.0.0.1:{ports[""]},SASL://127.0.0.1:{ports["sasl"]},\
TLS://127.0.0.1:{ports["tls"]},CONTROLLER://127.0.0.1:{ports["controller"]}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT,TLS:SSL,CONTROLLER:PLAINTEXT
log.dirs={self.data}

listener.name.sasl.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
listener.name.sasl.plain.sasl.jaas.config={login}.plain.PlainLoginModule required {plain};
listener.name.sasl.scram-sha-256.sasl.jaas.config={login}.scram.ScramLoginModule required;
listener.name.sasl.scram-sha-512.sasl.jaas.config={login}.scram.ScramLoginModule required;
listener.name.tls.ssl.client.auth=required
listener.name.tls.ssl.keystore.type=PEM
listener.name.tls.ssl.keystore.location={keys}
listener.name.tls.ssl.truststore.type=PEM
listener.name.tls.ssl.truststore.location={self.certificates}/ca.pem
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{USER}
allow.everyone.if.no.acl.found=true

auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
"""
        )
