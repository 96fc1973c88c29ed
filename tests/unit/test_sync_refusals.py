"""Statements that no batch may hold are refused before they are sent."""

from __future__ import annotations

import pytest

from pillarbox.errors import PillarboxError, UnsupportedStatement
from pillarbox.sync.binds import Dialect
from pillarbox.sync.rewrite import plan_statement
from pillarbox.sync.writers.shared import check_statement, first_word

EVERYWHERE: tuple[Dialect, ...] = ("sqlite", "postgresql", "mysql")


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize(
    "sql",
    [
        "BEGIN", "BEGIN IMMEDIATE", "start transaction", "COMMIT", "COMMIT WORK;", "END", "ROLLBACK", "ROLLBACK TO a",
        "SAVEPOINT a", "RELEASE a", "/* x */ commit", "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "PREPARE TRANSACTION 'x'",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dialect", EVERYWHERE)
def test_transaction_control_is_refused(dialect: Dialect, sql: str, inject: bool) -> None:
    with pytest.raises(UnsupportedStatement, match="controls a transaction"):
        plan_statement(sql, dialect=dialect, inject=inject)


@pytest.mark.parametrize("sql", ["CREATE TABLE u (a int)", "TRUNCATE t", "LOCK TABLES t WRITE", "GRANT ALL ON t TO u"])
def test_what_makes_mysql_commit_is_refused(sql: str) -> None:
    with pytest.raises(UnsupportedStatement, match="makes MySQL commit at once"):
        plan_statement(sql, dialect="mysql", inject=True)


def test_setting_that_ends_transactions_is_refused_on_mysql() -> None:
    with pytest.raises(UnsupportedStatement, match="controls a transaction"):
        plan_statement("SET SESSION autocommit = 1", dialect="mysql", inject=True)


@pytest.mark.parametrize(
    "sql",
    [
        "CALL p()", "PREPARE x FROM 'COMMIT'",
        "EXECUTE x", "EXECUTE IMMEDIATE 'COMMIT'", "/*!40000 TRUNCATE */ TABLE t",
        "/*M! COMMIT */ DELETE FROM t", "INSERT /*! IGNORE */ INTO t (a) VALUES (?)", "DELETE FROM t /*!; COMMIT */",
    ],
)  # fmt: skip
def test_what_may_commit_by_itself_is_refused_on_mysql(sql: str) -> None:
    for inject in (True, False):
        with pytest.raises(UnsupportedStatement, match="may commit by itself"):
            plan_statement(sql, dialect="mysql", inject=inject)


@pytest.mark.parametrize(
    ("dialect", "sql"),
    [
        ("mysql", "DELETE FROM t /* ! */"),
        ("mysql", "DELETE /*+ NO_INDEX_MERGE(t) */ FROM t"),
        ("postgresql", "CALL p(?)"),
        ("postgresql", "SET LOCAL lock_timeout = '1s'"),
        ("postgresql", "SET CONSTRAINTS ALL DEFERRED"),
        ("postgresql", "CREATE TEMP TABLE u (a int) ON COMMIT DROP"),
        ("sqlite", "PRAGMA user_version = 5"),
        ("sqlite", "PRAGMA main.user_version = 5"),
        ("sqlite", "PRAGMA optimize"),
    ],
)
def test_what_only_looks_like_it_passes(dialect: Dialect, sql: str) -> None:
    assert plan_statement(sql, dialect=dialect, inject=True).sql == sql


@pytest.mark.parametrize(
    ("dialect", "sql"),
    [
        ("sqlite", "PRAGMA foreign_keys = ON"),
        ("sqlite", "PRAGMA foreign_keys(1)"),
        ("sqlite", "ATTACH 'x' AS y"),
        ("sqlite", "CREATE TEMP TABLE t (a)"),
        ("postgresql", "set search_path to x"),
        ("postgresql", "SET SESSION search_path = x"),
        ("postgresql", "RESET search_path"),
        ("postgresql", "DISCARD ALL"),
        ("postgresql", "LISTEN x"),
        ("postgresql", "PREPARE x AS SELECT 1"),
        ("postgresql", "CREATE OR REPLACE TEMPORARY VIEW t AS SELECT 1"),
        ("mysql", "SET NAMES latin1"),
        ("mysql", "SET LOCAL sql_mode = ''"),
        ("mysql", "SET @a = ?"),
        ("mysql", "USE mysql"),
        ("mysql", "CREATE TEMPORARY TABLE u (a int)"),
    ],
)
def test_what_changes_the_session_is_refused(dialect: Dialect, sql: str) -> None:
    for inject in (True, False):
        with pytest.raises(UnsupportedStatement, match="changes the session of later batches"):
            plan_statement(sql, dialect=dialect, inject=inject)


@pytest.mark.parametrize("sql", ["", "  ", ";", "-- nothing", "/* nothing */;"])
def test_empty_text_is_refused(sql: str) -> None:
    with pytest.raises(UnsupportedStatement, match="Expected one SQL statement; got"):
        plan_statement(sql, dialect="sqlite", inject=True)


@pytest.mark.parametrize("sql", ["DELETE FROM t; DELETE FROM u", "INSERT INTO t (a) VALUES (1); COMMIT"])
def test_several_statements_are_refused(sql: str) -> None:
    with pytest.raises(UnsupportedStatement, match=r"got several in .* Push each of them on its own"):
        plan_statement(sql, dialect="sqlite", inject=False)


def test_first_word_is_found_behind_semicolons_and_comments() -> None:
    assert first_word("; /* a */ ;\n-- b\n sElect 1") == "SELECT"
    for dialect in EVERYWHERE:
        with pytest.raises(UnsupportedStatement, match="controls a transaction"):
            check_statement(";; /* x */ COMMIT", dialect, arguments=0)


def test_refusal_is_an_error_of_ours_and_of_the_value() -> None:
    assert issubclass(UnsupportedStatement, PillarboxError)
    assert issubclass(UnsupportedStatement, ValueError)
