"""NATS servers with other ways to log in than the shared ones: accounts with few rights, and signed credentials."""

from __future__ import annotations

import json
import os
import socket
from base64 import b32encode, urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import nkeys

from tools.servers.nats import NatsServer


class AccountsServer(NatsServer):
    """Users with few rights, each with its name as its password.

    `poor` has no JetStream. `guest` may ask the JetStream of the others, but what it publishes reaches no stream.
    `small` has room for little. `silent` may not ask JetStream, `deaf` hears nothing but `_reply.>`.
    """

    name = "nats-accounts"

    def login_settings(self) -> str:
        return """\
accounts {
  main {
    jetstream: enabled
    exports: [{ service: "$JS.API.>" }]
    users = [
      { user: pillarbox, password: pillarbox }
      { user: silent, password: silent, permissions: { publish: { deny: "$JS.API.>" } } }
      { user: deaf, password: deaf, permissions: { subscribe: "_reply.>" } }
    ]
  }
  small {
    jetstream: { max_mem: 0, max_file: 10K }
    users = [{ user: small, password: small }]
  }
  poor { users = [{ user: poor, password: poor }] }
  guest {
    imports: [{ service: { account: main, subject: "$JS.API.>" } }]
    users = [{ user: guest, password: guest }]
  }
}
"""


class SignedServer(NatsServer):
    """An operator's server: whoever has a token that is signed for the account may log in."""

    name = "nats-signed"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._operator, self._account, self._system = make_pair("O"), make_pair("A"), make_pair("A")

    def login_settings(self) -> str:
        operator = {"type": "operator", "version": 2, "system_account": public(self._system)}
        unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
        storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        account = {"type": "account", "version": 2, "limits": {**unlimited, **storage}}
        system = {"type": "account", "version": 2, "limits": unlimited}
        return f"""\
operator: {sign_token(self._operator, self._operator, operator)}
resolver: MEMORY
resolver_preload {{
  {public(self._account)}: {sign_token(self._operator, self._account, account)}
  {public(self._system)}: {sign_token(self._operator, self._system, system)}
}}
"""

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                return b'"jetstream":true' in connection.recv(4096)
        except OSError:
            return False

    def write_credentials(self, path: Path) -> Path:
        """Write the file of a new user of the account."""
        user = make_pair("U")
        token = sign_token(self._account, user, {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{bytes(user.seed).decode()}\n------END USER NKEY SEED------\n"
        )
        return path


_KINDS = {"O": 14 << 3, "A": 0, "U": 20 << 3}
_SEED = 18 << 3


def make_pair(kind: str) -> nkeys.KeyPair:
    prefix = _KINDS[kind]
    raw = bytes([_SEED | prefix >> 5, (prefix & 31) << 3]) + os.urandom(32)
    return nkeys.from_seed(bytearray(b32encode(raw + checksum(raw)).rstrip(b"=")))


def checksum(data: bytes) -> bytes:
    """CRC-16 of XMODEM, low byte first."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc.to_bytes(2, "little")


def public(pair: nkeys.KeyPair) -> str:
    return bytes(pair.public_key).decode()


def sign_token(issuer: nkeys.KeyPair, subject: nkeys.KeyPair, claims: dict[str, object]) -> str:
    body = {"iat": 1_700_000_000, "iss": public(issuer), "sub": public(subject), "name": "test", "nats": claims}
    body["jti"] = b32encode(sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, body]
    text = ".".join(encode(json.dumps(part).encode()) for part in parts)
    return f"{text}.{encode(issuer.sign(text.encode()))}"


def encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")
