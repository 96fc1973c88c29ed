"""What an action leaves behind: one row for each event, one when there is none, nothing when it fails."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox import Event, InvalidEvent
from pillarbox.actions import Action, rows
from pillarbox.errors import ConfigError, InvalidAction, TransactionError
from pillarbox.testing import ManualClock
from tests.contract.kit_actions import EACH_DATABASE, KITS, NAMESPACE, ActionKit, actions, places
from tests.contract.stores import process_time_zone

NOON = datetime(2026, 3, 29, 12, 0, 0, 250, tzinfo=UTC)
STEP = timedelta(microseconds=1)

__all__ = ["actions", "places"]


@dataclass
class Deposited:
    amount: int


class Noted(pydantic.BaseModel):
    text: str


class Closed(msgspec.Struct):
    reason: str


def deposit(act: Action[Any], session: Session, kit: ActionKit, amount: int = 5) -> Any:
    wallet = kit.Wallet(balance=amount)
    session.add(wallet)
    act.emit(Deposited(amount), subject=wallet)
    return wallet


# -- rows --------------------------------------------------------------------------------------------------------------


async def test_event_is_one_row_with_its_action(actions: ActionKit) -> None:
    clock = ManualClock(NOON)
    log = actions.make_log(clock=clock)

    def body(act: Action[Any], session: Session) -> None:
        deposit(act, session, actions)
        clock.advance(timedelta(seconds=2))

    act = await actions.act(body, log=log, params={"amount": 5, "note": "für Ärzte"})
    [row] = actions.rows()
    [wallet] = actions.place.read(actions.Wallet.__table__, "id")
    assert row == {
        "id": act.events[0].id,
        "namespace": "shop.wallets",
        "action_id": act.id,
        "action_name": "wallet.deposit",
        "action_params": {"amount": 5, "note": "für Ärzte"},
        "started_date": NOON,
        "completion_date": NOON + timedelta(seconds=2),
        "model_id": str(wallet["id"]),
        "model_type": "Wallet",
        "event_type": "Deposited",
        "payload": {"amount": 5, **told(actions, str(wallet["id"]))},
        "event_date": NOON + timedelta(seconds=2),
        "delivered": False,
    }
    assert act.completed_at == NOON + timedelta(seconds=2)
    assert actions.balances() == [5]
    assert actions.side() == []


def told(actions: ActionKit, model_id: str) -> dict[str, str]:
    """What a payload in Ekbatan's own table says beside the event: its handlers read the model there."""
    return {"modelId": model_id, "modelName": "Wallet"} if actions.place.layout == "ekbatan" else {}


async def test_payload_that_names_its_model_is_left_as_it_is(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        act.emit(Event("Moved", {"modelId": "mine", "modelName": "Purse"}), model_type="Wallet", model_id="w-1")

    await actions.act(body)
    [row] = actions.rows()
    assert row["payload"] == {"modelId": "mine", "modelName": "Purse"}


async def test_times_are_utc_wherever_the_process_is(actions: ActionKit) -> None:
    with process_time_zone("America/New_York"):
        before = datetime.now(UTC)
        await actions.act(lambda act, session: deposit(act, session, actions))
        after = datetime.now(UTC)
    [row] = actions.rows()
    assert before <= row["started_date"] <= row["completion_date"] == row["event_date"] <= after


async def test_clock_in_another_zone_gives_the_same_instant(actions: ActionKit) -> None:
    tokyo = NOON.astimezone(datetime.strptime("+0900", "%z").tzinfo)
    await actions.act(log=actions.make_log(clock=lambda: tokyo))
    assert actions.rows()[0]["started_date"] == NOON


async def test_clock_without_a_zone_is_refused(actions: ActionKit) -> None:
    with pytest.raises(ConfigError, match="expected aware datetimes"):
        await actions.act(log=actions.make_log(clock=lambda: NOON.replace(tzinfo=None)))


async def test_completion_is_never_before_the_start(actions: ActionKit) -> None:
    clock = ManualClock(NOON)
    await actions.act(lambda act, session: clock.advance(timedelta(hours=-1)), log=actions.make_log(clock=clock))
    [row] = actions.rows()
    assert row["started_date"] == row["completion_date"] == NOON


async def test_events_of_an_action_share_it_and_keep_their_order(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        wallet = deposit(act, session, actions, 1)
        act.emit(Noted(text="hello"), subject=wallet)
        act.emit(Event("wallet.audited", {"by": "bob"}), subject=wallet)
        act.emit(Closed("empty"), subject=wallet)
        act.emit(Deposited(2), subject=wallet)

    act = await actions.act(body, log=actions.make_log(clock=ManualClock(NOON)))
    found = actions.rows()
    model = told(actions, found[0]["model_id"])
    assert [(row["event_type"], row["payload"]) for row in found] == [
        ("Deposited", {"amount": 1, **model}),
        ("Noted", {"text": "hello", **model}),
        ("wallet.audited", {"by": "bob", **model}),
        ("Closed", {"reason": "empty", **model}),
        ("Deposited", {"amount": 2, **model}),
    ]
    assert [row["event_date"] for row in found] == [NOON + number * STEP for number in range(5)]
    shared = ("namespace", "action_id", "action_name", "action_params", "started_date", "completion_date", "delivered")
    assert all(row[name] == found[0][name] for row in found for name in shared)
    assert [row["id"] for row in found] == [event.id for event in act.events]
    assert len({row["id"] for row in found}) == 5


async def test_events_and_the_sentinel_are_one_statement_each(actions: ActionKit) -> None:
    await actions.act(lambda act, session: [deposit(act, session, actions) for _ in range(3)])
    assert len(actions.rows()) == 3
    assert len(actions.inserts()) == 1
    await actions.act()
    assert len(actions.inserts()) == 2


@pytest.mark.parametrize("actions", [kit for kit in KITS if "postgresql" in kit], indirect=True)
async def test_committed_events_wake_whoever_waits_for_the_table(actions: ActionKit) -> None:
    listener = await asyncpg.connect(actions.place.url.render_as_string(hide_password=False))
    told: asyncio.Queue[str] = asyncio.Queue()
    name = f"pillarbox.{actions.log.table.fullname}"
    await listener.add_listener(name, lambda connection, pid, channel, payload: told.put_nowait(channel))
    try:
        await actions.act()  # nobody waits for a sentinel
        await actions.act(lambda act, session: [deposit(act, session, actions) for _ in range(3)])
        assert await asyncio.wait_for(told.get(), 20) == name
        await listener.execute("SELECT 1")  # whatever else was sent before has come by now
        assert told.empty()
    finally:
        await listener.close()


async def test_many_events_are_all_written_in_order(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        for number in range(25):
            act.emit(Deposited(number), model_type="Wallet", model_id=1)

    with patch.object(rows, "MAX_ROWS", 10):
        await actions.act(body)
    assert [row["payload"]["amount"] for row in actions.rows()] == list(range(25))
    assert len(actions.inserts()) == 3


async def test_action_without_events_is_exactly_one_sentinel(actions: ActionKit) -> None:
    act = await actions.act(lambda act, session: session.add(actions.Wallet(balance=1)), params={"n": 1})
    [row] = actions.rows()
    assert {name: row[name] for name in ("model_id", "model_type", "event_type", "payload")} == {
        "model_id": None,
        "model_type": None,
        "event_type": None,
        "payload": None,
    }
    assert (row["namespace"], row["action_id"], row["action_params"]) == (NAMESPACE, act.id, {"n": 1})
    assert row["event_date"] == row["completion_date"]
    assert row["delivered"] is False
    assert actions.balances() == [1]


async def test_sentinel_has_null_and_no_json_null(actions: ActionKit) -> None:
    await actions.act()
    with actions.place.engine.connect() as db:
        name = actions.log.table.fullname
        assert db.exec_driver_sql(f"SELECT count(*) FROM {name} WHERE payload IS NULL").scalar_one() == 1


async def test_rows_are_found_by_action_id(actions: ActionKit) -> None:
    first = await actions.act(lambda act, session: [deposit(act, session, actions) for _ in range(2)])
    await actions.act(lambda act, session: deposit(act, session, actions))
    table = actions.log.table
    with actions.place.engine.connect() as db:
        found = db.execute(sa.select(table.c.action_id).where(table.c.action_id == first.id)).scalars().all()
    assert found == [first.id, first.id]


async def test_delivered_can_be_flipped(actions: ActionKit) -> None:
    await actions.act(lambda act, session: deposit(act, session, actions))
    actions.change("UPDATE {events} SET delivered = TRUE WHERE delivered = FALSE")
    assert [row["delivered"] for row in actions.rows()] == [True]


async def test_result_of_a_function_is_returned(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> Any:
        return deposit(act, session, actions, 7)

    wallet = await actions.run(body)
    assert wallet.balance == 7
    assert actions.types() == ["Deposited"]
    assert actions.balances() == [7]


async def test_parameters_may_be_left_out(actions: ActionKit) -> None:
    if actions.is_async:
        async with actions.log.action("nightly.cleanup"):
            pass
    else:
        with actions.log.action("nightly.cleanup"):
            pass
    assert actions.rows()[0]["action_params"] == {}


async def test_values_that_json_lacks_are_written_as_text(actions: ActionKit) -> None:
    number = uuid4()
    params = {"id": number, "price": Decimal("1.10"), "day": date(2026, 1, 2), "at": NOON, "none": None}
    await actions.act(params=params)
    assert actions.rows()[0]["action_params"] == {
        "id": str(number),
        "price": "1.10",
        "day": "2026-01-02",
        "at": "2026-03-29T12:00:00.000250+00:00",
        "none": None,
    }


# -- subjects ----------------------------------------------------------------------------------------------------------


async def test_composite_key_is_joined(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        plain, odd = actions.Seat(hall="A", number=3), actions.Seat(hall="B:1 50%", number=4)
        session.add_all([plain, odd])
        act.emit(Deposited(1), subject=plain)
        act.emit(Deposited(2), subject=odd)

    await actions.act(body)
    assert [(row["model_type"], row["model_id"]) for row in actions.rows()] == [
        ("Seat", "A:3"),
        ("Seat", "B%3A1 50%25:4"),
    ]


async def test_model_type_and_id_override_the_subject(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        seat = actions.Seat(hall="A", number=3)
        session.add(seat)
        act.emit(Deposited(1), subject=seat, model_type="Chair")
        act.emit(Deposited(2), subject=seat, model_id="chair-3")
        act.emit(Deposited(3), model_type="Hall", model_id=UUID(int=7))
        act.emit(Event("Sold", {}, aggregate_type="Ticket", aggregate_id="t-1"))

    await actions.act(body)
    assert [(row["model_type"], row["model_id"]) for row in actions.rows()] == [
        ("Chair", "A:3"),
        ("Seat", "chair-3"),
        ("Hall", "00000000-0000-0000-0000-000000000007"),
        ("Ticket", "t-1"),
    ]


async def test_deleted_subject_keeps_its_id(actions: ActionKit) -> None:
    actions.change("INSERT INTO {wallets} (id, balance, version) VALUES (41, 1, 1)")

    def body(act: Action[Any], session: Session) -> None:
        wallet = session.get_one(actions.Wallet, 41)
        session.delete(wallet)
        act.emit(Closed("gone"), subject=wallet)

    await actions.act(body)
    assert [row["model_id"] for row in actions.rows()] == ["41"]
    assert actions.balances() == []


async def test_subject_that_never_gets_a_key_undoes_the_action(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        deposit(act, session, actions)
        act.emit(Deposited(2), subject=actions.Wallet(balance=1))

    with pytest.raises(InvalidAction, match="has no primary key, although the session was flushed"):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


# -- refusals and failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", EACH_DATABASE, indirect=True)
@pytest.mark.parametrize("params", [None, 7, "text", [1], True], ids=repr)
async def test_params_that_are_no_object_are_refused(actions: ActionKit, params: Any) -> None:
    with pytest.raises(InvalidAction, match=r"Action 'wallet.deposit', params: expected a JSON object"):
        await actions.act(params=params)
    assert actions.rows() == []


class Numbers(pydantic.RootModel[list[int]]):
    pass


@pytest.mark.parametrize("actions", EACH_DATABASE, indirect=True)
@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Numbers([1]), "Event 'Numbers', payload: expected a JSON object"),
        (Event("Deposited", [1]), "Event 'Deposited', payload: expected a JSON object"),
        (Event("Deposited", None), "Event 'Deposited', payload: expected a JSON object"),
        (Event("Deposited", b"\x00"), "got content type 'application/octet-stream'"),
        (Event("Deposited", b"{", content_type="application/json"), "got what is no JSON"),
        ({"amount": 5}, "expected an Event, or an object of a class whose name is the event's type"),
        (object(), "expected an Event, or an object of a class whose name is the event's type"),
        (Event("Deposited", {}, headers={"a": 1}), "no place for its headers"),
        (Event("Deposited", {}, topic="x", source="y"), "no place for its topic, source"),
    ],
    ids=["root list", "list", "null", "bytes", "broken", "dict", "object", "headers", "topic"],
)
async def test_event_that_cannot_be_stored_is_refused(actions: ActionKit, event: Any, message: str) -> None:
    def body(act: Action[Any], session: Session) -> None:
        deposit(act, session, actions)
        act.emit(event, model_type="Wallet", model_id=1)

    with pytest.raises(InvalidEvent, match=message):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("is_fatal", [False, True], ids=["error", "fatal"])
async def test_exception_leaves_neither_changes_nor_rows(actions: ActionKit, is_fatal: bool) -> None:
    fatal = asyncio.CancelledError if actions.is_async else KeyboardInterrupt
    error: type[BaseException] = fatal if is_fatal else Interrupted
    actions.change("INSERT INTO {wallets} (id, balance, version) VALUES (41, 1, 1)")

    def body(act: Action[Any], session: Session) -> None:
        deposit(act, session, actions)
        session.get_one(actions.Wallet, 41).balance = 100
        session.flush()
        raise error

    with pytest.raises(error):
        await actions.act(body, actor="bob", idempotency_key="k")
    assert (actions.rows(), actions.side(), actions.balances()) == ([], [], [1])


async def test_error_of_the_last_flush_leaves_nothing(actions: ActionKit) -> None:
    def body(act: Action[Any], session: Session) -> None:
        deposit(act, session, actions)
        session.add(actions.Wallet(balance=None))

    with pytest.raises(sa.exc.DBAPIError):
        await actions.act(body)
    assert (actions.rows(), actions.balances()) == ([], [])


async def test_engine_that_commits_every_statement_is_refused(actions: ActionKit) -> None:
    engine = actions.engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(TransactionError, match="commits every statement by itself"):
        await actions.act(lambda act, session: deposit(act, session, actions), log=actions.make_log(engine=engine))
    assert (actions.rows(), actions.balances()) == ([], [])


async def test_log_without_an_engine_says_how_it_can_be_used(actions: ActionKit) -> None:
    with pytest.raises(ConfigError, match="it can only join a session"):
        await actions.act(log=actions.make_log(engine=None))


async def test_block_of_the_wrong_kind_says_which_is_right(actions: ActionKit) -> None:
    scope = actions.log.action("wallet.deposit")
    if actions.is_async:
        with pytest.raises(TypeError, match=r"use `async with log.action"), scope:
            pass
    else:
        with pytest.raises(TypeError, match=r"use `with log.action"):
            async with scope:
                pass
