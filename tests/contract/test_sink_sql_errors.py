"""What the SQL sink makes of a database's errors, and which options it takes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead, Retry
from pillarbox.sinks import open_sink
from pillarbox.sinks.sql import SqlSink
from tests.contract.broker_kits import named_claim
from tests.contract.sinks import sink_kit
from tests.contract.test_sink_sql import claim_of, count_statements, every_database, make_log, on, own_engine
from tests.private import private_server
from tests.servers import server_url

__all__ = ["sink_kit"]

# -- the table of errors, row by row ---------------------------------------------------------------------------------

ORDERS = {
    "postgres": "id int PRIMARY KEY, total numeric(6, 2) NOT NULL CHECK (total >= 0), note varchar(5), at timestamptz",
    "mariadb": "id int PRIMARY KEY, total numeric(6, 2) NOT NULL CHECK (total >= 0), note varchar(5), at datetime",
    "mysql": "id int PRIMARY KEY, total numeric(6, 2) NOT NULL CHECK (total >= 0), note varchar(5), at datetime",
    "sqlite": "id int PRIMARY KEY, total numeric(6, 2) NOT NULL CHECK (total >= 0), note CHECK (length(note) < 6), at",
}
GOOD = {"id": 2, "total": 1, "note": "x", "at": "2026-01-01 00:00:00", "customer": 1}


def make_orders(kit: Any) -> None:
    inno = " ENGINE=InnoDB" if kit.backend in ("mariadb", "mysql") else ""
    kit.execute(
        f"CREATE TABLE {kit.table}_customers (id int PRIMARY KEY){inno}",
        f"CREATE TABLE {kit.table}_orders ({ORDERS[kit.backend]}, customer int, "
        f"FOREIGN KEY (customer) REFERENCES {kit.table}_customers (id)){inno}",
        f"INSERT INTO {kit.table}_customers VALUES (1)",
        f"INSERT INTO {kit.table}_orders VALUES (1, 1, NULL, NULL, 1)",
    )


def orders_sink(kit: Any, sql: str | None = None) -> Any:
    binds = ":payload__id, :payload__total, :payload__note, :payload__at, :payload__customer"
    sql = sql or f"INSERT INTO {kit.table}_orders (id, total, note, at, customer) VALUES ({binds})"
    return kit.make_sink(consumer="orders", statements={"order.placed": sql})


@every_database
@pytest.mark.parametrize(
    ("bad", "outcome", "words"),
    [
        pytest.param({"id": 1}, Dead, ("duplicate", "unique"), id="unique"),
        pytest.param({"total": None}, Dead, ("null",), id="not null"),
        pytest.param({"total": -1}, Dead, ("check", "constraint"), id="check"),
        pytest.param({"note": "too long"}, Dead, ("too long", "check"), id="too long"),
        pytest.param({"customer": 9}, Retry, ("foreign key",), id="foreign key"),
    ],
)
async def test_bad_row_fails_alone_with_the_databases_words(kit, bad, outcome, words):
    make_orders(kit)
    sink = orders_sink(kit)
    batch = [
        claim_of({**GOOD, "id": 10}, key="k"),
        claim_of({**GOOD, "id": 11}),
        claim_of({**GOOD, **bad}, key="k"),
        claim_of({**GOOD, "id": 12}, key="k"),
        claim_of({**GOOD, "id": 13}, key="j"),
    ]
    outcomes = await sink.deliver(batch)
    assert isinstance(outcomes[2], outcome)
    assert any(word in outcomes[2].error.lower() for word in words)
    assert [*outcomes[:2], *outcomes[3:]] == [DELIVERED, DELIVERED, RELEASED, DELIVERED]
    assert kit.query(f"SELECT id FROM {kit.table}_orders ORDER BY id") == [(1,), (10,), (11,), (13,)]
    # What failed was not received: it is tried when it comes again.
    kit.execute(f"DELETE FROM {kit.table}_orders WHERE id = 1", f"INSERT INTO {kit.table}_customers VALUES (9)")
    again = await sink.deliver([batch[2], batch[3]])
    await sink.close()
    mended = "id" in bad or "customer" in bad
    assert (again == [DELIVERED, DELIVERED]) is mended


@on("postgres", "mariadb", "mysql")
@pytest.mark.parametrize(
    "bad", [{"total": 123456}, {"at": "yesterday-ish"}, {"id": "seven"}], ids=["range", "time", "number"]
)
async def test_value_that_does_not_fit_its_column_is_dead(kit, bad):
    make_orders(kit)
    sink = orders_sink(kit)
    outcomes = await sink.deliver(
        [claim_of({**GOOD, "id": 10}), claim_of({**GOOD, **bad}), claim_of({**GOOD, "id": 11})]
    )
    await sink.close()
    assert isinstance(outcomes[1], Dead)
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]


@on("postgres")
@pytest.mark.parametrize("bad", [{"id": 3_000_000_000}, {"id": "7"}, {"note": 7}], ids=["range", "number", "text"])
async def test_value_that_asyncpg_does_not_send_is_dead(kit, bad):
    make_orders(kit)
    sql = f"INSERT INTO {kit.table}_orders (id, total, note) VALUES (:payload__id, 1, :payload__note)"
    engine = own_engine(kit, "asyncpg")
    sink = SqlSink(engine, statements={"*": sql}, consumer="x", dedup_table=f"{kit.table}_received")
    outcomes = await sink.deliver(
        [claim_of({**GOOD, "id": 10}), claim_of({**GOOD, **bad}), claim_of({**GOOD, "id": 11})]
    )
    await engine.dispose()
    assert isinstance(outcomes[1], Dead)
    assert outcomes[1].error.startswith("invalid input for query argument")
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]


PARTITIONED = {
    "postgres": ("PARTITION BY RANGE (n)", "CREATE TABLE {0}_p1 PARTITION OF {0}_p FOR VALUES FROM (1) TO (10)"),
    "mariadb": ("PARTITION BY RANGE (n) (PARTITION p1 VALUES LESS THAN (10))",),
    "mysql": ("PARTITION BY RANGE (n) (PARTITION p1 VALUES LESS THAN (10))",),
}
MORE = {
    "postgres": "CREATE TABLE {0}_p2 PARTITION OF {0}_p FOR VALUES FROM (10) TO (20)",
    "mariadb": "ALTER TABLE {0}_p ADD PARTITION (PARTITION p2 VALUES LESS THAN (20))",
    "mysql": "ALTER TABLE {0}_p ADD PARTITION (PARTITION p2 VALUES LESS THAN (20))",
}


@on("postgres", "mariadb", "mysql")
@pytest.mark.parametrize("has_statements", [False, True], ids=["rows", "statements"])
async def test_row_without_a_partition_stops_the_sink_until_there_is_one(kit, has_statements):
    clause, *more = PARTITIONED[kit.backend]
    kit.execute(f"CREATE TABLE {kit.table}_p (n int) {clause}", *(each.format(kit.table) for each in more))
    what: dict[str, Any] = {"table": f"{kit.table}_p", "columns": {"schema_version": "n"}}
    if has_statements:
        what = {"consumer": "x", "statements": {"*": f"INSERT INTO {kit.table}_p VALUES (:schema_version)"}}
    sink = kit.make_sink(**what)
    batch = [claim_of(schema_version="5"), claim_of(schema_version="15")]
    with pytest.raises(SinkUnavailable, match="partition") as outage:
        await sink.deliver(batch)
    assert outage.value.outcomes == [RELEASED, RELEASED]
    kit.execute(MORE[kit.backend].format(kit.table))
    assert await sink.deliver(batch) == [DELIVERED, DELIVERED]
    await sink.close()


@on("postgres")
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_check_that_a_trigger_makes_fails_its_event_alone(kit, driver):
    log = make_log(kit)
    kit.execute(
        f"CREATE FUNCTION {kit.table}_f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.a = 'bad' THEN "
        "RAISE EXCEPTION 'not that one' USING ERRCODE = 'check_violation'; END IF; RETURN NEW; END $$",
        f"CREATE TRIGGER t BEFORE INSERT ON {log} FOR EACH ROW EXECUTE FUNCTION {kit.table}_f()",
    )
    engine = own_engine(kit, driver)
    sink = SqlSink(engine, table=log, columns={"key": "a"}, dedup_table=f"{kit.table}_received")
    outcomes = await sink.deliver([claim_of(key="good"), claim_of(key="bad")])
    await engine.dispose()
    kit.execute(f"DROP FUNCTION {kit.table}_f CASCADE")
    assert outcomes == [DELIVERED, Dead("not that one")]


@every_database
@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO {0}_nowhere (id) VALUES (:payload__id)",
        "INSERT INTO {0}_orders (id, nothing) VALUES (:payload__id, 1)",
        "INSERT INTO {0}_orders (id VALUES (:payload__id)",
        "INSERT INTO {0}_orders (id, total) VALUES (:payload__id, no_such_function(1))",
    ],
    ids=["table", "column", "syntax", "function"],
)
async def test_wrong_statement_stops_the_sink_and_blames_nobody(kit, sql):
    make_orders(kit)
    sink = orders_sink(kit, sql.format(kit.table))
    with pytest.raises(SinkUnavailable) as outage:
        await sink.deliver([claim_of(GOOD), claim_of(GOOD)])
    await sink.close()
    assert outage.value.outcomes == [RELEASED, RELEASED]
    assert kit.query(f"SELECT count(*) FROM {kit.table}_received") == [(0,)]


@on("postgres")
async def test_constraint_checked_at_commit_finds_its_event(kit):
    make_orders(kit)
    late = "DEFERRABLE INITIALLY DEFERRED"
    kit.execute(f"ALTER TABLE {kit.table}_orders ALTER CONSTRAINT {kit.table}_orders_customer_fkey {late}")
    sink = orders_sink(kit)
    outcomes = await sink.deliver([claim_of({**GOOD, "id": n, "customer": 9 if n == 12 else 1}) for n in range(10, 18)])
    await sink.close()
    assert isinstance(outcomes[2], Retry)
    assert [*outcomes[:2], *outcomes[3:]] == [DELIVERED] * 7


@every_database
async def test_one_bad_event_of_five_hundred_is_found_by_halving(kit):
    await kit.sink.open()
    sent = count_statements(kit.sink)
    batch = [named_claim(str(n), type="refused" if n == 321 else "order.placed") for n in range(500)]
    outcomes = await kit.sink.deliver(batch)
    assert isinstance(outcomes[321], Dead)
    assert outcomes.count(DELIVERED) == 499
    assert sorted(map(int, kit.arrived())) == [n for n in range(500) if n != 321]
    # Two transactions a halving, nine halvings, and the first try.
    assert len([each for each in sent if f"INTO {kit.table} " in each]) <= 19


CONFLICT = """
CREATE FUNCTION {0}_f() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('{0}_s') <= {1} THEN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '{2}'; END IF;
    RETURN 'x';
END $$"""


@on("postgres")
@pytest.mark.parametrize("code", ["40001", "40P01", "55P03"], ids=["serialization", "deadlock", "lock timeout"])
@pytest.mark.parametrize("times", [3, 1000], ids=["now and then", "always"])
async def test_conflict_is_tried_again_a_few_times(kit, code, times):
    log = make_log(kit)
    kit.execute(f"CREATE SEQUENCE {kit.table}_s", CONFLICT.format(kit.table, times, code))
    sink = kit.make_sink(consumer="x", statements={"*": f"INSERT INTO {log} (a) VALUES ({kit.table}_f())"})
    (outcome,) = await sink.deliver([claim_of()])
    await sink.close()
    assert outcome == (DELIVERED if times == 3 else Retry("could not serialize"))
    assert kit.query(f"SELECT last_value FROM {kit.table}_s") == [(4,)]
    kit.execute(f"DROP FUNCTION {kit.table}_f", f"DROP SEQUENCE {kit.table}_s")


@on("postgres")
async def test_conflict_that_lasts_is_an_outage_and_not_halved(kit):
    log = make_log(kit)
    kit.execute(f"CREATE SEQUENCE {kit.table}_s", CONFLICT.format(kit.table, 1000, "55P03"))
    sink = kit.make_sink(consumer="x", statements={"*": f"INSERT INTO {log} (a) VALUES ({kit.table}_f())"})
    with pytest.raises(SinkUnavailable, match=r"Sink postgres: could not serialize$") as outage:
        await sink.deliver([claim_of() for _ in range(100)])
    await sink.close()
    assert outage.value.outcomes == [RELEASED] * 100
    assert kit.query(f"SELECT last_value FROM {kit.table}_s") == [(4,)]
    kit.execute(f"DROP FUNCTION {kit.table}_f", f"DROP SEQUENCE {kit.table}_s")


@on("postgres", "mariadb", "mysql")
async def test_missing_rights_stop_the_sink(kit):
    user = f"u{uuid4().hex[:10]}"
    is_postgres = kit.backend == "postgres"
    name = user if is_postgres else f"'{user}'@'%'"
    kit.execute(f"CREATE USER {name} {'PASSWORD' if is_postgres else 'IDENTIFIED BY'} 'pillarbox'")
    kit.execute(
        f"GRANT SELECT, INSERT, DELETE ON {kit.table}_received TO {name}", f"GRANT SELECT ON {kit.table} TO {name}"
    )
    sink = open_sink(
        kit.url.replace("//pillarbox:", f"//{user}:"), table=kit.table, dedup_table=f"{kit.table}_received"
    )
    with pytest.raises(SinkUnavailable, match="denied") as outage:
        await sink.deliver([named_claim("a")])
    await sink.close()
    assert outage.value.outcomes == [RELEASED]
    kit.execute(*([f"DROP OWNED BY {name}"] if is_postgres else []), f"DROP USER {name}")
    assert kit.arrived() == []


@on("postgres")
async def test_database_that_is_read_only_is_an_outage(kit):
    engine = create_async_engine(
        kit.url.replace("postgresql:", "postgresql+asyncpg:"),
        connect_args={"server_settings": {"default_transaction_read_only": "on"}},
    )
    sink = SqlSink(engine, table=kit.table, dedup_table=f"{kit.table}_received")
    with pytest.raises(SinkUnavailable, match="read-only transaction"):
        await sink.deliver([named_claim("a")])
    await engine.dispose()


@every_database
async def test_database_that_does_not_answer_in_time_is_an_outage(kit):
    sink = kit.make_sink(timeout="300ms")
    await sink.open()
    kit.block()
    with pytest.raises(SinkUnavailable, match=r"no answer within 0\.3 s|locked by another for 0\.3 s"):
        await sink.deliver([named_claim("a")])
    kit.unblock()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.close()
    assert kit.arrived() == ["b"]


@on("mariadb", "mysql")
async def test_payload_above_the_servers_packet_is_dead(kit):
    ((packet,),) = kit.query("SELECT @@max_allowed_packet")
    large = claim_of(bytes(packet // 2), key="k")
    outcomes = await kit.sink.deliver([large, named_claim("a"), named_claim("b", "k")])
    assert isinstance(outcomes[0], Dead)
    assert "max_allowed_packet" in outcomes[0].error
    assert outcomes[1:] == [DELIVERED, RELEASED]


# -- files -----------------------------------------------------------------------------------------------------------


@on("sqlite")
async def test_file_that_was_replaced_is_opened_again(kit):
    await kit.sink.deliver([named_claim("lost")])
    kit.path.rename(kit.path.with_name("old.db"))
    with pytest.raises(SinkUnavailable, match="there is no file"):
        await kit.sink.deliver([named_claim("a")])
    kit.execute(*(statement.format(kit.table) for statement in kit.ddl))
    assert await kit.sink.deliver([named_claim("a")]) == [DELIVERED]
    assert kit.arrived() == ["a"]


@on("sqlite")
async def test_file_that_another_took_the_place_of_is_let_go(kit):
    await kit.sink.deliver([named_claim("old")])
    restored = kit.folder / "restored.db"
    shutil.copy(kit.path, restored)
    restored.replace(kit.path)
    assert await kit.sink.deliver([named_claim("new")]) == [DELIVERED]
    assert kit.arrived() == ["old", "new"]


@on("sqlite")
async def test_file_is_made_only_when_asked(kit):
    path = kit.folder / "new.db"
    sink = open_sink(f"sqlite:///{path}", table="events")
    with pytest.raises(SinkUnavailable, match="there is no file"):
        await sink.open()
    assert not path.exists()
    made = open_sink(f"sqlite:///{path}?create=yes&table=events")
    assert await made.deliver([named_claim("a")]) == [DELIVERED]
    await made.close()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.close()


# -- connections -----------------------------------------------------------------------------------------------------


@on("postgres")
@pytest.mark.parametrize("has_statements", [False, True], ids=["rows", "statements"])
async def test_pooler_in_transaction_mode(kit, has_statements):
    log = make_log(kit)
    what: dict[str, Any] = {"table": kit.table}
    if has_statements:
        what = {"consumer": "x", "statements": {"*": f"INSERT INTO {log} (a) VALUES (:payload__name)"}}
    sink = open_sink(server_url("pgbouncer"), pooler=True, dedup_table=f"{kit.table}_received", **what)
    for n in range(20):
        assert await sink.deliver([named_claim(str(n)), named_claim("x")]) == [DELIVERED, DELIVERED]
    await sink.close()
    assert kit.query(f"SELECT count(*) FROM {log if has_statements else kit.table}") == [(40,)]


@on("postgres")
@pytest.mark.parametrize("options", [{}, {"application_name": "shop"}], ids=["ours", "given"])
async def test_connection_has_a_name(kit, options):
    log = make_log(kit)
    statement = f"INSERT INTO {log} (a) VALUES (current_setting('application_name'))"
    sink = kit.make_sink(consumer="x", statements={"*": statement}, **options)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()
    assert kit.query(f"SELECT a FROM {log}") == [("shop" if options else "pillarbox",)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A PostgreSQL with TLS, and the certificate of its authority."""
    server = private_server("postgres")
    server.start()
    folder = tmp_path_factory.mktemp("tls")
    names = ["-keyout", "server.key", "-out", "server.crt", "-subj", "/CN=localhost"]
    addresses = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *addresses],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    for name in ("server.key", "server.crt"):
        server.run("sh", "-c", f"umask 077; cat > {server.data}/{name}", stdin=(folder / name).read_text())
    engine = sa.create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.exec_driver_sql("ALTER SYSTEM SET ssl = on")
        db.exec_driver_sql("SELECT pg_reload_conf()")
        db.exec_driver_sql("CREATE TABLE IF NOT EXISTS tls (is_secure bool)")
    deadline = time.monotonic() + 10
    while not is_secure(engine):
        assert time.monotonic() < deadline, "the server did not take up its certificate"
    yield server.url, str(folder / "server.crt"), engine
    engine.dispose()


def is_secure(engine: sa.Engine) -> bool:
    engine.dispose()  # a session of its own: an older one may not have heard of it yet
    with engine.connect() as db:
        return bool(db.exec_driver_sql("SHOW ssl").scalar_one() == "on")


SECURE = "INSERT INTO tls SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"


@pytest.mark.parametrize("has_statements", [False, True], ids=["rows", "statements"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tls_ca": "CA"}, True),
        ({"tls_verify": False}, True),
        ({"sslmode": "require"}, True),
        ({"sslmode": "verify-full", "sslrootcert": "CA"}, True),
        ({"sslmode": "verify-ca", "sslrootcert": "CA"}, True),
        ({"tls": False}, False),
        ({"sslmode": "disable"}, False),
        ({"tls": True}, None),
        ({"sslmode": "verify-full"}, None),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, dict) else str(each),
)
async def test_tls_to_postgres(secured, options, expected, has_statements):
    url, authority, engine = secured
    given = {name: authority if value == "CA" else value for name, value in options.items()}
    table = f"t{uuid4().hex[:8]}"
    what: dict[str, Any] = {"consumer": table, "statements": {"*": SECURE}} if has_statements else {"table": table}
    sink = open_sink(url, create=True, **what, **given)
    if not has_statements and expected is not None:
        await sink.open()
        with engine.begin() as db:
            db.exec_driver_sql(f"ALTER TABLE {table} ADD is_secure bool DEFAULT (false)")
            db.exec_driver_sql(f"CREATE FUNCTION {table}_f() RETURNS trigger LANGUAGE plpgsql AS "
                               f"$$ BEGIN {SECURE}; RETURN NEW; END $$")  # fmt: skip
            db.exec_driver_sql(f"CREATE TRIGGER t BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_f()")
    with engine.begin() as db:
        db.exec_driver_sql("DELETE FROM tls")
    if expected is None:
        with pytest.raises(SinkUnavailable, match=r"(?i)certificate"):
            await sink.open()
    else:
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        with engine.begin() as db:
            assert db.exec_driver_sql("SELECT is_secure FROM tls").scalars().all() == [expected]
    await sink.close()


async def test_verify_ca_does_not_check_the_servers_name(secured):
    url, authority, _ = secured
    url = url.replace("127.0.0.1", "localhost")  # which the certificate does not name
    table = f"t{uuid4().hex[:8]}"
    lenient = open_sink(url, table=table, create=True, sslmode="verify-ca", sslrootcert=authority)
    assert await lenient.deliver([named_claim("a")]) == [DELIVERED]
    await lenient.close()


@on("mysql")
@pytest.mark.parametrize(
    ("options", "expected"),
    [({"tls_verify": False}, True), ({}, False), ({"tls": False}, False), ({"tls": True}, None)],
    ids=["unverified", "not asked for", "off", "verified"],
)
async def test_tls_to_mysql(kit, options, expected):
    log = make_log(kit)
    found = "SELECT variable_value FROM performance_schema.session_status WHERE variable_name = 'Ssl_cipher'"
    sink = kit.make_sink(consumer="x", statements={"*": f"INSERT INTO {log} (a) {found}"}, **options)
    if expected is None:
        with pytest.raises(SinkUnavailable, match=r"(?i)certificate"):
            await sink.open()
    else:
        assert await sink.deliver([named_claim("a")]) == [DELIVERED]
        assert bool(kit.query(f"SELECT a FROM {log}")[0][0]) is expected
    await sink.close()


@on("mysql")
async def test_tls_files_may_have_the_drivers_names(kit, secured):
    _, authority, _ = secured
    sink = kit.make_sink(ssl_ca=authority)
    # The authority is read, and is not the one that signed the server's certificate.
    with pytest.raises(SinkUnavailable, match=r"(?i)certificate verify failed"):
        await sink.open()
    await sink.close()


async def test_value_that_a_lenient_server_would_cut_is_dead():
    server = private_server("mariadb")
    server.start()
    engine = sa.create_engine(server.url.replace("mysql:", "mysql+pymysql:"))
    with engine.begin() as db:
        db.exec_driver_sql("SET GLOBAL sql_mode = ''")
        db.exec_driver_sql("CREATE OR REPLACE TABLE short (a varchar(3))")
    sink = open_sink(server.url, consumer="x", create=True, statements={"*": "INSERT INTO short VALUES (:type)"})
    (outcome,) = await sink.deliver([named_claim("a")])
    await sink.close()
    with engine.begin() as db:
        db.exec_driver_sql("SET GLOBAL sql_mode = DEFAULT")
    engine.dispose()
    assert isinstance(outcome, Dead)
    assert "too long" in outcome.error


async def test_mariadb_through_its_socket():
    server = private_server("mariadb")
    server.start()
    socket = f"{server.data}/server.sock"
    url = server.url.replace(f":{server.port}/", ":1/")
    sink = open_sink(url, unix_socket=socket, table=f"t{uuid4().hex[:8]}", create=True)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await sink.close()


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("postgresql://u@h/d?table=t", "asyncpg", "postgres"),
        ("postgresql://u@h/d?table=t&pooler=yes", "psycopg", "postgres"),
        ("mysql://u@h/d?table=t", "aiomysql", "mysql"),
    ],
)
def test_missing_driver_names_its_extra(monkeypatch, url, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'pillarbox\[{extra}\]'"):
        open_sink(url)


# -- options ---------------------------------------------------------------------------------------------------------

URL = "postgresql://user:hunter2@host/db"


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        (
            URL,
            {},
            'expected one option that says where events go: table = "events" for a row an event, statements for SQL '
            "by the type of event or, in Python, statement; got none",
        ),
        (URL, {"table": "t", "statements": {"a": "b"}}, "in Python, statement; got table and statements"),
        (URL, {"table": "t", "tabel": "t"}, "unknown option 'tabel'; scheme 'postgresql' takes the options table, "),
        (URL + "?sslmdoe=require", {"table": "t"}, "unknown option 'sslmdoe'"),
        ("mysql://u@h/db?sslmode=require", {"table": "t"}, "unknown option 'sslmode'"),
        ("sqlite:///x.db?tls=true", {"table": "t"}, "unknown option 'tls'"),
        (URL + "?statements=x", {}, "statements: expected a table of names and values, in pillarbox.toml or in Python"),
        (URL, {"statements": {}, "consumer": "x"}, "statements: expected at least one, by the type of its events"),
        (URL, {"statements": {"a": 5}, "consumer": "x"}, "statements.a: expected a statement, got 5"),
        (URL, {"statements": {"a": "b"}}, "expected consumer, a name that tells"),
        (URL, {"table": "t", "consumer": "x" * 201}, "consumer: at most 200 characters fit, got 201"),
        (URL, {"statements": {"a": "SELECT :ide"}, "consumer": "x"}, "statements.a: unknown bind 'ide'; expected id, "),
        (URL, {"statements": {"a": "SELECT :payload__"}, "consumer": "x"}, "unknown bind 'payload__'"),
        (URL, {"statements": {"a": "SELECT 1"}, "consumer": "x", "params": {"b": "payload.b"}}, "params.b: no"),
        (URL, {"statements": {"a": "SELECT :b"}, "consumer": "x", "params": {"b": "b"}}, "params.b: expected a path"),
        (
            URL,
            {"statements": {"a": "SELECT :b"}, "consumer": "x", "params": {"b": {"pth": "payload.b"}}},
            "params.b: unknown key 'pth'; expected path, default. Did you mean 'path'?",
        ),
        (URL, {"table": "t", "params": {}}, "params: is for statements"),
        (URL, {"table": "t", "unmatched": "ignore"}, "unmatched: is for statements"),
        (URL, {"statements": {"a": "b"}, "consumer": "x", "columns": {"id": "id"}}, "columns: is for table"),
        (URL, {"table": "t", "columns": {"ide": "id"}}, "columns: unknown field 'ide'; expected id, "),
        (URL, {"table": "t", "columns": {"id": ""}}, "columns.id: expected text, got ''"),
        (URL, {"table": "t", "columns": {}}, "columns: expected at least one field of the event and its column"),
        (URL, {"table": "t", "dedup_keep": "0s"}, "dedup_keep: expected a duration above zero"),
        (URL, {"table": "t", "sslmode": "yes"}, "sslmode: expected disable, allow, prefer, require, verify-ca or "),
        (URL, {"table": "t", "sslmode": "require", "tls": True}, "tls: sslmode says it already; give one of them"),
        (URL, {"table": "t", "tls": False, "tls_verify": True}, "TLS is off; leave out its other options"),
        (URL, {"table": "t", "tls_ca": "x", "sslrootcert": "x"}, "sslrootcert: is given as tls_ca as well"),
        (URL, {"table": "t", "sslrootcert": "/none.pem"}, "tls_ca: there is no file '/none.pem'"),
        ("postgresql://user:hunter2@host", {"table": "t"}, "expected the name of a database after the server"),
        ("postgresql://user:hunter2@host:x/db", {"table": "t"}, "expected postgresql://host:port with a number"),
        ("sqlite:///:memory:", {"table": "t"}, "expected the path of a SQLite file, e.g. sqlite:///shop.db"),
        ("sqlite://", {"table": "t"}, "expected the path of a SQLite file, e.g. sqlite:///shop.db"),
    ],
)  # fmt: skip
def test_bad_option_is_refused_without_the_password(url, options, message):
    with pytest.raises(ConfigError) as refusal:
        open_sink(url, name="shop", **options)
    assert str(refusal.value).startswith("Sink 'shop'")
    assert message in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb"])
async def test_password_is_in_no_name_and_no_error(scheme):
    sink = open_sink(f"{scheme}://user:hunter2@127.0.0.1:1/db?table=t")
    assert sink.name == f"{scheme}://user:***@127.0.0.1:1/db?table=t"
    with pytest.raises(SinkUnavailable) as outage:
        await sink.open()
    await sink.close()
    assert "hunter2" not in str(outage.value)
    assert "hunter2" not in repr(sink)
