"""Placeholders are found where a database would find them, and nowhere else."""

from __future__ import annotations

import pytest

from pillarbox.errors import UnsupportedStatement
from pillarbox.sync.binds import Dialect, count_binds, split_binds, to_percent

EVERYWHERE: tuple[Dialect, ...] = ("sqlite", "postgresql", "mysql")


@pytest.mark.parametrize("dialect", EVERYWHERE)
@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("SELECT 1", 0),
        ("INSERT INTO t VALUES (?, ?)", 2),
        ("INSERT INTO t VALUES (?,'what?', ?)", 2),
        ("INSERT INTO t VALUES ('it''s ?', ?)", 1),
        ("INSERT INTO t VALUES (?) -- really?\n", 1),
        ("INSERT INTO t VALUES (?) -- no newline at the end?", 1),
        ("INSERT /* ? */ INTO t VALUES (?)", 1),
        ("INSERT INTO t VALUES (-?, (?), ?||'x', ?)", 4),
        ("REPLACE INTO t VALUES (?)", 1),
        ("CALL p(?, ?)", 2),
        ("UPDATE t SET a=?WHERE b=?", 2),
        ("INSERT INTO t VALUES ('🎉?', ?, 'é')", 1),
        ("INSERT INTO t VALUES (?,\r\n?\r\n)", 2),
    ],
)
def test_question_marks_in_strings_and_comments_are_no_binds(sql: str, count: int, dialect: Dialect) -> None:
    assert count_binds(sql, dialect) == count


@pytest.mark.parametrize(
    ("dialect", "sql", "count"),
    [
        ("sqlite", 'INSERT INTO "a?" ([b?], `c?`) VALUES (?)', 1),
        ("sqlite", "SELECT 'a\\', ?", 1),
        ("sqlite", "SELECT /* a /* ? */ ?", 1),
        ("sqlite", "SELECT x'41', 0x41, ?", 1),
        ("postgresql", 'INSERT INTO "a?" VALUES (?)', 1),
        ("postgresql", "SELECT 'a\\', ?", 1),
        ("postgresql", "SELECT E'a\\'?', ?", 1),
        ("postgresql", "SELECT $$ ? $$, $body$ ? $$ ? $body$, ?", 1),
        ("postgresql", "SELECT U&'\\0061?', N'?', B'1', ?", 1),
        ("postgresql", "SELECT /* a /* ? */ ? */ ?", 1),
        ("postgresql", "SELECT ?::int, CAST(? AS text)", 2),
        ("postgresql", "SELECT a->>? , b->?, c @> ?", 3),
        ("postgresql", "SELECT * FROM t WHERE a = ? AND b LIKE ? LIMIT ? OFFSET ?", 4),
        ("mysql", "INSERT INTO `a?` VALUES (\"b?\", 'c\\'?', ?)", 1),
        ("mysql", "SELECT ? # ?\n, ?", 2),
        ("mysql", "SELECT ?--?", 2),
        ("mysql", "SELECT ? -- ?", 1),
    ],
)
def test_quotes_and_comments_are_those_of_the_database(dialect: Dialect, sql: str, count: int) -> None:
    assert count_binds(sql, dialect) == count


@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("VALUES (?1, ?2)", 2),
        ("VALUES (?2, ?2)", 2),
        ("VALUES (?3, ?)", 4),
        ("VALUES (:a, :b, :a)", 2),
        ("VALUES (@a, $b, ?)", 3),
    ],
)
def test_sqlites_numbered_and_named_binds_are_counted(sql: str, count: int) -> None:
    assert count_binds(sql, "sqlite") == count


def test_pieces_are_the_text_around_the_binds() -> None:
    assert split_binds("a = ? AND b = '?' AND c = ?", "sqlite") == ("a = ", " AND b = '?' AND c = ", "")


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_percent_signs_are_doubled_beside_the_binds(dialect: Dialect) -> None:
    sql = "UPDATE t SET a = ?, b = '100%' WHERE c LIKE '%?' AND d % 2 = ? -- 5%"
    percent = "UPDATE t SET a = %s, b = '100%%' WHERE c LIKE '%%?' AND d %% 2 = %s -- 5%%"
    assert to_percent(sql, dialect) == percent


@pytest.mark.parametrize(
    ("sql", "arguments", "percent"),
    [
        ("SELECT a ? 'x'", 0, "SELECT a ? 'x'"),
        ("SELECT a ? ?", 1, "SELECT a ? %s"),
        ("SELECT a ?| b, c ?& d, ?", 1, "SELECT a ?| b, c ?& d, %s"),
        ("SELECT (a -> 'b') ? 'c' WHERE d = ?", 1, "SELECT (a -> 'b') ? 'c' WHERE d = %s"),
        ("SELECT a @? '$.b' WHERE c = ?", 1, "SELECT a @? '$.b' WHERE c = %s"),
        ("SELECT a @? ?", 1, "SELECT a @? %s"),
        ("SELECT a ?# b, c ?- d, e ?-| f, ?", 1, "SELECT a ?# b, c ?- d, e ?-| f, %s"),
        ("SELECT @?, (?-1), a - ?", 3, "SELECT @%s, (%s-1), a - %s"),
        ("SELECT INTERVAL ? day", 1, "SELECT INTERVAL %s day"),
        ("SELECT ? || 'x', ?||'y'", 2, "SELECT %s || 'x', %s||'y'"),
    ],
)
def test_operator_is_told_from_a_bind_by_the_number_of_arguments(sql: str, arguments: int, percent: str) -> None:
    assert to_percent(sql, "postgresql", arguments=arguments) == percent


@pytest.mark.parametrize("arguments", [None, 5])
def test_doubtful_operator_is_refused_with_the_function_to_write(arguments: int | None) -> None:
    with pytest.raises(
        UnsupportedStatement, match=r"Expected 1 or 0 arguments.*Write jsonb_exists\(value, key\).* jsonb_path_ex"
    ):
        count_binds("SELECT a ? 'x'", "postgresql", arguments=arguments)


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_numbered_binds_are_refused_where_the_database_has_none(dialect: Dialect) -> None:
    with pytest.raises(UnsupportedStatement, match=r"placeholder \?1, which .* does not know"):
        count_binds("SELECT ?1", dialect)


def test_named_binds_are_not_translated() -> None:
    with pytest.raises(UnsupportedStatement, match="numbered or named placeholders"):
        to_percent("SELECT :a", "sqlite")


@pytest.mark.parametrize("dialect", EVERYWHERE)
@pytest.mark.parametrize("sql", ["", " ", "-- x", "/* ? */"])
def test_text_without_a_statement_is_refused(sql: str, dialect: Dialect) -> None:
    with pytest.raises(UnsupportedStatement, match="Expected one SQL statement; got"):
        count_binds(sql, dialect)


@pytest.mark.parametrize("dialect", EVERYWHERE)
@pytest.mark.parametrize("sql", ["SELECT 'open", 'SELECT "open', "SELECT ? /* open"])
def test_text_that_cannot_be_read_is_refused(sql: str, dialect: Dialect) -> None:
    with pytest.raises(UnsupportedStatement, match="cannot be read as"):
        count_binds(sql, dialect)


def test_unknown_dialect_is_refused() -> None:
    with pytest.raises(UnsupportedStatement, match="got 'oracle'"):
        count_binds("SELECT 1", "oracle")  # type: ignore[arg-type]
