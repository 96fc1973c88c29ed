"""The tables of our own action log as each database's catalog shows them, declared and mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase

from pillarbox import Outbox
from pillarbox.errors import LayoutError
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.layouts.action_side import declare_actions
from pillarbox.layouts.actions_tables import ActionEventMixin, ActionNotificationMixin, ActionStateMixin
from pillarbox.layouts.ekbatan_tables import event_columns, notification_columns
from tests.contract.catalog import DIALECTS, empty_database, read_tables

ROLES = {
    "actions": {"outbox": "action_events", "state": "action_events_state", "actions": "action_events_actions"},
    "actions-notifications": {
        "outbox": "action_event_notifications",
        "events": "action_events",
        "actions": "action_events_actions",
    },
}

# By table and database: the indexes that claims and look-ups go by.
PARTIAL = "CREATE INDEX action_events_undelivered ON action_events {} (event_type, event_date) WHERE {}"
DUE = (
    "CREATE INDEX action_event_notifications_due ON action_event_notifications {} "
    "(handler_name, next_retry_at) WHERE {}"
)
STATES = "((state)::text = ANY ((ARRAY['PENDING'::character varying, 'FAILED'::character varying])::text[]))"
WHOLE = {
    "action_events": {
        "action_events_action": "(action_id)",
        "action_events_undelivered": "(delivered, event_type, event_date)",
    },
    "action_event_notifications": {
        "action_event_notifications_due": "(handler_name, state, next_retry_at)",
        "event_id": "UNIQUE (event_id, handler_name)",
    },
}
INDEXES = {
    "postgresql": {
        "action_events": {
            "action_events_action": "CREATE INDEX action_events_action ON action_events USING btree (action_id)",
            "action_events_undelivered": PARTIAL.format(
                "USING btree", "((delivered = false) AND (event_type IS NOT NULL))"
            ),
        },
        "action_event_notifications": {
            "action_event_notifications_due": DUE.format("USING btree", STATES),
            "action_event_notifications_event_id_handler_name_key": "CREATE UNIQUE INDEX "
            "action_event_notifications_event_id_handler_name_key ON action_event_notifications "
            "USING btree (event_id, handler_name)",
        },
    },
    "mysql": WHOLE,
    "mariadb": WHOLE,
    "sqlite": {
        "action_events": {
            "action_events_action": "CREATE INDEX action_events_action ON action_events (action_id)",
            "action_events_undelivered": PARTIAL.format("", "delivered = 0 AND event_type IS NOT NULL"),
        },
        "action_event_notifications": {
            "action_event_notifications_due": DUE.format("", "state IN ('PENDING', 'FAILED')"),
        },
    },
}


@pytest.fixture(params=DIALECTS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with empty_database(request.param, tmp_path) as made:
        yield made


def _dialect(engine: sa.Engine) -> str:
    return "mariadb" if getattr(engine.dialect, "is_mariadb", False) else engine.dialect.name


def declare_both() -> sa.MetaData:
    metadata = sa.MetaData()
    for name in ROLES:
        declare_layout(get_layout(name), metadata)
    return metadata


@pytest.mark.parametrize("name", ROLES)
def test_layout_declares_its_tables_in_no_schema_of_its_own(name: str) -> None:
    found = declare_layout(get_layout(name), sa.MetaData())
    assert {role: table.fullname for role, table in found.items()} == ROLES[name]


def test_columns_are_those_of_the_other_system() -> None:
    found = declare_both().tables
    for table, columns in (("action_events", event_columns()), ("action_event_notifications", notification_columns())):
        own = [(each.name, each.nullable, each.primary_key) for each in found[table].c]
        assert own == [(each.name, each.nullable, each.primary_key) for each in columns]


def test_notifications_are_found_by_either_name() -> None:
    for given in ("wallet_events", "wallet_event_notifications"):
        found = declare_layout(get_layout("actions-notifications"), sa.MetaData(), table=given)
        assert {role: table.name for role, table in found.items()} == {
            "outbox": "wallet_event_notifications",
            "events": "wallet_events",
            "actions": "wallet_events_actions",
        }


def test_table_of_another_kind_in_the_metadata_is_refused() -> None:
    metadata = sa.MetaData()
    sa.Table("action_events", metadata, sa.Column("id", sa.Integer, primary_key=True))
    with pytest.raises(LayoutError, match="has a table of this name that lacks namespace, action_id"):
        Outbox(metadata, "actions")


def test_database_shows_the_indexes_and_sentinels_are_in_none_for_claims(engine: sa.Engine) -> None:
    declare_both().create_all(engine)
    found = read_tables(engine)
    for table, wanted in INDEXES[_dialect(engine)].items():
        expected = {name: " ".join(text.split()) for name, text in wanted.items()}
        assert {name: " ".join(text.split()) for name, text in found[table].indexes} == expected


def test_mapped_classes_make_the_same_tables(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Recorded(ActionEventMixin, Base):
        pass

    class State(ActionStateMixin, Base):
        pass

    class Notification(ActionNotificationMixin, Base):
        pass

    declare_actions(cast(sa.Table, Recorded.__table__))
    declare_both().create_all(engine)
    declared = read_tables(engine)
    declare_both().drop_all(engine)
    Base.metadata.create_all(engine)
    mapped = read_tables(engine)
    Base.metadata.drop_all(engine)
    assert mapped == declared
    # What is mapped is found, not declared again.
    assert Outbox(Base.metadata, "actions-notifications").table is Notification.__table__
    assert Outbox(Base.metadata, "actions").tables["state"] is State.__table__
    assert Recorded.__table__ is Outbox(Base.metadata, "actions").table
