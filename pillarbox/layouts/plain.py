"""Our column types in types of SQLAlchemy's own: what a migration writes down for one database.

A migration must stand by itself. It outlives what it was made from, and its file imports SQLAlchemy only.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine
from sqlalchemy.util import immutabledict


class OwnType:
    """A column type of ours."""

    def plain(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type of SQLAlchemy's own that makes the same column on a database."""
        raise NotImplementedError


def plain_type(type_: TypeEngine[Any], dialect: Dialect) -> TypeEngine[Any]:
    """What a column is on one database; a type of somebody else's stays."""
    chosen = copy(type_._variant_mapping.get(dialect.name, type_))
    chosen._variant_mapping = immutabledict()
    return chosen.plain(dialect) if isinstance(chosen, OwnType) else chosen


def is_own(type_: TypeEngine[Any]) -> bool:
    """Whether a column is of a type of ours, on any database."""
    return any(isinstance(each, OwnType) for each in (type_, *type_._variant_mapping.values()))
