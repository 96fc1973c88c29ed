"""From the event log to handlers: who is notified of what, once, and by how many nodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import Context, Handlers
from pillarbox.errors import ConfigError
from pillarbox.event import uuid7
from pillarbox.notifications import ActionContext, read_action
from pillarbox.notifications.relays import notification_relays
from pillarbox.stores.url import open_store
from tests.contract.layouts import NOW, LayoutKit
from tests.contract.notifications import INSERT, SENTINEL, Log, everywhere, make_handlers, note, on_servers
from tests.contract.specs import ACTION
from tests.servers import server_url


@pytest.fixture
async def log(layout_kit: LayoutKit) -> AsyncIterator[Log]:
    made = Log(layout_kit)
    yield made
    await made.close()


@everywhere
async def test_every_handler_of_an_event_is_called_once(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", name="mailer")
    note(handlers, ["Deposited", "Withdrawn"], calls, name="ledger")
    log.emit("Deposited", "Deposited", "Deposited")
    await log.drain(handlers)
    await log.drain(handlers)
    assert sorted(calls) == [("ledger", "Deposited")] * 3 + [("mailer", "Deposited")] * 3
    assert log.notifications("handler_name", "state", "attempts") == [
        *[("ledger", "SUCCEEDED", 1)] * 3,
        *[("mailer", "SUCCEEDED", 1)] * 3,
    ]
    assert log.kit.count("delivered = TRUE", role="events") == 3


@everywhere
async def test_notification_is_a_full_copy_of_its_event(log: Log) -> None:
    handlers, _ = make_handlers("Deposited")
    [event] = log.emit("Deposited")
    async with log.relays(handlers, handles=False) as group:
        await group.drain()
    names = log.kit.database.names
    with log.kit.engine.begin() as db:
        source = dict(db.execute(sa.text(f"SELECT * FROM {names['events']}")).mappings().one())
        copy = dict(db.execute(sa.text(f"SELECT * FROM {names['outbox']}")).mappings().one())
    assert str(copy.pop("event_id")) == str(event)
    assert str(copy.pop("id")) != str(source.pop("id"))
    own = {"handler_name", "state", "attempts", "next_retry_at", "created_date", "updated_date"}
    assert {name: copy.pop(name) for name in own} == {
        "handler_name": "mailer",
        "state": "PENDING",
        "attempts": 0,
        "next_retry_at": NOW,
        "created_date": NOW,
        "updated_date": NOW,
    }
    assert source.pop("delivered") == 1
    assert copy == source


@everywhere
async def test_handler_learns_the_action_from_the_notification_alone(log: Log) -> None:
    seen: list[ActionContext | None] = []
    handlers = Handlers()

    @handlers.on("Deposited")
    async def mailer(payload: dict[str, Any], context: Context) -> None:
        seen.append(read_action(context.claim))

    [event] = log.emit("Deposited")
    log.kit.execute("UPDATE {events} SET action_params = '{{\"amount\": 5}}'")
    async with log.relays(handlers) as group:
        await group.relays["fan-out"].drain()
        log.kit.execute("DELETE FROM {events}")
        await group.drain()
    [found] = seen
    assert found is not None
    assert (str(found.event_id), str(found.action_id)) == (str(event), ACTION)
    assert (found.namespace, found.action_name, found.params) == ("shop", "DepositAction", {"amount": 5})
    assert (found.started_at, found.completed_at, found.event_at) == (NOW, NOW, NOW)
    assert {each.tzinfo is not None for each in (found.started_at, found.completed_at, found.event_at)} == {True}
    assert (found.model_type, found.model_id) == ("Wallet", "w-1")


@everywhere
async def test_type_without_a_handler_stays_undelivered_until_one_is_deployed(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("Deposited", "Withdrawn")
    await log.drain(handlers)
    assert log.delivered() == {"Deposited": True, "Withdrawn": False}
    later, late_calls = make_handlers("Deposited", "Withdrawn", name="ledger")
    await log.drain(later)
    assert (calls, late_calls) == ([("mailer", "Deposited")], [("ledger", "Withdrawn")])
    assert log.delivered() == {"Deposited": True, "Withdrawn": True}


@everywhere
async def test_rows_without_an_event_are_left_alone(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("", sql=SENTINEL)
    await log.drain(handlers)
    assert (calls, log.kit.count(), log.kit.count("delivered = FALSE", role="events")) == ([], 0, 1)


@everywhere
async def test_events_of_another_namespace_are_left_alone(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("Deposited", namespace="bank")
    log.emit("Deposited", namespace="Shop")
    log.emit("Deposited")
    await log.drain(handlers)
    assert (len(calls), log.kit.count("delivered = FALSE", role="events")) == (1, 2)
    await log.drain(handlers, namespace="bank")
    await log.drain(handlers, namespace="Shop")
    assert len(calls) == 3


@everywhere
async def test_notifications_of_another_namespace_are_left_alone(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("Deposited", namespace="bank")
    async with log.relays(handlers, namespace="bank", handles=False) as group:
        await group.drain()
    await log.drain(handlers)
    assert (calls, log.notifications("state", "namespace")) == ([], [("PENDING", "bank")])


@everywhere
async def test_types_are_told_apart_by_their_case(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("deposited", "Deposited")
    await log.drain(handlers)
    assert (calls, log.delivered()) == ([("mailer", "Deposited")], {"Deposited": True, "deposited": False})


@everywhere
async def test_nodes_fanning_out_at_once_notify_once(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", "Withdrawn")
    note(handlers, ["Deposited"], calls, name="ledger")
    log.emit(*["Deposited", "Withdrawn"] * 40)
    groups = [log.relays(handlers, batch_size=7) for _ in range(3)]
    for group in groups:
        await group.open()
    await asyncio.gather(*(group.relays["fan-out"].drain() for group in groups))
    await groups[0].relays["fan-out"].drain()
    assert log.kit.count() == 120
    assert log.kit.count("delivered = FALSE", role="events") == 0
    await asyncio.gather(*(group.drain() for group in groups))
    assert (calls.count(("mailer", "Deposited")), calls.count(("mailer", "Withdrawn"))) == (40, 40)
    assert (calls.count(("ledger", "Deposited")), len(calls)) == (40, 120)


@everywhere
async def test_events_of_one_action_come_in_the_order_they_were_emitted(log: Log) -> None:
    # Against the alphabet, and at one moment as within an action: only the ids tell the order.
    types = ["WalletOpened", "MoneyDeposited", "AccountClosed"] * 4
    handlers, calls = make_handlers("AccountClosed", "MoneyDeposited", "WalletOpened")
    for type in types:
        log.kit.insert(type, sql=INSERT, id=uuid7())
    log.kit.execute("UPDATE {events} SET event_date = {ago}", seconds=60)
    await log.drain(handlers)
    assert calls == [("mailer", type) for type in types]


@everywhere
async def test_events_of_several_types_come_in_the_order_of_their_dates(log: Log) -> None:
    types = ["C", "B", "A", "C", "A", "B"]
    handlers, calls = make_handlers("A", "B", "C")
    for age, type in zip(range(60, 0, -10), types, strict=True):
        log.kit.insert(type, sql=INSERT.replace("{utc}", "{ago}"), seconds=age)
    await log.drain(handlers)
    assert calls == [("mailer", type) for type in types]


@everywhere
async def test_busy_type_does_not_starve_others(log: Log) -> None:
    handlers, _ = make_handlers("A", "B")
    log.emit(*["A"] * 40, "B")
    log.kit.execute("UPDATE {events} SET event_date = {ago} WHERE event_type = 'B'", seconds=60)
    async with log.relays(handlers) as group:
        batch = await group.relays["fan-out"].store.claim(20, mode="hold", lease=timedelta(seconds=30))
        await batch.abandon()
    assert [claim.event.type for claim in batch.claims] == ["B", *["A"] * 19]


@everywhere
async def test_types_that_differ_in_case_are_claimed_once_each(log: Log) -> None:
    handlers, _ = make_handlers("Deposited", "deposited")
    log.emit("deposited", "Deposited")
    async with log.relays(handlers) as group:
        batch = await group.relays["fan-out"].store.claim(20, mode="hold", lease=timedelta(seconds=30))
        await batch.abandon()
    # In any order: both may have been emitted at one time.
    assert sorted(claim.event.type for claim in batch.claims) == ["Deposited", "deposited"]


@on_servers
async def test_node_locks_little_more_than_it_claims(log: Log) -> None:
    handlers, _ = make_handlers("Deposited", "Withdrawn")
    log.emit(*["Deposited", "Withdrawn"] * 20)
    async with log.relays(handlers) as one, log.relays(handlers) as two:
        claimed = [
            await group.relays["fan-out"].store.claim(8, mode="hold", lease=timedelta(seconds=30))
            for group in (one, two)
        ]
        rows = [each.row for batch in claimed for each in batch.claims]
        for batch in claimed:
            await batch.abandon()
    assert (len(rows), len(set(rows))) == (16, 16)


@everywhere
async def test_event_that_was_fanned_out_halfway_by_others_is_not_notified_twice(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit("Deposited")
    await log.drain(handlers)
    # As another system leaves it that flips the flag in a transaction of its own and dies before.
    log.kit.execute("UPDATE {events} SET delivered = FALSE")
    more, _ = make_handlers("Deposited", name="mailer")
    note(more, ["Deposited"], calls, name="ledger")
    await log.drain(more)
    assert calls == [("mailer", "Deposited"), ("ledger", "Deposited")]
    assert log.notifications("handler_name", "state") == [("ledger", "SUCCEEDED"), ("mailer", "SUCCEEDED")]


@on_servers
async def test_error_of_the_database_at_fan_out_leaves_the_event_undelivered(log: Log) -> None:
    handlers, _ = make_handlers("Deposited")
    log.emit("Deposited")
    column = "ALTER TABLE {outbox} ALTER COLUMN action_name TYPE VARCHAR(3)"
    if log.kit.database.backend == "mysql":
        column = "ALTER TABLE {outbox} MODIFY action_name VARCHAR(3) NOT NULL"
    log.kit.execute(column)
    try:
        async with log.relays(handlers) as group:
            await group.relays["fan-out"].run_once()
    finally:
        log.kit.execute(column.replace("(3)", "(255)"))
    assert (log.delivered(), log.kit.count()) == ({"Deposited": False}, 0)


@pytest.mark.parametrize("layout_kit", ["actions-notifications-postgresql"], indirect=True)
async def test_fan_out_holds_rows_behind_a_pooler_too(log: Log) -> None:
    handlers, calls = make_handlers("Deposited")
    log.emit(*["Deposited"] * 3)
    table = log.kit.outbox.table
    pooled = partial(open_store, server_url("pgbouncer"), table=table.name)
    group = notification_relays(pooled, handlers, namespace="shop")
    async with group:
        batch = await group.relays["fan-out"].store.claim(2, mode="lease", lease=timedelta(seconds=30))
        assert (batch.mode, len(batch.claims)) == ("hold", 2)
        await batch.abandon()
        await group.drain()
    assert (len(calls), log.kit.count("delivered = TRUE", role="events")) == (3, 3)


@everywhere
async def test_fan_out_wakes_the_relays_of_its_handlers(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, calls = make_handlers("Deposited", name="mailer")
    note(handlers, ["Withdrawn"], calls, name="ledger")
    woken: list[str] = []
    log.emit("Deposited")
    async with log.relays(handlers) as group:
        for name in ("mailer", "ledger"):
            monkeypatch.setattr(group.relays[name], "wake", lambda name=name: woken.append(name))
        await group.relays["fan-out"].run_once()
        await group.relays["fan-out"].run_once()
    assert woken == ["mailer", "ledger"]


@everywhere
@pytest.mark.parametrize("namespace", ["", " ", "x" * 256, None], ids=repr)
async def test_namespace_must_be_given(log: Log, namespace: Any) -> None:
    handlers, _ = make_handlers("Deposited")
    with pytest.raises(ConfigError, match="expected a namespace"):
        log.relays(handlers, namespace=namespace)


@everywhere
async def test_names_that_some_databases_take_for_one_are_refused(log: Log) -> None:
    handlers, calls = make_handlers("Deposited", name="mailer")
    note(handlers, ["Deposited"], calls, name="mailér")
    with pytest.raises(ConfigError, match="'mailer' and 'mailér'"):
        log.relays(handlers)
