"""The brokers that tests may kill: they come back on their ports, with what they confirmed."""

import socket
import ssl
import subprocess
from collections.abc import Callable
from urllib.parse import urlsplit

import psutil
import pytest

from tests.brokers import BROKERS, BrokerName, PrivateBroker
from tests.servers import certificates, server_url

GetBroker = Callable[[BrokerName], PrivateBroker]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def _is_listening(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("name", BROKERS)
def test_killed_broker_comes_back_on_the_same_ports(private_broker: GetBroker, name: BrokerName) -> None:
    broker = private_broker(name)
    urls = broker.urls
    assert all(_is_listening(url) for url in urls.values())
    assert broker.url != server_url(name)
    broker.kill()
    assert not any(_is_listening(url) for url in urls.values())
    assert private_broker(name) is broker
    assert broker.urls == urls
    assert all(_is_listening(url) for url in urls.values())


@pytest.mark.parametrize("name", BROKERS)
def test_paused_broker_keeps_its_port_and_resumes(private_broker: GetBroker, name: BrokerName) -> None:
    broker = private_broker(name)
    broker.pause()
    assert _status(broker) == psutil.STATUS_STOPPED
    assert _is_listening(broker.url)
    broker.resume()
    assert _status(broker) != psutil.STATUS_STOPPED
    broker.pause()
    assert _status(private_broker(name)) != psutil.STATUS_STOPPED


def _status(broker: PrivateBroker) -> str:
    assert broker.pid is not None
    return psutil.Process(broker.pid).status()


def test_killed_redis_has_what_it_confirmed(private_broker: GetBroker) -> None:
    redis = private_broker("redis")
    _run("redis-cli", "-e", "-u", redis.url, "XADD", "orders", "1-1", "body", "kept")
    redis.kill()
    redis.start()
    assert "kept" in _run("redis-cli", "-e", "-u", redis.url, "XRANGE", "orders", "-", "+")


def test_stopped_rabbitmq_has_its_queues_and_messages(private_broker: GetBroker) -> None:
    rabbitmq = private_broker("rabbitmq")
    login = ["--server=127.0.0.1", f"--port={urlsplit(rabbitmq.url).port}"]
    login += ["--username=pillarbox", "--password=pillarbox", "--vhost=/"]
    _run("amqp-declare-queue", *login, "--queue=orders", "--durable")
    _run("amqp-publish", *login, "--routing-key=orders", "--body=kept", "--persistent")
    rabbitmq.stop()
    rabbitmq.start()
    assert _run("amqp-get", *login, "--queue=orders") == "kept"


def test_stopped_mosquitto_has_what_it_retained(private_broker: GetBroker) -> None:
    mosquitto = private_broker("mosquitto")
    login = ["-h", "127.0.0.1", "-p", str(urlsplit(mosquitto.url).port), "-u", "pillarbox", "-P", "pillarbox"]
    _run("mosquitto_pub", *login, "-V", "5", "-q", "1", "-r", "-t", "orders", "-m", "kept")
    mosquitto.stop()
    mosquitto.start()
    assert _run("mosquitto_sub", *login, "-t", "orders", "-C", "1", "-W", "20") == "kept\n"


def test_mosquitto_denies_forbidden_topics() -> None:
    login = ["-h", "127.0.0.1", "-p", str(urlsplit(server_url("mosquitto")).port), "-u", "pillarbox", "-P", "pillarbox"]
    publish = ["mosquitto_pub", *login, "-V", "5", "-q", "1", "-m", "x", "-t"]
    denied = subprocess.run([*publish, "forbidden/orders"], capture_output=True, text=True, check=False, timeout=30)
    assert "Not authorized" in denied.stderr
    assert _run(*publish, "orders") == ""


def test_kafka_tls_asks_for_a_certificate_that_its_authority_signed() -> None:
    folder = certificates()
    address = server_url("kafka_tls").removeprefix("kafka://")
    listing = ["kcat", "-L", "-m", "20", "-b", address, "-X", "security.protocol=ssl"]
    for setting, file in {"ca": "ca.pem", "certificate": "client.pem", "key": "client.key"}.items():
        listing += ["-X", f"ssl.{setting}.location={folder / file}"]
    assert " 1 brokers:" in _run(*listing)
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "stranger.pem", folder / "stranger.key")
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
        pytest.raises(ssl.SSLError, match="ALERT"),
    ):
        connection.recv(1)


def test_redis_cluster_refuses_a_command_across_slots() -> None:
    command = ["redis-cli", "-e", "-c", "-u", server_url("redis_cluster"), "MSET", "a", "1", "b", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert "CROSSSLOT" in result.stdout + result.stderr
