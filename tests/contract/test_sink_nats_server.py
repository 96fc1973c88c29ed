"""A NATS sink and its server: outages, logins, TLS, rights, streams that are made, and options."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.sinks import open_sink
from pillarbox.sinks.nats import NatsSink
from pillarbox.sinks.nats_options import Stream
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_nats import ask, make_stream, read_stream
from tests.contract.nats_server import AccountsServer, SignedServer
from tests.contract.test_sink_nats import make_sink, names_of, place, url, with_fields
from tests.servers import certificates, server_url
from tools.servers.nats import NKEY_SEED

__all__ = ["make_sink", "place", "url"]


@pytest.fixture
def broker(private_broker):
    """A server that the test may break, with a stream that takes `<broker.place>.>`."""
    made = private_broker("nats")
    made.place = make_place()
    make_stream(made.url, made.place, subjects=[f"{made.place}.>"])
    yield made
    made.resume()


@pytest.fixture(scope="module")
def accounts() -> Iterator[AccountsServer]:
    with run_server(AccountsServer) as server:
        yield server


@pytest.fixture(scope="module")
def signed() -> Iterator[SignedServer]:
    with run_server(SignedServer) as server:
        yield server


@contextmanager
def run_server(kind: Any) -> Iterator[Any]:
    server_url("nats")  # skips where there is none
    with tempfile.TemporaryDirectory(prefix="pillarbox-broker-") as folder:
        Path(folder).chmod(0o755)  # the server runs as nobody
        server = kind(Path(folder))
        server.dies_with_starter = True
        server.start()
        try:
            yield server
        finally:
            server.stop()


def login(server: AccountsServer, user: str) -> str:
    return server.url.replace("pillarbox:pillarbox@", f"{user}:{user}@")


# -- outages ---------------------------------------------------------------------------------------------------------


async def test_missing_acknowledgement_is_an_outage_and_nothing_is_sent_after_it(broker, make_sink):
    sink = make_sink(broker.url, subject=f"{broker.place}.x", timeout="500ms")
    await sink.open()
    broker.pause()
    claims = [with_fields(named_claim("a"), payload=b"%d" % n + b"x" * 400_000) for n in range(9)]
    with pytest.raises(SinkUnavailable, match=r"no acknowledgement within 0\.5 s") as outage:
        await sink.deliver(claims)
    assert outage.value.outcomes == [RELEASED] * 9
    assert asyncio.all_tasks() == {asyncio.current_task()}
    broker.resume()
    # What the machine had already taken from us may arrive: one window, no more.
    assert [body[:1] for body, _, _ in read_stream(broker.url, broker.place)] in ([], [b"0"], [b"0", b"1"])
    assert await sink.deliver(claims) == [DELIVERED] * 9
    assert [body[:1] for body, _, _ in read_stream(broker.url, broker.place)] == [b"%d" % n for n in range(9)]


async def test_lost_connection_leaves_nothing_that_could_send_later(broker, make_sink):
    sink = make_sink(broker.url, subject=f"{broker.place}.x", timeout="30s")
    await sink.open()
    broker.pause()
    sending = asyncio.create_task(sink.deliver([named_claim("a", "k"), named_claim("b", "k")]))
    await asyncio.sleep(0)
    await asyncio.to_thread(broker.kill)
    async with asyncio.timeout(10):
        with pytest.raises(SinkUnavailable) as outage:
            await sending
    assert outage.value.outcomes == [RELEASED, RELEASED]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    broker.start()
    assert names_of(broker.url, broker.place) == []
    assert await sink.deliver([named_claim("a", "k")]) == [DELIVERED]
    assert names_of(broker.url, broker.place) == ["a"]


async def test_cancelled_delivery_leaves_nothing_running(broker, make_sink):
    sink = make_sink(broker.url, subject=f"{broker.place}.x", timeout="30s")
    await sink.open()
    broker.pause()
    sending = asyncio.create_task(sink.deliver([named_claim("a")]))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert asyncio.all_tasks() == {asyncio.current_task()}
    broker.resume()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    assert names_of(broker.url, broker.place)[-1] == "b"


async def test_outcomes_won_before_the_outage_are_kept(broker, make_sink):
    sink = make_sink(broker.url, subject=f"{broker.place}.{{topic}}", timeout="500ms")
    await sink.open()
    # Two windows: the server is stopped between them, when the first is stored.
    first = with_fields(named_claim("a", "k", topic="x"), payload=b"x" * 1_040_000)
    second = named_claim("b", "k", topic="x")
    third = with_fields(named_claim("c", "j", topic="x"), payload=b"x" * 1_040_000)
    wait = sink._wait

    async def wait_and_pause(*given: Any) -> None:
        await wait(*given)
        broker.pause()

    sink._wait = wait_and_pause
    with pytest.raises(SinkUnavailable) as outage:
        await sink.deliver([first, second, third])
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED]


async def test_server_that_does_not_answer_the_check_is_down(broker, make_sink):
    sink = make_sink(broker.url, timeout="300ms")
    await sink.check()
    broker.pause()
    with pytest.raises(SinkUnavailable, match=r"no answer within 0\.3 s"):
        await sink.check()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    broker.resume()
    await sink.check()


async def test_other_servers_of_the_url_are_tried(url, place, make_sink):
    sink = make_sink(url.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1"), subject=f"{place}.x")
    for _ in range(4):
        await sink.open()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        await sink.close()


async def test_close_while_connecting_leaves_no_connection(url, make_sink):
    sink = make_sink(url)
    opening = asyncio.create_task(sink.open())
    await asyncio.sleep(0)
    await sink.close()
    with pytest.raises(SinkUnavailable, match="closed"):
        await opening
    assert sink._connection is None
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_refused_connection_says_why(make_sink):
    with pytest.raises(SinkUnavailable, match=r"Sink nats: .*(refused|Connect call failed)"):
        await make_sink("nats://127.0.0.1:1").open()


# -- rights and JetStream --------------------------------------------------------------------------------------------


async def test_account_without_jetstream_is_an_outage_not_a_bad_subject(accounts, make_sink):
    sink = make_sink(login(accounts, "poor"))
    with pytest.raises(SinkUnavailable, match="ServiceUnavailable"):
        await sink.open()
    with pytest.raises(SinkUnavailable) as outage:
        await sink.deliver([named_claim("a")])
    assert outage.value.outcomes == [RELEASED]


async def test_full_account_is_an_outage(accounts, make_sink):
    place = make_place()
    make_stream(login(accounts, "small"), place, subjects=[f"{place}.x"])
    sink = make_sink(login(accounts, "small"), subject=f"{place}.x")
    claims = [named_claim("a"), *(with_fields(named_claim("b"), payload=b"x" * 9_000) for _ in range(3))]
    with pytest.raises(SinkUnavailable, match="resource limits exceeded for account") as outage:
        await sink.deliver(claims)
    outcomes = list(outage.value.outcomes or [])
    assert [outcomes[0], outcomes[-1]] == [DELIVERED, RELEASED]


async def test_stream_that_exists_and_does_not_answer_is_an_outage(accounts, make_sink):
    place = make_place()
    make_stream(accounts.url, place, subjects=[f"{place}.x"])
    sink = make_sink(login(accounts, "guest"), subject=f"{place}.{{topic}}")
    with pytest.raises(SinkUnavailable, match=f"stream '{place}' of subject '{place}.x' does not answer now") as outage:
        await sink.deliver([named_claim("a", topic="nowhere"), named_claim("b", topic="x")])
    assert outage.value.outcomes == [Dead(f"No stream takes subject '{place}.nowhere'"), RELEASED]


async def test_user_who_may_not_ask_jetstream_learns_it_at_once(accounts, make_sink):
    sink = make_sink(login(accounts, "silent"), timeout="30s")
    async with asyncio.timeout(10):
        with pytest.raises(SinkUnavailable, match=r'permissions violation for publish to "\$js\.api\.info"'):
            await sink.open()
        with pytest.raises(SinkUnavailable, match=r'permissions violation for publish to "\$js\.api\.stream\.names"'):
            await sink.deliver([named_claim("a", topic=make_place())])


async def test_user_who_hears_no_acknowledgements_needs_an_inbox_prefix(accounts, make_sink):
    place = make_place()
    make_stream(accounts.url, place, subjects=[f"{place}.x"])
    async with asyncio.timeout(10):
        with pytest.raises(SinkUnavailable, match="see option inbox_prefix"):
            await make_sink(login(accounts, "deaf"), subject=f"{place}.x", timeout="30s").open()
    sink = make_sink(login(accounts, "deaf"), subject=f"{place}.x", inbox_prefix="_reply")
    await sink.open()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]


async def test_api_prefix_and_domain_say_where_jetstream_is_asked(url, place, make_sink):
    for options in ({"api_prefix": "$JS.elsewhere.API"}, {"domain": "elsewhere"}):
        with pytest.raises(SinkUnavailable, match="ServiceUnavailable"):
            await make_sink(url, **options).open()
    await make_sink(url, api_prefix="$JS.API").open()


# -- logins ----------------------------------------------------------------------------------------------------------


async def test_token_logs_in(make_sink):
    url = server_url("nats_token")
    await make_sink(url).open()
    with pytest.raises(SinkUnavailable, match="Authorization Violation") as refused:
        await make_sink(url.replace("//pillarbox@", "//wrong-token@"), name=None).open()
    assert "wrong-token" not in str(refused.value)


async def test_nkey_seed_logs_in(url, place, make_sink):
    anonymous = url.replace("pillarbox:pillarbox@", "")
    sink = make_sink(anonymous, nkey_seed=NKEY_SEED, subject=f"{place}.x")
    await sink.open()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    with pytest.raises(SinkUnavailable, match="Authorization Violation"):
        await make_sink(anonymous).open()


async def test_credentials_file_logs_in_and_is_read_at_each_login(signed, make_sink, tmp_path):
    anonymous = signed.url.replace("pillarbox:pillarbox@", "")
    path = signed.write_credentials(tmp_path / "user.creds")
    sink = make_sink(anonymous, credentials=str(path))
    await sink.open()
    await sink.close()
    path.write_text("replaced by nonsense\n")
    with pytest.raises(SinkUnavailable, match="expected a user's JWT and NKEY seed in"):
        await sink.open()
    signed.write_credentials(path)
    await sink.open()
    with pytest.raises(SinkUnavailable, match="Authorization Violation"):
        await make_sink(anonymous).open()


async def test_special_characters_of_a_login_are_escaped_in_the_url(make_sink):
    with pytest.raises(SinkUnavailable, match="Authorization Violation"):
        await make_sink(server_url("nats").replace(":pillarbox@", ":p%40ss%2Fw%3Ard@")).open()


async def test_secrets_are_not_shown(url):
    sink = open_sink(url.replace(":pillarbox@", ":hidden-password@"))
    with pytest.raises(SinkUnavailable) as refused:
        await sink.open()
    assert "hidden" not in sink.name + str(refused.value) + repr(sink) + repr(refused.value.__cause__)
    token = open_sink("nats://hidden-token@127.0.0.1:1")
    assert "hidden" not in token.name
    with pytest.raises(ConfigError) as wrong:
        open_sink("nats://127.0.0.1?nkey_seed=SUHIDDEN")
    assert "HIDDEN" not in str(wrong.value)


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tls() -> dict[str, str]:
    folder = certificates()
    return {
        "tls_ca": str(folder / "ca.pem"),
        "tls_certificate": str(folder / "client.pem"),
        "tls_key": str(folder / "client.key"),
    }


async def test_tls_with_a_client_certificate(make_sink, tls):
    sink = make_sink(server_url("nats_tls"), **tls)
    await sink.open()
    nowhere = make_place()
    assert await sink.deliver([named_claim("a", topic=nowhere)]) == [Dead(f"No stream takes subject '{nowhere}'")]


async def test_server_of_an_unknown_authority_is_refused(make_sink, tls):
    del tls["tls_ca"]
    with pytest.raises(SinkUnavailable, match="certificate verify failed"):
        await make_sink(server_url("nats_tls"), **tls).open()
    await make_sink(server_url("nats_tls"), **tls, tls_verify=False).open()


async def test_missing_client_certificate_is_an_outage(make_sink, tls):
    with pytest.raises(SinkUnavailable):
        await make_sink(server_url("nats_tls"), tls_ca=tls["tls_ca"]).open()


async def test_tls_url_says_no_secret_to_a_server_without_tls(make_sink, tls):
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.9.10","headers":true,"max_payload":1048576}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
            writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for login in ("user:hidden@", "hidden@", ""):
        with pytest.raises(SinkUnavailable, match="secure connection not available"):
            await make_sink(f"tls://{login}127.0.0.1:{port}", **tls).open()
    server.close()
    await server.wait_closed()
    assert b"hidden" not in heard


# -- streams that are made -------------------------------------------------------------------------------------------


async def test_stream_is_made_only_when_asked(url, make_sink):
    place = make_place()
    (outcome,) = await make_sink(url, subject=f"{place}.x").deliver([named_claim("a")])
    assert isinstance(outcome, Dead)
    sink = make_sink(
        url,
        subject=f"{place}.x",
        create="true",
        stream=place,
        subjects=f"{place}.x,{place}.y",
        storage="memory",
        replicas="1",
        max_age="1h",
        max_messages="1000",
        max_bytes="1000000",
        discard="new",
        duplicate_window="30s",
    )
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    config = ask(url, f"STREAM.INFO.{place}")["config"]
    expected = {
        "subjects": [f"{place}.x", f"{place}.y"],
        "storage": "memory",
        "num_replicas": 1,
        "max_age": 3600 * 10**9,
        "max_msgs": 1000,
        "max_bytes": 1_000_000,
        "discard": "new",
        "duplicate_window": 30 * 10**9,
    }
    assert {name: config[name] for name in expected} == expected
    ask(url, f"STREAM.DELETE.{place}")


async def test_stream_that_exists_is_left_as_it_is(url, place, make_sink):
    sink = make_sink(url, subject=f"{place}.x", create=True, stream=place, subjects=["other"], storage="memory")
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    config = ask(url, f"STREAM.INFO.{place}")["config"]
    assert (config["subjects"], config["storage"]) == ([f"{place}.>"], "file")


async def test_stream_is_on_disk_unless_said_otherwise(url):
    place = make_place()
    sink = NatsSink([url], name="own", subject=f"{place}.{{type}}", stream=Stream(place, [f"{place}.>"]))
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    config = ask(url, f"STREAM.INFO.{place}")["config"]
    assert (config["storage"], config["num_replicas"], config["discard"]) == ("file", 1, "old")
    ask(url, f"STREAM.DELETE.{place}")


async def test_stream_that_cannot_be_made_says_why(url, place, make_sink):
    sink = make_sink(url, create=True, stream=f"{place}-2", subjects=[f"{place}.x"])
    with pytest.raises(SinkUnavailable, match="subjects overlap with an existing stream"):
        await sink.open()


# -- made in Python, and options -------------------------------------------------------------------------------------


async def test_sink_takes_the_arguments_of_the_client(url, place):
    server = url.replace("pillarbox:pillarbox@", "")
    given = {"user": lambda: "pillarbox", "password": lambda: "pillarbox", "name": "shop"}
    sink = NatsSink([server], subject=f"{place}.x", connect=given, timeout=timedelta(seconds=3))
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    assert sink.name == "nats:"
    assert names_of(url, place) == ["a"]


async def test_timeout_is_read_from_the_options(url, make_sink):
    # Less than the relay holds its rows for.
    assert make_sink(url)._timeout == NatsSink([url])._timeout == 4
    assert make_sink(f"{url}?timeout=250ms")._timeout == 0.25


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("nats://", {}, r"expected nats://host:port"),
        ("nats://a/stream", {}, "expected nothing after the servers, got 'stream'"),
        ("nats://a", {"subject": "{tpoic}"}, "Did you mean 'topic'"),
        ("nats://a", {"timeout": "0s"}, "timeout: expected a duration above zero"),
        ("nats://a", {"id_suffix": "a\r\nNats-Rollup: all"}, "id_suffix: expected ASCII characters without blanks"),
        ("nats://a", {"id_suffix": 5}, "id_suffix: expected text, got 5"),
        ("nats://a", {"tls_ca": "x"}, "unknown option 'tls_ca'"),
        ("tls://a", {"tls_ca": "no-such-file"}, "there is no file 'no-such-file'"),
        ("nats://a", {"domain": "x", "api_prefix": "y"}, "expected domain or api_prefix, got both"),
        ("nats://u:p@a", {"nkey_seed": NKEY_SEED}, "expected one of a login in the url, nkey_seed and credentials"),
        ("nats://a", {"nkey_seed": "nonsense"}, "nkey_seed: expected the seed of a user"),
        ("nats://a", {"credentials": "no-such-file"}, "credentials: the file 'no-such-file' cannot be read"),
        ("nats://a", {"stream": "x"}, "stream: it is for a stream to be made; give create=true as well"),
        ("nats://a", {"max_age": "1h"}, "max_age: it is for a stream to be made; give create=true as well"),
        ("nats://a", {"create": True}, "create: give stream as well"),
        ("nats://a", {"create": True, "stream": "x"}, "create: give subjects as well"),
        ("nats://a", {"create": True, "storage": "tape"}, "storage: expected file or memory, got 'tape'"),
        ("nats://a", {"create": "perhaps"}, "create: expected true or false"),
    ],
)
def test_wrong_option_is_refused(url, options, expected):
    with pytest.raises(ConfigError, match=expected):
        open_sink(url, **options)
