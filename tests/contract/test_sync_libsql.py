"""The libSQL writer against a Hrana server, and an independent client at the other end of the same database."""

from __future__ import annotations

import asyncio

import libsql_client
import pytest

from pillarbox.sync.writers import describe, open_writer
from pillarbox.sync.writers.libsql import LibsqlWriter
from tests.contract.libsql_fixtures import (
    insert,
    libsql_client_,
    libsql_server,
    libsql_table,
    libsql_url,
    made_writers,
    names_in,
    outage_of,
)
from tests.hrana_server import Fault

__all__ = ["libsql_client_", "libsql_server", "libsql_table", "libsql_url", "made_writers"]

VALUES = (
    (1, "integer", 1),
    (-(2**63), "integer", -(2**63)),
    (2**53 + 1, "integer", 2**53 + 1),
    (2.5, "real", 2.5),
    (1e300, "real", 1e300),
    (3.0, "real", 3.0),
    ("Grüße\n'☃'", "text", "Grüße\n'☃'"),
    (None, "null", None),
    (b"\x00\xff\x01\xfe", "blob", b"\x00\xff\x01\xfe"),
    (b"", "blob", b""),
)


# -- what a batch does -----------------------------------------------------------------------------------------------


def test_writer_is_chosen_by_its_scheme_and_says_that_it_is_atomic():
    writer = open_writer("libsql://shop.turso.io", auth_token="t", connections=7)

    traits = describe(writer)

    assert isinstance(writer, LibsqlWriter)
    assert (traits.batches, traits.dialect, traits.concurrency) == ("atomic", "sqlite", 7)


async def test_statements_of_a_batch_run_in_order(url, table, client, make_writer):
    writer = make_writer(url)

    results = await writer.write_batch(
        [
            insert(table, "a", 1),
            insert(table, "b", 2),
            (f"UPDATE {table} SET amount = amount * 10", ()),
            (f"DELETE FROM {table} WHERE amount = ?", (10,)),
            (f"SELECT name, amount FROM {table}", ()),
        ]
    )

    assert [each["ok"] for each in results] == [True] * 5
    assert [each["rows_affected"] for each in results[:4]] == [1, 1, 2, 1]
    assert results[4]["rows"] == [["b", 20]]
    assert await names_in(client, table) == ["b"]


async def test_empty_batch_asks_nothing(server, make_writer):
    assert await make_writer(server.url).write_batch([]) == []
    assert server.bodies == []


async def test_batch_is_one_request_on_a_stream_that_it_closes(server, make_writer):
    writer = make_writer(server.url)

    await writer.write_batch([("CREATE TABLE t (a)", ()), *(("INSERT INTO t VALUES (?)", (n,)) for n in range(500))])

    [body] = server.bodies
    assert [each["type"] for each in body["requests"]] == ["batch", "close"]
    assert len(body["requests"][0]["batch"]["steps"]) == 504
    assert server.open_streams() == 0


async def test_lone_select_begins_no_transaction(server, make_writer):
    [result] = await make_writer(server.url).write_batch([(" /* why */ select ?", (1,))])

    [body] = server.bodies
    assert [each["type"] for each in body["requests"]] == ["execute", "close"]
    assert result["rows"] == [[1]]


async def test_failing_statement_undoes_those_before_it(url, table, client, make_writer):
    writer = make_writer(url)
    await writer.write_batch([insert(table, "there")])

    results = await writer.write_batch([insert(table, "a"), insert(table, "there"), insert(table, "b")])

    assert [each["ok"] for each in results] == [True, False]
    assert results[1]["error"] == f"SQLite error: UNIQUE constraint failed: {table}.name (SQLITE_CONSTRAINT)"
    assert results[1]["kind"] == "bad"
    assert await names_in(client, table) == ["there"]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("INSERT INTO {table} (name) VALUES (NULL)", "NOT NULL constraint failed"),
        ("INSERT INTO {table} (name, amount) VALUES ('a', 13)", "CHECK constraint failed"),
        ("INSERT INTO {table} (id, name) VALUES ('x', 'a')", "datatype mismatch"),
        ("INSERT INTO {table} (nme) VALUES ('a')", "no column named nme"),
        ("INSERT INTO nowhere VALUES (1)", "no such table: nowhere"),
        ("INSERT INTO {table} (name) VALUES (?)", "the statement has 1 placeholders, but there are 0 arguments"),
        ("INSRT INTO {table} (name) VALUES ('a')", "could not be parsed"),
        ("SELECT 1; SELECT 2", "more than one statement"),
        ("SELECT 1 WHERE", "could not be parsed"),
        ("; ;", "does not contain any statement"),
    ],
    ids=[
        "null",
        "check",
        "type",
        "column",
        "table",
        "arguments",
        "syntax",
        "two statements",
        "half a statement",
        "no statement",
    ],
)
async def test_statement_that_the_database_refuses_is_named(url, table, client, make_writer, sql, said):
    writer = make_writer(url)

    results = await writer.write_batch([insert(table, "before"), (sql.format(table=table), ()), insert(table, "after")])

    assert [each["ok"] for each in results] == [True, False]
    assert said in results[1]["error"]
    assert results[1]["kind"] == "bad"
    assert await names_in(client, table) == []


async def test_missing_parent_may_come_later(url, table, client, make_writer):
    writer, child = make_writer(url), f"{table}_child"
    await writer.write_batch([(f"CREATE TABLE {child} (note REFERENCES {table} (id))", ())])

    [result] = await writer.write_batch([(f"INSERT INTO {child} VALUES (99)", ())])
    await writer.write_batch([(f"DROP TABLE {child}", ())])

    assert (result["ok"], result["kind"]) == (False, "later")
    assert "FOREIGN KEY constraint failed" in result["error"]


async def test_constraint_that_fails_at_commit_is_the_last_statements(url, table, client, make_writer):
    writer, child = make_writer(url), f"{table}_child"
    await writer.write_batch(
        [(f"CREATE TABLE {child} (note REFERENCES {table} (id) DEFERRABLE INITIALLY DEFERRED)", ())]
    )

    results = await writer.write_batch([insert(table, "a"), (f"INSERT INTO {child} VALUES (99)", ())])
    [left] = await writer.write_batch([(f"SELECT count(*) FROM {child}", ())])
    await writer.write_batch([(f"DROP TABLE {child}", ())])

    assert [each["ok"] for each in results] == [True, False]
    assert results[1]["kind"] == "later"
    assert left["rows"] == [[0]]
    assert await names_in(client, table) == []


async def test_conflict_clause_that_keeps_half_or_ends_the_transaction_leaves_nothing(url, table, client, make_writer):
    writer = make_writer(url)
    await writer.write_batch([insert(table, "there")])

    for clause in ("FAIL", "ROLLBACK"):
        several = f"INSERT OR {clause} INTO {table} (name) VALUES ('x'), ('there')"
        results = await writer.write_batch([insert(table, "before"), (several, ()), insert(table, "after")])
        [alone] = await writer.write_batch([(several, ())])

        assert [each["ok"] for each in results] == [True, False]
        assert not alone["ok"]
        assert await names_in(client, table) == ["there"]


@pytest.mark.parametrize("sql", ["COMMIT", "  end", "/* a */ Rollback", "-- a\nBEGIN", ";SAVEPOINT s", "RELEASE s"])
async def test_statement_that_would_end_the_transaction_is_not_sent(server, make_writer, sql):
    results = await make_writer(server.url).write_batch([("SELECT 1", ()), (sql, ())])

    assert [each["ok"] for each in results] == [True, False]
    assert results[1]["kind"] == "bad"
    assert "controls a transaction" in results[1]["error"]
    assert server.bodies == []


# -- values ----------------------------------------------------------------------------------------------------------


async def test_what_the_writer_writes_the_client_reads(url, table, client, make_writer):
    writer = make_writer(url)

    await writer.write_batch([insert(table, str(place), value) for place, (value, _, _) in enumerate(VALUES)])

    found = await client.execute(f"SELECT amount, typeof(amount) FROM {table} ORDER BY id")
    assert [(row[0], row[1]) for row in found.rows] == [(expected, kind) for _, kind, expected in VALUES]
    assert [type(row[0]) for row in found.rows] == [type(expected) for _, _, expected in VALUES]


async def test_what_the_client_writes_the_writer_reads(url, table, client, make_writer):
    await client.batch(
        [
            libsql_client.Statement(f"INSERT INTO {table} (name, amount) VALUES (?, ?)", [str(place), value])
            for place, (value, _, _) in enumerate(VALUES)
        ]
    )

    [result] = await make_writer(url).write_batch([(f"SELECT amount, typeof(amount) FROM {table} ORDER BY id", ())])

    assert result["rows"] == [[expected, kind] for _, kind, expected in VALUES]
    assert [type(row[0]) for row in result["rows"]] == [type(expected) for _, _, expected in VALUES]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (True, 1),
        (False, 0),
        ([1, "é", None], '[1,"é",null]'),
        ({"a": {"b": [2.5]}}, '{"a":{"b":[2.5]}}'),
        (bytearray(b"\x01"), b"\x01"),
    ],
    ids=["true", "false", "list", "dict", "bytearray"],
)
async def test_value_that_sqlite_lacks_is_stored_as_one_that_it_has(url, table, make_writer, value, stored):
    writer = make_writer(url)

    await writer.write_batch([insert(table, "a", value)])

    [result] = await writer.write_batch([(f"SELECT amount FROM {table}", ())])
    assert result["rows"] == [[stored]]
    assert type(result["rows"][0][0]) is type(stored)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2**63, "argument 2: 9223372036854775808 does not fit into 64 bits"),
        (-(2**63) - 1, "argument 2: -9223372036854775809 does not fit into 64 bits"),
        (float("inf"), "argument 2: inf has no form in JSON"),
        ("half \ud800", "argument 2 is no valid text: surrogates not allowed"),
        ({"a": object()}, "argument 2 cannot be written as JSON: Object of type object is not JSON serializable"),
        (object(), "argument 2 is of type object; expected None, bool, int, float, str, bytes, list or dict"),
    ],
    ids=["too large", "too small", "infinite", "surrogate", "in a dict", "object"],
)
async def test_value_without_a_form_is_a_bad_statement(server, make_writer, value, said):
    results = await make_writer(server.url).write_batch([("SELECT 1", ()), ("SELECT ?, ?", (1, value))])

    assert [each["ok"] for each in results] == [True, False]
    assert results[1]["kind"] == "bad"
    assert results[1]["error"].startswith(said)
    assert server.bodies == []


# -- several at once -------------------------------------------------------------------------------------------------


async def test_batches_of_two_writers_do_not_mix(url, table, client, make_writer):
    await client.execute(f"INSERT INTO {table} (name, amount) VALUES ('counter', 0)")
    # Read and write: lost updates would show.
    step = (f"UPDATE {table} SET amount = (SELECT amount FROM {table} WHERE name = 'counter') + 2", ())

    async def work(writer: LibsqlWriter) -> None:
        for _ in range(5):
            results = await writer.write_batch([step] * 10)
            assert all(each["ok"] for each in results)

    await asyncio.gather(*(work(writer) for writer in (make_writer(url), make_writer(url)) for _ in range(2)))

    found = await client.execute(f"SELECT amount FROM {table}")
    assert found.rows[0][0] == 400


async def test_open_transaction_of_the_client_is_waited_for_and_not_seen(server, tmp_path, make_writer):
    writer = make_writer(server.url)
    await writer.write_batch([("CREATE TABLE t (a)", ())])

    async with libsql_client.create_client(server.url.replace("http", "ws")) as client:
        transaction = client.transaction()
        await transaction.execute("INSERT INTO t VALUES (1)")
        [before] = await writer.write_batch([("SELECT count(*) FROM t", ())])
        writing = asyncio.create_task(writer.write_batch([("INSERT INTO t VALUES (2)", ())]))
        while len(server.bodies) < 4:  # BEGIN IMMEDIATE was refused at least once
            await asyncio.sleep(0.01)
        await transaction.commit()

    assert before["rows"] == [[0]]
    assert [each["ok"] for each in await writing] == [True]
    [after] = await writer.write_batch([("SELECT a FROM t ORDER BY rowid", ())])
    assert after["rows"] == [[1], [2]]


async def test_lock_that_lasts_blames_no_statement(server, make_writer):
    writer = make_writer(server.url)
    await writer.write_batch([("CREATE TABLE t (a)", ())])

    async with libsql_client.create_client(server.url.replace("http", "ws")) as client:
        transaction = client.transaction()
        await transaction.execute("INSERT INTO t VALUES (1)")
        outage = await outage_of(writer, ("INSERT INTO t VALUES (2)", ()))
        await transaction.rollback()

    assert str(outage) == (
        f"{server.url}: takes nothing now: SQLite error: database is locked (SQLITE_BUSY); nothing was written"
    )
    assert sum(len(body["requests"][0]["batch"]["steps"]) for body in server.bodies[1:]) == 4 * 4


async def test_no_more_calls_than_connections_are_under_way(server, make_writer):
    writer = make_writer(server.url, connections=2)
    release = asyncio.Event()
    server.faults.extend([Fault(is_done=True, until=release)] * 5)

    calls = [asyncio.create_task(writer.write_batch([("SELECT ?", (n,))])) for n in range(5)]
    while len(server.bodies) < 2:
        await asyncio.sleep(0.01)
    release.set()
    results = await asyncio.gather(*calls)

    assert [each[0]["rows"] for each in results] == [[[n]] for n in range(5)]
    assert server.most_at_once == 2
