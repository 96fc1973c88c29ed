"""What our tables add to the operations of an Alembic migration."""

from __future__ import annotations

import ast
from collections.abc import Container
from typing import Any, TypeVar

from alembic.autogenerate import renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations import Operations
from alembic.operations.ops import CreateIndexOp, DropIndexOp, MigrateOperation, OpContainer

from pillarbox.schema.ddl import schema_statement

_WIDTH = 100

T = TypeVar("T", bound=MigrateOperation)


class MakeSchema(MigrateOperation):
    """Makes a schema, or on MySQL and MariaDB a database, unless it is there. It stays when the migration is undone."""

    def __init__(self, schema: str, dialect: str) -> None:
        self.schema, self.dialect = schema, dialect

    def reverse(self) -> MigrateOperation:
        return KeepSchema(self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("add_schema", self.schema)


class KeepSchema(MigrateOperation):
    """Leaves a schema where it is: it may have tables of others by now."""

    def __init__(self, schema: str) -> None:
        self.schema = schema


@Operations.implementation_for(MakeSchema)
def _make(operations: Operations, operation: MakeSchema) -> None:
    operations.execute(schema_statement(operation.dialect, operation.schema))


@Operations.implementation_for(KeepSchema)
def _keep(operations: Operations, operation: KeepSchema) -> None:
    pass


@renderers.dispatch_for(MakeSchema)
def _render_make(context: AutogenContext, operation: MakeSchema) -> str:
    return f"op.execute({schema_statement(operation.dialect, operation.schema)!r})"


@renderers.dispatch_for(KeepSchema)
def _render_keep(context: AutogenContext, operation: KeepSchema) -> str:
    return f"# The schema {operation.schema!r} stays, as others may use it."


# -- indexes -----------------------------------------------------------------------------------------------------------


class MakeIndex(CreateIndexOp):
    """The same, written with one argument per line where one line is too long."""

    def reverse(self) -> DropIndexOp:
        return _become(DropIndex, super().reverse())


class DropIndex(DropIndexOp):
    """The same as above."""

    def reverse(self) -> CreateIndexOp:
        return _become(MakeIndex, super().reverse())


def write_in_lines(changes: OpContainer, tables: Container[tuple[str | None, str]]) -> None:
    """Let operations on the indexes of these tables be written over several lines."""
    for place, each in enumerate(changes.ops):
        if isinstance(each, OpContainer):
            write_in_lines(each, tables)
        elif isinstance(each, CreateIndexOp) and (each.schema, each.table_name) in tables:
            changes.ops[place] = _become(MakeIndex, each)
        elif isinstance(each, DropIndexOp) and (each.schema, each.table_name) in tables:
            changes.ops[place] = _become(DropIndex, each)


def _become(kind: type[T], operation: MigrateOperation) -> T:
    made = kind.__new__(kind)
    vars(made).update(vars(operation))
    return made


@renderers.dispatch_for(MakeIndex)
def _render_make_index(context: AutogenContext, operation: MakeIndex) -> str:
    return _wrap(renderers.dispatch(CreateIndexOp)(context, operation))


@renderers.dispatch_for(DropIndex)
def _render_drop_index(context: AutogenContext, operation: DropIndex) -> str:
    return _wrap(renderers.dispatch(DropIndexOp)(context, operation))


def _wrap(text: str) -> str:
    if len(text) <= _WIDTH:
        return text
    call: Any = ast.parse(text, mode="eval").body
    parts = [ast.get_source_segment(text, each) for each in (call.func, *call.args, *call.keywords)]
    return "\n".join([f"{parts[0]}(", *(f"    {part}," for part in parts[1:]), ")"])
