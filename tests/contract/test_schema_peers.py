"""The check beside the real programs: tables that they make themselves pass as they are."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox.schema import compare_schema
from tests.peers.omnibox import RELEASE, OmniBox
from tests.servers import server_url

LAYOUTS = ("omnibox", "omnibox-inbox", "omnibox-partitioned", "omnibox-inbox-partitioned")


@pytest.fixture
def made() -> Iterator[tuple[sa.Engine, str]]:
    """The four tables of the real omni-box in a schema of their own."""
    url = sa.make_url(server_url("postgres"))
    schema = f"peer_{uuid4().hex[:12]}"
    engine = sa.create_engine(url.set(drivername="postgresql+psycopg"))
    with OmniBox(url, schema) as peer:
        peer.call("create")
        try:
            yield engine, schema
        finally:
            peer.call("drop")
            engine.dispose()


async def test_tables_that_omnibox_makes_are_its_release(made: tuple[sa.Engine, str]) -> None:
    engine, schema = made
    for layout in LAYOUTS:
        found = await compare_schema(engine, layout, schema=schema)
        assert (layout, found.variant, found.drifts, found.hints) == (layout, RELEASE, [], [])
