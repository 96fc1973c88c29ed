"""Making the writer that a target's configuration asks for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

from pillarbox.errors import ConfigError
from pillarbox.sync.config import TargetConfig
from pillarbox.sync.writers import Dialect, Writer, load_writer_class, make_user_writer, open_writer

_DIALECTS: Final[Mapping[str, Dialect]] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
}


def make_writer(target: TargetConfig, path: Path | None = None) -> Writer:
    """Make the writer of a target.

    `path` is the configuration's file: a class, or a SQLite file with a relative path, may be beside it. A class may
    also be in the current folder.
    """
    try:
        if target.writer_class is not None:
            _make_importable(path)
            return make_user_writer(target.writer_class, target.connection)
        if "url" in target.connection:
            return open_writer(**{**target.connection, "url": _from_folder(target.connection["url"], path)})
    except ConfigError as error:
        raise ConfigError(f"Target {target.name!r}: {error}") from error
    raise ConfigError(f"Target {target.name!r}: expected a writer_class, or a url in its connection; got neither")


def _from_folder(url: Any, path: Path | None) -> Any:
    # A service may be started anywhere: a relative file is where the configuration is.
    match = re.fullmatch(r"(sqlite(?:\+\w+)?:///)([^/:].*)", url) if isinstance(url, str) and path is not None else None
    return url if match is None or path is None else f"{match[1]}{quote(str(path.absolute().parent))}/{match[2]}"


def find_dialect(target: TargetConfig, path: Path | None = None) -> Dialect:
    """The SQL that a target understands: as it says, else as its writer's class does, else by its url."""
    if target.dialect is not None:
        return target.dialect
    if target.writer_class is not None:
        _make_importable(path)
        return cast(Dialect, getattr(load_writer_class(target.writer_class), "dialect", "sqlite"))
    scheme, separator, _ = str(target.connection.get("url", "sqlite:")).partition(":")
    if not separator or "$" in scheme:
        raise ConfigError(f"Target {target.name!r}: its dialect is not known without its url; give it a dialect")
    return _DIALECTS.get(scheme.partition("+")[0], "sqlite")


def is_atomic(target: TargetConfig, path: Path | None = None) -> bool:
    """Whether a target's batches are transactions: as it says, else as its writer's class does."""
    if target.batches is None and target.writer_class is not None:
        _make_importable(path)
        return getattr(load_writer_class(target.writer_class), "batches", "single") == "atomic"
    return target.batches == "atomic" or (target.batches is None and "url" in target.connection)


def _make_importable(path: Path | None) -> None:
    # They stay: a writer may import a module of its own when it is first used.
    folders = [os.getcwd()] if path is None else [str(path.absolute().parent), os.getcwd()]
    sys.path[:0] = [each for each in dict.fromkeys(folders) if each not in sys.path]
