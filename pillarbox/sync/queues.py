"""Which queues there are, and how operators open their files.

A queue is one namespace of one file. Looking never makes or changes anything, not even SQLite's own files beside it;
writing is one transaction, on a file that is there and is a queue.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from pillarbox.errors import PillarboxError, SchemaError
from pillarbox.sync.tables import ADD_SOURCE, DEAD, LOG, NEEDED, NEWEST_VERSION, QUEUE, STATE, queue_ddl

if TYPE_CHECKING:
    from pillarbox.sync.config import AppConfig, SyncConfig

T = TypeVar("T")

ALL_TARGETS: Final = "all"
"""The target of a file whose rows are copied to several targets."""

_PATIENCE: Final = 10.0
_BRIEFLY: Final = 0.1
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class QueueRef:
    """Where a table's rows wait: a namespace of a file, and the target they are for.

    `target` is empty when nobody said it. `is_expected` is false for what was merely found in a folder. The version of
    the application's own database is none of a queue's.
    """

    target: str
    table: str
    path: Path
    namespace: str
    max_pending: int | None = None
    is_expected: bool = True
    is_application_file: bool = False

    def __str__(self) -> str:
        return f"{self.target}/{self.table}" if self.target else self.table

    def is_unused(self, shape: Shape) -> bool:
        """Whether it is the application's database before anything was pushed, so that it has no table of ours."""
        return self.is_application_file and not shape.has(QUEUE)

    @property
    def options(self) -> str:
        """The options of the command line that choose this queue."""
        return f"--table {self.table}{f' --target {self.target}' if self.target else ''}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a database file has: the columns of those tables that are a queue's, and the names of the others.

    `version` is that of the schema, 0 where it is the application's.
    """

    version: int
    columns: Mapping[str, frozenset[str]]
    others: frozenset[str]

    def has(self, table: str, *columns: str) -> bool:
        return table in self.columns and self.columns[table].issuperset(columns)

    @property
    def is_empty(self) -> bool:
        return not self.columns and not self.others

    @property
    def is_foreign(self) -> bool:
        return not self.has(QUEUE, *NEEDED)

    @property
    def is_newer(self) -> bool:
        return self.version > NEWEST_VERSION and not self.is_foreign

    def describe_problem(self, path: Path) -> str | None:
        """Why the file cannot be used as a queue, as a sentence."""
        if self.is_empty:
            return f"File {str(path)!r} is a database without any table: nothing was ever stored in it, or it was cut."
        if not self.has(QUEUE):
            return f"File {str(path)!r} is not a queue: it has no table {QUEUE}."
        if self.is_foreign:
            lacking = ", ".join(sorted(NEEDED - self.columns[QUEUE]))
            return f"File {str(path)!r} is not a queue: its table {QUEUE} lacks {lacking}."
        if self.is_newer:
            return (
                f"File {str(path)!r} has schema version {self.version}; expected at most {NEWEST_VERSION}. "
                "A newer sqloutbox has changed it: use a Pillarbox that knows it."
            )
        return None


# -- finding -----------------------------------------------------------------------------------------------------------


def copy_path(queue: Path, target: str, table: str, *, is_application_file: bool = False) -> Path:
    """Where the copy of a table's queue for one target is."""
    return _copies_folder(queue, is_application_file) / target / f"{table}.db"


def _copies_folder(queue: Path, is_application_file: bool) -> Path:
    return queue.with_name(f"{queue.name}.targets") if is_application_file else queue.parent / "targets"


def find_queues(where: SyncConfig | Path) -> list[QueueRef]:
    """The queues of a configuration, whether their files exist or not; or those found in a folder, or in one file.

    A table that goes to several targets has its own file and one for each of them. Of a configuration those are listed
    too in which rows wait that go nowhere; they are not expected.
    """
    if isinstance(where, Path):
        return list(_look_around(where))
    expected = list(_read_config(where))
    return [*expected, *_find_strays(where, expected)]


def _read_config(config: SyncConfig) -> Iterator[QueueRef]:
    for app in config.apps:
        is_own = app.db_file is not None
        for table in app.tables:
            path = app.queue_file(table)
            targets = [target.name for target in app.targets if table in target.table_names]
            copies = {name: copy_path(path, name, table, is_application_file=is_own) for name in targets}
            if len(targets) == 1 and not copies[targets[0]].exists():
                yield QueueRef(targets[0], table, path, table, app.max_pending, is_application_file=is_own)
                continue
            yield QueueRef(ALL_TARGETS, table, path, table, app.max_pending, is_application_file=is_own)
            yield from (QueueRef(name, table, copy, table) for name, copy in copies.items())


def _find_strays(config: SyncConfig, expected: Iterable[QueueRef]) -> Iterator[QueueRef]:
    seen = {(realpath(ref.path), ref.namespace) for ref in expected}
    for app in config.apps:
        for target, path in _list_files(app):
            is_own = app.db_file is not None and not target
            for namespace in _list_waiting(path, is_copy=bool(target), is_application_file=is_own):
                place = (realpath(path), namespace)
                if place not in seen:
                    seen.add(place)
                    yield QueueRef(target, namespace, path, namespace, is_expected=False, is_application_file=is_own)


def _list_files(app: AppConfig) -> Iterator[tuple[str, Path]]:
    files = [app.db_file] if app.db_file is not None else sorted(app.folder.glob("*.db"))
    copies = _copies_folder(app.queue_file("any"), app.db_file is not None)
    yield from (("", path) for path in files if path.is_file())
    yield from ((path.parent.name, path) for path in sorted(copies.glob("*/*.db")) if path.is_file())


def _list_waiting(path: Path, *, is_copy: bool, is_application_file: bool) -> list[str]:
    def read(db: sqlite3.Connection) -> list[str]:
        if read_shape(db, is_application_file=is_application_file).is_foreign:
            return []
        first = f"SELECT 1 FROM {QUEUE} WHERE namespace = ? AND synced = 0 LIMIT 1"
        return [name for name in _each_namespace(db, QUEUE) if db.execute(first, (name,)).fetchone()]

    try:
        return look(path, read, patience=_BRIEFLY)
    except (sqlite3.Error, OSError):
        # A copy is ours for certain; any other file here may be anything.
        return [path.stem] if is_copy else []


def _look_around(where: Path) -> Iterator[QueueRef]:
    if not where.exists():
        raise PillarboxError(f"Folder {str(where)!r} does not exist; expected a folder of queue files, or one file.")
    files = [where] if where.is_file() else sorted(path for path in where.glob("*.db") if path.is_file())
    copies = Path(f"{where}.targets") if where.is_file() else where / "targets"
    found = [("", path) for path in files]
    found += [(path.parent.name, path) for path in sorted(copies.glob("*/*.db"))]
    for target, path in found:
        for namespace in _list_namespaces(path):
            yield QueueRef(target, namespace, path, namespace, is_expected=False)


def _list_namespaces(path: Path) -> list[str]:
    try:
        return look(path, _read_namespaces) or [path.stem]
    except sqlite3.Error:
        return [path.stem]


def _read_namespaces(db: sqlite3.Connection) -> list[str]:
    shape = read_shape(db)
    if shape.is_foreign:
        return []
    found: set[str] = set()
    for table in (QUEUE, LOG, DEAD, STATE):
        if shape.has(table, "namespace"):
            found.update(_each_namespace(db, table))
    return sorted(found)


def _each_namespace(db: sqlite3.Connection, table: str) -> list[str]:
    # From one namespace to the next through the index, however many rows each has.
    names = db.execute(
        f"WITH RECURSIVE named(name) AS (SELECT min(namespace) FROM {table} UNION ALL SELECT "
        f"(SELECT min(namespace) FROM {table} WHERE namespace > name) FROM named WHERE name IS NOT NULL) "
        "SELECT name FROM named WHERE name IS NOT NULL"
    )
    return [name for (name,) in names]


def choose_queues(queues: Iterable[QueueRef], *, target: str | None, table: str | None) -> list[QueueRef]:
    """Those of a target, of a table, or of both; a name that nobody has is an error that lists the names."""
    listed = list(queues)
    for name, chosen, attribute in (("target", target, "target"), ("table", table, "table")):
        known = sorted({getattr(each, attribute) for each in listed} - {""})
        if chosen is not None and chosen not in known:
            raise PillarboxError(f"There is no {name} {chosen!r} here; there is: {', '.join(known) or 'none'}.")
    return [each for each in listed if target in (None, each.target) and table in (None, each.table)]


# -- opening -----------------------------------------------------------------------------------------------------------


def read_shape(db: sqlite3.Connection, *, is_application_file: bool = False) -> Shape:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    columns = {
        table: frozenset(row[1] for row in db.execute(f"PRAGMA table_info({table})"))
        for table in (QUEUE, LOG, DEAD, STATE)
        if table in names
    }
    others = frozenset(name for name in names if name not in columns and not name.startswith("sqlite_"))
    # A file with tables of somebody else is the application's own database, and so is its version.
    is_application_file = is_application_file or any(not name.startswith("outbox_") for name in others)
    return Shape(0 if is_application_file else version, columns, others)


def look(path: Path, read: Callable[[sqlite3.Connection], T], *, patience: float | None = None) -> T:
    """Call `read` with a connection that cannot write, in one snapshot.

    A file that nobody has open is read as it lies: to open it as others do would leave SQLite's files beside it, and
    they would be the operator's. If somebody comes in meanwhile, it is read once more. `patience` is for how many
    seconds a locked file is waited for. Raises `sqlite3.Error`.
    """
    patience = _PATIENCE if patience is None else patience
    for _ in range(_TRIES):
        before = _stamp(path)
        if before is None:
            break
        try:
            found = _read_once(path, "mode=ro&immutable=1", read, patience)
        except sqlite3.Error:
            if _stamp(path) == before:
                raise
            continue
        if _stamp(path) == before:
            return found
    return _read_once(path, "mode=ro", read, patience)


def _read_once(path: Path, mode: str, read: Callable[[sqlite3.Connection], T], patience: float) -> T:
    uri = f"{path.absolute().as_uri()}?{mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)) as db:
        db.execute("BEGIN")
        return read(db)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when the file does, if nobody has it open in WAL mode or is writing to it; else None."""
    if any(path.with_name(f"{path.name}{end}").exists() for end in ("-wal", "-journal")):
        return None
    # Its header would tell more. But to close a file takes away the locks that SQLite has on it in this process, and
    # the next program would delete the WAL that we are writing to.
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@contextmanager
def edit(ref: QueueRef) -> Iterator[sqlite3.Connection]:
    """One transaction on a queue; nothing is changed when it raises. What an old file lacks for it is added."""
    with edit_file(ref.path, is_application_file=ref.is_application_file) as db:
        shape = read_shape(db)
        if not shape.has(QUEUE, "source"):
            db.execute(ADD_SOURCE)
        if not shape.has(LOG):
            # Not the indexes of the queue: a chain that forks has none, and is what an operator is about to mend.
            for statement in queue_ddl():
                if f" {LOG} " in statement:
                    db.execute(statement)
        yield db


@contextmanager
def edit_file(path: Path, *, is_application_file: bool = False) -> Iterator[sqlite3.Connection]:
    """One transaction on a queue file as it is; a file that is none is an error, and so is one that is busy."""
    if not path.exists():
        raise PillarboxError(f"There is no file {str(path)!r}: nothing was pushed to this queue yet.")
    uri = f"{path.absolute().as_uri()}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            problem = read_shape(db, is_application_file=is_application_file).describe_problem(path)
            if problem is not None:
                raise SchemaError(problem)
            # Closing without the commit undoes everything.
            yield db
            db.execute("COMMIT")
    except sqlite3.Error as error:
        raise PillarboxError(describe_failure(path, error)) from error


def describe_failure(path: Path, error: Exception) -> str:
    """What SQLite says of a file, as a sentence."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"File {str(path)!r} is locked by another program for more than {_PATIENCE:.0f} seconds: {text}."
    return f"File {str(path)!r} cannot be used: {text}."
