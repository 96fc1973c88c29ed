"""Events in a SQLAlchemy AsyncSession on PostgreSQL, scheduled and deduplicated, and a relay woken by NOTIFY.

Needs the extra `postgres` and POSTGRES_URL, such as postgresql://me:secret@localhost/scratch. Its tables are
dropped at the end.

Prints:
new: 1, there already: 1
order.placed for ann
order.forgotten for ann
"""

import asyncio
import os
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import CallableSink, Event, Outbox, Relay

URL = sa.make_url(os.environ["POSTGRES_URL"])


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "example_orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


outbox = Outbox(Base.metadata, table="example_outbox")


async def place_order(session: AsyncSession, customer: str) -> None:
    session.add(Order(customer=customer))
    outbox.put(session, Event("order.placed", {"customer": customer}, key=customer))
    later = timedelta(milliseconds=200)
    reminder = Event("order.forgotten", {}, key=customer, delay=later, dedup_key=f"reminder-{customer}")
    again = Event("order.forgotten", {}, key=customer, delay=later, dedup_key=f"reminder-{customer}")
    receipt = outbox.put(session, reminder, again)
    await session.commit()
    print(f"new: {len(receipt.new)}, there already: {len(receipt.existing)}")


async def main() -> None:
    engine = create_async_engine(URL.set(drivername="postgresql+asyncpg"))
    async with engine.begin() as db:
        await db.run_sync(Base.metadata.create_all)
    arrived: asyncio.Queue[Event] = asyncio.Queue()
    async with Relay(outbox.store(URL), CallableSink(arrived.put)) as relay:
        running = asyncio.create_task(relay.run())
        async with AsyncSession(engine) as session:
            await place_order(session, "ann")
        for _ in range(2):
            event = await arrived.get()
            print(f"{event.type} for {event.key}")
        relay.stop()
        await running
    async with engine.begin() as db:
        await db.run_sync(Base.metadata.drop_all)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
