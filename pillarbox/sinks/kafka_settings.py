"""What the Kafka client is told: our options as settings of librdkafka, and its log in ours.

Whatever decides over the promise (who acknowledges, in which order, within which time) has an option of its own here.
Any other setting of the client may be given in the table `config`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.sinks.tls import check_tls_files
from pillarbox.urls import Secrets
from pillarbox.values import Given

try:
    from confluent_kafka import KafkaException, Producer
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

_LOGS: Final = {"Sink": logging.getLogger("pillarbox.sinks.kafka"), "Source": logging.getLogger("pillarbox.source")}

MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

CONNECTION: Final[dict[str, str]] = {
    **dict.fromkeys(("bootstrap.servers", "metadata.broker.list"), "name the servers in the url"),
    **dict.fromkeys(("sasl.mechanism", "sasl.mechanisms"), "use the option sasl_mechanism"),
    **dict.fromkeys(("sasl.username", "sasl.password"), "give user and password in the url"),
    "security.protocol": "use the option tls, and give user and password in the url",
    "ssl.ca.location": "use the option tls_ca",
    "ssl.certificate.location": "use the option tls_certificate",
    "ssl.key.location": "use the option tls_key",
    "enable.ssl.certificate.verification": "use the option tls_verify",
}
"""Settings of any client that belong to an option, with what to do instead."""
_OURS: Final[dict[str, str]] = {
    **CONNECTION,
    **dict.fromkeys(("acks", "request.required.acks"), "use the option acks"),
    **dict.fromkeys(("enable.idempotence",), "use the option idempotence"),
    **dict.fromkeys(("message.timeout.ms", "delivery.timeout.ms"), "use the option timeout"),
    **dict.fromkeys(("compression.type", "compression.codec"), "use the option compression"),
    "transactional.id": "use the option transactional_id",
}
# Settings without which the sink does not know what became of a message, or orders keys as it likes.
_KEPT: Final = (
    *("delivery.report.only.error", "dr_cb", "dr_msg_cb", "on_delivery", "error_cb", "logger", "log_cb", "log.queue"),
    *("partitioner", "partitioner_consistent", "queuing.strategy", "topic.metadata.propagation.max.ms"),
)
JAVA: Final = "murmur2_random"
"""The Java client's choice of partition, so that a key is in one place whoever sends it."""
PARTITIONERS: Final = {"openoutbox": "fnv1a_random"}
"""The choice of another system's publisher that has its own: a switch must not move a key."""
_IN_FLIGHT: Final = ("max.in.flight.requests.per.connection", "max.in.flight")


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """The client's settings: `connection` for any client of the cluster, `producer` besides for those that send."""

    connection: dict[str, Any] = field(repr=False)
    producer: dict[str, Any] = field(repr=False)
    timeout: float

    @cached_property
    def secrets(self) -> Secrets:
        return Secrets(self.connection, self.producer)


def make_settings(
    servers: Iterable[str],
    *,
    name: str,
    user: str | None = None,
    password: str | None = None,
    sasl_mechanism: str | None = None,
    tls: bool | None = None,
    tls_options: Mapping[str, Any],
    acks: str = "all",
    idempotence: bool | None = None,
    compression: str = "none",
    timeout: timedelta,
    transactional_id: str | None = None,
    partitioner: str = JAVA,
    config: Mapping[str, Any] | None = None,
) -> KafkaSettings:
    """Return the settings that the options ask for; raises `ConfigError` for what does not go together."""
    idempotence = acks == "all" if idempotence is None else idempotence
    if idempotence and acks != "all":
        raise ConfigError(f"Sink {name!r} idempotence: needs acks all, got {acks!r}")
    if transactional_id is not None and not idempotence:
        raise ConfigError(f"Sink {name!r} transactional_id: needs acks all and idempotence")
    milliseconds = round(timeout.total_seconds() * 1000)
    own = dict(config or {})
    for setting in own:
        if setting in _OURS:
            raise ConfigError(f"Sink {name!r} config: {setting!r} is not taken here; {_OURS[setting]}")
        if setting in _KEPT:
            raise ConfigError(f"Sink {name!r} config: {setting!r} is set by the sink and cannot be changed")
        if setting in _IN_FLIGHT and not idempotence:
            raise ConfigError(f"Sink {name!r} config: {setting!r} is 1 without idempotence, to keep the order of keys")
    connection = {
        "bootstrap.servers": ",".join(servers),
        "client.id": "pillarbox",
        **_security(name, user, password, sasl_mechanism, tls, dict(tls_options)),
    }
    producer: dict[str, Any] = {
        "acks": acks,
        "enable.idempotence": idempotence,
        "compression.type": compression,
        "partitioner": partitioner,
        "message.timeout.ms": milliseconds,
        # A topic just made is not known everywhere yet. Beyond this time it is taken as missing.
        "topic.metadata.propagation.max.ms": min(2000, milliseconds // 2),
        # What brokers take unless told otherwise; the client's own limit is a little lower.
        "message.max.bytes": 1_048_588,
        "log.connection.close": False,
    }
    if not idempotence:
        # Else a request sent again comes after its successors.
        producer["max.in.flight.requests.per.connection"] = 1
    if transactional_id is not None:
        producer["transactional.id"] = transactional_id
        # What a killed relay left open holds back readers of committed messages for as long.
        producer["transaction.timeout.ms"] = milliseconds + 10_000
    settings = KafkaSettings(connection=connection | own, producer=producer | own, timeout=timeout.total_seconds())
    _try_out(settings, name)
    return settings


def read_table(given: Given) -> dict[str, Any]:
    """Read a table of settings, such as `[sink.config]`."""
    value = given.value
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(each, str | int | float) for name, each in value.items()
    ):
        raise ConfigError(f"{given.where}: expected a table of settings, each a text, a number or a boolean")
    return dict(value)


def _security(
    name: str, user: str | None, password: str | None, mechanism: str | None, tls: bool | None, options: dict[str, Any]
) -> dict[str, Any]:
    if (user is None) != (password is None):
        raise ConfigError(f"Sink {name!r}: expected both user and password in the url, or neither")
    if mechanism is not None and user is None:
        raise ConfigError(f"Sink {name!r} sasl_mechanism: give user and password in the url as well")
    if tls is False and options:
        raise ConfigError(f"Sink {name!r} {next(iter(options))}: of no use with tls off")
    check_tls_files(options, sink=name)
    is_secure = bool(options) if tls is None else tls
    settings: dict[str, Any] = {"security.protocol": ("SASL_" if user else "") + ("SSL" if is_secure else "PLAINTEXT")}
    if user is not None:
        settings |= {
            "sasl.mechanisms": mechanism or MECHANISMS[0],
            "sasl.username": user,
            "sasl.password": password,
        }
    names = {
        "tls_ca": "ssl.ca.location",
        "tls_certificate": "ssl.certificate.location",
        "tls_key": "ssl.key.location",
        "tls_verify": "enable.ssl.certificate.verification",
    }
    return settings | {names[option]: value for option, value in options.items()}


def _try_out(settings: KafkaSettings, name: str) -> None:
    """Let the client check its settings now: without a server it connects to nobody."""
    given = settings.connection | settings.producer
    del given["bootstrap.servers"]
    try:
        Producer({**given, "logger": _Silence()})
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ConfigError(f"Sink {name!r}: the Kafka client refuses its settings: {mask(reason, settings)}") from None


def mask(text: str, settings: KafkaSettings) -> str:
    """Return what the client said as it may be shown."""
    return settings.secrets.hide(text)


class ClientLog:
    """Takes the client's log lines; those about connections are in the errors of the sink or source already."""

    def __init__(self, settings: KafkaSettings, name: str, *, owner: Literal["Sink", "Source"] = "Sink") -> None:
        self._settings = settings
        self._name = name
        self._owner = owner

    def log(self, level: int, form: str, *values: object) -> None:
        is_told_elsewhere = bool(values) and values[0] in ("FAIL", "ERROR", "GETPID", "TXNERR")
        text = mask(form % values, self._settings)
        level = logging.DEBUG if is_told_elsewhere else level
        _LOGS[self._owner].log(level, "%s %s: %s", self._owner, self._name, text)


class _Silence:
    def log(self, level: int, form: str, *values: object) -> None:
        pass
