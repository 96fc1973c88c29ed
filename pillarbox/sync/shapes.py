"""What a statement is and where its parts begin and end, read from its tokens.

Only the outline is understood: the verb, and of an INSERT the table, the column list, the rows and the clauses after
them. Whatever lies between is never looked into, so that any expression a database accepts is accepted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

from sqlglot import Token, TokenType

from pillarbox.errors import UnsupportedStatement
from pillarbox.sync.binds import Dialect, read_tokens, shorten, word, words
from pillarbox.sync.refusals import COMMITS_ON_MYSQL, refuse_unsafe

Kind = Literal["insert", "update", "delete", "other"]

_AFTER_CTES: Final = words("DELETE INSERT MERGE REPLACE SELECT TABLE UPDATE VALUES")
_ENDS_SET: Final = words("FROM LIMIT ORDER RETURNING WHERE")
_ENDS_INSERT_SET: Final = words("AS ON RETURNING")
_STARTS_QUERY: Final = words("SELECT TABLE VALUES WITH")
_NO_COLUMNS: Final = words(
    "AND AS BETWEEN BINARY CASE CHAR CURRENT_DATE CURRENT_TIME CURRENT_TIMESTAMP DAY DECIMAL ELSE END FALSE HOUR IN",
    "INTERVAL IS JSON LIKE MINUTE MONTH NOT NULL OR SECOND SIGNED THEN TRUE UNSIGNED USING WHEN",
)
_MODIFIERS: Final = words("DELAYED HIGH_PRIORITY IGNORE LOW_PRIORITY")
_NAMES: Final = (TokenType.VAR, TokenType.IDENTIFIER, TokenType.STRING)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of VALUES: the offsets of its parentheses, and what stands between them."""

    start: int
    end: int
    values: int
    has_default: bool
    has_names: bool
    is_constructed: bool = False
    """Whether the word ROW stands before it."""


@dataclass(frozen=True, slots=True)
class Insert:
    """The outline of an INSERT or REPLACE; offsets into its text."""

    table: str
    """Its name as it is written, with the schema."""
    names: tuple[str, ...]
    """The parts of that name without their quotes."""
    head_end: int
    """Where a column list goes that is missing."""
    policy: str = ""
    """The word after OR, or REPLACE, or MySQL's IGNORE."""
    columns: tuple[str, ...] | None = None
    columns_end: int = 0
    """The closing parenthesis of the column list."""
    source: Literal["rows", "defaults", "set", "query"] = "query"
    keyword: tuple[int, int] = (0, 0)
    """Where VALUES, or DEFAULT VALUES, begins and ends."""
    rows: tuple[Row, ...] = ()
    set_end: int = 0
    """Where the assignments of MySQL's INSERT ... SET end."""
    conflict: Literal["", "nothing", "update"] = ""
    """What the user's own ON CONFLICT or ON DUPLICATE KEY does."""
    has_target: bool = False
    """Whether each of these clauses says which conflict it is for."""
    targets: tuple[str, ...] = ()
    """The names between that clause's parentheses, if it has any."""
    has_row_alias: bool = False
    alias_columns_end: int | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """One statement: its kind and, from the verb on, its tokens."""

    sql: str
    kind: Kind
    tokens: tuple[Token, ...]
    dialect: Dialect


def read_outline(sql: str, dialect: Dialect) -> Outline:
    """Tell what a statement is.

    Raises UnsupportedStatement for several statements, none, and those that no batch may hold.
    """
    tokens = _only_statement(sql, read_tokens(sql, dialect))
    verb = _verb(tokens)
    refuse_unsafe(sql, tokens, dialect)
    _refuse_commit(sql, tokens, dialect)
    first = word(tokens[verb])
    kind: Kind = "other"
    if first == "INSERT" or (first == "REPLACE" and dialect != "postgresql"):
        kind = "insert"
    elif first == "UPDATE":
        kind = "update"
    elif first == "DELETE":
        kind = "delete"
    return Outline(sql, kind, tokens[verb:], dialect)


def _only_statement(sql: str, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    while tokens and tokens[-1].token_type is TokenType.SEMICOLON:
        tokens = tokens[:-1]
    if not tokens:
        raise UnsupportedStatement(f"Expected one SQL statement; got {shorten(sql)}, which has none.")
    # The body of a trigger has semicolons of its own.
    is_trigger = word(tokens[0]) == "CREATE" and "TRIGGER" in map(word, tokens[:4])
    if not is_trigger and any(token.token_type is TokenType.SEMICOLON for token in tokens):
        raise UnsupportedStatement(
            f"Expected one SQL statement; got several in {shorten(sql)}. Push each of them on its own."
        )
    return tokens


def _verb(tokens: tuple[Token, ...]) -> int:
    if word(tokens[0]) != "WITH":
        return 0
    depth = 0
    for at, token in enumerate(tokens):
        # The verb follows the last common table expression, whose name may be any word.
        if depth == 0 and word(token) in _AFTER_CTES and tokens[at - 1].token_type is TokenType.R_PAREN:
            return at
        depth += _step(token)
    return 0


def _refuse_commit(sql: str, tokens: tuple[Token, ...], dialect: Dialect) -> None:
    first, second = (word(token) for token in (tokens * 2)[:2])
    is_temporary = first == "DROP" and second == "TEMPORARY"
    if dialect == "mysql" and first in COMMITS_ON_MYSQL and not is_temporary:
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} makes MySQL commit at once. Expected one that changes rows: this one would "
            "end the transaction of its batch. Run it on the database itself."
        )


def _step(token: Token) -> int:
    if token.token_type is TokenType.L_PAREN:
        return 1
    return -1 if token.token_type is TokenType.R_PAREN else 0


class _Cursor:
    def __init__(self, outline: Outline) -> None:
        self.sql = outline.sql
        self.tokens = outline.tokens
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        return word(self.tokens[self.at + ahead]) if self.at + ahead < len(self.tokens) else ""

    def is_at(self, kind: TokenType) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at].token_type is kind

    def take(self, *expected: str) -> str:
        found = self.peek()
        if found not in expected:
            return ""
        self.at += 1
        return found

    def take_name(self) -> str:
        if self.at >= len(self.tokens) or self.tokens[self.at].token_type not in _NAMES:
            return ""
        self.at += 1
        return self.tokens[self.at - 1].text

    def take_parens(self) -> tuple[Token, ...]:
        depth = 0
        for at in range(self.at, len(self.tokens)):
            depth += _step(self.tokens[at])
            if depth == 0:
                found = self.tokens[self.at : at + 1]
                if len(found) > 1:
                    self.at = at + 1
                    return found
                break
        return ()

    def span(self, start: int) -> tuple[int, int]:
        return self.tokens[start].start, self.last_end

    def text(self, start: int) -> str:
        return self.sql[slice(*self.span(start))]

    @property
    def last_end(self) -> int:
        return self.tokens[self.at - 1].end + 1


def read_insert(outline: Outline) -> Insert | None:
    """Return the outline of an INSERT; None when it has no shape that is known, and so cannot be added to."""
    cursor = _Cursor(outline)
    policy = "REPLACE" if cursor.take("INSERT", "REPLACE") == "REPLACE" else ""
    if cursor.take("OR"):
        policy = cursor.take("REPLACE", "IGNORE", "ABORT", "FAIL", "ROLLBACK")
    while outline.dialect == "mysql" and (modifier := cursor.take(*_MODIFIERS)):
        policy = "IGNORE" if modifier == "IGNORE" else policy
    if not cursor.take("INTO") and outline.dialect != "mysql":
        return None
    start = cursor.at
    names = _take_table(cursor)
    if not names:
        return None
    insert = Insert(cursor.text(start), names, 0, policy=policy)
    if cursor.take("AS") and not cursor.take_name():
        return None
    if cursor.take("PARTITION") and not cursor.take_parens():
        return None
    return _insert_source(cursor, outline.dialect, replace(insert, head_end=cursor.last_end))


def read_set_end(outline: Outline) -> tuple[int, tuple[str, ...]] | None:
    """Return where the SET list of an UPDATE ends and which columns it sets; None when there is no single list."""
    cursor = _Cursor(outline)
    depth = 0
    while cursor.at < len(cursor.tokens):
        token = cursor.tokens[cursor.at]
        depth += _step(token)
        # An UPDATE of several tables, which MySQL has: which of them would carry the number?
        if depth == 0 and (token.token_type is TokenType.COMMA or word(token) == "JOIN"):
            return None
        cursor.at += 1
        if depth == 0 and word(token) == "SET":
            names = _take_targets(cursor, _ENDS_SET)
            return (cursor.last_end, names) if names else None
    return None


def _take_table(cursor: _Cursor) -> tuple[str, ...]:
    names = [cursor.take_name()]
    while cursor.is_at(TokenType.DOT):
        cursor.at += 1
        names.append(cursor.take_name())
    return tuple(names) if all(names) else ()


def _insert_source(cursor: _Cursor, dialect: Dialect, insert: Insert) -> Insert | None:
    if cursor.is_at(TokenType.L_PAREN) and cursor.peek(1) not in _STARTS_QUERY:
        names = cursor.take_parens()
        if not names:
            return None
        insert = replace(insert, columns=_names(names), columns_end=names[-1].start)
    if cursor.take("OVERRIDING"):
        cursor.at += 2
    start = cursor.at
    if cursor.take("DEFAULT") and cursor.take("VALUES"):
        return _with_conflict(replace(insert, source="defaults", keyword=cursor.span(start)), cursor)
    if dialect == "mysql" and cursor.take("SET"):
        targets = _take_targets(cursor, _ENDS_INSERT_SET)
        return _with_conflict(replace(insert, source="set", columns=targets, set_end=cursor.last_end), cursor)
    if cursor.take("VALUES", *(["VALUE"] if dialect == "mysql" else [])):
        keyword = cursor.span(start)
        if rows := _take_rows(cursor):
            return _with_conflict(replace(insert, source="rows", keyword=keyword, rows=rows), cursor)
    return insert


def _take_rows(cursor: _Cursor) -> tuple[Row, ...]:
    rows = []
    while True:
        is_constructed = bool(cursor.take("ROW"))
        tokens = cursor.take_parens()
        if not tokens:
            return ()
        rows.append(replace(_row(tokens), is_constructed=is_constructed))
        if not cursor.is_at(TokenType.COMMA):
            return tuple(rows)
        cursor.at += 1


def _row(tokens: tuple[Token, ...]) -> Row:
    depth, commas = 0, 0
    has_default = has_names = False
    for token, following in pairwise(tokens):
        depth += _step(token)
        commas += depth == 1 and token.token_type is TokenType.COMMA
        has_default = has_default or (depth == 1 and word(token) == "DEFAULT")
        has_names = has_names or _is_name(token, following)
    return Row(tokens[0].start, tokens[-1].start, commas + 1 if len(tokens) > 2 else 0, has_default, has_names)


def _is_name(token: Token, following: Token) -> bool:
    is_call_or_literal = following.token_type in (TokenType.L_PAREN, TokenType.STRING)
    is_word = token.token_type is TokenType.VAR and word(token) not in _NO_COLUMNS
    return token.token_type is TokenType.IDENTIFIER or (is_word and not is_call_or_literal)


def _with_conflict(insert: Insert, cursor: _Cursor) -> Insert:
    unknown = replace(insert, source="query")
    if cursor.take("AS"):
        if not cursor.take_name():
            return unknown
        names = cursor.take_parens()
        insert = replace(insert, has_row_alias=True, alias_columns_end=names[-1].start if names else None)
    rest = [word(token) for token in cursor.tokens[cursor.at :]]
    if not rest or rest[0] == "RETURNING":
        return insert
    if rest[:2] == ["ON", "DUPLICATE"]:
        return replace(insert, conflict="update")
    if rest[:2] != ["ON", "CONFLICT"]:
        return unknown
    is_update = ("DO", "UPDATE") in pairwise(rest)
    # SQLite takes several such clauses, the last of them without a target.
    has_target = ("CONFLICT", "DO") not in pairwise(rest)
    targets = tuple(name for at in range(cursor.at, len(cursor.tokens)) for name in _conflict_names(cursor, at))
    return replace(insert, conflict="update" if is_update else "nothing", has_target=has_target, targets=targets)


def _conflict_names(cursor: _Cursor, at: int) -> tuple[str, ...]:
    if word(cursor.tokens[at]) != "CONFLICT":
        return ()
    cursor.at = at + 1
    return _names(cursor.take_parens()) if cursor.is_at(TokenType.L_PAREN) else ()


def _take_targets(cursor: _Cursor, stops: frozenset[str]) -> tuple[str, ...]:
    names: list[str] = []
    depth, is_target, previous = 0, True, ""
    while cursor.at < len(cursor.tokens):
        token = cursor.tokens[cursor.at]
        # In `a IS DISTINCT FROM b` the list goes on.
        if depth == 0 and word(token) in stops and previous != "DISTINCT":
            break
        depth += _step(token)
        if depth == 0 and token.token_type in (TokenType.COMMA, TokenType.EQ):
            is_target = token.token_type is TokenType.COMMA
        elif is_target and token.token_type in _NAMES:
            names.append(token.text)
        previous = word(token)
        cursor.at += 1
    return tuple(names)


def _names(tokens: tuple[Token, ...]) -> tuple[str, ...]:
    starts = (TokenType.L_PAREN, TokenType.COMMA)
    return tuple(
        token.text for before, token in pairwise(tokens) if before.token_type in starts and token.token_type in _NAMES
    )
