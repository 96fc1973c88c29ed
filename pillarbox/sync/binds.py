"""The `?` placeholders of a statement, found with sqlglot's tokenizer: never those in strings, comments or names.

PostgreSQL also has operators with a `?`: of jsonb `?`, `?|`, `?&` and `@?`, of shapes `?#`, `?-` and `?|`. Which one is
meant follows from the number of arguments; where that does not help, functions say the same: `jsonb_exists`,
`jsonb_exists_any`, `jsonb_exists_all`, `jsonb_path_exists`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal

from pillarbox.errors import MissingExtra, UnsupportedStatement

try:
    from sqlglot import Token, TokenType
    from sqlglot.dialects.mysql import MySQL
    from sqlglot.dialects.postgres import Postgres
    from sqlglot.dialects.sqlite import SQLite
    from sqlglot.errors import SqlglotError
    from sqlglot.tokens import Tokenizer
except ImportError as error:
    raise MissingExtra("SQL write-behind", "sync") from error

Dialect = Literal["sqlite", "postgresql", "mysql"]


# A tokenizer without keywords keeps every word a word and every ? a ?. With sqlglot's own keywords a leading REPLACE
# or CALL swallows the rest of the text, and `?::`, `??` and `?|` are tokens of their own.
class _SqliteTokens(SQLite.Tokenizer):
    KEYWORDS = {}  # noqa: RUF012
    COMMANDS = set()  # noqa: RUF012


class _PostgresTokens(Postgres.Tokenizer):
    KEYWORDS = {}  # noqa: RUF012
    COMMANDS = set()  # noqa: RUF012


class _MysqlTokens(MySQL.Tokenizer):
    KEYWORDS = {}  # noqa: RUF012
    COMMANDS = set()  # noqa: RUF012


_TOKENIZERS: Final[dict[Dialect, tuple[type[Tokenizer], str]]] = {
    "sqlite": (_SqliteTokens, "sqlite"),
    "postgresql": (_PostgresTokens, "postgres"),
    "mysql": (_MysqlTokens, "mysql"),
}


def words(*lines: str) -> frozenset[str]:
    """Return a set of SQL words, written as a text."""
    return frozenset(" ".join(lines).split())


def word(token: Token) -> str:
    """Return an unquoted word in upper case, and nothing for any other token."""
    return token.text.upper() if token.token_type is TokenType.VAR else ""


_STARTS_OPERAND: Final = frozenset(
    {TokenType.VAR, TokenType.IDENTIFIER, TokenType.NUMBER, TokenType.L_PAREN, TokenType.PLACEHOLDER}
)
_ENDS_OPERAND: Final = frozenset(
    {TokenType.VAR, TokenType.IDENTIFIER, TokenType.NUMBER, TokenType.R_PAREN, TokenType.R_BRACKET}
)
_SECOND_SIGNS: Final = frozenset({TokenType.PIPE, TokenType.AMP, TokenType.HASH, TokenType.DASH})
_BEFORE_OPERAND: Final = words(
    "ALL AND AS BETWEEN BY CASE DISTINCT ELSE ESCAPE FROM HAVING ILIKE IN IS LIKE LIMIT NOT OFFSET ON OR RETURNING",
    "SELECT SET THEN TO USING VALUES WHEN WHERE ZONE",
)


@dataclass(frozen=True, slots=True)
class Binds:
    """Where the placeholders of one statement are: offsets into its text."""

    positions: tuple[int, ...]
    """Every `?`."""
    certain: tuple[int, ...]
    """Those that cannot be PostgreSQL's operator."""
    numbered: int = 0
    """For SQLite's `?1` and `:name`: how many arguments they take together with the plain ones."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of arguments that the statement may be meant for; one, but for the doubt about operators."""
        if self.numbered:
            return (self.numbered,)
        return tuple(sorted({len(self.positions), len(self.certain)}, reverse=True))

    def chosen(self, arguments: int) -> tuple[int, ...]:
        """The offsets of the binds when there are so many arguments."""
        return self.positions if arguments == len(self.positions) else self.certain


def count_binds(sql: str, dialect: Dialect, *, arguments: int | None = None) -> int:
    """Return how many arguments a statement takes.

    `arguments`, the number that is at hand, decides what a `?` of PostgreSQL is that could be an operator. Raises
    UnsupportedStatement where that stays open, and where the text cannot be read at all.
    """
    binds = find_binds(sql, dialect)
    if len(binds.counts) == 1:
        return binds.counts[0]
    if arguments in binds.counts:
        return arguments
    raise UnsupportedStatement(
        f"The statement {shorten(sql)} has a ? that may be a placeholder or an operator. Expected "
        f"{' or '.join(str(count) for count in binds.counts)} arguments to tell which; got "
        f"{'no number' if arguments is None else arguments}. Write jsonb_exists(value, key) instead of value ? key, "
        "and jsonb_path_exists(value, path) instead of value @? path."
    )


def split_binds(sql: str, dialect: Dialect, *, arguments: int | None = None) -> tuple[str, ...]:
    """Return the pieces of text around the `?` placeholders, one more than there are placeholders."""
    binds = find_binds(sql, dialect)
    if binds.numbered:
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} has numbered or named placeholders, which cannot be translated. "
            "Expected every argument as a plain ?."
        )
    pieces, start = [], 0
    for position in binds.chosen(count_binds(sql, dialect, arguments=arguments)):
        pieces.append(sql[start:position])
        start = position + 1
    return (*pieces, sql[start:])


@lru_cache(maxsize=4096)
def to_percent(sql: str, dialect: Dialect, *, arguments: int | None = None) -> str:
    """Return the statement with `%s` for each `?` and every other % doubled, as psycopg and PyMySQL want it.

    Give the driver a sequence even when there are no arguments: without one it leaves the doubled % as they are.
    """
    return "%s".join(piece.replace("%", "%%") for piece in split_binds(sql, dialect, arguments=arguments))


@lru_cache(maxsize=4096)
def find_binds(sql: str, dialect: Dialect) -> Binds:
    """Return where the placeholders of a statement are."""
    tokens = read_tokens(sql, dialect)
    if not tokens:
        raise UnsupportedStatement(f"Expected one SQL statement; got {shorten(sql)}, which has none.")
    if dialect == "sqlite":
        return _sqlite_binds(tokens)
    _refuse_numbered(sql, tokens, dialect)
    positions, certain = [], []
    was_operator = False
    for at, token in enumerate(tokens):
        if token.token_type is not TokenType.PLACEHOLDER:
            continue
        positions.append(token.start)
        is_after_bind = at > 0 and tokens[at - 1].token_type is TokenType.PLACEHOLDER and not was_operator
        was_operator = dialect == "postgresql" and _may_be_operator(tokens, at, is_after_bind=is_after_bind)
        if not was_operator:
            certain.append(token.start)
    return Binds(tuple(positions), tuple(certain))


@lru_cache(maxsize=512)
def read_tokens(sql: str, dialect: Dialect) -> tuple[Token, ...]:
    """Return the tokens of a statement, in which no word is a keyword."""
    if dialect not in _TOKENIZERS:
        raise UnsupportedStatement(f"Expected the dialect sqlite, postgresql or mysql; got {dialect!r}.")
    tokenizer, name = _TOKENIZERS[dialect]
    try:
        return tuple(tokenizer(dialect=name).tokenize(sql))
    except SqlglotError as error:
        raise UnsupportedStatement(
            f"The statement {shorten(sql)} cannot be read as {dialect}: {error}. Expected every quote, comment and "
            "dollar quote to be closed."
        ) from error


def shorten(sql: str) -> str:
    """Return a statement as an error message quotes it."""
    text = " ".join(sql.split())
    return repr(text if len(text) <= 200 else text[:197] + "...")


def _sqlite_binds(tokens: tuple[Token, ...]) -> Binds:
    plain: list[int] = []
    names: dict[str, int] = {}
    highest, is_numbered = 0, False
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        touching = following is not None and following.start == token.end + 1
        if token.token_type is TokenType.PLACEHOLDER and following and touching and following.text.isdigit():
            highest, is_numbered = max(highest, int(following.text)), True
        elif token.token_type is TokenType.PLACEHOLDER:
            plain.append(token.start)
            highest += 1
        elif (name := _sqlite_name(token, following if touching else None)) is not None:
            is_numbered = True
            if name not in names:
                highest += 1
                names[name] = highest
    return Binds(tuple(plain), tuple(plain), highest if is_numbered else 0)


def _sqlite_name(token: Token, following: Token | None) -> str | None:
    if token.token_type is TokenType.VAR and token.text.startswith("$"):
        return token.text
    if token.token_type in (TokenType.COLON, TokenType.PARAMETER) and following is not None:
        return token.text + following.text if following.token_type in (TokenType.VAR, TokenType.NUMBER) else None
    return None


def _refuse_numbered(sql: str, tokens: tuple[Token, ...], dialect: Dialect) -> None:
    for token, following in pairwise(tokens):
        if token.token_type is TokenType.PLACEHOLDER and following.token_type is TokenType.NUMBER:
            raise UnsupportedStatement(
                f"The statement {shorten(sql)} has the placeholder ?{following.text}, which {dialect} does not know. "
                "Expected a plain ? for each argument."
            )


def _may_be_operator(tokens: tuple[Token, ...], at: int, *, is_after_bind: bool) -> bool:
    if at == 0 or at + 1 == len(tokens):
        return False
    before, after = tokens[at - 1], tokens[at + 1]
    if at > 1 and before.token_type is TokenType.PARAMETER and before.end + 1 == tokens[at].start:
        # As the end of `@?`; the @ of a number without its sign has nothing before it.
        before = tokens[at - 2]
    ends = is_after_bind or (_is_operand(before, _ENDS_OPERAND) and before.text.upper() not in _BEFORE_OPERAND)
    # Both signs touch; in `? || 'x'` and `?-1` the bind is an operand itself, so there is none before it.
    is_pair = after.token_type in _SECOND_SIGNS and after.start == tokens[at].end + 1
    return ends and (is_pair or _is_operand(after, _STARTS_OPERAND))


def _is_operand(token: Token, kinds: frozenset[TokenType]) -> bool:
    return token.token_type in kinds or token.token_type.name.endswith("STRING")
