"""What every writer does with a batch: order, all or nothing, whom it blames, and what arguments become."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from pillarbox.sync.writers import describe, mysql
from tests.contract.sync_writers import WriterKit, every_writer, writer, writer_kit, writers_that

__all__ = ["writer", "writer_kit"]

DONE = {"ok": True, "rows_affected": 1}


def failed(results: Any) -> tuple[int, str, str]:
    """The place, the kind and the text of the only failure, which must be the last answer."""
    *before, last = results
    assert all(result["ok"] for result in before)
    assert not last["ok"]
    return len(before), last["kind"], last["error"]


# -- order and atomicity ---------------------------------------------------------------------------------------------


@every_writer
async def test_writer_is_atomic(kit, writer):
    traits = describe(writer)
    assert (traits.batches, traits.dialect) == ("atomic", kit.dialect)
    assert traits.concurrency == kit.concurrency


@every_writer
async def test_statements_run_in_order_with_one_answer_each(kit, writer):
    table = kit.table
    results = await writer.write_batch(
        [
            kit.insert(1),
            kit.insert(2),
            kit.insert(3),
            (f"UPDATE {table} SET amount = amount + ? WHERE id = ?", [1, 1]),
            (f"UPDATE {table} SET note = ?", ["seen"]),
            (f"DELETE FROM {table} WHERE id > ?", [1]),
            (f"SELECT id, note FROM {table} ORDER BY id", []),
            kit.insert(2, "again"),
            (f"UPDATE {table} SET note = ? WHERE id = ?", ["x", 99]),
        ]
    )
    assert results == [
        DONE,
        DONE,
        DONE,
        DONE,
        {"ok": True, "rows_affected": 3},
        {"ok": True, "rows_affected": 2},
        {"ok": True, "rows": [[1, "seen"]]},
        DONE,
        {"ok": True, "rows_affected": 0},
    ]
    assert kit.query(f"SELECT id, name, note FROM {table} ORDER BY id") == [(1, "name 1", "seen"), (2, "again", None)]


@every_writer
async def test_later_statement_of_a_group_sees_the_earlier_ones(kit, writer):
    await writer.write_batch([kit.insert(1, note="")])
    append = f"UPDATE {kit.table} SET note = {'CONCAT(note, ?)' if kit.dialect == 'mysql' else 'note || ?'}"
    await writer.write_batch([(append, [letter]) for letter in "abcdef"])
    assert kit.query(f"SELECT note FROM {kit.table}") == [("abcdef",)]


@every_writer
async def test_update_that_changes_nothing_still_counts_the_row_it_found(kit, writer):
    await writer.write_batch([kit.insert(1, note="same")])
    assert await writer.write_batch([kit.update(1, "same")]) == [DONE]


@every_writer
async def test_failing_third_of_five_leaves_nothing(kit, writer):
    await writer.write_batch([kit.insert(1)])
    results = await writer.write_batch([kit.insert(number) for number in (10, 11, 1, 12, 13)])
    assert failed(results)[:2] == (2, "bad")
    assert kit.ids() == [1]
    # The connection is usable, and not in a transaction.
    assert await writer.write_batch([kit.insert(10)]) == [DONE]
    assert kit.ids() == [1, 10]


@every_writer
@pytest.mark.parametrize("place", range(9))
async def test_blames_the_statement_that_failed(kit, writer, place):
    await writer.write_batch([kit.insert(1), kit.insert(2)])
    batch = [
        kit.update(1, "a"),
        kit.insert(10),
        kit.insert(11),
        kit.insert(12),
        kit.update(2, "b"),
        kit.update(1, "c"),
        (f"SELECT id FROM {kit.table}", []),
        kit.insert(13),
        kit.insert(14),
    ]
    # As one of its group where it is in one: the same statement with a value that is refused.
    same_as_neighbours = place not in (0, 4, 5, 6)
    batch[place] = kit.insert(1) if same_as_neighbours else kit.insert(20, None)
    assert failed(await writer.write_batch(batch))[:2] == (place, "bad")
    assert kit.ids() == [1, 2]


@every_writer
async def test_failure_late_in_a_large_batch_is_blamed_exactly(kit, writer):
    batch = [kit.insert(number) for number in range(500)]
    batch[437] = kit.insert(5, "twice")
    assert failed(await writer.write_batch(batch))[0] == 437
    assert kit.ids() == []


@every_writer
async def test_nothing_to_write_is_nothing(kit, writer):
    assert await writer.write_batch([]) == []


@every_writer
async def test_four_batches_at_once_are_all_written(kit, writer):
    batches = [[kit.insert(100 * batch + number) for number in range(20)] for batch in range(8)]
    answers = await asyncio.gather(*(writer.write_batch(batch) for batch in batches))
    assert answers == [[DONE] * 20] * 8
    assert len(kit.ids()) == 160


@writers_that("locks rows")
async def test_batches_run_beside_each_other(kit, writer):
    await writer.write_batch([kit.insert(number) for number in range(4)])
    others = [kit.lock_row(number) for number in range(4)]
    running = [asyncio.create_task(writer.write_batch([kit.update(number, "x")])) for number in range(4)]
    assert len(await kit.until_waiting(4)) == 4
    for other in others:
        other.rollback()
        other.close()
    assert await asyncio.gather(*running) == [[DONE]] * 4


# -- errors ----------------------------------------------------------------------------------------------------------


def bad_statements(kit: WriterKit) -> dict[str, Any]:
    return {
        "unique": (kit.insert(1), ("unique", "duplicate")),
        "not null": (kit.insert(9, None), ("null",)),
        "check": (kit.insert(9, amount=-1), ("check", "constraint")),
        "syntax": (("INSRET INTO x VALUES (1)", []), ("syntax",)),
        "table": ((f"INSERT INTO {kit.table}_none VALUES (?)", [1]), ("no such table", "exist")),
        "column": ((f"UPDATE {kit.table} SET missing = ?", [1]), ("no such column", "column")),
        "arguments": ((f"UPDATE {kit.table} SET note = ?", ["a", "b"]), ("1 placeholders", "2 arguments")),
        "commit": (("COMMIT", []), ("controls a transaction",)),
        "two": ((f"DELETE FROM {kit.table}; DELETE FROM {kit.table}", []), ("one statement", "multiple commands")),
        "type": (kit.insert(9, note=datetime(2026, 1, 1, tzinfo=UTC)), ("argument 3 is of type datetime",)),
        "surrogate": (kit.insert(9, note="\ud800"), ("argument 3 is no valid text",)),
    }


@every_writer
@pytest.mark.parametrize(
    "what",
    ["unique", "not null", "check", "syntax", "table", "column", "arguments", "commit", "two", "type", "surrogate"],
)
async def test_refused_statement_surfaces_with_its_reason(kit, writer, what):
    await writer.write_batch([kit.insert(1)])
    statement, words = bad_statements(kit)[what]
    for batch in ([statement], [kit.insert(2), statement, kit.insert(3)]):
        place, kind, error = failed(await writer.write_batch(batch))
        assert (place, kind) == (len(batch) // 2, "bad")
        assert any(word in error.lower() for word in words), error
    assert kit.ids() == [1]


@every_writer
async def test_error_has_the_databases_code_and_not_the_other_values(kit, writer):
    await writer.write_batch([kit.insert(1, "taken")])
    _, _, error = failed(await writer.write_batch([kit.insert(2, "taken", note="confidential")]))
    assert kit.duplicate_code in error
    assert "name" in error
    assert "confidential" not in error


@every_writer
async def test_missing_parent_may_come_later(kit, writer):
    if kit.dialect == "mysql":
        kit.execute(
            f"ALTER TABLE {kit.table} ADD CONSTRAINT {kit.table}_f FOREIGN KEY (parent) REFERENCES {kit.table} (id)"
        )
    place, kind, error = failed(await writer.write_batch([kit.insert(1), kit.insert(2, parent=77)]))
    assert (place, kind) == (1, "later")
    assert "foreign key" in error.lower()
    assert kit.ids() == []


@writers_that(only=["sqlite", "postgresql", "libsql"])
async def test_constraint_that_is_checked_at_commit_leaves_nothing(kit, writer):
    deferred = f"{kit.table}_d"
    kit.execute(
        f"CREATE TABLE {deferred} (id int PRIMARY KEY, up int REFERENCES {deferred} DEFERRABLE INITIALLY DEFERRED)"
    )
    insert = f"INSERT INTO {deferred} VALUES (?, ?)"
    assert await writer.write_batch([(insert, [1, 2]), (insert, [2, None])]) == [DONE, DONE]
    place, kind, error = failed(await writer.write_batch([(insert, [3, None]), (insert, [4, 5])]))
    assert (place, kind) == (1, "later")
    assert "foreign key" in error.lower()
    assert kit.query(f"SELECT id FROM {deferred} ORDER BY id") == [(1,), (2,)]
    assert await writer.write_batch([(insert, [3, None])]) == [DONE]
    await writer.close()
    kit.execute(f"DROP TABLE {deferred}")


@writers_that(only=["postgresql", "mariadb", "mysql"])
async def test_value_that_does_not_fit_its_column_is_refused(kit, writer):
    for more in ({"amount": 12345678}, {"at": "yesterday-ish"}, {"amount": "seven"}, {"doc": "{no json"}):
        place, kind, _ = failed(await writer.write_batch([kit.insert(1), kit.insert(2, **more)]))
        assert (place, kind) == (1, "bad"), more
    assert kit.ids() == []


@writers_that(only=["postgresql"])
@pytest.mark.parametrize("more", [{"doc": 5}, {"amount": True}, {"note": "a\x00b"}], ids=["number", "bool", "nul"])
async def test_postgres_refuses_a_value_of_another_kind(kit, writer, more):
    batch = [kit.insert(number, **dict.fromkeys(more)) for number in range(200)]
    batch[150] = kit.insert(150, **more)
    place, kind, _ = failed(await writer.write_batch(batch))
    assert (place, kind) == (150, "bad")
    assert kit.ids() == []


# -- arguments -------------------------------------------------------------------------------------------------------


def instants(kit: WriterKit) -> tuple[str, Any]:
    if kit.dialect == "postgresql":
        return "2026-05-01T12:00:00.25+02:00", datetime(2026, 5, 1, 10, 0, 0, 250_000, UTC)
    if kit.dialect == "mysql":
        return "2026-05-01T12:00:00.25", datetime(2026, 5, 1, 12, 0, 0, 250_000)  # noqa: DTZ001
    return "2026-05-01T12:00:00.25", "2026-05-01T12:00:00.25"


@every_writer
async def test_values_arrive_as_they_were(kit, writer):
    at, expected_at = instants(kit)
    text = 'it\'s "quoted", a \\backslash, 100 %s, a ? and a ☃ 🎈\n'
    raw = bytes(range(256))
    doc = {"b": [1, 2.5, None, True], "ü": "☃"}
    await writer.write_batch(
        [
            kit.insert(1, amount="12.34", note=text, at=at, raw=raw, doc=doc, ratio=0.1),
            kit.insert(2**62, amount=7, note=None, at=None, raw=b"", doc=[1, "x"], ratio=-1e300),
        ]
    )
    columns = "id, amount, note, at, raw, doc, ratio"
    first, second = kit.query(f"SELECT {columns} FROM {kit.table} ORDER BY id")
    read = [value if isinstance(value, dict | list) else json.loads(value) for value in (first[5], second[5])]
    assert read == [doc, [1, "x"]]
    assert (first[0], Decimal(str(first[1])), first[2], bytes(first[4]), first[6]) == (
        1,
        Decimal("12.34"),
        text,
        raw,
        0.1,
    )
    assert (first[3].astimezone(UTC) if kit.dialect == "postgresql" else first[3]) == expected_at
    assert (second[0], int(second[1]), second[2], second[3], bytes(second[4])) == (2**62, 7, None, None, b"")
    assert second[6] == -1e300


@every_writer
async def test_number_goes_into_a_text_column(kit, writer):
    assert await writer.write_batch([kit.insert(1, note=5), kit.insert(2, note=-70_000)]) == [DONE, DONE]
    assert kit.query(f"SELECT note FROM {kit.table} ORDER BY id") == [("5",), ("-70000",)]


@every_writer
async def test_true_and_false_are_booleans(kit, writer):
    flags = f"{kit.table}_b"
    kit.execute(f"CREATE TABLE {flags} (id int, flag boolean)")
    await writer.write_batch(
        [(f"INSERT INTO {flags} VALUES (?, ?)", [1, True]), (f"INSERT INTO {flags} VALUES (2, ?)", [False])]
    )
    assert kit.query(f"SELECT id FROM {flags} WHERE flag") == [(1,)]
    await writer.close()
    kit.execute(f"DROP TABLE {flags}")


@every_writer
async def test_percent_and_question_marks_in_a_statement_stay(kit, writer):
    written = "'50% of ? and %s, it''s'"
    await writer.write_batch(
        [
            (f"INSERT INTO {kit.table} (id, name, note) VALUES (1, 'a', {written}) -- is it 100%?", []),
            (f"INSERT INTO {kit.table} (id, name, note) VALUES (?, {written}, ?) /* 5% ? */;", [2, "x%s"]),
            (f"UPDATE {kit.table} SET amount = 10 % 4 WHERE note LIKE '50\\%%' OR name LIKE '50%?'", []),
        ]
    )
    stored = "50% of ? and %s, it's"
    assert kit.query(f"SELECT id, name, note FROM {kit.table} ORDER BY id") == [(1, "a", stored), (2, stored, "x%s")]


@every_writer
async def test_select_has_rows_and_no_transaction(kit, writer):
    await writer.write_batch([kit.insert(1, note="a"), kit.insert(2)])
    select = f"SELECT id, note FROM {kit.table} WHERE id >= ? ORDER BY id"
    assert await writer.write_batch([(select, [1])]) == [{"ok": True, "rows": [[1, "a"], [2, None]]}]
    assert await writer.write_batch([(select, [5])]) == [{"ok": True, "rows": []}]


@writers_that(only=["sqlite", "postgresql", "mariadb", "libsql"])
async def test_returning_has_rows_for_each_statement_of_a_group(kit, writer):
    sql = f"INSERT INTO {kit.table} (id, name) VALUES (?, ?) RETURNING id, name"
    results = await writer.write_batch([(sql, [number, f"n{number}"]) for number in (1, 2, 3)])
    assert results == [{"ok": True, "rows": [[number, f"n{number}"]]} for number in (1, 2, 3)]


@every_writer
async def test_ddl_is_written(kit, writer):
    assert (await writer.write_batch([(f"ALTER TABLE {kit.table} ADD COLUMN extra integer", [])]))[0]["ok"]
    assert await writer.write_batch([kit.insert(1, extra=5)]) == [DONE]
    place, kind, error = failed(await writer.write_batch([(f"ALTER TABLE {kit.table} ADD COLUMN extra integer", [])]))
    assert (place, kind) == (0, "bad")
    assert "extra" in error


@writers_that(only=["mariadb", "mysql"])
async def test_mysql_does_not_run_ddl_among_others_as_it_would_commit_them(kit, writer):
    batch = [kit.insert(1), (f"/* more */ ALTER TABLE {kit.table} ADD COLUMN extra integer", []), kit.insert(2)]
    place, kind, error = failed(await writer.write_batch(batch))
    assert (place, kind) == (1, "bad")
    assert "ALTER ends the transaction" in error
    assert kit.ids() == []


@writers_that(only=["mariadb", "mysql"])
async def test_mysql_statement_beyond_the_packet_limit_is_blamed(kit, writer):
    [(limit,)] = kit.query("SELECT @@global.max_allowed_packet")
    small = [kit.insert(1), kit.insert(2, note="x" * 900_000), kit.insert(3, note="y" * 900_000)]
    assert await writer.write_batch(small) == [DONE] * 3
    place, kind, error = failed(await writer.write_batch([kit.insert(4), kit.insert(5, note="z" * limit)]))
    assert (place, kind) == (1, "bad")
    assert f"takes {limit} (max_allowed_packet)" in error
    assert kit.ids() == [1, 2, 3]


@writers_that(only=["mariadb", "mysql"])
@pytest.mark.parametrize("sql", ["CALL {}_p()", "EXECUTE IMMEDIATE 'COMMIT'", "/*!40000 TRUNCATE */ TABLE {}"])
async def test_mysql_runs_nothing_that_may_commit_by_itself(kit, writer, sql):
    place, kind, error = failed(await writer.write_batch([kit.insert(1), (sql.format(kit.table), []), kit.insert(2)]))
    assert (place, kind) == (1, "bad")
    assert "may commit by itself" in error
    assert kit.ids() == []


@writers_that(only=["mariadb", "mysql"])
async def test_mysql_statement_that_committed_all_the_same_is_blamed_and_told(kit, writer, monkeypatch, caplog):
    monkeypatch.setattr(mysql, "check_statement", lambda *_, **__: None)
    kit.execute(f"CREATE PROCEDURE {kit.table}_p() BEGIN COMMIT; END")
    results = await writer.write_batch([kit.insert(1), kit.insert(2), (f"CALL {kit.table}_p()", []), kit.insert(3)])
    kit.execute(f"DROP PROCEDURE {kit.table}_p")
    place, kind, error = failed(results)
    assert (place, kind) == (2, "bad")
    assert "committed the transaction by itself" in error
    assert "Statement 3 of a batch" in caplog.text
    # The connection is in order.
    assert await writer.write_batch([kit.insert(4), kit.insert(5)]) == [DONE] * 2


SETTINGS = {
    "sqlite": ["PRAGMA foreign_keys = OFF", "ATTACH ':memory:' AS other", "CREATE TEMP TABLE {} (id integer)"],
    "postgresql": ["SET search_path TO pg_catalog", "RESET ALL", "DISCARD ALL", "CREATE TEMP TABLE {} (id int)"],
    "mysql": ["SET sql_mode = ''", "USE mysql", "SET @a = 1", "CREATE TEMPORARY TABLE {} (id int)"],
}


@every_writer
async def test_nothing_changes_the_session_of_later_batches(kit, writer):
    for sql in SETTINGS[kit.dialect]:
        batch = [kit.insert(1), (sql.format(kit.table), [])]
        place, kind, error = failed(await writer.write_batch(batch))
        assert (place, kind, "changes the session of later batches" in error) == (1, "bad", True), (sql, error)
    assert kit.ids() == []


@writers_that(only=["postgresql"])
async def test_postgres_plan_that_is_out_of_date_is_made_again(kit, writer):
    select = (f"SELECT * FROM {kit.table} WHERE id = ?", [1])
    for _ in range(10):
        await writer.write_batch([select])
    kit.execute(f"ALTER TABLE {kit.table} ADD COLUMN extra integer")
    [answer] = await writer.write_batch([select])
    assert answer == {"ok": True, "rows": []}


@writers_that(only=["sqlite"])
async def test_sqlite_enforces_foreign_keys_unless_told_not_to(kit):
    lenient = kit.make_writer(f"{kit.url}?foreign_keys=no")
    assert await lenient.write_batch([kit.insert(2, parent=77)]) == [DONE]


@every_writer
async def test_timeout_is_seconds_or_a_duration(kit):
    for timeout in (5, 0.5, "5s", timedelta(seconds=5)):
        assert await kit.make_writer(timeout=timeout).write_batch([("SELECT 1", [])]) == [{"ok": True, "rows": [[1]]}]


@writers_that(only=["postgresql"])
async def test_postgres_numbers_have_the_types_of_written_ones(kit, writer):
    kit.execute(f"ALTER TABLE {kit.table} ADD COLUMN whole integer, ADD COLUMN exact numeric")
    await writer.write_batch([kit.insert(1, whole=10, exact="12345678901234567890.5", note="abcdef")])
    results = await writer.write_batch(
        [
            (f"UPDATE {kit.table} SET exact = exact + ?, amount = ? * ?", [0.1, 300, 300]),
            (f"UPDATE {kit.table} SET whole = whole * ?", [1.5]),
            (f"UPDATE {kit.table} SET note = substr(note, ?)", [3]),
        ]
    )
    assert results == [DONE] * 3
    assert kit.query(f"SELECT exact, amount, whole, note FROM {kit.table}") == [
        (Decimal("12345678901234567890.6"), Decimal(90000), 15, "cdef")
    ]


@writers_that(only=["postgresql"])
@pytest.mark.parametrize("value", [0.1, -1.5, 5e-324, 1.7976931348623157e308, 1e22, 2**31, -(2**63), 2**63 - 1])
async def test_postgres_number_that_is_only_stored_comes_back(kit, writer, value):
    kit.execute(f"ALTER TABLE {kit.table} ADD COLUMN long bigint")
    column = "ratio" if isinstance(value, float) else "long"
    assert await writer.write_batch([kit.insert(1, **{column: value})]) == [DONE]
    assert kit.query(f"SELECT {column} FROM {kit.table}") == [(value,)]


@writers_that(only=["mariadb", "mysql"])
async def test_mysql_session_is_in_utc(kit, writer):
    assert await writer.write_batch([("SELECT @@session.time_zone", [])]) == [{"ok": True, "rows": [["+00:00"]]}]


@writers_that(only=["mysql"])
async def test_mysql_turns_a_time_with_an_offset_into_utc(kit, writer):
    assert await writer.write_batch([kit.insert(1, at="2026-01-02T03:04:05+02:00")]) == [DONE]
    assert kit.query(f"SELECT CAST(at AS char(19)) FROM {kit.table}") == [("2026-01-02 01:04:05",)]
