"""One omni-box for a module of tests, with its own tables in a schema of their own."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import sqlalchemy as sa

from tests.peers.omnibox import OmniBox, OmniBoxTables
from tests.servers import server_url


@pytest.fixture(scope="module")
def omnibox() -> Iterator[OmniBoxTables]:
    url = sa.make_url(server_url("postgres"))
    schema = f"peer_{uuid4().hex[:10]}"
    with OmniBox(url, schema) as peer:
        peer.call("create")
        tables = OmniBoxTables(peer, url, schema)
        yield tables
        tables.close()
        peer.call("drop")
