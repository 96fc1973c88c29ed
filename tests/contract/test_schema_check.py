"""The check sees every difference between a table and its declaration, says how to mend it, and is right about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox.schema import check_tables
from tests.contract.drifts import (
    FAMILIES,
    LAYOUTS,
    Change,
    declare,
    mend,
    own_engine,
    spare_indexes,
    undo,
)


@pytest.fixture(scope="module")
def open_engine() -> Iterator[Any]:
    with ExitStack() as stack:
        made: dict[str, sa.Engine] = {}

        def get(name: str) -> sa.Engine:
            if name not in made:
                made[name] = stack.enter_context(own_engine(name))
            return made[name]

        yield get


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_fresh_tables_have_no_drift(layout: str, name: str, open_engine: Any) -> None:
    engine = open_engine(name)
    tables = declare(layout, engine)
    metadata = tables["outbox"].metadata
    with engine.connect() as db:
        metadata.create_all(db)
        try:
            assert check_tables(db, tables.values()) == []
        finally:
            metadata.drop_all(db)
            db.commit()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_every_single_change_is_found_mended_and_restored(
    layout: str, name: str, family: str, open_engine: Any
) -> None:
    engine = open_engine(name)
    failures = []
    changes = list(FAMILIES[family](lambda: declare(layout, engine), engine.dialect))
    tried = 0
    with engine.connect() as db:
        for change in changes:
            declared = declare(layout, engine)[change.role]
            if change.column is not None:
                spare_indexes(engine.dialect, change.column, declared, change.table)
            if can_create(db, change.table):
                tried += 1
                failures += try_change(db, declared, change)
    assert failures == []
    assert tried >= len(changes) / 2


def can_create(db: sa.Connection, table: sa.Table) -> bool:
    """Whether there can be such a table: a partition key cannot be missing, for one."""
    try:
        table.create(db)
    except sa.exc.DBAPIError:
        if db.dialect.name == "postgresql":
            db.rollback()
        table.drop(db, checkfirst=True)
        db.commit()
        return False
    return True


def try_change(db: sa.Connection, table: sa.Table, change: Change) -> list[str]:
    declared = [table]
    try:
        first = check_tables(db, declared)
        found = {(drift.kind, drift.name) for drift in first}
        if found != change.expected or len(first) != len(found):
            return [f"{change.label}: expected {change.expected}, found {list(map(str, first))}"]
        if any(statement.startswith("--") for drift in first for statement in drift.statements):
            return []  # what cannot be mended says so
        mend(db, first)
        if left := check_tables(db, declared):
            return [f"{change.label}: after {first[0].statement} there is still {list(map(str, left))}"]
        undo(db, first)
        if (again := check_tables(db, declared)) != first:
            return [f"{change.label}: undone it is {list(map(str, again))}, was {list(map(str, first))}"]
        return []
    except sa.exc.DBAPIError as error:
        return [f"{change.label}: {error}"]
    finally:
        # A failed transaction of PostgreSQL takes nothing more; elsewhere a rollback brings half of the DDL back.
        if db.dialect.name == "postgresql":
            db.rollback()
        change.table.drop(db, checkfirst=True)
        db.commit()
