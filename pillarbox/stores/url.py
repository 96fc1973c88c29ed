"""The store for a database URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from pillarbox.durations import parse_duration
from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.layouts import Layout, get_layout
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import parse_database_url, show_database

_EXPECTED = "expected a url like postgresql://…, mysql://…, mariadb://… or sqlite:///path"


def parse_store_url(url: str | sa.URL) -> sa.URL:
    """A database URL whose scheme is known; the driver in it, if any, does not matter."""
    parsed = parse_database_url(url, what="Store", expected=_EXPECTED)
    backend = {"postgres": "postgresql"}.get(parsed.get_backend_name(), parsed.get_backend_name())
    if backend not in ("postgresql", "mysql", "mariadb", "sqlite"):
        raise ConfigError(f"Store {show_database(parsed)!r}: {_EXPECTED}")
    if backend == "sqlite" and (parsed.host or parsed.username):
        raise ConfigError(f"Store {show_database(parsed)!r}: a SQLite file has no server; write sqlite:///path")
    return parsed.set(drivername=backend)


def open_store(
    url: str | sa.URL,
    *,
    layout: str | Layout = "pillarbox",
    table: str | None = None,
    schema: str | None = None,
    sink: str = "",
    retention: timedelta | str | None = None,
    **options: Any,
) -> SqlStore:
    """Make the store for a URL; it connects when it is opened."""
    parsed = parse_store_url(url)
    chosen = get_layout(layout)
    kept = None if retention is None else parse_duration(retention)
    common: dict[str, Any] = {"table": table, "schema": schema, "sink": sink, "retention": kept, **options}
    match parsed.get_backend_name():
        case "postgresql":
            with _needs("PostgreSQL", "postgres"):
                from pillarbox.stores.postgres import PostgresStore
            return PostgresStore(parsed, chosen, **common)
        case "sqlite":
            from pillarbox.stores.sqlite import SqliteStore

            return SqliteStore(parsed, chosen, **common)
        case _:
            with _needs("MySQL and MariaDB", "mysql"):
                from pillarbox.stores.mysql import MySqlStore
            return MySqlStore(parsed, chosen, **common)


@contextmanager
def _needs(what: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingExtra(what, extra) from error
