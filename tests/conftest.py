"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import settings

from pillarbox.cli.signals import STOPPING
from tests.brokers import private_broker
from tests.servers import ServerName, server_url

__all__ = ["private_broker"]

# The tests share two cores with four databases and five brokers: the time of a single example means nothing.
# CI tries the same examples each time, so that it judges the change alone; everybody else looks for new ones.
settings.register_profile("pillarbox", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("pillarbox")

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let a parallel run carry what a test logged: half a surrogate pair has no form between its processes."""
    return _escape_halves((yield))


def _escape_halves(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {name: _escape_halves(each) for name, each in value.items()}
        case list() | tuple():
            return type(value)(map(_escape_halves, value))
    return value


@pytest.fixture(scope="session", autouse=True)
def own_databases() -> Iterator[None]:
    """Give each process of a parallel run databases of its own: what one counts or locks there is not another's."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        yield
        return
    name = f"tests_{os.environ['PYTEST_XDIST_TESTRUNUID'][:8]}_{worker}"
    servers: tuple[ServerName, ...] = ("postgres", "mariadb", "mysql")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as env:
        for server in servers:
            # Whoever needs a server that is not there says so.
            with suppress(pytest.skip.Exception, pytest.fail.Exception):
                url = sa.make_url(server_url(server))
                stack.enter_context(_database(url, name))
                _point_to(env, server, url.set(database=name))
        with suppress(pytest.skip.Exception, pytest.fail.Exception):
            _point_to(env, "pgbouncer", sa.make_url(server_url("pgbouncer")).set(database=name))
        yield


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Undo what a command that ran in this process did to signals: programs started later inherit what is ignored."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _point_to(env: pytest.MonkeyPatch, server: ServerName, url: sa.URL) -> None:
    env.setenv(f"PILLARBOX_TEST_{server.upper()}", url.render_as_string(hide_password=False))


@contextmanager
def _database(url: sa.URL, name: str) -> Iterator[None]:
    backend = url.get_backend_name()
    engine = sa.create_engine(url.set(drivername=DRIVERS[backend]), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    is_postgres = backend == "postgresql"
    with engine.connect() as db:
        # MariaDB's own default is latin1.
        db.exec_driver_sql(f"CREATE DATABASE {name}{'' if is_postgres else ' CHARACTER SET utf8mb4'}")
    try:
        yield
    finally:
        with engine.connect() as db:
            db.exec_driver_sql(f"DROP DATABASE {name}{' WITH (FORCE)' if is_postgres else ''}")
