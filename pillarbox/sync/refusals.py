"""Statements that no batch may hold: they would end its transaction, or change the session of the batches after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from sqlglot import Token, TokenType

from pillarbox.errors import UnsupportedStatement
from pillarbox.sync.binds import Dialect, shorten, word, words

# https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html
COMMITS_ON_MYSQL: Final = words(
    "ALTER ANALYZE CACHE CHANGE CHECK CREATE DROP FLUSH GRANT IMPORT INSTALL LOAD LOCK OPTIMIZE PURGE RENAME REPAIR",
    "RESET REVOKE STOP TRUNCATE UNINSTALL UNLOCK",
)
_TRANSACTION: Final = words("ABORT BEGIN COMMIT END RELEASE ROLLBACK SAVEPOINT START XA")
_TRANSACTION_PAIRS: Final = {("PREPARE", "TRANSACTION"), ("SET", "TRANSACTION")}
_HIDES_COMMITS_ON_MYSQL: Final = words("CALL EXECUTE PREPARE")
_SESSION: Final[dict[Dialect, frozenset[str]]] = {
    "sqlite": words("ATTACH DETACH"),
    "postgresql": words("DEALLOCATE DECLARE DISCARD EXECUTE LISTEN LOAD PREPARE RESET SET UNLISTEN"),
    "mysql": words("DEALLOCATE HANDLER SET USE"),
}
_STORED_PRAGMAS: Final = words("APPLICATION_ID USER_VERSION")


def refuse_unsafe(sql: str, tokens: Sequence[Token], dialect: Dialect) -> None:
    """Raise UnsupportedStatement for transaction control, for what may commit, and for settings of a session.

    What makes MySQL commit by its first word is not among them: by itself such a statement can be written.
    """
    # SQLite skips semicolons before a statement.
    while tokens and tokens[0].token_type is TokenType.SEMICOLON:
        tokens = tokens[1:]
    found = [word(token) for token in tokens]
    first, second = (*found[:2], "", "")[:2]
    if first in _TRANSACTION or (first, second) in _TRANSACTION_PAIRS or _is_autocommit(found, dialect):
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} controls a transaction. Expected one that changes rows: each batch is "
            "sent in a transaction of its own, which it would end or split."
        )
    if dialect == "mysql":
        _refuse_hidden_commit(sql, tokens, first)
    if _changes_session(found, tokens, dialect):
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} changes the session of later batches. Expected one that changes rows: "
            "connections are used again, for other tables too. Set it in the url, for the user or on the database."
        )


def _refuse_hidden_commit(sql: str, tokens: Sequence[Token], first: str) -> None:
    if first in _HIDES_COMMITS_ON_MYSQL:
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} may commit by itself. Expected one that changes rows: a commit inside of "
            f"what {first} runs would write half of a batch. Push the statements themselves."
        )
    if any(text.startswith(("!", "M!")) for token in tokens for text in token.comments):
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} has a comment that MySQL executes, and may commit by itself. Expected its "
            "words outside of /*! */."
        )


def _is_autocommit(found: Sequence[str], dialect: Dialect) -> bool:
    return dialect == "mysql" and found[:1] == ["SET"] and "AUTOCOMMIT" in found


def _changes_session(found: Sequence[str], tokens: Sequence[Token], dialect: Dialect) -> bool:
    first, second = (*found[:2], "", "")[:2]
    if first == "CREATE" and any(each in ("TEMP", "TEMPORARY") for each in found[1:4]):
        # Its name hides the table that later batches mean.
        return ("COMMIT", "DROP") not in pairwise(found)
    if dialect == "sqlite" and first == "PRAGMA":
        has_value = any(token.token_type in (TokenType.EQ, TokenType.L_PAREN) for token in tokens)
        return has_value and not _STORED_PRAGMAS.intersection(found[1:4])
    if dialect == "postgresql" and first == "SET" and second in ("CONSTRAINTS", "LOCAL"):
        return False
    return first in _SESSION[dialect]
