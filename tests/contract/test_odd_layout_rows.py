"""In every layout, a row that another program wrote as no event can be stops nobody: neither relays nor operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import Relay
from pillarbox.layouts import get_layout
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Filter
from pillarbox.stores.dialect import is_time
from tests.contract.layouts import LayoutKit
from tests.contract.stores import EVERYTHING

MOST = 2**31 - 1
TIMES = {
    "postgresql": ["'20000-01-01'", "'0044-03-15 BC'", "'infinity'", "'-infinity'"],
    "mysql": ["'0000-00-00 00:00:00'", "'2026-00-10 00:00:00'"],
    "sqlite": ["'yesterday'", "X'ff'", "20000", "''", "1e300"],
}
NUMBERS = {
    "postgresql": [str(MOST), "-1", "NULL"],
    "mysql": [str(MOST), "-1", "NULL"],
    "sqlite": [str(MOST), "-1", "NULL", "'many'", "1.5", "X'00'", str(2**63 - 1)],
}
DEEP = "[" * 3000 + "]" * 3000
DOCUMENTS = {
    "postgresql": ["'[1]'", "'\"text\"'", "'5'", "'null'", f"'{{\"a\": {DEEP}}}'", '\'{"a": [1], "b": null}\'', "NULL"],
    "mysql": ["'[1]'", "'\"text\"'", "'5'", "'null'", "'{\"a\": [1]}'", "'{broken'", "NULL"],
    "sqlite": ["'[1]'", "'5'", "'{broken'", "X'ff'", "CAST(X'7bff7d' AS TEXT)", "7", "1.5", f"'{DEEP}'", "''", "NULL"],
}
TEXTS = {
    "postgresql": ["''", "'  '", "repeat('x', 255)", "repeat('é', 400)", "E'\\x01\\x1b'"],
    "mysql": ["''", "'  '", "REPEAT('x', 255)", "REPEAT('é', 60000)", "X'00'"],
    "sqlite": ["''", "CAST(X'62ff' AS TEXT)", "X'00ff'", "5", "1.5", "CAST(X'610062' AS TEXT)"],
}
# Plain JSON keeps what JSONB cannot.
ZERO = '\'{"a": "\\u0000"}\''
NO_OBJECT = ("'[1]'", "'\"text\"'", "'5'", "'{broken'", "X'ff'", "CAST(X'7bff7d' AS TEXT)", "7", "1.5", f"'{DEEP}'")
NO_COUNT = (str(MOST), "'many'", "1.5", "X'00'", str(2**63 - 1))


def odd_values(kit: LayoutKit) -> Iterator[tuple[str, str]]:
    """For each column of a table what its type lets other programs write."""
    backend, layout = kit.database.backend, get_layout(kit.spec.layout)
    for column in kit.outbox.table.c:
        kind = column.type
        if column.name == layout.row or column.name in ("id", "lane", "seq", "sink", "status", "delivered", "synced"):
            continue
        if is_time(kind):
            values = TIMES[backend]
        elif isinstance(kind, sa.JSON):
            values = [*DOCUMENTS[backend], ZERO]
        elif isinstance(kind, sa.Integer):
            values = NUMBERS[backend]
        elif isinstance(kind, sa.String):
            values = TEXTS[backend]
        else:
            values = ["5", "''", "CAST(X'ff' AS TEXT)"] if backend == "sqlite" else []
        yield from ((column.name, value) for value in values)


def must_die(kit: LayoutKit, column: str, value: str) -> bool:
    """Whether no event can be read from a row with this value."""
    layout = get_layout(kit.spec.layout)
    if column == layout.fields.get("created_at"):
        return True
    if column == layout.fields.get("headers"):
        return value in NO_OBJECT or "[[[" in value
    # A notification that was tried is one whose claim lapsed, and is counted anew.
    is_recounted = layout.lease.is_found_by_claim and not value.isdigit()
    return column == layout.attempts and layout.side is None and value in NO_COUNT and not is_recounted


def spoil(kit: LayoutKit, row: Any, column: str, value: str) -> bool:
    """Write a value as another program would; false when the table refuses it."""
    is_mysql = kit.database.backend == "mysql"
    name = f"`{column}`" if is_mysql else f'"{column}"'
    statement = f"UPDATE {kit.database.names['outbox']} SET {name} = {value} WHERE {kit.spec.find['outbox']}"
    with kit.engine.connect() as db:
        if is_mysql:
            db.exec_driver_sql("SET SESSION sql_mode = ''")
        try:
            changed = db.execute(sa.text(re.sub(r":(?!id\b)", r"\:", statement)), {"id": kit._plain(row)}).rowcount
            db.commit()
        except sa.exc.DBAPIError:
            db.rollback()
            changed = 0
        if is_mysql:
            db.invalidate()
    return changed == 1


async def relay_odd(kit: LayoutKit, odd: Sequence[tuple[str, str]]) -> None:
    """Relay rows with odd values among good ones, then do to them what operators do."""
    kit.database.empty()
    kit.add("good")
    if "parallel" not in kit.spec.features:  # one dead row holds up all that follow
        kit.add("fine")
    spoiled = {}
    for number, (column, value) in enumerate(odd):
        if spoil(kit, kit.add(f"odd{number}"), column, value):
            spoiled[f"odd{number}"] = (column, value)
    if "parallel" in kit.spec.features:
        kit.add("fine")
    assert spoiled or len(odd) == 1
    store = await kit.open()
    sink = MemorySink()
    relay = Relay(store, sink)
    await relay.drain()
    sent = Counter(each.type for each in sink.events)
    assert (sent["good"], sent["fine"]) == (1, 1)
    assert set(sent.values()) == {1}
    wanted = {name for name, each in spoiled.items() if must_die(kit, *each)}
    assert {spoiled[name] for name in wanted & set(sent)} == set()
    records = await store.events(EVERYTHING, limit=1000)
    dead = {record.event.type for record in records if record.state == "dead"}
    assert {spoiled[name] for name in wanted - dead} == set()
    count = sum(record.state == "dead" for record in records)
    assert (await store.counts()).dead == count
    assert await store.redrive(Filter(), actor="ann") == count
    await relay.drain()
    await store.drop(Filter(), actor="ann")
    assert (await store.counts()).dead == 0
    await relay.close()
    kit.stores.remove(store)


async def test_odd_rows_stop_nobody(layout_kit: LayoutKit) -> None:
    odd = list(odd_values(layout_kit))
    if "parallel" in layout_kit.spec.features:
        await relay_odd(layout_kit, odd)
        return
    for each in odd:
        await relay_odd(layout_kit, [each])


@pytest.mark.parametrize("value", ["X'00ff'", "CAST(X'62ff' AS TEXT)"], ids=["blob", "no-utf8"])
async def test_row_whose_id_is_no_text_stops_nobody(
    layout_kit: LayoutKit, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    layout = get_layout(layout_kit.spec.layout)
    if layout_kit.database.backend != "sqlite" or layout.fields.get("id") != layout.row:
        pytest.skip("rows of this table always have an id that is text, or another number")
    for name in ("good", "odd", "fine"):
        row = layout_kit.add(name)
        if name == "odd":
            assert spoil(layout_kit, row, layout.row, value)
    sink = MemorySink()
    store = await layout_kit.open()
    relay = Relay(store, sink)
    for _ in range(3):
        await relay.drain()
    assert sorted(each.type for each in sink.events) == ["fine", "good"]
    assert [record.event.type for record in await store.events(EVERYTHING) if record.state == "ready"] == ["odd"]
    assert [record.levelname for record in caplog.records if "nobody can claim it" in record.message] == ["ERROR"]
    await relay.close()
    layout_kit.stores.clear()


async def test_payload_that_is_no_json_is_delivered_as_it_is(layout_kit: LayoutKit) -> None:
    column = get_layout(layout_kit.spec.layout).fields.get("payload")
    if column is None or not isinstance(layout_kit.outbox.table.c[column].type, sa.JSON):
        pytest.skip("its payloads are bytes or text")
    if not spoil(layout_kit, layout_kit.add("odd"), column, "'{broken'"):
        pytest.skip("the database refuses what is no JSON")
    sink = MemorySink()
    relay = Relay(await layout_kit.open(), sink)
    await relay.drain()
    assert [each.payload for each in sink.events] == [b"{broken"]
    await relay.close()
    layout_kit.stores.clear()
