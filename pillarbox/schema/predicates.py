"""SQL expressions compared by what they say, however a server or a person has written them.

A server prints an expression in a form of its own: with casts, brackets and other quotes, `IN` as an array, `BETWEEN`
as two comparisons. `canonical` reads an expression and writes it in one form, so that two texts of one meaning are
equal. What it cannot read it compares word by word: a strange expression is then reported, never taken for equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*)
  | (?P<string>(?:\b(?:[EeNnBbXx]|_[A-Za-z0-9]+))?'(?:[^'\\]|''|\\.)*')
  | (?P<name>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
  | (?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
  | (?P<word>[^\W\d][\w$]*)
  | (?P<sign>::|<=>|<=|>=|<>|!=|==|\|\||->>|->|!~~\*|!~~|~~\*|~~|!~|@>|<@|[-+*/%=<>(),.\[\]~?&|;])
    """,
    re.VERBOSE,
)

# What a cast has put into brackets of its own.
_BRACKETED = re.compile(r"(?<!\w)\((\w+|'[^']*'|ARRAY\[[^][]*\])\)$")
_TYPE_WORDS: Final = frozenset({"varying", "precision", "with", "without", "time", "zone", "unsigned", "signed"})
_CLOCKS: Final = frozenset({"now", "current_timestamp", "transaction_timestamp", "localtimestamp", "localtime"})
_COMPARISONS: Final = frozenset({"=", "==", "<>", "!=", "<", ">", "<=", ">=", "<=>", "~", "!~", "@>", "<@"})
_LIKES: Final = {"~~": ("like", False), "!~~": ("like", True), "~~*": ("ilike", False), "!~~*": ("ilike", True)}
_TURNED: Final = {">": "<", ">=": "<="}
_DENIED: Final = {"=": "<>", "<>": "="}

Node = Any


class Token(NamedTuple):
    """A piece of SQL: its kind, its text and where it stands."""

    kind: str
    text: str
    start: int
    end: int


class _Unreadable(Exception):
    pass


def tokenize(sql: str) -> list[Token]:
    """The pieces of an SQL text without blanks; what is no SQL becomes pieces of one character."""
    tokens: list[Token] = []
    position = 0
    while position < len(sql):
        match = _TOKEN.match(sql, position)
        end = match.end() if match else position + 1
        kind = str(match.lastgroup) if match else "sign"
        if kind != "space":
            tokens.append(Token(kind, sql[position:end], position, end))
        position = end
    return tokens


def unquote(name: str) -> str:
    """A name without its quotes."""
    if name[:1] in ('"', "`"):
        return name[1:-1].replace(name[0] * 2, name[0])
    return name


@lru_cache(maxsize=4096)
def canonical(sql: str) -> str:
    """One form for all texts of an expression that mean the same."""
    tokens = tokenize(sql)
    try:
        reader = _Reader(tokens)
        node = reader.read()
        reader.expect_end()
    except _Unreadable:
        return " ".join(_plain(token) for token in tokens)
    return _write(node)


def readable(sql: str) -> str:
    """An expression without PostgreSQL's casts, which tell a person nothing and differ from printing to printing."""
    tokens = tokenize(sql)
    text, end = "", 0
    for at, token in enumerate(tokens):
        if token.text == "::" and token.start >= end:
            text = _BRACKETED.sub(r"\1", text + sql[end : token.start])
            end = _Reader(tokens).skip_cast(at)
    return text + sql[end:]


def columns_of(sql: str) -> frozenset[str]:
    """The names in an expression that may be columns, in lower case."""
    tokens = tokenize(sql)
    found = set()
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        is_call = following is not None and following.text == "("
        if token.kind == "name" or (token.kind == "word" and not is_call):
            found.add(unquote(token.text).lower())
    return frozenset(found)


def _plain(token: Token) -> str:
    return token.text if token.kind == "string" else unquote(token.text).lower()


# -- reading ------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def read(self) -> Node:
        parts = [self._read_and()]
        while self._take("or"):
            parts.append(self._read_and())
        return _join("or", parts)

    def expect_end(self) -> None:
        if self._at < len(self._tokens):
            raise _Unreadable

    def _peek(self, ahead: int = 0) -> str:
        position = self._at + ahead
        if position >= len(self._tokens) or self._tokens[position].kind in ("string", "name"):
            return ""
        return self._tokens[position].text.lower()

    def _take(self, *words: str) -> bool:
        if all(self._peek(ahead) == word for ahead, word in enumerate(words)):
            self._at += len(words)
            return True
        return False

    def _expect(self, word: str) -> None:
        if not self._take(word):
            raise _Unreadable

    def _read_and(self) -> Node:
        parts = [self._read_not()]
        while self._take("and"):
            parts.append(self._read_not())
        return _join("and", parts)

    def _read_not(self) -> Node:
        return _deny(self._read_not()) if self._take("not") else self._read_comparison()

    def _read_comparison(self) -> Node:
        left = self._read_sum()
        while True:
            sign = self._peek()
            if sign in _COMPARISONS:
                self._at += 1
                left = self._compare(left, {"==": "=", "!=": "<>"}.get(sign, sign))
            elif sign in _LIKES:
                self._at += 1
                word, is_denied = _LIKES[sign]
                like = (word, left, self._read_sum())
                left = _deny(like) if is_denied else like
            elif sign in ("is", "isnull", "notnull", "not", "in", "like", "ilike", "between", "collate"):
                left = self._read_word(left)
            else:
                return left

    def _compare(self, left: Node, sign: str) -> Node:
        for word in ("any", "all", "some"):
            if self._peek() == word and self._peek(1) == "(":
                self._at += 1
                array = self._read_primary()
                if array[0] != "array" or (sign, word) not in (("=", "any"), ("=", "some"), ("<>", "all")):
                    return (sign, left, (word, array))
                return _deny(_among(left, array[1:])) if word == "all" else _among(left, array[1:])
        return _comparison(sign, left, self._read_sum())

    def _read_word(self, left: Node) -> Node:
        if self._take("isnull"):
            return ("is", left, ("null",))
        if self._take("notnull"):
            return _deny(("is", left, ("null",)))
        if self._take("collate"):
            self._at += 1
            return left
        if self._take("is"):
            is_denied = self._take("not")
            node: Node = ("is", left, self._read_sum())
            return _deny(node) if is_denied else node
        is_denied = self._take("not")
        if self._take("in"):
            node = _among(left, self._read_list())
        elif self._take("between"):
            low = self._read_sum()
            self._expect("and")
            node = _join("and", [_comparison(">=", left, low), _comparison("<=", left, self._read_sum())])
        elif self._peek() in ("like", "ilike"):
            self._at += 1
            node = (self._tokens[self._at - 1].text.lower(), left, self._read_sum())
        else:
            raise _Unreadable
        return _deny(node) if is_denied else node

    def _read_list(self) -> list[Node]:
        self._expect("(")
        items: list[Node] = []
        while not self._take(")"):
            items.append(self.read())
            if not self._take(",") and self._peek() != ")":
                raise _Unreadable
        return items

    def _read_sum(self) -> Node:
        left = self._read_product()
        while self._peek() in ("+", "-", "||", "->", "->>"):
            self._at += 1
            sign = self._tokens[self._at - 1].text
            left = (sign, left, self._read_product())
        return left

    def _read_product(self) -> Node:
        left = self._read_unary()
        while self._peek() in ("*", "/", "%"):
            self._at += 1
            sign = self._tokens[self._at - 1].text
            left = (sign, left, self._read_unary())
        return left

    def _read_unary(self) -> Node:
        if self._take("-"):
            inner = self._read_unary()
            return ("value", f"-{inner[1]}") if inner[0] == "value" else ("negative", inner)
        if self._take("+"):
            return self._read_unary()
        node = self._read_primary()
        while self._take("::"):
            self._skip_type()
        return node

    def skip_cast(self, at: int) -> int:
        """Where the cast that begins with a token ends in the text."""
        self._at = at + 1
        self._skip_type()
        return self._tokens[min(self._at, len(self._tokens)) - 1].end

    # A cast is how a server spells out what a literal means to it.
    def _skip_type(self) -> None:
        if self._at >= len(self._tokens):
            raise _Unreadable
        self._at += 1
        while self._take("."):
            self._at += 1
        while True:
            if self._peek() in _TYPE_WORDS:
                self._at += 1
            elif self._peek() == "(":
                self._read_list()
            elif not self._take("[", "]"):
                return

    def _read_primary(self) -> Node:
        if self._at >= len(self._tokens):
            raise _Unreadable
        if self._take("("):
            items = [self.read()]
            while self._take(","):
                items.append(self.read())
            self._expect(")")
            return items[0] if len(items) == 1 else ("row", *items)
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "string":
            return _literal(token.text[token.text.index("'") + 1 : -1])
        if token.kind == "number":
            return _literal(token.text)
        if token.kind == "sign":
            raise _Unreadable
        return self._read_named(token)

    def _read_named(self, token: Token) -> Node:
        word = _plain(token)
        if token.kind == "word":
            if word == "array" and self._take("["):
                return self._read_array()
            if word == "cast" and self._take("("):
                inner = self.read()
                self._expect("as")
                self._skip_type()
                self._expect(")")
                return inner
            if word == "case":
                return self._read_case()
            if word in ("true", "false", "null"):
                return {"true": ("value", "1"), "false": ("value", "0"), "null": ("null",)}[word]
            following = self._tokens[self._at] if self._at < len(self._tokens) else None
            if following is not None and following.kind == "string":  # INTERVAL '1 day'
                self._at += 1
                return _literal(following.text.strip("'"))
        while self._take("."):  # a table's or schema's name before it says nothing
            if self._at >= len(self._tokens):
                raise _Unreadable
            word = _plain(self._tokens[self._at])
            self._at += 1
        if self._peek() == "(":
            arguments = [] if self._take("(", "*", ")") else self._read_list()
            return ("call", "now" if word in _CLOCKS else word, *arguments)
        return ("call", "now") if word in _CLOCKS and token.kind == "word" else ("name", word)

    def _read_array(self) -> Node:
        items: list[Node] = []
        while not self._take("]"):
            items.append(self.read())
            self._take(",")
        return ("array", *items)

    def _read_case(self) -> Node:
        parts: list[Node] = []
        while not self._take("end"):
            word = self._peek()
            if word in ("when", "then", "else"):
                self._at += 1
                parts.append(("word", word))
            parts.append(self.read())
        return ("case", *parts)


# -- one form for what means the same -----------------------------------------------------------------------


def _literal(text: str) -> Node:
    # A number in quotes is the number: servers print either for the default of a number's column.
    return ("value", text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else ("text", text)


def _join(word: str, parts: list[Node]) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat += part[1:] if part[0] == word else [part]
    return flat[0] if len(flat) == 1 else (word, *sorted(flat, key=_write))


def _deny(node: Node) -> Node:
    if node[0] == "not":
        return node[1]
    if node[0] in _DENIED:
        return (_DENIED[node[0]], *node[1:])
    return ("not", node)


def _among(left: Node, items: Sequence[Node]) -> Node:
    if len(items) == 1:
        return _comparison("=", left, items[0])
    return ("in", left, *sorted(items, key=_write))


def _comparison(sign: str, left: Node, right: Node) -> Node:
    if sign in _TURNED:
        return (_TURNED[sign], right, left)
    if sign in ("=", "<>"):
        left, right = sorted((left, right), key=_write)
    return (sign, left, right)


def _write(node: Node) -> str:
    if node[0] == "text":
        return f"'{node[1]}'"
    if node[0] in ("value", "name", "word"):
        return str(node[1])
    return "(" + " ".join(each if isinstance(each, str) else _write(each) for each in node) + ")"
