"""Expressions of one meaning are equal however they are written, and those of another are not."""

import pytest

from pillarbox.schema.predicates import canonical, columns_of, readable


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("lane >= 0 AND lane < 64", "((lane >= 0) AND (lane < 64))"),
        ("lane >= 0 AND lane < 64", "((`lane` >= 0) and (`lane` < 64))"),
        ("lane >= 0 AND lane < 64", "64 > LANE and 0 <= lane"),
        ("lane BETWEEN 0 AND 63", "((lane >= 0) AND (lane <= 63))"),
        ("state IN (1, 2, 3)", "(state = ANY (ARRAY[3, 2, 1]))"),
        ("state IN (1, 2)", "(state = ANY (ARRAY[1, 2]::bigint[]))"),
        ("state NOT IN (1, 2)", "(state <> ALL (ARRAY[1, 2]))"),
        ("state IN (1)", "state = 1"),
        (
            "status IN ('a', 'b')",
            "((status)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])::text[]))",
        ),
        ("status <> 'x'", "(`status` <> _utf8mb4'x')"),
        ("(a IS NULL) = (b IS NULL)", "((b IS NULL) = (a IS NULL))"),
        ("key IS NOT NULL", 'NOT ("key" IS NULL)'),
        ("name LIKE 'x%'", "((name)::text ~~ 'x%'::text)"),
        ("a = 1 OR b = 2 AND c = 3", "((a = 1) OR ((b = 2) AND (c = 3)))"),
        ("length(a) > 3", "(t.length(a) > 3)"),
        ("now()", "CURRENT_TIMESTAMP"),
        ("0", "'0'::smallint"),
        ("''", "''::character varying"),
        ("'{}'", "'{}'::jsonb"),
        ("false", "FALSE"),
        ("'2020-01-31'", "'2020-01-31'::timestamp(3) without time zone"),
        ("CASE WHEN a = 1 THEN 2 ELSE 3 END", "CASE WHEN (a = 1) THEN 2 ELSE 3 END"),
        ("CAST(a AS varchar(10)) = 'x'", "((a)::character varying(10) = 'x')"),
    ],
)
def test_same_meaning_is_equal(written: str, printed: str) -> None:
    assert canonical(written) == canonical(printed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("lane < 64", "lane < 63"),
        ("lane < 64", "lane <= 64"),
        ("lane < 64", "lane > 64"),
        ("a = 1 AND b = 2", "a = 1 OR b = 2"),
        ("(a = 1 OR b = 2) AND c = 3", "a = 1 OR b = 2 AND c = 3"),
        ("a IS NULL", "a IS NOT NULL"),
        ("state IN (1, 2)", "state IN (1, 2, 3)"),
        ("state IN (1, 2)", "state NOT IN (1, 2)"),
        ("a - b", "b - a"),
        ("a - (b - c)", "a - b - c"),
        ("'a'", "a"),
        ("'now()'", "now()"),
        ("'A'", "'a'"),
        ("lower(a)", "upper(a)"),
        ("a = 1", "a = -1"),
        ("'x::text'", "'x'"),
        ("true", "false"),
    ],
)
def test_other_meaning_is_different(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize("text", ["a ===> b", "(a", "a b c", "", "CAST(", "x::", "a IN (1"])
def test_what_cannot_be_read_is_compared_word_by_word(text: str) -> None:
    assert canonical(text) == canonical(f" {text} ")
    assert canonical(text) != canonical(f"{text} z")


def test_columns_are_names_that_are_not_called() -> None:
    assert columns_of('lower("Key") = a') == {"key", "a"}


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        ("((lane >= 0) AND (lane < 64))", "((lane >= 0) AND (lane < 64))"),
        ("((state)::text = 'x'::text)", "(state = 'x')"),
        (
            "((s)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])::text[]))",
            "(s = ANY (ARRAY['a', 'b']))",
        ),
        (
            "((s)::text = ANY (ARRAY[('a'::character varying)::text, ('b'::character varying)::text]))",
            "(s = ANY (ARRAY['a', 'b']))",
        ),
        ("length((a)::text) > 3", "length(a) > 3"),
        ("length(a) > 3", "length(a) > 3"),
    ],
)
def test_casts_are_not_shown(printed: str, text: str) -> None:
    assert readable(printed) == text
