"""Queue files from a backup, and which service must not be at work while they are renumbered."""

from __future__ import annotations

from pathlib import Path

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.config import AppConfig, SyncConfig, TargetConfig
from pillarbox.sync.lock import FolderLocks
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.queues import QueueRef, find_queues
from pillarbox.sync.renumbering import renumber
from tests.contract.sqloutbox_files import read, write

SQL = "INSERT INTO orders (id) VALUES (1)"
STATE = "SELECT queue_id, seeded_for, sent FROM pillarbox_sync_state"


def fill(ref: QueueRef) -> None:
    with SqlQueue(file=ref.path) as queue:
        queue.push(ref.namespace, SQL)


@pytest.fixture(params=["db_dir", "db_file"])
def queues(request: pytest.FixtureRequest, tmp_path: Path) -> list[QueueRef]:
    """The shared queue of a table and its copies for two targets, with a row each."""
    targets = [TargetConfig("main", ["orders"]), TargetConfig("archive", ["orders"])]
    if request.param == "db_dir":
        app = AppConfig(name="shop", targets=targets, db_dir=tmp_path / "data")
    else:
        app = AppConfig(name="shop", targets=targets, db_file=tmp_path / "data" / "app.db")
    found = find_queues(SyncConfig([app]))
    for ref in found:
        ref.path.parent.mkdir(parents=True, exist_ok=True)
        fill(ref)
    return found


def test_every_file_of_a_copied_table_becomes_a_new_queue(queues: list[QueueRef]) -> None:
    assert [ref.target for ref in queues] == ["all", "shop.main", "shop.archive"]
    for ref in queues:
        assert renumber(ref) == 1
        write(ref.path, "UPDATE pillarbox_sync_state SET seeded_for = 'shop.main', sent = 7")
        [before] = read(ref.path, STATE)
        assert renumber(ref) == 1
        [after] = read(ref.path, STATE)
        assert before[0] != after[0]
        assert after[1:] == ("", 0)


def test_renumbering_is_refused_while_a_service_works_on_the_folder(queues: list[QueueRef], tmp_path: Path) -> None:
    locks = FolderLocks([tmp_path / "data"])
    locks.take()
    for ref in queues:
        with pytest.raises(ConfigError, match="works on this folder already"):
            renumber(ref)
    # The same files, found in the folder of a target.
    for ref in find_queues(queues[1].path.parent):
        with pytest.raises(ConfigError, match="works on this folder already"):
            renumber(ref)
    locks.release()
    assert [renumber(ref) for ref in queues] == [1, 1, 1]


@pytest.mark.parametrize("folder", ["mytargets/q", "targets/q", "app.db.targets/q"])
def test_folder_that_is_called_like_those_of_copies_is_locked_itself(tmp_path: Path, folder: str) -> None:
    [ref] = find_queues(SyncConfig.single(tmp_path / folder, [TargetConfig("main", ["orders"])], name="shop"))
    ref.path.parent.mkdir(parents=True)
    fill(ref)
    locks = FolderLocks([tmp_path / folder])
    locks.take()
    with pytest.raises(ConfigError, match="works on this folder already"):
        renumber(ref)
    locks.release()
    assert renumber(ref) == 1
    assert not (tmp_path / ".sqloutbox.lock").exists()
