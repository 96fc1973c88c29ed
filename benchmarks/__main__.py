"""Run the benchmarks: `python -m benchmarks [NAME …]` prints a JSON line each; exit 1 when a bar is not reached."""

from __future__ import annotations

import asyncio
import gc
import sys

from benchmarks import (
    handlers,
    inbox,
    latency,
    layouts,
    put,
    relay,
    sink_http,
    sink_kafka,
    sink_mqtt,
    sink_nats,
    sink_rabbitmq,
    sink_redis,
    sink_sql,
    sqlite,
    sync_drain,
    sync_push,
)

BENCHMARKS = {
    function.__name__: function
    for function in (
        relay.relay_hold,
        relay.relay_lease,
        put.put_many,
        put.put_session,
        latency.latency_p50,
        latency.latency_p99,
        sqlite.sqlite_put,
        sqlite.sqlite_drain,
        relay.relay_memory,
        *handlers.BENCHMARKS,
        *layouts.BENCHMARKS,
        *inbox.BENCHMARKS,
        *sink_http.BENCHMARKS,
        *sink_rabbitmq.BENCHMARKS,
        *sink_sql.BENCHMARKS,
        *sink_kafka.BENCHMARKS,
        *sink_nats.BENCHMARKS,
        *sink_redis.BENCHMARKS,
        *sink_mqtt.BENCHMARKS,
        *sync_push.BENCHMARKS,
        *sync_drain.BENCHMARKS,
    )
}


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"Unknown benchmark {unknown[0]!r}; expected one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    results = []
    for name in names:
        # As `pillarbox relay` does, for both sides of each comparison.
        gc.collect()
        gc.freeze()
        results.append(asyncio.run(BENCHMARKS[name]()))
        print(results[-1].line(), flush=True)
    return 0 if all(result.is_ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
