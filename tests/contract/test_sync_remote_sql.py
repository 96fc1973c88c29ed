"""The texts that the write-behind service sends for itself do what they say, on every database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pillarbox.sync import remote_sql
from pillarbox.sync.remote_sql import Statement
from tests.contract.sync_remotes import SERVERS, RemoteDatabase, Session, Violation, remote_database

QUEUE, TOKEN, OTHER = "0192-queue", "0192-token", "0192-other"
AT = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture(params=SERVERS)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteDatabase]:
    with remote_database(request.param, tmp_path) as database:
        yield database


@pytest.fixture
def session(remote: RemoteDatabase) -> Iterator[Session]:
    session = remote.connect()
    yield session
    session.close()


@pytest.fixture
def other(remote: RemoteDatabase) -> Iterator[Session]:
    session = remote.connect()
    yield session
    session.close()


def send(session: Session, statement: Statement) -> list[tuple[Any, ...]]:
    return session.run(*statement)


def set_up_mark(session: Session, *, applied: int) -> None:
    session.run(remote_sql.marks_ddl(session.dialect))
    send(session, remote_sql.create_mark(QUEUE, "orders", applied=applied, dialect=session.dialect))


# -- the column -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["orders", "Order items", "x" * 60, "select"])
def test_column_and_index_are_added_and_dropped(session: Session, table: str) -> None:
    dialect = session.dialect
    name = remote_sql.quote_table(table, dialect)
    session.run(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    session.run(f"INSERT INTO {name} (id) VALUES (1), (2)")
    for sql in remote_sql.schema_sql([table], dialect):
        session.run(sql)
    assert send(session, remote_sql.select_columns(table, dialect)) == [("id",), ("outbox_seq",)]
    assert send(session, remote_sql.select_index(table, dialect)) == [(remote_sql.index_name(table, dialect),)]
    assert send(session, remote_sql.select_maximum(table, dialect)) == [(0,)]
    session.run(f"INSERT INTO {name} (id, outbox_seq) VALUES (3, 41), (4, 40)")
    session.run(f"INSERT INTO {name} (id) VALUES (5)")
    assert send(session, remote_sql.select_maximum(table, dialect)) == [(41,)]
    with pytest.raises(Violation):
        session.run(f"INSERT INTO {name} (id, outbox_seq) VALUES (6, 41)")
    for sql in remote_sql.drop_schema_sql([table], dialect):
        session.run(sql)
    assert send(session, remote_sql.select_columns(table, dialect)) == [("id",)]
    assert send(session, remote_sql.select_index(table, dialect)) == []


def test_table_with_a_schema_is_found_there(session: Session, remote: RemoteDatabase) -> None:
    dialect = session.dialect
    table = f"{remote.schema}.orders"
    name = remote_sql.quote_table(table, dialect)
    session.run(f"CREATE TABLE {name} (b int, a int)")
    for sql in remote_sql.schema_sql([table], dialect):
        session.run(sql)
    assert send(session, remote_sql.select_columns(table, dialect)) == [("b",), ("a",), ("outbox_seq",)]
    assert send(session, remote_sql.select_index(table, dialect)) == [("idx_orders_outbox_seq",)]
    assert send(session, remote_sql.select_maximum(table, dialect)) == [(0,)]
    for sql in remote_sql.drop_schema_sql([table], dialect):
        session.run(sql)
    assert send(session, remote_sql.select_columns(table, dialect)) == [("b",), ("a",)]


def test_missing_table_has_no_columns(session: Session) -> None:
    assert send(session, remote_sql.select_columns("orders", session.dialect)) == []
    assert send(session, remote_sql.select_index("orders", session.dialect)) == []


def test_index_of_another_column_or_several_does_not_count(session: Session) -> None:
    session.run("CREATE TABLE orders (id int, outbox_seq bigint)")
    session.run("CREATE UNIQUE INDEX one ON orders (id)")
    session.run("CREATE UNIQUE INDEX two ON orders (outbox_seq, id)")
    session.run("CREATE INDEX three ON orders (outbox_seq)")
    assert send(session, remote_sql.select_index("orders", session.dialect)) == []
    session.run("CREATE UNIQUE INDEX four ON orders (outbox_seq)")
    assert send(session, remote_sql.select_index("orders", session.dialect)) == [("four",)]


def test_index_names_keep_within_the_limit_and_apart() -> None:
    first, second = (f"{'ä' * 40}{ending}" for ending in ("one", "two"))
    names = {remote_sql.index_name(each, "postgresql") for each in (first, second)}
    assert len(names) == 2
    assert all(len(each.encode()) <= 63 and each.endswith("_outbox_seq") for each in names)
    assert len(remote_sql.index_name("t" * 64, "mysql")) == 64
    assert remote_sql.index_name("app.orders", "postgresql") == "idx_orders_outbox_seq"


def test_columns_added_by_us_are_remembered_and_forgotten(session: Session) -> None:
    for _ in range(2):
        session.run(remote_sql.added_ddl(session.dialect))
        send(session, remote_sql.record_added("orders", added_at=AT, dialect=session.dialect))
    send(session, remote_sql.record_added("Orders", added_at=AT, dialect=session.dialect))
    assert send(session, remote_sql.select_added()) == [("Orders",), ("orders",)]
    send(session, remote_sql.forget_added("orders"))
    assert send(session, remote_sql.select_added()) == [("Orders",)]


# -- the mark ---------------------------------------------------------------------------------------------------------


def test_mark_is_made_once_and_moved(session: Session) -> None:
    set_up_mark(session, applied=3)
    set_up_mark(session, applied=9)
    assert send(session, remote_sql.read_mark(QUEUE)) == [(3, "")]
    assert send(session, remote_sql.read_mark("another")) == []
    session.begin()
    send(session, remote_sql.advance_mark(QUEUE, known=(3, ""), applied=5, token=TOKEN))
    send(session, remote_sql.guard_mark(QUEUE, applied=5, token=TOKEN))
    session.commit()
    assert send(session, remote_sql.read_mark(QUEUE)) == [(5, TOKEN)]


@pytest.mark.parametrize(
    ("known", "signature", "applied"),
    [(2, "", 5), (9, "", 12), (3, OTHER, 5)],
    ids=["mark is ahead of what we know", "mark is behind what we know", "mark is signed by another"],
)
def test_guard_stops_a_batch_whose_mark_stands_elsewhere(
    session: Session, known: int, signature: str, applied: int
) -> None:
    set_up_mark(session, applied=3)
    session.begin()
    send(session, remote_sql.advance_mark(QUEUE, known=(known, signature), applied=applied, token=TOKEN))
    with pytest.raises(Violation):
        send(session, remote_sql.guard_mark(QUEUE, applied=applied, token=TOKEN))
    session.rollback()
    assert send(session, remote_sql.read_mark(QUEUE)) == [(3, "")]


def test_guard_stops_a_batch_when_the_mark_is_gone(session: Session) -> None:
    session.run(remote_sql.marks_ddl(session.dialect))
    with pytest.raises(Violation):
        send(session, remote_sql.guard_mark(QUEUE, applied=5, token=TOKEN))
    assert send(session, remote_sql.read_mark(QUEUE)) == []


def test_guard_stops_a_batch_that_another_session_has_applied(session: Session) -> None:
    set_up_mark(session, applied=3)
    send(session, remote_sql.advance_mark(QUEUE, known=(3, ""), applied=5, token=OTHER))
    send(session, remote_sql.advance_mark(QUEUE, known=(3, ""), applied=5, token=TOKEN))
    with pytest.raises(Violation):
        send(session, remote_sql.guard_mark(QUEUE, applied=5, token=TOKEN))


def test_fence_stops_a_batch_that_knows_the_signature_before_it(session: Session) -> None:
    set_up_mark(session, applied=3)
    send(session, remote_sql.fence_mark(QUEUE, known=(3, OTHER), token=TOKEN))
    assert send(session, remote_sql.read_mark(QUEUE)) == [(3, "")]
    send(session, remote_sql.fence_mark(QUEUE, known=(3, ""), token=OTHER))
    assert send(session, remote_sql.read_mark(QUEUE)) == [(3, OTHER)]
    send(session, remote_sql.advance_mark(QUEUE, known=(3, ""), applied=5, token=TOKEN))
    with pytest.raises(Violation):
        send(session, remote_sql.guard_mark(QUEUE, applied=5, token=TOKEN))
    send(session, remote_sql.advance_mark(QUEUE, known=(3, OTHER), applied=5, token=TOKEN))
    send(session, remote_sql.guard_mark(QUEUE, applied=5, token=TOKEN))


@pytest.mark.parametrize("is_committed", [True, False], ids=["first commits", "first rolls back"])
def test_second_session_waits_for_the_first_and_is_stopped_if_that_commits(
    session: Session, other: Session, is_committed: bool
) -> None:
    set_up_mark(session, applied=3)
    session.begin()
    send(session, remote_sql.advance_mark(QUEUE, known=(3, ""), applied=5, token=OTHER))
    send(session, remote_sql.guard_mark(QUEUE, applied=5, token=OTHER))
    answers: list[str] = []

    def apply_again() -> None:
        # A snapshot from before the first one's commit must not let the second through.
        other.begin()
        send(other, remote_sql.read_mark(QUEUE))
        send(other, remote_sql.advance_mark(QUEUE, known=(3, ""), applied=5, token=TOKEN))
        try:
            send(other, remote_sql.guard_mark(QUEUE, applied=5, token=TOKEN))
        except Violation:
            other.rollback()
            answers.append("stopped")
        else:
            other.commit()
            answers.append("applied")

    second = threading.Thread(target=apply_again)
    second.start()
    # Long enough to notice a session that does not wait; one that does is still there whatever the time.
    second.join(0.3)
    assert (second.is_alive(), answers) == (True, [])
    session.commit() if is_committed else session.rollback()
    second.join(20)
    assert answers == (["stopped"] if is_committed else ["applied"])
    assert send(session, remote_sql.read_mark(QUEUE)) == [(5, OTHER if is_committed else TOKEN)]
