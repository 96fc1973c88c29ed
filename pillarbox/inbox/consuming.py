"""The relays of a consumer: from a broker to handlers, at once or stored first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.group import RelayGroup, Waking, given
from pillarbox.handlers.dispatch import DispatchSink
from pillarbox.handlers.registry import Handlers
from pillarbox.handlers.relays import handler_relays
from pillarbox.hooks import Hook
from pillarbox.inbox.database import open_database
from pillarbox.inbox.dead_letters import InboxDeadLetters
from pillarbox.inbox.inbox import Inbox
from pillarbox.inbox.ownership import check_alone
from pillarbox.inbox.retention import warn_window
from pillarbox.inbox.storing import StoreSink
from pillarbox.inbox.taking import TakingSink
from pillarbox.outage import Outage
from pillarbox.relay import Relay
from pillarbox.retry import Exponential, RetryPolicy
from pillarbox.sources import DeadLetters, Source
from pillarbox.sources.url import open_source
from pillarbox.stores import Counts

OpenSource = Callable[[DeadLetters], Source]
"""Makes the source, given where its dead letters are to be buried."""


def consumer_relays(
    source: str | OpenSource,
    handlers: Handlers,
    *,
    inbox: Inbox,
    url: str | sa.URL,
    group: str,
    stored: bool = False,
    unmatched: str = "dead",
    concurrency: int = 16,
    retry: RetryPolicy | None = None,
    redelivery: RetryPolicy | None = None,
    hook: Hook | None = None,
    make_relay: Callable[..., Relay] = Relay,
    **options: Any,
) -> RelayGroup:
    """The relays that give each message of a broker once to every handler of its type.

    `source` is the broker's url, with its `options`, or a function that makes the source. `url` is the database of the
    inbox. A message's handlers run in the transaction that takes it; when `stored`, the message is taken into the
    inbox's queue first and its handlers run from there, each with its own progress. `unmatched` says what becomes of
    messages without a handler: `dead` or `skip`. `redelivery` is the retry policy of the relays that send these
    messages: an inbox that forgets them earlier than those may send them again is warned of. An inbox with messages
    of another group is a `ConfigError` at the start.
    """
    if unmatched not in ("dead", "skip"):
        raise ConfigError(f"Consumer unmatched: expected dead or skip, got {unmatched!r}")
    warn_window(inbox.retention, redelivery or Exponential(), name=inbox.table.fullname)
    letters = InboxDeadLetters(inbox, url, group=group)
    opened = open_source(source, group=group, dead=letters, **options) if isinstance(source, str) else source(letters)
    # Also for messages that are handled at once: a dead letter that is redriven is in the queue.
    driven = handler_relays(
        lambda sink: inbox.need_queue().store(url, sink=sink),
        handlers,
        unmatched="drop" if unmatched == "skip" else unmatched,
        retry=retry,
        hook=hook,
        make_relay=make_relay,
    )
    if not inbox.is_own:
        # That table has a row a message; what it cannot hold is in the queue beside it.
        sink = DispatchSink(handlers, concurrency=concurrency, unmatched=unmatched)
        handling = make_relay(inbox.store(url, group=group), sink, **given(retry=retry, hook=hook))
        driven.add(RelayGroup({f"inbox {group}": handling}))
    if stored:
        waking = Waking(None, list(driven.relays.values()), hook)
        consuming = make_relay(opened, StoreSink(inbox, url, group=group), **given(retry=retry), hook=waking)
    else:
        taking = TakingSink(inbox, url, handlers, group=group, concurrency=concurrency, unmatched=unmatched)
        consuming = make_relay(opened, taking, **given(retry=retry, hook=hook))
    # The other relays have the names of handlers, which are those of functions as a rule.
    name = f"source {group}"
    check = partial(_check_inbox, inbox, url, group)
    relays = _Consumers({name: consuming}, feeds={name: list(driven.relays)}, check=check)
    relays.add(driven)
    return relays


async def _check_inbox(inbox: Inbox, url: str | sa.URL, group: str) -> None:
    database = open_database(inbox, url)
    try:
        await database.run(lambda db: check_alone(inbox, db, group))
    finally:
        await database.close()


class _Consumers(RelayGroup):
    """Starts none of its relays before the inbox was found to be theirs: any of them could handle another's."""

    def __init__(
        self, relays: Mapping[str, Relay], *, feeds: Mapping[str, Sequence[str]], check: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(relays, feeds=feeds)
        self._check = check
        self._stopping = asyncio.Event()

    async def open(self) -> None:
        await self._check()
        await super().open()

    async def drain(self) -> dict[str, Counts]:
        await self._check()
        return await super().drain()

    async def run(self) -> None:
        outage = Outage()
        while not self._stopping.is_set():
            try:
                await self._check()
            except StoreUnavailable as error:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), outage.note(error))
            else:
                outage.end()
                break
        await super().run()

    def stop(self) -> None:
        self._stopping.set()
        super().stop()
