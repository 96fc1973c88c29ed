"""Remote databases for statements with `?` binds: each test run has a schema of its own in every one of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import sqlalchemy as sa

from pillarbox.sync.binds import Dialect, to_percent
from tests.servers import ServerName, server_url

SERVERS: dict[str, tuple[Dialect, ServerName | None]] = {
    "sqlite": ("sqlite", None),
    "postgres": ("postgresql", "postgres"),
    "mariadb": ("mysql", "mariadb"),
    "mysql": ("mysql", "mysql"),
}

Violation = (
    sqlite3.IntegrityError,
    psycopg.IntegrityError,
    psycopg.errors.CardinalityViolation,
    pymysql.IntegrityError,
    pymysql.OperationalError,
)
"""What the drivers raise for a violated constraint; PyMySQL calls that of a CHECK an operational error."""


class Session:
    """One connection that commits each statement, until it is told to `begin`."""

    def __init__(self, raw: Any, dialect: Dialect) -> None:
        self.raw = raw
        self.dialect = dialect

    def run(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with `?` binds; returns its rows, if it has any."""
        cursor = self.raw.cursor()
        text = sql if self.dialect == "sqlite" else to_percent(sql, self.dialect, arguments=len(args))
        try:
            cursor.execute(text, tuple(args))
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            cursor.close()

    def begin(self) -> None:
        self.run("BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN")

    def commit(self) -> None:
        self.run("COMMIT")

    def rollback(self) -> None:
        self.run("ROLLBACK")

    def close(self) -> None:
        self.raw.close()


@dataclass(frozen=True)
class RemoteDatabase:
    name: str
    dialect: Dialect
    url: str
    schema: str

    def connect(self) -> Session:
        if self.dialect == "sqlite":
            return Session(
                sqlite3.connect(self.url, isolation_level=None, timeout=5, check_same_thread=False), self.dialect
            )
        url = sa.make_url(self.url)
        if self.dialect == "postgresql":
            raw = psycopg.connect(
                url.set(drivername="postgresql").render_as_string(hide_password=False),
                autocommit=True,
                options=f"-c search_path={self.schema}",
            )
            return Session(raw, self.dialect)
        connection = pymysql.connect(
            host=url.host,
            port=url.port or 3306,
            user=url.username,
            password=url.password or "",
            database=self.schema,
            autocommit=True,
        )
        return Session(connection, self.dialect)


@contextmanager
def remote_database(name: str, folder: Path) -> Iterator[RemoteDatabase]:
    """Give a database that is empty, and take it away at the end."""
    dialect, server = SERVERS[name]
    if server is None:
        yield RemoteDatabase(name, dialect, str(folder / f"{uuid4().hex}.db"), "main")
        return
    schema = f"sync_{uuid4().hex[:12]}"
    database = RemoteDatabase(name, dialect, server_url(server), schema)
    noun = "SCHEMA" if dialect == "postgresql" else "DATABASE"
    admin = RemoteDatabase(name, dialect, database.url, _home(database.url, dialect)).connect()
    try:
        admin.run(f"CREATE {noun} {schema}{'' if dialect == 'postgresql' else ' CHARACTER SET utf8mb4'}")
        try:
            yield database
        finally:
            admin.run(f"DROP {noun} {schema}{' CASCADE' if dialect == 'postgresql' else ''}")
    finally:
        with suppress(Exception):
            admin.close()


def _home(url: str, dialect: Dialect) -> str:
    return "public" if dialect == "postgresql" else sa.make_url(url).database or ""
