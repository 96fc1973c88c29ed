"""How the HTTP sink keeps its secrets and its borders: signatures, private networks, proxies and TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from ipaddress import ip_address
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, Dead
from pillarbox.sinks import open_sink
from pillarbox.sinks.guard import Guard, is_public
from tests.contract.broker_kits import named_claim
from tests.contract.certificates import make_certificates
from tests.contract.http_server import Request, serve

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEXT_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"


async def outage_of(sink: Any) -> str:
    with pytest.raises(SinkUnavailable) as outage:
        await sink.deliver([named_claim("a")])
    await sink.close()
    return str(outage.value)


async def error_of(sink: Any) -> str:
    (outcome,) = await sink.deliver([named_claim("a")])
    await sink.close()
    return str(outcome.error)


# -- signatures ------------------------------------------------------------------------------------------------------


async def send_signed(secret: str | list[str], **options: Any) -> Request:
    async with serve() as server:
        sink = open_sink(f"http://127.0.0.1:{server.port}/", signing_secret=secret, **options)
        sent = named_claim("grüße", headers={"Webhook-Id": "forged"})
        assert await sink.deliver([sent]) == [DELIVERED]
        await sink.close()
    return server.requests[0]


async def test_signature_is_that_of_standard_webhooks():
    request = await send_signed(SECRET)
    assert Webhook(SECRET).verify(request.body, request.headers) == {"name": "grüße"}
    assert request.headers["webhook-id"] == request.headers["idempotency-key"] == request.headers["event-id"]
    assert request.headers["pillarbox-webhook-id"] == "forged"
    with pytest.raises(WebhookVerificationError):
        Webhook(NEXT_SECRET).verify(request.body, request.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(request.body + b" ", request.headers)


async def test_while_secrets_change_each_signs():
    request = await send_signed([SECRET, NEXT_SECRET])
    for secret in (SECRET, NEXT_SECRET):
        assert Webhook(secret).verify(request.body, request.headers) == {"name": "grüße"}
    assert request.headers["webhook-signature"].count("v1,") == 2


async def test_batch_is_signed_as_a_whole():
    request = await send_signed(SECRET, batch=5)
    (document,) = Webhook(SECRET).verify(request.body, request.headers)
    assert document["data"] == {"name": "grüße"}


async def test_signature_has_the_time_of_its_attempt(monkeypatch):
    sent = named_claim("a")
    async with serve() as server:
        sink = open_sink(f"http://127.0.0.1:{server.port}/", signing_secret=SECRET)
        for now in (1_900_000_000.7, 1_900_000_060.2):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            await sink.deliver([sent])
        await sink.close()
    first, second = (request.headers for request in server.requests)
    assert [first["webhook-timestamp"], second["webhook-timestamp"]] == ["1900000000", "1900000060"]
    assert first["webhook-id"] == second["webhook-id"]
    assert first["webhook-signature"] != second["webhook-signature"]


async def test_nothing_is_signed_unasked():
    async with serve() as server:
        sink = open_sink(f"http://127.0.0.1:{server.port}/")
        await sink.deliver([named_claim("a")])
        await sink.close()
    assert not [name for name in server.requests[0].headers if name.startswith("webhook")]


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_name_shows_neither_path_nor_query_nor_login():
    sink = open_sink("https://ann:hunter2@hooks.example:8443/services/hunter2?t=hunter2")
    assert sink.name == "https://hooks.example:8443/…"
    assert "hunter2" not in repr(sink)
    assert open_sink("http://hooks.example").name == "http://hooks.example"


async def test_secrets_are_neither_logged_nor_in_errors(caplog, unused_port):
    caplog.set_level(logging.DEBUG)

    def echo(request: Request) -> Any:
        return 400, {}, f"{request.headers['authorization']} and {request.headers['x-api-key']}".encode()

    async with serve(echo) as server:
        url = f"http://ann:hunter2@127.0.0.1:{server.port}/hunter2?token=hunter2"
        sink = open_sink(url, headers={"X-Api-Key": "hunter2-key"}, signing_secret=SECRET)
        (outcome,) = await sink.deliver([named_claim("a")])
        await sink.close()
    assert outcome == Dead("HTTP 400: *** and ***")
    down = await outage_of(open_sink(f"http://ann:hunter2@127.0.0.1:{unused_port}/hunter2"))
    assert "hunter2" not in down
    shown = "\n".join(record.getMessage() for record in caplog.records)
    assert "hunter2" not in shown


SECRET_PATHS = [
    ("/services/T000/hunter22", "Cannot POST ***"),
    ("/services/T000/hunter22?verify=s3same&wait=true", "Cannot POST ***"),
    ("/services/{type}/hunter22?verify=s3same", "Cannot POST /services/order.placed/***?verify=***"),
    ("/services/x%2Fhunter22/", "Cannot POST ***"),
    ("/?hunter22", "Cannot POST ***"),
]


@pytest.mark.parametrize("status", [500, 400, 503])
@pytest.mark.parametrize(("target", "expected"), SECRET_PATHS)
async def test_answer_that_repeats_the_address_does_not_give_its_secrets_away(status, target, expected):
    def echo(request: Request) -> Any:
        return status, {}, f"Cannot POST {request.target}".encode()

    async with serve(echo) as server:
        sink = open_sink(f"http://127.0.0.1:{server.port}{target}")
        if status == 503:
            assert await outage_of(sink) == f"Sink http://127.0.0.1:{server.port}/…: HTTP 503: {expected}"
        else:
            assert await error_of(sink) == f"HTTP {status}: {expected}"


@pytest.mark.parametrize("answer", ["hook hunter22 is gone", "no hook x/hunter22", '{"hook": "x%2Fhunter22"}'])
async def test_answer_that_repeats_a_part_of_the_address_does_not_give_it_away(answer):
    async with serve(lambda request: (500, {}, f"orders: {answer}".encode())) as server:
        sink = open_sink(f"http://127.0.0.1:{server.port}/orders/hunter22/x%2Fhunter22")
        error = await error_of(sink)
    assert error.startswith("HTTP 500: orders: ")
    assert "hunter22" not in error


async def test_secret_is_hidden_before_a_long_answer_is_cut():
    path = "/" + "hunter22" * 33
    async with serve(lambda request: (500, {}, path.encode() * 4)) as server:
        sink = open_sink(f"http://127.0.0.1:{server.port}{path}")
        error = await error_of(sink)
    assert error == "HTTP 500: " + "***" * 4


def test_address_with_an_at_in_its_path_shows_no_host():
    assert open_sink("https://hooks.example/T000/hunter22@hunter33/x").name == "https://…"


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


# -- private networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "127.0.0.1", "127.8.8.8", "0.0.0.0", "0.1.2.3"),
        *("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.9"),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.88.99.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1"),
        *("2001:db8::1", "100::1", "3fff::1", "4000::1", "::10.0.0.1", "::8.8.8.8", "2001:0:a00:1::1"),
        *("::ffff:10.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254"),
        *("2002:a00:1::1", "2002:7f00:1::1", "64:ff9b::a00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808"),
    ],
)
def test_address_is_not_public(address):
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "172.32.0.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "2002:808:808::1", "64:ff9b::808:808"],
)
def test_address_is_public(address):
    assert is_public(ip_address(address))


def test_allowed_network_is_an_exception_for_itself_alone():
    guard = Guard(["10.1.0.0/16", "fd00::/8"])
    found = [guard.permits(ip_address(each)) for each in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1", "10.2.0.1", "::1")]
    assert found == [True, True, True, False, False]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:169.254.169.254]", "10.0.0.1:8080"])
def test_private_address_in_the_url_is_refused_at_once(host):
    with pytest.raises(ConfigError, match="is not a public address and refuse_private is on; add its network to allow"):
        open_sink(f"http://{host}/x", refuse_private=True)


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f.0.0.1"])
async def test_name_of_a_private_address_is_refused_when_it_connects(host):
    async with serve() as server:
        sink = open_sink(f"http://{host}:{server.port}/x", refuse_private=True)
        with pytest.raises(SinkUnavailable, match="which is not public and refuse_private is on"):
            await sink.check()
        error = await outage_of(sink)
    assert "127.0.0.1, which is not public and refuse_private is on" in error
    assert server.connections == 0


async def test_allowed_network_can_be_reached():
    async with serve() as server:
        sink = open_sink(f"http://localhost:{server.port}/x", refuse_private=True, allow=["127.0.0.0/8"])
        await sink.check()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()
    assert server.requests[0].headers["host"] == f"localhost:{server.port}"


def resolve_to(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let every name resolve to these addresses, one list after the other and then the last; returns the names."""
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_name_that_changes_its_address_gains_nothing(monkeypatch):
    async with serve() as server, serve(host="127.0.0.2", port=server.port) as victim:
        asked = resolve_to(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
        sink = open_sink(f"http://hooks.example:{server.port}/", refuse_private=True, allow=["127.0.0.1/32"])
        # What was checked is what is connected to: asking again would lead to the other server.
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        assert asked == ["hooks.example"]
        await server.end_talks()
        assert "'hooks.example' is at 127.0.0.2, which is not public" in await outage_of(sink)
    assert len(server.requests) == 1
    assert victim.connections == 0


async def test_of_several_addresses_only_permitted_ones_are_used(monkeypatch):
    async with serve() as server, serve(host="127.0.0.2", port=server.port) as victim:
        # The first permitted one does not answer: the next is tried.
        resolve_to(monkeypatch, ["127.0.0.2", "127.0.0.9", "127.0.0.1"])
        allowed = ["127.0.0.1/32", "127.0.0.9/32"]
        sink = open_sink(f"http://hooks.example:{server.port}/", refuse_private=True, allow=allowed)
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()
    assert (server.connections, victim.connections) == (1, 0)


async def test_guarded_sink_says_when_nobody_answers(unused_port):
    sink = open_sink(f"http://localhost:{unused_port}/", refuse_private=True, allow=["127.0.0.0/8", "::1/128"])
    assert "ConnectError: All connection attempts failed" in await outage_of(sink)


async def test_guarded_resolution_has_a_limit(monkeypatch):
    async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    sink = open_sink("http://hooks.example/", refuse_private=True, connect_timeout="50ms")
    assert "ConnectTimeout: no connection to 'hooks.example' within 0.05 s" in await outage_of(sink)


# -- proxies ---------------------------------------------------------------------------------------------------------


async def test_proxy_that_was_asked_for_is_used(unused_port):
    async with serve() as proxy:
        sink = open_sink("http://hooks.example/a", proxy=f"http://ann:hunter2@127.0.0.1:{proxy.port}")
        await sink.check()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()
    assert [request.target for request in proxy.requests] == ["http://hooks.example/a"]
    assert proxy.requests[0].headers["proxy-authorization"] == "Basic YW5uOmh1bnRlcjI="
    down = open_sink("http://hooks.example/a", proxy=f"http://ann:hunter2@127.0.0.1:{unused_port}")
    with pytest.raises(SinkUnavailable, match="ConnectError"):
        await down.check()
    assert "hunter2" not in await outage_of(down)


async def test_proxy_of_the_environment_is_not_used(monkeypatch, unused_port):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port}")
    async with serve() as server:
        sink = open_sink(f"http://localhost:{server.port}/")
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server_tls(certificates):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


async def test_certificate_of_a_named_authority(server_tls, certificates):
    async with serve(tls=server_tls) as server:
        sink = open_sink(f"https://localhost:{server.port}/", tls_ca=str(certificates / "ca.pem"))
        await sink.open()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()


async def test_certificate_that_cannot_be_checked_is_an_outage(server_tls):
    async with serve(tls=server_tls) as server:
        sink = open_sink(f"https://localhost:{server.port}/")
        with pytest.raises(SinkUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await sink.open()
        assert "CERTIFICATE_VERIFY_FAILED" in await outage_of(sink)
        unchecked = open_sink(f"https://localhost:{server.port}/", tls_verify=False)
        assert await unchecked.deliver([named_claim("a")]) == [DELIVERED]
        await unchecked.close()


async def test_server_may_ask_for_a_certificate(server_tls, certificates):
    server_tls.verify_mode = ssl.CERT_REQUIRED
    ours = {
        "tls_certificate": str(certificates / "client.pem"),
        "tls_key": str(certificates / "client.key"),
        "tls_ca": str(certificates / "ca.pem"),
    }
    async with serve(tls=server_tls) as server:
        sink = open_sink(f"https://localhost:{server.port}/", **ours)
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()
        assert await outage_of(open_sink(f"https://localhost:{server.port}/", tls_ca=ours["tls_ca"]))


async def test_guarded_connection_checks_the_certificate_of_the_name(server_tls, certificates, monkeypatch):
    resolve_to(monkeypatch, ["127.0.0.1"])
    asked: list[str | None] = []
    server_tls.sni_callback = lambda connection, name, context: asked.append(name)
    ours = str(certificates / "ca.pem")
    guarded: dict[str, Any] = {"refuse_private": True, "allow": ["127.0.0.1/32"], "tls_ca": ours}
    async with serve(tls=server_tls) as server:
        sink = open_sink(f"https://hooks.example:{server.port}/", **guarded)
        await sink.check()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()
        other = open_sink(f"https://other.example:{server.port}/", **guarded)
        assert "Hostname mismatch, certificate is not valid for 'other.example'" in await outage_of(other)
    assert asked == ["hooks.example", "hooks.example", "other.example"]
    assert [request.headers["host"] for request in server.requests] == [f"hooks.example:{server.port}"]
