"""The sync service: every table of every target has a relay from its queue file to the target's writer.

    await SyncService(config).run()

The relays are independent: a target that is down, a table that waits behind a failed row and a file that cannot be read
stop nobody else. A table that goes to several targets is copied first; see `copies`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.group import RelayGroup, Waking
from pillarbox.hooks import Hook, Passing
from pillarbox.opening import Opening
from pillarbox.relay import Relay
from pillarbox.retry import Exponential, RetryPolicy
from pillarbox.stores import Counts
from pillarbox.sync.config import AppConfig, SyncConfig, TargetConfig
from pillarbox.sync.copies import CopySink, Handover
from pillarbox.sync.flushing import Flush
from pillarbox.sync.health import QueueHealth, read_health
from pillarbox.sync.lock import FolderLocks
from pillarbox.sync.queues import QueueRef, copy_path, find_queues
from pillarbox.sync.remote import Remote
from pillarbox.sync.sink import WriterSink
from pillarbox.sync.source import QueueSource
from pillarbox.sync.verify import VerifyResult, verify_queues
from pillarbox.sync.writers import Writer

log = logging.getLogger("pillarbox.sync")


class SyncService(Opening):
    """Drains the queue files of a configuration to its targets.

    `writers` are by target name, `app.db`; without them they are made as the configuration says. One service works on
    a folder at a time; `open` raises `ConfigError` when another has it.
    """

    def __init__(
        self,
        config: SyncConfig,
        writers: Mapping[str, Writer] | None = None,
        *,
        hook: Hook | None = None,
    ) -> None:
        self.config = config
        self._hook = hook
        writers = config.make_writers() if writers is None else writers
        missing = [target.name for target in config.targets if target.name not in writers]
        if missing:
            given = ", ".join(sorted(writers)) or "none"
            raise ConfigError(f"SyncService: there is no writer for target {missing[0]!r}; got writers for {given}")
        self._locks = FolderLocks(app.folder for app in config.apps)
        self._remotes: dict[str, Remote] = {}
        self._sources: dict[str, QueueSource] = {}
        self._refs: dict[str, QueueRef] = {}
        self._relays: dict[str, Relay] = {}
        self._feeds: dict[str, list[str]] = {}
        for app in config.apps:
            self._add_app(app, writers)
        self._group = RelayGroup(self._relays, feeds=self._feeds)

    # -- what is connected with what ---------------------------------------------------------------------------------

    def _add_app(self, app: AppConfig, writers: Mapping[str, Writer]) -> None:
        for target in app.targets:
            self._remotes[target.name] = Remote(
                target.name,
                writers[target.name],
                batches=target.batches,
                dialect=target.dialect,
                auto_schema=app.auto_schema,
                connection=target.connection,
            )
        for table in app.tables:
            targets = [target for target in app.targets if table in target.table_names]
            is_own = app.db_file is not None
            queue = app.queue_file(table)
            copies = {each.name: copy_path(queue, each.name, table, is_application_file=is_own) for each in targets}
            if len(targets) == 1 and not copies[targets[0].name].exists():
                self._add_table(app, targets[0], table)
            else:
                self._add_shared_table(app, targets, table, copies)

    def _add_table(self, app: AppConfig, target: TargetConfig, table: str) -> None:
        source = self._make_source(app, table, f"{target.name}/{table}", app.queue_file(table))
        sink = self._make_sink(app, target, table)
        source.prepare = partial(sink.prepare, source)
        self._add_relay(app, target, source, sink)

    def _add_shared_table(
        self, app: AppConfig, targets: Sequence[TargetConfig], table: str, copies: Mapping[str, Path]
    ) -> None:
        name = f"{app.name}/{table}"
        shared = self._make_source(app, table, name, app.queue_file(table))
        handover = Handover(shared, copies, is_application_file=app.db_file is not None)
        for target in targets:
            source = self._make_source(app, table, f"{target.name}/{table}", copies[target.name])
            sink = self._make_sink(app, target, table)
            source.prepare = partial(_prepare_copy, handover, source, sink)
            self._add_relay(app, target, source, sink)
        shared.prepare = handover.finish
        shared.decodes = False
        shared.flush = Flush(threshold=1)
        shared.retention = timedelta(days=max(app.settings_for(each, table).retain_log_days for each in targets))
        fed = [f"{target.name}/{table}" for target in targets]
        self._relays[name] = Relay(
            shared,
            CopySink(shared, copies),
            batch_size=app.batch_size,
            # A row is copied whatever it is; none is given up here.
            retry=_retry_of(app, None),
            poll=timedelta(seconds=app.flush_interval),
            hook=_Noting(shared, Waking(None, [self._relays[each] for each in fed], self._hook)),
        )
        self._feeds[name] = fed

    def _make_source(self, app: AppConfig, table: str, name: str, path: Path) -> QueueSource:
        source = QueueSource(
            path,
            table,
            name=name,
            prune_every=timedelta(seconds=app.cleanup_every * app.flush_interval),
            is_application_file=path == app.db_file,
        )
        self._sources[name] = source
        self._refs[name] = QueueRef("", table, path, table, is_application_file=path == app.db_file)
        return source

    def _make_sink(self, app: AppConfig, target: TargetConfig, table: str) -> WriterSink:
        inject = app.settings_for(target, table).inject_outbox_seq
        return WriterSink(self._remotes[target.name], table, inject=inject)

    def _add_relay(self, app: AppConfig, target: TargetConfig, source: QueueSource, sink: WriterSink) -> None:
        settings = app.settings_for(target, source.namespace)
        source.flush = Flush(
            threshold=app.table_flush_threshold,
            max_wait=timedelta(seconds=app.table_max_wait),
            batch_bytes=settings.max_batch_bytes,
        )
        source.retention = timedelta(days=settings.retain_log_days)
        self._relays[source.name] = Relay(
            source,
            sink,
            batch_size=settings.batch_size,
            retry=_retry_of(app, settings.max_attempts),
            dead=settings.dead,
            poll=timedelta(seconds=app.flush_interval),
            hook=_Noting(source, self._hook),
        )

    # -- what callers do ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the folders; the queue files and the targets are opened when they are needed, and may be down.

        Raises `ConfigError` when rows wait in a copy for a target, or a table of it, that is not configured any more.
        """
        self._locks.take()
        try:
            await asyncio.to_thread(_tell_strays, self.config)
        except BaseException:
            self._locks.release()
            raise
        for remote in self._remotes.values():
            _tell_promise(remote)

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._locks.release)
            for remote in self._remotes.values():
                stack.push_async_callback(remote.close)
            stack.push_async_callback(self._group.close)

    async def run(self) -> None:
        """Drain until `stop` is called. Survives targets and files that are down for a while."""
        async with self:
            await self._group.run()

    async def drain(self) -> dict[str, int]:
        """Send everything that can be sent now, whatever the thresholds; returns what still waits, by queue.

        Raises `SinkUnavailable` or `StoreUnavailable` when a target or a file is down, after the others are drained.
        """
        async with self:
            for source in self._sources.values():
                source.drains = True
            try:
                remains = await self._group.drain()
            finally:
                for source in self._sources.values():
                    source.drains = False
        return {name: _waiting(counts) for name, counts in remains.items()}

    def stop(self) -> None:
        """Let `run` or `drain` end after what is under way."""
        self._group.stop()

    async def pending_count(self) -> dict[str, int]:
        """How many statements wait, by queue: `app.db/table`; while the service runs or not.

        Raises `StoreUnavailable` when a file cannot be read.
        """
        return await asyncio.to_thread(lambda: {name: _count_waiting(name, ref) for name, ref in self._refs.items()})

    async def total_pending(self) -> int:
        """How many statements wait in all; one that waits for two targets counts twice."""
        return sum((await self.pending_count()).values())

    async def verify(self) -> tuple[VerifyResult, ...]:
        """Check every queue file, while the service runs or not; nothing is changed."""
        return await asyncio.to_thread(lambda: verify_queues(find_queues(self.config)))


async def _prepare_copy(handover: Handover, source: QueueSource, sink: WriterSink) -> None:
    # A copy that was fed before does not need the shared file, which may be out of order.
    if (await source.state()).origin_queue is None:
        await handover.finish()
    await sink.prepare(source)


class _Noting(Passing):
    """Lets a queue remember why its destination is down."""

    def __init__(self, source: QueueSource, hook: Hook | None) -> None:
        super().__init__(hook)
        self._source = source

    def paused(self, sink: str, reason: str) -> None:
        self._source.note_outage(reason)
        super().paused(sink, reason)


def _count_waiting(name: str, ref: QueueRef) -> int:
    health = read_health(ref)
    if health.state in ("foreign", "unreadable"):
        raise StoreUnavailable(f"Queue {name}: {health.error}")
    return health.waiting


def _tell_strays(config: SyncConfig) -> None:
    """Say which rows go nowhere; those of a target that is gone are refused, since nobody else would miss them."""
    stranded: list[QueueHealth] = []
    for ref in find_queues(config):
        if ref.is_expected:
            continue
        health = read_health(ref)
        if health.state in ("foreign", "unreadable"):
            log.warning("A queue that goes to no target cannot be read: %s", health.error)
        elif ref.target and health.waiting:
            stranded.append(health)
        elif health.waiting:
            log.warning(
                "%s: %d statements wait for table %r, which goes to no target, and are not sent. Add it to the tables "
                "of a target; if its name was mistyped, push them again and delete the file.",
                ref.path,
                health.waiting,
                ref.table,
            )
    if stranded:
        raise ConfigError(_describe_stranded(stranded))


def _describe_stranded(queues: Sequence[QueueHealth]) -> str:
    listed = ", ".join(f"{each.path} ({each.waiting} for {each.target}/{each.table})" for each in queues)
    folder = queues[0].path.parent
    return (
        f"Statements wait for a target that is not configured any more: {listed}. If the target has another name now, "
        f"rename its folder {str(folder)!r} to that name while the service is stopped; if they are not to be sent, "
        "delete the file; else put the target and its table back into the settings"
    )


def _waiting(counts: Counts) -> int:
    return counts.new + counts.retrying + counts.dead


def _retry_of(app: AppConfig, max_attempts: int | None) -> RetryPolicy:
    first = timedelta(seconds=app.backoff_seconds)
    return Exponential(first, cap=max(first, timedelta(minutes=app.backoff_cap_minutes)), max_attempts=max_attempts)


def _tell_promise(remote: Remote) -> None:
    if remote.is_atomic:
        log.info("Target %s: every statement is applied exactly once.", remote.name)
        return
    also = (
        "" if remote.batches == "ordered" else ' Statements go one by one, because it does not say batches = "ordered".'
    )
    log.warning(
        "Target %s: its writer is not transactional: after a crash or a lost answer statements may be applied again; "
        "only INSERTs that carry outbox_seq are known then.%s",
        remote.name,
        also,
    )
