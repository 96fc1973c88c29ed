"""Brokers of this test session's own, which a test may kill, stop or pause without disturbing anybody."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.servers import miss, server_url
from tools.servers.broker import Broker
from tools.servers.kafka import KafkaServer
from tools.servers.mosquitto import MosquittoServer
from tools.servers.nats import NatsServer
from tools.servers.rabbitmq import RabbitmqServer
from tools.servers.redis import RedisServer
from tools.servers.server import DEMOTE

BrokerName = Literal["kafka", "nats", "rabbitmq", "redis", "mosquitto"]
BROKERS: dict[BrokerName, type[Broker]] = {
    "kafka": KafkaServer,
    "nats": NatsServer,
    "rabbitmq": RabbitmqServer,
    "redis": RedisServer,
    "mosquitto": MosquittoServer,
}


class PrivateBroker:
    """One broker on a port of its own. Whatever happens to it, it starts again on that port with its data."""

    def __init__(self, server: Broker) -> None:
        self._server = server
        # A test run that is killed leaves no broker behind.
        server.dies_with_starter = True

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def urls(self) -> dict[str, str]:
        """Every url, by the end of its name in the environment: `kafka`, `kafka_sasl`, `kafka_tls`."""
        return self._server.urls()

    @property
    def pid(self) -> int | None:
        return self._server.pid()

    @property
    def certificates(self) -> Path:
        """The certificates of this broker: other ones than those of the shared brokers."""
        return self._server.certificates

    def start(self) -> None:
        """Return once the broker answers; one that answers is left alone."""
        self.resume()
        self._server.start()

    def stop(self) -> None:
        """End the broker in order."""
        self.resume()
        self._server.stop()

    def kill(self) -> None:
        """End the broker with SIGKILL, and return when it is gone."""
        self._server.kill()

    def pause(self) -> None:
        """Let the broker keep its connections and do nothing."""
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def run(self, *command: str) -> str:
        """Run one of the broker's own tools as the broker's user, and return what it prints."""
        environment = {**os.environ, **self._server.environment()}
        result = subprocess.run([*DEMOTE, *command], env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command[0]} failed: {result.stdout}{result.stderr}"
        return result.stdout


@pytest.fixture(scope="session")
def private_broker() -> Iterator[Callable[[BrokerName], PrivateBroker]]:
    """Return a function that gives the session's own broker of a kind, running, as the last test may not have left it.

    Kafka and RabbitMQ take seconds to start: there is one broker a kind, made when a test first asks for it. It keeps
    what tests put there, so they give their topics and queues names of their own.
    """
    brokers: dict[BrokerName, PrivateBroker] = {}
    with ExitStack() as cleanup:

        def get(name: BrokerName) -> PrivateBroker:
            server_url(name)  # skips where there is none
            if name not in brokers:
                _require_programs(name)
                brokers[name] = cleanup.enter_context(_broker(name))
            brokers[name].start()
            return brokers[name]

        yield get


def _require_programs(name: BrokerName) -> None:
    """The shared broker may run elsewhere; this one needs its programs here."""
    if not BROKERS[name](Path()).is_installed():
        miss(f"the programs of {name} are not on this machine: tools/services start {name}")


@contextmanager
def _broker(name: BrokerName) -> Iterator[PrivateBroker]:
    with tempfile.TemporaryDirectory(prefix="pillarbox-broker-") as folder:
        Path(folder).chmod(0o755)
        broker = PrivateBroker(BROKERS[name](Path(folder)))
        try:
            yield broker
        finally:
            broker.stop()
