"""What the HTTP sink promises beyond the port: answers, addresses, headers, parallel requests and batches."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from uuid import UUID

import httpx
import pytest

from pillarbox.config import load_config
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Event, Retry, load_event
from pillarbox.sinks import open_sink
from pillarbox.sinks.http import HttpSink
from pillarbox.sinks.http_answer import read_retry_after
from tests.contract.broker_kits import named_claim
from tests.contract.http_fixtures import answering, made_sinks, outage_of, running_server
from tests.contract.http_server import Answer, Request

__all__ = ["made_sinks", "running_server"]

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_success_is_delivered(server, sinks, status):
    server.respond = answering(status)
    assert await sinks().deliver([named_claim("a")]) == [DELIVERED]


@pytest.mark.parametrize("status", [400, 402, 403, 404, 405, 409, 410, 413, 415, 422, 451])
async def test_other_4xx_is_dead_at_once_with_what_was_answered(server, sinks, status):
    server.respond = answering(status, b"no such\r\nthing " + b"x" * 300)
    assert await sinks().deliver([named_claim("a")]) == [Dead(f"HTTP {status}: no such  thing " + "x" * 185)]


@pytest.mark.parametrize("status", [408, 425, 500, 501, 502, 504, 599])
async def test_answer_that_may_change_is_retried(server, sinks, status):
    server.respond = answering(status, b"busy")
    sink = sinks()
    assert await sink.deliver([named_claim("a")]) == [Retry(f"HTTP {status}: busy")]
    server.respond = answering(status, retry_after="7")
    assert await sink.deliver([named_claim("a")]) == [Retry(f"HTTP {status}", after=timedelta(seconds=7))]


@pytest.mark.parametrize("status", [429, 503])
async def test_destination_that_wants_a_pause_is_unavailable(server, sinks, status):
    server.respond = answering(status, b"overloaded", retry_after="9")
    outage = await outage_of(sinks(), named_claim("a", "k"), named_claim("b", "k"))
    assert str(outage) == f"Sink hooks: HTTP {status}: overloaded"
    assert outage.after == timedelta(seconds=9)
    assert outage.outcomes == [RELEASED, RELEASED]


@pytest.mark.parametrize("status", [401, 407])
async def test_refused_login_is_unavailable(server, sinks, status):
    server.respond = answering(status, b"token expired")
    outage = await outage_of(sinks())
    expected = f"login refused, HTTP {status}: token expired. Check the credentials among its headers"
    assert str(outage) == f"Sink hooks: {expected}"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_unavailable_and_not_followed(server, sinks, status):
    server.respond = answering(status, location="http://elsewhere.example/hook?token=hunter2")
    outage = await outage_of(sinks())
    assert str(outage) == (
        f"Sink hooks: HTTP {status} to http://elsewhere.example; redirects are not followed, mend its url"
    )
    assert len(server.requests) == 1


async def test_partial_success_is_unavailable(server, sinks):
    server.respond = answering(207, b"[200, 500]")
    assert "HTTP 207 says that a part may have failed" in str(await outage_of(sinks()))


async def test_statuses_that_pause_instead(server, sinks):
    sink = sinks(pause_statuses=[403, 502])
    server.respond = answering(403)
    assert str(await outage_of(sink)) == "Sink hooks: HTTP 403"
    server.respond = answering(502, retry_after="3")
    assert (await outage_of(sink)).after == timedelta(seconds=3)
    server.respond = answering(404)
    assert await sink.deliver([named_claim("a")]) == [Dead("HTTP 404")]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("120", timedelta(seconds=120)),
        ("0", None),
        ("86400", timedelta(hours=1)),
        ("9" * 5000, timedelta(hours=1)),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", timedelta(hours=1)),
    ],
)
def test_retry_after(text, after):
    assert read_retry_after(text) == after


def test_retry_after_a_date():
    pause = read_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True))
    assert pause is not None
    assert timedelta(seconds=30) < pause <= timedelta(seconds=90)


async def test_no_answer_in_time_is_that_events_retry_and_the_others_arrive(server, sinks):
    never = asyncio.Event()

    async def respond(request: Request) -> Answer:
        if b'"slow"' in request.body:
            await never.wait()
        return 200, {}, b""

    server.respond = respond
    sink = sinks(timeout="2s")
    batch = [named_claim("slow", "k"), named_claim("after", "k"), named_claim("b", "j"), named_claim("c")]
    outcomes = await sink.deliver(batch)
    assert outcomes == [Retry("no answer within 2s"), RELEASED, DELIVERED, DELIVERED]


async def test_success_counts_whatever_becomes_of_the_rest_of_the_answer(server, sinks):
    server.respond = answering(200, b"12345", content_length="10")
    assert await sinks(timeout="2s").deliver([named_claim("a")]) == [DELIVERED]


async def test_answer_that_breaks_off_counts_if_it_began_with_success(server, sinks):
    server.respond = answering(200, b"12345", content_length="10", connection="close")
    assert await sinks().deliver([named_claim("a")]) == [DELIVERED]
    server.respond = answering(422, b"12345", content_length="10", connection="close")
    assert "RemoteProtocolError" in str(await outage_of(sinks()))


async def test_endless_answer_is_cut_off(server, sinks):
    server.respond = answering(422, b"x" * 200_000, content_length="999999999")
    assert await sinks().deliver([named_claim("a")]) == [Dead("HTTP 422: " + "x" * 200)]


async def test_connection_closed_without_an_answer_is_an_outage(server, sinks):
    server.respond = lambda request: None
    assert "Server disconnected" in str(await outage_of(sinks()))


async def test_what_is_no_http_is_an_outage(server, sinks):
    server.respond = answering(200, content_length="many")
    assert "RemoteProtocolError" in str(await outage_of(sinks()))


async def test_name_that_does_not_resolve_is_an_outage():
    sink = open_sink("http://no-such-host.invalid/hook")
    assert "ConnectError" in str(await outage_of(sink))
    with pytest.raises(SinkUnavailable, match="ConnectError"):
        await sink.check()


async def test_handshake_without_an_answer_is_an_outage(server):
    never = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    sink = open_sink(f"https://127.0.0.1:{port}/", connect_timeout="100ms", timeout="10s")
    assert "ConnectTimeout" in str(await outage_of(sink))
    with pytest.raises(SinkUnavailable, match="ConnectTimeout"):
        await sink.check()
    never.set()
    listening.close()
    await listening.wait_closed()
    await sink.close()


# -- connections -----------------------------------------------------------------------------------------------------


async def test_connections_are_kept(server, sinks):
    sink = sinks()
    await sink.deliver([named_claim(str(number), "k") for number in range(10)])
    await sink.deliver([named_claim("last", "k")])
    assert [len(server.requests), server.connections] == [11, 1]


async def test_kept_connection_that_the_server_closed_is_no_outage(server, sinks):
    sink = sinks()
    await sink.deliver([named_claim("a")])
    await server.end_talks()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    assert server.connections == 2


async def test_check_connects_and_sends_nothing(server, sinks):
    await sinks().check()
    assert server.connections == 1
    assert server.requests == []


class Crowd:
    """Answers once `expected` requests are there together; notes how many there were, by key and in all."""

    def __init__(self, expected: int) -> None:
        self.barrier = asyncio.Barrier(expected)
        self.now: list[str] = []
        self.most = 0
        self.most_of_a_key = 0

    async def respond(self, request: Request) -> Answer:
        key = request.headers["event-key"]
        self.now.append(key)
        self.most = max(self.most, len(self.now))
        self.most_of_a_key = max(self.most_of_a_key, self.now.count(key))
        await self.barrier.wait()
        self.now.remove(key)
        return 200, {}, b""


async def test_keys_go_in_parallel_and_a_keys_events_one_by_one(server, sinks):
    crowd = Crowd(4)
    server.respond = crowd.respond
    batch = [named_claim(f"{number}", key) for number in range(3) for key in "wxyz"]
    assert await sinks().deliver(batch) == [DELIVERED] * 12
    assert (crowd.most, crowd.most_of_a_key) == (4, 1)


async def test_concurrency_limits_all_batches_together(server, sinks):
    crowd = Crowd(2)
    server.respond = crowd.respond
    sink = sinks(concurrency=2)
    batches = [[named_claim(f"{number}", f"{key}{number}") for number in range(5)] for key in "ab"]
    assert await asyncio.gather(*map(sink.deliver, batches)) == [[DELIVERED] * 5] * 2
    assert crowd.most == 2


async def test_cancelled_delivery_ends_its_requests_and_leaves_the_sink_usable(server, sinks):
    arrived, never = asyncio.Event(), asyncio.Event()

    async def respond(request: Request) -> Answer:
        arrived.set()
        await never.wait()
        return 200, {}, b""

    server.respond = respond
    sink = sinks(concurrency=1)
    delivery = asyncio.create_task(sink.deliver([named_claim("a"), named_claim("b")]))
    await arrived.wait()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    server.respond = answering(200)
    assert await sink.deliver([named_claim("c")]) == [DELIVERED]
    assert [json.loads(request.body)["name"] for request in server.requests] == ["a", "c"]


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("", "/"),
        ("/", "/"),
        ("/hook?batch=9&flag&a=b%20c&a=2", "/hook?batch=9&flag&a=b%20c&a=2"),
        ("/grüße", "/gr%C3%BC%C3%9Fe"),
        ("/hooks/{topic}", "/hooks/caf%C3%A9%2F1%20%3F%23%25"),
        ("/{headers.tenant}/{{x}}?key={key}", "/a%26b%3D/%7Bx%7D?key=k%2B1"),
    ],
)
async def test_address_is_kept_and_fields_are_filled_in(server, sinks, path, target):
    sent = named_claim("a", "k+1", topic="café/1 ?#%", headers={"tenant": "a&b="})
    assert await sinks(path).deliver([sent]) == [DELIVERED]
    assert [request.target for request in server.requests] == [target]


async def test_event_without_a_field_of_the_address_is_dead_and_the_address_not_shown(server, sinks):
    sent = named_claim("a")
    outcomes = await sinks("/hunter2/{key}").deliver([sent])
    assert outcomes == [Dead(f"Sink 'hooks' url '/…' needs key, which event {sent.event.id} has not")]


@pytest.mark.parametrize("topic", [".", ".."])
async def test_field_cannot_lead_to_another_path(server, sinks, topic):
    (outcome,) = await sinks("/hooks/{topic}").deliver([named_claim("a", topic=topic)])
    assert outcome == Dead("Sink 'hooks': the address for this event would have a segment '.' or '..'")
    assert server.requests == []


async def test_method(server, sinks):
    await sinks(method="PUT").deliver([named_claim("a")])
    await sinks().deliver([named_claim("a")])
    assert [request.method for request in server.requests] == ["PUT", "POST"]


async def test_login_of_the_url_is_sent(server):
    sink = open_sink(f"http://ann:s%40cret@127.0.0.1:{server.port}/hook")
    await sink.deliver([named_claim("a")])
    await sink.close()
    assert server.requests[0].headers["authorization"] == "Basic YW5uOnNAY3JldA=="
    assert server.requests[0].headers["host"] == f"127.0.0.1:{server.port}"


# -- headers ---------------------------------------------------------------------------------------------------------


async def test_every_request_says_who_sends_it_and_which_event(server, sinks):
    sink = sinks(headers={"X-Token": "t", "User-Agent": "shop/1"})
    await sink.deliver([Claim(row=1, event=Event("order.placed", {"n": 1}, id=ID), attempt=1)])
    await sinks().deliver([named_claim("a")])
    first, second = (request.headers for request in server.requests)
    assert first["idempotency-key"] == str(ID)
    assert first["x-token"] == "t"
    assert first["user-agent"] == "shop/1"
    assert second["user-agent"] == "pillarbox/0.1.0"
    assert second["accept-encoding"] == "identity"


async def test_header_with_a_name_that_http_does_not_allow_is_dead(server, sinks):
    (outcome, _) = await sinks().deliver([named_claim("a", headers={"to whom": "x"}), named_claim("b")])
    assert outcome == Dead("Header 'to whom' cannot be sent: HTTP allows letters, digits and !#$%&'*+-.^_`|~ in a name")
    assert [json.loads(request.body)["name"] for request in server.requests] == ["b"]


def claim_with_headers(**headers: Any) -> Claim:
    """As a row of another system may hold them: unchecked."""
    values = {name: getattr(named_claim("a").event, name) for name in EVENT_FIELDS}
    return Claim(row=1, event=load_event(*{**values, "headers": headers}.values()), attempt=1)


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("plain", "plain"),
        ('50% of "a", b', '50% of "a", b'),
        ("Zürich 5%", "Z%C3%BCrich%205%25"),
        ("日本", "%E6%97%A5%E6%9C%AC"),
        (" outer ", "%20outer%20"),
        ("a\r\nx-evil: 1", "a%0D%0Ax-evil:%201"),
        ("\ud800", "?"),
        ("", ""),
    ],
)
async def test_header_value(server, sinks, value, sent):
    assert await sinks().deliver([claim_with_headers(x=value)]) == [DELIVERED]
    assert server.requests[0].headers["x"] == sent
    assert "x-evil" not in server.requests[0].headers


async def test_cloudevents_headers_are_always_encoded(server, sinks):
    sent = Event("order placed", {"n": 1}, key='50% "off"', headers={"x": "a b"})
    await sinks(cloudevents="binary").deliver([Claim(row=1, event=sent, attempt=1)])
    headers = server.requests[0].headers
    assert headers["ce-type"] == "order%20placed"
    assert headers["ce-partitionkey"] == "50%25%20%22off%22"
    assert headers["x"] == "a b"


async def test_events_header_cannot_take_the_place_of_one_that_the_request_needs(server, sinks):
    taken = {"Host": "evil", "content-length": "1", "transfer-encoding": "chunked", "authorization": "mine"}
    sink = sinks(headers={"Authorization": "ours"})
    assert await sink.deliver([named_claim("a", headers={**taken, "idempotency-key": "x", "cookie": "c"})]) == [
        DELIVERED
    ]
    headers = server.requests[0].headers
    assert headers["host"] == f"127.0.0.1:{server.port}"
    assert headers["authorization"] == "ours"
    assert headers["cookie"] == "c"
    assert "transfer-encoding" not in headers
    assert {name: value for name, value in headers.items() if name.startswith("pillarbox-")} == {
        "pillarbox-host": "evil",
        "pillarbox-content-length": "1",
        "pillarbox-transfer-encoding": "chunked",
        "pillarbox-authorization": "mine",
        "pillarbox-idempotency-key": "x",
    }
    assert [name for name, _ in server.requests[0].lines].count("authorization") == 1


# -- made in Python, and options -------------------------------------------------------------------------------------


async def test_own_client_is_used_and_not_closed(server):
    async with httpx.AsyncClient(auth=("ann", "secret"), follow_redirects=True) as client:
        sink = HttpSink(f"http://127.0.0.1:{server.port}/hook", client=client)
        await sink.open()
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        server.respond = answering(302, location="/other")
        assert "HTTP 302" in str(await outage_of(sink))
        server.respond = lambda request: None
        assert "Server disconnected" in str(await outage_of(sink))
        await sink.close()
        assert not client.is_closed
    assert server.requests[0].headers["authorization"] == "Basic YW5uOnNlY3JldA=="
    assert [request.target for request in server.requests] == ["/hook"] * 3


async def test_timeout_of_an_own_client_is_the_sinks(server):
    never = asyncio.Event()

    async def respond(request: Request) -> Answer:
        await never.wait()
        return 200, {}, b""

    server.respond = respond
    async with httpx.AsyncClient(timeout=60) as client:
        sink = HttpSink(f"http://127.0.0.1:{server.port}/", client=client, timeout=timedelta(seconds=2))
        assert await sink.deliver([named_claim("a")]) == [Retry("no answer within 2s")]


async def test_options_from_a_file(server, tmp_path):
    path = tmp_path / "pillarbox.toml"
    path.write_text(
        f"""
        [sink]
        url = "http://127.0.0.1:{server.port}/hook?batch=no"
        name = "hooks"
        concurrency = 3
        timeout = "9s"
        pause_statuses = [404]
        signing_secret = "${{SECRET}}"
        [sink.headers]
        Authorization = "Bearer ${{TOKEN}}"
        """
    )
    env = {"SECRET": "whsec_c2VjcmV0", "TOKEN": "t0ken"}
    sink = load_config(path, env=env).open_sink()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    assert server.requests[0].headers["authorization"] == "Bearer t0ken"
    assert server.requests[0].headers["webhook-signature"].startswith("v1,")
    assert server.requests[0].target == "/hook?batch=no"


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"batch": 0}, "batch: expected a whole number of 1 or more, got 0"),
    ({"method": "GET"}, "method: expected POST or PUT, got 'GET'"),
    ({"timeout": 5}, "timeout: expected a duration with its unit"),
    ({"timeout": "3s", "connect_timeout": "2s"}, "connect_timeout: expected at most a third of timeout, 1s"),
    ({"tls_ca": "x"}, "unknown option 'tls_ca'"),
    ({"headers": "x"}, "headers: expected a table of names and texts"),
    ({"headers": {"a b": "x"}}, "headers: expected the name of a header, got 'a b'"),
    ({"headers": {"x": "hunter2\n"}}, "headers: expected printable ASCII without outer blanks for 'x'"),
    ({"headers": {"Content-Type": "x"}}, "headers: 'Content-Type' is set by the sink itself; leave it out"),
    ({"headers": {"Host": "x"}}, "headers: 'Host' is set by the sink itself; leave it out"),
    ({"signing_secret": "hunter2"}, "signing_secret: expected 'whsec_' and base64"),
    ({"signing_secret": ["whsec_aGFsbG8=", "whsec_hunter2!"]}, "signing_secret: expected 'whsec_' and base64"),
    ({"signing_secret": "whsec_"}, "signing_secret: expected '***' and base64"),
    ({"signing_secret": {"hunter2": 1}}, "signing_secret: expected 'whsec_' and base64"),
    ({"signing_secret": "whsec_aGFsbG8=", "headers": {"Webhook-Id": "x"}}, "'Webhook-Id' is set by the sink itself"),
    ({"pause_statuses": [200]}, "pause_statuses: expected a list of numbers from 400 to 599, got [200]"),
    ({"pause_statuses": "503"}, "pause_statuses: expected a list of numbers from 400 to 599, got '503'"),
    ({"allow": ["10.0.0.0/8"]}, "allow: it makes exceptions of refuse_private, which is off"),
    ({"refuse_private": True, "allow": ["10.0.0.1/8"]}, "allow: expected networks such as '10.1.0.0/16'"),
    ({"refuse_private": True, "proxy": "http://p"}, "proxy: a proxy connects where it likes"),
    ({"proxy": "ftp://u:hunter2@p"}, "proxy: expected http://host:port or https://host:port"),
    ({"batch": 2, "cloudevents": "binary"}, "cloudevents: a batch is an array of structured ones; leave it out"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_option_is_refused_without_its_secret(options, message):
    with pytest.raises(ConfigError) as refusal:
        open_sink("http://hooks.example/x", name="hooks", **options)
    assert message in str(refusal.value)
    assert "Sink 'hooks'" in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://{topic}.example/x", "with a host that is plain"),
        ("http:///x", "with a host that is plain"),
        ("http://xn--/x", "with a host that is plain"),
        ("http://127.0.0.1:70000/x", "a port up to 65535"),
        ("http://h:port/x", "expected http://host:port with a number for the port, got 'http://h:***/…'"),
        ("http://h/{tpoic}", "unknown field 'tpoic'; expected topic"),
        ("http://h/hunter2/{", "'{' alone in '/…'"),
    ],
)
def test_bad_url_is_refused(url, message):
    with pytest.raises(ConfigError) as refusal:
        open_sink(url)
    assert message in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


def test_url_with_fields_cannot_be_that_of_batches():
    with pytest.raises(ConfigError, match="a batch has one address; the url has fields"):
        open_sink("http://h/{topic}", batch=2)


def test_login_and_authorization_together_are_refused():
    with pytest.raises(ConfigError, match="give a login in the url or an Authorization among headers, not both"):
        open_sink("http://u:p@h/", headers={"authorization": "x"})


@pytest.mark.parametrize("options", [{"proxy": "http://p:1"}, {"refuse_private": True}])
async def test_options_of_connections_are_refused_beside_a_client(options):
    async with httpx.AsyncClient() as client:
        with pytest.raises(ConfigError, match="are the client's, if one is given"):
            HttpSink("http://h/", client=client, **options)


def test_missing_package_is_named():
    script = "import sys; sys.modules['httpx'] = None\nfrom pillarbox.sinks import open_sink\nopen_sink('http://h')"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "HTTP support is not installed. Run: pip install 'pillarbox[http]'" in found.stderr
