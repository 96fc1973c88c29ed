"""How far a consumer has come in each of its partitions.

Kafka keeps one offset a partition: everything before it is done. So it moves up to the first message that is not done,
and what was done after that one waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


@dataclass(slots=True, eq=False)
class Part:
    """One partition for as long as it is ours without a break; assigned again it is another one."""

    topic: str
    partition: int
    unfinished: set[int] = field(default_factory=set)
    following: int = -1
    """The offset after the last one received."""
    committed: int = -1
    is_leaving: bool = False
    """Whether it is being given up: of what was received of it nothing more is begun."""
    is_revoked: bool = False

    @property
    def reached(self) -> int:
        """The offset before which everything is done."""
        return min(self.unfinished, default=self.following)

    @property
    def is_behind(self) -> bool:
        """Whether more is done than Kafka knows of."""
        return self.reached > self.committed


Place = tuple[str, int]


class Progress:
    """The partitions of one consumer; used by its thread and by the event loop's."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._parts: dict[Place, Part] = {}

    def assign(self, places: list[Place]) -> None:
        with self._lock:
            for topic, partition in places:
                self._parts[topic, partition] = Part(topic, partition)

    def leave(self, parts: list[Part]) -> None:
        with self._lock:
            for part in parts:
                part.is_leaving = True

    def revoke(self, parts: list[Part]) -> None:
        with self._lock:
            for part in parts:
                part.is_revoked = True
                self._parts.pop((part.topic, part.partition), None)

    def find(self, places: list[Place]) -> list[Part]:
        with self._lock:
            return [self._parts[place] for place in places if place in self._parts]

    def list_places(self) -> list[Place]:
        with self._lock:
            return list(self._parts)

    def receive(self, topic: str, partition: int, offset: int) -> Part | None:
        """Note a message; None when its partition is not ours any more."""
        with self._lock:
            part = self._parts.get((topic, partition))
            if part is not None:
                if not part.unfinished and part.following < 0:
                    # What lies before the first message was done by somebody before us.
                    part.committed = offset
                part.unfinished.add(offset)
                part.following = max(part.following, offset + 1)
            return part

    def finish(self, part: Part, offset: int) -> bool:
        """Note that a message is done; false when its partition was taken away before."""
        with self._lock:
            part.unfinished.discard(offset)
            return not part.is_revoked

    def list_behind(self, parts: list[Part] | None = None) -> dict[Part, int]:
        """The partitions of which Kafka is to hear, with their offsets."""
        with self._lock:
            chosen = list(self._parts.values()) if parts is None else parts
            return {part: part.reached for part in chosen if part.is_behind}

    def note_committed(self, topic: str, partition: int, offset: int) -> None:
        with self._lock:
            part = self._parts.get((topic, partition))
            if part is not None:
                part.committed = max(part.committed, offset)
