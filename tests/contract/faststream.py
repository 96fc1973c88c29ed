"""What the tests of faststream-outbox's table share: its two forms, its rows, and a short put."""

from __future__ import annotations

from typing import Any

import pytest

from pillarbox import Event
from tests.contract.layouts import LayoutKit

with_dlq = pytest.mark.parametrize("layout_kit", ["faststream-dlq-postgresql"], indirect=True)
without_dlq = pytest.mark.parametrize("layout_kit", ["faststream-postgresql"], indirect=True)
either = pytest.mark.parametrize("layout_kit", ["faststream-postgresql", "faststream-dlq-postgresql"], indirect=True)


def rows(kit: LayoutKit, what: str = "*", role: str = "outbox") -> list[Any]:
    with kit.engine.begin() as db:
        found = db.exec_driver_sql(f"SELECT {what} FROM {kit.database.names[role]} ORDER BY id")
        return [dict(row) for row in found.mappings()]


def put(kit: LayoutKit, name: str, **fields: Any) -> Event:
    event = Event(name, {"name": name}, **fields)
    kit.put(event)
    return event
