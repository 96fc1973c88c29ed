"""Redis Streams: a consumer group as a source."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import uuid4

import orjson

from pillarbox.codec import JSON
from pillarbox.errors import ConfigError, MissingExtra, StoreUnavailable
from pillarbox.sinks.options import read_options
from pillarbox.sinks.tls import TLS_OPTIONS
from pillarbox.sinks.url import SinkUrl
from pillarbox.sources import DeadLetters
from pillarbox.sources.broker import LEASE, PREFETCH, BrokerSource
from pillarbox.sources.pending import Entry
from pillarbox.sources.reading import OPENOUTBOX_ID, OPENOUTBOX_KEY, Raw, Read, is_uuid, read_message
from pillarbox.sources.redis_group import Found, Place, RedisGroup, to_place
from pillarbox.values import Read as Reader
from pillarbox.values import one_of, read_number, read_pause, read_switch, read_text, read_texts

try:
    from redis import exceptions
    from redis.asyncio import Redis

    from pillarbox.sinks.message import HEADER_PREFIX
    from pillarbox.sinks.redis import BODY, make_client
except ImportError as error:
    raise MissingExtra("Redis", "redis") from error

log = logging.getLogger("pillarbox.source")

TIMEOUT: Final = timedelta(seconds=5)
_NAME: Final = "pillarbox-"
_STARTS: Final = {"earliest": "0", "latest": "$"}
# After how many leases a consumer of ours that is gone and has nothing is cleared away.
_GONE: Final = 10
_OPTIONS: Final[dict[str, Reader]] = {
    "streams": read_texts,
    "prefetch": read_number,
    "start": one_of(*_STARTS),
    "create": read_switch,
    "consumer": read_text,
    "lease": read_pause,
    "delete": read_switch,
    "timeout": read_pause,
}


class RedisSource(BrokerSource):
    """Consumes streams as one consumer of a group. Url: `redis://user:password@host:port/db`, `rediss://` with TLS.

    A group that does not exist is made, to begin at the `start`; a stream that does not exist is made with `create`,
    else it is an error when the source is opened. What another consumer was given and was not heard of for a `lease`
    is taken over; what is at hand here is renewed. With `delete` a message is removed from its stream when it is done,
    for every group; a process that stood still for a lease then cannot tell one that another has done from one that was
    trimmed, and handles it once more. Attempts are counted by the server. The client is yours: the source neither makes
    nor closes it.

    Redis gives each message to whoever asks next: the order of a key is kept among the messages of one consumer, and
    several consumers of a stream may have messages of one key at once. Where order matters let one consumer read a
    stream, and give it a `consumer` name that stays, so that after a crash it begins with what it had; a name must not
    be used twice at a time. Needs Redis 6.2 and scripts; not for clusters.
    """

    keeps_order = False
    counts_attempts = True

    def __init__(
        self,
        client: Redis,
        *,
        streams: Sequence[str],
        group: str,
        dead: DeadLetters,
        name: str = "redis:",
        prefetch: int = PREFETCH,
        start: Literal["earliest", "latest"] = "earliest",
        create: bool = True,
        consumer: str | None = None,
        lease: timedelta = LEASE,
        delete: bool = False,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        super().__init__(name, dead=dead, prefetch=prefetch)
        if lease < timedelta(seconds=1):
            raise ConfigError(f"Source {name!r} lease: expected at least a second, got {lease}")
        self._streams = list(streams)
        self._start_at = _STARTS[start]
        self._creates = create
        self._lease = lease
        self._deletes = delete
        self._consumer = consumer or f"{_NAME}{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._group = RedisGroup(client, name=name, group=group, consumer=self._consumer, timeout=timeout)
        self._owns_client = False
        self._is_joined = False
        # Where the reading of what we were given before has come to; a stream that is not there has none left.
        self._history: dict[str, str | None] = {}
        self._cursors: dict[str, str] = {}
        # Up to which entry of each stream the whole group was done when it was joined.
        self._done: dict[str, Place] = {}
        self._steal_at = 0.0
        self._turn = deque(self._streams)

    @classmethod
    def from_url(cls, url: SinkUrl, *, group: str, dead: DeadLetters) -> RedisSource:
        is_secure = url.scheme == "rediss"
        options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
        if "streams" not in options:
            raise ConfigError(f"Source {url.name!r}: expected the option streams, the names of the streams to consume")
        client = make_client(url, options, is_secure=is_secure)
        assert isinstance(client, Redis)
        chosen = {option: value for option, value in options.items() if option in _OPTIONS}
        source = cls(client, name=url.name, group=group, dead=dead, **chosen)
        source._owns_client = True
        return source

    @property
    def lease(self) -> timedelta:
        return self._lease

    @property
    def extend_within(self) -> timedelta:  # type: ignore[override]
        return self._lease

    # -- the connection ----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        for stream in self._streams:
            where = f"Source {self.name!r} streams: {stream!r}"
            if not self._creates and not await self._group.has_stream(stream):
                raise self._refusal(f"{where} does not exist; use the option create")
            try:
                await self._join(stream)
            except exceptions.ResponseError as error:
                raise self._refusal(f"{where} cannot be consumed: {error}") from error
            await self._group.clear_away(stream, prefix=_NAME, idle=_GONE * self._lease)
        self._is_joined = True
        self._history = dict.fromkeys(self._streams)
        self._cursors = {}
        self._steal_at = 0.0

    async def _join(self, stream: str) -> None:
        start = await self._find_start(stream)
        is_made = await self._group.join(stream, start=start, creates=self._creates)
        if is_made and stream in self._done:
            log.warning(
                "Source %s: the group was gone from stream %r and is made again, to begin after entry %s.",
                *(self.name, stream, start),
            )
            # What is at hand is nobody's in the new group, and comes again.
            self.lose([entry for entry in self.pending if entry.token[0] == stream])
        _, done = await self._group.find_positions(stream)
        self._done[stream] = (0, 0) if done is None else done

    async def _find_start(self, stream: str) -> str:
        """Where a group that is made begins; one made again where it stood when we joined, for the others' sake."""
        if self._start_at != "$" or stream not in self._done:
            return self._start_at
        after = self._done[stream]
        last, _ = await self._group.find_positions(stream)
        # A stream that has not come as far as that is another one, of the same name.
        return "0" if last is None or last < after else f"{after[0]}-{after[1]}"

    async def _reconnect(self) -> None:
        """Connect again: what is at hand is ours still, and what was given to us unheard is found in the history."""
        await self._connect()

    async def _disconnect(self) -> None:
        was_joined, self._is_joined = self._is_joined, False
        try:
            if was_joined:
                for stream in self._streams:
                    await self._group.leave(stream, idle=self._lease)
        except (StoreUnavailable, exceptions.ResponseError) as error:
            log.info("Source %s: others get what it had when its lease is over: %s", self.name, error)
        finally:
            if self._owns_client:
                await self._group.close()

    async def close(self) -> None:
        # What was given back was counted as tried when it was claimed.
        if self._is_joined:
            with suppress(StoreUnavailable, exceptions.ResponseError):
                await self._extend(list(self.pending))
        await super().close()

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        """What we had before, then what others left behind, then what is new."""
        try:
            found = await self._recall(most) or await self._steal(most)
            if not found:
                self._turn.rotate(-1)
                streams = list(self._turn)[:most]
                found = self._leave_out(self._known(), await self._group.read(streams, most // len(streams), timeout))
        except exceptions.ResponseError as error:
            raise StoreUnavailable(f"Source {self.name}: {error}") from error
        return [_make_entry(each) for each in found]

    async def _recall(self, most: int) -> list[Found]:
        for stream, after in list(self._history.items()):
            while True:
                known = self._known()
                found = await self._group.history(stream, after, most)
                if not found:
                    del self._history[stream]
                    break
                self._history[stream] = after = found[-1].id
                if unknown := self._leave_out(known | self._known(), found):
                    return unknown
        return []

    async def _steal(self, most: int) -> list[Found]:
        if time.monotonic() < self._steal_at:
            return []
        for stream in self._streams:
            cursor = self._cursors.get(stream, "0-0")
            known = self._known()
            following, found, deleted = await self._group.steal(stream, cursor, most, idle=self._lease)
            self._cursors[stream] = following
            if deleted:
                log.warning(
                    "Source %s: %d messages of stream %r were deleted before anybody had handled them.",
                    self.name,
                    len(deleted),
                    stream,
                )
            if unknown := self._leave_out(known | self._known(), found):
                return unknown
        if all(cursor == "0-0" for cursor in self._cursors.values()):
            self._steal_at = time.monotonic() + self._lease.total_seconds() / 3
        return []

    def _known(self) -> set[tuple[str, str]]:
        """What is at hand. Asked before a question as well: what is acknowledged meanwhile may be in the answer."""
        return {entry.token for entry in self.pending}

    def _leave_out(self, known: set[tuple[str, str]], found: list[Found]) -> list[Found]:
        return [each for each in found if (each.stream, each.id) not in known]

    async def _acknowledge(self, entries: Sequence[Entry]) -> None:
        for stream, ours in _by_stream(entries).items():
            ids = [entry.token[1] for entry in ours]
            self._lose_of(ours, await self._group.acknowledge(stream, ids, deletes=self._deletes))

    async def _begin(self, entries: Sequence[Entry]) -> None:
        await self._extend(entries)

    async def _extend(self, entries: Sequence[Entry]) -> None:
        for stream, ours in _by_stream(entries).items():
            counts = [(entry.token[1], entry.attempts + 1) for entry in ours]
            self._lose_of(ours, await self._group.keep(stream, counts))

    def _lose_of(self, entries: Sequence[Entry], ids: Sequence[str]) -> None:
        lost = set(ids)
        if lost:
            self.lose([entry for entry in entries if entry.token[1] in lost])


def _by_stream(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.token[0], []).append(entry)
    return found


def _make_entry(found: Found) -> Entry:
    place = to_place(found.id)
    return Entry(_read(found, _as_time(place[0])), (found.stream, found.id), found.tries, place)


def _read_openoutbox(fields: Mapping[str, bytes]) -> dict[str, str | bytes | None] | None:
    """The headers of an entry with the fields of the Open Outbox Relay and no others."""
    names = fields.keys() - {"id", "partition_key"}
    # An id alone may be that of the order which a message is about.
    is_theirs = ("partition_key" in fields or bool(names)) and all(name.startswith("h:") for name in names)
    if not is_theirs or not is_uuid(fields.get("id", b"").decode(errors="replace")):
        return None
    headers: dict[str, str | bytes | None] = {name.removeprefix("h:"): fields[name] for name in sorted(names)}
    headers[OPENOUTBOX_ID] = fields["id"]
    if "partition_key" in fields:
        headers[OPENOUTBOX_KEY] = fields["partition_key"]
    return headers


def _read(found: Found, sent_at: datetime | None) -> Read:
    raw = Raw(f"{found.stream}:{found.id}", found.stream, b"", sent_at=sent_at)
    if found.fields is None:
        read = read_message(raw)
        return Read(read.id, read.event, "Message was deleted from its stream before it was handled", raw)
    fields = {name.decode(errors="backslashreplace"): value for name, value in found.fields}
    if BODY in fields:
        raw.body = fields.pop(BODY)
        raw.headers = _read_openoutbox(fields) or _restore_header(fields)
        return read_message(raw)
    raw.headers = dict(fields)
    try:
        # What others add has its values in fields, with no name for the whole.
        raw.body = orjson.dumps({name: value.decode() for name, value in fields.items()})
    except (UnicodeDecodeError, orjson.JSONEncodeError) as error:
        read = read_message(raw)
        return Read(read.id, read.event, f"Message cannot be read: no field {BODY!r}, and {error}", raw)
    raw.content_type = JSON
    raw.headers = {}
    return read_message(raw)


def _restore_header(fields: dict[str, bytes]) -> dict[str, Any]:
    """Our sink renames a header of the payload's name."""
    name = BODY
    while HEADER_PREFIX + name in fields:
        name = HEADER_PREFIX + name
    return {BODY if field == name else field: value for field, value in fields.items()}


def _as_time(milliseconds: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None  # an id that somebody made up
