"""A certificate authority for tests: a folder with its certificate, and those it signed for servers and clients.

ca.pem                  what a client trusts
server.pem, server.key  for localhost and 127.0.0.1
client.pem, client.key  for a client named pillarbox
stranger.pem, …key      a client that signed for itself: nobody trusts it
"""

import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from . import packages
from .errors import ServerError

SETTINGS = """\
[req]
distinguished_name = name
prompt = no
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = DNS:localhost, IP:127.0.0.1
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[client]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""

_making = threading.Lock()


def make(folder: Path) -> None:
    """Make the certificates, unless they are there. Servers and tests of any account can read them."""
    with _making:
        if folder.exists():
            return
        if shutil.which("openssl") is None:
            packages.install("openssl")
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            draft = Path(work) / "draft"
            draft.mkdir()
            (draft / "openssl.conf").write_text(SETTINGS)
            _sign(draft, "ca", "Pillarbox test CA", section="ca")
            _sign(draft, "server", "localhost", section="server", by="ca")
            _sign(draft, "client", "pillarbox", section="client", by="ca")
            _sign(draft, "stranger", "pillarbox", section="client")
            draft.rename(folder)


def _sign(folder: Path, name: str, subject: str, *, section: str, by: str | None = None) -> None:
    command = ["openssl", "req", "-x509", "-config", "openssl.conf", "-extensions", section, "-days", "3650"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={subject}"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    if by is not None:
        command += ["-CA", f"{by}.pem", "-CAkey", f"{by}.key"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ServerError(f"openssl could not make the certificate {name!r}.\n{result.stderr.strip()}")
    (folder / f"{name}.key").chmod(0o644)
