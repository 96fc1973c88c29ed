"""The Redis sink and a cluster: streams on several nodes, slots that move, nodes that die."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.exceptions import ConnectionError as RedisConnectionError

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.redis import RedisSink
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_redis import Wire
from tests.servers import server_url
from tools.servers.redis_cluster import RedisClusterServer

STREAMS = [f"stream-{number}" for number in range(12)]  # on all three nodes


@pytest.fixture
def place() -> str:
    return make_place()


def names(url: str, stream: str) -> list[str]:
    with Wire(url) as wire:
        entries = wire.call("XRANGE", stream, "-", "+")
    return [json.loads(dict(zip(flat[::2], flat[1::2], strict=True))[b"payload"])["name"] for _, flat in entries]


def owner(url: str, stream: str) -> str:
    """The address of the node that has the stream's slot."""
    with Wire(url) as wire:
        slot = int(wire.call("CLUSTER", "KEYSLOT", stream))
        for first, last, (host, port, *_), *_ in wire.call("CLUSTER", "SLOTS"):
            if int(first) <= slot <= int(last):
                return f"{host.decode()}:{port.decode()}"
    raise AssertionError(f"no node has slot {slot}")


async def test_batch_goes_to_all_nodes_and_keeps_the_order_of_each_stream(place):
    url = server_url("redis_cluster")
    sink = open_sink(url, stream=f"{place}:{{type}}", cluster=True)
    claims = [named_claim(f"{stream}/{number}", stream, type=stream) for number in range(50) for stream in STREAMS]
    assert len({owner(url, f"{place}:{stream}") for stream in STREAMS}) == 3
    assert await sink.deliver(claims) == [DELIVERED] * 600
    await sink.close()
    for stream in STREAMS:
        assert names(url, f"{place}:{stream}") == [f"{stream}/{number}" for number in range(50)]


async def test_without_create_a_missing_stream_is_dead_in_a_cluster(place):
    url = server_url("redis_cluster")
    sink = open_sink(url, stream=f"{place}:{{type}}", cluster=True, create=False)
    with Wire(url) as wire:
        wire.call("XADD", f"{place}:there", "*", "payload", '{"name": "first"}')
    outcomes = await sink.deliver([named_claim("a", type="missing"), named_claim("b", type="there")])
    await sink.close()
    assert outcomes == [Dead(f"Stream '{place}:missing' does not exist"), DELIVERED]
    assert names(url, f"{place}:there") == ["first", "b"]


async def test_own_cluster_client_is_used_and_left_open(place):
    client = RedisCluster.from_url(server_url("redis_cluster"))
    sink = RedisSink(client, stream=place)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    node = client.get_node_from_key(place)
    connection = await client.execute_command("CLIENT ID", target_nodes=node)
    await sink.close()
    assert await client.execute_command("CLIENT ID", target_nodes=node) == connection
    await client.aclose()
    assert names(server_url("redis_cluster"), place) == ["a"]


async def test_pubsub_reaches_listeners_at_every_node(place):
    url = server_url("redis_cluster")
    sink = open_sink(url, stream=place, cluster=True, mode="pubsub")
    with Wire(url) as listener:
        listener.call("SUBSCRIBE", place)
        assert await sink.deliver([named_claim("a"), named_claim("b")]) == [DELIVERED, DELIVERED]
        await sink.close()
        assert [json.loads(listener.read()[2])["name"] for _ in range(2)] == ["a", "b"]


@pytest.mark.parametrize("how", ["hangs", "breaks"])
async def test_answers_of_a_node_count_when_the_rest_of_a_large_batch_fails(monkeypatch, place, how):
    url = server_url("redis_cluster")
    sink = open_sink(url, stream=place, cluster=True, timeout="1s")
    calls: list[int] = []
    execute = ClusterNode.execute_pipeline

    async def execute_once(node: ClusterNode, commands: list[PipelineCommand]) -> bool:
        calls.append(len(commands))
        if len(calls) == 1:
            return await execute(node, commands)
        if how == "hangs":
            await asyncio.Event().wait()
        # So does the client when the connection is lost between two answers.
        for command in commands:
            command.result = RedisConnectionError("Connection closed by server.")
        return True

    monkeypatch.setattr(ClusterNode, "execute_pipeline", execute_once)
    claims = [named_claim(str(number), "k", headers={"x": "x" * 600_000}) for number in range(6)]
    text = {"hangs": "No answer in time", "breaks": "Connection closed by server"}[how]
    with pytest.raises(SinkUnavailable, match=text) as partly:
        await sink.deliver(claims)
    await sink.close()
    assert calls == [2, 2]
    assert partly.value.outcomes == [DELIVERED] * 2 + [RELEASED] * 4
    assert names(url, place) == ["0", "1"]


# -- a cluster of our own --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServer]:
    server_url("redis_cluster")
    with tempfile.TemporaryDirectory(prefix="pillarbox-broker-") as folder:
        Path(folder).chmod(0o755)
        server = RedisClusterServer(Path(folder))
        server.start()
        yield server
        server.kill()


@pytest.fixture
async def sink(cluster: RedisClusterServer, place: str) -> AsyncIterator[Sink]:
    made = open_sink(cluster.url, stream=f"{place}:{{type}}", cluster=True)
    await made.open()
    yield made
    await made.close()


def call_node(cluster: RedisClusterServer, address: str, *command: str) -> Any:
    (node,) = (each for each in cluster.nodes if each.url.split("@")[1].startswith(address))
    with Wire(node.url) as wire:
        return wire.call(*command)


async def test_batch_follows_a_slot_that_moves_to_another_node(cluster, sink, place):
    stream = f"{place}:moving"
    source = owner(cluster.url, stream)
    target = next(f"127.0.0.1:{node.port}" for node in cluster.nodes if not source.endswith(f":{node.port}"))
    slot = call_node(cluster, source, "CLUSTER", "KEYSLOT", stream).decode()
    ids = {address: call_node(cluster, address, "CLUSTER", "MYID").decode() for address in (source, target)}

    def batch(first: int) -> list[Any]:
        return [named_claim(str(number), "k", type="moving") for number in range(first, first + 5)]

    call_node(cluster, target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    call_node(cluster, source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    assert await sink.deliver(batch(0)) == [DELIVERED] * 5
    for address in (target, source):
        call_node(cluster, address, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    assert await sink.deliver(batch(5)) == [DELIVERED] * 5
    assert await sink.deliver(batch(10)) == [DELIVERED] * 5
    assert names(cluster.url, stream) == [str(number) for number in range(15)]
    assert owner(cluster.url, stream) == target


async def test_dead_node_costs_the_others_nothing_and_the_cluster_recovers(cluster, sink, place):
    victim = cluster.nodes[1]
    dead = f"127.0.0.1:{victim.port}"
    claims = [named_claim(stream, type=stream) for stream in STREAMS]
    is_hit = [owner(cluster.url, f"{place}:{stream}") == dead for stream in STREAMS]
    assert {True, False} == set(is_hit)
    assert await sink.deliver(claims) == [DELIVERED] * 12
    victim.kill()
    with pytest.raises(SinkUnavailable, match="ConnectionError") as partly:
        await sink.deliver(claims)
    assert partly.value.outcomes == [RELEASED if hit else DELIVERED for hit in is_hit]
    # Nothing goes on in the background: what arrived is what was counted.
    for stream, hit in zip(STREAMS, is_hit, strict=True):
        if not hit:
            assert names(cluster.url, f"{place}:{stream}") == [stream, stream]
    survivor = f"127.0.0.1:{cluster.nodes[0].port}"
    while b"cluster_state:fail" not in call_node(cluster, survivor, "CLUSTER", "INFO"):
        pass
    alive = [claim for claim, hit in zip(claims, is_hit, strict=True) if not hit]
    with pytest.raises(SinkUnavailable, match="ClusterDownError"):
        await sink.deliver(alive)
    with pytest.raises(SinkUnavailable):
        await sink.check()
    cluster.start()
    await sink.check()
    assert await sink.deliver(claims) == [DELIVERED] * 12


async def test_paused_node_is_an_outage_in_time(cluster, place):
    sink = open_sink(cluster.url, stream=f"{place}:{{type}}", cluster=True, timeout="500ms")
    claims = [named_claim(stream, type=stream) for stream in STREAMS]
    assert await sink.deliver(claims) == [DELIVERED] * 12
    is_hit = [owner(cluster.url, f"{place}:{stream}").endswith(f":{cluster.nodes[2].port}") for stream in STREAMS]
    cluster.nodes[2].pause()
    try:
        with pytest.raises(SinkUnavailable, match="TimeoutError: No answer in time") as partly:
            await sink.deliver(claims)
    finally:
        cluster.nodes[2].resume()
    assert partly.value.outcomes == [RELEASED if hit else DELIVERED for hit in is_hit]
    cluster.start()
    assert await sink.deliver(claims) == [DELIVERED] * 12
    await sink.close()
