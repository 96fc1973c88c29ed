"""Which writer a URL or a class name stands for, and what is said when it stands for none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.writers import (
    WriterTraits,
    describe,
    load_writer_class,
    make_user_writer,
    open_writer,
)

# -- built-in writers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://u:p@h/db", "PostgresWriter"),
        ("postgres://h/db?sslmode=require", "PostgresWriter"),
        ("postgresql+psycopg://h/db", "PostgresWriter"),
        ("mysql://u:p@h:3307/db", "MysqlWriter"),
        ("mariadb://h/db", "MysqlWriter"),
        ("sqlite:///shop.db", "SqliteWriter"),
        ("sqlite:////var/lib/shop.db?foreign_keys=no", "SqliteWriter"),
        ("libsql://h", "LibsqlWriter"),
        ("https://h", "LibsqlWriter"),
    ],
)
def test_scheme_picks_the_writer(url, name):
    assert type(open_writer(url)).__name__ == name


def refusal(url: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        open_writer(url, **options)
    return str(refused.value)


def test_unknown_scheme_is_refused_with_those_that_are_known():
    assert refusal("oracle://u:s3cr3t@h/db") == (
        "Writer: expected a url with scheme postgresql, postgres, mysql, mariadb, sqlite, libsql, http, https; "
        "got 'oracle://u:***@h/db'"
    )
    assert "got NoneType" in refusal(None)


def test_unknown_option_is_refused_with_the_one_that_may_be_meant():
    assert "unknown option 'conections'" in refusal("postgresql://h/db", conections=2)
    assert "Did you mean 'connections'?" in refusal("postgresql://h/db", conections=2)
    assert "Did you mean 'sslmode'?" in refusal("postgresql://h/db?sslmod=require")
    assert "Did you mean 'timeout'?" in refusal("mysql://h/db?timeot=3s")


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("postgresql://h/db", {"connections": 0}, "connections: expected a whole number of 1 or more, got 0"),
        ("postgresql://h/db?connections=many", {}, "connections: expected a whole number"),
        ("postgresql://h/db", {"timeout": 0}, "timeout: expected a time above zero"),
        ("postgresql://h/db", {"timeout": "soon"}, "timeout: expected"),
        ("postgresql://h/db?timeout=3", {"timeout": 3}, "'timeout' is given twice"),
        ("postgresql://u:s3cr3t@h:port/db", {}, "the url cannot be read"),
        ("postgresql://u:s3cr3t/x@h/db", {}, "the url cannot be read"),
        ("mysql://u:s3cr3t@h", {}, "expected the name of a database"),
        ("mysql://h/db?tls=no", {"tls_ca": "x.pem"}, "TLS is off"),
        ("mysql://h/db", {"tls_ca": "/none.pem"}, "there is no file '/none.pem'"),
        ("sqlite://", {}, "expected the path of a SQLite file"),
        ("sqlite:///:memory:", {}, "expected the path of a SQLite file"),
        ("sqlite:///x.db#y", {}, "write '#' as '%23'"),
    ],
)
def test_wrong_value_is_refused_without_showing_secrets(url, options, words):
    error = refusal(url, **options)
    assert words in error
    assert "s3cr3t" not in error


def test_options_may_stand_in_the_url_or_beside_it():
    assert describe(open_writer("postgresql://h/db?connections=7&timeout=5")).concurrency == 7
    assert describe(open_writer("mysql://h/db", connections=2, timeout="5s")).concurrency == 2


def test_package_imports_no_driver():
    code = (
        "import sys, pillarbox, pillarbox.sync.writers; "
        "print([name for name in ('sqlglot', 'httpx', 'psycopg', 'pymysql', 'aiomysql') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("module", "url", "extra"), [("psycopg", "postgresql://h/db", "postgres"), ("aiomysql", "mysql://h/db", "mysql")]
)
def test_missing_driver_names_its_extra(module, url, extra):
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from pillarbox.errors import MissingExtra\nfrom pillarbox.sync.writers import open_writer\n"
        f"try: open_writer({url!r})\nexcept MissingExtra as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"pip install 'pillarbox[{extra}]'" in shown


# -- what a writer says of itself ------------------------------------------------------------------------------------


class Plain:
    def __init__(self, url: str, *, token: str = "") -> None:
        self.url = url

    async def write_batch(self, statements: Any) -> Any:
        return []


class Told(Plain):
    batches = "ordered"
    dialect = "mysql"
    concurrency = 3


class Outer:
    Inner = Plain


class Blocking:
    def write_batch(self, statements: Any) -> Any:
        return []


class Failing(Plain):
    def __init__(self, url: str) -> None:
        raise ValueError(f"cannot use {url}")


def test_writer_that_says_nothing_promises_the_least():
    assert describe(Plain("x")) == WriterTraits(batches="single", dialect="sqlite", concurrency=1)
    assert describe(Told("x")) == WriterTraits(batches="ordered", dialect="mysql", concurrency=3)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("batches", "all"), ("dialect", "oracle"), ("concurrency", 0), ("concurrency", True), ("concurrency", "4")],
)
def test_attribute_that_means_nothing_is_refused(attribute, value):
    writer = Plain("x")
    setattr(writer, attribute, value)
    with pytest.raises(ConfigError, match=rf"Writer Plain\.{attribute}: expected .*; got {value!r}"):
        describe(writer)


# -- classes of the user's -------------------------------------------------------------------------------------------

HERE = __name__


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that cannot be used, on the path."""
    (tmp_path / "sync_broken.py").write_text("1 / 0\n")
    (tmp_path / "sync_needy.py").write_text("import sync_no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("shop.writers.Turso", "expected 'module:Class'"),
        (":Turso", "expected 'module:Class'"),
        ("sync_no_such_module:Turso", "there is no module 'sync_no_such_module'"),
        ("pillarbox.nowhere:Turso", "there is no module 'pillarbox.nowhere'"),
        ("sync_broken:Turso", "module 'sync_broken' fails: ZeroDivisionError"),
        ("sync_needy:Turso", "module 'sync_needy' needs 'sync_no_such_library'"),
        ("{here}:Missing", "has no 'Missing'"),
        ("{here}:HERE", "expected a class, got str 'HERE'"),
        ("{here}:Blocking", "expected a method 'async def write_batch(self, statements)'"),
    ],
)
def test_class_that_cannot_be_used_is_refused_by_name(path, words, modules, monkeypatch):
    monkeypatch.setitem(sys.modules, "sync_tests_here", sys.modules[HERE])
    path = path.format(here="sync_tests_here")
    with pytest.raises(ConfigError) as refused:
        load_writer_class(path)
    assert str(refused.value).startswith(f"Writer class {path!r}: ")
    assert words in str(refused.value)


def test_class_is_made_with_the_connection_as_keywords(monkeypatch):
    monkeypatch.setitem(sys.modules, "sync_tests_here", sys.modules[HERE])
    assert load_writer_class("sync_tests_here:Outer.Inner") is Plain
    made: Any = make_user_writer("sync_tests_here:Plain", {"url": "x", "token": "t"})
    assert made.url == "x"


@pytest.mark.parametrize(
    ("name", "connection", "words"),
    [
        ("Plain", {"url": "s3cr3t", "tokne": "s3cr3t"}, "(tokne, url): got an unexpected keyword argument 'tokne'"),
        ("Plain", {}, "(none): missing a required argument: 'url'"),
        ("Failing", {"url": "s3cr3t"}, "its constructor failed: ValueError: cannot use ***"),
    ],
)
def test_connection_that_does_not_fit_is_refused_without_its_values(name, connection, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "sync_tests_here", sys.modules[HERE])
    with pytest.raises(ConfigError) as refused:
        make_user_writer(f"sync_tests_here:{name}", connection)
    assert words in str(refused.value)
    assert "s3cr3t" not in str(refused.value)
