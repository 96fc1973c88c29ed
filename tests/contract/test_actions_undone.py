"""MySQL and MariaDB undo a whole transaction and let its session go on: nothing is recorded of what is gone."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox.actions import Action
from pillarbox.errors import ActionError, TransactionError
from tests.contract.kit_actions import KITS, ActionKit, actions, places

__all__ = ["actions", "places"]

on_mysql = pytest.mark.parametrize(
    "actions", [kit for kit in KITS if "mysql" in kit or "mariadb" in kit], indirect=True
)
on_mariadb = pytest.mark.parametrize("actions", [kit for kit in KITS if "mariadb" in kit], indirect=True)

COUNT = 20
UNTOUCHED = [0] * COUNT
UNDONE = r"'wallet\.\w+': the database undid this transaction after a deadlock"


@dataclass
class Moved:
    amount: int


def fill(kit: ActionKit) -> None:
    rows = ", ".join(f"({key}, 0, 1)" for key in range(1, COUNT + 1))
    kit.change(f"INSERT INTO {{wallets}} (id, balance, version) VALUES {rows}")


def change(kit: ActionKit, db: Session | sa.Connection, *keys: int) -> None:
    table = kit.Wallet.__table__
    # One by one: of several in a small table the server would lock all rows.
    for key in keys:
        db.execute(sa.update(table).where(table.c.id == key).values(balance=7))


def lose_deadlock(kit: ActionKit, session: Session) -> None:
    """Change wallet 1, then lose it to somebody who has changed more, and go on."""
    change(kit, session, 1)
    with kit.place.engine.connect() as rival:
        number: int = rival.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one()
        change(kit, rival, *range(2, COUNT + 1))
        waiting = threading.Thread(target=change, args=(kit, rival, 1))
        waiting.start()
        until_asked(kit, number)
        with pytest.raises(sa.exc.OperationalError, match="Deadlock found"):
            change(kit, session, 2)
        waiting.join(20)
        rival.rollback()


def until_asked(kit: ActionKit, rival: int) -> None:
    found = (
        "SELECT count(*) FROM information_schema.processlist WHERE command = 'Query'"
        f" AND id = {rival} AND info LIKE 'UPDATE%%{kit.Wallet.__tablename__}%%'"
    )
    end = time.monotonic() + 20
    with kit.place.engine.connect() as db:
        while not db.exec_driver_sql(found).scalar_one():
            assert time.monotonic() < end
            time.sleep(0.01)


@on_mysql
@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k-1"}], ids=["plain", "key"])
async def test_block_that_swallows_a_deadlock_cannot_end_well(actions: ActionKit, options: Any) -> None:
    fill(actions)

    def body(act: Action[Any], session: Session) -> None:
        act.emit(Moved(7), model_type="Wallet", model_id=1)
        lose_deadlock(actions, session)

    with pytest.raises(TransactionError, match=UNDONE):
        await actions.act(body, **options)
    assert (actions.rows(), actions.side(), actions.balances()) == ([], [], UNTOUCHED)


@on_mysql
async def test_savepoint_does_not_save_a_block_from_a_deadlock(actions: ActionKit) -> None:
    fill(actions)

    def body(act: Action[Any], session: Session) -> None:
        change(actions, session, 1)
        with suppress(sa.exc.DBAPIError), session.begin_nested():
            lose_deadlock(actions, session)
            raise sa.exc.DBAPIError("as the server says it", {}, Exception())

    with pytest.raises(TransactionError, match=UNDONE):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], UNTOUCHED)


@on_mysql
async def test_function_that_swallows_a_deadlock_is_done_again(actions: ActionKit) -> None:
    fill(actions)
    attempts: list[Any] = []

    def body(act: Action[Any], session: Session) -> None:
        attempts.append(act.id)
        act.emit(Moved(7), model_type="Wallet", model_id=1)
        if len(attempts) == 1:
            lose_deadlock(actions, session)
        else:
            change(actions, session, 1)

    await actions.run(body)
    assert [row["action_id"] for row in actions.rows()] == attempts[1:]
    assert actions.balances() == [7, *UNTOUCHED[1:]]


@on_mysql
@pytest.mark.parametrize("is_after", [False, True], ids=["inside", "after"])
async def test_joined_action_undone_by_a_deadlock_cannot_be_committed(actions: ActionKit, is_after: bool) -> None:
    fill(actions)

    def body(act: Action[Any], session: Session) -> None:
        if not is_after:
            lose_deadlock(actions, session)

    async with actions.session() as session:
        with suppress(TransactionError):
            await actions.join(session, body)
            await actions.on(session, lambda plain: lose_deadlock(actions, plain))
            await actions.on(session, lambda plain: change(actions, plain, 3))
        with pytest.raises(TransactionError if is_after else ActionError, match=r"Action 'wallet\.join'"):
            await actions.on(session, lambda plain: plain.commit())
        await actions.on(session, lambda plain: plain.rollback())
        # After the rollback the session is as good as new.
        act = await actions.join(session)
        await actions.on(session, lambda plain: plain.commit())
    assert [row["action_id"] for row in actions.rows()] == [act.id]
    assert actions.balances() == UNTOUCHED


@on_mariadb
async def test_block_that_swallows_a_changed_row_cannot_end_well(actions: ActionKit) -> None:
    fill(actions)

    def body(act: Action[Any], session: Session) -> None:
        session.execute(sa.text("SET SESSION innodb_snapshot_isolation = ON"))
        change(actions, session, 2)
        session.execute(sa.select(actions.Wallet)).all()
        actions.change("UPDATE {wallets} SET balance = 1 WHERE id = 1")
        with pytest.raises(sa.exc.OperationalError, match="Record has changed"):
            change(actions, session, 1)
        session.execute(sa.text("SET SESSION innodb_snapshot_isolation = OFF"))

    with pytest.raises(TransactionError, match=UNDONE):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [1, *UNTOUCHED[1:]])


@on_mysql
async def test_block_may_go_on_after_a_lock_that_did_not_come(actions: ActionKit) -> None:
    fill(actions)

    def body(act: Action[Any], session: Session) -> None:
        session.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        change(actions, session, 1)
        with actions.place.engine.connect() as rival:
            change(actions, rival, 2)
            with pytest.raises(sa.exc.OperationalError, match="Lock wait timeout"):
                change(actions, session, 2)
            rival.rollback()

    await actions.act(body)
    assert len(actions.rows()) == 1
    assert actions.balances() == [7, *UNTOUCHED[1:]]


async def test_action_whose_key_is_gone_at_its_end_is_not_recorded(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        session.execute(sa.delete(actions.log.tables["actions"]))

    with pytest.raises(TransactionError, match="the row of its idempotency key 'k-1' is gone"):
        await actions.act(body, idempotency_key="k-1")
    assert (actions.rows(), actions.side()) == ([], [])
