"""Where the test databases and brokers are.

The environment decides, then `.services/env`, which `make services` writes. A server that is in neither is
a reason to skip on a laptop, and a failure where PILLARBOX_REQUIRE_SERVICES=1, as in CI.
"""

import os
from pathlib import Path
from typing import Literal, NoReturn

import pytest

ROOT = Path(__file__).parent.parent
ENV_FILE = ROOT / ".services" / "env"

ServerName = Literal[
    "postgres",
    "pgbouncer",
    "mariadb",
    "mysql",
    "libsql",
    "kafka",
    "kafka_sasl",
    "kafka_tls",
    "nats",
    "nats_tls",
    "nats_token",
    "rabbitmq",
    "rabbitmq_tls",
    "redis",
    "redis_tls",
    "redis_cluster",
    "mosquitto",
    "mosquitto_tls",
]


def server_url(name: ServerName) -> str:
    """Return the url of a test server, or skip the test when there is none."""
    return _variable(name)


def certificates() -> Path:
    """Return the folder with the certificates of the brokers: ca.pem, client.pem, client.key and others."""
    return Path(_variable("certificates"))


def _variable(name: str) -> str:
    key = f"PILLARBOX_TEST_{name.upper()}"
    value = os.environ.get(key) or _services().get(key)
    if value is None:
        miss(f"{name}: {key} is not set, nor in .services/env. Run: make services")
    return value


def miss(reason: str) -> NoReturn:
    """Skip the test for want of a server; fail it where all servers are required."""
    if os.environ.get("PILLARBOX_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _services() -> dict[str, str]:
    if not ENV_FILE.exists():
        return {}
    lines = ENV_FILE.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)
