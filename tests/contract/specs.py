"""Our own partitioned tables and those of four other systems at every step of an event's life."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from tests.contract.layouts import IN_AN_HOUR, LAPSED, NOW, Around, Like, Row, Spec, partition_months, register

UUID_TEXT = Like("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
ACTION = "c0ffee00-0000-4000-8000-000000000001"
_SOON = timedelta(seconds=15)
LEASE_END = Around(timedelta(seconds=30), within=_SOON)

_PAYLOAD = """'{{"n": 1}}'"""

Steps = Mapping[str, Mapping[str, Row | None]]


# -- our own, with delivered rows by month -----------------------------------------------------------------------------


def _own(**changed: Any) -> dict[str, Any]:
    row = {
        "sink": "",
        "state": 0,
        "attempts": 0,
        "error": None,
        "until_at": None,
        "token": None,
        "due_at": None,
        "created_at": NOW,
        "delivered_at": None,
    }
    return {**row, **changed}


def _own_dead(error: Any) -> Mapping[str, Row | None]:
    row = {"sink": "", "attempts": 1, "error": error, "created_at": NOW, "died_at": NOW, "parks": False}
    return {"outbox": None, "dead": row, "history": None}


def _own_alive(**changed: Any) -> Mapping[str, Row | None]:
    return {"outbox": _own(**changed), "dead": None, "history": None}


_OWN_PARTITIONED: Steps = {
    "put": _own_alive(),
    "scheduled": _own_alive(state=4, until_at=IN_AN_HOUR, due_at=IN_AN_HOUR),
    "leased": _own_alive(state=1, attempts=1, token=UUID_TEXT, until_at=LEASE_END),
    "delivered": {
        "outbox": None,
        "dead": None,
        "history": {"sink": "", "attempts": 1, "error": None, "created_at": NOW, "delivered_at": NOW},
    },
    "waiting": _own_alive(state=2, attempts=1, until_at=IN_AN_HOUR, error="503 from the destination"),
    "dead": _own_dead("400: no such order"),
    "released": _own_alive(),
    "leased again": _own_alive(state=1, attempts=2, token=UUID_TEXT, until_at=LEASE_END, error=LAPSED),
    "buried": _own_dead(LAPSED),
    "redriven": _own_alive(),
    "replayed": _own_alive(),
    "rescheduled": _own_alive(state=4, until_at=IN_AN_HOUR, due_at=IN_AN_HOUR),
}


# -- faststream-outbox -------------------------------------------------------------------------------------------------


def _free(**changed: Any) -> dict[str, Any]:
    row = {
        "attempts_count": 0,
        "deliveries_count": 0,
        "created_at": NOW,
        "next_attempt_at": NOW,
        "first_attempt_at": None,
        "last_attempt_at": None,
        "acquired_at": None,
        "acquired_token": None,
    }
    return {**row, **changed}


_TRIED = {"attempts_count": 1, "deliveries_count": 1, "first_attempt_at": NOW, "last_attempt_at": NOW}
_LEASED = {"deliveries_count": 1, "acquired_at": NOW, "acquired_token": UUID_TEXT}
_FASTSTREAM: Steps = {
    "put": {"outbox": _free()},
    "scheduled": {"outbox": _free(next_attempt_at=IN_AN_HOUR)},
    "leased": {"outbox": _free(**_LEASED)},
    "delivered": {"outbox": None},
    "waiting": {"outbox": _free(**_TRIED, next_attempt_at=IN_AN_HOUR)},
    "released": {"outbox": _free(deliveries_count=1)},
    "leased again": {"outbox": _free(**{**_TRIED, **_LEASED, "deliveries_count": 2})},
}
_PARKED: Row = _free(**_TRIED, next_attempt_at=NEVER)


def _dlq(error: Any) -> dict[str, Any]:
    return {
        "deliveries_count": 1,
        "created_at": NOW,
        "failed_at": NOW,
        "failure_reason": "retry_terminal",
        "last_exception": error,
        "timer_id": None,
    }


# A row of theirs is told by its correlation id, one of ours by the header with the event's id.
_BY_HEADER = "CAST(:id AS text) IN (headers->>'pillarbox-id', headers->>'correlation_id')"
_FASTSTREAM_COMMON: dict[str, Any] = {
    "databases": ("postgresql",),
    "lapse": "UPDATE {outbox} SET acquired_at = {ago} WHERE " + _BY_HEADER,
    "lease": timedelta(seconds=60),
    "insert": "INSERT INTO {outbox} (queue, payload, headers) VALUES (:name, CAST(:payload AS bytea), "
    "jsonb_build_object('correlation_id', CAST(:id AS text), 'content-type', 'application/json'))",
    "features": frozenset({"hold", "lease", "put", "schedule", "shared lease", "parallel"}),
}


# -- side tables -------------------------------------------------------------------------------------------------------


def _entry(state: int, **changed: Any) -> dict[str, Any]:
    row = {"state": state, "attempts": 1, "token": None, "until_at": None, "error": None, "died_at": None}
    return {**row, **changed}


def _side_steps(open_row: Row, delivered: Row | None) -> Steps:
    entries: dict[str, Row | None] = {
        "put": None,
        "leased": _entry(1, token=UUID_TEXT, until_at=LEASE_END),
        "waiting": _entry(2, until_at=IN_AN_HOUR, error="503 from the destination"),
        "dead": _entry(3, error="400: no such order", died_at=NOW),
        "released": None,
        "leased again": _entry(1, attempts=2, token=UUID_TEXT, until_at=LEASE_END),
        "buried": _entry(3, error=LAPSED, died_at=NOW),
        "redriven": _entry(2, attempts=0, until_at=NOW),
    }
    steps: dict[str, Mapping[str, Row | None]] = {
        name: {"outbox": open_row, "state": entry} for name, entry in entries.items()
    }
    return {**steps, "delivered": {"outbox": delivered, "state": None}}


_SIDE: dict[str, Any] = {
    "find": {"outbox": "id = :id", "state": "id = :id"},
    "lapse": "UPDATE {state} SET until_at = {back[until_at]} WHERE id = :id",
}
_SIDE_FEATURES = frozenset({"hold", "lease", "put", "parallel"})


# -- Ekbatan -----------------------------------------------------------------------------------------------------------


def _event(is_delivered: bool) -> Row:
    return {
        "namespace": "shop",
        "action_id": UUID_TEXT,
        "started_date": NOW,
        "completion_date": NOW,
        "model_id": "w-1",
        "model_type": "Wallet",
        "event_date": NOW,
        "delivered": is_delivered,
    }


def _notification(state: str, attempts: int, next_retry_at: Any = NOW) -> Mapping[str, Row]:
    row = {"state": state, "attempts": attempts, "next_retry_at": next_retry_at}
    return {"outbox": {**row, "created_date": NOW, "updated_date": NOW}}


_NOTIFICATIONS: Steps = {
    "leased": _notification("PENDING", 1, LEASE_END),
    "delivered": _notification("SUCCEEDED", 1),
    "waiting": _notification("FAILED", 1, IN_AN_HOUR),
    "dead": _notification("EXPIRED", 1),
    "released": _notification("PENDING", 0),
    "redriven": _notification("PENDING", 0),
}
_ACTION_COLUMNS = (
    "namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type"
)
_ACTION_VALUES = f"'shop', '{ACTION}', 'DepositAction', '{{{{}}}}', {{utc}}, {{utc}}, 'w-1', 'Wallet'"
EVENT_INSERT = (
    f"INSERT INTO {{outbox}} (id, {_ACTION_COLUMNS}, event_type, payload, event_date, delivered) "
    f"VALUES (:id, {_ACTION_VALUES}, :name, {_PAYLOAD}, {{utc}}, FALSE)"
)
NOTIFICATION_INSERT = (
    f"INSERT INTO {{outbox}} (id, event_id, handler_name, {_ACTION_COLUMNS}, event_type, payload, event_date, state, "
    f"next_retry_at, created_date, updated_date) VALUES (:id, :id, 'mailer', {_ACTION_VALUES}, :name, {_PAYLOAD}, "
    "{utc}, 'PENDING', {utc}, {utc}, {utc})"
)


def _ekbatan_fields() -> Mapping[str, Any]:
    return {"key": "w-1", "aggregate_type": "Wallet", "source": "shop", "correlation_id": ACTION}


# -- Debezium's router and sqloutbox -----------------------------------------------------------------------------------

_ROUTED: Row = {"aggregatetype": "order", "aggregateid": "o-1"}
_QUEUED: Row = {"namespace": "orders", "source": "shop", "synced": 0}
_SERVERS = ("postgresql", "mariadb", "mysql")
_seq = count(1)


def register_specs() -> None:
    """Add these layouts to the suite of layouts."""
    register(
        Spec(
            layout="pillarbox-partitioned",
            databases=("postgresql",),
            steps=_OWN_PARTITIONED,
            find=dict.fromkeys(("outbox", "dead", "history"), "id = :id"),
            ends={"history": ("delivered_at",), "dead": ("died_at",)},
            lapse="UPDATE {outbox} SET until_at = {back[until_at]} WHERE id = :id",
            prepare=partition_months("history"),
            features=frozenset({"hold", "lease", "put", "schedule", "retention", "cancel", "replay", "parallel"}),
        ),
        Spec(
            layout="faststream",
            find={"outbox": _BY_HEADER},
            steps={
                **_FASTSTREAM,
                "dead": {"outbox": _PARKED},
                "buried": {"outbox": _PARKED},
                "redriven": {"outbox": _free()},
            },
            **_FASTSTREAM_COMMON,
        ),
        Spec(
            layout="faststream-dlq",
            find={"outbox": _BY_HEADER, "dead": _BY_HEADER},
            steps={
                **_FASTSTREAM,
                "dead": {"outbox": None, "dead": _dlq("400: no such order")},
                "buried": {"outbox": None, "dead": _dlq(LAPSED)},
                "redriven": {"outbox": _free(), "dead": None},
            },
            **_FASTSTREAM_COMMON,
        ),
        Spec(
            layout="ekbatan",
            databases=_SERVERS,
            schema="eventlog",
            steps=_side_steps(_event(False), _event(True)),
            insert=EVENT_INSERT,
            fields=_ekbatan_fields,
            features=_SIDE_FEATURES,
            **_SIDE,
        ),
        # Its fence is the end of the claim: a test cannot age a claim without breaking it, so leases are not here.
        Spec(
            layout="ekbatan-notifications",
            databases=_SERVERS,
            schema="eventlog",
            steps=_NOTIFICATIONS,
            find={"outbox": "id = :id"},
            touched={"outbox": ("updated_date",)},
            ends={"outbox": ("updated_date",)},
            insert=NOTIFICATION_INSERT,
            features=frozenset({"hold", "retention", "parallel"}),
        ),
        Spec(
            layout="actions",
            databases=(*_SERVERS, "sqlite"),
            steps=_side_steps(_event(False), _event(True)),
            insert=EVENT_INSERT,
            fields=_ekbatan_fields,
            features=_SIDE_FEATURES,
            **_SIDE,
        ),
        Spec(
            layout="actions-notifications",
            databases=(*_SERVERS, "sqlite"),
            steps=_NOTIFICATIONS,
            find={"outbox": "id = :id"},
            touched={"outbox": ("updated_date",)},
            ends={"outbox": ("updated_date",)},
            insert=NOTIFICATION_INSERT,
            features=frozenset({"hold", "retention", "parallel"}),
        ),
        Spec(
            layout="debezium",
            databases=(*_SERVERS, "sqlite"),
            steps=_side_steps(_ROUTED, None),
            insert="INSERT INTO {outbox} (id, aggregatetype, aggregateid, type, payload) "
            f"VALUES (:id, 'order', 'o-1', :name, {_PAYLOAD})",
            fields=lambda: {"key": "o-1", "aggregate_type": "order"},
            features=_SIDE_FEATURES,
            **_SIDE,
        ),
        Spec(
            layout="sqloutbox",
            databases=("sqlite",),
            steps=_side_steps(_QUEUED, None),
            find={"outbox": "seq = :id", "state": "seq = :id"},
            lapse="UPDATE {state} SET until_at = {back[until_at]} WHERE seq = :id",
            insert="INSERT INTO {outbox} (seq, created_at, namespace, source, tag, payload, prev_seq) "
            f"SELECT :id, {{utc}}, 'orders', 'shop', :name, {_PAYLOAD}, (SELECT max(seq) FROM {{outbox}})",
            new_id=lambda: next(_seq),
            features=frozenset({"lease"}),
        ),
    )
