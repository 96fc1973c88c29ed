"""What a member of a consumer group of Redis Streams asks the server.

Redis lets anybody acknowledge or claim any message, whoever has it. So whatever depends on whose a message is runs as a
script, which nothing comes between. A message's delivery count is kept one above the number of times it was tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, Final, NamedTuple

from pillarbox.errors import MissingExtra, StoreUnavailable
from pillarbox.retry import describe_error

try:
    from redis import exceptions

    from pillarbox.sinks.redis_batch import FAILURES, name_timeout
except ImportError as error:
    raise MissingExtra("Redis", "redis") from error

# One script runs at a time, and everybody else waits for it.
_PART: Final = 200
_LAST_NUMBER: Final = 2**64 - 1

# Each entry with its count and fields; no fields when it is not in the stream any more.
_FETCH: Final = """
local function fetch(id)
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)
  local found = redis.call('XRANGE', KEYS[1], id, id)
  return {id, pending[1] and pending[1][4] or 1, found[1] and found[1][2] or false}
end
"""
_HISTORY: Final = f"""{_FETCH}
local entries = {{}}
for _, each in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])) do
  entries[#entries + 1] = fetch(each[1])
end
return entries
"""
_STEAL: Final = f"""{_FETCH}
local found = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
local entries = {{}}
for _, id in ipairs(found[2]) do
  if id then entries[#entries + 1] = fetch(id) end
end
return {{found[1], entries, found[3] or {{}}}}
"""
# What nobody has and is in the stream was taken over and acknowledged. What is not in the stream either may have been
# trimmed, which makes the server forget whose it was: it stays ours. Where done messages are deleted it may be done.
_KEEP: Final = """
local lost = {}
for place = 3, #ARGV, 2 do
  local id = ARGV[place]
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1]
  if pending and pending[2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', ARGV[place + 1], 'JUSTID')
  elseif pending or #redis.call('XRANGE', KEYS[1], id, id) > 0 then
    lost[#lost + 1] = id
  end
end
return lost
"""
_ACKNOWLEDGE: Final = """
local lost = {}
for place = 4, #ARGV do
  local id = ARGV[place]
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1]
  if pending and pending[2] ~= ARGV[2] then
    lost[#lost + 1] = id
  else
    redis.call('XACK', KEYS[1], ARGV[1], id)
    if ARGV[3] == '1' then redis.call('XDEL', KEYS[1], id) end
  end
end
return lost
"""
# A consumer that is deleted takes its messages with it: only when it has none.
_LEAVE: Final = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[4], ARGV[2])
for _, each in ipairs(pending) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, each[1], 'IDLE', ARGV[3], 'RETRYCOUNT', each[4], 'JUSTID')
end
if #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return #pending
"""
_CLEAR: Final = """
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for place = 1, #flat, 2 do consumer[flat[place]] = flat[place + 1] end
  local is_ours = string.sub(consumer.name, 1, #ARGV[2]) == ARGV[2]
  if is_ours and consumer.pending == 0 and consumer.idle > tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
  end
end
"""
# The last entry that the stream ever had, the last one that the group gave out, and the first that is not done.
_POSITIONS: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {false, false, false} end
local function find(flat, name)
  for place = 1, #flat, 2 do
    if flat[place] == name then return flat[place + 1] end
  end
end
local given, first = false, false
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  if find(group, 'name') == ARGV[1] then
    given = find(group, 'last-delivered-id')
    first = redis.call('XPENDING', KEYS[1], ARGV[1])[2]
  end
end
return {find(redis.call('XINFO', 'STREAM', KEYS[1]), 'last-generated-id'), given, first}
"""
_SCRIPTS: Final = {
    "history": _HISTORY,
    "steal": _STEAL,
    "keep": _KEEP,
    "acknowledge": _ACKNOWLEDGE,
    "leave": _LEAVE,
    "clear": _CLEAR,
    "positions": _POSITIONS,
}


Place = tuple[int, int]
"""An entry's id as numbers: the ids of a stream grow."""


class Found(NamedTuple):
    """An entry of a stream: how often it was tried, and its fields unless it was deleted."""

    stream: str
    id: str
    tries: int
    fields: list[tuple[bytes, bytes]] | None


class RedisGroup:
    """One consumer of a group of streams. Everything raises `StoreUnavailable`, and what the server refuses."""

    def __init__(self, client: Any, *, name: str, group: str, consumer: str, timeout: timedelta) -> None:
        self._client = client
        self._name = name
        self._group = group
        self._consumer = consumer
        self._timeout = timeout.total_seconds()
        self._scripts = {script: client.register_script(text) for script, text in _SCRIPTS.items()}

    async def has_stream(self, stream: str) -> bool:
        return bool(await self._call("EXISTS", stream))

    async def find_positions(self, stream: str) -> tuple[Place | None, Place | None]:
        """The last entry of the stream, and that up to which the group is done; none where there is no such thing."""
        last, given, first = (
            None if each is None else to_place(_text(each)) for each in await self._run("positions", stream)
        )
        return last, given if first is None else _before(first)

    async def join(self, stream: str, *, start: str, creates: bool) -> bool:
        """Have the group on that stream; one that exists stays as it is. Says whether it was made."""
        try:
            await self._call("XGROUP", "CREATE", stream, self._group, start, *(["MKSTREAM"] if creates else []))
        except exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
            return False
        return True

    async def read(self, streams: Sequence[str], most: int, wait: float) -> list[Found]:
        """New entries of the streams, up to so many each."""
        arguments = ["GROUP", self._group, self._consumer, "COUNT", most, "BLOCK", max(1, round(wait * 1000))]
        answer = await self._call("XREADGROUP", *arguments, "STREAMS", *streams, *[">"] * len(streams), extra=wait)
        listed = answer.items() if isinstance(answer, dict) else answer or []
        return [
            Found(_text(stream), _text(entry_id), 0, list(fields.items()))
            for stream, entries in listed
            for entry_id, fields in _flatten(entries)
        ]

    async def history(self, stream: str, after: str | None, most: int) -> list[Found]:
        """What this consumer was given and has not acknowledged, after that entry."""
        start = "-" if after is None else f"({after}"
        answer = await self._run("history", stream, self._consumer, start, most)
        return [_found(stream, each) for each in answer]

    async def steal(
        self, stream: str, cursor: str, most: int, *, idle: timedelta
    ) -> tuple[str, list[Found], list[str]]:
        """Entries that no consumer was heard of for that time; where to go on, and which ones were deleted before."""
        milliseconds = round(idle.total_seconds() * 1000)
        following, entries, deleted = await self._run("steal", stream, self._consumer, milliseconds, cursor, most)
        return _text(following), [_found(stream, each) for each in entries], [_text(each) for each in deleted]

    async def keep(self, stream: str, counts: Iterable[tuple[str, int]]) -> list[str]:
        """Say that these are at hand, with their counts; returns those that are somebody else's."""
        lost: list[str] = []
        for part in _parts(counts):
            words = [word for each in part for word in each]
            lost += map(_text, await self._run("keep", stream, self._consumer, *words))
        return lost

    async def acknowledge(self, stream: str, ids: Iterable[str], *, deletes: bool) -> list[str]:
        """Acknowledge those that are ours still; returns the others."""
        lost: list[str] = []
        for part in _parts(ids):
            answer = await self._run("acknowledge", stream, self._consumer, int(deletes), *part)
            lost += map(_text, answer)
        return lost

    async def leave(self, stream: str, *, idle: timedelta) -> None:
        """Let others take what is not acknowledged as if it had been idle for so long, and go if there is nothing."""
        milliseconds = round(idle.total_seconds() * 1000)
        await self._run("leave", stream, self._consumer, milliseconds, 100_000)

    async def clear_away(self, stream: str, *, prefix: str, idle: timedelta) -> None:
        """Delete the consumers of that kind that have nothing and were not heard of for so long."""
        await self._run("clear", stream, prefix, round(idle.total_seconds() * 1000))

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, *words: Any, extra: float = 0.0) -> Any:
        try:
            async with asyncio.timeout(self._timeout + extra):
                return await self._client.execute_command(*words)
        except FAILURES as error:
            raise self._judge(error) from error

    async def _run(self, script: str, stream: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._scripts[script](keys=[stream], args=[self._group, *arguments])
        except FAILURES as error:
            raise self._judge(error) from error

    def _judge(self, error: Exception) -> Exception:
        if isinstance(error, exceptions.ResponseError) and str(error).startswith(("WRONGTYPE", "BUSYGROUP", "ERR ")):
            return error
        return StoreUnavailable(f"Source {self._name}: {describe_error(name_timeout(error))}")


def to_place(entry_id: str) -> Place:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)


def _before(place: Place) -> Place:
    return (place[0], place[1] - 1) if place[1] else (place[0] - 1, _LAST_NUMBER)


def _found(stream: str, answer: Sequence[Any]) -> Found:
    entry_id, count, flat = answer
    fields = None if flat is None else list(zip(flat[::2], flat[1::2], strict=True))
    return Found(stream, _text(entry_id), int(count) - 1, fields)


def _flatten(entries: Any) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    # The newer protocol nests the entries once more.
    for each in entries:
        if isinstance(each, list) and each and not isinstance(each[0], bytes):
            yield from _flatten(each)
        else:
            yield each[0], each[1]


def _parts(values: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(values)
    while part := list(islice(rest, _PART)):
        yield part


def _text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
