"""A consumer in a process of its own, which kills itself at one point of a message's way; see `POINTS`.

Run as a program: its argument is a JSON object with what it needs. It writes `ready` when it runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox import Handlers, Reject
from pillarbox.inbox import Inbox
from pillarbox.inbox.consuming import consumer_relays
from pillarbox.inbox.dead_letters import InboxDeadLetters
from pillarbox.inbox.storing import StoreSink
from pillarbox.sources.broker import BrokerSource
from pillarbox.stores.sql import SqlStore
from tests.contract.consumers import SOON, declare_ledger

IN_THE_HANDLER = "in the handler"


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before(owner: Any, name: str) -> None:
    setattr(owner, name, die)


def _die_after(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def run(*args: Any, **options: Any) -> Any:
        original(*args, **options)
        die()

    setattr(owner, name, run)


def _die_after_awaiting(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    async def run(*args: Any, **options: Any) -> Any:
        await original(*args, **options)
        die()

    setattr(owner, name, run)


def _die_telling(cls: type[Any]) -> None:
    for each in cls.__subclasses__():
        _die_before(each, "_acknowledge")
        _die_telling(each)


POINTS: dict[str, Callable[[], None]] = {
    IN_THE_HANDLER: lambda: None,
    "after the handler's commit": lambda: _die_after_awaiting(SqlStore, "join"),
    "before the broker is told": lambda: _die_telling(BrokerSource),
    "before the stored message commits": lambda: _die_after(StoreSink, "_write"),
    "after the stored message commits": lambda: _die_after_awaiting(StoreSink, "deliver"),
    "before the dead letter commits": lambda: _die_after(InboxDeadLetters, "_write"),
    "after the dead letter commits": lambda: _die_after_awaiting(InboxDeadLetters, "bury"),
}
"""Where the process dies, and what makes it do so."""


def make_handlers(ledger: sa.Table, point: str) -> Handlers:
    handlers = Handlers()

    @handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        session.execute(sa.insert(ledger).values(name=order["name"]))
        session.flush()
        if point == IN_THE_HANDLER:
            die()

    @handlers.on("wrong")
    def refuse(order: dict[str, Any]) -> None:
        raise Reject("wrong as such")

    return handlers


async def main(given: dict[str, Any]) -> None:
    metadata = sa.MetaData()
    inbox = Inbox(metadata, given["layout"], table=given["table"])
    handlers = make_handlers(declare_ledger(metadata, given["ledger"]), given["point"])
    consumer = consumer_relays(
        given["source"],
        handlers,
        inbox=inbox,
        url=given["url"],
        group=given["group"],
        stored=given["stored"],
        retry=SOON,
        **given["options"],
    )
    # The adapter of the source is imported by now.
    POINTS[given["point"]]()
    print("ready", flush=True)
    await consumer.run()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
