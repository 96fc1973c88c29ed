"""What a pushed statement becomes: the expected texts are written by hand."""

from __future__ import annotations

import pytest

from pillarbox.errors import UnsupportedStatement
from pillarbox.sync.binds import Dialect
from pillarbox.sync.rewrite import Plan, inject_outbox_seq, plan_statement

EVERYWHERE: tuple[Dialect, ...] = ("sqlite", "postgresql", "mysql")
CLAUSE = "ON CONFLICT (outbox_seq) WHERE outbox_seq <> 0 DO NOTHING"
UNLESS = "WHERE NOT EXISTS (SELECT 1 FROM t WHERE outbox_seq = ?)"


def carrying(sql: str, dialect: Dialect = "sqlite", *, columns: tuple[str, ...] | None = None) -> Plan:
    return plan_statement(sql, dialect=dialect, inject=True, on_repeat="error", columns=columns)


def guarded(sql: str, dialect: Dialect = "sqlite", *, columns: tuple[str, ...] | None = None) -> Plan:
    return plan_statement(sql, dialect=dialect, inject=True, on_repeat="ignore", columns=columns)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("INSERT INTO t (a, b) VALUES (?, ?)", "INSERT INTO t (a, b, outbox_seq) VALUES (?, ?, ?)"),
        ("INSERT INTO t (a)\nVALUES\n(?)", "INSERT INTO t (a, outbox_seq)\nVALUES\n(?, ?)"),
        ("insert into t(a)values(?)", "insert into t(a, outbox_seq)values(?, ?)"),
        ("INSERT INTO t (a) VALUES (?);", "INSERT INTO t (a, outbox_seq) VALUES (?, ?);"),
        ("INSERT INTO t (a) VALUES (lower(?))", "INSERT INTO t (a, outbox_seq) VALUES (lower(?), ?)"),
        (
            "INSERT INTO t (a, b) VALUES (upper(lower(?)), coalesce(?, 'x)'))",
            "INSERT INTO t (a, b, outbox_seq) VALUES (upper(lower(?)), coalesce(?, 'x)'), ?)",
        ),
        (
            "INSERT INTO t (a) VALUES ((SELECT max(b) FROM u WHERE c IN (?, ?)))",
            "INSERT INTO t (a, outbox_seq) VALUES ((SELECT max(b) FROM u WHERE c IN (?, ?)), ?)",
        ),
        (
            "INSERT INTO t (a -- the first )\n) VALUES (? /* VALUES ( */) -- done",
            "INSERT INTO t (a -- the first )\n, outbox_seq) VALUES (? /* VALUES ( */, ?) -- done",
        ),
        ("INSERT INTO t (a) VALUES (') VALUES (?')", "INSERT INTO t (a, outbox_seq) VALUES (') VALUES (?', ?)"),
        ("INSERT INTO main.t (a) VALUES (?)", "INSERT INTO main.t (a, outbox_seq) VALUES (?, ?)"),
        ("INSERT INTO t (a) VALUES (?) RETURNING a", "INSERT INTO t (a, outbox_seq) VALUES (?, ?) RETURNING a"),
        (
            "WITH u AS (SELECT ? AS x) INSERT INTO t (a) VALUES ((SELECT x FROM u))",
            "WITH u AS (SELECT ? AS x) INSERT INTO t (a, outbox_seq) VALUES ((SELECT x FROM u), ?)",
        ),
    ],
)
@pytest.mark.parametrize("dialect", EVERYWHERE)
def test_insert_carries_the_number_and_stays_as_it_was_elsewhere(dialect: Dialect, sql: str, expected: str) -> None:
    plan = carrying(sql, dialect)
    assert (plan.sql, plan.kind, plan.carries_seq) == (expected, "insert", True)


@pytest.mark.parametrize(
    ("dialect", "sql", "expected"),
    [
        (
            "sqlite",
            'INSERT INTO "t" ([a b], `c`) VALUES (?, 1)',
            'INSERT INTO "t" ([a b], `c`, outbox_seq) VALUES (?, 1, ?)',
        ),
        ("sqlite", "INSERT OR ABORT INTO t (a) VALUES (?)", "INSERT OR ABORT INTO t (a, outbox_seq) VALUES (?, ?)"),
        ("sqlite", "INSERT OR FAIL INTO t (a) VALUES (?)", "INSERT OR FAIL INTO t (a, outbox_seq) VALUES (?, ?)"),
        ("sqlite", "INSERT INTO t DEFAULT VALUES", "INSERT INTO t (outbox_seq) VALUES (?)"),
        ("sqlite", "INSERT INTO t (a) VALUES (?1)", "INSERT INTO t (a, outbox_seq) VALUES (?1, ?2)"),
        (
            "sqlite",
            "INSERT INTO t AS x (a) VALUES (?) ON CONFLICT (a) DO UPDATE SET a = x.a || ?",
            "INSERT INTO t AS x (a, outbox_seq) VALUES (?, ?) ON CONFLICT (a) DO UPDATE SET a = x.a || ?",
        ),
        (
            "postgresql",
            'INSERT INTO "s"."t" AS x ("a") OVERRIDING USER VALUE VALUES (?::int) RETURNING a',
            'INSERT INTO "s"."t" AS x ("a", outbox_seq) OVERRIDING USER VALUE VALUES (?::int, ?) RETURNING a',
        ),
        (
            "postgresql",
            "INSERT INTO t (a) VALUES ($$)$$, DEFAULT)",
            "INSERT INTO t (a, outbox_seq) VALUES ($$)$$, DEFAULT, ?)",
        ),
        ("postgresql", "INSERT INTO t DEFAULT VALUES RETURNING a", "INSERT INTO t (outbox_seq) VALUES (?) RETURNING a"),
        (
            "postgresql",
            "INSERT INTO t (a) VALUES (?) ON CONFLICT ON CONSTRAINT t_pkey DO NOTHING",
            "INSERT INTO t (a, outbox_seq) VALUES (?, ?) ON CONFLICT ON CONSTRAINT t_pkey DO NOTHING",
        ),
        ("mysql", "INSERT INTO t (a) VALUE (?)", "INSERT INTO t (a, outbox_seq) VALUE (?, ?)"),
        ("mysql", "INSERT LOW_PRIORITY t (a) VALUES (?)", "INSERT LOW_PRIORITY t (a, outbox_seq) VALUES (?, ?)"),
        ("mysql", "INSERT `t` (`a`) VALUES (?)", "INSERT `t` (`a`, outbox_seq) VALUES (?, ?)"),
        ("mysql", "INSERT INTO t () VALUES ()", "INSERT INTO t (outbox_seq) VALUES (?)"),
        ("mysql", "INSERT INTO t VALUES ()", "INSERT INTO t (outbox_seq) VALUES (?)"),
        ("mysql", "INSERT INTO t SET a = ?, b = 1", "INSERT INTO t SET a = ?, b = 1, outbox_seq = ?"),
        (
            "mysql",
            "INSERT INTO t PARTITION (p0) (a) VALUES (?)",
            "INSERT INTO t PARTITION (p0) (a, outbox_seq) VALUES (?, ?)",
        ),
    ],
)
def test_shapes_of_one_database_are_known(dialect: Dialect, sql: str, expected: str) -> None:
    plan = carrying(sql, dialect)
    assert (plan.sql, plan.kind, plan.carries_seq) == (expected, "insert", True)


@pytest.mark.parametrize(
    ("dialect", "others"), [("sqlite", "0"), ("postgresql", "0"), ("mysql", "NULL")], ids=lambda each: str(each)
)
def test_first_of_several_rows_carries_the_number(dialect: Dialect, others: str) -> None:
    plan = carrying("INSERT INTO t (a) VALUES (?), (lower(?)), (3)", dialect)
    assert plan.sql == f"INSERT INTO t (a, outbox_seq) VALUES (?, ?), (lower(?), {others}), (3, {others})"
    assert plan.bind(["a", "b"], 7) == ["a", 7, "b"]


@pytest.mark.parametrize(
    ("sql", "args", "bound"),
    [
        ("INSERT INTO t (a, b) VALUES (?, ?)", [1, 2], [1, 2, 99]),
        ("INSERT INTO t DEFAULT VALUES", [], [99]),
        ("INSERT INTO t (a) VALUES (?) ON CONFLICT (a) DO UPDATE SET b = ? WHERE c = ?", [1, 2, 3], [1, 99, 2, 3]),
        ("WITH u AS (SELECT ?) INSERT INTO t (a) VALUES (?) RETURNING ?", [1, 2, 3], [1, 2, 99, 3]),
        ("INSERT INTO t (a, b) VALUES (?2, ?1) ON CONFLICT (a) DO UPDATE SET b = ?3", [1, 2, 3], [1, 2, 3, 99]),
        ("INSERT INTO t (a, b) VALUES (:a, :a)", [1], [1, 99]),
        ("UPDATE t SET a = ?", [1], [1]),
    ],
)
def test_number_is_bound_where_its_placeholder_is(sql: str, args: list[int], bound: list[int]) -> None:
    given = list(args)
    assert carrying(sql).bind(given, 99) == bound
    assert given == args


@pytest.mark.parametrize("args", [[], [1], [1, 2, 3]])
def test_wrong_number_of_arguments_is_refused(args: list[int]) -> None:
    for inject in (True, False):
        plan = plan_statement("INSERT INTO t (a, b) VALUES (?, ?)", dialect="sqlite", inject=inject)
        with pytest.raises(UnsupportedStatement, match=f"pushed with {len(args)} arguments; expected 2, one for each"):
            plan.bind(args, 1)


def test_operator_of_jsonb_is_left_out_of_the_count() -> None:
    plan = carrying("INSERT INTO t (a, b) VALUES ('{}'::jsonb ? 'x', ?)", "postgresql")
    assert plan.bind(["b"], 7) == ["b", 7]
    with pytest.raises(UnsupportedStatement, match="expected 2 or 1"):
        plan.bind([], 7)


@pytest.mark.parametrize(
    ("dialect", "sql"),
    [
        ("sqlite", "INSERT OR IGNORE INTO t (a) VALUES (?)"),
        ("sqlite", "INSERT OR REPLACE INTO t (a) VALUES (?)"),
        ("sqlite", "REPLACE INTO t (a) VALUES (?)"),
        ("sqlite", "REPLACE INTO t (a) VALUES (?1)"),
        ("sqlite", "INSERT INTO t DEFAULT VALUES ON CONFLICT DO NOTHING"),
        ("sqlite", "INSERT INTO t (a) VALUES (?) ON CONFLICT DO UPDATE SET a = 1"),
        ("sqlite", "INSERT INTO t (a) VALUES (?) ON CONFLICT (a) DO NOTHING ON CONFLICT DO UPDATE SET a = 1"),
        ("sqlite", "INSERT OR REPLACE INTO t (a) VALUES (?) ON CONFLICT (a) DO NOTHING"),
        ("sqlite", "INSERT INTO t (a) VALUES (?) ON CONFLICT (a) DO NOTHING ON CONFLICT (Outbox_Seq) DO NOTHING"),
        ("postgresql", "INSERT INTO t (a) VALUES (?) ON CONFLICT DO NOTHING RETURNING a"),
        ("postgresql", 'INSERT INTO t (a) VALUES (?) ON CONFLICT ("outbox_seq") WHERE a > 0 DO UPDATE SET a = 1'),
        ("mysql", "INSERT IGNORE INTO t (a) VALUE (?)"),
        ("mysql", "REPLACE `t` (`a`) VALUES (?)"),
        ("mysql", "REPLACE t SET a = ?"),
        ("mysql", "INSERT INTO t (a) VALUES (?) ON DUPLICATE KEY UPDATE a = 1"),
        ("mysql", "INSERT INTO t SET a = ? ON DUPLICATE KEY UPDATE a = 1"),
        ("mysql", "INSERT INTO t (a) VALUES ROW(?) AS n (x) ON DUPLICATE KEY UPDATE a = n.x"),
    ],
)
def test_insert_that_settles_any_conflict_by_itself_carries_no_number(dialect: Dialect, sql: str) -> None:
    plan = carrying(sql, dialect)
    args = [1] * ("(?" in sql or "= ?" in sql)
    assert (plan.sql, plan.kind, plan.carries_seq, plan.bind(args, 7)) == (sql, "insert", False, args)


def test_insert_without_columns_that_settles_any_conflict_names_them_but_carries_no_number() -> None:
    sql = "INSERT OR IGNORE INTO t VALUES (?, ?)"
    assert carrying(sql).needs_columns
    plan = carrying(sql, columns=("a", "outbox_seq", "b"))
    assert (plan.sql, plan.carries_seq) == ('INSERT OR IGNORE INTO t ("a", "b") VALUES (?, ?)', False)
    assert plan.bind([1, 2], 7) == [1, 2]


# -- no column list ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("sqlite", 'INSERT INTO t ("a", "b ""c""", outbox_seq) VALUES (?, ?, ?)'),
        ("postgresql", 'INSERT INTO t ("a", "b ""c""", outbox_seq) VALUES (?, ?, ?)'),
        ("mysql", 'INSERT INTO t (`a`, `b "c"`, outbox_seq) VALUES (?, ?, ?)'),
    ],
)
def test_insert_without_columns_takes_those_of_the_table(dialect: Dialect, expected: str) -> None:
    sql = "INSERT INTO t VALUES (?, ?)"
    asking = carrying(sql, dialect)
    assert (asking.needs_columns, asking.carries_seq) == (True, False)
    with pytest.raises(UnsupportedStatement, match="names no columns"):
        asking.bind([1, 2], 7)
    plan = carrying(sql, dialect, columns=("a", 'b "c"', "outbox_seq"))
    assert (plan.sql, plan.needs_columns, plan.bind([1, 2], 7)) == (expected, False, [1, 2, 7])


@pytest.mark.parametrize(("dialect", "values"), [("sqlite", "?"), ("mysql", "?"), ("postgresql", "?, ?, ?")])
def test_number_of_values_that_the_table_does_not_have_is_refused(dialect: Dialect, values: str) -> None:
    with pytest.raises(UnsupportedStatement, match="Expected 2, one for each of the columns a, b"):
        carrying(f"INSERT INTO t VALUES ({values})", dialect, columns=("a", "b"))


def test_commas_within_a_value_are_not_counted() -> None:
    plan = carrying("INSERT INTO t VALUES (coalesce(?, 1, 'a, b'), (SELECT max(c, ?)))", columns=("a", "b"))
    assert plan.sql == (
        """INSERT INTO t ("a", "b", outbox_seq) VALUES (coalesce(?, 1, 'a, b'), (SELECT max(c, ?)), ?)"""
    )


def test_question_mark_in_a_name_is_no_place_for_the_number() -> None:
    plan = guarded('INSERT INTO "t?" VALUES (?), (2)', columns=("a?",))
    assert plan.sql == (
        'INSERT INTO "t?" ("a?", outbox_seq) SELECT * FROM (VALUES (?, ?), (2, 0)) '
        'WHERE NOT EXISTS (SELECT 1 FROM "t?" WHERE outbox_seq = ?)'
    )
    assert plan.bind([1], 7) == [1, 7, 7]


def test_fewer_values_than_columns_are_fine_on_postgresql() -> None:
    plan = carrying("INSERT INTO t VALUES (?)", "postgresql", columns=("a", "b"))
    assert plan.sql == 'INSERT INTO t ("a", outbox_seq) VALUES (?, ?)'


# -- left alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("INSERT INTO t (a) SELECT b FROM u WHERE c = ?", "insert"),
        ("INSERT INTO t SELECT * FROM u", "insert"),
        ("INSERT INTO t (a) VALUES (?) UNION ALL SELECT 2", "insert"),
        ("WITH u AS (SELECT 1 AS x) INSERT INTO t (a) SELECT x FROM u", "insert"),
        ("INSERT INTO t (a, outbox_seq) VALUES (?, 5)", "insert"),
        ("INSERT INTO t (a, OUTBOX_SEQ) VALUES (?, 5)", "insert"),
        ("UPDATE t SET a = ? WHERE b = 1", "update"),
        ("WITH u AS (SELECT 1) UPDATE t SET a = 1", "update"),
        ("DELETE FROM t WHERE a = ?", "delete"),
        ("SELECT * FROM t", "other"),
        ("WITH replace AS (SELECT 1), u (x) AS (SELECT 2) SELECT * FROM u", "other"),
    ],
)
@pytest.mark.parametrize("dialect", EVERYWHERE)
def test_statement_without_a_number_of_its_own_is_sent_as_it_is(dialect: Dialect, sql: str, kind: str) -> None:
    for plan in (carrying(sql, dialect), guarded(sql, dialect)):
        assert (plan.sql, plan.kind, plan.carries_seq) == (sql, kind, False)


@pytest.mark.parametrize("dialect", EVERYWHERE)
def test_nothing_is_added_when_injection_is_off(dialect: Dialect) -> None:
    sql = "INSERT INTO t VALUES (?, ?);"
    plan = plan_statement(sql, dialect=dialect, inject=False, on_repeat="ignore")
    assert (plan.sql, plan.kind, plan.needs_columns, plan.bind([1, 2], 7)) == (sql, "insert", False, [1, 2])


@pytest.mark.parametrize(
    ("sql", "table", "is_into"),
    [
        ("INSERT INTO t (a) VALUES (1)", "t", True),
        ("INSERT INTO T (a) VALUES (1)", "t", True),
        ('INSERT INTO "s"."t" (a) VALUES (1)', "t", True),
        ("INSERT INTO t (a) VALUES (1)", "s.t", True),
        ("INSERT INTO r.t (a) VALUES (1)", "s.t", False),
        ("INSERT INTO u (a) VALUES (1)", "t", False),
        ("INSERT INTO u VALUES (1)", "t", False),
    ],
)
def test_insert_into_another_table_is_left_alone(sql: str, table: str, is_into: bool) -> None:
    plan = plan_statement(sql, dialect="sqlite", inject=True, table=table, columns=("a",))
    assert plan.carries_seq is is_into
    assert (plan.sql == sql) is not is_into


@pytest.mark.parametrize("sql", ["CREATE TABLE u (a int)", "DROP TABLE u", "ALTER TABLE u ADD COLUMN b int"])
def test_ddl_passes_where_it_is_transactional(sql: str) -> None:
    for dialect in ("sqlite", "postgresql"):
        assert carrying(sql, dialect).sql == sql


def test_trigger_with_several_statements_is_one_statement() -> None:
    sql = "CREATE TRIGGER x AFTER INSERT ON t BEGIN DELETE FROM u; DELETE FROM v; END;"
    assert carrying(sql).kind == "other"


# -- repeats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "sql", "expected", "bound"),
    [
        ("sqlite", "INSERT INTO t (a) VALUES (?)", f"INSERT INTO t (a, outbox_seq) VALUES (?, ?) {CLAUSE}", [1, 7]),
        ("sqlite", "INSERT INTO t DEFAULT VALUES;", f"INSERT INTO t (outbox_seq) VALUES (?) {CLAUSE};", [7]),
        (
            "sqlite",
            "INSERT INTO t (a) VALUES (?) -- why?",
            f"INSERT INTO t (a, outbox_seq) VALUES (?, ?) {CLAUSE} -- why?",
            [1, 7],
        ),
        (
            "sqlite",
            "INSERT OR REPLACE INTO t (a) VALUES (?) RETURNING a",
            f"INSERT OR REPLACE INTO t (a, outbox_seq) VALUES (?, ?) {CLAUSE} RETURNING a",
            [1, 7],
        ),
        (
            "sqlite",
            "INSERT OR IGNORE INTO t (a) VALUES (?)",
            "INSERT OR IGNORE INTO t (a, outbox_seq) VALUES (?, ?)",
            [1, 7],
        ),
        (
            "sqlite",
            "INSERT INTO t (a) VALUES (?) ON CONFLICT (a) DO NOTHING",
            f"INSERT INTO t (a, outbox_seq) VALUES (?, ?) {CLAUSE} ON CONFLICT (a) DO NOTHING",
            [1, 7],
        ),
        (
            "sqlite",
            "INSERT INTO t(a)VALUES(?)ON CONFLICT(a)DO NOTHING",
            f"INSERT INTO t(a, outbox_seq)VALUES(?, ?) {CLAUSE} ON CONFLICT(a)DO NOTHING",
            [1, 7],
        ),
        (
            "postgresql",
            'INSERT INTO t(a)VALUES(?)RETURNING"a"',
            f'INSERT INTO t(a, outbox_seq)VALUES(?, ?) {CLAUSE} RETURNING"a"',
            [1, 7],
        ),
        (
            "sqlite",
            "INSERT INTO t (a) VALUES (?), (2)",
            f"INSERT INTO t (a, outbox_seq) SELECT * FROM (VALUES (?, ?), (2, 0)) {UNLESS}",
            [1, 7, 7],
        ),
        ("postgresql", "INSERT INTO t (a) VALUES (?)", f"INSERT INTO t (a, outbox_seq) VALUES (?, ?) {CLAUSE}", [1, 7]),
        (
            "postgresql",
            "INSERT INTO t (a) VALUES (?) ON CONFLICT DO NOTHING",
            "INSERT INTO t (a, outbox_seq) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [1, 7],
        ),
        (
            "postgresql",
            "INSERT INTO t (a) VALUES(?) ON CONFLICT (a) DO NOTHING",
            f"INSERT INTO t (a, outbox_seq) SELECT ?, ? {UNLESS} ON CONFLICT (a) DO NOTHING",
            [1, 7, 7],
        ),
        (
            "mysql",
            "INSERT INTO t (a) VALUES(?)",
            f"INSERT INTO t (a, outbox_seq) SELECT ?, ? FROM DUAL {UNLESS}",
            [1, 7, 7],
        ),
        (
            "mysql",
            "REPLACE INTO t (a) VALUES(CAST(? AS CHAR))",
            f"REPLACE INTO t (a, outbox_seq) SELECT CAST(? AS CHAR), ? FROM DUAL {UNLESS}",
            [1, 7, 7],
        ),
        (
            "mysql",
            "INSERT IGNORE INTO t (a) VALUES (?)",
            "INSERT IGNORE INTO t (a, outbox_seq) VALUES (?, ?)",
            [1, 7],
        ),
    ],
)
def test_repeat_does_nothing(dialect: Dialect, sql: str, expected: str, bound: list[int]) -> None:
    plan = guarded(sql, dialect)
    pushed = [value for value in bound if value != 7]
    assert (plan.sql, plan.bind(pushed, 7)) == (expected, bound)


@pytest.mark.parametrize(
    ("dialect", "sql", "expected"),
    [
        (
            "sqlite",
            "INSERT INTO t (a) VALUES (?) ON CONFLICT (a) DO UPDATE SET b = 1",
            f"INSERT INTO t (a, outbox_seq) VALUES (?, ?) {CLAUSE} ON CONFLICT (a) DO UPDATE SET b = 1",
        ),
        (
            "postgresql",
            "INSERT INTO t (a) VALUES(?) ON CONFLICT (a) DO UPDATE SET b = 1",
            f"INSERT INTO t (a, outbox_seq) SELECT ?, ? {UNLESS} ON CONFLICT (a) DO UPDATE SET b = 1",
        ),
        (
            "postgresql",
            "INSERT INTO t (a, b) VALUES (?, DEFAULT) ON CONFLICT (a) DO NOTHING",
            "INSERT INTO t (a, b, outbox_seq) VALUES (?, DEFAULT, ?) ON CONFLICT (a) DO NOTHING",
        ),
        (
            "postgresql",
            "INSERT INTO t (a) VALUES (?), (2)",
            "INSERT INTO t (a, outbox_seq) VALUES (?, ?), (2, 0)",
        ),
        (
            "sqlite",
            "INSERT OR IGNORE INTO t (a) VALUES (?), (2)",
            f"INSERT OR IGNORE INTO t (a, outbox_seq) SELECT * FROM (VALUES (?, ?), (2, 0)) {UNLESS}",
        ),
        ("mysql", "INSERT INTO t (a) VALUES (?), (2)", "INSERT INTO t (a, outbox_seq) VALUES (?, ?), (2, NULL)"),
        ("mysql", "INSERT INTO t SET a = ?", "INSERT INTO t SET a = ?, outbox_seq = ?"),
        ("mysql", "INSERT INTO t (a, b) VALUES (?, a)", "INSERT INTO t (a, b, outbox_seq) VALUES (?, a, ?)"),
        ("mysql", "INSERT INTO t (a) VALUES ROW(?)", "INSERT INTO t (a, outbox_seq) VALUES ROW(?, ?)"),
        (
            "mysql",
            "INSERT INTO t (a) VALUES(?) ON DUPLICATE KEY UPDATE a = 1",
            f"INSERT INTO t (a, outbox_seq) SELECT ?, ? FROM DUAL {UNLESS} ON DUPLICATE KEY UPDATE a = 1",
        ),
    ],
)
def test_what_cannot_be_repeated_carries_the_number(dialect: Dialect, sql: str, expected: str) -> None:
    plan = guarded(sql, dialect)
    assert (plan.sql, plan.carries_seq) == (expected, True)


# -- the helper -------------------------------------------------------------------------------------------------------


def test_helper_returns_statement_and_arguments() -> None:
    args = [1, "b"]
    sql, bound = inject_outbox_seq("insert into t (a, b) values (?, ?)", args, 7)
    assert sql == f"insert into t (a, b, outbox_seq) values (?, ?, ?) {CLAUSE}"
    assert (bound, args) == ([1, "b", 7], [1, "b"])


@pytest.mark.parametrize(
    ("sql", "args", "expected", "bound"),
    [
        ("UPDATE t SET a = ?", [1], "UPDATE t SET a = ?, outbox_seq = ?", [1, 7]),
        ("update t set a = ? where b = ?", [1, 2], "update t set a = ?, outbox_seq = ? where b = ?", [1, 7, 2]),
        ("UPDATE t SET a = ?\nWHERE b = ?", [1, 2], "UPDATE t SET a = ?, outbox_seq = ?\nWHERE b = ?", [1, 7, 2]),
        ("UPDATE t SET a = a + 1 WHERE b = ?", [2], "UPDATE t SET a = a + 1, outbox_seq = ? WHERE b = ?", [7, 2]),
        (
            "UPDATE t SET a = (SELECT max(b) FROM u WHERE c = ?), d = ? WHERE e = ?",
            [1, 2, 3],
            "UPDATE t SET a = (SELECT max(b) FROM u WHERE c = ?), d = ?, outbox_seq = ? WHERE e = ?",
            [1, 2, 7, 3],
        ),
        (
            "UPDATE t SET a = 'x WHERE ?', b = ? -- WHERE ?\nWHERE c = ?",
            [1, 2],
            "UPDATE t SET a = 'x WHERE ?', b = ?, outbox_seq = ? -- WHERE ?\nWHERE c = ?",
            [1, 7, 2],
        ),
        ("UPDATE t SET a = (?)WHERE 1", [1], "UPDATE t SET a = (?), outbox_seq = ? WHERE 1", [1, 7]),
        ("UPDATE t SET a = ? FROM u WHERE 1", [1], "UPDATE t SET a = ?, outbox_seq = ? FROM u WHERE 1", [1, 7]),
        ("UPDATE t SET a = ? RETURNING a;", [1], "UPDATE t SET a = ?, outbox_seq = ? RETURNING a;", [1, 7]),
        (
            "UPDATE t SET a = ? ORDER BY b LIMIT ?",
            [1, 2],
            "UPDATE t SET a = ?, outbox_seq = ? ORDER BY b LIMIT ?",
            [1, 7, 2],
        ),
        (
            "UPDATE OR IGNORE t AS x SET (a, b) = (?, ?) WHERE c",
            [1, 2],
            "UPDATE OR IGNORE t AS x SET (a, b) = (?, ?), outbox_seq = ? WHERE c",
            [1, 2, 7],
        ),
        (
            "UPDATE t SET a = b IS DISTINCT FROM ? WHERE c = ?",
            [1, 2],
            "UPDATE t SET a = b IS DISTINCT FROM ?, outbox_seq = ? WHERE c = ?",
            [1, 7, 2],
        ),
        ("UPDATE t SET a = ?, outbox_seq = 5", [1], "UPDATE t SET a = ?, outbox_seq = 5", [1]),
        ("UPDATE t SET (a, outbox_seq) = (?, 5)", [1], "UPDATE t SET (a, outbox_seq) = (?, 5)", [1]),
        ("UPDATE t SET a = outbox_seq", [], "UPDATE t SET a = outbox_seq, outbox_seq = ?", [7]),
    ],
)
def test_helper_extends_the_set_list_of_an_update(sql: str, args: list[int], expected: str, bound: list[int]) -> None:
    assert inject_outbox_seq(sql, args, 7) == (expected, bound)


def test_helper_leaves_an_insert_that_names_the_column() -> None:
    sql = "INSERT INTO t (a, outbox_seq) VALUES (?, ?)"
    assert inject_outbox_seq(sql, [1, 5], 7) == (sql, [1, 5])


@pytest.mark.parametrize(
    "sql", ["DELETE FROM t", "SELECT 1", "INSERT INTO t SELECT 1", "INSERT INTO t VALUES (1)", "UPDATE t, u SET a = 1"]
)
def test_helper_refuses_what_cannot_carry_the_number(sql: str) -> None:
    with pytest.raises(UnsupportedStatement):
        inject_outbox_seq(sql, [], 7)
