"""A process that is killed in the middle of an action leaves nothing; one that is killed after the commit, everything.

The process is a fork that says where it is and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest
from sqlalchemy.orm import Session

from pillarbox.actions import Action
from pillarbox.errors import ActionRepeated
from tests.contract.kit_actions import KITS, ActionKit, Place, places

__all__ = ["places"]


@dataclass
class Charged:
    amount: int


@pytest.fixture(params=KITS)
def where(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Iterator[tuple[Place, str]]:
    name, _, face = request.param.rpartition("-")
    place = places(name)
    # A fork must not share a connection with this process.
    place.engine.dispose()
    yield place, face
    place.engine.dispose()


def wait_to_be_killed(pipe: Connection, said: str) -> NoReturn:
    pipe.send(said)
    signal.pause()
    os._exit(1)


def act_until(step: str, place: Place, face: str, pipe: Connection) -> None:
    """Run an action in this process up to a step of its end."""
    kit = ActionKit(place, face, keep=True)

    def body(act: Action[Any], session: Session) -> None:
        wallet = kit.Wallet(balance=5)
        session.add(wallet)
        act.emit(Charged(5), subject=wallet)
        session.flush()
        if step == "in the body":
            wait_to_be_killed(pipe, step)

    commit = Session.commit

    def stop(session: Session) -> None:
        if step == "before the commit":
            wait_to_be_killed(pipe, step)
        commit(session)
        wait_to_be_killed(pipe, "after the commit")

    Session.commit = stop  # type: ignore[method-assign, assignment]
    asyncio.run(run_action(kit, body))


async def run_action(kit: ActionKit, body: Any) -> None:
    await kit.act(body, actor="bob", idempotency_key="k-1")


def kill_at(step: str, place: Place, face: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=act_until, args=(step, place, face, theirs))
    process.start()
    try:
        assert ours.poll(30), "the process did not come so far"
        assert ours.recv() == step
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()
    assert process.exitcode == -signal.SIGKILL


async def charge_again(place: Place, face: str) -> tuple[Any, ActionKit]:
    kit = ActionKit(place, face, keep=True)

    def body(act: Action[Any], session: Session) -> None:
        wallet = kit.Wallet(balance=7)
        session.add(wallet)
        act.emit(Charged(7), subject=wallet)

    try:
        # Waits until the server has undone what the killed process had begun.
        return await kit.act(body, actor="bob", idempotency_key="k-1"), kit
    except ActionRepeated as repeated:
        return repeated, kit
    finally:
        await kit.close()


@pytest.mark.parametrize("step", ["in the body", "before the commit"])
def test_killed_before_the_commit_leaves_nothing(where: tuple[Place, str], step: str) -> None:
    place, face = where
    place.empty()
    place.engine.dispose()
    kill_at(step, place, face)
    act, kit = asyncio.run(charge_again(place, face))
    assert [row["action_id"] for row in kit.rows()] == [act.id]
    assert [row["action_id"] for row in kit.side()] == [act.id]
    assert kit.balances() == [7]


def test_killed_after_the_commit_leaves_everything(where: tuple[Place, str]) -> None:
    place, face = where
    place.empty()
    place.engine.dispose()
    kill_at("after the commit", place, face)
    repeated, kit = asyncio.run(charge_again(place, face))
    assert isinstance(repeated, ActionRepeated)
    assert [row["action_id"] for row in kit.rows()] == [repeated.action_id]
    assert kit.balances() == [5]
