"""`outbox.toml`: what is read from it, and what is refused with which words."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.config import AppConfig, SyncConfig, TargetConfig
from pillarbox.sync.toml import load_sync_config, load_sync_layout
from tests.servers import ROOT
from tests.sqloutbox06 import sqloutbox06

Write = Callable[..., Path]

MINIMAL = """
[app.shop]
db_dir = "data"
[app.shop.db.main]
writer_class = "writers:Writer"
tables = ["orders"]
"""

# As the page of sqloutbox 0.4 has it.
MULTI_APP = """
# ── App: pulseview ─────────────────────────────────────────
[app.pulseview]
db_dir = "data/pulseview" # outbox .db files for this app
batch_size = 500 # per-app tuning (all optional)
flush_interval = 1.0
auto_schema = true
# Database: analytics (Turso)
[app.pulseview.db.analytics]
writer_class = "myapp.writers:TursoWriter"
inject_outbox_seq = true # default for all tables below
tables = [
"loan_rejections",
"market_snapshots",
]
[app.pulseview.db.analytics.connection]
db_url = "${PULSEVIEW_TURSO_URL}"
db_token = "${PULSEVIEW_TURSO_TOKEN}"
# ── App: autopulse ─────────────────────────────────────────
[app.autopulse]
db_dir = "data/autopulse"
[app.autopulse.db.main]
writer_class = "myapp.writers:TursoWriter"
inject_outbox_seq = false
tables = ["wallet_transactions", "loan_placements"]
[app.autopulse.db.main.connection]
db_url = "${TURSO_URL}"
db_token = "${TURSO_AUTH_TOKEN}"
"""

PER_TABLE = """
[app.myapp]
db_dir = "data/myapp"
[app.myapp.db.mixed]
writer_class = "myapp.writers:TursoWriter"
inject_outbox_seq = true # default: all tables inject
retain_log_days = 30 # default: 30 days audit trail
tables = [
"events", # uses db defaults
"metrics", # uses db defaults
{ name = "raw_log", inject_outbox_seq = false }, # override: no injection
{ name = "api_calls", retain_log_days = 7 }, # override: 7 days retention
]
"""

TURSO_WRITER = """
class TursoWriter:
    def __init__(self, db_url, db_token):
        self.db_url, self.db_token = db_url, db_token

    async def write_batch(self, statements):
        return [{"ok": True, "rows_affected": 1} for _ in statements]
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith(("myapp", "writers_")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file beside outbox.toml, by default outbox.toml itself, and return its path."""

    def write(text: str, name: str = "outbox.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    return write


def load(path: Path, **env: str) -> SyncConfig:
    return load_sync_config(path, dict(env))


def refuse(path: Path, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_sync_config(path, dict(env))
    return str(caught.value)


# -- what is read --------------------------------------------------------------------------------------------


def test_a_minimal_file_is_read(write: Write) -> None:
    path = write(MINIMAL)
    target = TargetConfig("shop.main", ("orders",), writer_class="writers:Writer")
    folder = path.parent / "data"
    assert load(path) == SyncConfig((AppConfig(name="shop", db_dir=folder, targets=(target,)),), path)


def test_the_file_of_the_sqloutbox_page_is_read_unchanged(write: Write) -> None:
    path = write(MULTI_APP)
    write(TURSO_WRITER, "myapp/writers.py")
    env = {"PULSEVIEW_TURSO_URL": "u1", "PULSEVIEW_TURSO_TOKEN": "t1", "TURSO_URL": "u2", "TURSO_AUTH_TOKEN": "t2"}
    config = load(path, **env)
    assert [app.db_dir for app in config.apps] == [path.parent / "data/pulseview", path.parent / "data/autopulse"]
    assert config.tables_for_target("pulseview.analytics") == ("loan_rejections", "market_snapshots")
    assert config.tables_for_target("autopulse.main") == ("wallet_transactions", "loan_placements")
    assert [target.should_inject("loan_placements") for target in config.targets] == [True, False]
    writers: Any = config.make_writers()
    assert list(writers) == ["pulseview.analytics", "autopulse.main"]
    assert [(each.db_url, each.db_token) for each in writers.values()] == [("u1", "t1"), ("u2", "t2")]


def test_tables_override_their_database(write: Write) -> None:
    target = load(write(PER_TABLE)).targets[0]
    assert target.table_names == ("events", "metrics", "raw_log", "api_calls")
    assert [target.should_inject(table) for table in target.table_names] == [True, True, False, True]
    assert [target.retain_days(table) for table in target.table_names] == [30, 30, 30, 7]


def test_every_key_of_an_app_counts_for_that_app(write: Write) -> None:
    second = """
    [app.bank]
    db_file = "/var/lib/bank/app.db"
    batch_size = 1
    flush_interval = 2
    table_flush_threshold = 3
    table_max_wait = 0
    auto_schema = false
    cleanup_every = 5
    retain_log_days = 6
    max_attempts = false
    max_pending = 7
    max_batch_bytes = 8
    backoff_seconds = 0.5
    backoff_cap_minutes = 9
    dead = "skip"
    durability = "full"
    [app.bank.db.main]
    tables = ["a", "b"]
    inject_outbox_seq = ["b"]
    batches = "ordered"
    dialect = "mysql"
    batch_size = 10
    max_attempts = 11
    max_batch_bytes = false
    retain_log_days = 12
    dead = "park"
    connection = { url = "mysql://db/bank" }
    """
    first, app = load(write(MINIMAL + dedent(second))).apps
    assert first.batch_size == 500
    target = TargetConfig(
        "bank.main",
        ("a", "b"),
        inject_outbox_seq={"b"},
        batches="ordered",
        dialect="mysql",
        batch_size=10,
        max_attempts=11,
        max_batch_bytes=False,
        retain_log_days=12,
        dead="park",
        connection={"url": "mysql://db/bank"},
    )
    assert app == AppConfig(
        name="bank",
        db_file=Path("/var/lib/bank/app.db"),
        targets=(target,),
        batch_size=1,
        flush_interval=2.0,
        table_flush_threshold=3,
        table_max_wait=0.0,
        auto_schema=False,
        cleanup_every=5,
        retain_log_days=6,
        max_attempts=None,
        max_pending=7,
        max_batch_bytes=8,
        backoff_seconds=0.5,
        backoff_cap_minutes=9.0,
        dead="skip",
        durability="full",
    )


def test_variables_are_filled_into_every_text(write: Write) -> None:
    path = write(
        """
        [app.shop]
        db_dir = "${ROOT}/queues"
        [app.shop.db.main]
        writer_class = "${MODULE}:Writer"
        tables = ["${PREFIX}_orders", { name = "${PREFIX}_items" }]
        [app.shop.db.main.connection]
        url = "libsql://${HOST}:${PORT:-443}"
        plain = "$${HOST}"
        hosts = ["${HOST}", ["x-${HOST}"]]
        port = 5
        [app.shop.db.main.connection.tls]
        ca = "/etc/${HOST}.pem"
        """
    )
    config = load(path, ROOT="/srv", MODULE="writers", PREFIX="eu", HOST="db1")
    target = config.targets[0]
    assert config.apps[0].db_dir == Path("/srv/queues")
    assert (target.writer_class, target.table_names) == ("writers:Writer", ("eu_orders", "eu_items"))
    assert dict(target.connection) == {
        "url": "libsql://db1:443",
        "plain": "${HOST}",
        "hosts": ["db1", ["x-db1"]],
        "port": 5,
        "tls": {"ca": "/etc/db1.pem"},
    }


def test_a_missing_variable_is_named_with_its_place(write: Write) -> None:
    path = write(MINIMAL + '[app.shop.db.main.connection]\ntoken = "${TOKEN}"\n')
    assert refuse(path) == (
        f"{path}, [app.shop.db.main.connection] token: the environment variable TOKEN is not set. "
        "Set it, or write ${TOKEN:-default}"
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (MINIMAL, "", ": expected at least one table [app.NAME], got none"),
        (MINIMAL, "[apps.shop]", ": unknown table 'apps'; expected app. Did you mean 'app'?"),
        (MINIMAL, "app = 5", ": expected at least one table [app.NAME], got none"),
        (MINIMAL, "app.shop = 5", ": expected tables [app.NAME], got app.shop = 5"),
        (MINIMAL, '[app.shop]\ndb_dir = "x"', ", [app.shop]: expected at least one table [app.shop.db.NAME], got none"),
        (MINIMAL, '[app."a b".db.main]', ", [app.a b]: expected a name without dots, blanks and slashes, got 'a b'"),
        ("[app.shop.db.main]", '[app.shop.db."a.b"]', "expected a name without dots, blanks and slashes, got 'a.b'"),
        ('db_dir = "data"', "", ": App 'shop': expected db_dir (a folder) or db_file (one file), got neither"),
        ('db_dir = "data"', 'db_dir = ""', ": App 'shop', db_dir: expected a path, got ''"),
        ('db_dir = "data"', "db_dir = 5", ": App 'shop', db_dir: expected a path, got 5"),
        ('db_dir = "data"', 'db_dir = "d"\nbatchsize = 5', "unknown key 'batchsize'"),
        ('db_dir = "data"', 'db_dir = "d"\nbatchsize = 5', "Did you mean 'batch_size'?"),
        ('db_dir = "data"', 'db_dir = "d"\nname = "x"', "unknown key 'name'"),
        ('db_dir = "data"', 'db_dir = "d"\nbatch_size = 0', ": App 'shop', batch_size: expected a whole number of 1"),
        ('db_dir = "data"', 'db_dir = "d"\nflush_interval = nan', ": App 'shop', flush_interval: expected a number"),
        ('tables = ["orders"]', "", ", [app.shop.db.main]: expected tables = a list of the tables"),
        ('tables = ["orders"]', "tables = []", ": Target 'shop.main', tables: expected at least one table, got none"),
        ('tables = ["orders"]', 'tables = "orders"', ", [app.shop.db.main] tables: expected a list, got 'orders'"),
        ('tables = ["orders"]', "tables = [5]", ", [app.shop.db.main] tables: expected names, or tables such as"),
        ('tables = ["orders"]', "tables = [{}]", ", [app.shop.db.main] tables: expected a name in {}"),
        ('tables = ["orders"]', 'tables = [{name="a", inject=true}]', "unknown key 'inject'"),
        ('tables = ["orders"]', 'tables = [{name="a", retain_log_days=-1}]', "Table 'a', retain_log_days: expected"),
        ('tables = ["orders"]', 'tables = ["a", "a"]', ": Target 'shop.main', tables: table 'a' is given twice"),
        ("[app.shop.db.main]", "[app.shop.db.main]\nmax_attempt = 5", "Did you mean 'max_attempts'?"),
        (
            "[app.shop.db.main]",
            '[app.shop.db.main]\nconnection = "x"',
            "expected a table [app.shop.db.main.connection]",
        ),
        (
            'writer_class = "writers:Writer"',
            "",
            "expected a writer_class, or a url in its connection table; got neither",
        ),
        ('"writers:Writer"', '"writers.Writer"', "writer_class: expected module.path:ClassName, got 'writers.Writer'"),
        ("[app.shop]", "[app.shop", ": not valid TOML: "),
    ],
)
def test_what_is_missing_or_unknown_in_the_file_is_told(write: Write, old: str, new: str, expected: str) -> None:
    assert old in MINIMAL
    path = write(MINIMAL.replace(old, new, 1))
    text = refuse(path)
    assert text.startswith(str(path))
    assert expected in text


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    expected = f"Configuration file '{tmp_path / 'no.toml'}': there is no such file"
    assert refuse(tmp_path / "no.toml") == expected


def test_a_file_that_is_no_text_is_told(write: Write) -> None:
    path = write("")
    path.write_bytes(b"\xff\xfe")
    assert refuse(path).startswith(f"{path}: cannot be read: ")


def test_apps_of_one_folder_are_refused_in_the_file(write: Write) -> None:
    path = write(MINIMAL + MINIMAL.replace("shop", "bank"))
    assert refuse(path).startswith(f"{path}: Apps 'shop' and 'bank': expected queues of their own")


# -- without secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [load_sync_config, load_sync_layout])
def test_help_of_the_functions_shows_nothing_of_the_environment(function: Any) -> None:
    assert inspect.signature(function).parameters["env"].default is None


def test_the_environment_of_the_process_is_the_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(MINIMAL.replace('"data"', '"${PLACE_OF_QUEUES}"'))
    monkeypatch.setenv("PLACE_OF_QUEUES", "here")
    for config in (load_sync_config(path), load_sync_layout(path)):
        assert config.apps[0].db_dir == path.parent / "here"


def test_the_layout_needs_no_secrets(write: Write) -> None:
    path = write(
        """
        [app.shop]
        db_dir = "${ROOT}/queues"
        [app.shop.db.main]
        writer_class = "${MODULE}:Writer"
        tables = ["${PREFIX}_orders"]
        connection = { token = "${TOKEN}" }
        """
    )
    write("ROOT=/srv\nPREFIX=eu", ".env")
    env: dict[str, str] = {}
    config = load_sync_layout(path, env)
    assert config.apps[0].queue_file("eu_orders") == Path("/srv/queues/eu_orders.db")
    assert (config.all_tables(), dict(config.targets[0].connection)) == (("eu_orders",), {"token": "${TOKEN}"})
    assert env == {}


def test_a_variable_of_the_layout_must_be_set(write: Write) -> None:
    path = write(MINIMAL.replace('"data"', '"${ROOT}/data"'))
    with pytest.raises(ConfigError, match=r"\[app.shop\] db_dir: the environment variable ROOT is not set"):
        load_sync_layout(path, {})
    with pytest.raises(ConfigError, match=r"ROOT is not set.*Doppler.* is asked by the service alone"):
        load_sync_layout(path, {"DOPPLER_TOKEN": "dp.st.prd.abcdefgh"})


# -- writers -----------------------------------------------------------------------------------------------


async def test_a_relative_sqlite_file_is_beside_the_configuration(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "50%20 ü"
    connection = 'connection = { url = "sqlite:///remote.db", create = true }'
    path = write(MINIMAL.replace('writer_class = "writers:Writer"', connection), f"{folder.name}/outbox.toml")
    writer: Any = load(path).make_writers()["shop.main"]
    try:
        assert [each["ok"] for each in await writer.write_batch([("CREATE TABLE t (a)", [])])] == [True]
    finally:
        await writer.close()
    assert (folder / "remote.db").exists()


def test_a_writer_class_may_be_beside_the_file_or_in_the_current_folder(write: Write) -> None:
    path = write(MULTI_APP.replace("myapp.writers", "writers_beside", 1).replace("myapp.writers", "writers_here", 1))
    write(TURSO_WRITER, "writers_beside.py")
    write(TURSO_WRITER, "elsewhere/writers_here.py")
    env = dict.fromkeys(("PULSEVIEW_TURSO_URL", "PULSEVIEW_TURSO_TOKEN", "TURSO_URL", "TURSO_AUTH_TOKEN"), "x")
    modules = [type(each).__module__ for each in load(path, **env).make_writers().values()]
    assert modules == ["writers_beside", "writers_here"]


def test_the_writer_class_of_sqloutbox_is_made(write: Write) -> None:
    connection = '[app.shop.db.main.connection]\ndb_url = "https://db"\ndb_token = "${TOKEN}"\n'
    path = write(MINIMAL.replace("writers:Writer", "sqloutbox.cli:TursoWriter") + connection)
    code = "import sys; from pillarbox.sync.toml import load_sync_config; "
    code += "print(load_sync_config(sys.argv[1]).make_writers()['shop.main'].__class__)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(sqloutbox06()), str(ROOT)]), "TOKEN": "x"}
    done = subprocess.run([sys.executable, "-c", code, path], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("<class 'sqloutbox.cli.TursoWriter'>\n", "")
