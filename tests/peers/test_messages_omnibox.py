"""Messages as the real omni-box's publisher writes them to Kafka: the same rows sent by it, and by us."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any
from uuid import uuid4

from pillarbox import Event
from pillarbox.config import Config, SinkConfig, StoreConfig
from tests.contract.kit_kafka import make_topic, read_topic
from tests.peers.omnibox import TABLES, OmniBoxTables
from tests.peers.openoutbox_rows import drain
from tests.servers import server_url

AGGREGATE = "0b7f3c52-8a4e-4a53-9a3f-0f2b6c1d7e10"
PARTITIONS = 4
TOLD: dict[str, Any] = {"schema_version": "2", "trace_id": "t-1", "correlation_id": "c-1", "causation_id": "d-1"}


def read(url: str, topic: str) -> list[list[Any]]:
    """The messages by partition: key, value and headers in their order."""
    return [
        [(each.key, each.body, list(each.headers.items())) for each in read_topic(url, topic, partition=number)]
        for number in range(PARTITIONS)
    ]


def test_messages_to_kafka_are_those_of_its_publisher(omnibox: OmniBoxTables) -> None:
    url = server_url("kafka")
    theirs, ours = (f"peer.{uuid4().hex[:10]}" for _ in range(2))
    for topic in (theirs, ours):
        make_topic(url, topic, partitions=PARTITIONS)
    common: dict[str, Any] = {"topic": theirs, "aggregate_type": "Order", "aggregate_id": AGGREGATE}
    full = Event(
        "order.placed",
        {"f": 1.0, "name": "ü", "n": [1, None]},
        key="ann",
        headers={"b": "ü", "a": "x"},
        **common,
        **TOLD,
    )
    mine = Event("order.paid", {"n": 2}, key="bob", headers={"trace_id": "mine"}, source="shop", **common)
    rest = [Event("order.sent", {"n": number}, key=f"key-{number}", **common) for number in range(8)]
    with omnibox.engine.begin() as db:
        omnibox.outbox("outbox").put(db, full, mine, *rest)
    omnibox.peer.call("publish_to_kafka", table="outbox", servers=url.removeprefix("kafka://"))
    reset = "status = 'pending', attempts_made = 0, completed_at = NULL, topic = :topic"
    assert omnibox.run("outbox", f"UPDATE {{table}} SET {reset} WHERE status = 'completed'", topic=ours) == 10
    store = StoreConfig(
        url=str(server_url("postgres")), layout="omnibox", table=TABLES["outbox"], schema=omnibox.schema
    )
    asyncio.run(drain(Config(store=store, sink=SinkConfig(url=url))))
    found = read(url, theirs)
    assert sum(map(len, found)) == 10
    # Events of one transaction share their time, so neither keeps the order of these.
    assert [sorted(each, key=repr) for each in read(url, ours)] == [sorted(each, key=repr) for each in found]
    [written] = [each for each in chain.from_iterable(found) if ("event_id", str(full.id)) in each[2]]
    assert written == (
        "ann",
        '{"f":1.0,"n":[1,null],"name":"ü"}'.encode(),
        [("a", "x"), ("b", "ü"), ("event_id", str(full.id)), ("event_type", "order.placed"), *TOLD.items()],
    )
