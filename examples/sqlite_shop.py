"""A shop on SQLite: orders and their events in one transaction, delivered to a file by the command line.

Run it in an empty folder: python sqlite_shop.py

Prints:
cleo: card declined
delivered to events.jsonl: ann 990, bob 1250, ann 120
"""

import json
import subprocess
import sys
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pillarbox import Event, Outbox


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


outbox = Outbox(Base.metadata)
engine = sa.create_engine("sqlite:///shop.db")


def place_order(customer: str, total: int) -> None:
    """Save an order and the event that tells of it; a declined card undoes both."""
    with Session(engine) as session:
        session.add(Order(customer=customer, total=total))
        outbox.put(session, Event("order.placed", {"customer": customer, "total": total}, key=customer))
        if total > 5000:
            raise ValueError("card declined")
        session.commit()


def main() -> None:
    Base.metadata.create_all(engine)
    for customer, total in (("ann", 990), ("bob", 1250), ("cleo", 9900), ("ann", 120)):
        try:
            place_order(customer, total)
        except ValueError as error:
            print(f"{customer}: {error}")

    # In production this is a process of its own, without --drain.
    relay = [sys.executable, "-m", "pillarbox", "relay", "--drain", "--quiet"]
    subprocess.run([*relay, "--store", "sqlite:///shop.db", "--sink", "file:events.jsonl"], check=True)

    orders = [json.loads(line)["payload"] for line in Path("events.jsonl").read_text().splitlines()]
    shown = ", ".join(f"{order['customer']} {order['total']}" for order in orders)
    print("delivered to events.jsonl:", shown)


if __name__ == "__main__":
    main()
