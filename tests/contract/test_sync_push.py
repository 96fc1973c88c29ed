"""SqlQueue as programs use it: by itself, as a base class, and inside the caller's own SQLite transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox.errors import ConfigError, QueueError, QueueFull, TransactionError
from pillarbox.sync.queue import SqlQueue
from tests.contract.sync_queue_kit import assert_whole, links, sql
from tests.servers import server_url

SQL = "INSERT INTO orders (id, note) VALUES (?, ?)"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqlQueue]:
    with SqlQueue(tmp_path / "queues", lock_timeout=timedelta(milliseconds=50)) as made:
        yield made


class OrderMiddleware(SqlQueue):
    """As a program declares it."""

    def push_order(self, number: int) -> int:
        return self.push("orders", SQL, [number, None])


class Forgetful(SqlQueue):
    def __init__(self, folder: Path) -> None:
        """Not what it should do."""


def test_queue_keeps_a_file_for_each_table_with_the_class_as_source(tmp_path: Path) -> None:
    with OrderMiddleware(tmp_path / "new" / "folder") as queue:
        assert queue.push_order(7) == 1
        assert queue.push_many(
            "payments", [("DELETE FROM payments WHERE id = ?", (1,)), ("DELETE FROM payments", ())]
        ) == [1, 2]
        assert queue.push_many("payments", []) == []
        (row,) = queue.queue_file("orders").rows()
        assert (row.sql, row.payload, row.namespace, row.source) == (SQL, "[7,null]", "orders", "OrderMiddleware")
        assert (queue.waiting("orders"), queue.waiting("payments")) == (1, 2)
    assert sorted(each.name for each in (tmp_path / "new" / "folder").iterdir()) == ["orders.db", "payments.db"]


def test_source_can_be_named(tmp_path: Path) -> None:
    with SqlQueue(tmp_path, source="importer") as queue:
        queue.push("orders", SQL)
        assert [row.source for row in queue.queue_file("orders").rows()] == ["importer"]


def test_queue_in_one_file_keeps_each_table_as_a_namespace(tmp_path: Path) -> None:
    with SqlQueue(file=tmp_path / "all.db") as queue:
        assert [queue.push(table, SQL) for table in ("orders", "payments", "orders")] == [1, 2, 3]
        assert links(tmp_path / "all.db", "orders") == [(1, None), (3, 1)]
        assert (queue.waiting("orders"), queue.waiting("payments")) == (2, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["all.db"]


def test_cap_of_a_queue_holds_for_each_table(tmp_path: Path) -> None:
    with SqlQueue(tmp_path, max_waiting=1) as queue:
        assert (queue.push("orders", SQL), queue.push("payments", SQL)) == (1, 1)
        with pytest.raises(QueueFull):
            queue.push("orders", SQL)


def test_closed_queue_opens_its_files_again(queue: SqlQueue) -> None:
    queue.push("orders", SQL)
    queue.close()
    assert queue.push("orders", SQL) == 2


@pytest.mark.parametrize(
    "table",
    ["", "a/b", "..", ".hidden", "a\\b", "a\nb", "a\0b", "ä" * 101, "\ud800", None, 5],
    ids=lambda each: ascii(each)[:12],
)
def test_table_that_cannot_name_a_file_is_refused(queue: SqlQueue, table: Any, tmp_path: Path) -> None:
    for call in (
        lambda: queue.push(table, SQL),
        lambda: queue.push_many(table, [(SQL, [])]),
        lambda: queue.waiting(table),
    ):
        with pytest.raises(QueueError, match="cannot name a queue file"):
            call()
    assert not (tmp_path / "queues").exists()


@pytest.mark.parametrize("statement", ["", " \n", None, b"DELETE", "DELETE\0"], ids=repr)
def test_statement_that_is_no_text_is_refused(queue: SqlQueue, statement: Any) -> None:
    for call in (
        lambda: queue.push("orders", statement),
        lambda: queue.push_many("orders", [(SQL, []), (statement, [])]),
    ):
        with pytest.raises(QueueError, match="expected the text of one SQL statement"):
            call()
    assert queue.waiting("orders") == 0


def test_argument_that_cannot_be_stored_names_its_statement_and_stores_none(queue: SqlQueue) -> None:
    with pytest.raises(QueueError, match=r"^Statement 2: Argument 1 of 2: nan has no JSON form"):
        queue.push_many("orders", [(SQL, [1, "a"]), (SQL, [float("nan"), "b"])])
    assert queue.waiting("orders") == 0


def test_subclass_that_forgot_its_base_is_told(tmp_path: Path) -> None:
    queue = Forgetful(tmp_path)
    calls: list[Callable[[], object]] = [lambda: queue.push("orders", SQL), lambda: queue.waiting("orders")]
    for call in calls:
        with pytest.raises(QueueError, match=r"Forgetful has no queue: its __init__ did not call"):
            call()
    queue.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "expected either db_dir"),
        ({"db_dir": "a", "file": "b"}, "expected either db_dir"),
        ({"db_dir": "a", "durability": "none"}, "durability: expected 'normal' or 'full', got 'none'"),
        ({"db_dir": "a", "max_waiting": 0}, "max_waiting: expected a number above zero or None, got 0"),
    ],
    ids=["neither", "both", "durability", "cap"],
)
def test_queue_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SqlQueue(**options)
    assert problem in str(caught.value)


TOML = """
[app.shop]
db_dir = "data/${PLACE}"
durability = "full"
max_pending = 1
[app.shop.db.main]
tables = ["orders"]
[app.shop.db.main.connection]
url = "${SECRET_URL}"

[app.bank]
db_file = "bank.db"
[app.bank.db.main]
tables = ["payments"]
connection = { url = "${SECRET_URL}" }
"""


def test_queue_of_an_app_is_made_from_the_services_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "north")
    (tmp_path / "outbox.toml").write_text(TOML)
    with OrderMiddleware.from_toml(tmp_path / "outbox.toml", "shop") as shop:
        assert shop.push_order(1) == 1
        assert shop.queue_file("orders").path == str(tmp_path / "data" / "north" / "orders.db")
        assert shop.queue_file("orders")._read("PRAGMA synchronous") == [(2,)]
        with pytest.raises(QueueFull):
            shop.push_order(2)
    with SqlQueue.from_toml(tmp_path / "outbox.toml", "bank", source="teller") as bank:
        assert [bank.push("payments", SQL) for _ in range(2)] == [1, 2]
        assert (bank.queue_file("payments").path, bank.queue_file("payments").rows()[0].source) == (
            str(tmp_path / "bank.db"),
            "teller",
        )
    for app in (None, "shpo"):
        with pytest.raises(ConfigError, match="expected the name of one app of shop, bank"):
            SqlQueue.from_toml(tmp_path / "outbox.toml", app)


def test_queue_made_from_the_services_file_refuses_tables_that_nobody_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "north")
    (tmp_path / "outbox.toml").write_text(TOML)
    with SqlQueue.from_toml(tmp_path / "outbox.toml", "shop") as shop:
        with pytest.raises(QueueError, match=r"'shop': no target names table 'order'.* Did you mean 'orders'\?"):
            shop.push("order", SQL)
        with pytest.raises(QueueError, match=r"names table 'payments'.*; expected orders\. Nothing was stored\."):
            shop.push_many("payments", [(SQL, [])])
        shop.push("orders", SQL)
    assert [each.name for each in (tmp_path / "data" / "north").glob("*.db")] == ["orders.db"]
    with (
        SqlQueue.from_toml(tmp_path / "outbox.toml", "bank") as bank,
        closing(sqlite3.connect(tmp_path / "bank.db")) as db,
    ):
        bank.create_in(db)
        with pytest.raises(QueueError, match="names table 'orders'"):
            bank.push_in(db, "orders", SQL)
    with SqlQueue(tmp_path / "plain") as plain:
        assert plain.push("whatever", SQL) == 1


# -- in the caller's transaction ---------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The application's database, with a table of its own and the queue's."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY)")
        SqlQueue(file=path).create_in(db)
    return path


class Caller:
    """A connection of one kind as a program holds it: what is pushed into, and how its transaction ends."""

    def __init__(self, target: Any, execute: Callable[[str], object], begin: Callable[[], object]) -> None:
        self.target = target
        self.execute = execute
        self.begin = begin
        self.commit: Callable[[], object] = target.commit
        self.rollback: Callable[[], object] = target.rollback


@pytest.fixture(
    params=[
        "sqlite3",
        "sqlite3 by hand",
        "sqlite3 rows",
        "Connection",
        "Connection by hand",
        "Session",
        "scoped_session",
    ]
)
def caller(request: pytest.FixtureRequest, path: Path) -> Iterator[Caller]:
    kind = request.param
    if kind.startswith("sqlite3"):
        with closing(sqlite3.connect(path, isolation_level=None if "hand" in kind else "DEFERRED")) as db:
            if "rows" in kind:
                db.row_factory, db.text_factory = lambda cursor, row: len(row), bytes
            yield Caller(db, db.execute, lambda: db.execute("BEGIN") if "hand" in kind else None)
        return
    engine = sa.create_engine(f"sqlite:///{path}")
    if "hand" in kind:
        sa.event.listen(engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    if "Connection" in kind:
        with engine.connect() as connection:
            yield Caller(connection, connection.exec_driver_sql, lambda: None)
    elif kind == "Session":
        with Session(engine) as session:
            yield Caller(session, lambda text: session.execute(sa.text(text)), lambda: None)
    else:
        scoped = scoped_session(sessionmaker(engine))
        yield Caller(scoped, lambda text: scoped.execute(sa.text(text)), lambda: None)
        scoped.remove()
    engine.dispose()


def customers(path: Path) -> list[int]:
    with sql(path) as execute:
        return [number for (number,) in execute("SELECT id FROM customers")]


def test_pushed_rows_are_committed_with_the_callers_changes(caller: Caller, path: Path) -> None:
    queue = SqlQueue(file=path)
    caller.begin()
    assert queue.push_in(caller.target, "orders", SQL, [1, "a"]) == 1
    caller.execute("INSERT INTO customers VALUES (5)")
    assert queue.push_many_in(caller.target, "orders", [(SQL, [2, "b"]), (SQL, [3, "c"])]) == [2, 3]
    assert queue.push_many_in(caller.target, "payments", [(SQL, [])]) == [4]
    assert queue.push_many_in(caller.target, "orders", []) == []
    assert (links(path), customers(path)) == ([], [])
    caller.commit()
    assert customers(path) == [5]
    assert_whole(path, [1, 2, 3])
    with queue:
        rows = queue.queue_file("orders").rows()
        assert [(row.sql, row.payload, row.source) for row in rows][:2] == [
            (SQL, '[1,"a"]', "SqlQueue"),
            (SQL, '[2,"b"]', "SqlQueue"),
        ]
        assert queue.push("orders", SQL) == 5
    assert_whole(path, [1, 2, 3, 5])


def test_rollback_of_the_caller_leaves_no_row(caller: Caller, path: Path) -> None:
    queue = SqlQueue(file=path)
    for _ in range(2):
        caller.begin()
        caller.execute("INSERT INTO customers VALUES (5)")
        assert queue.push_in(caller.target, "orders", SQL, [1, "a"]) == 1
        queue.push_many_in(caller.target, "orders", [(SQL, [2, "b"])] * 2)
        caller.rollback()
    assert (links(path), customers(path)) == ([], [])


def test_push_begins_the_transaction_where_the_driver_would(caller: Caller, path: Path) -> None:
    queue = SqlQueue(file=path)
    caller.begin()
    queue.push_many_in(caller.target, "orders", [(SQL, [2, "b"])] * 2)
    assert links(path) == []
    caller.rollback()
    caller.begin()
    queue.push_in(caller.target, "orders", SQL, [1, "a"])
    assert links(path) == []
    caller.commit()
    assert len(links(path)) == 1


def test_refused_push_leaves_the_callers_transaction_usable(caller: Caller, path: Path) -> None:
    queue = SqlQueue(file=path, max_waiting=2)
    caller.begin()
    caller.execute("INSERT INTO customers VALUES (5)")
    queue.push_in(caller.target, "orders", SQL)
    with pytest.raises(QueueFull):
        queue.push_many_in(caller.target, "orders", [(SQL, [])] * 2)
    with pytest.raises(QueueError, match="Statement 2: Argument 1 of 1"):
        queue.push_many_in(caller.target, "orders", [(SQL, []), (SQL, [float("nan")])])
    caller.commit()
    assert (links(path), customers(path)) == ([(1, None)], [5])


def test_refused_push_leaves_no_transaction_that_it_began(path: Path) -> None:
    queue = SqlQueue(file=path, max_waiting=1)
    with closing(sqlite3.connect(path)) as db:
        queue.push_in(db, "orders", SQL)
        db.commit()
        for call in (lambda: queue.push_in(db, "orders", SQL), lambda: queue.push_many_in(db, "orders", [(SQL, [])])):
            with pytest.raises(QueueFull):
                call()
            assert not db.in_transaction


def test_many_are_taken_back_together_when_one_is_refused(path: Path) -> None:
    queue = SqlQueue(file=path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TRIGGER t BEFORE INSERT ON outbox_queue WHEN NEW.tag = 'bad' BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        db.execute("INSERT INTO customers VALUES (5)")
        with pytest.raises(QueueError, match="refused the statement: no"):
            queue.push_many_in(db, "orders", [(SQL, []), ("bad", [])])
        db.commit()
    assert (links(path), customers(path)) == ([], [5])


def test_connection_that_would_commit_by_itself_is_refused(path: Path) -> None:
    queue = SqlQueue(file=path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for call in (lambda: queue.push_in(db, "orders", SQL), lambda: queue.push_many_in(db, "orders", [(SQL, [])])):
            with pytest.raises(TransactionError, match="Execute BEGIN first"):
                call()
    engine = sa.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(TransactionError, match="commits every statement by itself"):
        queue.push_in(connection, "orders", SQL)
    engine.dispose()
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"isolation_level": None})
    with engine.connect() as connection, pytest.raises(TransactionError, match="Execute BEGIN first"):
        queue.push_in(connection, "orders", SQL)
    engine.dispose()
    assert links(path) == []


def test_closed_connection_is_refused(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    connection = engine.connect()
    connection.close()
    with pytest.raises(TransactionError, match="connection is closed"):
        SqlQueue(file=path).push_in(connection, "orders", SQL)
    engine.dispose()


def test_connection_to_another_database_is_refused(path: Path, tmp_path: Path) -> None:
    queue = SqlQueue(file=path)
    with (
        closing(sqlite3.connect(tmp_path / "other.db")) as db,
        pytest.raises(TransactionError, match=r"other\.db'; the queue lives in"),
    ):
        queue.push_in(db, "orders", SQL)
    with closing(sqlite3.connect(":memory:")) as db, pytest.raises(TransactionError, match="database is 'in memory'"):
        queue.push_in(db, "orders", SQL)
    engine = sa.create_engine(sa.make_url(server_url("postgres")).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection, pytest.raises(TransactionError, match="got one to postgresql"):
        queue.push_in(connection, "orders", SQL)
    engine.dispose()


def test_connection_by_another_path_to_the_file_is_taken(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(path)
    for named, opened in ((path, tmp_path / "link.db"), (tmp_path / "link.db", path)):
        with closing(sqlite3.connect(opened)) as db:
            assert SqlQueue(file=named).push_in(db, "orders", SQL) == 1
            db.rollback()


async def test_async_session_is_refused_and_its_run_sync_is_taken(path: Path) -> None:
    queue = SqlQueue(file=path)
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    async with AsyncSession(engine) as session:
        with pytest.raises(TypeError, match=r"got AsyncSession\. Use `await session.run_sync"):
            queue.push_in(session, "orders", SQL)
        await session.execute(sa.text("INSERT INTO customers VALUES (5)"))
        assert await session.run_sync(lambda each: queue.push_in(each, "orders", SQL, [1, "a"])) == 1
        assert await session.run_sync(lambda each: queue.push_many_in(each, "orders", [(SQL, [])] * 2)) == [2, 3]
        assert links(path) == []
        await session.commit()
    await engine.dispose()
    assert_whole(path, [1, 2, 3])


@pytest.mark.parametrize("target", [None, "shop.db", sa.create_engine("sqlite://")], ids=["None", "str", "Engine"])
def test_what_is_no_connection_is_refused(path: Path, target: object) -> None:
    with pytest.raises(TypeError, match=r"push_in: expected a sqlite3\.Connection, or a SQLAlchemy"):
        SqlQueue(file=path).push_in(target, "orders", SQL)


def test_database_without_the_tables_says_how_to_make_them(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    queue = SqlQueue(file=path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY)")
        with pytest.raises(QueueError, match=r"has no table 'outbox_queue'.*create_in"):
            queue.push_in(db, "orders", SQL)
        db.rollback()
        db.execute("BEGIN")
        queue.create_in(db)
        db.rollback()
        with pytest.raises(QueueError, match="has no table"):
            queue.push_in(db, "orders", SQL)
        db.rollback()
        queue.create_in(db)
        queue.create_in(db)
        assert queue.push_in(db, "orders", SQL) == 1
        db.commit()
    assert links(path) == [(1, None)]


def test_tables_can_be_made_through_sqlalchemy(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    queue = SqlQueue(file=tmp_path / "shop.db")
    with engine.begin() as connection:
        queue.create_in(connection)
        assert queue.push_in(connection, "orders", SQL) == 1
    engine.dispose()
    assert links(tmp_path / "shop.db") == [(1, None)]


def test_tables_are_made_only_in_a_queue_of_one_file(queue: SqlQueue) -> None:
    with closing(sqlite3.connect(":memory:")) as db, pytest.raises(ConfigError, match=r"SqlQueue\(file=…\)"):
        queue.create_in(db)


def test_push_beside_the_callers_open_transaction_hints_at_push_in(path: Path) -> None:
    with SqlQueue(file=path, lock_timeout=timedelta(milliseconds=20)) as queue, closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO customers VALUES (5)")
        with pytest.raises(QueueError, match="use push_in if it is your own"):
            queue.push("orders", SQL)


@pytest.mark.parametrize("changes", [0, 1], ids=["nested first", "change first"])
@pytest.mark.parametrize("kind", ["Connection", "Session"])
def test_push_inside_a_savepoint_of_a_driver_that_may_not_have_begun_is_refused(
    path: Path, kind: str, changes: int
) -> None:
    queue = SqlQueue(file=path)
    engine = sa.create_engine(f"sqlite:///{path}")
    with Session(engine) if kind == "Session" else engine.connect() as target:
        if changes:
            target.execute(sa.text("INSERT INTO customers VALUES (5)"))
        with target.begin_nested(), pytest.raises(TransactionError, match=r"begin_nested\(\).* set the driver's isol"):
            queue.push_in(target, "orders", SQL)
        assert queue.push_in(target, "orders", SQL) == 1
        target.rollback()
    engine.dispose()
    assert (links(path), customers(path)) == ([], [])


def test_push_inside_a_savepoint_of_a_transaction_shares_the_fate_of_both(path: Path) -> None:
    queue = SqlQueue(file=path)
    engine = sa.create_engine(f"sqlite:///{path}")
    sa.event.listen(engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with Session(engine) as session:
        with session.begin_nested():
            queue.push_in(session, "orders", SQL)
        session.rollback()
        assert links(path) == []
        with session.begin_nested():
            queue.push_in(session, "orders", SQL)
        with session.begin_nested() as inner:
            queue.push_in(session, "orders", SQL)
            inner.rollback()
        session.commit()
    engine.dispose()
    assert_whole(path, [1])


def test_push_into_a_transaction_that_reads_an_older_state_says_what_to_do(path: Path) -> None:
    queue = SqlQueue(file=path)
    with sql(path) as other, closing(sqlite3.connect(path)) as db:
        other("PRAGMA journal_mode = wal")
        db.execute("BEGIN")
        db.execute("SELECT count(*) FROM customers").fetchall()
        other("INSERT INTO customers VALUES (9)")
        with pytest.raises(QueueError, match=r"changed by another connection .* roll back, and start with BEGIN IMMED"):
            queue.push_in(db, "orders", SQL)
        db.rollback()
        db.execute("BEGIN IMMEDIATE")
        assert queue.push_in(db, "orders", SQL) == 1
        db.commit()


def test_push_into_a_connection_that_waits_for_another_names_no_time_of_ours(path: Path) -> None:
    queue = SqlQueue(file=path)
    with sql(path) as other, closing(sqlite3.connect(path, timeout=0.01)) as db:
        other("BEGIN IMMEDIATE")
        with pytest.raises(
            QueueError, match=r"is locked by another connection \(.*raise the timeout of your connection"
        ):
            queue.push_in(db, "orders", SQL)
        other("ROLLBACK")
