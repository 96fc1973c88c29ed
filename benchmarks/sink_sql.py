"""The relay from PostgreSQL to event rows in PostgreSQL, over asyncpg running the same two statements a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from benchmarks.common import PAYLOAD, Result, server_url
from benchmarks.sinks import Place, measure
from pillarbox import open_sink
from pillarbox.event import uuid7

_TAKE = """
    INSERT INTO {0}_received (consumer, event_id) SELECT $1, unnest($2::uuid[])
    ON CONFLICT DO NOTHING RETURNING event_id"""
_INSERT = """
    INSERT INTO {0} (id, type, topic, key, payload, content_type, headers) SELECT c0, c1, c2, c3, c4, c5, c6::jsonb
    FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[])
    AS u (c0, c1, c2, c3, c4, c5, c6)"""


@asynccontextmanager
async def sql_place() -> AsyncIterator[Place]:
    import asyncpg

    url = server_url("postgres")
    table = f"bench_sql_{uuid4().hex[:8]}"
    made = open_sink(url, table=table, dedup_table=f"{table}_received", create=True)
    await made.open()
    await made.close()
    client = await asyncpg.connect(url)
    take, insert = _TAKE.format(table), _INSERT.format(table)

    async def send(count: int) -> None:
        ids = [uuid7() for _ in range(count)]
        keys = [f"key-{number}" for number in range(count)]
        async with client.transaction():
            await client.fetch(take, "bench", ids)
            await client.execute(
                insert,
                ids,
                ["bench"] * count,
                ["bench"] * count,
                keys,
                [PAYLOAD] * count,
                ["application/octet-stream"] * count,
                ["{}"] * count,
            )

    yield Place(lambda: open_sink(url, table=table, dedup_table=f"{table}_received"), send)
    await client.execute(f"DROP TABLE {table}, {table}_received")
    await client.close()


async def sink_sql() -> Result:
    """Event rows in PostgreSQL, exactly once."""
    return await measure("sink_sql", sql_place())


BENCHMARKS = (sink_sql,)
