"""The source that a URL names: a consumer of Kafka, Redis Streams, NATS JetStream or RabbitMQ.

An adapter is imported when a URL asks for it. URLs and options are read as those of sinks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from typing import Any, Final

from pillarbox.errors import ConfigError
from pillarbox.sinks.url import SinkUrl, parse_sink_url
from pillarbox.sources import DeadLetters, Source
from pillarbox.urls import Secrets, mask_url

_OWN: Final = {
    "kafka": "pillarbox.sources.kafka:KafkaSource.from_url",
    "redis": "pillarbox.sources.redis:RedisSource.from_url",
    "rediss": "pillarbox.sources.redis:RedisSource.from_url",
    "nats": "pillarbox.sources.nats:NatsSource.from_url",
    "tls": "pillarbox.sources.nats:NatsSource.from_url",
    "amqp": "pillarbox.sources.rabbitmq:RabbitmqSource.from_url",
    "amqps": "pillarbox.sources.rabbitmq:RabbitmqSource.from_url",
}


def open_source(url: str, *, group: str, dead: DeadLetters, name: str | None = None, **options: Any) -> Source:
    """Make the source a URL names, not yet connected: the relay calls its `open`.

    `group` is the consumer group, whose members share the messages between them. `dead` gets what can never be handled.
    `name` is what errors, logs and status call the source, the URL without its secrets when not given. Options are
    those of the URL's query and those given here; an unknown one is refused.
    """
    with Secrets(url, options).hidden(), speak_of_sources():
        parsed = parse_sink_url(url, name=name, options=options)
        if not group.strip():
            raise ConfigError(f"Source {parsed.name!r} group: expected the name of a consumer group, got {group!r}")
        factory: Callable[..., Source] = _load_factory(parsed)
        return factory(parsed, group=group, dead=dead)


@contextmanager
def speak_of_sources() -> Iterator[None]:
    """Let errors of what is shared with sinks speak of a source."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if not text.startswith("Sink"):
            raise
        raise ConfigError(f"Source{text.removeprefix('Sink')}") from error.__cause__


def _load_factory(url: SinkUrl) -> Any:
    if url.scheme not in _OWN:
        *others, last = _OWN
        near = get_close_matches(url.scheme, _OWN, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        expected = f"{', '.join(others)} or {last}"
        raise ConfigError(
            f"Source {url.name!r}: expected a url with scheme {expected}; got {mask_url(url.text)!r}{hint}"
        )
    return EntryPoint(url.scheme, _OWN[url.scheme], "pillarbox.sources").load()
