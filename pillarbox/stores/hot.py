"""Statements of the hot path, compiled once.

SQLAlchemy finds a statement's compiled form by a key that it makes from the whole statement at each execution, and the
statements of a claim are large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult, Dialect
from sqlalchemy.sql.compiler import SQLCompiler


class _Form(NamedTuple):
    """A statement as one driver wants it; without text where that depends on the parameters."""

    sql: str | None
    bind: Callable[[Mapping[str, Any]], Any]


class Hot:
    """A statement that is compiled when it first runs with a driver, and then handed to that driver as text."""

    def __init__(self, statement: Any) -> None:
        self._statement = statement
        self._forms: dict[str, _Form] = {}

    def execute(self, db: sa.Connection, params: Mapping[str, Any]) -> CursorResult[Any]:
        return self._execute(db, params, self._form(db.dialect))

    def fetch(self, db: sa.Connection, params: Mapping[str, Any]) -> Sequence[Any]:
        """The rows as the driver gives them: SQLAlchemy's own are made one by one and nobody reads them by name."""
        form = self._form(db.dialect)
        result = self._execute(db, params, form)
        if form.sql is None:
            return result.all()
        rows: Sequence[Any] = result.cursor.fetchall()
        result.close()
        return rows

    def _execute(self, db: sa.Connection, params: Mapping[str, Any], form: _Form) -> CursorResult[Any]:
        if form.sql is not None:
            return db.exec_driver_sql(form.sql, form.bind(params))
        result: CursorResult[Any] = db.execute(self._statement, params)
        return result

    def _form(self, dialect: Dialect) -> _Form:
        found = self._forms.get(dialect.driver)
        if found is None:
            found = self._forms[dialect.driver] = self._compile(dialect)
        return found

    def _compile(self, dialect: Dialect) -> _Form:
        compiled: SQLCompiler = self._statement.compile(dialect=dialect)
        # The text of a list of parameters depends on its length.
        if any(bind.expanding for bind in compiled.binds.values()):
            return _Form(None, dict)
        sql = str(compiled)
        return _Form(
            _given_first(sql) if dialect.name in ("mysql", "mariadb") else sql, _make_binder(compiled, dialect)
        )


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
