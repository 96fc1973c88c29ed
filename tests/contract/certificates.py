"""Certificates for tests, made by the openssl program: an authority, a server and a client."""

from __future__ import annotations

import subprocess
from pathlib import Path

SERVER_NAMES = "subjectAltName=DNS:hooks.example,DNS:localhost,IP:127.0.0.1"


def make_certificates(folder: Path) -> Path:
    """Make `ca.pem`, `server.pem` and `client.pem` with their keys, `….key`, in the folder."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test authority")
    for name, extension in (("server", SERVER_NAMES), ("client", "extendedKeyUsage=clientAuth")):
        (folder / f"{name}.ext").write_text(extension)
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem", "-days", "2")
    return folder
