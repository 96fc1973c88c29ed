"""The listener for notifications: whatever ends its connection, it listens again."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
import sqlalchemy as sa

from pillarbox import StoreUnavailable, wakeup
from pillarbox.stores.postgres import is_pooled
from pillarbox.wakeup import PostgresListener
from tests.freezing import freezing_before
from tests.servers import server_url

SOON = timedelta(seconds=20)
connect_really = asyncpg.connect


async def is_heard(listener: PostgresListener, channel: str) -> bool:
    """Whether a notification arrives; one that is sent while nobody listens is lost, so it is sent again."""
    connection = await connect_really(server_url("postgres"))
    try:
        for _ in range(200):
            await connection.execute("SELECT pg_notify($1, '')", channel)
            if listener.is_listening and await listener.wait(timedelta(milliseconds=100)):
                return True
            await asyncio.sleep(0.05)
        return False
    finally:
        await connection.close()


async def test_listening_again_survives_errors_of_the_driver_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [asyncpg.InternalClientError("cannot switch to state 12"), ValueError("odd")]

    async def connect(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await connect_really(*args, **options)

    channel = f"listener_{uuid4().hex[:8]}"
    listener = PostgresListener(sa.make_url(server_url("postgres")), channel)
    monkeypatch.setattr(asyncpg, "connect", connect)
    with caplog.at_level(logging.INFO, "pillarbox"):
        await listener.start()
        try:
            assert not listener.is_listening
            assert await is_heard(listener, channel)
        finally:
            await listener.stop()
    assert not failures
    assert caplog.text.count("Cannot listen for notifications") == 1


async def test_a_frozen_connection_is_noticed_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "PROBE_EVERY", 0.2)
    monkeypatch.setattr(wakeup, "PROBE_TIMEOUT", 0.5)
    channel = f"listener_{uuid4().hex[:8]}"
    with freezing_before(server_url("postgres")) as proxy:
        listener = PostgresListener(sa.make_url(proxy.url), channel)
        await listener.start()
        try:
            before = listener._connection
            proxy.freeze()
            async with asyncio.timeout(SOON.total_seconds()):
                while listener._connection in (None, before):
                    await asyncio.sleep(0.05)
            assert await is_heard(listener, channel)
        finally:
            await listener.stop()


async def test_a_listener_says_who_it_is() -> None:
    channel = f"listener_{uuid4().hex[:8]}"
    listener = PostgresListener(sa.make_url(server_url("postgres")), channel)
    await listener.start()
    connection = await asyncpg.connect(server_url("postgres"))
    try:
        name = await connection.fetchval(
            "SELECT application_name FROM pg_stat_activity WHERE pid = $1", listener._connection.get_server_pid()
        )
        assert name == "pillarbox listener"
    finally:
        await connection.close()
        await listener.stop()


async def test_errors_of_the_driver_itself_are_an_outage_when_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*args: Any, **options: Any) -> Any:
        raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")

    monkeypatch.setattr(asyncpg, "connect", connect)
    with pytest.raises(StoreUnavailable, match="Store shop: the connection was lost in the middle of a statement"):
        await is_pooled(sa.make_url(server_url("postgres")), "shop")
