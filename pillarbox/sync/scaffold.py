"""The files that a new sync service starts from: they run as they are, and nothing that is there is overwritten.

The stand-in for the remote database is a SQLite file, so that a first statement arrives before any account is made.
"""

from __future__ import annotations

import contextlib
import sqlite3
from os.path import lexists
from pathlib import Path
from typing import Final

from pillarbox.errors import ConfigError

OUTBOX_TOML: Final = """\
# The sync service: `pillarbox sync run --config outbox.toml`. Your application pushes statements for it:
#
#     from pillarbox.sync import SqlQueue
#
#     with SqlQueue.from_toml("outbox.toml") as queue:
#         queue.push("events", "INSERT INTO events (id, name) VALUES (?, ?)", [1, "first"])
#
# ${NAME} and ${NAME:-default} in any text come from the environment, else from a .env file beside this one, else from
# Doppler when DOPPLER_TOKEN is set. $${ is a plain ${. Relative paths start at this file's folder. What is commented
# out is the default.

[app.app]
db_dir = "data"                  # a queue file for each table: data/events.db
# db_file = "app.db"             # instead: all queues in the database file of your application
# batch_size = 500               # statements of a table in one go
# max_batch_bytes = false        # and how large they may be together; false is no limit
# table_flush_threshold = 15     # so many waiting statements are sent at once;
# table_max_wait = 6.0           # fewer wait for others up to so many seconds: a single push arrives after 6 s. Less
#                                # lowers that; 0, or a threshold of 1, sends every push at once
# flush_interval = 1.0           # seconds between looks at the queue; a push wakes the service earlier
# max_attempts = 10              # then a statement is dead; false is for ever
# dead = "park"                  # its table waits behind it; "skip" goes on without it
# backoff_seconds = 1.0          # the pause after a first failure; it doubles
# backoff_cap_minutes = 64       # up to this
# max_pending = false            # statements of a table that may wait; a push beyond them fails
# durability = "normal"          # "full" also survives the loss of power, and pushes are slower
# auto_schema = true             # add the column outbox_seq to the remote tables
# retain_log_days = 30           # how long the local record of what was delivered is kept;
# cleanup_every = 500            # looked through after so many flush intervals

# One remote database. The service calls it app.main.
[app.app.db.main]
tables = [
    "events",
    # { name = "raw_log", inject_outbox_seq = false, retain_log_days = 7 },
]
# inject_outbox_seq = true       # false, or a list of tables: whose INSERTs carry their number
# batch_size, max_batch_bytes, max_attempts, dead and retain_log_days may differ from the app's here.
# writer_class = "sync_config:ExampleWriter"   # a class of yours, called with the connection table
# batches = "atomic"             # what it does not say of itself: "atomic", "ordered" or "single"
# dialect = "sqlite"             # "sqlite", "postgresql" or "mysql"

[app.app.db.main.connection]
url = "sqlite:///remote.db"      # postgresql://, mysql://, mariadb://, sqlite:/// or libsql://
# url = "libsql://${TURSO_HOST}"
# auth_token = "${TURSO_TOKEN}"
# path = "/srv/sync/remote.db"   # instead of all this, for ExampleWriter
"""

SYNC_CONFIG: Final = '''\
"""The sync service configured in Python, for what outbox.toml cannot say: secrets or writers of your own.

Run it with `python run_sync.py`, or `python run_sync.py --drain` to empty the queues and end. Your application pushes
statements into the same folder:

    from pillarbox.sync import SqlQueue

    with SqlQueue("data") as queue:
        queue.push("events", "INSERT INTO events (id, name) VALUES (?, ?)", [1, "first"])
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pillarbox.sync import SyncConfig, TargetConfig

FOLDER = Path(__file__).resolve().parent

config = SyncConfig.single(
    FOLDER / "data",
    [
        TargetConfig("main", ("events",)),
        # TargetConfig("billing", ("invoices", "payments"), inject_outbox_seq=frozenset({"invoices"})),
    ],
    name="app",
)


class ExampleWriter:
    """Writes to one SQLite file. Put the client of your database in its place."""

    batches = "atomic"  # One call is one transaction. If yours is not, leave this out.
    dialect = "sqlite"

    def __init__(self, path: str) -> None:
        self._path = path

    async def write_batch(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[Mapping[str, Any]]:
        """Return one result a statement. Raise when the database cannot be reached: all are tried again."""
        return await asyncio.to_thread(self._write, statements)

    def _write(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[Mapping[str, Any]]:
        results: list[Mapping[str, Any]] = []
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for sql, args in statements:
                try:
                    cursor = connection.execute(sql, [_to_sqlite(arg) for arg in args])
                    rows = [list(row) for row in cursor]
                except sqlite3.Error as error:
                    # Closing undoes what the others did.
                    return [*results, {"ok": False, "error": str(error)}]
                is_query = cursor.description is not None
                results.append({"ok": True, **({"rows": rows} if is_query else {"rows_affected": cursor.rowcount})})
            connection.execute("COMMIT")
        return results


def _to_sqlite(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def make_writers() -> dict[str, ExampleWriter]:
    """One writer for each target, by its name."""
    return {"app.main": ExampleWriter(str(FOLDER / "remote.db"))}
'''

RUN_SYNC: Final = '''\
"""Runs the sync service that sync_config.py configures, until SIGTERM or Ctrl+C; with --drain until nothing waits."""

from __future__ import annotations

import asyncio
import json
import logging.config
import signal
import sys
from pathlib import Path

from pillarbox.sync import SyncService

from sync_config import config, make_writers


async def main(*, is_drain: bool) -> int:
    service = SyncService(config, make_writers())
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, service.stop)
    if not is_drain:
        await service.run()
        return 0
    waiting = await service.drain()
    return 1 if any(waiting.values()) else 0


if __name__ == "__main__":
    logging.config.dictConfig(json.loads(Path(__file__).with_name("logging.json").read_text(encoding="utf-8")))
    sys.exit(asyncio.run(main(is_drain="--drain" in sys.argv[1:])))
'''

LOGGING_JSON: Final = """\
{
    "version": 1,
    "disable_existing_loggers": false,
    "formatters": {
        "plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    },
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}
    },
    "root": {"level": "INFO", "handlers": ["console"]}
}
"""

GITIGNORE: Final = """\
*
!.gitignore
"""

_OURS: Final = {"outbox.toml": OUTBOX_TOML, "sync_config.py": SYNC_CONFIG, "run_sync.py": RUN_SYNC}
_KEPT: Final = {"logging.json": LOGGING_JSON, "data/.gitignore": GITIGNORE}


def write_scaffold(folder: str | Path) -> list[Path]:
    """Write the files of a new service into a folder and return those that were made.

    Raises `ConfigError`, with nothing written, when a configuration is there already. A logging.json, a data folder
    and a remote.db that are there stay as they are.
    """
    root = Path(folder)
    for name in _OURS:
        if lexists(root / name):
            raise ConfigError(f"{root / name}: it is there already and is not overwritten. Choose another folder")
    try:
        (root / "data").mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{error.filename}: expected a folder, but it is a file. Choose another folder") from None
    texts = {root / name: text for name, text in (_OURS | _KEPT).items() if not lexists(root / name)}
    for path, text in texts.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    remote = root / "remote.db"
    return [*texts, *([_make_remote(remote)] if not lexists(remote) else [])]


def _make_remote(path: Path) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    return path
