"""Handled at once: a message's handlers run in the transaction that records the message.

A crash before that transaction commits brings the message again, and nothing of it has happened. After it the message
may come again as well, because the broker was not told yet: then it is a repeat, and its handlers are not called.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from pillarbox.errors import ConfigError, InvalidEvent, SchemaError, SinkUnavailable, Unsupported
from pillarbox.event import DELIVERED, Claim, Dead, Outcome
from pillarbox.handlers.dispatch import DispatchSink
from pillarbox.handlers.registry import Handlers
from pillarbox.inbox.inbox import Inbox, check_group
from pillarbox.inbox.ownership import check_alone
from pillarbox.inbox.retention import Forgetting
from pillarbox.inbox.storing import read_claim
from pillarbox.sinks.order import deliver_rest
from pillarbox.sources import Source
from pillarbox.stores import Batch, Effect, Joins
from pillarbox.stores.url import open_store


class TakingSink(DispatchSink):
    """Takes messages for one consumer group and runs their handlers, each message in one transaction.

    For a relay whose store is a source. `url` is the database of the inbox, and of what the handlers write with their
    sessions. `unmatched` says what becomes of a message without a handler: `dead`, or `skip` to take it and be done.
    """

    def __init__(
        self,
        inbox: Inbox,
        url: str | sa.URL,
        handlers: Handlers,
        *,
        group: str,
        concurrency: int = 16,
        unmatched: str = "dead",
    ) -> None:
        if not isinstance(url, str | sa.URL):
            raise ConfigError(f"Inbox {inbox.table.fullname!r}: expected the url of its database, got {url!r}")
        self._group = check_group(inbox, group)
        self._inbox = inbox
        self._store = open_store(
            url, layout=inbox.layout, table=inbox.table.name, schema=inbox.table.schema, **_group_scope(inbox, group)
        )
        name = f"inbox:{inbox.table.fullname}/{group}"
        super().__init__(handlers, concurrency=concurrency, unmatched=unmatched, name=name)
        self._forgetting = Forgetting(inbox.pruning, inbox.retention)
        self.repeats = 0
        """How many messages had been taken before."""

    def check_store(self, store: Source) -> None:
        super().check_store(self._store)

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        try:
            await self._store.run(self._look, writes=False)
        except (ConfigError, SchemaError) as error:
            raise SinkUnavailable(f"Sink {self.name}: {error}") from error

    def _look(self, db: sa.Connection) -> None:
        self._inbox.look(db)
        check_alone(self._inbox, db, self._group)

    async def close(self) -> None:
        await super().close()
        await self._store.close()

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes = await deliver_rest(self._take, claims, [self._refuse(claim) for claim in claims])
        await self._forgetting.run(self._store.run)
        return outcomes

    @property
    def joins_settlement(self) -> bool:
        # Its transactions are the inbox's, not those of the relay.
        return False

    async def deliver_in(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self.deliver(claims)

    async def _take(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self._send(self, claims, otherwise=DELIVERED)

    def _refuse(self, claim: Claim) -> Dead | None:
        try:
            self._inbox.check(read_claim(claim, group=self._group))
        except (InvalidEvent, Unsupported) as error:
            return Dead(str(error))
        return None

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        """Take a message and let an effect follow, in one transaction; false when it had been taken before."""
        message = read_claim(claim, group=self._group)

        def write(db: sa.Connection) -> bool:
            is_new = self._inbox.write(db, [message])[0]
            if is_new:
                effect(db)
            return is_new

        is_new = await self._store.join(write, session=session)
        self.repeats += not is_new
        return is_new


def _group_scope(inbox: Inbox, group: str) -> dict[str, str]:
    return {} if inbox.is_own else {"sink": group}
