"""Two services: a shop that takes orders, and a bank that books each order's amount on its customer's account.

The shop writes an order and its event in one transaction. The bank has two consumer groups, which know nothing of each
other: one books messages at once, the other stores them first. Run as a program this file is the shop.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import count
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Event, Handlers, Outbox
from pillarbox.inbox import Inbox

CUSTOMERS: Final = 12
GROUPS: Final = ("at_once", "stored_first")
_PACE: Final = 0.03

Booking = tuple[str, int, int]
"""Customer, the number of the order among the customer's, amount."""


class Shop:
    """The tables of the shop. A customer's row counts the orders, and is locked by whoever takes one."""

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        self.metadata = sa.MetaData()
        self.outbox = Outbox(self.metadata)
        self.customers = sa.Table(
            "customers",
            self.metadata,
            sa.Column("name", sa.String(50), primary_key=True),
            sa.Column("orders", sa.Integer, nullable=False),
        )
        self.orders = sa.Table("orders", self.metadata, sa.Column("id", sa.BigInteger, primary_key=True), *_booking())

    def create(self) -> None:
        self.metadata.create_all(self.engine)
        with self.engine.begin() as db:
            db.execute(sa.insert(self.customers), [{"name": f"customer-{n}", "orders": 0} for n in range(CUSTOMERS)])

    def take_order(self, db: sa.Connection, customer: str, amount: int) -> None:
        mine = self.customers.c.name == customer
        raised = sa.update(self.customers).where(mine).values(orders=self.customers.c.orders + 1)
        number = db.execute(raised.returning(self.customers.c.orders)).scalar_one()
        order = {"customer": customer, "number": number, "amount": amount}
        db.execute(sa.insert(self.orders).values(order))
        self.outbox.put(db, Event("order.placed", order, key=customer))

    def ordered(self) -> list[Booking]:
        """What was committed, in the order of each customer's."""
        return _list_bookings(self.engine, self.orders)

    def remaining(self) -> int:
        return count_rows(self.engine, self.outbox.table)

    def dead(self) -> int:
        return count_rows(self.engine, self.outbox.tables["dead"])


class Bank:
    """The tables of one consumer group of the bank: accounts, and every booking in the order of their commits."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.metadata = sa.MetaData()
        self.inbox = Inbox(self.metadata, table=f"inbox_{group}")
        self.accounts = sa.Table(
            f"accounts_{group}",
            self.metadata,
            sa.Column("customer", sa.String(50), primary_key=True),
            sa.Column("balance", sa.BigInteger, nullable=False),
        )
        self.bookings = sa.Table(
            f"bookings_{group}", self.metadata, sa.Column("id", sa.BigInteger, primary_key=True), *_booking()
        )

    def create(self, engine: sa.Engine) -> None:
        self.metadata.create_all(engine)
        with engine.begin() as db:
            db.execute(
                sa.insert(self.accounts), [{"customer": f"customer-{n}", "balance": 0} for n in range(CUSTOMERS)]
            )

    def book(self, order: dict[str, Any]) -> list[sa.Executable]:
        """What a booking writes. The account is locked first, so bookings have the order in which they commit."""
        account = self.accounts.c
        raised = sa.update(self.accounts).values(balance=account.balance + order["amount"])
        return [raised.where(account.customer == order["customer"]), sa.insert(self.bookings).values(order)]

    def booked(self, engine: sa.Engine) -> list[Booking]:
        return _list_bookings(engine, self.bookings)

    def balances(self, engine: sa.Engine) -> dict[str, int]:
        with engine.connect() as db:
            return {row.customer: row.balance for row in db.execute(sa.select(self.accounts)) if row.balance}

    def waiting(self, engine: sa.Engine) -> int:
        return count_rows(engine, self.inbox.need_queue().table)

    def dead(self, engine: sa.Engine) -> int:
        return count_rows(engine, self.inbox.need_queue().tables["dead"])


def _booking() -> list[sa.Column[Any]]:
    return [
        sa.Column("customer", sa.String(50), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("amount", sa.Integer, nullable=False),
    ]


def _list_bookings(engine: sa.Engine, table: sa.Table) -> list[Booking]:
    found = sa.select(table.c.customer, table.c.number, table.c.amount).order_by(table.c.id)
    with engine.connect() as db:
        return [(row.customer, row.number, row.amount) for row in db.execute(found)]


def count_rows(engine: sa.Engine, table: sa.Table) -> int:
    with engine.connect() as db:
        return int(db.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def make_engine(url: str) -> sa.Engine:
    return sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool)


# -- the bank's handlers, one registry a group -----------------------------------------------------------------------

at_once, stored_first = Handlers(), Handlers()
_at_once, _stored_first = Bank("at_once"), Bank("stored_first")


@at_once.on("order.placed", name="book")
async def book_at_once(order: dict[str, Any], session: AsyncSession) -> None:
    for statement in _at_once.book(order):
        await session.execute(statement)


@stored_first.on("order.placed", name="book")
def book_stored(order: dict[str, Any], session: Session) -> None:
    for statement in _stored_first.book(order):
        session.execute(statement)


# -- the shop as a program -------------------------------------------------------------------------------------------


def take_orders(url: str, seed: int) -> None:
    """Take orders until killed; one of ten is undone at the end."""
    shop, chance = Shop(url), random.Random(seed)
    with shop.engine.connect() as db:
        print("Selling: orders are taken", flush=True)
        for _ in count():
            customer, amount = f"customer-{chance.randrange(CUSTOMERS)}", chance.randrange(1, 10_000)
            shop.take_order(db, customer, amount)
            if chance.random() < 0.1:
                db.rollback()
            else:
                db.commit()
            time.sleep(_PACE)


if __name__ == "__main__":
    take_orders(sys.argv[1], int(sys.argv[2]))
