"""The page on layouts says what the layouts declare: their features, and where each field of an event goes."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest
import sqlalchemy as sa
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.visitors import iterate

from pillarbox.encoding import Encoder
from pillarbox.errors import InvalidEvent, Unsupported
from pillarbox.event import EVENT_FIELDS, Event
from pillarbox.layouts import Feature, Layout, declare_layout, get_layout, layout_names
from pillarbox.layouts.layout import DATABASES
from pillarbox.stores.fields import EventLoader
from tests.acceptance.docs_pages import read_sections
from tests.servers import ROOT

PAGE = ROOT / "docs" / "layouts.md"
SECTIONS = read_sections(PAGE)
DUE: sa.ColumnElement[Any] = sa.literal_column("due")

# Enough for every table that takes puts at all.
NEEDED: dict[str, Any] = {
    "key": "17",
    "aggregate_type": "order",
    "source": "shop",
    "correlation_id": "0b9e9a8e-7d5c-4d5f-9d6e-1f6a3c1f5d2a",
}
GIVEN: dict[str, Any] = {
    **NEEDED,
    "topic": "orders",
    "aggregate_id": "0b9e9a8e-7d5c-4d5f-9d6e-1f6a3c1f5d2b",
    "content_type": "application/cloudevents+json",
    "dedup_key": "once",
    "schema_version": "2",
    "causation_id": "0b9e9a8e-7d5c-4d5f-9d6e-1f6a3c1f5d2c",
    "trace_id": "t-1",
    "max_attempts": 3,
}


def read_table(section: str) -> dict[str, dict[str, str]]:
    """A table by the first cell of its rows and the heading of its columns."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


FEATURES = read_table("What each can do")
FIELDS = read_table("Fields")
# A column of the table of fields is for one layout or for several that are alike.
COLUMN_OF = {name: heading for heading in next(iter(FIELDS.values())) for name in named(heading)}


def test_every_layout_is_on_the_page() -> None:
    assert sorted(name for row in FEATURES for name in named(row)) == layout_names()
    assert sorted(COLUMN_OF) == layout_names()


@pytest.mark.parametrize("name", layout_names())
def test_features_are_those_of_the_layout(name: str) -> None:
    layout = get_layout(name)
    row = next(cells for first, cells in FEATURES.items() if name in named(first))
    said = {feature for feature in Feature if row[feature.value] == "yes"}
    assert said == layout.features
    assert set(named(row["table"])) == {f"{layout.schema}.{layout.table}" if layout.schema else layout.table}
    known = {"PostgreSQL": "postgresql", "MySQL": "mysql", "MariaDB": "mariadb", "SQLite": "sqlite"}
    databases = DATABASES if row["databases"] == "all" else {known[each] for each in row["databases"].split(", ")}
    assert databases == layout.databases
    assert (row["put"] == "yes") == (layout.put is not None)


CLAIMS = {name: cells for row, cells in read_table("Claims of others").items() for name in named(row)}


@pytest.mark.parametrize("name", [name for name in layout_names() if get_layout(name).lease.length is not None])
def test_lease_is_that_of_the_layout(name: str) -> None:
    # The page tells the partitioned and inbox forms with the plain one.
    said = CLAIMS[name.partition("-")[0]]["and lapses after"].split()
    length = get_layout(name).lease.length
    assert length == timedelta(**{said[1]: int(said[0])})


def test_reference_lists_the_names() -> None:
    options = read_sections(ROOT / "docs" / "reference.md")["Store options"]
    [row] = [line for line in options.splitlines() if line.startswith("| `--layout`")]
    assert sorted(named(row)[1:]) == layout_names()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("take-over-*.md")), ids=lambda page: page.stem)
def test_page_on_taking_over_has_the_way_there_and_back(page: Path) -> None:
    sections = read_sections(page)
    headings = " ".join(sections)
    assert [part for part in ("Look at", "Put", "Dead letters", "Prune", "Go back") if part not in headings] == []
    assert "**Order" in sections["What differs"]


# -- fields ------------------------------------------------------------------------------------------------


def test_every_field_of_an_event_is_on_the_page() -> None:
    assert [name for row in FIELDS for name in named(row)] == list(EVENT_FIELDS)


CELLS = [(layout, field) for layout in layout_names() for field in EVENT_FIELDS]


@pytest.mark.parametrize(("name", "field"), CELLS)
def test_field_is_where_the_page_says(name: str, field: str) -> None:
    assert FIELDS[f"`{field}`"][COLUMN_OF[name]] == describe(get_layout(name), field)


def describe(layout: Layout, field: str) -> str:
    """A cell of the table: the column, or the header, and what a field is that neither gives."""
    if field in ("due_at", "delay") and field not in layout.fields:
        column = layout.fields.get("due_at") or find_due(layout)
        return f"→ `{column}`" if column is not None else "none"
    if field in layout.fields:
        return f"`{layout.fields[field]}`"
    header = f"header `{layout.carried[field]}`" if field in layout.carried else ""
    fallback = layout.fallbacks.get(field)
    if fallback is None:
        return header or "none"
    return f"{header}, else {say(fallback)}" if header else f"= {say(fallback)}"


def find_due(layout: Layout) -> str | None:
    """The column that a put writes the due time into; a relay does not read it back."""
    if layout.put is None or Feature.SCHEDULE not in layout.features:
        return None
    [column] = [name for name, value in layout.put(DUE).items() if mentions_due(value)]
    return column


def mentions_due(value: Any) -> bool:
    return isinstance(value, ClauseElement) and any(part is DUE for part in iterate(value))


def say(fallback: Any) -> str:
    event = SimpleNamespace(type="type", topic="topic", key="key", aggregate_type="…")
    value = fallback(event, "row")
    if isinstance(value, UUID):
        return "from the row"
    return f"`{value}`" if value not in ("type", "topic", "key") else f"the {value}"


# -- both ways ---------------------------------------------------------------------------------------------

PUTTABLE = [name for name in layout_names() if get_layout(name).put is not None]


def make_event(layout: Layout, **fields: Any) -> Event:
    table = declare(layout)
    wanted = {name: value for name, value in NEEDED.items() if name in layout.fields}
    if "aggregate_id" in layout.fields and not table.c[layout.fields["aggregate_id"]].nullable:
        wanted["aggregate_id"] = GIVEN["aggregate_id"]
    return Event("order.placed", {"total": 990}, **{**wanted, **fields})


def declare(layout: Layout) -> sa.Table:
    return declare_layout(layout, sa.MetaData())["outbox"]


@pytest.mark.parametrize("name", PUTTABLE)
@pytest.mark.parametrize("field", GIVEN)
def test_field_comes_back_or_is_refused(name: str, field: str) -> None:
    layout = get_layout(name)
    cell = FIELDS[f"`{field}`"][COLUMN_OF[name]]
    event = make_event(layout, **{field: GIVEN[field]})
    encoder = Encoder(layout, declare(layout))
    if cell == "none" or cell.startswith("= "):
        with pytest.raises((InvalidEvent, Unsupported), match=field):
            encoder.check(event)
        return
    encoder.check(event)
    [headers] = encoder.headers([event], {})
    found = dict(orjson.loads(headers)) if headers else {}
    if cell.startswith("header"):
        assert str(found.pop(named(cell)[0])) == str(GIVEN[field])
    else:
        assert encoder.getter(field)(event) == GIVEN[field]
    assert getattr(load(layout, encoder, event, headers), field) == GIVEN[field]


def load(layout: Layout, encoder: Encoder, event: Event, headers: str | None) -> Event:
    """The event as a relay reads it from a SQLite row that this one was put into."""
    row = [
        str(event.id) if name == "id" else headers if name == "headers" else encoder.getter(name)(event)
        for name in EVENT_FIELDS
        if name in layout.fields
    ]
    values = dict(zip((name for name in EVENT_FIELDS if name in layout.fields), row, strict=True))
    loader = EventLoader(layout, declare(layout), "sqlite", 0)
    return loader.read([values.get(name) for name in EVENT_FIELDS], str(uuid4()))
