"""One run of the demo: start writers and a relay, kill the relay in the middle of its work, compare at the end.

Every process that is started here is ended here, by its number, however the run ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pillarbox
from pillarbox.demo import shop
from pillarbox.demo.reader import Reader, Tail, percentile, take_lines
from pillarbox.errors import PillarboxError
from pillarbox.stores import Counts
from pillarbox.stores.url import open_store

KILLS: Final = 2
LEASE: Final = 2
BATCH: Final = 50
LONGEST_RUSH: Final = 8.0
ORDERS_A_SECOND: Final = 200
"""The pace of a small shop; a larger one places all its orders within the longest rush."""
LONGEST_DRAIN: Final = 15.0
LONGEST_STOP: Final = 5.0
READ_EVERY: Final = 0.005
LOOK_EVERY: Final = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended; latencies in seconds, None when nothing was delivered."""

    committed: int
    rolled_back: int
    delivered: int
    delivered_twice: int
    lost: int
    rolled_back_delivered: int
    out_of_order: int
    relay_kills: int
    seconds: float
    latency_p50: float | None
    latency_p99: float | None

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.out_of_order or self.rolled_back_delivered)

    @property
    def throughput(self) -> float:
        return self.delivered / self.seconds


class Run:
    """The processes of one run and what is known of their progress.

    `tell` is called with each sentence of the story, `show` many times a second.
    """

    def __init__(
        self,
        folder: Path,
        *,
        orders: int,
        writers: int,
        seed: int,
        tell: Callable[[str], None],
        show: Callable[[Run], None],
    ) -> None:
        self.orders = orders
        self.reader = Reader()
        self.kills = 0
        self.pending = 0
        self._folder = folder
        self._database = folder / "shop.db"
        self._file = folder / "delivered.jsonl"
        self._log = folder / "processes.log"
        self._writer_count = min(writers, orders)
        self._seed = seed
        self._tell = tell
        self._show = show
        self._tail = Tail(self._file)
        self._writers: list[subprocess.Popen[bytes]] = []
        self._relay: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._looked_at = 0.0
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        shop.open_shop(self._database)
        self._store = open_store(f"sqlite:///{self._database}")
        self._runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self._writers, self._relay):
            if process is not None and process.poll() is None:
                process.kill()
        for process in (*self._writers, self._relay):
            if process is not None:
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        self._runner.run(self._store.close())
        self._runner.__exit__(kind, error, trace)

    def run(self) -> Report:
        """Let the shop have its rush, kill the relay meanwhile, and report when the outbox is empty."""
        self._started_at = time.monotonic()
        self._start_relay()
        self._start_writers()
        while any(writer.poll() is None for writer in self._writers):
            self._step()
            if self.kills < KILLS and self.reader.delivered > self.orders * (self.kills + 1) // (KILLS + 2):
                self._kill_relay()
        rolled_back = sum(map(_read_result, self._writers))
        self._tell(f"the last order is placed, {self.pending} wait in the outbox")
        deadline = time.monotonic() + LONGEST_DRAIN
        while self._look() and time.monotonic() < deadline:
            self._step()
        seconds = time.monotonic() - self._started_at
        self._stop_relay()
        take_lines(self.reader, self._tail.read())
        self._tell("the outbox is empty" if not self.pending else f"{self.pending} are still in the outbox")
        return self._report(rolled_back, seconds)

    @property
    def age(self) -> float:
        return time.monotonic() - self._started_at

    # -- watching ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        take_lines(self.reader, self._tail.read())
        if time.monotonic() - self._looked_at > LOOK_EVERY:
            self._looked_at = time.monotonic()
            self._look()
            self._show(self)
            self._check_relay()
        time.sleep(READ_EVERY)

    def _look(self) -> int:
        counts = self._count()
        self.pending = counts.new + counts.retrying + counts.held + counts.blocked
        return self.pending

    def _count(self) -> Counts:
        return self._runner.run(self._store.counts())

    # -- processes --------------------------------------------------------------------------------------------------

    def _start_relay(self) -> None:
        store, sink = f"sqlite:///{self._database}", f"file:{self._file}"
        options = f"--lease {LEASE}s --batch-size {BATCH} --stop-timeout {LONGEST_STOP:.0f}s".split()
        self._relay = self._start("pillarbox", "relay", "--store", store, "--sink", sink, *options)

    def _start_writers(self) -> None:
        share, rest = divmod(self.orders, self._writer_count)
        rush = min(LONGEST_RUSH, self.orders / ORDERS_A_SECOND)
        every = rush * self._writer_count / self.orders
        for number in range(self._writer_count):
            count = share + (number < rest)
            arguments = (str(self._database), str(count), str(every), str(self._seed * 1000 + number))
            self._writers.append(self._start("pillarbox.demo.shop", *arguments))

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        # What the user has set for relays of their own does not concern this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
        package = str(Path(pillarbox.__file__).parent.parent)
        env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [env.get("PYTHONPATH")])])
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log if module == "pillarbox" else subprocess.PIPE,
                stderr=log,
            )

    def _kill_relay(self) -> None:
        """Kill the relay while it holds orders: it is stopped for a look, and goes on if it held none."""
        assert self._relay is not None
        self._relay.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._relay.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        held = self._count().held
        if not held:
            self._relay.send_signal(signal.SIGCONT)
            return
        self._relay.kill()
        self._relay.wait()
        self.kills += 1
        self._start_relay()
        self._tell(f"relay killed with SIGKILL while it held {held} orders; another one starts")

    def _check_relay(self) -> None:
        if self._relay is not None and self._relay.poll() is not None:
            raise PillarboxError(f"Demo: the relay ended by itself. The end of its log:\n{self._read_log()}")

    def _stop_relay(self) -> None:
        assert self._relay is not None
        self._relay.terminate()
        try:
            self._relay.wait(LONGEST_STOP * 2)
        except subprocess.TimeoutExpired:
            self._relay.kill()

    def _read_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])

    # -- the end ----------------------------------------------------------------------------------------------------

    def _report(self, rolled_back: int, seconds: float) -> Report:
        committed = shop.read_committed(self._database)
        delivered = self.reader.arrivals.keys()
        return Report(
            committed=len(committed),
            rolled_back=rolled_back,
            delivered=len(delivered),
            delivered_twice=self.reader.delivered_twice,
            lost=len(committed - delivered),
            rolled_back_delivered=len(delivered - committed),
            out_of_order=self.reader.out_of_order,
            relay_kills=self.kills,
            seconds=seconds,
            latency_p50=percentile(self.reader.latencies, 0.5),
            latency_p99=percentile(self.reader.latencies, 0.99),
        )


def _read_result(writer: subprocess.Popen[bytes]) -> int:
    assert writer.stdout is not None
    output = writer.stdout.read()
    if writer.returncode != 0:
        raise PillarboxError(f"Demo: a process of the shop ended with exit code {writer.returncode}")
    return int(output)
