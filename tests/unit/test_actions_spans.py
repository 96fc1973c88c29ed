"""The span of an action: its attributes, its retries, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pillarbox import Constant
from pillarbox.actions import Action, ActionLog, spans

SOON = Constant(timedelta(milliseconds=1), max_attempts=3)


class Busy(Exception):
    pass


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with patch.object(spans._trace, "get_tracer", provider.get_tracer):
        yield kept
    provider.shutdown()


@pytest.fixture
def log() -> Iterator[ActionLog]:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    made = ActionLog(sa.MetaData(), namespace="unit.spans", engine=engine)
    made.table.metadata.create_all(engine)
    yield made
    engine.dispose()


def test_block_is_one_span_and_its_parent_is_the_current_one(log: ActionLog, exporter: InMemorySpanExporter) -> None:
    with trace.get_tracer("test").start_as_current_span("request"), log.action("wallet.open", actor="bob"):
        inside = trace.get_current_span()
        with trace.get_tracer("test").start_as_current_span("query"):
            pass
    assert inside is not trace.get_current_span()
    query, action, request = exporter.get_finished_spans()
    assert action.name == "pillarbox.action"
    assert dict(action.attributes or {}) == {
        "pillarbox.action.name": "wallet.open",
        "pillarbox.action.namespace": "unit.spans",
        "pillarbox.action.actor": "bob",
        "pillarbox.action.retries": 0,
        "pillarbox.action.outcome": "done",
    }
    assert action.parent == request.context
    assert query.parent == action.context
    assert action.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("error", [Busy("no"), KeyboardInterrupt("stop")], ids=["error", "fatal"])
def test_failed_block_is_a_failed_span(log: ActionLog, exporter: InMemorySpanExporter, error: BaseException) -> None:
    with pytest.raises(type(error)), log.action("wallet.open"):
        raise error
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == f"{type(error).__name__}: {error}"
    assert [event.name for event in span.events] == ["exception"]


def test_retries_are_events_of_one_span(log: ActionLog, exporter: InMemorySpanExporter) -> None:
    calls: list[Any] = []

    @log.run_as("wallet.open", retry={Busy: SOON})
    def open_wallet(act: Action[Session], params: dict[str, int]) -> int:
        calls.append(trace.get_current_span())
        if len(calls) < 3:
            raise Busy
        return len(calls)

    assert open_wallet({}) == 3
    [span] = exporter.get_finished_spans()
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        ("retry", {"exception.type": "Busy", "attempt": 1}),
        ("retry", {"exception.type": "Busy", "attempt": 2}),
    ]
    assert (span.attributes or {})["pillarbox.action.retries"] == 2
    assert [call.get_span_context() for call in calls] == [span.context] * 3


async def test_asynchronous_function_is_one_span(exporter: InMemorySpanExporter) -> None:
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=sa.StaticPool)
    log = ActionLog(sa.MetaData(), namespace="unit.spans", engine=engine)
    async with engine.begin() as db:
        await db.run_sync(log.table.metadata.create_all)

    @log.run_as("wallet.open")
    async def open_wallet(act: Action[AsyncSession], params: dict[str, int]) -> None:
        raise Busy

    with pytest.raises(Busy):
        await open_wallet({})
    await engine.dispose()
    [span] = exporter.get_finished_spans()
    assert (span.attributes or {})["pillarbox.action.outcome"] == "failed"
    assert span.status.status_code is StatusCode.ERROR
