"""The real omni-box beside us: its tables, its repositories and its worker, in a process with a Python of its own.

    with OmniBox(url, schema) as peer:
        peer.call("create")
        peer.call("claim", table="outbox", limit=10)

What it raises is raised here as `OmniBoxFailed`, with its class and text. See `omnibox_worker.py` for what it can do.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import sqlalchemy as sa

from pillarbox import Outbox
from pillarbox.inbox import Inbox
from tests.peers.environment import make_environment

RELEASE: Final = "0.3.1"
TABLES: Final = {
    "outbox": "outbox_events",
    "outbox-partitioned": "outbox_events_partitioned",
    "inbox": "inbox_events",
    "inbox-partitioned": "inbox_events_partitioned",
}
"""The names that it gives to its tables itself."""


class OmniBoxFailed(Exception):
    """omni-box raised."""


class OmniBox:
    """A process with omni-box in it, and its tables in a schema of their own."""

    def __init__(self, url: sa.URL, schema: str) -> None:
        python = make_environment(f"omni-box-{RELEASE}-kafka", f"omni-box[kafka,postgres]=={RELEASE}", python=(3, 12))
        address = url.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
        worker = Path(__file__).with_name("omnibox_worker.py")
        self._process = subprocess.Popen(
            [str(python), str(worker), address, schema], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, verb: str, **options: Any) -> Any:
        """Let it do something, and return what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": verb, **options}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise OmniBoxFailed(f"its process ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise OmniBoxFailed(answer["error"])
        return answer["result"]

    def __enter__(self) -> OmniBox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The end of its input ends it.
        self._process.communicate(timeout=30)


class OmniBoxTables:
    """The tables that omni-box made, with our outboxes and inboxes on them."""

    def __init__(self, peer: OmniBox, url: sa.URL, schema: str) -> None:
        self.peer = peer
        self.url = url
        self.schema = schema
        self.engine = sa.create_engine(url.set(drivername="postgresql+psycopg"))

    def outbox(self, table: str) -> Outbox:
        layout = table.replace("outbox", "omnibox")
        return Outbox(sa.MetaData(), layout, table=TABLES[table], schema=self.schema)

    def inbox(self, table: str) -> Inbox:
        layout = table.replace("inbox", "omnibox")
        return Inbox(sa.MetaData(), layout, table=TABLES[table], schema=self.schema, queue=False)

    def run(self, table: str, sql: str, **params: Any) -> Any:
        """Run SQL with `{table}` for the table's name."""
        with self.engine.begin() as db:
            result = db.execute(sa.text(sql.format(table=f"{self.schema}.{TABLES[table]}")), params)
            return result.mappings().all() if result.returns_rows else result.rowcount

    def empty(self) -> None:
        for table in TABLES:
            self.run(table, "DELETE FROM {table}")

    def close(self) -> None:
        self.engine.dispose()
