"""Who did an action, and that one with an idempotency key is done once, also when two run at the same moment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox.actions import Action
from pillarbox.errors import ActionRepeated, InvalidAction, SchemaError
from pillarbox.testing import ManualClock
from tests.contract.kit_actions import EACH_DATABASE, KITS, ActionKit, actions, places

__all__ = ["actions", "places"]

NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)


@dataclass
class Credited:
    amount: int


class Interrupted(Exception):
    pass


def credit(act: Action[Any], session: Session, kit: ActionKit) -> None:
    wallet = kit.Wallet(balance=5)
    session.add(wallet)
    act.emit(Credited(5), subject=wallet)


def refuse(act: Action[Any], session: Session) -> None:
    pytest.fail("the body ran a second time")


async def test_actor_and_key_stand_beside_the_log(actions: ActionKit) -> None:
    clock = ManualClock(NOON)

    def body(act: Action[Any], session: Session) -> None:
        credit(act, session, actions)
        clock.advance(timedelta(seconds=3))

    act = await actions.act(body, log=actions.make_log(clock=clock), actor="alice", idempotency_key="k-1")
    assert actions.side() == [
        {
            "action_id": act.id,
            "namespace": "shop.wallets",
            "action_name": "wallet.deposit",
            "actor": "alice",
            "idempotency_key": "k-1",
            "completion_date": NOON + timedelta(seconds=3),
        }
    ]
    assert [row["action_id"] for row in actions.rows()] == [act.id]


async def test_row_beside_the_log_is_only_for_actions_that_need_it(actions: ActionKit) -> None:
    await actions.act()
    one = await actions.act(actor="alice")
    two = await actions.act(actor="alice")
    three = await actions.act(idempotency_key="k-1")
    found = {row["action_id"]: (row["actor"], row["idempotency_key"]) for row in actions.side()}
    assert found == {one.id: ("alice", None), two.id: ("alice", None), three.id: (None, "k-1")}


async def test_repeated_key_is_refused_with_the_first_actions_id(actions: ActionKit) -> None:
    first = await actions.act(lambda act, session: credit(act, session, actions), idempotency_key="k-1")
    with pytest.raises(
        ActionRepeated, match=rf"idempotency key 'k-1', as action {first.id}; nothing was done"
    ) as caught:
        await actions.act(refuse, idempotency_key="k-1")
    assert (caught.value.action_id, caught.value.idempotency_key) == (first.id, "k-1")
    with pytest.raises(ActionRepeated):
        await actions.run(refuse, idempotency_key="k-1")
    assert actions.balances() == [5]
    assert len(actions.rows()) == len(actions.side()) == 1


async def test_key_belongs_to_a_name_and_a_namespace(actions: ActionKit) -> None:
    await actions.act(idempotency_key="k-1")
    await actions.act(name="wallet.withdraw", idempotency_key="k-1")
    await actions.act(log=actions.make_log(namespace="shop.orders"), idempotency_key="k-1")
    assert len(actions.rows()) == 3


@pytest.mark.parametrize("other", ["K-1", "k-1 ", "k-1̈", "ḱ-1"], ids=["case", "blank", "mark", "accent"])
async def test_keys_are_compared_byte_by_byte(actions: ActionKit, other: str) -> None:
    await actions.act(idempotency_key="k-1")
    await actions.act(idempotency_key=other)
    assert sorted(row["idempotency_key"] for row in actions.side()) == sorted(["k-1", other])


async def test_failed_action_leaves_its_key_free(actions: ActionKit) -> None:
    def fail(act: Action[Any], session: Session) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        await actions.act(fail, idempotency_key="k-1")
    await actions.act(idempotency_key="k-1")
    assert len(actions.side()) == 1


@pytest.mark.parametrize("is_kept", [True, False], ids=["commits", "fails"])
async def test_second_waits_for_the_first(actions: ActionKit, is_kept: bool) -> None:
    gate = actions.gate()

    def body(act: Action[Any], session: Session) -> None:
        credit(act, session, actions)
        gate.pass_through()
        if not is_kept:
            raise Interrupted

    first = asyncio.create_task(actions.act(body, idempotency_key="k-1", actor="one"))
    await gate.reached()
    second = asyncio.create_task(
        actions.act(lambda act, session: credit(act, session, actions), idempotency_key="k-1", actor="two")
    )
    await actions.until_blocked()
    assert not second.done()
    gate.open()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(result) for result in results] == ([Action, ActionRepeated] if is_kept else [Interrupted, Action])
    assert [row["actor"] for row in actions.side()] == ["one" if is_kept else "two"]
    assert actions.balances() == [5]
    assert len(actions.rows()) == 1


@pytest.mark.parametrize("actions", [kit for kit in KITS if "sqlite" not in kit], indirect=True)
async def test_of_several_that_wait_for_one_that_fails_one_is_done(actions: ActionKit) -> None:
    gate = actions.gate()

    def fail(act: Action[Any], session: Session) -> None:
        gate.pass_through()
        raise Interrupted

    first = asyncio.create_task(actions.act(fail, idempotency_key="k-1"))
    await gate.reached()
    waiting = [
        asyncio.create_task(actions.act(lambda act, session: credit(act, session, actions), idempotency_key="k-1"))
        for _ in range(4)
    ]
    await actions.until_blocked(4)
    gate.open()
    with pytest.raises(Interrupted):
        await first
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Action", *["ActionRepeated"] * 3]
    assert actions.balances() == [5]
    assert len(actions.rows()) == len(actions.side()) == 1


@pytest.mark.parametrize("actions", [kit for kit in KITS if "async" in kit and "sqlite" not in kit], indirect=True)
async def test_cancelled_wait_for_a_key_leaves_the_first_alone(actions: ActionKit) -> None:
    gate = actions.gate()
    first = asyncio.create_task(actions.act(lambda act, session: gate.pass_through(), idempotency_key="k-1"))
    await gate.reached()
    second = asyncio.create_task(actions.act(refuse, idempotency_key="k-1"))
    await actions.until_blocked()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.open()
    act = await first
    assert [row["action_id"] for row in actions.side()] == [act.id]


async def test_of_many_at_once_one_is_done(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> UUID:
        credit(act, session, actions)
        return act.id

    runs = [actions.run(body, idempotency_key="k-1", retry=20) for _ in range(6)]
    results = await asyncio.gather(*runs, return_exceptions=True)
    [done] = [result for result in results if not isinstance(result, BaseException)]
    repeated = [result.action_id for result in results if isinstance(result, ActionRepeated)]
    assert repeated == [done] * 5
    assert actions.balances() == [5]
    assert len(actions.rows()) == 1


async def test_repeated_action_in_a_joined_session_leaves_it_usable(actions: ActionKit) -> None:
    async with actions.session() as session:
        # Where a transaction sees one moment of the database, it is one before the first action's.
        await actions.on(session, lambda plain: plain.execute(sa.select(actions.Wallet)).all())
        first = await actions.act(idempotency_key="k-1")
        with pytest.raises(ActionRepeated) as caught:
            await actions.join(session, refuse, name="wallet.deposit", idempotency_key="k-1")
        await actions.on(session, lambda plain: plain.add(actions.Wallet(balance=2)))
        await actions.on(session, lambda plain: plain.commit())
    assert caught.value.action_id == first.id
    assert actions.balances() == [2]


@pytest.mark.parametrize("actions", EACH_DATABASE, indirect=True)
@pytest.mark.parametrize("given", [{"actor": ""}, {"idempotency_key": " "}, {"actor": "a\0"}, {"actor": "x" * 256}])
async def test_actor_or_key_that_does_not_fit_is_refused(actions: ActionKit, given: Any) -> None:
    with pytest.raises(InvalidAction, match=f"Action 'wallet.deposit', {next(iter(given))}: "):
        await actions.act(refuse, **given)
    assert actions.rows() == []


async def test_missing_table_is_named(actions: ActionKit) -> None:
    log = actions.make_log(table="nowhere_events")
    given: list[dict[str, Any]] = [{"actor": "bob"}, {"idempotency_key": "k-1"}, {}]
    try:
        for options in given:
            with pytest.raises(SchemaError, match=r"nowhere_events.*Create the log's tables first"):
                await actions.act(log=log, **options)
    finally:
        for table in log.tables.values():
            actions.place.metadata.remove(table)
