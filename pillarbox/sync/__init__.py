"""SQL write-behind: statements pushed into a local SQLite file in microseconds, replayed on remote databases in order.

Programs that only push need no extra package: what belongs to the service is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from pillarbox.errors import QueueError, QueueFull, UnsupportedStatement
from pillarbox.sync.files import QueueFile, QueueRow
from pillarbox.sync.queue import SqlQueue

if TYPE_CHECKING:
    from pillarbox.sync.config import AppConfig, SyncConfig, TableConfig, TargetConfig
    from pillarbox.sync.dead import DeadRow, get_dead, list_dead, replay, replay_all, skip, skip_lost
    from pillarbox.sync.health import QueueHealth, read_health
    from pillarbox.sync.migrating import Migration, check_migration, migrate
    from pillarbox.sync.queues import QueueRef, find_queues
    from pillarbox.sync.renumbering import renumber
    from pillarbox.sync.rewrite import inject_outbox_seq
    from pillarbox.sync.service import SyncService
    from pillarbox.sync.toml import load_sync_config, load_sync_layout
    from pillarbox.sync.verify import VerifyResult, verify_queue, verify_queues
    from pillarbox.sync.writers import Writer, open_writer

_HOMES: Final = {
    "config": ("AppConfig", "SyncConfig", "TableConfig", "TargetConfig"),
    "dead": ("DeadRow", "get_dead", "list_dead", "replay", "replay_all", "skip", "skip_lost"),
    "health": ("QueueHealth", "read_health"),
    "migrating": ("Migration", "check_migration", "migrate"),
    "queues": ("QueueRef", "find_queues"),
    "renumbering": ("renumber",),
    "rewrite": ("inject_outbox_seq",),
    "service": ("SyncService",),
    "toml": ("load_sync_config", "load_sync_layout"),
    "verify": ("VerifyResult", "verify_queue", "verify_queues"),
    "writers": ("Writer", "open_writer"),
}

__all__ = [
    "AppConfig",
    "DeadRow",
    "Migration",
    "QueueError",
    "QueueFile",
    "QueueFull",
    "QueueHealth",
    "QueueRef",
    "QueueRow",
    "SqlQueue",
    "SyncConfig",
    "SyncService",
    "TableConfig",
    "TargetConfig",
    "UnsupportedStatement",
    "VerifyResult",
    "Writer",
    "check_migration",
    "find_queues",
    "get_dead",
    "inject_outbox_seq",
    "list_dead",
    "load_sync_config",
    "load_sync_layout",
    "migrate",
    "open_writer",
    "read_health",
    "renumber",
    "replay",
    "replay_all",
    "skip",
    "skip_lost",
    "verify_queue",
    "verify_queues",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
