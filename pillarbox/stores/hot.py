"""Statements of the hot path, compiled once.

SQLAlchemy finds a statement's compiled form by a key that it makes from the whole statement at each execution, and the
statements of a claim are large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult, Dialect
from sqlalchemy.sql.compiler import SQLCompiler


class Hot:
    """A statement that is compiled when it first runs and then handed to the driver as text."""

    def __init__(self, statement: Any) -> None:
        self._statement = statement
        self._sql: str | None = None
        self._bind: Callable[[Mapping[str, Any]], Any] = dict
        self._is_expanding = False

    def execute(self, db: sa.Connection, params: Mapping[str, Any]) -> CursorResult[Any]:
        if self._sql is None and not self._is_expanding:
            self._compile(db.dialect)
        if self._is_expanding or self._sql is None:
            result: CursorResult[Any] = db.execute(self._statement, params)
            return result
        return db.exec_driver_sql(self._sql, self._bind(params))

    def fetch(self, db: sa.Connection, params: Mapping[str, Any]) -> Sequence[Any]:
        """The rows as the driver gives them: SQLAlchemy's own are made one by one and nobody reads them by name."""
        result = self.execute(db, params)
        if self._is_expanding:
            return result.all()
        rows: Sequence[Any] = result.cursor.fetchall()
        result.close()
        return rows

    def _compile(self, dialect: Dialect) -> None:
        compiled: SQLCompiler = self._statement.compile(dialect=dialect)
        # The text of a list of parameters depends on its length.
        if any(bind.expanding for bind in compiled.binds.values()):
            self._is_expanding = True
            return
        self._bind = _make_binder(compiled, dialect)
        self._sql = str(compiled)
        if dialect.name in ("mysql", "mariadb"):
            self._sql = _given_first(self._sql)


def _given_first(sql: str) -> str:
    # Left to choose, MySQL and MariaDB walk a small table from its start and wait there for rows that others hold.
    # SQLAlchemy has no way to say that the given rows come first and the table's are looked up by their number.
    return _GIVEN_SECOND.sub(r"\1 \3 STRAIGHT_JOIN \2 FORCE INDEX (PRIMARY) \4", sql, count=1)


_GIVEN_SECOND = re.compile(r"^(UPDATE|DELETE FROM \S+ USING) (\S+), (\(SELECT .*\) AS given) (SET|WHERE)", re.DOTALL)


def _make_binder(compiled: SQLCompiler, dialect: Dialect) -> Callable[[Mapping[str, Any]], Any]:
    constants = dict(compiled.params)
    processors: dict[str, Callable[[Any], Any] | None] = {
        name: bind.type.dialect_impl(dialect).bind_processor(dialect) for name, bind in compiled.binds.items()
    }

    def value(name: str, params: Mapping[str, Any]) -> Any:
        raw = params[name] if name in params else constants[name]
        process = processors[name]
        return raw if process is None else process(raw)

    names = compiled.positiontup
    if names is None:
        return lambda params: {name: value(name, params) for name in constants}
    order = tuple(names)
    return lambda params: tuple(value(name, params) for name in order)
