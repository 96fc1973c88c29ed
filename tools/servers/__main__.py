"""Start, stop and inspect the database servers and brokers of this checkout; their urls are in .services/env."""

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

from .broker import CERTIFICATES, Broker
from .errors import ServerError
from .kafka import KafkaServer
from .mariadb import MariadbServer
from .mosquitto import MosquittoServer
from .mysql import MysqlServer
from .nats import NatsServer, NatsTlsServer, NatsTokenServer
from .pgbouncer import PgbouncerServer
from .postgres import PostgresServer
from .rabbitmq import RabbitmqServer
from .redis import RedisServer
from .redis_cluster import RedisClusterServer
from .server import DEMOTE, Server
from .sqld import SqldServer

FOLDER = Path(".services").resolve()
BROKERS: list[type[Broker]] = [
    KafkaServer,
    NatsServer,
    NatsTlsServer,
    NatsTokenServer,
    RabbitmqServer,
    RedisServer,
    RedisClusterServer,
    MosquittoServer,
]
NAMES = ["postgres", "pgbouncer", "mariadb", "mysql", "libsql", *(broker.name for broker in BROKERS)]


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
    databases = [postgres, PgbouncerServer(home, postgres), MariadbServer(home), MysqlServer(home), SqldServer(home)]
    servers = [*databases, *(broker(home) for broker in BROKERS)]
    return {server.name: server for server in servers}


def _change(command: str, chosen: list[Server], servers: dict[str, Server]) -> bool:
    succeeded = True
    if command in ("stop", "restart", "remove"):
        succeeded = _each(chosen, lambda server: server.stop())
    if command in ("start", "restart"):
        succeeded = _each(chosen, lambda server: server.start()) and succeeded
    if command == "remove" and succeeded:
        for server in chosen:
            server.delete()
        home = chosen[0].folder.parent
        shutil.rmtree(home / CERTIFICATES, ignore_errors=True)
        if home != FOLDER:
            shutil.rmtree(home)
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
        print(f"{server.name:<14} {state}")
    return running


def _env(servers: dict[str, Server]) -> str:
    with ThreadPoolExecutor(len(servers)) as pool:
        answers = pool.map(Server.is_answering, servers.values())
    running = [server for server, answer in zip(servers.values(), answers, strict=True) if answer]
    variables = {name: url for server in running for name, url in server.urls().items()}
    certificates = running[0].folder.parent / CERTIFICATES if running else None
    if certificates is not None and certificates.exists():
        variables["certificates"] = str(certificates)
    return "".join(f"PILLARBOX_TEST_{name.replace('-', '_').upper()}={value}\n" for name, value in variables.items())


if __name__ == "__main__":
    sys.exit(main())
