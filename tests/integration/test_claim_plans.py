"""What a claim costs does not depend on what else is in the table: plans of the real statements on PostgreSQL.

auto_explain reports the plan of every statement that a store runs, with the rows that each part of it read. A batch
of 500 out of 200,000 may read a few times 500 rows, before ANALYZE ever ran and after, whatever else is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome, Retry
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import SqlKit, make_database, sync_engine

BATCH = 500
BACKLOG = 200_000
MOST_ROWS = 5 * BATCH
LEASE = timedelta(minutes=1)

# What stands beside the backlog. Dead events of the backlog's own keys were skipped, those of other keys park them.
READY, LEASED, WAITING, BLOCKED, SCHEDULED, DELIVERED_STATE = range(6)
SAME_KEY, OTHER_KEY = "'key-' || n % 10000", "'other-' || n % 1000"
LATER = "now() + interval '1 hour'"
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dead events": {
        "table": "dead",
        "key": f"CASE WHEN n % 2 = 0 THEN {SAME_KEY} ELSE {OTHER_KEY} END",
        "parks": "n % 2 = 1",
    },
    "delivered events": {"state": DELIVERED_STATE, "key": SAME_KEY, "delivered_at": "now()"},
    "scheduled events": {"state": SCHEDULED, "key": SAME_KEY, "until_at": LATER},
    "leased and waiting events": {
        "state": f"CASE n % 2 WHEN 0 THEN {LEASED} ELSE {WAITING} END",
        "key": OTHER_KEY,
        "until_at": LATER,
    },
    "blocked events": {"state": BLOCKED, "key": OTHER_KEY},
    "events of another sink": {"state": READY, "key": SAME_KEY, "sink": "'other'"},
}


@dataclass
class Plans:
    """The plans of a connection's statements since they were last taken."""

    found: list[dict[str, Any]] = field(default_factory=list)

    def note(self, connection: Any, message: Any) -> None:
        head, _, plan = str(message.message).partition("plan:\n")
        if head.startswith("duration:"):
            self.found.append(json.loads(plan))

    def take(self) -> list[dict[str, Any]]:
        found, self.found = self.found, []
        return found


def explain_everything(store: SqlStore, *also: str) -> Plans:
    """Let the server report every plan of a store's new connections, on which it runs other statements first."""
    plans = Plans()
    settings = {
        "log_min_duration": 0,
        "log_analyze": "on",
        "log_timing": "off",
        "log_format": "json",
        "log_level": "notice",
    }

    @sa.event.listens_for(sync_engine(store), "connect")
    def load(connection: Any, record: Any) -> None:
        connection.driver_connection.add_log_listener(plans.note)
        statements = [
            "LOAD 'auto_explain'",
            *(f"SET auto_explain.{name} = {value}" for name, value in settings.items()),
            *also,
        ]
        connection.run_async(lambda driver: driver.execute("; ".join(statements)))

    return plans


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def rows_read(plan: dict[str, Any], tables: set[str]) -> int:
    """How many rows of these tables a plan looked at, also those it then threw away."""
    total = 0
    for node in nodes(plan):
        if node.get("Relation Name") in tables and "Scan" in node["Node Type"]:
            kept = node["Actual Rows"] * node["Actual Loops"]
            removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
            total += kept + sum(node.get(name, 0) * node["Actual Loops"] for name in removed)
    return total


def fill(kit: SqlKit, beside: dict[str, Any]) -> None:
    """Load the tables as fast as PostgreSQL can: without indexes, which are made afterwards."""
    tables = kit.database.outbox.tables
    indexes = [index for role in ("outbox", "dead") for index in tables[role].indexes]
    with kit.database.engine.begin() as db:
        for index in indexes:
            index.drop(db)
        for role in ("outbox", "dead"):
            db.exec_driver_sql(f"ALTER TABLE {tables[role].name} SET (autovacuum_enabled = false)")
            db.exec_driver_sql(f"ALTER TABLE {tables[role].name} SET UNLOGGED")
        insert(db, kit, {"state": READY, "key": SAME_KEY})
        if beside:
            insert(db, kit, beside)
        for index in indexes:
            index.create(db)


def insert(db: sa.Connection, kit: SqlKit, kind: dict[str, Any]) -> None:
    role = kind.get("table", "outbox")
    values = {
        "id": "gen_random_uuid()",
        "sink": "''",
        "lane": "n % 64",
        "type": "'t'",
        "topic": "'t'",
        "content_type": "'application/json'",
        "payload": "'{}'",
        "created_at": "now()",
        **{name: value for name, value in kind.items() if name != "table"},
        **({"seq": "n - 1000000", "died_at": "now()"} if role == "dead" else {}),
    }
    columns, expressions = ", ".join(values), ", ".join(str(value) for value in values.values())
    db.exec_driver_sql(
        f"INSERT INTO {kit.database.outbox.tables[role].name} ({columns}) "
        f"SELECT {expressions} FROM generate_series(1, {BACKLOG}) AS n".replace("%", "%%")
    )


def mixed(count: int) -> list[Outcome]:
    kinds: list[Outcome] = [DELIVERED, Retry("503", timedelta(hours=1)), Dead("400"), RELEASED]
    return [kinds[number % 4] for number in range(count)]


async def run_batches(store: SqlStore) -> None:
    """Claim and settle in every way, often enough for the server to plan the statements once and for all."""
    for _ in range(6):
        batch = await store.claim(BATCH, mode="hold", lease=LEASE)
        assert len(batch.claims) == BATCH
        await batch.settle([DELIVERED] * BATCH)
    for _ in range(2):
        batch = await store.claim(BATCH, mode="lease", lease=LEASE)
        assert len(batch.claims) == BATCH
        assert list(await batch.renew(LEASE)) == []
        settlement = await batch.settle(mixed(BATCH))
        assert settlement.lost == 0
    await store.next_due()


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
async def test_claim_reads_a_few_times_its_batch_beside(beside: dict[str, Any], tmp_path: Any) -> None:
    database = make_database("postgres", tmp_path)
    try:
        kit = SqlKit(database, pooler=False, notify=False)
        fill(kit, beside)
        for analyzes in (False, True):
            if analyzes:
                with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
                    db.exec_driver_sql(f"ANALYZE {database.table}, {database.table}_dead")
            store = kit.make()
            await store.open()
            plans = explain_everything(store)
            await store._connected.dispose()  # type: ignore[attr-defined]
            await run_batches(store)
            assert_frugal(plans.take(), database.table, "after ANALYZE" if analyzes else "before ANALYZE")
            await store.close()
    finally:
        database.drop()


@pytest.mark.parametrize("is_dead", [False, True], ids=["blocked", "dead"])
async def test_judging_an_event_does_not_read_what_else_its_key_has(is_dead: bool, tmp_path: Any) -> None:
    """Ten keys have 20,000 rows each that no claim takes, and each of the first batch's events asks for its own."""
    database = make_database("postgres", tmp_path)
    hot = {"key": "'key-' || n % 10"}
    try:
        kit = SqlKit(database, pooler=False, notify=False)
        fill(kit, {**hot, "table": "dead", "parks": "false"} if is_dead else {**hot, "state": BLOCKED})
        store = kit.make()
        await store.open()
        plans = explain_everything(store)
        await store._connected.dispose()  # type: ignore[attr-defined]
        for _ in range(2):
            await store.claim(BATCH, mode="lease", lease=LEASE, is_prefetch=True)
        tables = {database.table, f"{database.table}_dead"}
        assert max(rows_read(plan["Plan"], tables) for plan in plans.take()) <= MOST_ROWS
        await store.close()
    finally:
        database.drop()


def assert_frugal(plans: list[dict[str, Any]], table: str, when: str) -> None:
    tables = {table, f"{table}_dead"}
    assert len(plans) > 30, "auto_explain reported nothing"
    for plan in plans:
        scans = {node["Relation Name"] for node in nodes(plan["Plan"]) if node["Node Type"] == "Seq Scan"}
        assert table not in scans, f"{when} this scans a whole table: {plan['Query Text']}"
        count = rows_read(plan["Plan"], tables)
        assert count <= MOST_ROWS, f"{when} this reads {count} rows: {plan['Query Text']}"
