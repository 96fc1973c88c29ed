"""Start, stop and inspect the database servers of this checkout; their urls are in .services/env."""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import ServerError
from .mariadb import MariadbServer
from .mysql import MysqlServer
from .pgbouncer import PgbouncerServer
from .postgres import PostgresServer
from .server import DEMOTE, Server

FOLDER = Path(".services").resolve()
NAMES = ["postgres", "pgbouncer", "mariadb", "mysql"]


def main() -> int:
    arguments = _parse()
    os.umask(0o022)
    FOLDER.mkdir(exist_ok=True)
    servers = _servers(_home())
    chosen = [servers[name] for name in arguments.names or NAMES]
    if arguments.command == "env":
        print(_env(servers), end="")
        return 0
    if arguments.command == "status":
        return 0 if _status(chosen) else 1
    # One command at a time; a second one waits for the first.
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        succeeded = _change(arguments.command, chosen, servers)
    if arguments.command in ("start", "restart"):
        _status(chosen)
    return 0 if succeeded else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/services", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, what in {
        "start": "start the servers that do not run, and wait until they answer",
        "stop": "stop the servers; their data and ports are kept",
        "restart": "stop and start servers on the same port with the same data",
        "status": "show which servers run; exit 1 when one does not",
        "env": "print the urls as KEY=VALUE lines",
        "remove": "stop the servers and delete their data",
    }.items():
        subparser = commands.add_parser(command, help=what, description=what)
        if command in ("env", "remove"):
            subparser.set_defaults(names=[])
        else:
            many = "+" if command == "restart" else "*"
            subparser.add_argument("names", nargs=many, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in NAMES:
            parser.error(f"expected {', '.join(NAMES)}; got {name!r}")
    return arguments


def _home() -> Path:
    """Return the folder the servers live in: .services, unless their user cannot get there."""
    if subprocess.run([*DEMOTE, "test", "-x", FOLDER], check=False).returncode == 0:
        return FOLDER
    # That folder names its checkout, so that a copied checkout does not take the servers of the original.
    record = FOLDER / "home"
    if record.exists():
        home = Path(record.read_text().strip())
        owner = home / "checkout"
        if owner.exists() and owner.read_text() == str(FOLDER):
            return home
    home = Path(tempfile.mkdtemp(prefix="pillarbox-services-", dir="/var/tmp"))
    home.chmod(0o711)
    (home / "checkout").write_text(str(FOLDER))
    record.write_text(f"{home}\n")
    return home


def _servers(home: Path) -> dict[str, Server]:
    postgres = PostgresServer(home)
    servers = [postgres, PgbouncerServer(home, postgres), MariadbServer(home), MysqlServer(home)]
    return {server.name: server for server in servers}


def _change(command: str, chosen: list[Server], servers: dict[str, Server]) -> bool:
    succeeded = True
    if command in ("stop", "restart", "remove"):
        succeeded = _each(chosen, lambda server: server.stop())
    if command in ("start", "restart"):
        succeeded = _each(chosen, lambda server: server.start()) and succeeded
    if command == "remove" and succeeded:
        for server in chosen:
            shutil.rmtree(server.folder, ignore_errors=True)
        if server.folder.parent != FOLDER:
            shutil.rmtree(server.folder.parent)
    # Renamed into place: a reader never sees half a file.
    draft = FOLDER / "env.draft"
    draft.write_text(_env(servers))
    draft.rename(FOLDER / "env")
    return succeeded


def _each(servers: list[Server], action: Callable[[Server], None]) -> bool:
    """Do it to all servers at once; one that fails does not keep the others from it."""
    with ThreadPoolExecutor(len(servers)) as pool:
        results = {server: pool.submit(action, server) for server in servers}
    succeeded = True
    for server, result in results.items():
        error = result.exception()
        if isinstance(error, ServerError | OSError):
            print(f"{server.name} failed: {error}", file=sys.stderr)
            succeeded = False
        elif error is not None:
            raise error
    return succeeded


def _status(servers: list[Server]) -> bool:
    running = True
    for server in servers:
        if server.is_answering():
            state = f"{server.url}  pid {server.pid()}"
        else:
            state = "not running"
            running = False
        print(f"{server.name:<10} {state}")
    return running


def _env(servers: dict[str, Server]) -> str:
    running = [server for server in servers.values() if server.is_answering()]
    return "".join(f"PILLARBOX_TEST_{server.name.upper()}={server.url}\n" for server in running)


if __name__ == "__main__":
    sys.exit(main())
