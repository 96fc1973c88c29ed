"""What the sync service is told: which queues there are, where their tables go, and how fast.

One app is one folder of queue files (or one file), one target is one remote database. A value that cannot be meant is
refused when the object is made. Numbers are in the units of `outbox.toml`, whose keys these fields are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from os.path import realpath
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from pillarbox.errors import ConfigError
from pillarbox.sync.fields import (
    LONGEST_DAYS,
    LONGEST_SECONDS,
    check_fields,
    checked,
    choice,
    class_path,
    file_path,
    limit,
    number,
    or_none,
    override_limit,
    plain_name,
    switch,
    table_name,
    target_name,
    whole,
)
from pillarbox.values import check_known, show

if TYPE_CHECKING:
    from pillarbox.sync.writers import Writer

RETAIN_LOG_DAYS: Final = 30


@dataclass(frozen=True, slots=True)
class TableConfig:
    """A table that differs from its target's other tables; None is as they are."""

    name: str = field(metadata={"check": table_name})
    _: KW_ONLY
    inject_outbox_seq: bool | None = checked(or_none(switch))
    retain_log_days: int | None = checked(or_none(whole(0, LONGEST_DAYS)))

    def __post_init__(self) -> None:
        check_fields(f"Table {self.name!r}", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """What holds for one table on its way to one target; a limit of None is none."""

    inject_outbox_seq: bool
    retain_log_days: int
    batch_size: int
    max_attempts: int | None
    max_batch_bytes: int | None
    dead: Literal["park", "skip"]


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One remote database and the tables that go there.

    `inject_outbox_seq` is for all tables, or names those that get it. Of the overrides None is as the app has it, and
    False is no limit. `writer_class` (`module:Class`) is called with `connection`; without it `connection["url"]`
    chooses a writer of ours. `batches` and `dialect` say what the writer does not say of itself.
    """

    name: str = field(metadata={"check": target_name})
    tables: Sequence[str | TableConfig]
    _: KW_ONLY
    inject_outbox_seq: bool | Collection[str] = True
    writer_class: str | None = checked(or_none(class_path))
    connection: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    batches: Literal["atomic", "ordered", "single"] | None = checked(or_none(choice("atomic", "ordered", "single")))
    dialect: Literal["sqlite", "postgresql", "mysql"] | None = checked(or_none(choice("sqlite", "postgresql", "mysql")))
    batch_size: int | None = checked(or_none(whole(1)))
    max_attempts: int | Literal[False] | None = checked(override_limit)
    max_batch_bytes: int | Literal[False] | None = checked(override_limit)
    retain_log_days: int | None = checked(or_none(whole(0, LONGEST_DAYS)))
    dead: Literal["park", "skip"] | None = checked(or_none(choice("park", "skip")))

    def __post_init__(self) -> None:
        owner = f"Target {self.name!r}"
        check_fields(owner, self)
        object.__setattr__(self, "tables", _read_tables(owner, self.tables))
        object.__setattr__(self, "inject_outbox_seq", _read_inject(owner, self.inject_outbox_seq, self.table_names))
        object.__setattr__(self, "connection", _read_connection(owner, self.connection))

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self._tables())

    def should_inject(self, table: str) -> bool:
        """Whether inserts into this table carry `outbox_seq`."""
        for each in self._tables():
            if each.name == table and each.inject_outbox_seq is not None:
                return each.inject_outbox_seq
        chosen = self.inject_outbox_seq
        return chosen if isinstance(chosen, bool) else table in chosen

    def retain_days(self, table: str, default: int = RETAIN_LOG_DAYS) -> int:
        """How long the audit log of this table is kept: as the table says, else the target, else `default`."""
        own = next((each.retain_log_days for each in self._tables() if each.name == table), None)
        chosen = self.retain_log_days if own is None else own
        return default if chosen is None else chosen

    def _tables(self) -> Iterator[TableConfig]:
        return (each for each in self.tables if isinstance(each, TableConfig))


def _read_tables(owner: str, tables: object) -> tuple[TableConfig, ...]:
    if isinstance(tables, str) or not isinstance(tables, Iterable):
        raise ConfigError(f"{owner}, tables: expected names of tables, got {show(tables)}")
    try:
        read = tuple(each if isinstance(each, TableConfig) else TableConfig(each) for each in tables)
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from None
    if not read:
        raise ConfigError(f"{owner}, tables: expected at least one table, got none")
    names = [table.name for table in read]
    _refuse_twice(f"{owner}, tables", "table", names)
    return read


def _read_inject(owner: str, chosen: object, tables: Sequence[str]) -> bool | frozenset[str]:
    if isinstance(chosen, bool):
        return chosen
    if isinstance(chosen, str) or not isinstance(chosen, Collection):
        raise ConfigError(f"{owner}, inject_outbox_seq: expected true, false or names of tables, got {show(chosen)}")
    for name in chosen:
        check_known(name, tables, f"{owner}, inject_outbox_seq", kind="table")
    return frozenset(chosen)


def _read_connection(owner: str, connection: object) -> Mapping[str, Any]:
    if isinstance(connection, Mapping) and all(isinstance(key, str) for key in connection):
        return MappingProxyType(dict(connection))
    # What it was may be a secret: it is not shown.
    raise ConfigError(f"{owner}, connection: expected a table of options by name")


def _refuse_twice(where: str, kind: str, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {kind} {twice!r} is given twice; expected it once")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """The queues of one application, and where its tables go.

    They are files of their own in `db_dir`, or all in `db_file`, the application's database. Targets are called
    `app.db`; an app without a name, which must be the only one, leaves their names as they are.
    """

    name: str = checked(lambda value: value if value == "" else plain_name(value), "")
    db_dir: Path | None = field(default=None, metadata={"check": or_none(file_path)})
    db_file: Path | None = field(default=None, metadata={"check": or_none(file_path)})
    targets: Sequence[TargetConfig] = ()
    batch_size: int = checked(whole(1), 500)
    flush_interval: float = checked(number(LONGEST_SECONDS), 1.0)
    table_flush_threshold: int = checked(whole(1), 15)
    table_max_wait: float = checked(number(LONGEST_SECONDS, can_be_zero=True), 6.0)
    auto_schema: bool = checked(switch, True)
    cleanup_every: int = checked(whole(1, 1_000_000), 500)
    retain_log_days: int = checked(whole(0, LONGEST_DAYS), RETAIN_LOG_DAYS)
    max_attempts: int | None = checked(limit, 10)
    max_pending: int | None = checked(limit)
    max_batch_bytes: int | None = checked(limit)
    backoff_seconds: float = checked(number(LONGEST_SECONDS), 1.0)
    backoff_cap_minutes: float = checked(number(LONGEST_SECONDS / 60), 64.0)
    dead: Literal["park", "skip"] = checked(choice("park", "skip"), "park")
    durability: Literal["normal", "full"] = checked(choice("normal", "full"), "normal")

    def __post_init__(self) -> None:
        owner = f"App {self.name!r}" if self.name else "App"
        check_fields(owner, self)
        if (self.db_dir is None) == (self.db_file is None):
            got = "neither" if self.db_dir is None else "both"
            raise ConfigError(f"{owner}: expected db_dir (a folder) or db_file (one file), got {got}")
        object.__setattr__(self, "targets", tuple(self._qualify(owner, each) for each in self.targets))
        _refuse_twice(f"{owner}, targets", "target", [target.name for target in self.targets])

    def _qualify(self, owner: str, target: object) -> TargetConfig:
        if not isinstance(target, TargetConfig):
            raise ConfigError(f"{owner}, targets: expected TargetConfig objects, got {type(target).__name__}")
        app, dot, _ = target.name.rpartition(".")
        if not self.name or app == self.name:
            return target
        if dot:
            raise ConfigError(f"{owner}, targets: expected names such as '{self.name}.db', got {target.name!r}")
        return replace(target, name=f"{self.name}.{target.name}")

    @property
    def folder(self) -> Path:
        """Where the queue files are."""
        return self.db_dir if self.db_dir is not None else self.db_file.parent  # type: ignore[union-attr]

    def queue_file(self, table: str) -> Path:
        """The file that holds the queue of a table."""
        return self.db_file if self.db_file is not None else self.folder / f"{table}.db"

    @property
    def tables(self) -> tuple[str, ...]:
        """Every table of the app once, in the order of its targets."""
        return tuple(dict.fromkeys(name for target in self.targets for name in target.table_names))

    def settings_for(self, target: TargetConfig, table: str) -> TableSettings:
        """What holds for a table on its way to a target: as the table says, else the target, else the app."""
        return TableSettings(
            inject_outbox_seq=target.should_inject(table),
            retain_log_days=target.retain_days(table, self.retain_log_days),
            batch_size=self.batch_size if target.batch_size is None else target.batch_size,
            max_attempts=_inherit(target.max_attempts, self.max_attempts),
            max_batch_bytes=_inherit(target.max_batch_bytes, self.max_batch_bytes),
            dead=self.dead if target.dead is None else target.dead,
        )


def _inherit(own: int | Literal[False] | None, inherited: int | None) -> int | None:
    if own is None:
        return inherited
    return None if own is False else own


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """Everything that one sync service looks after; `path` is the file it was read from, if there was one."""

    apps: Sequence[AppConfig]
    path: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "apps", tuple(self.apps))
        if not self.apps:
            raise ConfigError("Sync: expected at least one app, got none")
        if len(self.apps) > 1 and not all(app.name for app in self.apps):
            raise ConfigError("Sync: expected a name for each of several apps, got one without")
        _refuse_twice("Sync", "app", [app.name for app in self.apps])
        _refuse_shared_files(self.apps)

    @classmethod
    def single(
        cls, db_dir: str | Path | None, targets: Iterable[TargetConfig] = (), *, name: str = "", **tuning: Any
    ) -> SyncConfig:
        """Make the configuration of one app; `tuning` are further fields of `AppConfig`."""
        for key in tuning:
            check_known(key, [item.name for item in fields(AppConfig)], "SyncConfig.single", kind="option")
        folder = None if db_dir is None else Path(db_dir)
        return cls((AppConfig(name=name, db_dir=folder, targets=tuple(targets), **tuning),))

    @property
    def targets(self) -> tuple[TargetConfig, ...]:
        return tuple(target for app in self.apps for target in app.targets)

    def tables_for_target(self, name: str) -> tuple[str, ...]:
        """The names of the tables that go to a target; none if there is no such target."""
        return next((target.table_names for target in self.targets if target.name == name), ())

    def targets_for_table(self, table: str) -> tuple[TargetConfig, ...]:
        """The targets that a table goes to, in order; several when it goes to several."""
        return tuple(target for target in self.targets if table in target.table_names)

    def all_tables(self) -> tuple[str, ...]:
        """Every table name once, in the order of the targets."""
        return tuple(dict.fromkeys(name for app in self.apps for name in app.tables))

    def schema_sql(self) -> dict[str, list[str]]:
        """The statements that add what the service needs to the remote databases, by target.

        That is `outbox_seq` for the tables that get it and, for a transactional writer, the table of marks.
        """
        from pillarbox.sync.making import find_dialect, is_atomic
        from pillarbox.sync.remote_sql import marks_ddl, schema_sql

        found: dict[str, list[str]] = {}
        for target in self.targets:
            dialect = find_dialect(target, self.path)
            marks = [marks_ddl(dialect)] if is_atomic(target, self.path) else []
            found[target.name] = [*marks, *schema_sql(_injected(target, True), dialect)]
        return found

    def drop_schema_sql(self) -> dict[str, list[str]]:
        """The statements that take `outbox_seq` from the remote tables that do not get it, by target."""
        from pillarbox.sync.making import find_dialect
        from pillarbox.sync.remote_sql import drop_schema_sql

        return {
            each.name: drop_schema_sql(_injected(each, False), find_dialect(each, self.path)) for each in self.targets
        }

    def make_writers(self) -> dict[str, Writer]:
        """Make the writer of every target, by the target's name; nothing is connected yet."""
        from pillarbox.sync.making import make_writer

        return {target.name: make_writer(target, self.path) for target in self.targets}


def _injected(target: TargetConfig, is_injected: bool) -> list[str]:
    return [table for table in target.table_names if target.should_inject(table) == is_injected]


def _refuse_shared_files(apps: Sequence[AppConfig]) -> None:
    # Two apps that read one queue would each take the other's rows for their own.
    owners: dict[tuple[str, str], str] = {}
    for app in apps:
        for table in app.tables:
            place = realpath(app.queue_file(table))
            other = owners.setdefault((place, table), app.name)
            if other != app.name:
                raise ConfigError(
                    f"Apps {other!r} and {app.name!r}: expected queues of their own, both have {table!r} in {place!r}"
                )
