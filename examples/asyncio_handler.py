"""A relay inside an asyncio application, calling a function of its own for each event.

The mail server is busy at the first try and works at the second; ann's mails keep their order.

Prints:
ann: the mail server is busy
ann: welcome
ann: your invoice
2 delivered, 0 dead
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from datetime import timedelta

import sqlalchemy as sa

from pillarbox import Batch, CallableSink, Claim, Constant, Event, Hook, Outbox, Outcome, Relay, Settlement

# The relay warns of the first failure of each kind, with its traceback; here it is expected.
logging.getLogger("pillarbox").setLevel(logging.ERROR)

metadata = sa.MetaData()
outbox = Outbox(metadata)
engine = sa.create_engine("sqlite:///mails.db")


class Progress(Hook):
    """Adds up what became of the events, and tells when all are settled."""

    def __init__(self, wanted: int) -> None:
        self.total = Settlement()
        self.is_done = asyncio.Event()
        self._wanted = wanted

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self.total += settlement
        if self.total.delivered + self.total.dead >= self._wanted:
            self.is_done.set()


async def send_mail(claim: Claim) -> None:
    """Annotated with Claim instead of Event, because it wants to know which attempt this is."""
    mail = json.loads(claim.event.payload)
    if mail["text"] == "welcome" and claim.attempt == 1:
        print(f"{mail['to']}: the mail server is busy")
        raise ConnectionError("busy")
    print(f"{mail['to']}: {mail['text']}")


async def main() -> None:
    metadata.create_all(engine)
    with engine.begin() as db:
        mails = [{"to": "ann", "text": text} for text in ("welcome", "your invoice")]
        outbox.put(db, *(Event("mail.wanted", mail, key=mail["to"]) for mail in mails))

    progress = Progress(wanted=2)
    retry = Constant(timedelta(milliseconds=100), max_attempts=5)
    store, sink = outbox.store("sqlite:///mails.db"), CallableSink(send_mail)
    async with Relay(store, sink, retry=retry, hook=progress) as relay:
        running = asyncio.create_task(relay.run())
        await progress.is_done.wait()  # an application would serve requests here
        relay.stop()
        await running
    print(f"{progress.total.delivered} delivered, {progress.total.dead} dead")


if __name__ == "__main__":
    asyncio.run(main())
