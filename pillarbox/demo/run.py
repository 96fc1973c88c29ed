"""One run of the demo: writers and a relay at work, the relay killed in the middle of it, and a comparison.

Every process that is started here is ended here, by its number, however the run ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import orjson

import pillarbox
from pillarbox.demo import shop
from pillarbox.demo.reader import Reader, Tail, percentile, take_lines
from pillarbox.errors import PillarboxError
from pillarbox.stores import Filter, State
from pillarbox.stores.url import open_store

KILLS: Final = 2
LEASE: Final = 3
BATCH: Final = 50
MOST_TRIES: Final = 100
PACE: Final = 300
"""Orders a second when there are few of them; many are placed within the rush."""
RUSH: Final = 9.0
# In seconds since the start, for machines that have more to do than this; they place fewer orders.
LONGEST_RUSH: Final = 12.0
LAST_KILL: Final = 15.0
LONGEST_RUN: Final = 40.0
LONGEST_START: Final = 20.0
LONGEST_STOP: Final = 2
READ_EVERY: Final = 0.005
LOOK_EVERY: Final = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended; latencies in seconds, None when nothing was delivered, undisturbed until the first kill.

    Orders are lost when they are neither in the file nor in the outbox any more. Those that still wait there
    when time is up are not lost, but not good either.
    """

    committed: int
    rolled_back: int
    delivered: int
    delivered_twice: int
    waiting: int
    lost: int
    rolled_back_delivered: int
    out_of_order: int
    relay_kills: int
    seconds: float
    latency_p50: float | None
    latency_p99: float | None
    undisturbed_p50: float | None = None

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.waiting or self.out_of_order or self.rolled_back_delivered)

    @property
    def throughput(self) -> float:
        return self.delivered / self.seconds


class Writer(NamedTuple):
    """A process of the shop, and where it says at its end how many orders were rolled back."""

    process: BaseProcess
    result: Connection


class Run:
    """The processes of one run and what is known of their progress.

    `tell` is called with the seconds since the start and what happened, `show` several times a second.
    """

    def __init__(
        self,
        folder: Path,
        *,
        orders: int,
        writers: int,
        seed: int,
        tell: Callable[[float, str], None],
        show: Callable[[Run], None],
        check: Callable[[], None],
    ) -> None:
        self.reader = Reader()
        self.kills = 0
        self.pending = 0
        self._undisturbed_p50: float | None = None
        self._tries = 0
        self._orders = orders
        self._writer_count = min(writers, orders)
        self._seed = seed
        self._folder = folder
        self._database = folder / "shop.db"
        self._file = folder / "delivered.jsonl"
        self._log = folder / "relay.log"
        self._tell_at = tell
        self._show = show
        self._check = check
        self._tail = Tail(self._file)
        self._writers: list[Writer] = []
        self._relay: subprocess.Popen[bytes] | None = None
        self._store = open_store(f"sqlite:///{self._database}")
        self._runner = asyncio.Runner()
        self._started_at = time.monotonic()
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _ in self._writers:
            process.kill()
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for process, result in self._writers:
            process.join()
            result.close()
        self._runner.run(self._store.close())
        self._runner.close()

    def run(self) -> Report:
        """Let the shop have its rush, kill the relay meanwhile, and report when the outbox is empty."""
        shop.open_shop(self._database)
        self._start_relay()
        self._wait_for_relay()
        self._started_at = time.monotonic()
        self._start_writers()
        while any(process.is_alive() for process, _ in self._writers):
            self._step()
        rolled_back = sum(map(_read_result, self._writers))
        self._tell(f"the last order is placed; {self._look():,} are on their way")
        while self._look() and self._age < LONGEST_RUN:
            self._step()
        seconds = self._age
        self._tell("the outbox is empty" if not self.pending else f"{self.pending:,} are still in the outbox")
        self._stop_relay()
        take_lines(self.reader, self._tail.read())
        return self._report(rolled_back, seconds)

    # -- watching --------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._check()
        take_lines(self.reader, self._tail.read())
        if time.monotonic() > self._looked_at + LOOK_EVERY:
            self._look()
            self._show(self)
            self._check_relay()
        if self._is_time_to_kill:
            self._try_to_kill()
        time.sleep(READ_EVERY)

    @property
    def _is_time_to_kill(self) -> bool:
        wanted = self._orders * (self.kills + 1) // (KILLS + 2)
        return self.kills < KILLS and self.reader.delivered >= wanted and self._age < LAST_KILL

    @property
    def _age(self) -> float:
        return time.monotonic() - self._started_at

    def _look(self) -> int:
        self._looked_at = time.monotonic()
        counts = self._runner.run(self._store.counts())
        self.pending = counts.new + counts.retrying + counts.held + counts.blocked
        return self.pending

    def _tell(self, sentence: str) -> None:
        self._tell_at(self._age, sentence)

    # -- processes -------------------------------------------------------------------------------------------

    def _start_writers(self) -> None:
        # A fork shares what is imported already; a new interpreter would spend a second of the rush on that.
        context = multiprocessing.get_context("fork")
        share, rest = divmod(self._orders, self._writer_count)
        every = min(RUSH, self._orders / PACE) * self._writer_count / self._orders
        for number in range(self._writer_count):
            result, answer = context.Pipe(duplex=False)
            count, seed = share + (number < rest), self._seed * 1000 + number
            arguments = (self._database, count, every, seed, answer)
            process = context.Process(target=_write, args=arguments, daemon=True)
            process.start()
            answer.close()
            self._writers.append(Writer(process, result))
            self._check()

    def _start_relay(self) -> None:
        # What the user has set for relays of their own does not concern this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
        package = str(Path(pillarbox.__file__).parent.parent)
        env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [env.get("PYTHONPATH")])])
        where = ["--store", f"sqlite:///{self._database}", "--sink", f"file:{self._file}"]
        limits = [f"--lease={LEASE}s", f"--batch-size={BATCH}", f"--stop-timeout={LONGEST_STOP}s"]
        with self._log.open("ab") as log:
            self._relay = subprocess.Popen(
                [sys.executable, "-m", "pillarbox", "relay", *where, *limits],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches the whole group of processes; the demo ends its relay itself.
                start_new_session=True,
            )

    def _wait_for_relay(self) -> None:
        deadline = time.monotonic() + LONGEST_START
        while time.monotonic() < deadline and not self._log.stat().st_size:
            self._check()
            self._check_relay()
            time.sleep(READ_EVERY)

    def _try_to_kill(self) -> None:
        """Kill the relay at a telling moment: it is stopped for a look, and goes on if this is none.

        First it dies with orders that it has claimed and not delivered, then with some that it has delivered and
        not settled. After a while any moment at which it holds orders will do.
        """
        assert self._relay is not None
        self._relay.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._relay.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        take_lines(self.reader, self._tail.read())
        held = self._read_ids("leased")
        unsent = held - self.reader.arrivals.keys()
        fitting = held - unsent if self.kills else unsent
        self._tries += 1
        if not fitting and (not held or self._tries < MOST_TRIES):
            self._relay.send_signal(signal.SIGCONT)
            return
        self._relay.kill()
        self._relay.wait()
        self._tell_of_kill(len(fitting or held), "to settle" if (fitting or held).isdisjoint(unsent) else "to deliver")
        self.kills += 1
        self._tries = 0
        self._start_relay()

    def _tell_of_kill(self, held: int, what: str) -> None:
        if not self.kills:
            self._undisturbed_p50 = percentile(self.reader.latencies, 0.5) or 0.0
            within = f"half of them within {self._undisturbed_p50 * 1000:.0f} ms"
            self._tell(f"{self.reader.delivered:,} orders are delivered, {within}")
        orders = "1 order" if held == 1 else f"{held} orders"
        self._tell(f"relay killed (SIGKILL) while it held {orders} {what}; the next one starts")

    def _check_relay(self) -> None:
        if self._relay is not None and self._relay.poll() is not None:
            last = " ".join(self._log.read_text(errors="replace").splitlines()[-1:])
            raise PillarboxError(f"The relay of the demo ended by itself; its last words: {last!r}")

    def _stop_relay(self) -> None:
        assert self._relay is not None
        self._relay.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._relay.wait(LONGEST_STOP + 1)

    # -- the end ---------------------------------------------------------------------------------------------

    def _read_ids(self, *states: State) -> set[str]:
        """The ids of the orders whose events are in these states, of all that are not dead when none is given."""
        records = self._runner.run(self._store.events(Filter(), limit=self._orders))
        wanted = [each for each in records if each.state in states or (not states and each.state != "dead")]
        return {orjson.loads(each.event.payload)["id"] for each in wanted}

    def _report(self, rolled_back: int, seconds: float) -> Report:
        committed = shop.read_committed(self._database)
        delivered = self.reader.arrivals.keys()
        waiting = committed & self._read_ids()
        return Report(
            committed=len(committed),
            rolled_back=rolled_back,
            delivered=len(delivered),
            delivered_twice=self.reader.delivered_twice,
            waiting=len(waiting - delivered),
            lost=len(committed - waiting - delivered),
            rolled_back_delivered=len(delivered - committed),
            out_of_order=self.reader.out_of_order,
            relay_kills=self.kills,
            seconds=seconds,
            latency_p50=percentile(self.reader.latencies, 0.5),
            latency_p99=percentile(self.reader.latencies, 0.99),
            undisturbed_p50=self._undisturbed_p50,
        )


def _write(database: Path, count: int, every: float, seed: int, answer: Connection) -> None:
    # Ctrl-C reaches the whole group of processes; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    answer.send(shop.place_orders(database, count, every=every, at_most=LONGEST_RUSH, seed=seed))


def _read_result(writer: Writer) -> int:
    if not writer.result.poll():
        raise PillarboxError(f"A writer of the demo ended by itself with exit code {writer.process.exitcode}")
    declined: int = writer.result.recv()
    return declined
