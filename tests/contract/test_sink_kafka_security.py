"""Kafka's logins and TLS, on the listeners of a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED
from pillarbox.sinks import Sink, open_sink
from tests.brokers import PrivateBroker
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_kafka import make_kafka_sink, make_topic, read_topic


@pytest.fixture
def broker(private_broker: Callable[[str], PrivateBroker]) -> PrivateBroker:
    return private_broker("kafka")


@pytest.fixture
def topic(broker: PrivateBroker) -> str:
    place = make_place()
    make_topic(broker.url, place)
    return place


def login(broker: PrivateBroker, user: str = "pillarbox", password: str = "pillarbox") -> str:
    return broker.urls["kafka_sasl"].replace("//", f"//{user}:{password}@")


def files(broker: PrivateBroker) -> dict[str, str]:
    folder: Path = broker.certificates
    return {
        "tls_ca": str(folder / "ca.pem"),
        "tls_certificate": str(folder / "client.pem"),
        "tls_key": str(folder / "client.key"),
    }


async def arrives(broker: PrivateBroker, topic: str, url: str, **options: Any) -> bool:
    sink = open_sink(url, topic=topic, **options)
    await sink.open()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    return [message.body for message in read_topic(broker.url, topic)] == [b'{"name":"a"}']


async def is_up(sink: Sink) -> bool:
    try:
        await sink.check()
    except SinkUnavailable:
        return False
    return True


async def refusal(url: str, **options: Any) -> str:
    sink = open_sink(url, **options)
    with pytest.raises(SinkUnavailable) as refused:
        await sink.check()
    with pytest.raises(SinkUnavailable) as outage:
        await sink.deliver([named_claim("a")])
    assert outage.value.outcomes is not None
    await sink.close()
    return str(refused.value)


@pytest.mark.parametrize("options", [{}, {"sasl_mechanism": "PLAIN"}], ids=["default", "named"])
async def test_plain_login(broker, topic, options):
    assert await arrives(broker, topic, login(broker), **options)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_scram_login(broker, topic, mechanism):
    # Somebody whom the broker knows by this mechanism alone.
    kind = ScramMechanism.SCRAM_SHA_512 if mechanism.endswith("512") else ScramMechanism.SCRAM_SHA_256
    user = UserScramCredentialUpsertion(topic, ScramCredentialInfo(kind, 4096), b"a-password")
    admin = AdminClient({"bootstrap.servers": broker.url.removeprefix("kafka://")})
    for future in admin.alter_user_scram_credentials([user]).values():
        future.result(timeout=30)
    url = login(broker, topic, "a-password")
    sink = open_sink(url, sasl_mechanism=mechanism)
    async with asyncio.timeout(30):
        while not await is_up(sink):  # until the broker has heard of the user
            pass
    await sink.close()
    assert await arrives(broker, topic, url, sasl_mechanism=mechanism)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_wrong_password_is_an_outage_that_says_so(broker, mechanism):
    text = await refusal(login(broker, password="not-the-password"), sasl_mechanism=mechanism)
    assert "_AUTHENTICATION" in text
    assert "not-the-password" not in text


async def test_password_with_special_characters_is_decoded(broker):
    sink = make_kafka_sink(login(broker, password="a%40b%2Fc"))
    assert sink._settings.connection["sasl.password"] == "a@b/c"
    assert "a@b" not in sink.name


async def test_client_certificate(broker, topic):
    assert await arrives(broker, topic, broker.urls["kafka_tls"], **files(broker))


async def test_server_that_is_not_checked(broker, topic):
    options = {**files(broker), "tls_verify": False}
    del options["tls_ca"]
    assert await arrives(broker, topic, broker.urls["kafka_tls"], **options)


async def test_server_of_an_unknown_authority_is_an_outage(broker, topic):
    options = files(broker)
    del options["tls_ca"]
    text = await refusal(broker.urls["kafka_tls"], **options)
    # The client tells the same refusal twice, as an error of TLS and as one of the connection.
    assert "_SSL" in text or "_TRANSPORT" in text
    assert "certificate verify failed" in text


async def test_missing_client_certificate_is_an_outage(broker, topic):
    text = await refusal(broker.urls["kafka_tls"], tls_ca=files(broker)["tls_ca"])
    assert "_SSL" in text or "_TRANSPORT" in text


@pytest.mark.parametrize(
    ("url", "options", "protocol"),
    [
        ("kafka://a", {}, "PLAINTEXT"),
        ("kafka://a", {"tls": True}, "SSL"),
        ("kafka://a", {"tls_verify": False}, "SSL"),
        ("kafka://u:p@a", {}, "SASL_PLAINTEXT"),
        ("kafka://u:p@a", {"tls": True, "sasl_mechanism": "SCRAM-SHA-512"}, "SASL_SSL"),
        ("kafka://u:p@a?tls=yes", {}, "SASL_SSL"),
    ],
)
def test_protocol_follows_from_login_and_tls(url, options, protocol):
    assert make_kafka_sink(url, **options)._settings.connection["security.protocol"] == protocol
