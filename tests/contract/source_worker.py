"""A consumer in a process of its own, to be killed: writes the name of each message it handles to a file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from pillarbox import Relay
from pillarbox.event import Event
from pillarbox.sinks.callable import CallableSink
from pillarbox.sources.url import open_source
from tests.contract.sources import Letters


async def main(order: dict[str, Any]) -> None:
    out = os.open(order["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def handle(event: Event) -> None:
        os.write(out, f"{json.loads(event.payload)['name']}\n".encode())
        await asyncio.sleep(order["pause"])

    source: Any = open_source(order["url"], group=order["group"], dead=Letters(), **order["options"])
    poll = timedelta(milliseconds=100)
    async with Relay(source, CallableSink(handle, concurrency=4), batch_size=20, poll=poll) as relay:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, relay.stop)
        print("ready", flush=True)
        await relay.run()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
