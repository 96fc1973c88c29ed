"""Whose transaction an action runs in, and who may use it: joining, savepoints, commits, tasks, threads, nesting."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from pillarbox import Event, Outbox
from pillarbox.actions import Action
from pillarbox.errors import ActionError, ActionRepeated, SchemaError, TransactionError
from tests.contract.kit_actions import KITS, ActionKit, actions, places

__all__ = ["actions", "places"]

on_sqlite = pytest.mark.parametrize("actions", ["actions-sqlite-sync", "actions-sqlite-async"], indirect=True)
on_servers = pytest.mark.parametrize("actions", [kit for kit in KITS if "sqlite" not in kit], indirect=True)


@dataclass
class Paid:
    amount: int


class Interrupted(Exception):
    pass


def pay(act: Action[Any], session: Session, kit: ActionKit, amount: int = 5) -> Any:
    wallet = kit.Wallet(balance=amount)
    session.add(wallet)
    act.emit(Paid(amount), subject=wallet)
    return wallet


# -- joining -----------------------------------------------------------------------------------------------------------


async def test_joined_rows_come_with_the_callers_commit(actions: ActionKit) -> None:
    async with actions.session() as session:
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=1)))
        act = await actions.join(session, lambda act, plain: pay(act, plain, actions), actor="bob")
        assert actions.rows() == [] if actions.place.backend != "sqlite" else True
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=2)))
        await actions.on(session, lambda plain: plain.commit())
    assert [row["action_id"] for row in actions.rows()] == [act.id]
    assert [row["actor"] for row in actions.side()] == ["bob"]
    assert actions.balances() == [1, 5, 2]


async def test_joined_rows_go_with_the_callers_rollback(actions: ActionKit) -> None:
    async with actions.session() as session:
        await actions.join(session, lambda act, plain: pay(act, plain, actions), actor="bob", idempotency_key="k")
        await actions.on(session, lambda plain: plain.rollback())
    assert (actions.rows(), actions.side(), actions.balances()) == ([], [], [])


async def test_several_joined_actions_share_one_transaction(actions: ActionKit) -> None:
    async with actions.session() as session:
        first = await actions.join(session, lambda act, plain: pay(act, plain, actions), name="first")
        second = await actions.join(session, name="second")
        await actions.on(session, lambda plain: plain.commit())
    assert [(row["action_name"], row["action_id"]) for row in actions.rows()] == [
        ("first", first.id),
        ("second", second.id),
    ]


async def test_failed_joined_action_cannot_be_committed(actions: ActionKit) -> None:
    def fail(act: Action[Any], plain: Session) -> None:
        pay(act, plain, actions)
        raise Interrupted

    async with actions.session() as session:
        with pytest.raises(Interrupted):
            await actions.join(session, fail)
        with pytest.raises(ActionError, match=r"'wallet.join' failed in this transaction.*Roll the transaction back"):
            await actions.on(session, lambda plain: plain.commit())
        await actions.on(session, lambda plain: plain.rollback())
        # After the rollback the session is as good as new.
        await actions.join(session, lambda act, plain: pay(act, plain, actions, 9))
        await actions.on(session, lambda plain: plain.commit())
    assert actions.balances() == [9]
    assert len(actions.rows()) == 1


async def test_joined_action_that_failed_while_its_key_was_taken_cannot_be_committed(actions: ActionKit) -> None:
    log = actions.make_log(table="nowhere_events")
    try:
        async with actions.session() as session:
            await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=1)))
            with pytest.raises(SchemaError):
                await actions.act(name="wallet.join", log=log, session=session, idempotency_key="k-1")
            with pytest.raises(ActionError, match=r"'wallet.join' failed in this transaction"):
                await actions.on(session, lambda plain: plain.commit())
    finally:
        for table in log.tables.values():
            actions.place.metadata.remove(table)
    assert actions.balances() == []


@on_servers
async def test_second_failed_joined_action_does_not_hide_the_first(actions: ActionKit) -> None:
    def fail(act: Action[Any], plain: Session) -> None:
        pay(act, plain, actions)
        raise Interrupted

    async with actions.session() as session:
        with pytest.raises(Interrupted):
            await actions.join(session, fail, name="first")
        savepoint = await actions.on(session, lambda plain: plain.begin_nested())
        with pytest.raises(Interrupted):
            await actions.join(session, fail, name="second")
        await actions.on(session, lambda plain: savepoint.rollback())
        with pytest.raises(ActionError, match="'first' failed in this transaction"):
            await actions.on(session, lambda plain: plain.commit())
    assert (actions.rows(), actions.balances()) == ([], [])


@pytest.mark.parametrize("is_raised", [True, False], ids=["raises", "ends"])
async def test_joined_action_that_went_on_after_a_rollback_cannot_be_committed(
    actions: ActionKit, is_raised: bool
) -> None:
    def body(act: Action[Any], plain: Session) -> None:
        plain.rollback()
        plain.add(actions.Wallet(balance=7))
        plain.flush()
        if is_raised:
            raise Interrupted

    async with actions.session() as session:
        with pytest.raises(Interrupted if is_raised else ActionError):
            await actions.join(session, body)
        with pytest.raises(ActionError, match=r"'wallet.join' failed in this transaction"):
            await actions.on(session, lambda plain: plain.commit())
        await actions.on(session, lambda plain: plain.rollback())
        await actions.join(session)
        await actions.on(session, lambda plain: plain.commit())
    assert (actions.types(), actions.balances()) == ([None], [])


async def test_session_closed_after_a_failed_action_can_be_used_again(actions: ActionKit) -> None:
    def fail(act: Action[Any], plain: Session) -> None:
        raise Interrupted

    async with actions.session() as session:
        with pytest.raises(Interrupted):
            await actions.join(session, fail)
        await actions.on(session, lambda plain: plain.close())
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=3)))
        await actions.on(session, lambda plain: plain.commit())
    assert actions.balances() == [3]


@on_servers
async def test_failed_action_in_a_savepoint_leaves_the_rest(actions: ActionKit) -> None:
    async with actions.session() as session:
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=1)))
        savepoint = await actions.on(session, lambda plain: plain.begin_nested())

        def fail(act: Action[Any], plain: Session) -> None:
            pay(act, plain, actions)
            raise Interrupted

        with pytest.raises(Interrupted):
            await actions.join(session, fail)
        with pytest.raises(ActionError, match="failed in this transaction"):
            await actions.on(session, lambda plain: savepoint.commit())
        await actions.on(session, lambda plain: savepoint.rollback())
        await actions.join(session, lambda act, plain: pay(act, plain, actions, 2))
        await actions.on(session, lambda plain: plain.commit())
    assert actions.balances() == [1, 2]
    assert [row["payload"]["amount"] for row in actions.rows()] == [2]


async def test_scoped_session_can_be_joined(actions: ActionKit) -> None:
    registry: Any = scoped_session(sessionmaker(actions.engine))
    if actions.is_async:
        registry = async_scoped_session(async_sessionmaker(actions.engine), asyncio.current_task)
    async with actions.block(session=registry) as act:
        assert act.session is registry()
        await actions.on(act.session, lambda plain: pay(act, plain, actions))
    await actions.on(registry(), lambda plain: plain.commit())
    if actions.is_async:
        await registry.remove()
    else:
        registry.remove()
    assert actions.balances() == [5]
    assert len(actions.rows()) == 1


async def test_session_whose_transaction_failed_is_refused(actions: ActionKit) -> None:
    async with actions.session() as session:
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=None)))
        with pytest.raises(sa.exc.DBAPIError):
            await actions.on(session, lambda plain: plain.flush())
        with pytest.raises(TransactionError, match="roll it back before you begin an action"):
            await actions.join(session)
        await actions.on(session, lambda plain: plain.rollback())
        await actions.join(session)
        await actions.on(session, lambda plain: plain.commit())
    assert actions.types() == [None]


async def test_session_that_commits_every_statement_cannot_be_joined(actions: ActionKit) -> None:
    engine = actions.engine.execution_options(isolation_level="AUTOCOMMIT")
    kind: Any = AsyncSession if actions.is_async else Session
    session = kind(engine)
    await actions.on(session, lambda plain: plain.execute(sa.select(1)))
    with pytest.raises(TransactionError, match="commits every statement by itself"):
        await actions.join(session, lambda act, plain: pytest.fail("it has begun"))
    await (session.close() if actions.is_async else asyncio.to_thread(session.close))
    assert actions.rows() == []


async def test_session_of_the_log_that_is_in_use_is_refused(actions: ActionKit) -> None:
    async with actions.session() as session:
        log = actions.make_log(engine=None, sessions=lambda: session)
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=1)))
        await actions.on(session, lambda plain: plain.flush())
        with pytest.raises(ActionError, match="is in a transaction already"):
            await actions.act(log=log)
        await actions.on(session, lambda plain: plain.commit())
    assert (actions.rows(), actions.balances()) == ([], [1])


async def test_joined_function_is_not_tried_again(actions: ActionKit) -> None:
    calls = []

    def body(act: Action[Any], plain: Session) -> None:
        calls.append(act.id)
        raise StaleDataError

    async with actions.session() as session:
        with pytest.raises(StaleDataError):
            await actions.run(body, session=session)
    assert len(calls) == 1


async def test_outbox_events_put_in_an_action_come_with_it(actions: ActionKit) -> None:
    metadata = sa.MetaData()
    outbox = Outbox(metadata, table=f"{actions.Wallet.__tablename__}_put")
    metadata.create_all(actions.place.engine)
    try:

        def body(act: Action[Any], session: Session) -> None:
            pay(act, session, actions)
            outbox.put(session, Event("wallet.paid", {}))

        await actions.act(body)
        with actions.place.engine.connect() as db:
            assert db.execute(sa.select(sa.func.count()).select_from(outbox.table)).scalar_one() == 1
    finally:
        metadata.drop_all(actions.place.engine)
    assert actions.types() == ["Paid"]


# -- what the block may not do to its transaction ----------------------------------------------------------------------


@pytest.mark.parametrize("is_joined", [False, True], ids=["own", "joined"])
async def test_commit_inside_the_block_is_refused(actions: ActionKit, is_joined: bool) -> None:
    def body(act: Action[Any], session: Session) -> None:
        pay(act, session, actions)
        session.commit()

    async with actions.session() as session:
        with pytest.raises(ActionError, match=r"'wallet.deposit': its session was committed inside its block"):
            await (actions.join(session, body, name="wallet.deposit") if is_joined else actions.act(body))
    assert (actions.rows(), actions.balances()) == ([], [])


async def test_block_that_goes_on_after_a_rollback_cannot_end_well(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        pay(act, session, actions)
        session.rollback()
        session.add(actions.Wallet(balance=7))

    with pytest.raises(ActionError, match="ended inside its block"):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


async def test_block_that_closes_its_session_cannot_end_well(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        pay(act, session, actions)
        session.flush()
        session.close()

    with pytest.raises(ActionError, match="ended inside its block"):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


async def test_block_that_swallows_a_failed_flush_cannot_end_well(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        pay(act, session, actions)
        session.add(actions.Wallet(balance=None))
        with suppress(sa.exc.DBAPIError):
            session.flush()

    with pytest.raises(ActionError, match="ended inside its block"):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


@on_servers
@pytest.mark.parametrize("depth", [1, 2])
async def test_commit_past_an_open_savepoint_is_refused(actions: ActionKit, depth: int) -> None:
    def body(act: Action[Any], session: Session) -> None:
        pay(act, session, actions)
        transaction = session.get_transaction()
        assert transaction is not None
        for _ in range(depth):
            session.begin_nested()
        transaction.commit()

    with pytest.raises(ActionError, match="its session was committed inside its block"):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


@on_servers
async def test_savepoint_committed_past_another_is_no_commit_of_the_block(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        for amount in (1, 2):
            outer = session.begin_nested()
            session.begin_nested()
            pay(act, session, actions, amount)
            outer.commit()

    await actions.act(body)
    assert (actions.types(), actions.balances()) == (["Paid", "Paid"], [1, 2])


@on_servers
async def test_event_of_a_savepoint_that_was_undone_is_not_written(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        pay(act, session, actions, 1)
        with suppress(Interrupted), session.begin_nested():
            pay(act, session, actions, 2)
            with session.begin_nested():
                pay(act, session, actions, 3)
            raise Interrupted
        with session.begin_nested():
            pay(act, session, actions, 4)
        with suppress(sa.exc.DBAPIError), session.begin_nested():
            pay(act, session, actions, 5)
            session.add(actions.Wallet(balance=None))

    await actions.act(body)
    assert [row["payload"]["amount"] for row in actions.rows()] == [1, 4]
    assert actions.balances() == [1, 4]


@pytest.mark.parametrize("actions", [kit for kit in KITS if "mysql" in kit or "mariadb" in kit], indirect=True)
async def test_connection_that_commits_by_itself_is_refused_before_the_first_change(actions: ActionKit) -> None:
    make: Any = create_async_engine if actions.is_async else sa.create_engine
    engine = make(actions.place.driver_url(int(actions.is_async)), connect_args={"autocommit": True})
    try:
        with pytest.raises(TransactionError, match="commits every statement by itself"):
            await actions.act(lambda act, session: pay(act, session, actions), log=actions.make_log(engine=engine))
    finally:
        await (engine.dispose() if actions.is_async else asyncio.to_thread(engine.dispose))
    assert (actions.rows(), actions.balances()) == ([], [])


@on_sqlite
async def test_subject_in_another_database_than_the_log_is_refused(actions: ActionKit, tmp_path: Path) -> None:
    make: Any = create_async_engine if actions.is_async else sa.create_engine
    other = make(actions.place.driver_url(int(actions.is_async)).set(database=str(tmp_path / "other.db")))
    kind: Any = AsyncSession if actions.is_async else Session
    binds = {actions.Wallet: other, **dict.fromkeys(actions.log.tables.values(), actions.engine)}

    def body(act: Action[Any], session: Session) -> None:
        actions.place.metadata.create_all(session.connection(bind_arguments={"mapper": actions.Wallet}))
        pay(act, session, actions)

    try:
        log = actions.make_log(engine=None, sessions=lambda: kind(binds=binds))
        with pytest.raises(TransactionError, match="keeps Wallet in another database than the log's table"):
            await actions.act(body, log=log)
    finally:
        await (other.dispose() if actions.is_async else asyncio.to_thread(other.dispose))
    assert actions.rows() == []


# -- nesting -----------------------------------------------------------------------------------------------------------


async def test_action_inside_another_must_join_it(actions: ActionKit) -> None:
    reason = r"'inner': it was begun inside action 'outer' with a transaction of its own.*Let it join"
    with pytest.raises(ActionError, match=reason):
        async with actions.block("outer"), actions.block("inner"):
            pytest.fail("it has begun")
    async with actions.session() as other:
        with pytest.raises(ActionError, match=reason):
            async with actions.block("outer"), actions.block("inner", session=other):
                pytest.fail("it has begun")
    assert actions.rows() == []


async def test_joined_inner_action_is_recorded_by_itself(actions: ActionKit) -> None:
    async with actions.block("outer", {"n": 1}) as outer:
        await actions.join(outer.session, lambda act, plain: pay(act, plain, actions, 1), name="inner")
        await actions.on(outer.session, lambda plain: pay(outer, plain, actions, 2))
    assert [(row["action_name"], row["action_params"], row["payload"]["amount"]) for row in actions.rows()] == [
        ("inner", {"amount": 5}, 1),
        ("outer", {"n": 1}, 2),
    ]
    assert len({row["action_id"] for row in actions.rows()}) == 2


async def test_outer_action_cannot_swallow_an_inner_failure(actions: ActionKit) -> None:
    def fail(act: Action[Any], plain: Session) -> None:
        pay(act, plain, actions)
        raise Interrupted

    async def outer() -> None:
        async with actions.block("outer") as act:
            with suppress(Interrupted):
                await actions.join(act.session, fail, name="inner")

    with pytest.raises(ActionError, match="'inner' failed in this transaction"):
        await outer()
    assert (actions.rows(), actions.balances()) == ([], [])


async def test_repeated_inner_action_may_be_passed_over(actions: ActionKit) -> None:
    await actions.act(name="inner", idempotency_key="k")
    async with actions.block("outer") as outer:
        with suppress(ActionRepeated):
            await actions.join(
                outer.session, lambda act, plain: pytest.fail("twice"), name="inner", idempotency_key="k"
            )
        await actions.on(outer.session, lambda plain: pay(outer, plain, actions))
    assert [row["action_name"] for row in actions.rows()] == ["inner", "outer"]


async def test_action_that_fails_by_a_repeated_inner_one_cannot_be_committed(actions: ActionKit) -> None:
    async def outer(session: Any) -> None:
        async with actions.block("outer", session=session) as act:
            await actions.on(session, lambda plain: pay(act, plain, actions))
            await actions.join(session, name="inner", idempotency_key="k")

    await actions.act(name="inner", idempotency_key="k")
    async with actions.session() as session:
        with pytest.raises(ActionRepeated):
            await outer(session)
        with pytest.raises(ActionError, match="'outer' failed in this transaction"):
            await actions.on(session, lambda plain: plain.commit())
    assert (actions.types(), actions.balances()) == ([None], [])


async def test_actions_one_after_another_are_not_nested(actions: ActionKit) -> None:
    await actions.act(name="first")
    await actions.act(name="second")
    assert [row["action_name"] for row in actions.rows()] == ["first", "second"]


# -- tasks, threads and time -------------------------------------------------------------------------------------------


@on_sqlite
async def test_another_task_cannot_use_an_action(actions: ActionKit) -> None:
    async def emit(act: Action[Any]) -> None:
        act.emit(Paid(1), model_type="Wallet", model_id=1)

    async def read(act: Action[Any]) -> None:
        act.session  # noqa: B018 - reading it is what is refused

    async with actions.block() as act:
        for use in (emit, read):
            with pytest.raises(ActionError, match=r"was used by task '.*', but the action belongs to task '.*'"):
                await asyncio.create_task(use(act))
    assert actions.types() == [None]


@on_sqlite
async def test_another_thread_cannot_use_an_action(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        found: list[BaseException] = []

        def use() -> None:
            try:
                act.emit(Paid(1), model_type="Wallet", model_id=1)
            except ActionError as error:
                found.append(error)

        thread = threading.Thread(target=use, name="stranger")
        thread.start()
        thread.join()
        assert "was used by thread 'stranger', but the action belongs to" in str(found[0])

    await actions.act(body)
    assert actions.types() == [None]


@on_sqlite
async def test_block_cannot_be_ended_by_another_task(actions: ActionKit) -> None:
    scope = actions.log.action("wallet.deposit")

    async def end() -> None:
        if actions.is_async:
            await scope.__aexit__(None, None, None)
        else:
            scope.__exit__(None, None, None)

    act: Any = await scope.__aenter__() if actions.is_async else scope.__enter__()
    act.emit(Paid(1), model_type="Wallet", model_id=1)
    with pytest.raises(ActionError, match="the end of its block was used by task"):
        await asyncio.create_task(end())
    assert actions.rows() == []


@on_sqlite
async def test_action_cannot_be_used_after_its_end(actions: ActionKit) -> None:
    act = await actions.act()
    with pytest.raises(ActionError, match="has ended: emit can be used inside its block only"):
        act.emit(Paid(1), model_type="Wallet", model_id=1)
    with pytest.raises(ActionError, match="has ended: session can be used inside its block only"):
        act.session  # noqa: B018 - reading it is what is refused


@on_sqlite
async def test_block_can_be_entered_once(actions: ActionKit) -> None:
    scope = actions.log.action("wallet.deposit")
    for expected in (None, "can be entered once"):
        with suppress(ActionError) if expected is None else pytest.raises(ActionError, match=expected):
            if actions.is_async:
                async with scope:
                    pass
            else:
                with scope:
                    pass
    assert len(actions.rows()) == 1


@on_servers
async def test_tasks_may_have_actions_of_their_own_inside_one(actions: ActionKit) -> None:
    async def other() -> None:
        await actions.act(lambda act, session: pay(act, session, actions, 2), name="other")

    async with actions.block() as act:
        await asyncio.gather(other(), other())
        await actions.on(act.session, lambda plain: pay(act, plain, actions, 1))
    assert sorted(row["action_name"] for row in actions.rows()) == ["other", "other", "wallet.deposit"]
    assert sorted(actions.balances()) == [1, 2, 2]
