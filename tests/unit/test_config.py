"""Settings: where a value comes from, and what is refused with which words."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from pillarbox.config import VARIABLES, Config, RelayConfig, StoreConfig, load_config
from pillarbox.errors import ConfigError
from pillarbox.retry import Constant, Exponential, NoRetry
from pillarbox.sinks.null import NullSink

Write = Callable[..., Path]

NO_SIZE = (
    "expected a size of 1 or more with the unit B, KB, MB, GB, KiB, MiB or GiB, such as '64MB', or a number of bytes"
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write pillarbox.toml, and a .env beside it, and return its path."""

    def write(text: str, dotenv: str | None = None) -> Path:
        if dotenv is not None:
            (tmp_path / ".env").write_text(dotenv)
        path = tmp_path / "pillarbox.toml"
        path.write_text(text)
        return path

    return write


def refuse(path: Path | None, env: dict[str, str] | None = None, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, env or {}, overrides or {})
    return str(caught.value)


# -- where settings come from ------------------------------------------------------------------------------


def test_nothing_given_is_all_defaults() -> None:
    config = load_config(env={})
    assert config.path is None
    assert config.store == StoreConfig(url=None, layout="pillarbox", table=None, schema=None)
    assert config.relay == RelayConfig(
        batch_size=500,
        batch_bytes=64_000_000,
        in_flight=None,
        claim="auto",
        lease=None,
        poll=timedelta(seconds=1),
        dead="park",
        stop_timeout=timedelta(seconds=10),
        retention=None,
    )
    assert config.retry == Exponential()
    assert config.outbox.max_payload == 1_048_576


def test_every_key_of_the_file_is_read(write: Write) -> None:
    path = write(
        """
        [store]
        url = "postgresql://db/shop"
        layout = "pillarbox"
        table = "outbox"
        schema = "sales"
        lanes = 16
        pooler = true
        hold_behind_pooler = false
        notify = false
        listen_url = "postgresql://direct/shop"
        [sink]
        url = "file:out.jsonl"
        name = "orders"
        sync = true
        [relay]
        batch_size = 100
        batch_bytes = "8MiB"
        in_flight = 4
        claim = "lease"
        lease = "1m"
        poll = "500ms"
        dead = "skip"
        stop_timeout = "5s"
        retention = "7d"
        [outbox]
        max_payload = 1000
        [retry]
        kind = "constant"
        delay = "3s"
        max_attempts = 4
        """
    )
    config = load_config(path, {})
    assert config.path == path
    assert config.store == StoreConfig(
        url="postgresql://db/shop",
        layout="pillarbox",
        table="outbox",
        schema="sales",
        lanes=16,
        pooler=True,
        hold_behind_pooler=False,
        notify=False,
        listen_url="postgresql://direct/shop",
    )
    assert (config.sink.url, config.sink.name) == ("file:out.jsonl", "orders")
    assert dict(config.sink.options) == {"sync": True}
    assert config.relay == RelayConfig(
        batch_size=100,
        batch_bytes=8_388_608,
        in_flight=4,
        claim="lease",
        lease=timedelta(minutes=1),
        poll=timedelta(milliseconds=500),
        dead="skip",
        stop_timeout=timedelta(seconds=5),
        retention=timedelta(days=7),
    )
    assert config.outbox.max_payload == 1000
    assert config.retry == Constant(timedelta(seconds=3), max_attempts=4)


def test_file_in_working_directory_is_found(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write("[relay]\nbatch_size = 7\n").parent)
    assert load_config(env={}).relay.batch_size == 7


def test_variable_names_the_file(write: Write) -> None:
    path = write("[relay]\nbatch_size = 7\n")
    assert load_config(env={"PILLARBOX_CONFIG": str(path)}).relay.batch_size == 7


def test_named_file_must_exist() -> None:
    assert refuse(Path("nowhere.toml")) == "Configuration file 'nowhere.toml': there is no such file"


def test_command_line_beats_environment_beats_file_beats_default(write: Write) -> None:
    path = write("[relay]\nbatch_size = 1\nin_flight = 1\nlease = '1s'\n")
    env = {"PILLARBOX_BATCH_SIZE": "2", "PILLARBOX_IN_FLIGHT": "2"}
    relay = load_config(path, env, {"relay.batch_size": 3, "relay.lease": None}).relay
    assert (relay.batch_size, relay.in_flight, relay.lease, relay.claim) == (
        3,
        2,
        timedelta(seconds=1),
        "auto",
    )


@pytest.mark.parametrize(
    ("variable", "text", "section", "key", "expected"),
    [
        ("PILLARBOX_STORE", "sqlite:///a.db", "store", "url", "sqlite:///a.db"),
        ("PILLARBOX_LAYOUT", "omnibox", "store", "layout", "omnibox"),
        ("PILLARBOX_TABLE", "events", "store", "table", "events"),
        ("PILLARBOX_SCHEMA", "sales", "store", "schema", "sales"),
        ("PILLARBOX_LANES", "8", "store", "lanes", 8),
        ("PILLARBOX_RECIPIENT", "mailer", "store", "recipient", "mailer"),
        ("PILLARBOX_TOPICS", "orders, mails", "store", "topics", ("orders", "mails")),
        ("PILLARBOX_POOLER", "true", "store", "pooler", True),
        ("PILLARBOX_HOLD_BEHIND_POOLER", "yes", "store", "hold_behind_pooler", True),
        ("PILLARBOX_STATEMENT_TIMEOUT", "20s", "store", "statement_timeout", timedelta(seconds=20)),
        ("PILLARBOX_OPERATION_TIMEOUT", "1h", "store", "operation_timeout", timedelta(hours=1)),
        ("PILLARBOX_NOTIFY", "0", "store", "notify", False),
        ("PILLARBOX_LISTEN_URL", "postgresql://direct/", "store", "listen_url", "postgresql://direct/"),
        ("PILLARBOX_SINK", "null:", "sink", "url", "null:"),
        ("PILLARBOX_BATCH_SIZE", "50", "relay", "batch_size", 50),
        ("PILLARBOX_BATCH_BYTES", "5MB", "relay", "batch_bytes", 5_000_000),
        ("PILLARBOX_IN_FLIGHT", "1", "relay", "in_flight", 1),
        ("PILLARBOX_CLAIM", "hold", "relay", "claim", "hold"),
        ("PILLARBOX_LEASE", "2m", "relay", "lease", timedelta(minutes=2)),
        ("PILLARBOX_POLL", "10ms", "relay", "poll", timedelta(milliseconds=10)),
        ("PILLARBOX_DEAD", "skip", "relay", "dead", "skip"),
        ("PILLARBOX_STOP_TIMEOUT", "0s", "relay", "stop_timeout", timedelta(0)),
        ("PILLARBOX_RETENTION", "7d", "relay", "retention", timedelta(days=7)),
        ("PILLARBOX_MAX_PAYLOAD", "10", "outbox", "max_payload", 10),
        ("PILLARBOX_SOURCE", "redis://a", "source", "url", "redis://a"),
        ("PILLARBOX_GROUP", "billing", "source", "group", "billing"),
        ("PILLARBOX_STORED", "yes", "source", "stored", True),
        ("PILLARBOX_HANDLERS", "shop.events:handlers", "handlers", "registry", "shop.events:handlers"),
        ("PILLARBOX_NAMESPACE", "shop.orders", "handlers", "namespace", "shop.orders"),
    ],
)
def test_every_variable_overrides_its_key(variable: str, text: str, section: str, key: str, expected: object) -> None:
    config = load_config(env={variable: text})
    assert getattr(getattr(config, section), key) == expected


def test_retry_kind_comes_from_the_environment() -> None:
    assert load_config(env={"PILLARBOX_RETRY": "none"}).retry == NoRetry()


def test_no_variable_is_left_untested() -> None:
    assert len(VARIABLES) == 30


def test_source_has_keys_of_its_own_and_options_of_its_broker(write: Write) -> None:
    path = write(
        "[source]\nurl = 'kafka://a'\ngroup = 'billing'\nstored = true\nunmatched = 'skip'\nremember = '2d'\n"
        "topics = ['orders']\nprefetch = 10\n"
    )
    source = load_config(path).source
    assert (source.url, source.group, source.stored, source.unmatched) == ("kafka://a", "billing", True, "skip")
    assert source.remember == timedelta(days=2)
    assert source.options == {"topics": ["orders"], "prefetch": 10}


def test_source_given_elsewhere_takes_no_options_of_the_file(write: Write) -> None:
    path = write("[source]\nurl = 'kafka://a'\ngroup = 'billing'\ntopics = ['orders']\n")
    source = load_config(path, env={"PILLARBOX_SOURCE": "redis://b"}).source
    assert (source.url, source.group, source.options) == ("redis://b", "billing", {})


def test_empty_variable_is_not_given(write: Write) -> None:
    path = write("[store]\ntable = 'events'\n")
    assert load_config(path, {"PILLARBOX_TABLE": ""}).store.table == "events"


def test_sink_outside_the_file_replaces_its_options(write: Write) -> None:
    path = write("[sink]\nurl = 'file:a'\nname = 'orders'\nsync = true\n")
    sink = load_config(path, {}, {"sink.url": "null:"}).sink
    assert (sink.url, sink.name, dict(sink.options)) == ("null:", None, {})


def test_sink_options_apply_to_a_url_the_file_leaves_open(write: Write) -> None:
    sink = load_config(write("[sink]\nsync = true\n"), {"PILLARBOX_SINK": "file:a"}).sink
    assert (sink.url, dict(sink.options)) == ("file:a", {"sync": True})


def test_table_may_name_its_schema(write: Write) -> None:
    store = load_config(write("[store]\ntable = 'sales.events'\n"), {}).store
    assert (store.schema, store.table) == ("sales", "events")


def test_schema_of_a_given_table_beats_the_file(write: Write) -> None:
    path = write("[store]\ntable = 'outbox'\nschema = 'sales'\n")
    store = load_config(path, {}, {"store.table": "test.events"}).store
    assert (store.schema, store.table) == ("test", "events")


def test_schema_of_the_environment_beats_that_of_the_files_table(write: Write) -> None:
    store = load_config(write("[store]\ntable = 'sales.events'\n"), {"PILLARBOX_SCHEMA": "test"}).store
    assert (store.schema, store.table) == ("test", "events")


def test_two_schemas_in_one_place_are_refused(write: Write) -> None:
    path = write("[store]\ntable = 'sales.events'\nschema = 'test'\n")
    assert refuse(path) == (
        f"{path}, [store] table: 'sales.events' names its schema, but {path}, [store] schema is 'test'"
    )


# -- variables ---------------------------------------------------------------------------------------------


def test_variables_are_filled_in(write: Write) -> None:
    path = write('[store]\nurl = "postgresql://${DB_USER}:${DB_PASSWORD}@db/${DB_NAME:-shop}"\n')
    config = load_config(path, {"DB_USER": "me", "DB_PASSWORD": "s3cret"})
    assert config.store.url == "postgresql://me:s3cret@db/shop"


def test_variables_are_filled_in_inside_tables_and_lists(write: Write) -> None:
    path = write('[sink]\nurl = "x:"\nlist = ["${A}", "b"]\ntls = { ca = "${A}" }\n')
    assert dict(load_config(path, {"A": "1"}).sink.options) == {"list": ["1", "b"], "tls": {"ca": "1"}}


def test_default_stands_for_an_empty_variable(write: Write) -> None:
    path = write('[store]\ntable = "${TABLE:-events}"\n')
    assert load_config(path, {"TABLE": ""}).store.table == "events"


def test_variables_may_hold_numbers_and_switches(write: Write) -> None:
    path = write(
        '[store]\nnotify = "${N}"\n[relay]\nbatch_size = "${B}"\n[retry]\nkind = "linear"\nmax_attempts = "${M}"\n'
    )
    config = load_config(path, {"B": "50", "N": "false", "M": "3"})
    assert (config.relay.batch_size, config.store.notify, config.retry.max_attempts) == (50, False, 3)


def test_doubled_dollar_is_a_plain_one(write: Write) -> None:
    assert load_config(write('[store]\ntable = "a$${b}"\n'), {}).store.table == "a${b}"


def test_missing_variable_is_named_with_its_place(write: Write) -> None:
    path = write('[store]\nurl = "postgresql://${DB_HOST}/shop"\n')
    assert refuse(path) == (
        f"{path}, [store] url: the environment variable DB_HOST is not set. Set it, or write ${{DB_HOST:-default}}"
    )


def test_missing_variable_of_an_overridden_key_does_not_matter(write: Write) -> None:
    path = write('[store]\nurl = "${DATABASE_URL}"\n')
    assert load_config(path, {}, {"store.url": "sqlite:///a.db"}).store.url == "sqlite:///a.db"


@pytest.mark.parametrize("text", ["${", "${}", "${1A}", "${A", "${A:x}"])
def test_broken_reference_is_refused(write: Write, text: str) -> None:
    path = write(f"[store]\ntable = '{text}'\n")
    assert refuse(path, {"A": "a"}) == (
        f"{path}, [store] table: expected ${{NAME}} or ${{NAME:-default}}; write '$${{' for a plain '${{'"
    )


def test_dotenv_beside_the_file_fills_variables_and_real_environment_wins(write: Write) -> None:
    path = write(
        '[store]\nurl = "sqlite:///${FILE}"\ntable = "${TABLE}"\n',
        dotenv="FILE=a.db\nTABLE=from_file\nPILLARBOX_BATCH_SIZE=9\n",
    )
    config = load_config(path, {"TABLE": "from_env"})
    assert (config.store.url, config.store.table, config.relay.batch_size) == (
        "sqlite:///a.db",
        "from_env",
        9,
    )


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("T=plain", "plain"),
        ("T = spaced", "spaced"),
        ("export T=exported", "exported"),
        ("T='single # quoted' # comment", "single # quoted"),
        ('T="double \\"quoted\\"" # comment', 'double "quoted"'),
        ("T=value # comment", "value"),
        ("T=value#inside", "value#inside"),
        ("T=a=b", "a=b"),
        ("T='$x'", "$x"),
    ],
)
def test_dotenv_lines(write: Write, line: str, value: str) -> None:
    path = write('[store]\ntable = "${T}"\n', dotenv=f"# a comment\n\n{line}\n")
    assert load_config(path, {}).store.table == value


@pytest.mark.parametrize("line", ["s3cret", "T='s3cret", 'T="s3cret', "1T=s3cret", "T='s3cret' more"])
def test_broken_dotenv_line_is_named_but_not_shown(write: Write, line: str) -> None:
    path = write("", dotenv=f"A=1\n{line}\n")
    message = refuse(path)
    assert message == (f"{path.parent / '.env'}, line 2: expected KEY=value, KEY='value' or KEY=\"value\"")


# -- what is refused ---------------------------------------------------------------------------------------


def test_unknown_key_is_refused_with_the_nearest(write: Write) -> None:
    path = write("[relay]\nbatchsize = 5\n")
    assert refuse(path) == (
        f"{path}, [relay]: unknown key 'batchsize'; expected batch_size, batch_bytes, in_flight, claim, "
        "lease, poll, dead, stop_timeout, retention. Did you mean 'batch_size'?"
    )


def test_unknown_table_is_refused_with_the_nearest(write: Write) -> None:
    path = write("[rely]\n")
    assert refuse(path) == (
        f"{path}: unknown table 'rely'; expected store, sink, relay, outbox, source, handlers, stores, sinks, routes, "
        "routing, retry. Did you mean 'relay'?"
    )


def test_value_in_the_place_of_a_table_is_refused(write: Write) -> None:
    path = write("store = 'postgresql://me:s3cret@db/shop'\n")
    assert refuse(path) == f"{path}: expected a table [store], got 'postgresql://me:***@db/shop'"


def test_misspelled_variable_is_refused() -> None:
    message = refuse(None, {"PILLARBOX_BATCHSIZE": "5"})
    assert message.startswith("Environment: unknown variable 'PILLARBOX_BATCHSIZE'; expected PILLARBOX_STORE, ")
    assert message.endswith("Did you mean 'PILLARBOX_BATCH_SIZE'?")


@pytest.mark.parametrize("name", ["PILLARBOX_TEST_POSTGRES", "PILLARBOX_PORT", "PILLARBOX_STORE_SERVICE_HOST"])
def test_variables_of_others_with_our_prefix_are_left_alone(name: str) -> None:
    assert load_config(env={name: "x"}).store.url is None


def test_unknown_override_is_refused() -> None:
    assert refuse(None, overrides={"relay.batch": 5}).endswith("Did you mean 'relay.batch_size'?")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("batch_size = 'many'", "batch_size: expected a whole number of 1 or more, got 'many'"),
        ("batch_size = '5'", "batch_size: expected a whole number of 1 or more, got '5'"),
        ("batch_size = 0", "batch_size: expected a whole number of 1 or more, got 0"),
        ("batch_size = true", "batch_size: expected a whole number of 1 or more, got True"),
        ("batch_bytes = 0", f"batch_bytes: {NO_SIZE}; got 0"),
        ("batch_bytes = '64 apples'", f"batch_bytes: {NO_SIZE}; got '64 apples'"),
        ("batch_bytes = '1.5MB'", f"batch_bytes: {NO_SIZE}; got '1.5MB'"),
        ("batch_bytes = true", f"batch_bytes: {NO_SIZE}; got True"),
        ("batch_size = 1.5", "batch_size: expected a whole number of 1 or more, got 1.5"),
        ("claim = 'holds'", "claim: expected auto, hold or lease, got 'holds'. Did you mean 'hold'?"),
        ("claim = 1", "claim: expected auto, hold or lease, got 1"),
        ("lease = 30", "lease: expected a duration with its unit, such as '30s'; got the number 30"),
        ("poll = '0s'", "poll: expected a duration above zero, got '0s'"),
    ],
)
def test_wrong_value_is_refused_and_shown(write: Write, line: str, expected: str) -> None:
    path = write(f"[relay]\n{line}\n")
    assert refuse(path) == f"{path}, [relay] {expected}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("url = 5", "url: expected text, got 5"),
        ("table = ''", "table: expected text, got ''"),
        ("notify = 'true'", "notify: expected true or false, got 'true'"),
    ],
)
def test_wrong_value_of_the_store_is_refused(write: Write, line: str, expected: str) -> None:
    path = write(f"[store]\n{line}\n")
    assert refuse(path) == f"{path}, [store] {expected}"


def test_wrong_value_of_a_variable_names_the_variable() -> None:
    assert refuse(None, {"PILLARBOX_IN_FLIGHT": "two"}) == (
        "PILLARBOX_IN_FLIGHT: expected a whole number of 1 or more, got 'two'"
    )


def test_wrong_retry_policy_names_its_place(write: Write) -> None:
    path = write("[retry]\nkind = 'exponental'\n")
    assert refuse(path).startswith(f"{path}, [retry]: expected kind exponential, linear")


def test_bad_toml_is_refused_with_its_line(write: Write) -> None:
    path = write("[store]\nurl = sqlite\n")
    assert refuse(path).startswith(f"{path}: not valid TOML: ")
    assert "line 2" in refuse(path)


# -- secrets -----------------------------------------------------------------------------------------------


def test_no_secret_is_in_the_representation(write: Write) -> None:
    path = write(
        "[store]\nurl = 'postgresql://me:s3cret@db/'\nlisten_url = 'postgresql://me:s3cret@db/'\n"
        "[sink]\nurl = 'http://me:s3cret@host'\npassword = 's3cret'\n"
    )
    assert "s3cret" not in repr(load_config(path, {}))


@pytest.mark.parametrize("url", ["postgresql:/me:s3cret@db/shop", "oracle://me:s3cret@db/shop", "me:s3cret@db"])
def test_url_of_the_store_is_masked_when_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, overrides={"store.url": url}).open_store()
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# -- what settings make ------------------------------------------------------------------------------------


def test_store_and_sink_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^No store: give --store, PILLARBOX_STORE, or url under \[store\]"):
        Config().open_store()
    with pytest.raises(ConfigError, match=r"^No sink: give --sink, PILLARBOX_SINK, or url under \[sink\]"):
        Config().open_sink()


async def test_store_is_made_with_table_lanes_and_retention(tmp_path: Path) -> None:
    config = load_config(
        env={},
        overrides={
            "store.url": f"sqlite:///{tmp_path}/a.db",
            "store.table": "events",
            "store.lanes": 8,
            "relay.retention": "7d",
        },
    )
    store = config.open_store()
    try:
        assert store.tables["outbox"].name == "events"
        assert store.layout.keyed.lanes == 8
        assert store.retention == timedelta(days=7)
    finally:
        await store.close()


def test_options_for_postgresql_are_refused_elsewhere() -> None:
    config = load_config(env={}, overrides={"store.url": "sqlite:///a.db", "store.pooler": True})
    with pytest.raises(ConfigError, match=r"^\[store\] pooler is for PostgreSQL only; the store is sqlite$"):
        config.open_store()


def test_sink_gets_its_options() -> None:
    assert isinstance(load_config(env={"PILLARBOX_SINK": "null:"}).open_sink(), NullSink)


def test_unknown_sink_option_is_refused(write: Write) -> None:
    config = load_config(write("[sink]\nurl = 'null:'\nspeed = 5\n"), {})
    with pytest.raises(ConfigError, match="unknown option 'speed'"):
        config.open_sink()


def test_outbox_is_made_from_the_same_settings() -> None:
    config = load_config(env={}, overrides={"store.table": "sales.events", "store.lanes": 8, "outbox.max_payload": 10})
    outbox = config.make_outbox(sa.MetaData())
    assert (outbox.table.fullname, outbox.layout.keyed.lanes, outbox.max_payload) == ("sales.events", 8, 10)
