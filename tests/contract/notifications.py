"""A kit for notifications: an event log written by plain SQL, and the relays that give its events to handlers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from pillarbox import Context, Handlers, Relay
from pillarbox.group import RelayGroup
from pillarbox.notifications.relays import notification_relays
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store
from tests.contract.layouts import LayoutKit
from tests.contract.specs import EVENT_INSERT

SERVERS = ("postgresql", "mariadb", "mysql")
KITS = [*(f"ekbatan-notifications-{name}" for name in SERVERS), *(f"actions-notifications-{name}" for name in SERVERS)]
everywhere = pytest.mark.parametrize("layout_kit", [*KITS, "actions-notifications-sqlite"], indirect=True)
on_servers = pytest.mark.parametrize("layout_kit", KITS, indirect=True)

INSERT = EVENT_INSERT.replace("{outbox}", "{events}")
SENTINEL = INSERT.replace("'w-1', 'Wallet', :name", "NULL, NULL, NULL").replace("""'{{"n": 1}}'""", "NULL")


class Log:
    """The tables of one layout kit, as an application and its handlers use them."""

    def __init__(self, kit: LayoutKit) -> None:
        self.kit = kit
        self.groups: list[RelayGroup] = []

    def emit(self, *types: str, sql: str = INSERT, namespace: str = "shop") -> list[UUID]:
        """Write one event of each type, as an action of this namespace does."""
        return [self.kit.insert(type, sql=sql.replace("'shop'", f"'{namespace}'")) for type in types]

    def open_store(self, **options: Any) -> SqlStore:
        table, database = self.kit.outbox.table, self.kit.database
        given: dict[str, Any] = {"pooler": False} if database.backend == "postgresql" else {}
        return open_store(database.url, table=table.name, schema=table.schema, **given, **options)

    def relays(self, handlers: Handlers, *, namespace: str = "shop", **options: Any) -> RelayGroup:
        """The relays of one node; `batch_size` and `poll` are options of each."""
        layout = self.kit.spec.layout.removesuffix("-notifications")
        own = {name: options.pop(name) for name in ("batch_size", "poll") if name in options}
        options |= {"layout": layout, "make_relay": partial(Relay, **own)}
        group = notification_relays(self.open_store, handlers, namespace=namespace, **options)
        self.groups.append(group)
        return group

    async def drain(self, handlers: Handlers, **options: Any) -> None:
        """Fan out and handle until nothing can be done now."""
        async with self.relays(handlers, **options) as group:
            await group.drain()

    async def close(self) -> None:
        for group in self.groups:
            await group.close()

    def notifications(self, *columns: str, where: str = "1 = 1") -> list[tuple[Any, ...]]:
        """What the notifications say, in the order of these columns."""
        sql = f"SELECT {', '.join(columns)} FROM {self.kit.database.names['outbox']} WHERE {where} ORDER BY 1, 2"
        with self.kit.engine.begin() as db:
            return [tuple(row) for row in db.execute(sa.text(sql))]

    def delivered(self) -> dict[str, bool]:
        """Whether events were fanned out, by their type."""
        sql = f"SELECT event_type, delivered FROM {self.kit.database.names['events']} ORDER BY event_type"
        with self.kit.engine.begin() as db:
            return {row[0]: bool(row[1]) for row in db.execute(sa.text(sql))}

    def let_pass(self, seconds: int) -> None:
        """Let every notification be older, and due that much earlier."""
        moved = "next_retry_at = {back[next_retry_at]}, created_date = {back[created_date]}"
        self.kit.execute(f"UPDATE {{outbox}} SET {moved}", seconds=seconds)


def make_handlers(*types: str, name: str = "mailer", **options: Any) -> tuple[Handlers, list[Any]]:
    """A registry with one handler that notes what it was called with."""
    handlers = Handlers()
    calls: list[Any] = []
    note(handlers, types, calls, name=name, **options)
    return handlers, calls


def note(handlers: Handlers, types: Sequence[str], calls: list[Any], *, name: str, **options: Any) -> None:
    """Register a handler that notes its name and the event's type."""

    @handlers.on(*types, name=name, **options)
    async def handle(context: Context) -> None:
        calls.append((name, context.type))
