"""A database behind the SQL sink whose connections say nothing any more, while new ones work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.sql import SqlSink
from tests.contract.broker_kits import named_claim
from tests.contract.sinks import sink_kit
from tests.contract.test_sink_sql import on, own_engine
from tests.freezing import HANG, FreezingProxy, freezing_before

__all__ = ["sink_kit"]

SECOND = timedelta(seconds=1)
servers = on("postgres", "mariadb", "mysql")


@pytest.fixture
def proxy(kit: Any) -> Iterator[FreezingProxy]:
    with freezing_before(kit.url) as proxy:
        yield proxy


def make_sink(kit: Any, proxy: FreezingProxy, **options: Any) -> Sink:
    own = {"dedup_table": f"{kit.table}_received", "timeout": "1s"}
    return open_sink(proxy.url, **{**own, **({} if "statements" in options else {"table": kit.table}), **options})


async def goes_on(sink: Sink, proxy: FreezingProxy) -> None:
    """Deliver, freeze, find out, and deliver again."""
    assert await sink.deliver([named_claim("first")]) == [DELIVERED]
    assert proxy.freeze() > 0
    second = named_claim("second")
    async with asyncio.timeout(HANG):
        with pytest.raises(SinkUnavailable, match="no answer within 1 s") as outage:
            await sink.deliver([second])
        assert outage.value.outcomes == [RELEASED]
        assert await sink.deliver([second]) == [DELIVERED]


@servers
async def test_a_silent_connection_is_given_up_and_the_next_delivery_goes_on(kit, proxy):
    sink = make_sink(kit, proxy)
    await goes_on(sink, proxy)
    await sink.close()
    assert kit.arrived() == ["first", "second"]


@servers
async def test_statements_go_on_as_well(kit, proxy):
    """They have another driver on PostgreSQL."""
    kit.execute(f"CREATE TABLE {kit.table}_names (name varchar(50))")
    sql = f"INSERT INTO {kit.table}_names (name) VALUES (:payload__name)"
    sink = make_sink(kit, proxy, consumer="names", statements={"*": sql})
    await goes_on(sink, proxy)
    await sink.close()
    assert kit.query(f"SELECT name FROM {kit.table}_names ORDER BY name") == [("first",), ("second",)]


@servers
async def test_an_engine_of_the_users_goes_on_as_well(kit, proxy):
    kit.url, direct = proxy.url, kit.url
    engine = own_engine(kit)
    kit.url = direct
    sink = SqlSink(engine, table=kit.table, dedup_table=f"{kit.table}_received", timeout=SECOND)
    await goes_on(sink, proxy)
    await sink.close()
    await engine.dispose()
    assert kit.arrived() == ["first", "second"]


@servers
async def test_a_commit_without_an_answer_is_delivered_once(kit, proxy):
    sink = make_sink(kit, proxy)
    await sink.open()
    proxy.freeze_at(b"COMMIT")
    claim = named_claim("once")
    with pytest.raises(SinkUnavailable, match="no answer within 1 s"):
        await sink.deliver([claim])
    assert await sink.deliver([claim]) == [DELIVERED]
    await sink.close()
    assert kit.arrived() == ["once"]


@servers
async def test_a_sink_before_a_silent_database_closes(kit, proxy):
    sink = make_sink(kit, proxy)
    await sink.open()
    proxy.freeze(also_new=True)
    async with asyncio.timeout(HANG):
        await sink.close()
