"""What is particular to Ekbatan's tables: sentinel rows, a flag others may flip, and a claim whose end is its fence."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Event, InvalidEvent, Outbox, Retry
from pillarbox.errors import Unsupported
from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome
from pillarbox.stores import Counts, Filter, Mode, Pruned, Settlement
from pillarbox.stores.url import open_store
from tests.contract.layouts import HOUR, IN_AN_HOUR, NOW, Around, LayoutKit, claim, names
from tests.contract.specs import ACTION, EVENT_INSERT, LEASE_END, NOTIFICATION_INSERT

SERVERS = ("postgresql", "mariadb", "mysql")
events = pytest.mark.parametrize("layout_kit", [f"ekbatan-{name}" for name in SERVERS], indirect=True)
notifications = pytest.mark.parametrize(
    "layout_kit", [f"ekbatan-notifications-{name}" for name in SERVERS], indirect=True
)
everywhere = pytest.mark.usefixtures("zone")

EVERYTHING = Filter()
LATER = Retry("503 from the destination", HOUR)
SECOND = timedelta(seconds=1)
SENTINEL = EVENT_INSERT.replace("'w-1', 'Wallet', :name", "NULL, NULL, NULL").replace("""'{{"n": 1}}'""", "NULL")


class Interrupted(Exception):
    """The application changes its mind."""


def put(kit: LayoutKit, name: str, payload: Any = None, **fields: Any) -> Event:
    event = kit.event(name, payload, **fields)
    kit.put(event)
    return event


# -- putting -----------------------------------------------------------------------------------------------------------


@events
@everywhere
def test_put_writes_one_row_with_the_action_that_caused_it(layout_kit: LayoutKit) -> None:
    event = put(layout_kit, "WalletMoneyDepositedEvent", {"amount": 5})
    row = layout_kit.row(event.id)
    assert row is not None
    assert {name: row[name] for name in row if name not in ("id", "action_id", "payload", "action_params")} == {
        "namespace": "shop",
        "action_name": "pillarbox.put",
        "started_date": NOW,
        "completion_date": NOW,
        "model_id": "w-1",
        "model_type": "Wallet",
        "event_type": "WalletMoneyDepositedEvent",
        "event_date": NOW,
        "delivered": False,
    }
    assert (str(row["id"]), str(row["action_id"])) == (str(event.id), ACTION)
    read = layout_kit.count("event_date = completion_date AND started_date = completion_date")
    assert read == 1
    payload = json.loads(_json(layout_kit, "payload"))
    # Its handlers read the model from the payload.
    assert payload == {"amount": 5, "modelId": "w-1", "modelName": "Wallet"}
    assert _json(layout_kit, "action_params") == "{}"


def _json(kit: LayoutKit, column: str) -> str:
    kind = "text" if kit.database.backend == "postgresql" else "char"
    with kit.engine.begin() as db:
        text: str = db.exec_driver_sql(
            f"SELECT CAST({column} AS {kind}) FROM {kit.database.names['outbox']}"
        ).scalar_one()
    return text.replace(" ", "")


@events
@pytest.mark.parametrize(
    ("payload", "written"),
    [
        (b" {} ", '{"modelId":"w-1","modelName":"Wallet"}'),
        (b'{"modelId":"other","modelName":null}', '{"modelId":"other","modelName":null}'),
        (b'{"modelName":"Purse"}', '{"modelId":"w-1","modelName":"Purse"}'),
        (b'{"in":{"modelId":"x"}}', '{"in":{"modelId":"x"},"modelId":"w-1","modelName":"Wallet"}'),
    ],
    ids=["empty", "both", "one", "inside"],
)
def test_payload_names_its_model_unless_it_does_already(layout_kit: LayoutKit, payload: bytes, written: str) -> None:
    layout_kit.put(Event("Deposited", payload, content_type="application/json", **layout_kit.spec.fields()))
    assert json.loads(_json(layout_kit, "payload")) == json.loads(written)


@events
def test_number_of_a_payload_that_names_its_model_keeps_its_digits(layout_kit: LayoutKit) -> None:
    body = b'{"amount":12345678901234567890.123}'
    layout_kit.put(Event("Deposited", body, content_type="application/json", **layout_kit.spec.fields()))
    is_exact = layout_kit.database.backend == "postgresql" or layout_kit.database.name == "mariadb"
    assert ("12345678901234567890.123" in _json(layout_kit, "payload")) == is_exact


@events
def test_events_of_one_action_share_its_id_and_have_ids_of_their_own(layout_kit: LayoutKit) -> None:
    one, two = layout_kit.event("Deposited"), layout_kit.event("Notified")
    layout_kit.put(one, two)
    with layout_kit.engine.begin() as db:
        found = db.execute(
            sa.text(f"SELECT event_type FROM {layout_kit.database.names['outbox']} WHERE action_id = :id ORDER BY 1"),
            {"id": ACTION},
        )
        assert found.scalars().all() == ["Deposited", "Notified"]
    assert one.id != two.id
    assert layout_kit.count("delivered = FALSE AND namespace = 'shop'") == 2


@events
@pytest.mark.parametrize("payload", [[1], "text", 7, None], ids=str)
def test_payload_that_is_no_object_is_refused(layout_kit: LayoutKit, payload: Any) -> None:
    event = Event("Deposited", payload, **layout_kit.spec.fields())
    with pytest.raises(InvalidEvent, match="payload: layout 'ekbatan' expects a JSON object"):
        layout_kit.put(event)
    assert layout_kit.count() == 0


@events
@pytest.mark.parametrize(
    ("fields", "column"),
    [({"source": None}, "namespace"), ({"correlation_id": None}, "action_id")],
    ids=["source", "correlation_id"],
)
def test_event_without_what_the_table_requires_is_refused(layout_kit: LayoutKit, fields: Any, column: str) -> None:
    with pytest.raises(InvalidEvent, match=f"column '{column}'"):
        put(layout_kit, "Deposited", **fields)


@events
def test_action_id_that_is_no_uuid_is_refused(layout_kit: LayoutKit) -> None:
    with pytest.raises(InvalidEvent, match="expected a UUID for the event's correlation_id, got 'c-1'"):
        put(layout_kit, "Deposited", correlation_id="c-1")


@events
@pytest.mark.parametrize("fields", [{"headers": {"a": "b"}}, {"delay": HOUR}, {"dedup_key": "once"}], ids=str)
def test_what_the_table_has_no_place_for_is_refused(layout_kit: LayoutKit, fields: Any) -> None:
    with pytest.raises(Unsupported, match=f"no place for the event's {next(iter(fields))}"):
        put(layout_kit, "Deposited", **fields)


@events
def test_rollback_leaves_neither_rows_of_the_application_nor_events(layout_kit: LayoutKit) -> None:
    with suppress(Interrupted), layout_kit.engine.begin() as db:
        layout_kit.outbox.put(db, layout_kit.event("Deposited"), layout_kit.event("Notified"))
        raise Interrupted
    assert layout_kit.count() == 0


@events
def test_delivered_has_no_default(layout_kit: LayoutKit) -> None:
    left_out = EVENT_INSERT.replace(", delivered)", ")").replace(", FALSE)", ")")
    with pytest.raises(sa.exc.DBAPIError):
        layout_kit.insert("Deposited", sql=left_out)


# -- delivering events -------------------------------------------------------------------------------------------------


@events
@everywhere
async def test_event_is_read_from_the_row_of_the_other_system(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.insert("Deposited")
    batch = await claim(await layout_kit.open(), mode=mode)
    [found] = batch.claims
    event = found.event
    assert (event.id, event.type, event.topic, event.key) == (row, "Deposited", "Deposited", "w-1")
    assert (event.aggregate_type, event.aggregate_id) == ("Wallet", "w-1")
    assert (event.source, event.correlation_id) == ("shop", ACTION)
    assert (event.payload.replace(b" ", b""), event.content_type) == (b'{"n":1}', "application/json")
    assert event.created_at == NOW
    await batch.abandon()


@events
async def test_sentinel_rows_are_neither_delivered_nor_counted_nor_listed(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.insert("", sql=SENTINEL)
    layout_kit.execute("UPDATE {outbox} SET event_date = {back[event_date]}", seconds=86400)
    store = await layout_kit.open()
    assert names(await claim(store, mode=mode)) == ""
    assert await store.counts() == Counts()
    assert await store.events(EVERYTHING) == []
    assert layout_kit.column(row, "delivered") == 0


@events
async def test_row_that_others_have_delivered_is_not_claimed(layout_kit: LayoutKit, mode: Mode) -> None:
    layout_kit.insert("Deposited")
    layout_kit.execute("UPDATE {outbox} SET delivered = TRUE")
    store = await layout_kit.open()
    assert names(await claim(store, mode=mode)) == ""
    assert await store.counts() == Counts()


@events
async def test_oldest_event_is_claimed_first(layout_kit: LayoutKit, mode: Mode) -> None:
    for name, seconds in (("young", 10), ("old", 30), ("middle", 20)):
        row = layout_kit.insert(name)
        moved = "UPDATE {outbox} SET event_date = {back[event_date]} WHERE id = :id"
        layout_kit.execute(moved, id=row, seconds=seconds)
    batch = await claim(await layout_kit.open(), mode=mode)
    assert names(batch) == "old middle young"
    await batch.abandon()


@events
@everywhere
async def test_events_are_found_by_their_time(layout_kit: LayoutKit) -> None:
    layout_kit.insert("new")
    old = layout_kit.insert("old")
    moved = "UPDATE {outbox} SET event_date = {back[event_date]} WHERE id = :id"
    layout_kit.execute(moved, id=old, seconds=3600)
    store = await layout_kit.open()
    now = datetime.now(UTC)
    since = await store.events(Filter(since=now - timedelta(minutes=30)))
    until = await store.events(Filter(until=now - timedelta(minutes=30)))
    assert ([each.event.type for each in since], [each.event.type for each in until]) == (["new"], ["old"])
    age = (await store.counts()).oldest_pending
    assert age is not None
    assert HOUR <= age < HOUR + timedelta(minutes=1)


@events
async def test_dead_event_is_not_the_oldest_pending(layout_kit: LayoutKit) -> None:
    layout_kit.insert("dead")
    layout_kit.execute("UPDATE {outbox} SET event_date = {back[event_date]}", seconds=3600)
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400")])
    assert await store.counts() == Counts(dead=1)
    layout_kit.insert("new")
    age = (await store.counts()).oldest_pending
    assert age is not None
    assert age < timedelta(minutes=1)


@events
async def test_entry_of_a_row_that_others_delivered_is_forgotten(layout_kit: LayoutKit) -> None:
    layout_kit.insert("Deposited")
    store = await layout_kit.open()
    await (await claim(store)).settle([Retry("503", timedelta(0))])
    layout_kit.execute("UPDATE {outbox} SET delivered = TRUE")
    await layout_kit.look_again()
    assert names(await claim(store)) == ""
    assert (layout_kit.count(role="state"), await store.next_due()) == (0, None)


@events
async def test_dead_events_are_pruned_with_their_rows_by_when_they_died(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("dead")
    layout_kit.insert("open")
    layout_kit.execute("UPDATE {outbox} SET event_date = {back[event_date]} WHERE id = :id", id=row, seconds=86400)
    store = await layout_kit.open()
    await (await claim(store, 1)).settle([Dead("400")])
    assert await store.prune(dead_age=HOUR) == Pruned()
    layout_kit.execute("UPDATE {state} SET died_at = {back[died_at]}", seconds=3700)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert (layout_kit.row(row), layout_kit.count(), layout_kit.count(role="state")) == (None, 1, 0)


@events
async def test_direct_relay_is_refused_where_handlers_deliver(layout_kit: LayoutKit) -> None:
    table = layout_kit.outbox.table
    metadata = sa.MetaData()
    handled = Outbox(metadata, "ekbatan-notifications", table=table.name, schema=table.schema)
    store = open_store(layout_kit.database.url, layout="ekbatan", table=table.name, schema=table.schema)
    handled.table.create(layout_kit.engine)
    try:
        with pytest.raises(Unsupported, match=f"there is a table '{handled.table.name}'.*ekbatan-notifications"):
            await store.open()
    finally:
        handled.table.drop(layout_kit.engine)
        await store.close()
    await layout_kit.open()


# -- notifications: claims ---------------------------------------------------------------------------------------------


def back_claim(kit: LayoutKit, row: UUID, seconds: int) -> None:
    """Let a claim end earlier, as if that much time had passed; nobody holds it then who knew its end."""
    kit.execute("UPDATE {outbox} SET next_retry_at = {back[next_retry_at]} WHERE id = :id", id=row, seconds=seconds)


@notifications
@everywhere
async def test_claim_moves_the_next_attempt_to_its_end_and_counts(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("Deposited")
    store = await layout_kit.open()
    await claim(store)
    layout_kit.expect(row, "leased")
    assert names(await claim(await layout_kit.open())) == ""
    assert (await store.counts()).held == 1
    due_in = await store.next_due()
    assert due_in is not None
    assert timedelta(0) < due_in <= timedelta(seconds=30)


@notifications
@everywhere
async def test_notification_is_due_neither_early_nor_late(layout_kit: LayoutKit, mode: Mode) -> None:
    early, late = layout_kit.insert("early"), layout_kit.insert("late")
    back_claim(layout_kit, early, -3600)
    back_claim(layout_kit, late, 20)
    store = await layout_kit.open()
    batch = await claim(store, mode=mode)
    assert names(batch) == "late"
    await batch.settle([DELIVERED])
    due_in = await store.next_due()
    assert due_in is not None
    assert HOUR - timedelta(minutes=1) < due_in <= HOUR


@notifications
@everywhere
async def test_renewal_moves_the_fence_and_the_claim_stays_ours(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("Deposited")
    batch = await claim(await layout_kit.open())
    before = layout_kit.column(row, "next_retry_at")
    assert await batch.renew(HOUR) == []
    assert layout_kit.column(row, "next_retry_at") == IN_AN_HOUR
    assert layout_kit.column(row, "next_retry_at") != before
    assert await batch.renew(timedelta(seconds=30)) == []
    layout_kit.expect(row, "leased")
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
    layout_kit.expect(row, "delivered")


@notifications
@everywhere
async def test_lapsed_claim_is_taken_again_with_its_attempt_counted(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("Deposited")
    store = await layout_kit.open()
    await claim(store)
    back_claim(layout_kit, row, 31)
    await layout_kit.look_again()
    batch = await claim(await layout_kit.open())
    assert [each.attempt for each in batch.claims] == [2]
    found = layout_kit.row(row)
    assert found is not None
    assert {name: found[name] for name in ("state", "attempts", "next_retry_at")} == {
        "state": "PENDING",
        "attempts": 2,
        "next_retry_at": LEASE_END,
    }


@notifications
async def test_event_that_kills_its_relay_expires_after_its_last_attempt(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("poison")
    store = await layout_kit.open()
    for attempt in (1, 2):
        batch = await claim(store, max_attempts=2)
        assert [each.attempt for each in batch.claims] == [attempt]
        back_claim(layout_kit, row, 31)
        await layout_kit.look_again()
    assert names(await claim(store, max_attempts=2)) == ""
    assert (layout_kit.column(row, "state"), layout_kit.column(row, "attempts")) == ("EXPIRED", 2)


@notifications
async def test_row_that_the_other_system_failed_often_is_tried_not_expired(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("old")
    layout_kit.execute("UPDATE {outbox} SET state = 'FAILED', attempts = 500")
    batch = await claim(await layout_kit.open(), max_attempts=10)
    assert [each.attempt for each in batch.claims] == [501]
    assert await batch.settle([RELEASED]) == Settlement(released=1)
    assert (layout_kit.column(row, "state"), layout_kit.column(row, "attempts")) == ("FAILED", 500)


@notifications
@pytest.mark.parametrize("outcome", [DELIVERED, LATER, Dead("400"), RELEASED], ids=lambda each: type(each).__name__)
async def test_late_settlement_changes_nothing(layout_kit: LayoutKit, outcome: Any) -> None:
    row = layout_kit.insert("Deposited")
    late = await claim(await layout_kit.open())
    back_claim(layout_kit, row, 31)
    batch = await claim(await layout_kit.open())
    before = layout_kit.row(row)
    assert await late.settle([outcome]) == Settlement(lost=1)
    assert layout_kit.row(row) == before
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
    ended = layout_kit.row(row)
    assert await batch.settle([outcome]) == Settlement(lost=1)
    assert layout_kit.row(row) == ended


@notifications
async def test_late_renewal_changes_nothing_and_says_so(layout_kit: LayoutKit) -> None:
    lost, kept = layout_kit.insert("lost"), layout_kit.insert("kept")
    late = await claim(await layout_kit.open())
    assert sorted(names(late).split()) == ["kept", "lost"]
    back_claim(layout_kit, lost, 31)
    assert names(await claim(await layout_kit.open())) == "lost"
    before = layout_kit.row(lost)
    assert names(await late.renew(HOUR)) == "lost"
    assert layout_kit.row(lost) == before
    assert layout_kit.column(kept, "next_retry_at") == IN_AN_HOUR
    outcomes = [DELIVERED for _ in late.claims]
    assert await late.settle(outcomes) == Settlement(delivered=1, lost=1)
    assert (layout_kit.column(kept, "state"), layout_kit.row(lost)) == ("SUCCEEDED", before)


@notifications
async def test_claim_that_the_other_system_settled_meanwhile_is_lost(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("Deposited")
    batch = await claim(await layout_kit.open())
    layout_kit.execute("UPDATE {outbox} SET state = 'FAILED', attempts = 1, next_retry_at = {utc}")
    before = layout_kit.row(row)
    assert await batch.settle([DELIVERED]) == Settlement(lost=1)
    assert layout_kit.row(row) == before


# -- notifications: recipients and ends --------------------------------------------------------------------------------


@notifications
async def test_store_of_a_recipient_takes_its_own_rows_only(layout_kit: LayoutKit) -> None:
    event = uuid4()
    for handler in ("mailer", "billing"):
        sql = NOTIFICATION_INSERT.replace("(:id, :id, 'mailer'", f"(:id, '{event}', '{handler}'")
        layout_kit.insert(handler, sql=sql)
    mailer = await layout_kit.open(sink="mailer")
    batch = await claim(mailer)
    assert [(each.event.type, each.event.id) for each in batch.claims] == [("mailer", event)]
    await batch.settle([DELIVERED])
    assert await mailer.counts() == Counts(delivered=1)
    billing = await layout_kit.open(sink="billing")
    assert (await billing.counts()).new == 1
    assert names(await claim(billing)) == "billing"


@notifications
async def test_expired_notifications_of_one_event_are_all_redriven(layout_kit: LayoutKit) -> None:
    event = uuid4()
    for handler in ("mailer", "billing"):
        sql = NOTIFICATION_INSERT.replace("(:id, :id, 'mailer'", f"(:id, '{event}', '{handler}'")
        layout_kit.insert(handler, sql=sql)
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400")] * 2)
    assert layout_kit.count("state = 'EXPIRED'") == 2
    assert await store.redrive(EVERYTHING, actor="ann") == 2
    assert layout_kit.count("state = 'PENDING' AND attempts = 0") == 2


@notifications
@everywhere
async def test_ends_are_dated_and_only_they_are_pruned(layout_kit: LayoutKit) -> None:
    rows = {name: layout_kit.insert(name) for name in ("sent", "slow", "bad")}
    outcomes: dict[str, Outcome] = {"sent": DELIVERED, "slow": LATER, "bad": Dead("400")}
    store = await layout_kit.open()
    batch = await claim(store)
    await batch.settle([outcomes[each.event.type] for each in batch.claims])
    found = {record.event.type: record for record in await store.events(EVERYTHING)}
    assert {name: record.state for name, record in found.items()} == {
        "sent": "delivered",
        "slow": "waiting",
        "bad": "dead",
    }
    assert (found["sent"].delivered_at, found["slow"].delivered_at, found["bad"].died_at) == (NOW, None, NOW)
    layout_kit.execute("UPDATE {outbox} SET updated_date = {back[updated_date]}", seconds=3600 - 20)
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR) == Pruned()
    layout_kit.execute("UPDATE {outbox} SET updated_date = {back[updated_date]}", seconds=40)
    assert await store.prune(delivered_age=HOUR, dead_age=HOUR) == Pruned(delivered=1, dead=1)
    assert [layout_kit.row(rows[name]) is None for name in ("sent", "slow", "bad")] == [True, False, True]


@notifications
def test_events_are_not_put_into_notifications(layout_kit: LayoutKit) -> None:
    with pytest.raises(Unsupported, match="written by its own system"):
        put(layout_kit, "Deposited")


@notifications
async def test_store_is_opened_by_the_name_of_either_table(layout_kit: LayoutKit) -> None:
    layout_kit.insert("Deposited")
    table = layout_kit.outbox.table
    for name in (table.name, layout_kit.outbox.tables["events"].name):
        store = open_store(layout_kit.database.url, layout="ekbatan-notifications", table=name, schema=table.schema)
        try:
            await store.open()
            assert (await store.counts()).new == 1
        finally:
            await store.close()
    assert table.name == layout_kit.outbox.tables["events"].name + "_notifications"


@notifications
async def test_age_of_a_waiting_notification_is_since_it_was_made(layout_kit: LayoutKit) -> None:
    layout_kit.insert("Deposited")
    layout_kit.execute("UPDATE {outbox} SET created_date = {back[created_date]}", seconds=3600)
    store = await layout_kit.open()
    assert (await store.counts()).oldest_pending == _Close(HOUR)
    found = await store.events(Filter(until=datetime.now(UTC) - timedelta(minutes=30)))
    assert [record.event.type for record in found] == ["Deposited"]
    assert Around(-HOUR) == layout_kit.column(found[0].seq, "created_date")


class _Close:
    def __init__(self, length: timedelta) -> None:
        self._length = length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, timedelta) and abs(other - self._length) < timedelta(minutes=1)

    __hash__ = None  # type: ignore[assignment]
