"""Runs omni-box for the tests: one JSON object per line in, one per line out.

This file is run by an interpreter of its own, which has omni-box and nothing of Pillarbox.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any
from uuid import UUID

import sqlalchemy as sa
import structlog
from aiokafka import AIOKafkaProducer
from omni_box.application.services.publish import OutboxPublisher
from omni_box.core.converters.event import RawEventConverter
from omni_box.core.protocols import EventPublisher
from omni_box.core.services.domain import OmniBoxDomainService
from omni_box.infra.brokers.kafka import KafkaEventPublisher
from omni_box.infra.storage.postgres.orm import (
    InboxEventDBBase,
    InboxEventPartitionedDBBase,
    OutboxEventDBBase,
    OutboxEventPartitionedDBBase,
)
from omni_box.infra.storage.postgres.repositories import PostgresInboxRepository, PostgresOutboxRepository
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase

# Standard output is for answers.
structlog.configure(
    logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
)


def declare_models(schema: str) -> dict[str, Any]:
    """Its models as an application declares them, in a schema."""
    base = type("Base", (DeclarativeBase,), {"metadata": sa.MetaData(schema=schema)})
    bases = {
        "outbox": OutboxEventDBBase,
        "outbox-partitioned": OutboxEventPartitionedDBBase,
        "inbox": InboxEventDBBase,
        "inbox-partitioned": InboxEventPartitionedDBBase,
    }
    return {
        name: type(abstract.__name__.removesuffix("DBBase"), (abstract, base), {}) for name, abstract in bases.items()
    }


class Recorder(EventPublisher):  # type: ignore[misc]
    """A broker that remembers what was published."""

    def __init__(self) -> None:
        self.published: list[str] = []

    async def publish(self, event: Any, repo: Any) -> None:
        self.published.append(str(event.id))


class Worker:
    """What the tests can ask for; each method is a verb."""

    def __init__(self, url: str, schema: str) -> None:
        self._engine = create_async_engine(url)
        self._models = declare_models(schema)
        self._schema = schema

    async def create(self) -> None:
        """Make its tables, with a partition for all times."""
        async with self._engine.begin() as db:
            await db.execute(sa.text(f'CREATE SCHEMA "{self._schema}"'))
            await db.run_sync(self._models["outbox"].metadata.create_all)
            for name in ("outbox-partitioned", "inbox-partitioned"):
                table = f'"{self._schema}".{self._models[name].__tablename__}'
                await db.execute(sa.text(f"CREATE TABLE {table}_rest PARTITION OF {table} DEFAULT"))

    async def drop(self) -> None:
        async with self._engine.begin() as db:
            await db.execute(sa.text(f'DROP SCHEMA "{self._schema}" CASCADE'))

    async def put(self, table: str, events: list[dict[str, Any]]) -> list[str]:
        """Write events as an application that uses it does; returns their ids."""
        service = OmniBoxDomainService()
        async with AsyncSession(self._engine) as session:
            repository = self._repository(table, session)
            made = [
                service.create_outbox_event(**{**event, "aggregate_id": UUID(event["aggregate_id"])})
                for event in events
            ]
            for event in made:
                await repository.create(event)
            await session.commit()
        return [str(event.id) for event in made]

    async def receive(self, table: str, message: dict[str, Any]) -> dict[str, Any]:
        """Write a message down; answers with the row that is there for it, this one or an earlier."""
        async with AsyncSession(self._engine) as session:
            event = OmniBoxDomainService().create_inbox_event(**message)
            there = await self._repository(table, session).create(event)
            await session.commit()
        return {"is_new": there.id == event.id, **there.model_dump(mode="json")}

    async def claim(self, table: str, limit: int) -> list[dict[str, Any]]:
        """What a worker would claim now; nothing is kept of it."""
        async with AsyncSession(self._engine) as session:
            found = await self._repository(table, session).fetch_and_lock_pending(limit, "peer", ttl=300)
            await session.rollback()
        return [event.model_dump(mode="json") for event in found]

    async def read(self, table: str, id: str) -> dict[str, Any] | None:
        """One row as it reads it, whatever its state."""
        async with AsyncSession(self._engine) as session:
            event = await self._repository(table, session).get_by_id(UUID(id))
        return None if event is None else event.model_dump(mode="json")

    async def publish(self, table: str, worker: str, batch: int, empty: int) -> list[str]:
        """Run a worker until so many of its polls found nothing; returns the ids in the order of publishing."""
        broker = Recorder()
        while empty:
            async with AsyncSession(self._engine) as session:
                before = len(broker.published)
                publisher = OutboxPublisher(self._repository(table, session), broker)
                await publisher.publish_batch(worker, batch)
                await session.commit()
            if len(broker.published) == before:
                empty -= 1
                await asyncio.sleep(0.05)
        return broker.published

    async def publish_to_kafka(self, table: str, servers: str) -> None:
        """Let its own publisher send what is due, in one batch."""
        producer = AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, acks="all")
        await producer.start()
        try:
            async with AsyncSession(self._engine) as session:
                broker = KafkaEventPublisher(producer, RawEventConverter())
                await OutboxPublisher(self._repository(table, session), broker).publish_batch("peer", 100)
                await session.commit()
        finally:
            await producer.stop()

    async def close(self) -> None:
        await self._engine.dispose()

    def _repository(self, table: str, session: AsyncSession) -> Any:
        kind = PostgresOutboxRepository if table.startswith("outbox") else PostgresInboxRepository
        return kind(session, model_class=self._models[table])


async def main(url: str, schema: str) -> None:
    worker = Worker(url, schema)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            answer = {"result": await getattr(worker, asked.pop("do"))(**asked)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
