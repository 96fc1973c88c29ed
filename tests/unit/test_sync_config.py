"""The configuration of the sync service as Python objects: what holds, and what is refused with which words."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.config import AppConfig, SyncConfig, TableConfig, TableSettings, TargetConfig


def refuse_target(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        TargetConfig(**{"name": "main", "tables": ("events",), **options})
    return str(caught.value)


def refuse_app(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        AppConfig(**{"name": "shop", "db_dir": Path("data"), **options})
    return str(caught.value)


# -- objects -----------------------------------------------------------------------------------------------


def test_an_app_has_the_defaults_of_the_page() -> None:
    app = AppConfig(db_dir=Path("data"))
    assert (app.batch_size, app.flush_interval, app.table_flush_threshold, app.table_max_wait) == (500, 1.0, 15, 6.0)
    assert (app.auto_schema, app.cleanup_every, app.retain_log_days, app.max_attempts) == (True, 500, 30, 10)
    assert (app.max_pending, app.max_batch_bytes) == (None, None)
    assert (app.backoff_seconds, app.backoff_cap_minutes) == (1.0, 64.0)
    assert (app.dead, app.durability) == ("park", "normal")
    assert (app.name, app.db_file, app.targets) == ("", None, ())


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (AppConfig(db_dir=Path("data")), "batch_size"),
        (TargetConfig("main", ("events",)), "tables"),
        (TableConfig("events"), "name"),
        (SyncConfig.single("data"), "apps"),
    ],
    ids=["app", "target", "table", "sync"],
)
def test_a_configuration_is_frozen(config: Any, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(config, field, 1)


def test_a_target_injects_into_all_none_or_the_named_tables() -> None:
    tables = ("events", "metrics")
    everything = TargetConfig("main", tables)
    nothing = TargetConfig("main", tables, inject_outbox_seq=False)
    named = TargetConfig("main", tables, inject_outbox_seq=frozenset({"events"}))
    assert [everything.should_inject(table) for table in tables] == [True, True]
    assert [nothing.should_inject(table) for table in tables] == [False, False]
    assert [named.should_inject(table) for table in tables] == [True, False]


def test_a_table_overrides_what_its_target_injects() -> None:
    events = TableConfig("events", inject_outbox_seq=False)
    metrics = TableConfig("metrics", inject_outbox_seq=True)
    assert not TargetConfig("main", (events, "log")).should_inject("events")
    assert TargetConfig("main", ("log", metrics), inject_outbox_seq=["log"]).should_inject("metrics")


def test_retention_falls_back_from_table_to_target_to_app() -> None:
    own = TargetConfig("own", ("events", TableConfig("raw", retain_log_days=0)), retain_log_days=14)
    plain = TargetConfig("plain", ("events",))
    app = AppConfig(name="shop", db_dir=Path("data"), targets=(own, plain), retain_log_days=9)
    assert (own.retain_days("raw"), own.retain_days("events"), plain.retain_days("events")) == (0, 14, 30)
    assert app.settings_for(own, "raw").retain_log_days == 0
    assert app.settings_for(own, "events").retain_log_days == 14
    assert app.settings_for(plain, "events").retain_log_days == 9


def test_a_target_overrides_its_app() -> None:
    target = TargetConfig("main", ("events",), batch_size=7, max_attempts=2, max_batch_bytes=99, dead="skip")
    app = AppConfig(db_dir=Path("data"), targets=(target,))
    assert app.settings_for(target, "events") == TableSettings(
        inject_outbox_seq=True, retain_log_days=30, batch_size=7, max_attempts=2, max_batch_bytes=99, dead="skip"
    )


def test_a_target_without_overrides_is_as_its_app() -> None:
    target = TargetConfig("main", ("events",))
    app = AppConfig(db_dir=Path("data"), batch_size=8, max_attempts=3, max_batch_bytes=77, dead="skip")
    assert app.settings_for(target, "events") == TableSettings(
        inject_outbox_seq=True, retain_log_days=30, batch_size=8, max_attempts=3, max_batch_bytes=77, dead="skip"
    )
    assert replace(app, batch_size=9).settings_for(target, "events").batch_size == 9


@pytest.mark.parametrize("forever", [None, False])
def test_no_limit_is_none_or_false(forever: Any) -> None:
    app = AppConfig(db_dir=Path("data"), max_attempts=forever, max_pending=forever, max_batch_bytes=forever)
    assert (app.max_attempts, app.max_pending, app.max_batch_bytes) == (None, None, None)


def test_a_target_lifts_the_limits_of_its_app() -> None:
    target = TargetConfig("main", ("events",), max_attempts=False, max_batch_bytes=False)
    settings = AppConfig(db_dir=Path("data"), max_attempts=3, max_batch_bytes=5).settings_for(target, "events")
    assert (settings.max_attempts, settings.max_batch_bytes) == (None, None)


def test_targets_are_called_by_app_and_db() -> None:
    app = AppConfig(name="shop", db_dir=Path("d"), targets=(TargetConfig("a", ("t",)), TargetConfig("shop.b", ("t",))))
    assert [target.name for target in app.targets] == ["shop.a", "shop.b"]
    assert [target.name for target in SyncConfig.single("d", [TargetConfig("a", ("t",))]).targets] == ["a"]


def test_a_table_may_go_to_two_targets() -> None:
    first = TargetConfig("first", ("events", "log"))
    second = TargetConfig("second", ("events",))
    config = SyncConfig.single("data", [first, second])
    assert config.targets_for_table("events") == (first, second)
    assert config.targets_for_table("log") == (first,)
    assert config.targets_for_table("other") == ()
    assert config.tables_for_target("first") == ("events", "log")
    assert config.tables_for_target("other") == ()
    assert config.all_tables() == ("events", "log")


def test_queues_are_files_in_a_folder_or_one_file() -> None:
    folder, single = AppConfig(db_dir=Path("data")), AppConfig(db_file=Path("data/app.sqlite"))
    assert (folder.queue_file("events"), folder.folder) == (Path("data/events.db"), Path("data"))
    assert (single.queue_file("events"), single.folder) == (Path("data/app.sqlite"), Path("data"))


def test_a_single_app_takes_tuning() -> None:
    app = SyncConfig.single("data", name="shop", batch_size=5, dead="skip").apps[0]
    assert (app.name, app.db_dir, app.batch_size, app.dead) == ("shop", Path("data"), 5, "skip")
    assert SyncConfig.single(None, db_file=Path("app.db")).apps[0].db_file == Path("app.db")
    with pytest.raises(ConfigError, match=r"unknown option 'batchsize'.*Did you mean 'batch_size'"):
        SyncConfig.single("data", batchsize=5)


# -- refused values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("batch_size", each) for each in (0, -1, True, 1.5, "5", None, 2**63)],
        *[("flush_interval", each) for each in (0, -1, True, "1", float("nan"), float("inf"), 10**400)],
        *[("table_flush_threshold", each) for each in (0, True)],
        *[("table_max_wait", each) for each in (-0.1, False, float("nan"))],
        *[("auto_schema", each) for each in (1, "true", None)],
        *[("cleanup_every", each) for each in (0, 2.0)],
        *[("retain_log_days", each) for each in (-1, True, 365_001, None)],
        *[("max_attempts", each) for each in (0, True, "10", 1.0)],
        *[("max_pending", each) for each in (0, True)],
        *[("max_batch_bytes", each) for each in (0, -5)],
        *[("backoff_seconds", each) for each in (0, float("nan"))],
        *[("backoff_cap_minutes", each) for each in (0, True, 10**9)],
        *[("dead", each) for each in ("drop", None, ["park"])],
        *[("durability", each) for each in ("off", None)],
        *[("name", each) for each in ("a.b", "a b", "a/b", "a\\b", "a\nb", None)],
    ],
)
def test_an_app_refuses_what_cannot_be_meant(field: str, value: object) -> None:
    text = refuse_app(**{field: value})
    assert f", {field}: expected " in text
    assert text.endswith(f", got {value!r}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("name", each) for each in ("", "a.b.c", ".b", "a b", "a/b", None)],
        *[("batch_size", each) for each in (0, True)],
        *[("max_attempts", each) for each in (0, True)],
        *[("max_batch_bytes", each) for each in (0, "5")],
        *[("retain_log_days", each) for each in (-1, 1.5)],
        *[("dead", each) for each in ("", "drop")],
        *[("batches", each) for each in ("all", True)],
        *[("dialect", each) for each in ("oracle", 5)],
        *[("writer_class", each) for each in ("module.Class", ":Class", "module:", 5)],
        *[("tables", each) for each in ("events", 5, None)],
        *[("inject_outbox_seq", each) for each in ("events", 1, None)],
    ],
)
def test_a_target_refuses_what_cannot_be_meant(field: str, value: object) -> None:
    text = refuse_target(**{field: value})
    assert f", {field}: expected " in text
    assert text.endswith(f", got {value!r}")


@pytest.mark.parametrize("name", ["", " events", "events ", "a/b", "..", ".hidden", "a\\b", "a\0b", 5])
def test_a_table_name_that_is_no_file_name_is_refused(name: Any) -> None:
    assert "Target 'main': Table" in refuse_target(tables=[name])


@pytest.mark.parametrize("name", ["e", "events", "sales.orders", "Größe", "order items"])
def test_other_table_names_are_taken(name: str) -> None:
    assert TargetConfig("main", [name]).table_names == (name,)


def test_a_table_twice_in_a_target_is_refused() -> None:
    assert "table 'events' is given twice" in refuse_target(tables=("events", "log", TableConfig("events")))


def test_no_tables_are_refused() -> None:
    assert "tables: expected at least one table" in refuse_target(tables=())


def test_injection_into_an_unknown_table_is_refused() -> None:
    assert "unknown table 'event'" in refuse_target(inject_outbox_seq={"event"})


def test_a_folder_and_a_file_exclude_each_other() -> None:
    assert "App 'shop': expected db_dir (a folder) or db_file (one file), got both" in refuse_app(db_file=Path("x"))
    assert "got neither" in refuse_app(db_dir=None)


def test_targets_of_one_name_are_refused() -> None:
    twice = (TargetConfig("main", ("a",)), TargetConfig("shop.main", ("b",)))
    assert "target 'shop.main' is given twice" in refuse_app(targets=twice)


def test_a_target_of_another_app_is_refused() -> None:
    assert "got 'bank.main'" in refuse_app(targets=(TargetConfig("bank.main", ("a",)),))


def test_no_app_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one app"):
        SyncConfig(())


def test_several_apps_need_names() -> None:
    with pytest.raises(ConfigError, match="a name for each of several apps"):
        SyncConfig((AppConfig(db_dir=Path("a")), AppConfig(name="b", db_dir=Path("b"))))


@pytest.mark.parametrize(
    "second",
    [{"db_dir": Path("data")}, {"db_dir": Path("data/../data")}, {"db_file": Path("data/events.db")}],
    ids=["the-same-folder", "spelled-otherwise", "one-of-its-files"],
)
def test_apps_cannot_share_queues(second: dict[str, Any]) -> None:
    targets = (TargetConfig("main", ("events",)),)
    first = AppConfig(name="a", db_dir=Path("data"), targets=targets)
    with pytest.raises(ConfigError, match="Apps 'a' and 'b': expected queues of their own"):
        SyncConfig((first, AppConfig(name="b", targets=targets, **second)))


def test_apps_may_share_a_folder_for_different_tables() -> None:
    first = AppConfig(name="a", db_dir=Path("data"), targets=(TargetConfig("main", ("events",)),))
    second = AppConfig(name="b", db_dir=Path("data/../data"), targets=(TargetConfig("main", ("metrics",)),))
    assert SyncConfig((first, second)).all_tables() == ("events", "metrics")


def test_apps_may_have_the_same_tables_in_folders_of_their_own() -> None:
    targets = (TargetConfig("main", ("events",)),)
    apps = [AppConfig(name=name, db_dir=Path(name), targets=targets) for name in ("a", "b")]
    config = SyncConfig(apps)
    assert [target.name for target in config.targets_for_table("events")] == ["a.main", "b.main"]
    assert config.all_tables() == ("events",)


def test_connections_are_not_shown() -> None:
    target = TargetConfig("main", ("events",), connection={"url": "postgresql://me:hunter22@db/x"})
    assert "hunter22" not in repr(SyncConfig.single("data", [target]))
    assert "hunter22" not in refuse_target(connection=[("url", "hunter22")])


# -- statements for the remote tables ----------------------------------------------------------------------


def test_schema_statements_cover_exactly_the_injected_tables() -> None:
    config = SyncConfig.single(
        "data",
        [
            TargetConfig("all", ("events", "metrics"), dialect="postgresql"),
            TargetConfig("none", ("raw",), inject_outbox_seq=False),
            TargetConfig("some", ("events", "raw"), inject_outbox_seq=frozenset({"events"})),
        ],
    )
    column = 'ALTER TABLE "events" ADD COLUMN outbox_seq INTEGER NOT NULL DEFAULT 0'
    index = 'CREATE UNIQUE INDEX IF NOT EXISTS "idx_events_outbox_seq" ON "events" (outbox_seq) WHERE outbox_seq <> 0'
    added, dropped = config.schema_sql(), config.drop_schema_sql()
    assert (added["none"], added["some"]) == ([], [column, index])
    assert [text.split('"')[1] for text in added["all"] if text.startswith("ALTER")] == ["events", "metrics"]
    assert "BIGINT" in added["all"][0]
    assert dropped["all"] == []
    assert [
        text for each in ("none", "some") for text in dropped[each] if "raw" not in text or "DROP" not in text
    ] == []
    assert len(dropped["none"]) == len(dropped["some"]) == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "INTEGER"),
        ({"connection": {"url": "sqlite:///x.db"}}, "INTEGER"),
        ({"connection": {"url": "libsql://db.turso.io"}}, "INTEGER"),
        ({"connection": {"url": "postgresql+psycopg://db/x"}}, "BIGINT NOT NULL"),
        ({"connection": {"url": "mariadb://db/x"}}, "BIGINT NULL"),
        ({"connection": {"url": "mysql://db/x"}, "dialect": "sqlite"}, "INTEGER"),
        ({"writer_class": "tests.unit.test_sync_config:MysqlLike"}, "BIGINT NULL"),
    ],
)
def test_schema_statements_are_in_the_dialect_of_the_target(options: dict[str, Any], kind: str) -> None:
    target = TargetConfig("main", ("events",), **options)
    *marks, column, _ = SyncConfig.single("data", [target]).schema_sql()["main"]
    assert f"ADD COLUMN outbox_seq {kind}" in column.replace("IF NOT EXISTS ", "")
    assert [text.split(" (")[0] for text in marks] == (
        ["CREATE TABLE IF NOT EXISTS pillarbox_sync_marks"] if "connection" in options else []
    )


class MysqlLike:
    dialect = "mysql"

    async def write_batch(self, statements: Any) -> Any:
        return [{"ok": True} for _ in statements]


@pytest.mark.parametrize("url", ["${DB_URL}", "${SCHEME}://db/x"])
def test_a_dialect_is_not_guessed_from_a_url_that_was_not_filled_in(url: str) -> None:
    target = TargetConfig("main", ("events",), connection={"url": url})
    with pytest.raises(ConfigError, match="Target 'main': its dialect is not known without its url"):
        SyncConfig.single("data", [target]).schema_sql()


# -- writers -----------------------------------------------------------------------------------------------


def refuse_writer(**options: Any) -> str:
    config = SyncConfig.single("data", [TargetConfig("main", ("events",), **options)])
    with pytest.raises(ConfigError) as caught:
        config.make_writers()
    return str(caught.value)


def test_a_url_chooses_a_writer() -> None:
    target = TargetConfig("main", ("events",), connection={"url": "sqlite:///remote.db"})
    assert list(SyncConfig.single("data", [target]).make_writers()) == ["main"]


def test_a_target_without_a_writer_is_refused() -> None:
    assert refuse_writer() == "Target 'main': expected a writer_class, or a url in its connection; got neither"


@pytest.mark.parametrize(
    "options",
    [
        {"connection": {"url": "kafka://me:hunter22@db/x"}},
        {"connection": {"url": "sqlite:///x", "pasword": "hunter22"}},
        {"connection": {"token": "hunter22"}, "writer_class": "tests.unit.test_sync_config:MysqlLike"},
        {"connection": {"token": "hunter22"}, "writer_class": "tests.unit.test_sync_config:Talkative"},
        {"connection": {"token": "hunter22"}, "writer_class": "no_such_module:Writer"},
    ],
)
def test_a_writer_that_cannot_be_made_is_told_without_its_secrets(options: dict[str, Any]) -> None:
    text = refuse_writer(**options)
    assert text.startswith("Target 'main': ")
    assert "hunter22" not in text


class Talkative:
    def __init__(self, token: str) -> None:
        raise ValueError(f"bad token {token}")

    async def write_batch(self, statements: Any) -> Any:
        return [{"ok": True} for _ in statements]
