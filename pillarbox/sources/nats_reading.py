"""What JetStream delivers, as a message."""

from __future__ import annotations

from dataclasses import replace

from nats.aio.msg import Msg

from pillarbox.sinks.nats_message import MESSAGE_ID
from pillarbox.sources.reading import Raw, Read, read_message


class MessageReader:
    """Reads the messages of one stream. `stream_id` and a message's number name it where it has no id of its own.

    `has_subject_keys` makes the subject the key of an event that has none.
    """

    def __init__(self, stream_id: str, *, has_subject_keys: bool) -> None:
        self.stream_id = stream_id
        self._has_subject_keys = has_subject_keys

    def read(self, message: Msg, number: int) -> Read:
        headers = message.headers or {}
        subject = message.subject.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raw = Raw(
            id=headers.get(MESSAGE_ID) or f"{self.stream_id}:{number}",
            topic=subject,
            body=message.data,
            # The server's own headers are orders to it, and no part of the event.
            headers={name: value for name, value in headers.items() if not name.lower().startswith("nats-")},
            key=subject if self._has_subject_keys else None,
            sent_at=message.metadata.timestamp,
            is_named_by_sender=bool(headers.get(MESSAGE_ID)),
        )
        read = read_message(raw)
        # The client puts this where a header's bytes are no text.
        damaged = [f"header {name!r}" for name, value in headers.items() if "\ufffd" in value]
        if subject != message.subject:
            damaged.append("its subject")
        if damaged and read.defect is None:
            return replace(read, defect=f"Message cannot be read: {damaged[0]} is no text")
        return read
