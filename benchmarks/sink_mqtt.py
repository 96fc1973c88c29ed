"""The relay to MQTT, over a bare loop of paho with the same window.

Nobody is subscribed: delivered is what the server has acknowledged, and a reader would only share the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import PAYLOAD, Result, server_url
from benchmarks.sinks import Place, measure
from pillarbox import open_sink

SERVER_WINDOW = 20
"""Mosquitto's receive maximum; paho does not look at what the server says."""

HEADERS = [
    ("event-id", "01890a5d-ac96-774b-bcce-b302099a8057"),
    ("event-type", "order.placed"),
    ("event-key", "key-1"),
    ("event-time", "2026-03-01T12:30:00.250000+00:00"),
]


@asynccontextmanager
async def mqtt_place() -> AsyncIterator[Place]:
    from paho.mqtt.client import Client, MQTTv5
    from paho.mqtt.enums import CallbackAPIVersion
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

    url = server_url("mosquitto")
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    connected, done = asyncio.Event(), asyncio.Event()
    left = 0

    def on_connect(*_: Any) -> None:
        loop.call_soon_threadsafe(connected.set)

    def on_publish(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            loop.call_soon_threadsafe(done.set)

    client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5)
    client.username_pw_set(str(parts.username), parts.password)
    client.max_inflight_messages_set(SERVER_WINDOW)
    client.on_connect, client.on_publish = on_connect, on_publish
    client.connect(str(parts.hostname), parts.port or 1883)
    client.loop_start()
    await connected.wait()

    async def send(count: int) -> None:
        nonlocal left
        left = count
        done.clear()
        for _ in range(count):
            properties: Any = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.ContentType = "application/json"
            properties.UserProperty = HEADERS
            client.publish("bench/orders", PAYLOAD, qos=1, properties=properties)
        await done.wait()

    yield Place(lambda: open_sink(url, topic="bench/orders"), send)
    client.disconnect()
    await asyncio.to_thread(client.loop_stop)


async def sink_mqtt() -> Result:
    """MQTT 5, QoS 1: as many at once as the server takes."""
    return await measure("sink_mqtt", mqtt_place())


BENCHMARKS = (sink_mqtt,)
