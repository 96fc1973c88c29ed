"""Handlers with a session in processes that die at every step: what they write happens exactly once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox import Event, Handlers, Outbox, Relay, open_store
from pillarbox.handlers.dispatch import DispatchSink
from pillarbox.stores.sql import SqlStore
from tests.acceptance.processes import Database, temporary_database, until

CRASHED = 9
EVENTS = 12
LEASE = timedelta(seconds=1)
EFFECTS = sa.Table("effects", sa.MetaData(), sa.Column("number", sa.Integer), sa.Column("pid", sa.Integer))
STEPS = ["in the handler", "before the settlement", "before the commit", "after the commit"]


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    with temporary_database(request.param, tmp_path) as made:
        EFFECTS.create(made.engine)
        yield made
        EFFECTS.drop(made.engine)


def crash() -> None:
    os._exit(CRASHED)


def fork(run: Callable[..., None], *args: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=run, args=args, daemon=True)
    process.start()
    return process


def effects_in(database: Database) -> list[int]:
    with database.engine.connect() as db:
        return list(db.scalars(sa.select(EFFECTS.c.number).order_by(EFFECTS.c.number)))


def make_handlers(table: str, die: Callable[[int], None]) -> Handlers:
    handlers = Handlers()
    outbox = Outbox(sa.MetaData(), table=table)

    @handlers.on("first")
    def handle(order: dict[str, int], session: Session) -> None:
        session.execute(sa.insert(EFFECTS).values(number=order["number"], pid=os.getpid()))
        outbox.put(session, Event("second", {"number": order["number"] + EVENTS}))
        session.flush()
        die(order["number"])

    @handlers.on("second")
    def follow(order: dict[str, int], session: Session) -> None:
        session.execute(sa.insert(EFFECTS).values(number=order["number"], pid=os.getpid()))

    return handlers


def run_relay(url: str, table: str, step: str, chance: float, seed: int) -> None:
    """Handle until dead; dies with a chance at the step, for any event."""
    luck = random.Random(seed)

    def die() -> None:
        if luck.random() < chance:
            crash()

    store = open_store(url, table=table)
    assert isinstance(store, SqlStore)
    make_dying(store, step, die)
    handlers = make_handlers(table, lambda number: die() if step == "in the handler" else None)
    asyncio.run(Relay(store, DispatchSink(handlers), lease=LEASE).run())


def make_dying(store: SqlStore, step: str, die: Callable[[], None]) -> None:
    settle, join = store.transitions.settle, store.join

    def dying_settle(db: sa.Connection, claims: Any, *args: Any, **options: Any) -> Any:
        if step == "before the settlement":
            die()
        result = settle(db, claims, *args, **options)
        if step == "before the commit":
            die()
        return result

    async def dying_join(*args: Any, **options: Any) -> Any:
        result = await join(*args, **options)
        if step == "after the commit":
            die()
        return result

    store.transitions.settle = dying_settle  # type: ignore[method-assign]
    store.join = dying_join  # type: ignore[method-assign]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.replace(" ", "-"))
def test_effects_of_handlers_that_die_happen_exactly_once(database: Database, step: str) -> None:
    database.put(*(Event("first", {"number": number}) for number in range(EVENTS)))
    expected = list(range(2 * EVENTS))
    deaths = 0
    for seed in range(1000):
        chance = 0.4 if deaths < 2 else 0.0
        process = fork(run_relay, database.url, database.outbox.table.name, step, chance, seed)
        is_done = False

        def is_over(process: BaseProcess = process) -> bool:
            nonlocal is_done
            is_done = len(effects_in(database)) >= len(expected)
            return is_done or not process.is_alive()

        until(is_over, f"all effects, or the death of relay {seed}", 60)
        if is_done and process.is_alive():
            process.kill()
            process.join(30)
            break
        process.join(30)
        assert process.exitcode == CRASHED
        assert database.faults() == []
        deaths += 1
    assert effects_in(database) == expected
    assert database.faults() == []
    assert deaths == 2
