"""Where the test databases are.

The environment decides, then `.services/env`, which `make services` writes. A database that is in neither
is a reason to skip on a laptop, and a failure where PILLARBOX_REQUIRE_SERVICES=1, as in CI.
"""

import os
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parent.parent
ENV_FILE = ROOT / ".services" / "env"

ServerName = Literal["postgres", "pgbouncer", "mariadb", "mysql"]


def server_url(name: ServerName) -> str:
    """Return the url of a test database, or skip the test when there is none."""
    key = f"PILLARBOX_TEST_{name.upper()}"
    url = os.environ.get(key) or _services().get(key)
    if url is None:
        reason = f"{name} is not running: make services"
        if os.environ.get("PILLARBOX_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return url


def _services() -> dict[str, str]:
    if not ENV_FILE.exists():
        return {}
    lines = ENV_FILE.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)
