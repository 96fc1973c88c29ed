"""Every name of sqloutbox has the counterpart that the docs say, and every name of ours is in the reference."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sqloutbox
import typer

import pillarbox.sync
from pillarbox.cli.commands import app
from pillarbox.sync import AppConfig, TableConfig, TargetConfig, load_sync_config
from tests.acceptance.docs_pages import Block, read_blocks, read_sections
from tests.servers import ROOT

REFERENCE = read_sections(ROOT / "docs" / "reference.md")
SERVICE = ROOT / "docs" / "write-behind-service.md"
# What the page of release 0.4 names, besides the package's own list.
ON_THE_PAGE = {
    "OutboxConfig": "db_dir targets batch_size flush_interval table_flush_threshold table_max_wait auto_schema "
    "cleanup_every retain_log_days tables_for_target target_for_table all_tables schema_sql drop_schema_sql",
    "TargetConfig": "name tables inject_outbox_seq db_dir batch_size retain_log_days should_inject_seq get_retain_days",
    "SQLMiddleware": "_config _push _push_many _source _outbox",
    "OutboxSyncService": "run pending_count total_pending",
    "OutboxWriter": "write_batch",
    "Outbox": "enqueue enqueue_batch fetch_unsynced verify_chain mark_synced delete_synced seed_sequence pending_count",
}
COMMANDS = ("runservice", "init")


def read_table() -> Iterator[tuple[str, str]]:
    """The names of sqloutbox on the left of the table, each with one of ours on the right."""
    for line in read_sections(ROOT / "docs" / "write-behind-from-sqloutbox.md")["Names"].splitlines():
        if line.startswith("| `"):
            left, right = line.split("|")[1:3]
            (old,) = re.findall(r"`([^`]+)`", left)
            found = re.findall(r"`([^`]+)`", right)
            assert found, f"{old} has no counterpart"
            yield from ((old, new) for new in found)


TABLE = list(read_table())


def load(name: str) -> Any:
    """What a dotted name of `pillarbox.sync`, or one that says its module, is."""
    found: Any = pillarbox.sync
    if name.startswith("pillarbox."):
        module, _, name = name.rpartition(".")
        found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def find_command(words: list[str]) -> Any:
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return command


@pytest.mark.parametrize(("old", "new"), TABLE, ids=lambda each: each.replace(" ", "-"))
def test_counterpart_is_there(old: str, new: str) -> None:
    if not new.startswith("pillarbox "):
        assert not isinstance(load(new), ModuleType)
        return
    words = new.split()[1:]
    options = [word for word in words if word.startswith("-")]
    command = find_command([word for word in words if word not in options])
    assert set(options) <= {each for param in command.params for each in param.opts}


def test_table_has_every_name_of_the_page_and_the_package() -> None:
    named = {f"{owner}.{part}" for owner, parts in ON_THE_PAGE.items() for part in parts.split()}
    wanted = {*sqloutbox.__all__, *named, *(f"sqloutbox {command}" for command in COMMANDS)}
    assert wanted - {old for old, _ in TABLE} == set()


# -- the reference -----------------------------------------------------------------------------------------


def list_parts(found: Any) -> Iterator[str]:
    """Parameters, and for a class its public methods and attributes."""
    if not getattr(found, "_is_protocol", False):
        yield from (name for name in inspect.signature(found).parameters if not name.startswith("_"))
    if inspect.isclass(found):
        names = {**inspect.get_annotations(found), **vars(found)}
        yield from (name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("name", pillarbox.sync.__all__)
def test_public_name_is_in_the_reference(name: str) -> None:
    found = getattr(pillarbox.sync, name)
    if inspect.isclass(found) and issubclass(found, Exception):
        assert name in read_sections(ROOT / "docs" / "errors.md")
        return
    if not inspect.isclass(found):
        assert any(f"`{name}(" in text for text in REFERENCE.values())
        return
    words = {word for span in re.findall(r"`([^`]+)`", REFERENCE[name]) for word in re.findall(r"\w+", span)}
    assert [part for part in list_parts(found) if part not in words] == []


def test_public_names_are_the_same_once_every_module_is_imported() -> None:
    for each in pkgutil.iter_modules(pillarbox.sync.__path__):
        import_module(f"pillarbox.sync.{each.name}")
    modules = [name for name in pillarbox.sync.__all__ if isinstance(getattr(pillarbox.sync, name), ModuleType)]
    assert modules == [], "a module of this name hides what is public"


def test_every_key_of_the_settings_is_documented() -> None:
    text = read_sections(SERVICE)["Settings"]
    keys = {each.name for kind in (AppConfig, TargetConfig, TableConfig) for each in dataclasses.fields(kind)}
    missing = [key for key in sorted(keys - {"name", "targets", "_"}) if f"`{key}`" not in text]
    assert missing == []


def test_documented_defaults_are_the_defaults() -> None:
    defaults = {each.name: each.default for each in dataclasses.fields(AppConfig)}
    shown = dict(re.findall(r"^\| `(\w+)` \*? ?\| ([^|]+?) \|", read_sections(SERVICE)["Settings"], re.MULTILINE))
    compared = {key: value.strip('`"') for key, value in shown.items() if key in defaults}
    assert len(compared) >= 14
    for key, value in compared.items():
        default = defaults[key]
        expected = {None: "false", True: "true"}.get(default) if default is None or default is True else str(default)
        assert value in (expected, str(expected).removesuffix(".0")), key


SETTINGS = [
    block
    for page in sorted((ROOT / "docs").glob("write-behind*.md"))
    for block in read_blocks(page)
    if block.language == "toml"
]


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.place)
def test_settings_on_the_pages_are_understood(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text(block.text)
    env = {"POSTGRES_URL": "postgresql://db/shop", "PRIMARY_DB_URL": "libsql://db", "PRIMARY_DB_TOKEN": "token"}
    config = load_sync_config(path, env)
    # A class of the reader's is not there; the options of the writers that are ours are checked when they are made.
    if all(target.writer_class is None for target in config.targets):
        assert set(config.make_writers()) == {target.name for target in config.targets}
