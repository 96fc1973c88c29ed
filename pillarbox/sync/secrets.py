"""The variables that `outbox.toml` may name: of the environment, else of the `.env` beside it, else of Doppler.

Doppler is asked when `DOPPLER_TOKEN` is set in one of the first two; if it does not answer, nothing starts. Of
variables only names are shown, of the token its first eight characters.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, MutableMapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pillarbox.errors import ConfigError
from pillarbox.values import read_assignment

DOPPLER: Final = "https://api.doppler.com"
TOKEN: Final = "DOPPLER_TOKEN"
TIMEOUT_SECONDS: Final = 10.0

_DOWNLOAD: Final = "/v3/configs/config/secrets/download?format=json"
_LARGEST_ANSWER: Final = 16 * 1024 * 1024

_logger: Final = logging.getLogger("pillarbox.sync")


def resolve_variables(
    folder: Path,
    env: Mapping[str, str],
    *,
    ask_doppler: bool = True,
    doppler: str = DOPPLER,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> dict[str, str]:
    """Collect the variables for a configuration in `folder`; earlier sources win."""
    variables = {**read_env_file(folder / ".env"), **env}
    token = variables.get(TOKEN, "").strip()
    if not token or not ask_doppler:
        return variables
    return {**fetch_doppler(token, api=doppler, timeout_seconds=timeout_seconds), **variables}


def export_variables(variables: Mapping[str, str], env: MutableMapping[str, str]) -> None:
    """Add what is not in `env` yet: a writer of the user's may look for its settings there."""
    for name, value in variables.items():
        if name in env:
            continue
        try:
            env[name] = value
        except ValueError:
            raise ConfigError(f"Variable {name!r}: its name or its value cannot be an environment variable's") from None


def read_env_file(path: Path) -> dict[str, str]:
    """Read a `.env` file, also one that only sqloutbox understood; no file is no variables.

    What is no `KEY=value` has no meaning there: it is passed over, with a warning.
    """
    if not path.exists() or path.is_dir():
        return {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    values: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, value = _read_line(line)
        if name:
            values[name] = value
        else:
            _logger.warning("%s, line %d: expected KEY=value; the line is passed over", path, number)
    return values


def _read_line(line: str) -> tuple[str, str]:
    assignment = read_assignment(line)
    if assignment is not None:
        return assignment
    # Other names, and quotes that do not match: as sqloutbox reads them.
    name, equals, text = (part.strip() for part in line.partition("="))
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return re.sub(r"^export\s+", "", name) if equals else "", text


# -- Doppler -----------------------------------------------------------------------------------------------


class _NoRedirects(HTTPRedirectHandler):
    # The token goes to Doppler and to nobody that it names.
    def redirect_request(self, *_: Any) -> None:
        return None


def fetch_doppler(token: str, *, api: str = DOPPLER, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, str]:
    """Fetch the secrets that a service token gives access to; raises `ConfigError` when that fails in any way."""
    parts = urlsplit(api)
    if parts.scheme != "https" and (parts.scheme, parts.hostname) != ("http", "127.0.0.1"):
        raise ConfigError(f"Doppler: expected an https url, got {api!r}")
    try:
        found = json.loads(_download(token, api, timeout_seconds))
    except HTTPError as error:
        error.close()
        raise _failed(token, f"it answered HTTP {error.code}") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _failed(token, f"it cannot be reached: {reason}".replace(token, mask_token(token))) from None
    except ValueError:
        raise _failed(token, "its answer is not JSON") from None
    if not isinstance(found, dict):
        raise _failed(token, f"its answer is not a table of secrets but {type(found).__name__}")
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def mask_token(token: str) -> str:
    """Return a token as it may be shown: its first eight characters, of a short one none."""
    return f"{token[:8]}***" if len(token) > 8 else "***"


def _download(token: str, api: str, timeout_seconds: float) -> bytes:
    if not token.isascii() or not token.isprintable():
        raise _failed(token, "the token has characters that no token has")
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    request = Request(api.rstrip("/") + _DOWNLOAD, headers=headers)
    with build_opener(_NoRedirects).open(request, timeout=timeout_seconds) as answer:
        body: bytes = answer.read(_LARGEST_ANSWER)
    return body


def _failed(token: str, reason: str) -> ConfigError:
    return ConfigError(
        f"Doppler, token {mask_token(token)}: the secrets cannot be fetched: {reason}. Mend it, or unset {TOKEN} to do "
        "without Doppler"
    )
