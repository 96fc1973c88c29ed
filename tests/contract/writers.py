"""Writers on a table of dead letters that know which of its rows they have committed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

MOMENTS = ("2026-01-31 23:59:59.999999+00", "2026-03-15 12:00+00", "2031-05-05 05:05+00", "1999-12-31 23:59+00")


class Writers:
    """Four threads that insert, update, move, delete, lock and roll back; each knows the rows it has committed."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.rows: list[dict[int, tuple[str, str]]] = [{} for _ in range(4)]
        self.given: list[list[int]] = [[] for _ in range(4)]
        self.done = [0] * 4
        self.failed: list[BaseException] = []
        self.is_stopped = threading.Event()
        for row_id, code, note in fetch_rows(engine):
            self.rows[row_id % 4][row_id] = (code, note)

    def _work(self, number: int) -> None:
        rand = random.Random(number)
        try:
            while not self.is_stopped.is_set():
                self._transact(number, rand)
                self.done[number] += 1
        except BaseException as error:
            self.failed.append(error)
            self.is_stopped.set()

    def _transact(self, number: int, rand: random.Random) -> None:
        rows = self.rows[number]
        changes: dict[int, tuple[str, str] | None] = {}
        with self.engine.connect() as db, db.begin() as transaction:
            for _ in range(rand.randint(1, 4)):
                chosen = rand.choice([row_id for row_id in rows if row_id not in changes])
                code, note = rows[chosen]
                match rand.choice(["insert", "insert", "update", "move", "delete", "lock", "exchange"]):
                    case "insert":
                        code, at = uuid4().hex, rand.choice(MOMENTS)
                        new = {"code": code, "at": at}
                        query = (
                            "INSERT INTO dead (code, failed_at) VALUES (:code, CAST(:at AS timestamptz)) RETURNING id"
                        )
                        chosen = db.execute(sa.text(query), new).scalar_one()
                        self.given[number].append(chosen)
                        changes[chosen] = (code, "none")
                    case "update":
                        note = f"{number} {rand.random()}"
                        self._change(db, "UPDATE dead SET note = :note WHERE id = :id", id=chosen, note=note)
                        changes[chosen] = (code, note)
                    case "move":
                        at = rand.choice(MOMENTS)
                        query = "UPDATE dead SET failed_at = CAST(:at AS timestamptz) WHERE id = :id"
                        self._change(db, query, id=chosen, at=at)
                        changes[chosen] = (code, note)
                    case "delete":
                        self._change(db, "DELETE FROM dead WHERE id = :id", id=chosen)
                        changes[chosen] = None
                    case "lock":
                        self._change(db, "SELECT id FROM dead WHERE id = :id FOR UPDATE", id=chosen)
                    case "exchange":  # another row takes its unique value
                        self._change(db, "DELETE FROM dead WHERE id = :id", id=chosen)
                        changes[chosen] = None
                        query = "INSERT INTO dead (code, note) VALUES (:code, :note) RETURNING id"
                        other = db.execute(sa.text(query), {"code": code, "note": note}).scalar_one()
                        self.given[number].append(other)
                        changes[other] = (code, note)
            if rand.random() < 0.2:
                transaction.rollback()
                return
        for row_id, values in changes.items():
            if values is None:
                rows.pop(row_id, None)
            else:
                rows[row_id] = values

    def _change(self, db: sa.Connection, query: str, **values: Any) -> None:
        assert db.execute(sa.text(query), values).rowcount == 1, f"{query} {values}"

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let them work before, during and after the block."""
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            self._wait_for_more()
            yield
            self._wait_for_more()
        finally:
            self.is_stopped.set()
            for thread in threads:
                thread.join(60)
        assert self.failed == []

    def _wait_for_more(self) -> None:
        wanted = [count + 10 for count in self.done]
        while any(count < least for count, least in zip(self.done, wanted, strict=True)):
            if self.is_stopped.wait(0.01):
                return

    def expect(self) -> dict[int, tuple[str, str]]:
        return {row_id: values for rows in self.rows for row_id, values in rows.items()}

    def read(self) -> dict[int, tuple[str, str]]:
        rows = fetch_rows(self.engine)
        assert len(rows) == len({row[0] for row in rows}), "an id is there twice"
        return {row_id: (code, note) for row_id, code, note in rows}


def fetch_rows(engine: sa.Engine) -> list[Any]:
    with engine.connect() as db:
        return list(db.exec_driver_sql("SELECT id, code, note FROM dead"))
