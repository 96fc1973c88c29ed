"""Layouts as ORM mixins: a layout's columns for a class of the user's own declarative base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import declared_attr

from pillarbox.errors import LayoutError
from pillarbox.layouts.layout import Layout


class Mixin:
    """Columns for a subclass of the user's DeclarativeBase, which names the table and may add columns.

    The layout's constraints and indexes join whatever `__table_args__` the subclass or its base gives: a put
    cannot tell a new event from an old one without them.
    """

    if TYPE_CHECKING:
        __table_args__: Any
    else:

        @declared_attr.directive
        def __table_args__(cls) -> Any:  # noqa: N805 - a declared attribute gets the class
            return _join_args(cls, None)

    def __init_subclass__(cls, columns: Sequence[sa.Column[Any]] = (), **options: Any) -> None:
        for column in columns:
            setattr(cls, column.name, column)
        own = cls.__dict__.get("__table_args__")
        if own is not None:
            cls.__table_args__ = declared_attr.directive(lambda cls: _join_args(cls, own))
        super().__init_subclass__(**options)

    @classmethod
    def _layout_args(cls, table: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The constraints, indexes and options of a table with this name."""
        return (), {}


def _join_args(cls: Any, own: Any) -> tuple[Any, ...]:
    for base in cls.__mro__:
        if own is None and not issubclass(base, Mixin):
            own = base.__dict__.get("__table_args__")
    if hasattr(own, "__get__"):
        own = own.__get__(None, cls)
    given, options = ((), own) if isinstance(own, Mapping) else (tuple(own or ()), {})
    if given and isinstance(given[-1], Mapping):
        given, options = given[:-1], given[-1]
    items, defaults = cls._layout_args(cls.__tablename__)
    return (*items, *given, {**defaults, **options})


def check_models(layout: Layout, models: Mapping[str, Any]) -> Mapping[str, sa.Table]:
    """The tables of mapped classes by role, when they are what relays look for and a put can fill."""
    tables: dict[str, sa.Table] = {role: model.__table__ for role, model in models.items()}
    main = tables["outbox"]
    declared = layout.declare(sa.MetaData(), main.name, main.schema)
    if declared.keys() != tables.keys():
        wanted = ", ".join(f"{role}=…" for role in declared if role != "outbox") or "none"
        given = ", ".join(f"{role}=…" for role in tables if role != "outbox") or "none"
        raise LayoutError(f"Layout {layout.name!r}: besides the outbox's, expected the models {wanted}; got {given}")
    for role, own in declared.items():
        table, model = tables[role], models[role].__name__
        if table.fullname != own.fullname:
            raise LayoutError(
                f"Model {model!r}: expected table {own.fullname!r}, as relays find it by the name of the "
                f"outbox table; got {table.fullname!r}"
            )
        missing = {str(index.name) for index in own.indexes} - {str(index.name) for index in table.indexes}
        missing |= set(own.c.keys()) - set(table.c.keys())
        if missing:
            raise LayoutError(
                f"Model {model!r}: its table lacks the layout's {', '.join(sorted(missing))}. Name the mixin "
                "before the declarative base."
            )
        for column in table.c:
            is_extra = column.name not in own.c
            is_filled = column.nullable or column.server_default is not None
            if is_extra and (column.default is not None or not is_filled):
                raise LayoutError(
                    f"Model {model!r}, column {column.name!r}: a put writes the layout's columns only. Make "
                    "it nullable without a default, or give it a server_default."
                )
    return tables
