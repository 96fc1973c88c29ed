"""What is particular to the Redis sink: its options, and what each answer of the server means."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID, uuid4

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Event, load_event
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.redis import RedisSink
from tests.brokers import PrivateBroker
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_redis import CuttingProxy, StallingServer, Wire
from tests.servers import certificates, server_url
from tools.servers.redis import RedisServer


@pytest.fixture
def place() -> str:
    return make_place()


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire(server_url("redis")) as connection:
        yield connection


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Sink]]:
    """Make sinks that are closed afterwards."""
    made: list[Sink] = []

    def make_sink(url: str | None = None, **options: Any) -> Sink:
        made.append(open_sink(url or server_url("redis"), **options))
        return made[-1]

    yield make_sink
    for sink in made:
        await sink.close()


@pytest.fixture
def private(private_broker: Callable[[str], PrivateBroker]) -> PrivateBroker:
    return private_broker("redis")


@pytest.fixture
def own_redis(private) -> Iterator[PrivateBroker]:
    """One more server, for this test alone."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-broker-") as folder:
        Path(folder).chmod(0o755)
        broker = PrivateBroker(RedisServer(Path(folder)))
        broker.start()
        yield broker
        broker.kill()


def read_entries(wire: Wire, stream: str) -> list[dict[str, bytes]]:
    found = wire.call("XRANGE", stream, "-", "+")
    return [{name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)} for _, flat in found]


def payloads(wire: Wire, stream: str) -> list[bytes]:
    return [fields["payload"] for fields in read_entries(wire, stream)]


def body(name: str) -> bytes:
    return b'{"name":"' + name.encode() + b'"}'


async def outage(sink: Sink, *claims: Claim) -> SinkUnavailable:
    with pytest.raises(SinkUnavailable) as raised:
        await sink.deliver(claims or [named_claim("a")])
    return raised.value


# -- options ---------------------------------------------------------------------------------------------------------


async def test_stream_is_the_topic_unless_a_template_says_otherwise(make, wire, place):
    claim = named_claim("a", topic=f"{place}-topic", headers={"tenant": "acme"})
    assert await make().deliver([claim]) == [DELIVERED]
    assert await make(stream=f"{place}:{{headers.tenant}}:{{type}}").deliver([claim]) == [DELIVERED]
    assert payloads(wire, f"{place}-topic") == [body("a")]
    assert payloads(wire, f"{place}:acme:order.placed") == [body("a")]


async def test_event_without_what_the_stream_needs_is_dead_and_its_neighbours_arrive(make, wire, place):
    sink = make(stream=f"{place}:{{key}}")
    lacking, good = await sink.deliver([named_claim("a"), named_claim("b", "k")])
    assert isinstance(lacking, Dead)
    assert "needs key" in lacking.error
    assert good == DELIVERED
    assert payloads(wire, f"{place}:k") == [body("b")]


async def test_maxlen_trims_the_stream_approximately(make, wire, place):
    sink = make(stream=place, maxlen="150")
    for _ in range(4):
        await sink.deliver([named_claim(str(number)) for number in range(250)])
    # Redis drops whole nodes of 100 entries.
    assert 150 <= int(wire.call("XLEN", place)) < 350


async def test_without_create_a_missing_stream_is_not_made_and_its_events_are_dead(make, wire, place):
    sink = make(stream=f"{place}:{{type}}", create=False)
    wire.call("XADD", f"{place}:there", "*", "payload", "first")
    outcomes = await sink.deliver(
        [named_claim("a", "k", type="missing"), named_claim("b", "k", type="there"), named_claim("c", type="there")]
    )
    assert outcomes == [Dead(f"Stream '{place}:missing' does not exist"), RELEASED, DELIVERED]
    assert wire.call("EXISTS", f"{place}:missing") == b"0"
    assert payloads(wire, f"{place}:there")[-1] == body("c")


async def test_without_create_maxlen_holds_as_well(make, wire, place):
    sink = make(stream=place, create="no", maxlen=100)
    wire.call("XADD", place, "*", "payload", "first")
    for _ in range(4):
        await sink.deliver([named_claim(str(number)) for number in range(100)])
    assert 100 <= int(wire.call("XLEN", place)) < 300


async def test_pubsub_publishes_the_payload_to_whoever_listens(make, wire, place):
    with Wire(server_url("redis")) as listener:
        assert listener.call("SUBSCRIBE", f"{place}:order.placed")[:2] == [
            b"subscribe",
            f"{place}:order.placed".encode(),
        ]
        sink = make(stream=f"{place}:{{type}}", mode="pubsub")
        assert await sink.deliver([named_claim("a", "k"), named_claim("b", "k")]) == [DELIVERED, DELIVERED]
        assert [listener.read()[2] for _ in range(2)] == [body("a"), body("b")]
    # Nobody listens any more: that is no failure.
    assert await sink.deliver([named_claim("c")]) == [DELIVERED]
    assert wire.call("EXISTS", f"{place}:order.placed") == b"0"


async def test_header_named_payload_keeps_its_value_under_another_name(make, wire, place):
    await make(stream=place).deliver([named_claim("a", headers={"payload": "mine"})])
    (fields,) = read_entries(wire, place)
    assert (fields["header-payload"], fields["payload"]) == (b"mine", body("a"))


async def test_header_named_payload_takes_no_other_headers_name(make, wire, place):
    await make(stream=place).deliver([named_claim("a", headers={"payload": "mine", "header-payload": "other"})])
    (fields,) = read_entries(wire, place)
    assert {name: value for name, value in fields.items() if "payload" in name} == {
        "payload": body("a"),
        "header-payload": b"other",
        "header-header-payload": b"mine",
    }


async def test_consumer_group_of_another_client_reads_every_byte(make, place):
    sent = [
        Event("text", "Grüße, 世界 🎈".encode(), content_type="text/plain", id=UUID(int=1)),
        Event("empty", b"", content_type="text/plain", id=UUID(int=2)),
        Event("binary", bytes(range(256)) + b"\r\n$3\r\n", content_type="image/png", id=UUID(int=3)),
        Event("json", {"n": 1}, id=UUID(int=4), key="ключ", headers={"tenant": "Zoë", "Größe": ""}),
    ]
    claims = [Claim(row=number, event=event, attempt=1) for number, event in enumerate(sent)]
    assert await make(stream=place).deliver(claims) == [DELIVERED] * 4
    with BlockingRedis.from_url(server_url("redis"), protocol=2) as client:
        client.xgroup_create(place, "readers", id="0")
        ((stream, entries),) = client.xreadgroup("readers", "one", {place: ">"})
    assert stream == place.encode()
    assert [fields for _, fields in entries] == [
        {
            b"event-id": b"00000000-0000-0000-0000-000000000001",
            b"event-type": b"text",
            b"content-type": b"text/plain",
            b"payload": b"Gr\xc3\xbc\xc3\x9fe, \xe4\xb8\x96\xe7\x95\x8c \xf0\x9f\x8e\x88",
        },
        {
            b"event-id": b"00000000-0000-0000-0000-000000000002",
            b"event-type": b"empty",
            b"content-type": b"text/plain",
            b"payload": b"",
        },
        {
            b"event-id": b"00000000-0000-0000-0000-000000000003",
            b"event-type": b"binary",
            b"content-type": b"image/png",
            b"payload": bytes(range(256)) + b"\r\n$3\r\n",
        },
        {
            b"event-id": b"00000000-0000-0000-0000-000000000004",
            b"event-type": b"json",
            b"event-key": b"\xd0\xba\xd0\xbb\xd1\x8e\xd1\x87",
            b"content-type": b"application/json",
            b"tenant": b"Zo\xc3\xab",
            b"Gr\xc3\xb6\xc3\x9fe": b"",
            b"payload": b'{"n":1}',
        },
    ]


async def test_text_that_has_no_utf8_is_dead_and_its_neighbours_arrive(make, wire, place):
    event = named_claim("bad").event
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    bad = Claim(row=1, event=load_event(*{**values, "headers": {"x": "\ud800"}}.values()), attempt=1)
    outcomes = await make(stream=place).deliver([bad, named_claim("a")])
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1] == DELIVERED
    assert payloads(wire, place) == [body("a")]


async def test_payload_that_redis_never_takes_is_dead(make, wire, place):
    huge = named_claim("x").event.replace(payload=bytes(512 * 1024 * 1024 + 1))
    outcomes = await make(stream=place).deliver([Claim(row=1, event=huge, attempt=1), named_claim("a")])
    assert outcomes == [Dead("Payload of 536870913 bytes: Redis takes 536870912 at most"), DELIVERED]


async def test_number_of_the_database_is_in_the_url(make, place):
    url = server_url("redis").removesuffix("/0")
    await make(f"{url}/3", stream=place).deliver([named_claim("three")])
    await make(url, stream=place).deliver([named_claim("none")])
    with Wire(url) as wire:
        assert payloads(wire, place) == [body("none")]
        wire.call("SELECT", "3")
        assert payloads(wire, place) == [body("three")]
        wire.call("DEL", place)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis://h/x", {}, "expected the number of a database after the server, got 'x'"),
        ("redis://h/-1", {}, "expected the number of a database after the server, got '-1'"),
        ("redis://h/0/orders", {}, "expected the number of a database after the server, got '0/orders'"),
        ("redis://h,i", {}, "expected one server; a cluster tells the others by itself"),
        ("redis://", {}, "expected redis://host:port, got 'redis://'"),
        ("redis://h:port", {}, "expected redis://host:port"),
        ("redis://h/2", {"cluster": True}, "a cluster has database 0 alone, got '2'"),
        ("redis://h", {"mode": "list"}, "mode: expected stream or pubsub, got 'list'"),
        ("redis://h", {"maxlen": 0}, "maxlen: expected a whole number of 1 or more, got 0"),
        ("redis://h", {"timeout": "0s"}, "timeout: expected a duration above zero"),
        ("redis://h", {"create": "perhaps"}, "create: expected"),
        ("redis://h", {"stream": "{tpoic}"}, "stream: unknown field 'tpoic'"),
        ("redis://h", {"mode": "pubsub", "maxlen": 5}, "maxlen and create are for streams; mode is pubsub"),
        ("redis://h", {"mode": "pubsub", "create": False}, "maxlen and create are for streams; mode is pubsub"),
        ("redis://h", {"mode": "pubsub", "cloudevents": "binary"}, "a channel's messages have no headers"),
        ("redis://h", {"tls_ca": "ca.pem"}, "unknown option 'tls_ca'"),
        ("rediss://h", {"tls_ca": "no-such.pem"}, "tls_ca: there is no file 'no-such.pem'"),
        ("rediss://h", {"tls_ca": __file__}, "tls_ca: .* cannot be used"),
        ("rediss://h", {"tls_key": __file__}, "tls_key: give tls_certificate as well"),
    ],
)
def test_bad_option_is_refused_at_once(url, options, message):
    with pytest.raises(ConfigError, match=message):
        open_sink(url, **options)


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_missing_package_names_the_extra(package):
    program = f"import sys; sys.modules[{package!r}] = None; import pillarbox; pillarbox.open_sink('redis://h')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Redis support is not installed. Run: pip install 'pillarbox[redis]'" in result.stderr


# -- logins, TLS, own clients ----------------------------------------------------------------------------------------


@contextmanager
def user(wire: Wire, *rights: str, password: str = "secret") -> Iterator[str]:
    """The url of a user with these rights."""
    name = f"user-{uuid4().hex[:8]}"
    wire.call("ACL", "SETUSER", name, "on", f">{password}", *rights)
    parts = urlsplit(server_url("redis"))
    yield f"redis://{name}:{quote(password, safe='')}@{parts.hostname}:{parts.port}"
    wire.call("ACL", "DELUSER", name)


async def test_special_characters_of_a_password_are_escaped_in_the_url(make, wire, place):
    with user(wire, "~*", "+@all", password="p@ss:w/r%d#? ü") as url:
        sink = make(url, stream=place)
        await sink.open()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        for text in (sink.name, repr(sink), str(sink)):
            assert "p@ss" not in text
            assert "p%40ss" not in text


async def test_login_that_ends_is_an_outage_without_the_secret(make, wire, place):
    with user(wire, "~*", "+@all", password="hush-hush") as url:
        sink = make(url, stream=place)
        await sink.open()
    error = await outage(sink)
    assert error.outcomes == [RELEASED]
    assert "hush-hush" not in str(error)
    with pytest.raises(SinkUnavailable, match="AuthenticationError"):
        await sink.check()


async def test_tls_with_the_authority_of_the_server(make, wire, place):
    sink = make(server_url("redis_tls"), stream=place, tls_ca=str(certificates() / "ca.pem"))
    await sink.open()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    assert payloads(wire, place) == [body("a")]


async def test_tls_with_an_unknown_authority_is_an_outage_that_says_so(make):
    sink = make(server_url("redis_tls"))
    with pytest.raises(SinkUnavailable, match="certificate verify failed"):
        await sink.open()
    assert "certificate verify failed" in str(await outage(sink))


async def test_tls_without_verification(make, place):
    sink = make(server_url("redis_tls"), stream=place, tls_verify=False)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]


async def test_client_certificate_where_the_server_asks_for_one(make, private, place):
    url, folder = private.urls["redis_tls"], private.certificates
    with Wire(private.url) as wire:
        wire.call("CONFIG", "SET", "tls-auth-clients", "yes")
        try:
            anonymous = make(url, stream=place, tls_ca=str(folder / "ca.pem"))
            with pytest.raises(SinkUnavailable):
                await anonymous.open()
            known = make(
                url,
                stream=place,
                tls_ca=str(folder / "ca.pem"),
                tls_certificate=str(folder / "client.pem"),
                tls_key=str(folder / "client.key"),
            )
            assert await known.deliver([named_claim("a")]) == [DELIVERED]
        finally:
            wire.call("CONFIG", "SET", "tls-auth-clients", "optional")


@pytest.mark.parametrize("options", [{}, {"decode_responses": True, "protocol": 3}])
async def test_own_client_is_used_and_left_open(wire, place, options):
    client = Redis.from_url(server_url("redis"), **options)
    sink = RedisSink(client, name="mine", stream=place)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    connection = await client.client_id()
    await sink.close()
    await sink.close()
    assert await client.client_id() == connection
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await client.aclose()
    assert payloads(wire, place) == [body("a"), body("b")]


# -- what an answer means --------------------------------------------------------------------------------------------


async def test_key_that_is_no_stream_is_dead(make, wire, place):
    wire.call("SET", place, "text")
    (outcome,) = await make(stream=place).deliver([named_claim("a")])
    assert isinstance(outcome, Dead)
    assert outcome.error.startswith(f"Stream '{place}': WRONGTYPE ")


async def test_forbidden_key_is_dead_and_the_allowed_one_is_delivered(make, wire, place):
    with user(wire, f"~{place}:allowed", "+@all") as url:
        sink = make(url, stream=f"{place}:{{type}}")
        bad, good = await sink.deliver([named_claim("a", type="other"), named_claim("b", type="allowed")])
    assert isinstance(bad, Dead)
    assert bad.error.startswith(f"Stream '{place}:other': ")
    assert good == DELIVERED


async def test_forbidden_channel_is_dead(make, wire, place):
    with user(wire, f"&{place}:allowed", "+@all") as url:
        sink = make(url, stream=f"{place}:{{type}}", mode="pubsub")
        bad, good = await sink.deliver([named_claim("a", type="other"), named_claim("b", type="allowed")])
    assert isinstance(bad, Dead)
    assert bad.error.startswith(f"Channel '{place}:other': ")
    assert good == DELIVERED


async def test_forbidden_command_is_an_outage(make, wire, place):
    with user(wire, "~*", "+ping", "+auth", "+hello", "+client") as url:
        error = await outage(make(url, stream=place))
    assert error.outcomes == [RELEASED]
    assert "permissions to run the 'xadd' command" in str(error)


@contextmanager
def setting(wire: Wire, name: str, value: str) -> Iterator[None]:
    before = wire.call("CONFIG", "GET", name)[1].decode()
    wire.call("CONFIG", "SET", name, value)
    try:
        yield
    finally:
        wire.call("CONFIG", "SET", name, before)


@contextmanager
def replica(wire: Wire) -> Iterator[None]:
    wire.call("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        wire.call("REPLICAOF", "NO", "ONE")


@contextmanager
def running_script(wire: Wire, url: str) -> Iterator[None]:
    with setting(wire, "busy-reply-threshold", "1"), Wire(url) as busy:
        busy.write("EVAL", "while true do end", "0")
        while not is_busy(wire):
            pass
        try:
            yield
        finally:
            wire.call("SCRIPT", "KILL")
            # The kill is acknowledged before the script ends.
            while is_busy(wire):
                pass


def is_busy(wire: Wire) -> bool:
    try:
        wire.call("PING")
        return False
    except AssertionError as refused:
        return "BUSY" in str(refused)


@contextmanager
def failed_snapshot(wire: Wire) -> Iterator[None]:
    folder = Path(wire.call("CONFIG", "GET", "dir")[1].decode())
    folder.chmod(0o500)
    with setting(wire, "save", "3600 1000000"):
        wire.call("BGSAVE")
        while b"rdb_bgsave_in_progress:0" not in (info := wire.call("INFO", "persistence")):
            pass
        assert b"rdb_last_bgsave_status:err" in info
        yield
    folder.chmod(0o700)
    wire.call("BGSAVE")
    while b"rdb_last_bgsave_status:ok" not in wire.call("INFO", "persistence"):
        pass


STATES: dict[str, tuple[Callable[[Wire, str], Any], str]] = {
    "OOM": (lambda wire, url: setting(wire, "maxmemory", "1"), "command not allowed when used memory"),
    "READONLY": (lambda wire, url: replica(wire), "You can't write against a read only replica"),
    "NOREPLICAS": (lambda wire, url: setting(wire, "min-replicas-to-write", "1"), "NOREPLICAS"),
    "BUSY": (running_script, "BUSY"),
    "MISCONF": (lambda wire, url: failed_snapshot(wire), "MISCONF"),
}


@pytest.mark.parametrize("state", STATES)
async def test_state_of_the_server_is_an_outage_and_passes(make, private, place, state):
    enter, text = STATES[state]
    sink = make(private.url, stream=place)
    await sink.open()
    with Wire(private.url) as wire:
        with enter(wire, private.url):
            error = await outage(sink, named_claim("a", "k"), named_claim("b"))
        assert text in str(error)
        assert error.outcomes == [RELEASED, RELEASED]
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        assert payloads(wire, place) == [body("a")]


async def test_server_without_its_master_is_an_outage(make, private, place):
    sink = make(private.url, stream=place)
    with Wire(private.url) as wire:
        settings = setting(wire, "replica-serve-stale-data", "no"), setting(wire, "replica-read-only", "no")
        with settings[0], settings[1], replica(wire):
            assert "MasterDownError" in str(await outage(sink))
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]


async def test_server_that_loads_its_data_is_an_outage(make, private, own_redis, place):
    with Wire(private.url) as master:
        for number in range(200):
            master.call("SET", f"{place}-{number}", "x" * 2000)
    own_url = own_redis.url
    parts = urlsplit(private.url)
    sink = make(own_url, stream=place)
    await sink.open()
    with Wire(own_url) as wire:
        wire.call("CONFIG", "SET", "masteruser", "pillarbox", "masterauth", "pillarbox", "replica-read-only", "no")
        wire.call("CONFIG", "SET", "key-load-delay", "100000", "loading-process-events-interval-bytes", "1024")
        wire.call("REPLICAOF", str(parts.hostname), str(parts.port))
        while b"loading:1" not in wire.call("INFO", "persistence"):
            pass
        assert "BusyLoadingError" in str(await outage(sink))


# -- time, cancellation, broken connections --------------------------------------------------------------------------


async def test_server_that_does_not_answer_is_an_outage_in_time(make, private, place):
    sink = make(private.url, stream=place, timeout="300ms")
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    private.pause()
    started = time.monotonic()
    async with asyncio.timeout(60):
        error = await outage(sink, named_claim("b"))
        with pytest.raises(SinkUnavailable, match="TimeoutError: No answer in time"):
            await sink.check()
    assert time.monotonic() - started >= 0.6
    assert "TimeoutError: No answer in time" in str(error)
    assert error.outcomes == [RELEASED]
    private.resume()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]


async def test_cancelled_batch_leaves_no_answer_for_the_next(make, private, place):
    sink = make(private.url, stream=f"{place}:{{type}}", name="cancelled")
    await sink.open()
    with Wire(private.url) as wire:
        wire.call("SET", f"{place}:taken", "text")
        before = asyncio.all_tasks()
        private.pause()
        sending = asyncio.create_task(sink.deliver([named_claim("a"), named_claim("b")]))
        for _ in range(20):
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert asyncio.all_tasks() == before
        private.resume()
        (outcome,) = await sink.deliver([named_claim("c", type="taken")])
        assert isinstance(outcome, Dead)
        assert await sink.deliver([named_claim("d")]) == [DELIVERED]
        # The first batch was on the wire; whatever of it ran stands before what came later.
        found = payloads(wire, f"{place}:order.placed")
        assert found[-1] == body("d")
        assert found[:-1] in ([], [body("a"), body("b")])


async def test_batch_that_fails_in_the_middle_leaves_no_answer_for_the_next(make, private, place):
    sink = make(private.url, stream=f"{place}:{{type}}")
    await sink.open()
    with Wire(private.url) as wire:
        wire.call("SET", f"{place}:taken", "text")
    event = named_claim("x").event
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    broken = Claim(row=1, event=load_event(*{**values, "headers": "no mapping"}.values()), attempt=1)
    private.pause()
    with pytest.raises(AttributeError):
        await sink.deliver([*(named_claim("a") for _ in range(150)), broken])
    sending = asyncio.create_task(sink.deliver([named_claim("c", type="taken")]))
    for _ in range(20):
        await asyncio.sleep(0)
    private.resume()
    (outcome,) = await sending
    assert isinstance(outcome, Dead)


async def test_batch_cancelled_before_it_was_sent_never_arrives(make, wire, place):
    sink = make(stream=place)
    sending = asyncio.create_task(sink.deliver([named_claim("a")]))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    assert payloads(wire, place) == [body("b")]


async def test_answers_that_came_before_the_connection_broke_count(make, wire, place):
    async with CuttingProxy() as proxy:
        url = f"redis://pillarbox:pillarbox@127.0.0.1:{proxy.port}"
        sink = make(url, stream=place)
        await sink.open()
        proxy.lines_left = 4  # two answers
        claims = [named_claim(name, "k") for name in "abcd"]
        error = await outage(sink, *claims)
        assert error.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
        assert await sink.deliver(claims[2:]) == [DELIVERED, DELIVERED]
        await sink.close()
    assert payloads(wire, place) == [body(name) for name in "abcdcd"]


async def test_answers_that_came_before_the_time_was_over_count():
    # More than the buffers on the way take: the batch cannot be written to its end.
    event = named_claim("a").event.replace(payload=bytes(1024 * 1024))
    claims = [Claim(row=number, event=event, attempt=1) for number in range(40)]
    async with StallingServer(answers=3, reads=4) as server:
        client = Redis(host="127.0.0.1", port=server.port, protocol=2, socket_timeout=None)
        sink = RedisSink(client, timeout=timedelta(seconds=1))
        error = await outage(sink, *claims)
        await client.aclose()
    assert "TimeoutError: No answer in time" in str(error)
    assert error.outcomes == [DELIVERED] * 3 + [RELEASED] * 37
