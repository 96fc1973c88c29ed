"""What a program pushes SQL statements into: a queue file for each table, or one file for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Final, Self

from pillarbox.errors import ConfigError, QueueError
from pillarbox.sync.arguments import encode_arguments
from pillarbox.sync.files import QueueFile, check_options
from pillarbox.sync.joined import JoinedConnection
from pillarbox.sync.opening import LOCK_TIMEOUT, Durability, complete_tables
from pillarbox.sync.pushing import Item, insert_first, insert_many
from pillarbox.sync.sharing import RenewedLock

Statement = tuple[str, Sequence[Any]]

_MAX_NAME: Final = 200


class SqlQueue:
    """Stores SQL statements for a service that replays them on a remote database, in order, table by table.

    Use it as it is or as a base of a class with methods of its own, whose name is then each row's `source` unless
    another is given. `db_dir` is a folder with a file for each table; `file` is one file for all, which may be the
    application's own database. Threads and processes may push at once. A push costs the same however many wait, and
    raises `QueueError` when nothing was stored: nothing is dropped silently.

    With durability "normal" a pushed row survives the death of the process; when the machine loses power the last
    rows may be lost, though never one from between. "full" syncs each push to the disk. `max_waiting` is the most rows
    of a table that may wait; above it `QueueFull` is raised.
    """

    _queue_files: dict[str, QueueFile] | None = None
    _queue_tables: tuple[str, ...] | None = None
    _queue_place = ""

    def __init__(
        self,
        db_dir: str | os.PathLike[str] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        source: str | None = None,
        durability: Durability = "normal",
        max_waiting: int | None = None,
        lock_timeout: timedelta = LOCK_TIMEOUT,
    ) -> None:
        if (db_dir is None) == (file is None):
            raise ConfigError(
                f"{type(self).__name__}: expected either db_dir, a folder with a file for each table, or file, one "
                f"file for all; got db_dir={db_dir!r} and file={file!r}"
            )
        check_options(durability, max_waiting)
        self._queue_dir = None if db_dir is None else os.path.abspath(db_dir)
        self._queue_path = None if file is None else os.path.realpath(file)
        self._queue_source = type(self).__name__ if source is None else source
        self._queue_options: dict[str, Any] = {"durability": durability, "lock_timeout": lock_timeout}
        self._queue_cap = max_waiting
        self._queue_lock = RenewedLock()
        self._queue_files = {}

    @classmethod
    def from_toml(
        cls, path: str | os.PathLike[str] = "outbox.toml", app: str | None = None, *, source: str | None = None
    ) -> Self:
        """Make the queue of one app of the service's file: its folder or file, its durability, its `max_pending`.

        The app's name may be left out where there is only one. Connections and their secrets are not read. A table
        that no target of the app names is refused: nobody would send its statements.
        """
        from pillarbox.sync.toml import load_sync_layout

        apps = load_sync_layout(os.fspath(path)).apps
        chosen = [each for each in apps if app is None or each.name == app]
        if len(chosen) != 1:
            names = ", ".join(each.name for each in apps)
            raise ConfigError(f"{os.fspath(path)}: expected the name of one app of {names}; got {app!r}")
        (found,) = chosen
        made = cls(
            found.db_dir,
            file=found.db_file,
            source=source,
            durability=found.durability,
            max_waiting=found.max_pending,
        )
        made._queue_tables, made._queue_place = found.tables, f"{os.fspath(path)}, app {found.name!r}"
        return made

    def push(self, table: str, sql: str, args: Sequence[Any] = ()) -> int:
        """Store a statement with the arguments of its `?` binds; returns its number when it is committed."""
        file = (self._queue_files or {}).get(table) or self.queue_file(table)
        check_sql(table, sql)
        return file.push(sql, encode_arguments(args), source=self._queue_source)

    def push_many(self, table: str, statements: Iterable[Statement]) -> list[int]:
        """Store statements in one transaction, all of them or none; returns their numbers in order."""
        file = self.queue_file(table)
        return file.push_many(encode_statements(table, statements), source=self._queue_source)

    def push_in(self, connection: Any, table: str, sql: str, args: Sequence[Any] = ()) -> int:
        """Store a statement in the caller's own transaction on the queue's file: it is pushed if that commits.

        `connection` is a `sqlite3.Connection`, or a SQLAlchemy Connection or Session on SQLite, connected to the file
        that holds the queue. It is refused when it would commit the row by itself: with `isolation_level=None` (or
        autocommit) execute BEGIN first. Where the driver begins by itself, a transaction is begun for the caller to
        commit. The tables must be there; see `create_in`.
        """
        check_sql(table, sql)
        payload = encode_arguments(args)
        joined = JoinedConnection(connection, self._path_of(table))
        source, cap = self._queue_source, self._queue_cap
        with joined.pushing():
            return insert_first(joined, sql, payload, namespace=table, source=source, cap=cap)

    def push_many_in(self, connection: Any, table: str, statements: Iterable[Statement]) -> list[int]:
        """Store statements in the caller's own transaction, all of them or none; see `push_in`."""
        items = encode_statements(table, statements)
        joined = JoinedConnection(connection, self._path_of(table))
        if not items:
            return []
        with joined.pushing():
            return insert_many(joined, items, namespace=table, source=self._queue_source, cap=self._queue_cap)

    def create_in(self, connection: Any) -> None:
        """Make the queue's tables in the application's database, in the open transaction if there is one."""
        path = self._queue_path
        if path is None:
            raise ConfigError("create_in: expected a queue in the application's database: SqlQueue(file=…)")
        joined = JoinedConnection(connection, path)
        complete_tables(joined.query, path, begins=False)

    def waiting(self, table: str) -> int:
        """How many statements of a table wait."""
        return self.queue_file(table).waiting()

    def queue_file(self, table: str) -> QueueFile:
        """The file of a table, created when it is not there."""
        known = (self._queue_files or {}).get(table)
        if known is not None:
            return known
        path = self._path_of(table)
        with self._queue_lock:
            files: dict[str, QueueFile] = self._queue_files or {}
            if table not in files:
                is_shared = self._queue_path is not None
                files[table] = QueueFile(
                    path, table, max_waiting=self._queue_cap, is_application_file=is_shared, **self._queue_options
                )
            self._queue_files = files
            return files[table]

    def close(self) -> None:
        """Close the files; a later push opens them again."""
        if self._queue_files is None:
            return
        with self._queue_lock:
            while self._queue_files:
                self._queue_files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path_of(self, table: str) -> str:
        if self._queue_files is None:
            name = type(self).__name__
            raise QueueError(
                f"{name} has no queue: its __init__ did not call that of SqlQueue. Nothing was stored; add "
                "`super().__init__(db_dir)`."
            )
        check_table(table)
        if self._queue_tables is not None and table not in self._queue_tables:
            raise self._unknown_table(table, self._queue_tables)
        if self._queue_path is not None:
            return self._queue_path
        assert self._queue_dir is not None
        return os.path.realpath(os.path.join(self._queue_dir, f"{table}.db"))

    def _unknown_table(self, table: str, known: tuple[str, ...]) -> QueueError:
        near = get_close_matches(table, known, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        return QueueError(
            f"{self._queue_place}: no target names table {table!r}, so nobody would send its statements; expected "
            f"{', '.join(known)}.{meant} Nothing was stored."
        )


def check_table(table: object) -> None:
    """Refuse what cannot name both a table and its file."""
    problem = None
    if not isinstance(table, str) or not table:
        problem = "expected text"
    elif "/" in table or "\\" in table or table.startswith("."):
        problem = "expected no path separator and no leading dot"
    elif any(ord(each) < 32 or ord(each) == 127 or 0xD800 <= ord(each) <= 0xDFFF for each in table):
        problem = "expected no control characters or surrogates"
    elif len(table.encode()) > _MAX_NAME:
        problem = f"expected at most {_MAX_NAME} bytes"
    if problem is not None:
        raise QueueError(f"Table {table!r} cannot name a queue file: {problem}. Nothing was stored.")


def check_sql(table: str, sql: object) -> None:
    """Refuse what no database can execute."""
    if not isinstance(sql, str) or not sql or sql.isspace() or "\0" in sql:
        raise QueueError(
            f"Table {table!r}: expected the text of one SQL statement, without NUL characters; got {sql!r}. "
            "Nothing was stored."
        )


def encode_statements(table: str, statements: Iterable[Statement]) -> list[Item]:
    """Check and encode statements before any of them is stored."""
    items = []
    for place, (sql, args) in enumerate(statements, 1):
        check_sql(table, sql)
        try:
            items.append((sql, encode_arguments(args)))
        except QueueError as error:
            raise QueueError(f"Statement {place}: {error}") from error
    return items
