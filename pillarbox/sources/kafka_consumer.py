"""A consumer of the Kafka client and the thread that polls it.

The client lets one thread in at a time, so that this one does everything: whoever wants offsets committed asks for it
and waits. It polls as long as it lives, whatever the handlers do: a consumer that is not polled loses its partitions.
When there is no room for more messages it pauses its partitions and goes on polling. Partitions that are taken away are
given up when what is under way of them is settled, or after a while; then Kafka hears how far they are done.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from pillarbox.errors import MissingExtra, StoreUnavailable
from pillarbox.sinks.kafka_errors import describe
from pillarbox.sinks.kafka_settings import ClientLog, KafkaSettings, mask
from pillarbox.sources.kafka_progress import Part, Place, Progress
from pillarbox.sources.kafka_topics import REFUSED

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

log = logging.getLogger("pillarbox.source")

_POLL: Final = 0.1
# While messages are at hand, offsets may have to be committed at any time.
_QUICK_POLL: Final = 0.01
# A pause throws away what the client has fetched. For this long it is merely not asked for more.
_FULL: Final = 0.5
_CATCH_UP: Final = 1.0
# The group is changing: what is done now is told when it has settled, or comes again.
_REBALANCING: Final = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError._NO_OFFSET,
        KafkaError._ASSIGNMENT_LOST,
    }
)

Withdraw = Callable[[Sequence[Part], bool], Coroutine[Any, Any, None]]


class KafkaConsumer:
    """One membership of a consumer group, from `start` to `stop`.

    `count` says how many messages are at hand outside of here. `withdraw` is run in the event loop when partitions are
    taken away: it waits for what is under way of them, unless they are lost already. `begins_at_end` is for partitions
    of which the group has no offset.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        given: dict[str, Any],
        *,
        name: str,
        prefetch: int,
        count: Callable[[], int],
        withdraw: Withdraw,
        patience: float,
        begins_at_end: bool,
    ) -> None:
        self._settings = settings
        self._name = name
        self._prefetch = prefetch
        self._count = count
        self._withdraw = withdraw
        self._patience = patience
        self._begins_at_end = begins_at_end
        self._loop = asyncio.get_running_loop()
        self.progress = Progress()
        self._buffer: deque[tuple[Part, Message]] = deque()
        self._arrived = asyncio.Event()
        self._commits: dict[asyncio.Future[KafkaError | None], dict[Part, int]] = {}
        self._paused: set[Place] = set()
        self._stop = threading.Event()
        self._is_commit_wanted = threading.Event()
        self._is_withdrawing = False
        self._has_commit_failed = False
        self._is_abandoned = False
        self._ended = asyncio.Event()
        self._told: dict[tuple[str | None, int | None], str] = {}
        self._room_at = 0.0
        self.down: str | None = None
        """Why no broker can be used now, if so."""
        self.failure: str | None = None
        """Why this consumer is of no use any more, if so."""
        self._reason: KafkaError | None = None
        self._client = Consumer(
            {
                **settings.connection,
                **given,
                "error_cb": self._note_error,
                "on_commit": self._note_commit,
                "logger": ClientLog(settings, name, owner="Source"),
            }
        )
        self._thread = threading.Thread(target=self._run, name="pillarbox-kafka-consumer", daemon=True)

    # -- from the event loop -----------------------------------------------------------------------------------------

    def start(self, topics: list[str]) -> None:
        self._client.subscribe(topics, on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose)
        self._thread.start()

    async def stop(self) -> None:
        """Tell Kafka what is done, leave the group and end the thread; brokers that stand still are not waited for."""
        self._stop.set()
        if not self._thread.is_alive():
            return
        limit = self._settings.timeout + self._patience + 1
        try:
            async with asyncio.timeout(limit):
                await self._ended.wait()
        except TimeoutError:
            self._is_abandoned = True
            log.warning(
                "Source %s: the brokers did not answer within %g s, so it goes without having left the group; its "
                "partitions go to others when the session has lapsed.",
                self._name,
                limit,
            )

    async def receive(self, most: int, timeout: float) -> list[tuple[Part, Message]]:
        """Up to so many messages; raises `StoreUnavailable` when there is no broker, or this consumer has failed."""
        if not self._buffer:
            self._arrived.clear()
            if not self._buffer and self.failure is None and self.down is None:
                try:
                    async with asyncio.timeout(timeout):
                        await self._arrived.wait()
                except TimeoutError:
                    pass
        problem = self.failure or self.down
        if problem is not None and not self._buffer:
            raise StoreUnavailable(f"Source {self._name}: {problem}")
        found: list[tuple[Part, Message]] = []
        while self._buffer and len(found) < most:
            part, message = self._buffer.popleft()
            if not part.is_leaving:
                found.append((part, message))
        return found

    async def commit(self, timeout: float) -> None:
        """Tell Kafka how far everything is done; raises `StoreUnavailable` when it does not answer.

        While partitions are taken away it does not wait: the thread waits for those who settle, and commits then.
        """
        behind = self.progress.list_behind()
        if not behind or self._is_withdrawing:
            return
        answered: asyncio.Future[KafkaError | None] = self._loop.create_future()
        self._commits[answered] = behind
        self._is_commit_wanted.set()
        try:
            async with asyncio.timeout(timeout):
                error = await answered
        except TimeoutError:
            self._has_commit_failed = True
            reason = self.failure or self.down or f"no answer to a commit within {timeout:g} s"
            raise StoreUnavailable(f"Source {self._name}: {reason}") from None
        finally:
            del self._commits[answered]
        if error is not None and error.code() not in _REBALANCING:
            raise self._unavailable(error)

    def _answer(self, error: KafkaError | None) -> None:
        for answered, behind in self._commits.items():
            is_over = (error is not None or self._is_withdrawing) or all(
                part.is_revoked or part.committed >= offset for part, offset in behind.items()
            )
            if is_over and not answered.done():
                answered.set_result(error)

    def _unavailable(self, error: KafkaError) -> StoreUnavailable:
        return StoreUnavailable(f"Source {self._name}: {mask(describe(error), self._settings)}")

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            caught_up_at = time.monotonic()
            while not self._stop.is_set():
                self._poll()
                if self._is_commit_wanted.is_set() or time.monotonic() > caught_up_at + _CATCH_UP:
                    caught_up_at = time.monotonic()
                    self._commit()
        except KafkaException as error:
            self.fail(describe(error.args[0]))
        except Exception as error:
            log.exception("Source %s: polling failed.", self._name)
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            try:
                # Takes the partitions away first, which tells Kafka what is done of them.
                self._client.close()
            finally:
                self._call(self._ended.set)

    def _poll(self) -> None:
        at_hand = len(self._buffer) + self._count()
        room = self._prefetch - at_hand
        self._pause_or_resume(room)
        if room <= 0 and not self._paused and not self._commits:
            self._stop.wait(_QUICK_POLL)
            return
        message = self._client.poll(_QUICK_POLL if at_hand else _POLL)
        is_new = False
        while message is not None:
            is_new |= self._keep(message)
            room -= 1
            message = self._client.poll(0) if room > 0 else None
        if is_new:
            self._wake()

    def _keep(self, message: Message) -> bool:
        error = message.error()
        if error is not None:
            self._judge(error, message)
            return False
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        self.down = None
        part = self.progress.receive(topic, partition, offset)
        if part is not None:
            self._buffer.append((part, message))
        return part is not None

    def _judge(self, error: KafkaError, message: Message) -> None:
        if error.fatal():
            raise KafkaException(error)
        code = error.code()
        if code in REFUSED or code == KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._set_down(error)
        elif code == KafkaError._MAX_POLL_EXCEEDED:
            log.warning("Source %s: this process stood still and lost its partitions: %s", self._name, error.str())
        else:
            self._tell(error, message)

    def _tell(self, error: KafkaError, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        text = mask(describe(error), self._settings)
        if topic is not None:
            text = f"topic {topic!r}, partition {partition}, offset {offset} cannot be received: {text}"
        # The client may try the same message for ever.
        if self._told.get((topic, partition)) != text:
            self._told[topic, partition] = text
            log.warning("Source %s: %s", self._name, text)

    def _pause_or_resume(self, room: int) -> None:
        """Pause everything when there was no room for a while; resume when there is a good deal of it."""
        if room > 0:
            self._room_at = time.monotonic()
        if time.monotonic() > self._room_at + _FULL:
            places = [place for place in self.progress.list_places() if place not in self._paused]
            if places:
                self._client.pause(_as_partitions(places))
                self._paused.update(places)
        elif self._paused and room >= (self._prefetch + 1) // 2:
            self._resume(list(self._paused))

    def _resume(self, places: list[Place]) -> None:
        paused = [place for place in places if place in self._paused]
        if paused:
            self._client.resume(_as_partitions(paused))
            self._paused.difference_update(paused)

    def _commit(self) -> None:
        """Commit what somebody waits for, or what could not be committed while the group was changing."""
        self._is_commit_wanted.clear()
        behind = self.progress.list_behind()
        if not behind:
            self._call(self._answer, None)
            return
        try:
            self._client.commit(offsets=_as_offsets(behind), asynchronous=True)
        except KafkaException as error:
            self._call(self._answer, error.args[0])

    # -- what the client calls while it is polled --------------------------------------------------------------------

    def _assign(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        if self._begins_at_end:
            self._commit_ends(client, partitions)
        self.progress.assign(_as_places(partitions))

    def _commit_ends(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit where partitions without an offset begin, which the client asks for next.

        A restart would else begin at another end, and lose what came in between. An error ends this membership.
        """
        timeout = self._settings.timeout
        ends: list[TopicPartition] = []
        for each in client.committed(partitions, timeout=timeout):
            if each.error is not None:
                raise KafkaException(each.error)
            if each.offset < 0:
                _, end = client.get_watermark_offsets(TopicPartition(each.topic, each.partition), timeout=timeout)
                ends.append(TopicPartition(each.topic, each.partition, end))
        if ends:
            for each in client.commit(offsets=ends, asynchronous=False) or []:
                if each.error is not None:
                    raise KafkaException(each.error)

    def _revoke(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        parts = self._give_up(partitions, is_lost=False)
        behind = self.progress.list_behind(parts)
        self.progress.revoke(parts)
        if behind and self.down is None and not self._has_commit_failed:
            try:
                client.commit(offsets=_as_offsets(behind), asynchronous=False)
            except KafkaException as error:
                log.info(
                    "Source %s: what was done last comes again, it could not be committed: %s",
                    self._name,
                    describe(error.args[0]),
                )
        self._call(self._answer, None)

    def _lose(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self.progress.revoke(self._give_up(partitions, is_lost=True))
        self._call(self._answer, None)

    def _give_up(self, partitions: list[TopicPartition], *, is_lost: bool) -> list[Part]:
        places = _as_places(partitions)
        # A partition that is still paused when it is assigned again would start where it was paused.
        self._resume(places)
        parts = self.progress.find(places)
        self.progress.leave(parts)
        if is_lost:
            self.progress.revoke(parts)
        if self._is_abandoned:
            return parts
        self._is_withdrawing = True
        self._call(self._answer, None)
        withdraw = self._withdraw(parts, is_lost)
        try:
            asyncio.run_coroutine_threadsafe(withdraw, self._loop).result(timeout=self._patience + 1)
        except (TimeoutError, RuntimeError):
            if self._loop.is_closed():
                withdraw.close()
            log.warning("Source %s: the event loop stood still while partitions were taken away.", self._name)
        finally:
            self._is_withdrawing = False
        return parts

    def _note_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            error = error or each.error
            if error is None:
                self.progress.note_committed(each.topic, each.partition, each.offset)
        self._has_commit_failed = error is not None and error.code() not in _REBALANCING
        self._call(self._answer, error)

    def _note_error(self, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._ALL_BROKERS_DOWN:
            self._set_down(self._reason or error)
            return
        self._reason = error
        if code in REFUSED:
            self._set_down(error)
        if error.fatal():
            self.fail(describe(error))

    def _set_down(self, error: KafkaError) -> None:
        self.down = mask(describe(error), self._settings)
        self._wake()

    def fail(self, reason: str) -> None:
        """End this membership: what is not done of its messages comes again with another one."""
        self.failure = mask(reason, self._settings)
        self._stop.set()
        self._wake()

    def _wake(self) -> None:
        self._call(self._arrived.set)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop may be closed, if nobody waited for this thread.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _as_places(partitions: list[TopicPartition]) -> list[Place]:
    return [(each.topic, each.partition) for each in partitions]


def _as_offsets(behind: dict[Part, int]) -> list[TopicPartition]:
    return [TopicPartition(part.topic, part.partition, offset) for part, offset in behind.items()]


def _as_partitions(places: list[Place]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for topic, partition in places]
