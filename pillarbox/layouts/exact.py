"""Comparing text byte by byte, also where the collation of another system's column takes 'a' and 'A' for the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class _IsOneOf(FunctionElement[Any]):
    inherit_cache = True
    # Of no type: MySQL would compare a Boolean with 1, and then use no index.
    type = sa.types.NullType()
    name = "is_one_of"


def is_one_of(column: Any, values: Iterable[str]) -> sa.ColumnElement[bool]:
    """Whether a column of text is exactly one of these; by its index where it has one."""
    return _IsOneOf(column, *(sa.literal(value, sa.String()) for value in values))


@compiles(_IsOneOf)
def _is_one_of(element: _IsOneOf, compiler: SQLCompiler, **kw: Any) -> str:
    column, *values = (compiler.process(each, **kw) for each in element.clauses)
    return f"{column} IN ({', '.join(values)})"


@compiles(_IsOneOf, "mysql", "mariadb")
def _is_one_of_mysql(element: _IsOneOf, compiler: SQLCompiler, **kw: Any) -> str:
    # The first comparison is what an index can do, the second is exact.
    column, *_ = element.clauses
    loose, exact = _is_one_of(element, compiler, **kw), [compiler.process(each, **kw) for each in element.clauses][1:]
    return f"({loose} AND CAST({compiler.process(column, **kw)} AS BINARY) IN ({', '.join(exact)}))"
