"""The libSQL writer when something is wrong: lost answers, refusals, secrets, settings."""

from __future__ import annotations

import asyncio
import json
import ssl
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.sync import remote_sql
from pillarbox.sync.writers import open_writer
from pillarbox.sync.writers.libsql import LibsqlWriter
from tests.contract.certificates import make_certificates
from tests.contract.libsql_fixtures import libsql_server, made_writers, outage_of
from tests.hrana_server import Fault, HranaServer, serve_hrana

__all__ = ["libsql_server", "made_writers"]

TOKEN = "eyJhbGciOiJFZERTQSJ9.c2VjcmV0"
WRITE = ("INSERT INTO t VALUES (7)", ())


@pytest.fixture(name="writer")
async def writer_with_table(server, make_writer):
    writer = make_writer(server.url)
    await writer.write_batch(
        [
            ("CREATE TABLE t (a)", ()),
            (remote_sql.marks_ddl("sqlite"), ()),
            remote_sql.create_mark("queue-1", "t", applied=0, dialect="sqlite"),
        ]
    )
    server.bodies.clear()
    return writer


async def rows_of(writer: LibsqlWriter) -> Any:
    [found] = await writer.write_batch([("SELECT a FROM t", ())])
    return found["rows"]


# -- lost answers ----------------------------------------------------------------------------------------------------


def marked(*statements: Any, known: int, applied: int) -> list[Any]:
    token = str(uuid4())
    return [
        remote_sql.advance_mark("queue-1", known=(known, ""), applied=applied, token=token),
        remote_sql.guard_mark("queue-1", applied=applied, token=token),
        *statements,
    ]


@pytest.mark.parametrize("is_done", [True, False], ids=["after COMMIT", "before"])
async def test_mark_resolves_the_outcome_of_a_call_whose_answer_was_lost(server, writer, is_done):
    server.faults.append(Fault(drops=True, is_done=is_done))

    outage = await outage_of(writer, *marked(WRITE, known=0, applied=3))

    assert str(outage).startswith(f"{server.url}: no answer to COMMIT, outcome unknown: RemoteProtocolError: ")
    assert str(outage).endswith("; the batch was written as a whole or not at all")
    assert await rows_of(writer) == ([[7]] if is_done else [])
    [mark] = await writer.write_batch([remote_sql.read_mark("queue-1")])
    assert mark["rows"][0][0] == (3 if is_done else 0)
    # Sent once more all the same, the guard lets nothing happen twice.
    results = await writer.write_batch(marked(WRITE, known=0, applied=3))
    assert [each["ok"] for each in results] == ([True, False] if is_done else [True, True, True])
    assert await rows_of(writer) == [[7]]


async def test_lost_answer_is_not_asked_for_again(server, writer):
    server.faults.append(Fault(drops=True, is_done=True))

    await outage_of(writer, WRITE)

    assert len(server.bodies) == 1
    assert await rows_of(writer) == [[7]]


async def test_late_answer_is_an_unknown_outcome(server, make_writer, writer):
    release = asyncio.Event()
    server.faults.append(Fault(is_done=True, until=release))
    hasty = make_writer(server.url, timeout=0.2)

    outage = await outage_of(hasty, WRITE)

    assert not release.is_set()
    assert str(outage) == (
        f"{server.url}: no answer to COMMIT, outcome unknown: no answer within 200ms; "
        "the batch was written as a whole or not at all"
    )
    release.set()
    assert await rows_of(hasty) == [[7]]


async def test_cancelled_call_ends_and_leaves_the_writer_usable(server, writer):
    release = asyncio.Event()
    server.faults.append(Fault(is_done=True, until=release))
    call = asyncio.create_task(writer.write_batch([WRITE]))
    while not server.bodies:
        await asyncio.sleep(0.01)

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 5)

    release.set()
    async with asyncio.timeout(5):
        while await rows_of(writer) != [[7]]:  # the server carries on with what it was given
            await asyncio.sleep(0.01)
    assert [each["ok"] for each in await writer.write_batch([WRITE])] == [True]


async def test_server_that_was_away_is_reached_again(server, writer):
    await server.stop()
    gone = await outage_of(writer, WRITE)
    await server.start()

    assert str(gone).startswith(f"{server.url}: cannot be reached: ConnectError")
    assert [each["ok"] for each in await writer.write_batch([WRITE])] == [True]


async def test_kept_connection_that_the_server_closed_is_not_used(server, writer):
    await writer.write_batch([WRITE])
    await server.stop()
    await server.start()

    assert [each["ok"] for each in await writer.write_batch([WRITE])] == [True]


# -- answers that are none -------------------------------------------------------------------------------------------


def step_answer(results: list[Any], errors: list[Any] | None = None) -> bytes:
    batch = {"step_results": results, "step_errors": [None] * len(results) if errors is None else errors}
    answers = [
        {"type": "ok", "response": {"type": "batch", "result": batch}},
        {"type": "ok", "response": {"type": "close"}},
    ]
    return json.dumps({"baton": None, "base_url": None, "results": answers}).encode()


OK = {"cols": [], "rows": [], "affected_row_count": 0, "last_insert_rowid": None}
BAD = {"message": "SQLite error: UNIQUE constraint failed", "code": "SQLITE_CONSTRAINT"}
FULL = {"message": "SQLite error: database or disk is full", "code": "SQLITE_FULL"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "it is not JSON"),
        (b"[]", "expected 2 results, got none"),
        (b'{"results": []}', "expected 2 results, got 0"),
        (b'{"results": [{}, {}]}', "neither ok nor an error"),
        (b'{"results": [{"type": "error", "error": {}}, {}]}', "an error has no message"),
        (step_answer([OK, OK, OK]), "expected 4 steps, got 3 results and 3 errors"),
        (step_answer([OK, OK, OK, None], [None]), "expected 4 steps, got 4 results and 1 errors"),
        (step_answer([OK, {}, OK, None]), "a result lacks its cols, rows or affected_row_count"),
        (step_answer([OK, None, OK, None]), "contradicts itself"),
        (step_answer([OK, None, OK, None], [None, BAD, None, None]), "contradicts itself"),
        (step_answer([OK, OK, None, None]), "contradicts itself"),
        (step_answer([None, None, None, None]), "contradicts itself"),
        (step_answer([OK, OK, None, OK], [None, None, FULL, None]), "COMMIT failed: SQLite error: database or disk"),
    ],
    ids=[
        *("HTML", "list", "no results", "no types", "empty error", "few steps", "few errors", "empty result"),
        *("skipped", "failed", "no commit", "nothing", "commit failed"),
    ],
)
async def test_answer_that_says_nothing_certain_is_an_unknown_outcome(server, writer, body, said):
    server.faults.append(Fault(status=200, body=body))

    outage = await outage_of(writer, WRITE)

    assert said in str(outage)
    assert "outcome unknown" in str(outage)


async def test_value_of_an_unknown_type_is_not_guessed(server, writer):
    row = {**OK, "cols": [{"name": "a"}], "rows": [[{"type": "decimal", "value": "1"}]]}
    server.faults.append(Fault(status=200, body=step_answer([OK, row, OK, None])))

    assert "a row has a value of no known type" in str(await outage_of(writer, WRITE))


async def test_full_disk_blames_no_statement(server, writer):
    server.faults.append(Fault(status=200, body=step_answer([OK, None, None, OK], [None, FULL, None, None])))

    assert str(await outage_of(writer, WRITE)) == (
        f"{server.url}: takes nothing now: SQLite error: database or disk is full (SQLITE_FULL); nothing was written"
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("SQLITE_CONSTRAINT_UNIQUE", "bad"),
        ("SQLITE_CONSTRAINT_FOREIGNKEY", "later"),
        ("SQLITE_TOOBIG", "bad"),
        ("SQL_INPUT_ERROR", "bad"),
        ("SQLITE_INTERRUPT", "later"),
        ("NEVER_HEARD_OF", "later"),
        (None, "later"),
    ],
)
async def test_code_decides_whose_fault_it_is(server, writer, code, kind):
    failure = {"message": "no", "code": code}
    server.faults.append(Fault(status=200, body=step_answer([OK, None, None, OK], [None, failure, None, None])))

    [result] = await writer.write_batch([WRITE])

    assert result == {"ok": False, "error": "no" + (f" ({code})" if code else ""), "kind": kind}


async def test_transaction_that_timed_out_is_run_again(server, writer):
    late = {"message": "Transaction timed out", "code": "TRANSACTION_TIMEOUT"}
    server.faults.append(Fault(status=200, body=step_answer([OK, OK, None, None], [None, None, late, None])))

    assert await writer.write_batch([WRITE]) == [{"ok": True, "rows_affected": 1}]
    assert await rows_of(writer) == [[7]]


async def test_batch_that_fails_as_a_whole_for_no_statement_is_an_unknown_outcome(server, writer):
    failed = {"type": "error", "error": {"message": "Response is too large", "code": "RESPONSE_TOO_LARGE"}}
    closed = {"type": "ok", "response": {"type": "close"}}
    server.faults.append(Fault(status=200, body=json.dumps({"results": [failed, closed]}).encode()))

    outage = await outage_of(writer, WRITE)

    assert "outcome unknown: Response is too large (RESPONSE_TOO_LARGE); " in str(outage)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (302, "HTTP 302: why: redirects are not followed, mend the url"),
        (400, "the request was refused, HTTP 400: why"),
        (401, "a call without a token is refused, HTTP 401: why"),
        (403, "a call without a token is refused, HTTP 403: why"),
        (404, "nothing is served at /v2/pipeline, HTTP 404: why. Check the url"),
        (408, "no answer to COMMIT, outcome unknown: HTTP 408: why; the batch was written as a whole or not at all"),
        (413, "the request is too large, HTTP 413: why. Lower batch_size, or set max_batch_bytes"),
        (429, "too many requests, HTTP 429: why"),
        (500, "no answer to COMMIT, outcome unknown: HTTP 500: why; the batch was written as a whole or not at all"),
        (502, "no answer to COMMIT, outcome unknown: HTTP 502: why; the batch was written as a whole or not at all"),
    ],
)
async def test_status_is_told_and_nobody_is_blamed(server, writer, status, said):
    server.faults.append(Fault(status=status, body=b"why\n"))

    assert str(await outage_of(writer, WRITE)) == f"{server.url}: {said}"


@pytest.mark.parametrize("status", [429, 503])
async def test_pause_that_the_server_asks_for_is_handed_on(server, writer, status):
    server.faults.append(Fault(status=status, headers={"Retry-After": "17"}))

    assert (await outage_of(writer, WRITE)).after == timedelta(seconds=17)


async def test_redirect_is_not_followed_with_the_token(server, make_writer, tmp_path):
    async with serve_hrana(tmp_path / "other.db") as other:
        server.faults.append(Fault(status=307, headers={"Location": f"{other.url}/v2/pipeline"}))

        await outage_of(make_writer(server.url, auth_token=TOKEN), WRITE)

        assert other.logins == []


# -- the token -------------------------------------------------------------------------------------------------------


@pytest.fixture(name="guarded")
async def guarded_server(tmp_path):
    async with serve_hrana(tmp_path / "guarded.db", token=TOKEN) as made:
        yield made


async def test_token_opens_the_database(guarded, make_writer):
    beside = make_writer(guarded.url, auth_token=TOKEN)
    within = make_writer(f"libsql://127.0.0.1:{guarded.port}?tls=0&authToken={TOKEN}")

    await beside.open()
    await within.open()

    assert guarded.logins == [f"Bearer {TOKEN}"] * 2


async def test_refused_token_is_told_when_the_writer_is_opened(guarded, make_writer):
    with pytest.raises(SinkUnavailable, match="the token was refused, HTTP 401"):
        await make_writer(guarded.url, auth_token="wrong").open()
    with pytest.raises(SinkUnavailable, match="a call without a token is refused, HTTP 401"):
        await make_writer(guarded.url, auth_token="").open()


async def test_token_is_in_no_error(server, make_writer, caplog):
    caplog.set_level("DEBUG", logger="pillarbox")
    caplog.set_level("INFO")
    writer = make_writer(f"{server.url}?authToken={TOKEN}")
    echo = {"message": f"who is {TOKEN}?", "code": "SQLITE_CONSTRAINT"}
    server.faults.extend(
        [
            Fault(status=500, body=f"Bearer {TOKEN}".encode()),
            Fault(status=401, body=(TOKEN * 100).encode()),
            Fault(status=200, body=step_answer([OK, None, None, OK], [None, echo, None, None])),
            Fault(drops=True),
        ]
    )

    said = [str(await outage_of(writer, WRITE)), str(await outage_of(writer, WRITE))]
    [result] = await writer.write_batch([WRITE])
    said += [result["error"], str(await outage_of(writer, WRITE)), repr(writer), caplog.text]

    assert "Bearer ***" in said[0]
    assert result["error"] == "who is ***? (SQLITE_CONSTRAINT)"
    assert not [text for text in said if TOKEN[:10] in text]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"libsql://host?authToken={TOKEN}&tsl=0", {}),
        (f"libsql://host?authToken={TOKEN}&tls=2", {}),
        (f"libsql://host?authToken={TOKEN}", {"auth_token": "another"}),
        (f"http://host?authToken={TOKEN}&tls=1", {}),
        (f"libsql://user:{TOKEN}@host", {}),
        (f"libsql:///path?authToken={TOKEN}", {}),
        (f"ws://host?authToken={TOKEN}", {}),
        ("libsql://host", {"auth_token": f"{TOKEN}\n"}),
        ("libsql://host", {"auth_token": f"{TOKEN}é"}),
        (f"libsql://host:port?authToken={TOKEN}", {}),
        ("libsql://host", {"auth_token": TOKEN, "timeout": 0}),
        ("libsql://host", {"auth_token": TOKEN, "timeout": "soon"}),
        ("libsql://host", {"auth_token": TOKEN, "connections": 0}),
        ("libsql://host", {"auth_token": TOKEN, "tls_ca": "missing.pem"}),
        ("libsql://host", {"auth_tokn": TOKEN}),
    ],
    ids=[
        *("unknown option", "tls", "two tokens", "tls of http", "login", "no host", "scheme", "newline", "not ASCII"),
        *("port", "timeout", "duration", "connections", "authority", "option"),
    ],
)
def test_setting_that_cannot_be_used_is_refused_without_showing_the_token(url, options):
    with pytest.raises(ConfigError) as refused:
        open_writer(url, **options)

    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("libsql://shop.turso.io", "https://shop.turso.io/v2/pipeline"),
        ("libsql://shop.turso.io:8443?tls=1", "https://shop.turso.io:8443/v2/pipeline"),
        ("libsql://127.0.0.1:8080?tls=0", "http://127.0.0.1:8080/v2/pipeline"),
        ("https://host/dev/shop/", "https://host/dev/shop/v2/pipeline"),
        ("http://[::1]:8080", "http://[::1]:8080/v2/pipeline"),
    ],
)
def test_url_says_where_requests_go(url, address):
    assert str(LibsqlWriter(url)._url) == address


@pytest.mark.parametrize("timeout", [0.15, "150ms", timedelta(seconds=0.15)])
async def test_timeout_is_seconds_or_a_duration(server, make_writer, timeout):
    server.faults.append(Fault(until=asyncio.Event()))

    outage = await outage_of(make_writer(server.url, timeout=timeout))

    assert "no answer within 150ms" in str(outage)


async def test_https_server_is_known_by_its_authority(tmp_path, make_writer):
    folder = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    async with serve_hrana(tmp_path / "remote.db", tls=context) as server:
        url = f"libsql://127.0.0.1:{server.port}"

        await make_writer(url, tls_ca=str(folder / "ca.pem")).open()
        with pytest.raises(SinkUnavailable, match="certificate verify failed"):
            await make_writer(url).open()

        assert len(server.bodies) == 1


# -- the server itself -----------------------------------------------------------------------------------------------


async def test_stream_lives_from_baton_to_baton_and_expires(tmp_path):
    async with serve_hrana(tmp_path / "remote.db", idle=0.3) as server, httpx.AsyncClient(trust_env=False) as http:

        async def ask(*requests: dict[str, Any], baton: str | None = None) -> Any:
            return await http.post(f"{server.url}/v3/pipeline", json={"baton": baton, "requests": requests})

        begun = await ask({"type": "sequence", "sql": "CREATE TABLE t (a); BEGIN; INSERT INTO t VALUES (1)"})
        held = await ask({"type": "get_autocommit"}, baton=begun.json()["baton"])
        reused = await ask({"type": "get_autocommit"}, baton=begun.json()["baton"])
        while server.open_streams():
            await asyncio.sleep(0.01)
        expired = await ask({"type": "close"}, baton=held.json()["baton"])
        left = await ask({"type": "execute", "stmt": {"sql": "SELECT a FROM t"}}, {"type": "close"})

    assert held.json()["results"][0]["response"] == {"type": "get_autocommit", "is_autocommit": False}
    assert [reused.status_code, expired.status_code] == [400, 400]
    assert expired.json()["code"] == "STREAM_EXPIRED"
    assert left.json()["results"][0]["response"]["result"]["rows"] == []


async def test_stored_texts_conditions_and_descriptions_are_understood(server: HranaServer):
    steps = [
        {"stmt": {"sql_id": 1}},
        {"stmt": {"sql": "SELECT 2"}, "condition": {"type": "error", "step": 0}},
        {
            "stmt": {"sql": "SELECT 3"},
            "condition": {"type": "and", "conds": [{"type": "ok", "step": 0}, {"type": "is_autocommit"}]},
        },
        {
            "stmt": {"sql": "SELECT 4"},
            "condition": {
                "type": "or",
                "conds": [{"type": "ok", "step": 1}, {"type": "not", "cond": {"type": "is_autocommit"}}],
            },
        },
    ]
    requests = [
        {"type": "store_sql", "sql_id": 1, "sql": "SELECT 1"},
        {"type": "batch", "batch": {"steps": steps}},
        {"type": "describe", "sql": "SELECT ? AS a, :b AS b"},
        {"type": "close_sql", "sql_id": 1},
        {"type": "close"},
    ]
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{server.url}/v3/pipeline", json={"baton": None, "requests": requests})

    results = answer.json()["results"]
    assert [each["type"] for each in results] == ["ok"] * 5
    assert [each and each["rows"][0][0]["value"] for each in results[1]["response"]["result"]["step_results"]] == [
        *("1", None, "3", None),
    ]
    described = results[2]["response"]["result"]
    assert (len(described["params"]), [each["name"] for each in described["cols"]]) == (2, ["a", "b"])
