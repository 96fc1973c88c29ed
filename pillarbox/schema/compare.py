"""Where a live table differs from its declaration, and what is close enough to be no difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pillarbox.schema.predicates import canonical, columns_of, readable
from pillarbox.schema.shape import CheckShape, ColumnShape, IndexShape, TableShape, canonical_column

COLUMN_KINDS: Final = ("type", "length", "collation", "nullability", "default", "identity")
"""What is mended by altering the column."""


class Difference(NamedTuple):
    """One difference as a person reads it, and the two sides of it."""

    kind: str
    name: str
    expected: str | None
    found: str | None
    wanted: Any = None
    present: Any = None


def compare(expected: TableShape, found: TableShape) -> Iterator[Difference]:
    """Every difference, in the order in which they can be mended."""
    yield from _compare_partition(expected, found)
    for name, column in expected.columns.items():
        present = found.columns.get(name)
        if present is None:
            yield Difference("column", name, _describe(column), None, column)
        else:
            # What a key holds is never null, whatever the declaration says; only SQLite lets it be.
            is_free = name in expected.key and column.nullable
            yield from _compare_column(replace(column, nullable=present.nullable) if is_free else column, present)
    for name, present in found.columns.items():
        if name not in expected.columns and _must_be_given(present):
            said = f"{_describe(present)}, without a default"
            yield Difference("foreign column", name, "nullable, or with a default", said, None, present)
    if expected.key != found.key and not _is_widened(expected.key, found.key, found):
        yield Difference("primary key", ", ".join(expected.key), _list(expected.key), _list(found.key))
    for check, other in pair_checks(expected, found):
        yield Difference("check", check.name or "", str(check), None if other is None else str(other), check, other)
    yield from _compare_indexes(expected, found)


def _list(names: tuple[str, ...]) -> str | None:
    return f"({', '.join(names)})" if names else None


def _describe(column: ColumnShape) -> str:
    return f"{column.type}{'' if column.nullable else ' not null'}"


def _must_be_given(column: ColumnShape) -> bool:
    is_filled = column.default is not None or column.numbering is not None or column.is_generated
    return not column.nullable and not is_filled


def _compare_partition(expected: TableShape, found: TableShape) -> Iterator[Difference]:
    # A table that its owner has partitioned serves a layout that says nothing of partitions.
    if expected.partition is not None and _plain(expected.partition) != _plain(found.partition or ""):
        yield Difference("partitioning", expected.partition, expected.partition, found.partition)


def _plain(text: str) -> str:
    return "".join(text.lower().replace('"', "").split())


# -- columns ------------------------------------------------------------------------------------------------


def _compare_column(column: ColumnShape, present: ColumnShape) -> Iterator[Difference]:
    sides = (column, present)
    expected, found = column.type, present.type
    if expected.name != found.name:
        yield Difference("type", column.name, str(expected), str(found), *sides)
    elif expected.arguments != found.arguments:
        yield Difference("length", column.name, str(expected), str(found), *sides)
    if expected.collation is not None and expected.collation != found.collation:
        yield Difference("collation", column.name, expected.collation, found.collation, *sides)
    if column.nullable != present.nullable:
        said = {True: "nullable", False: "not null"}
        yield Difference("nullability", column.name, said[column.nullable], said[present.nullable], *sides)
    if not has_same_default(column, present):
        yield Difference("default", column.name, _show(column.default), _show(present.default), *sides)
    if not has_same_numbering(column, present):
        yield Difference("identity", column.name, column.numbering, present.numbering, *sides)
    elif column.cache is not None and present.cache not in (None, column.cache):
        yield Difference("cache", column.name, str(column.cache), str(present.cache), *sides)


def _show(default: str | None) -> str | None:
    return None if default is None else readable(default)


def has_same_default(one: ColumnShape, other: ColumnShape) -> bool:
    if one.is_generated or other.is_generated:
        return True
    return _meaning(one.default) == _meaning(other.default)


def _meaning(default: str | None) -> str | None:
    # DEFAULT NULL says what no default says.
    written = None if default is None else canonical(default)
    return None if written == "(null)" else written


def has_same_numbering(expected: ColumnShape, found: ColumnShape) -> bool:
    if expected.numbering == found.numbering:
        return True
    if found.numbering == "autoincrement":  # SQLite: stricter than a bare row number
        return True
    return {expected.numbering, found.numbering} == {"by default", "serial"}


# -- checks and indexes -------------------------------------------------------------------------------------


def pair_checks(expected: TableShape, found: TableShape) -> list[tuple[CheckShape, CheckShape | None]]:
    """The declared checks that are not there, each with the one that stands in its place, if one does.

    A check of the same meaning is the same whatever its name. A wrong one is known by the name, else by its columns.
    """
    free = [check for check in found.checks if not any(check.is_like(each) for each in expected.checks)]
    pairs: list[tuple[CheckShape, CheckShape | None]] = []
    for check in expected.checks:
        if any(check.is_like(each) for each in found.checks):
            continue
        same_name = [each for each in free if each.name is not None and each.name == check.name]
        same_columns = [each for each in free if _columns(each, found) == _columns(check, expected)]
        other = next(iter([*same_name, *same_columns]), None)
        if other is not None:
            free.remove(other)
        pairs.append((check, other))
    return pairs


def _columns(check: CheckShape, table: TableShape) -> frozenset[str]:
    return columns_of(check.predicate) & {name.lower() for name in table.columns}


def _compare_indexes(expected: TableShape, found: TableShape) -> Iterator[Difference]:
    by_name = {index.name: index for index in found.indexes}
    for index in expected.indexes:
        if any(_is_same_index(index, each, found) for each in found.indexes):
            continue
        present = by_name.get(index.name)
        yield Difference("index", index.name, str(index), None if present is None else str(present), index, present)


def _is_same_index(index: IndexShape, present: IndexShape, found: TableShape) -> bool:
    if index.is_like(present):
        return True
    columns = tuple(map(canonical_column, index.columns))
    others = tuple(map(canonical_column, present.columns))
    if not index.is_unique or not _is_widened(columns, others, found):
        return False
    return replace(index, columns=present.columns).is_like(present)


# PostgreSQL and MySQL want the partition key in every unique key of a partitioned table.
def _is_widened(expected: tuple[str, ...], found: tuple[str, ...], table: TableShape) -> bool:
    added = set(found) - set(expected)
    kept = tuple(name for name in found if name not in added)
    return bool(added) and kept == expected and {name.lower() for name in added} <= table.partition_columns
