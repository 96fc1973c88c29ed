"""TLS for sinks: the same four options everywhere."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from pillarbox.errors import ConfigError
from pillarbox.values import Read, read_switch, read_text

TLS_OPTIONS: Final[dict[str, Read]] = {
    "tls_ca": read_text,
    "tls_certificate": read_text,
    "tls_key": read_text,
    "tls_verify": read_switch,
}
"""Files with the trusted authorities, our certificate and its key; and whether the server's certificate is checked."""


def make_tls_context(options: dict[str, Any], *, sink: str) -> ssl.SSLContext:
    """Make the context that the TLS options among `options` ask for; raises `ConfigError` naming a file that is bad."""
    check_tls_files(options, sink=sink)
    try:
        context = ssl.create_default_context(cafile=options.get("tls_ca"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"Sink {sink!r} tls_ca: {options.get('tls_ca')!r} cannot be used: {error}") from None
    if options.get("tls_verify") is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "tls_certificate" in options:
        try:
            # An encrypted key would ask for its password on the terminal.
            context.load_cert_chain(options["tls_certificate"], options.get("tls_key"), password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            name = options["tls_certificate"]
            raise ConfigError(f"Sink {sink!r} tls_certificate: {name!r} cannot be used: {error}") from None
    return context


def check_tls_files(options: dict[str, Any], *, sink: str) -> None:
    """Raise `ConfigError` for a file that is missing, and for a key without its certificate."""
    for name in ("tls_ca", "tls_certificate", "tls_key"):
        if name in options and not Path(options[name]).is_file():
            raise ConfigError(f"Sink {sink!r} {name}: there is no file {options[name]!r}")
    if "tls_key" in options and "tls_certificate" not in options:
        raise ConfigError(f"Sink {sink!r} tls_key: give tls_certificate as well")
