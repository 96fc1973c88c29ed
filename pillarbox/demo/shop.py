"""The shop of the demo: an order and its event are written in one transaction, or neither is.

Orders are numbered by customer, so that whoever reads the events can tell whether one is missing or early.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import sqlalchemy as sa

from pillarbox import Event, Outbox

CUSTOMERS: Final = 200
DECLINED: Final = 0.1
BUSY_SECONDS: Final = 30

metadata = sa.MetaData()
outbox = Outbox(metadata)
customers = sa.Table(
    "customers",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("orders", sa.Integer, nullable=False),
)
orders = sa.Table(
    "orders",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("customer", sa.Text, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
)

_count_one_more = (
    sa.update(customers)
    .where(customers.c.name == sa.bindparam("customer_name"))
    .values(orders=customers.c.orders + 1)
    .returning(customers.c.orders)
)


class CardDeclined(Exception):
    """The last step of an order failed; everything before it is rolled back."""


def connect(path: Path) -> sa.Engine:
    """An engine whose transactions take SQLite's write lock when they begin."""
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_SECONDS})

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def open_shop(path: Path) -> None:
    """Create the tables, and the customers, who have ordered nothing yet."""
    engine = connect(path)
    metadata.create_all(engine)
    with engine.begin() as db:
        names = [{"name": f"customer-{number:03}", "orders": 0} for number in range(CUSTOMERS)]
        db.execute(sa.insert(customers), names)
    engine.dispose()


def place_order(engine: sa.Engine, customer: str, *, is_declined: bool) -> None:
    """Write an order and the event that tells of it; a declined card undoes both."""
    with engine.begin() as db:
        number = db.execute(_count_one_more, {"customer_name": customer}).scalar_one()
        order = {"id": str(uuid4()), "customer": customer, "number": number}
        db.execute(sa.insert(orders), order)
        outbox.put(db, Event("order.placed", {**order, "placed_at": time.time()}, key=customer))
        if is_declined:
            raise CardDeclined(customer)


def place_orders(path: Path, count: int, *, every: float, at_most: float, seed: int) -> int:
    """Place orders at a steady pace, fewer where that takes too long; returns how many were rolled back."""
    chance = random.Random(seed)
    engine = connect(path)
    declined = 0
    start = time.monotonic()
    for turn in range(count):
        now = time.monotonic()
        if now > start + at_most:
            break
        time.sleep(max(0.0, start + turn * every - now))
        customer = f"customer-{chance.randrange(CUSTOMERS):03}"
        try:
            place_order(engine, customer, is_declined=chance.random() < DECLINED)
        except CardDeclined:
            declined += 1
    engine.dispose()
    return declined


def read_committed(path: Path) -> set[str]:
    """The ids of the orders that were committed."""
    engine = connect(path)
    with engine.connect() as db:
        found = set(db.execute(sa.select(orders.c.id)).scalars())
    engine.dispose()
    return found
