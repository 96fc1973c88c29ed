"""One batch of commands to Redis: one connection a server, one answer a command, nothing sent twice.

Answers to a large batch are read while it is still being written: those that came count, whatever becomes of the rest.

The pipelines of redis-py lose the answers they had when a connection breaks. Those for a cluster also send again by
themselves what a node may have run already, and go on in the background when another node fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, Final, NamedTuple, cast

from hiredis import pack_command
from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode, PipelineCommand

PART: Final = 100
"""How many commands are made and written at a time."""
WINDOW: Final = 1024 * 1024
"""How many bytes are written before the answers to those before them are read; most batches are smaller."""

Words = tuple[Any, ...]


class Command(NamedTuple):
    """A command's words, of which the second is the key or channel, and the bytes they make."""

    words: Words
    packed: bytes

    @classmethod
    def pack(cls, *words: Any) -> Command:
        """Raises `UnicodeEncodeError` for text that has no form in UTF-8."""
        return cls(words, pack_command(words))


FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
"""What a client raises; a time that is over is an `OSError` as well."""

_BROKEN: Final = (exceptions.ConnectionError, exceptions.TimeoutError)
# MOVED is a kind of ASK there.
_REDIRECTIONS: Final = (exceptions.AskError, exceptions.TryAgainError)


class ServerLink:
    """Commands to one server, on one connection of the client's pool."""

    def __init__(self, client: Redis) -> None:
        self._pool: Any = client.connection_pool

    async def send(self, commands: Iterator[Command], *, deadline: float) -> list[Any]:
        """Return an answer a command, in order: a value, or the error that stands in its place."""
        answers: list[Any] = []
        part = _take_part(commands)
        taken = len(part)
        if not part:
            return answers
        try:
            async with asyncio.timeout_at(deadline), self._connection() as connection:
                before = size = 0
                while part:
                    packed = b"".join(part)
                    await connection.send_packed_command(packed)
                    written, size = taken, size + len(packed)
                    # The server works on this part while the next is made.
                    part = _take_part(commands)
                    taken += len(part)
                    if size >= WINDOW:
                        await _read_answers(connection, answers, until=before)
                        before, size = written, 0
                await _read_answers(connection, answers, until=taken)
        except FAILURES as error:
            answers += [name_timeout(error)] * (taken - len(answers))
        return answers

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        connection = await self._pool.get_connection()
        is_clean = False
        try:
            yield connection
            is_clean = True
        finally:
            if not is_clean:
                # Answers may still come; nobody else must read them.
                await connection.disconnect(nowait=True)
            await asyncio.shield(self._pool.release(connection))

    async def check(self, *, deadline: float) -> None:
        (answer,) = await self.send(iter([Command.pack("PING")]), deadline=deadline)
        if isinstance(answer, Exception):
            raise answer


def _take_part(commands: Iterator[Command]) -> list[bytes]:
    part: list[bytes] = []
    size = 0
    for _, packed in commands:
        part.append(packed)
        size += len(packed)
        if size >= WINDOW or len(part) == PART:
            break
    return part


async def _read_answers(connection: Any, answers: list[Any], *, until: int) -> None:
    while len(answers) < until:
        try:
            answers.append(await connection.read_response())
        except exceptions.ResponseError as error:
            answers.append(error)


class ClusterLink:
    """Commands to the nodes of a cluster, each node's one window after the other: the order of a stream is kept."""

    def __init__(self, client: RedisCluster) -> None:
        self._client = client
        self._is_stale = False

    async def send(self, commands: Iterator[Command], *, deadline: float) -> list[Any]:
        """Return an answer a command, in order: a value, or the error that stands in its place."""
        batch = list(commands)
        if not batch:
            return []
        try:
            async with asyncio.timeout_at(deadline):
                await self._learn_nodes()
                parts = self._split(batch)
        except FAILURES as error:
            return [name_timeout(error)] * len(batch)
        await asyncio.gather(*(_send_part(node, _cut(part, batch), deadline) for node, part in parts.items()))
        sent = sorted((command for part in parts.values() for command in part), key=lambda command: command.position)
        answers = [command.result for command in sent]
        try:
            async with asyncio.timeout_at(deadline):
                await self._follow(batch, answers)
        except TimeoutError:
            pass  # what was not sent again keeps its redirection as the answer
        self._is_stale = any(isinstance(answer, FAILURES) for answer in answers)
        return answers

    async def check(self, *, deadline: float) -> None:
        async with asyncio.timeout_at(deadline):
            self._is_stale = True
            await self._learn_nodes()
            await self._client.ping(target_nodes=RedisCluster.PRIMARIES)

    async def _learn_nodes(self) -> None:
        await self._client.initialize()
        if self._is_stale:
            # A failover may have moved slots; this leaves the connections of other batches alone.
            await self._client.nodes_manager.initialize()
            self._is_stale = False

    def _split(self, commands: Sequence[Command]) -> dict[ClusterNode, list[PipelineCommand]]:
        nodes: dict[str, ClusterNode] = {}
        parts: dict[ClusterNode, list[PipelineCommand]] = {}
        for position, command in enumerate(commands):
            name = command.words[1]
            if name not in nodes:
                nodes[name] = cast(ClusterNode, self._client.get_node_from_key(name))
            queued = PipelineCommand(position, *command.words)
            # Its first value, None, is an answer as well.
            queued.result = exceptions.ConnectionError("The connection broke before this answer")
            parts.setdefault(nodes[name], []).append(queued)
        return parts

    async def _follow(self, commands: Sequence[Command], answers: list[Any]) -> None:
        """Send one by one what has moved to another node, and all that follows it in its stream."""
        moved = set()
        for position, (command, answer) in enumerate(zip(commands, answers, strict=True)):
            if isinstance(answer, _REDIRECTIONS):
                moved.add(command.words[1])
            if command.words[1] in moved:
                try:
                    answers[position] = await self._client.execute_command(*command.words)
                except FAILURES as error:
                    answers[position] = error


def _cut(part: list[PipelineCommand], batch: Sequence[Command]) -> list[list[PipelineCommand]]:
    windows: list[list[PipelineCommand]] = []
    size = WINDOW
    for command in part:
        if size >= WINDOW:
            windows.append([])
            size = 0
        windows[-1].append(command)
        size += len(batch[command.position].packed)
    return windows


async def _send_part(node: ClusterNode, windows: list[list[PipelineCommand]], deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            for window in windows:
                await node.execute_pipeline(window)
                # The next window would get another connection and overtake what was lost.
                if any(isinstance(command.result, _BROKEN) for command in window):
                    break
    except FAILURES as error:
        for command in chain.from_iterable(windows):
            if isinstance(command.result, exceptions.ConnectionError):
                command.result = name_timeout(error)


def name_timeout(error: Exception) -> Exception:
    """Return the error, or one with a message when the deadline passed."""
    return exceptions.TimeoutError("No answer in time") if type(error) is TimeoutError else error
