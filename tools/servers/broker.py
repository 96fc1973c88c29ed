"""What brokers have in common: a second port with TLS, and urls that name no database."""

import shutil
import socket
from pathlib import Path

from . import certificates, packages
from .server import PASSWORD, USER, Server

CERTIFICATES = "certificates"
"""The folder of the certificates, in the home of the servers."""


class Broker(Server):
    programs: tuple[str, ...]
    packages: tuple[str, ...]
    """The Debian packages with those programs."""
    tls_scheme: str
    path = ""
    other_ports: tuple[str, ...] = ("tls",)

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.certificates = home / CERTIFICATES

    def is_installed(self) -> bool:
        return all(shutil.which(program, path="/usr/sbin:/usr/bin") for program in self.programs)

    def install(self) -> None:
        if not self.is_installed():
            packages.install(*self.packages)

    def initialize(self) -> None:
        self.make_folder(self.data)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{USER}:{PASSWORD}@127.0.0.1:{self.port}{self.path}"

    def urls(self) -> dict[str, str]:
        tls = f"{self.tls_scheme}://{USER}:{PASSWORD}@127.0.0.1:{self.port_for('tls')}{self.path}"
        return {**super().urls(), f"{self.name}_tls": tls}

    def answers(self) -> bool:
        # Clients of brokers try again for seconds where nobody listens.
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return super().answers()

    def write_settings(self, settings: str) -> Path:
        file = self.folder / f"{self.name}.conf"
        file.write_text(settings)
        return file

    def _prepare(self) -> None:
        certificates.make(self.certificates)
        super()._prepare()
