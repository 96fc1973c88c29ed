"""A queue's mark at a target: up to which row its statements are there.

A batch moves the mark in its own transaction, from where we know it to its last row; a guard stops it when the mark is
not there any more. Whoever takes up a queue signs its mark first, so that a batch of an earlier run which is still on
its way comes to nothing. A signature names the run, the try and the row: a copy of the file, or one from a backup,
does not have that row.
"""

from __future__ import annotations

from typing import Final

from pillarbox.errors import SinkUnavailable, StoreUnavailable
from pillarbox.event import Claim
from pillarbox.sync import remote_sql
from pillarbox.sync.remote import Remote
from pillarbox.sync.settling import queued_of
from pillarbox.sync.source import QueueSource
from pillarbox.sync.state import digest_row
from pillarbox.sync.writers import Statement

TRIES: Final = 3


class Mark:
    """The mark of one queue. `applied` is where it stands, None when that has to be asked."""

    def __init__(self, remote: Remote, table: str) -> None:
        self.applied: int | None = None
        self._remote = remote
        self._table = table
        self._token = ""
        self._tries = 0
        self._queue_id = ""
        self._source: QueueSource

    async def take(self, source: QueueSource) -> int | None:
        """Sign the mark and say where it stands; None when the target does not know the queue."""
        state = await source.state()
        self._source, self._queue_id, self.applied = source, state.queue_id, None
        mark = await self._remote.read_mark(self._queue_id)
        if mark is not None:
            # Noted here first: a mark with a signature that the file does not know is a stranger's.
            await source.sign()
        for _ in range(TRIES):
            if mark is None:
                return None
            await self._check(*mark)
            signed = self._sign(mark[1].rpartition(".")[2])
            await self._remote.fence_mark(self._queue_id, known=mark, token=signed)
            known, mark = (mark[0], signed), await self._remote.read_mark(self._queue_id)
            if mark == known:
                return mark[0]
        raise StoreUnavailable(f"Target {self._remote.name}: the mark of queue {self._queue_id} moves by itself")

    async def create(self) -> None:
        """Make the mark of a queue that the target does not know."""
        await self._remote.create_mark(self._queue_id, self._table)

    async def read(self) -> int:
        """Where the mark stands, asked if it is not known; raises `SinkUnavailable`."""
        if self.applied is not None:
            return self.applied
        try:
            mark = await self._remote.read_mark(self._queue_id)
            if mark is None:
                raise SinkUnavailable(
                    f"Target {self._remote.name}: the mark of queue {self._queue_id} in {remote_sql.MARKS} is gone. "
                    "Without it nobody knows what was delivered; put it back, or start the service again to go on"
                )
            await self._check(*mark)
        except StoreUnavailable as error:
            raise SinkUnavailable(str(error)) from error
        self.applied, self._token = mark
        return self.applied

    def move(self, applied: int, last: Claim) -> tuple[list[Statement], str]:
        """The statements that begin a batch, and its signature; where the mark stands is not known from now on."""
        event = last.event
        token = self._sign(digest_row(queued_of(last).created_at, event.topic, event.payload))
        known = (applied, self._token)
        self.applied = None
        return [
            remote_sql.advance_mark(self._queue_id, known=known, applied=last.row, token=token),
            remote_sql.guard_mark(self._queue_id, applied=last.row, token=token),
        ], token

    def settle(self, applied: int, token: str | None = None) -> None:
        """The batch was written whole, or not at all."""
        self.applied = applied
        self._token = self._token if token is None else token

    def _sign(self, digest: str) -> str:
        self._tries += 1
        return f"{self._source.session}.{self._tries}.{digest}"

    async def _check(self, applied: int, token: str) -> None:
        if not await self._source.recognizes(applied, token):
            settled = (await self._source.state()).settled
            raise StoreUnavailable(
                f"Target {self._remote.name} has statements of the queue of {self._table} up to number {applied}, but "
                f"this file delivered them up to {settled} only: it is a copy, or comes from a backup. Nothing is sent "
                f"until you decide: pillarbox sync renumber {self._source.options} sends what waits in it under new "
                "numbers"
            )
