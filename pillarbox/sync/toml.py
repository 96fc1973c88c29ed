"""Reading `outbox.toml`: apps, their databases, their connections.

Every text may hold `${VAR}` and `${VAR:-default}`; `$${` is a plain `${`. A connection table is free-form and goes to
its writer; any other key that is not known is refused.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from pillarbox.errors import ConfigError
from pillarbox.sync.config import AppConfig, SyncConfig, TableConfig, TargetConfig
from pillarbox.sync.fields import plain_name
from pillarbox.sync.secrets import DOPPLER, TOKEN, export_variables, resolve_variables
from pillarbox.values import check_known, fill, show

_Made = TypeVar("_Made", TableConfig, TargetConfig, AppConfig, SyncConfig)

FILE_NAME: Final = "outbox.toml"

_APP_KEYS: Final = (*(item.name for item in fields(AppConfig) if item.name not in ("name", "targets")), "db")
_TARGET_KEYS: Final = tuple(item.name for item in fields(TargetConfig) if item.name != "name")
_TABLE_KEYS: Final = tuple(item.name for item in fields(TableConfig))


def load_sync_config(
    path: str | Path = FILE_NAME, env: MutableMapping[str, str] | None = None, *, doppler: str = DOPPLER
) -> SyncConfig:
    """Read the file with everything that the service needs; raises `ConfigError` for anything not understood.

    Variables of the `.env` beside the file and of Doppler are added to `env`, the process's unless another is given,
    where they are missing.
    """
    found = Path(path)
    env = os.environ if env is None else env
    document = _read_document(found)
    variables = resolve_variables(found.parent, env, doppler=doppler)
    export_variables(variables, env)
    return _read_config(found, _fill(document, variables, found))


def load_sync_layout(path: str | Path = FILE_NAME, env: Mapping[str, str] | None = None) -> SyncConfig:
    """Read the file without secrets, for whoever looks at the queues alone: connections stay as they are written.

    Doppler is not asked, and `env` stays as it is.
    """
    found = Path(path)
    document = _read_document(found)
    variables = resolve_variables(found.parent, os.environ if env is None else env, ask_doppler=False)
    return _read_config(found, _fill(document, variables, found, has_secrets=False))


def _read_document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"Configuration file {str(path)!r}: there is no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


# -- variables ---------------------------------------------------------------------------------------------

# What only a writer needs, in [app.NAME.db.DB].
_WRITER_KEYS: Final = ("connection", "writer_class")


def _fill(
    table: Mapping[str, Any],
    variables: Mapping[str, str],
    path: Path,
    *,
    place: tuple[str, ...] = (),
    has_secrets: bool = True,
) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in table.items():
        if not has_secrets and len(place) == 4 and key in _WRITER_KEYS:
            filled[key] = value
        elif isinstance(value, dict):
            filled[key] = _fill(value, variables, path, place=(*place, key), has_secrets=has_secrets)
        else:
            filled[key] = _fill_value(value, variables, f"{path}, [{'.'.join(place)}] {key}", has_secrets)
    return filled


def _fill_value(value: Any, variables: Mapping[str, str], where: str, has_secrets: bool) -> Any:
    try:
        return fill(value, variables, where)
    except ConfigError as error:
        if has_secrets or not variables.get(TOKEN):
            raise
        raise ConfigError(f"{error}. Doppler, which may have it, is asked by the service alone") from None


# -- tables ------------------------------------------------------------------------------------------------


def _read_config(path: Path, document: Mapping[str, Any]) -> SyncConfig:
    for key in document:
        check_known(key, ["app"], str(path), kind="table")
    apps = _read_parts(document, "app", str(path), "[app.NAME]")
    read = [_read_app(path, name, table) for name, table in apps.items()]
    return _build(path, SyncConfig, apps=read, path=path)


def _read_app(path: Path, name: str, table: Mapping[str, Any]) -> AppConfig:
    where = f"{path}, [app.{name}]"
    _check_name(where, name)
    for key in table:
        check_known(key, _APP_KEYS, where)
    targets = _read_parts(table, "db", where, f"[app.{name}.db.NAME]")
    settings = {key: value for key, value in table.items() if key != "db"}
    for key in ("db_dir", "db_file"):
        if isinstance(settings.get(key), str) and settings[key].strip():
            settings[key] = path.parent / settings[key]
    read = [_read_target(path, name, db, each) for db, each in targets.items()]
    return _build(path, AppConfig, name=name, targets=read, **settings)


def _read_target(path: Path, app: str, name: str, table: Mapping[str, Any]) -> TargetConfig:
    where = f"{path}, [app.{app}.db.{name}]"
    _check_name(where, name)
    for key in table:
        check_known(key, _TARGET_KEYS, where)
    if "tables" not in table:
        raise ConfigError(f"{where}: expected tables = a list of the tables that go there, got none")
    connection = table.get("connection", {})
    if not isinstance(connection, dict):
        raise ConfigError(f"{where}: expected a table [app.{app}.db.{name}.connection]")
    if "writer_class" not in table and "url" not in connection:
        raise ConfigError(f"{where}: expected a writer_class, or a url in its connection table; got neither")
    settings = {key: value for key, value in table.items() if key != "tables"}
    return _build(path, TargetConfig, name=f"{app}.{name}", tables=_read_tables(where, table["tables"]), **settings)


def _read_tables(where: str, tables: object) -> list[str | TableConfig]:
    if not isinstance(tables, list):
        raise ConfigError(f"{where} tables: expected a list, got {show(tables)}")
    return [_read_table(f"{where} tables", each) for each in tables]


def _read_table(where: str, table: object) -> str | TableConfig:
    if isinstance(table, str):
        return table
    if not isinstance(table, dict):
        raise ConfigError(f'{where}: expected names, or tables such as {{ name = "events" }}, got {show(table)}')
    for key in table:
        check_known(key, _TABLE_KEYS, where)
    if "name" not in table:
        raise ConfigError(f"{where}: expected a name in {show(table)}")
    return _build(where, TableConfig, **table)


def _read_parts(table: Mapping[str, Any], key: str, where: str, expected: str) -> dict[str, dict[str, Any]]:
    parts = table.get(key)
    if not isinstance(parts, dict) or not parts:
        raise ConfigError(f"{where}: expected at least one table {expected}, got none")
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ConfigError(f"{where}: expected tables {expected}, got {key}.{name} = {show(part)}")
    return parts


def _check_name(where: str, name: str) -> None:
    try:
        plain_name(name)
    except ValueError as expected:
        raise ConfigError(f"{where}: expected {expected}, got {name!r}") from None


def _build(where: str | Path, made: type[_Made], **settings: Any) -> _Made:
    try:
        return made(**settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
