"""Where events go: the Sink port and the registry of sinks by URL scheme.

Another package adds a scheme with an entry point in the group `pillarbox.sinks`: its name is the scheme, its
object takes a `SinkUrl` and returns a `Sink`. An adapter is imported when a URL asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final, Protocol

from pillarbox.errors import ConfigError, PillarboxError, SinkUnavailable
from pillarbox.event import Claim, Outcome
from pillarbox.sinks.url import SinkUrl, parse_sink_url
from pillarbox.urls import Secrets, mask_url

ENTRY_POINTS: Final = "pillarbox.sinks"


Effect = Callable[[Any], None]
"""What is to commit together with a settlement: called with the database connection of that transaction."""


class SinkLike(Protocol):
    """The least that a relay takes for a sink; `adopt` makes a whole `Sink` of it."""

    @property
    def name(self) -> str: ...

    @property
    def is_quick(self) -> bool: ...

    async def open(self) -> None: ...

    async def check(self) -> None: ...

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]: ...

    async def close(self) -> None: ...


class Sink(ABC):
    """Takes a batch of claims and returns one outcome for each, in the same order.

    This is all that a relay asks of a sink. Only `name` and `deliver` have no default; whoever puts a sink around
    another one derives from `SinkWrapper`, which passes everything on.

    An implementer's obligations:
    - `Delivered` means that the destination acknowledged the event; a crash before that delivers it again.
    - Claims of one key arrive in order and are delivered in order; after a failure, the later claims of that
      key in the batch are `Released`, never delivered.
    - An answer about one message becomes that message's outcome; a destination that is down raises
      `SinkUnavailable` and blames no message. When it goes down in the middle of a batch, the exception
      carries the `outcomes`: those already won, and `Released` for the rest.
    - `deliver` may be called again while an earlier call runs, with claims of other keys, or of another store.
    - Relays of several stores may share a sink: `open` may be called again, too.
    - Cancellation is passed on; `close` flushes and may be called twice.
    - A sink that joins the settlement, so that `deliver` alone delivers nothing, raises `refuse_alone` there.
    """

    name: str
    """What errors, logs and status call this destination; never contains a secret."""

    is_quick: bool = False
    """Whether an acknowledgement takes milliseconds, so that a claim may hold its rows locked meanwhile."""

    async def open(self) -> None:
        """Connect; raises `SinkUnavailable` when the destination cannot be reached now."""
        return

    async def check(self) -> None:
        """Raise `SinkUnavailable` unless the destination can take events now."""
        return

    @abstractmethod
    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        """Deliver the claims."""

    async def close(self) -> None:
        """Flush and disconnect."""
        return

    @property
    def most(self) -> int | None:
        """How many events to claim at once at most; None: as many as the relay likes."""
        return None

    @property
    def is_local(self) -> bool:
        """Whether it needs this machine alone: what is missing when a relay starts is then a mistake, no outage."""
        return False

    def check_store(self, store: Any) -> None:
        """Refuse a source that this sink cannot work with; called when the relay is opened."""
        return

    async def deliver_in(self, batch: Any, claims: Sequence[Claim]) -> Sequence[Outcome]:
        """Deliver claims of this batch; this is what the relay calls.

        A sink may settle a claim in the transaction of what it does for it, with `Batch.settle_one`. For such a claim
        it returns `Delivered`; the relay settles the others as their outcomes say.
        """
        return await self.deliver(claims)

    def effect(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Effect | None:
        """What must commit with the settlement of these claims; None: nothing."""
        return None

    @property
    def joins_settlement(self) -> bool:
        """Whether events are delivered together with their settlement, so that `deliver` alone does not do."""
        kind = type(self)
        return kind.effect is not Sink.effect or kind.deliver_in is not Sink.deliver_in

    @property
    def innermost(self) -> Sink:
        """The sink itself, or that within the wrappers around it."""
        return self


def refuse_alone(sink: Sink) -> SinkUnavailable:
    """What `deliver` of a sink raises that joins the settlement: somebody calls it who hides it from the relay.

    As a destination that is down: its events stay where they are, and spend no attempts.
    """
    return SinkUnavailable(
        f"Sink {sink.name!r}: it settles events together with what it does, so only a relay can call it. Derive "
        "the sink that stands around it from pillarbox.SinkWrapper"
    )


class _Adopted(Sink):
    """A class that has what a sink needs and nothing else, with the defaults for the rest."""

    def __init__(self, sink: SinkLike) -> None:
        self._sink = sink
        self.name, self.is_quick = sink.name, sink.is_quick
        self.open, self.check, self.close = sink.open, sink.check, sink.close  # type: ignore[method-assign]

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self._sink.deliver(claims)


_MORE: Final = ("most", "check_store", "deliver_in", "effect")


def adopt(sink: SinkLike) -> Sink:
    """A whole sink: the given one, or one that does what the given one does.

    A class that is no `Sink` and yet has some of its further members is refused, since it may lack the others.
    """
    if isinstance(sink, Sink):
        return sink
    more = [name for name in _MORE if hasattr(sink, name)]
    if more:
        raise ConfigError(
            f"Sink {sink.name!r}: {type(sink).__name__} has {' and '.join(more)}, but is not derived from "
            "pillarbox.Sink. Derive it from that, or from pillarbox.SinkWrapper if it stands around another sink"
        )
    return _Adopted(sink)


_OWN: Final = {
    "null": "pillarbox.sinks.null:NullSink.from_url",
    "stdout": "pillarbox.sinks.stdout:StdoutSink.from_url",
    "file": "pillarbox.sinks.file:FileSink.from_url",
    "kafka": "pillarbox.sinks.kafka:KafkaSink.from_url",
    "nats": "pillarbox.sinks.nats:NatsSink.from_url",
    "tls": "pillarbox.sinks.nats:NatsSink.from_url",
    "amqp": "pillarbox.sinks.rabbitmq:RabbitmqSink.from_url",
    "amqps": "pillarbox.sinks.rabbitmq:RabbitmqSink.from_url",
    "redis": "pillarbox.sinks.redis:RedisSink.from_url",
    "rediss": "pillarbox.sinks.redis:RedisSink.from_url",
    "mqtt": "pillarbox.sinks.mqtt:MqttSink.from_url",
    "mqtts": "pillarbox.sinks.mqtt:MqttSink.from_url",
    "http": "pillarbox.sinks.http:HttpSink.from_url",
    "https": "pillarbox.sinks.http:HttpSink.from_url",
    "postgresql": "pillarbox.sinks.sql:SqlSink.from_url",
    "mysql": "pillarbox.sinks.sql:SqlSink.from_url",
    "mariadb": "pillarbox.sinks.sql:SqlSink.from_url",
    "sqlite": "pillarbox.sinks.sql:SqlSink.from_url",
}


_FOR_ALL: Final = ("rate", "burst", "transform")


def open_sink(url: str, *, name: str | None = None, **options: Any) -> Sink:
    """Make the sink a URL names, not yet connected: the relay calls its `open`.

    `name` is what errors, logs and status call it, the URL without its secrets when not given. Options are
    those of the URL's query and those given here; an unknown one is refused. Every sink takes `rate` and `burst`
    (see `LimitedSink`) and `transform`, a function or its name as `module:function` (see `TransformSink`).
    """
    with Secrets(url, options).hidden():
        parsed = parse_sink_url(url, name=name, options=options)
        factory: Callable[[SinkUrl], SinkLike] = _load_factory(parsed)
        rest = {key: value for key, value in parsed.options.items() if key not in _FOR_ALL}
        return _wrap(adopt(factory(replace(parsed, options=MappingProxyType(rest)))), parsed.options)


def _wrap(sink: Sink, options: Mapping[str, Any]) -> Sink:
    """Put what every sink may have before it: a limit, and a function that changes events."""
    from pillarbox.sinks.limit import LimitedSink
    from pillarbox.sinks.transform import TransformSink, load_function
    from pillarbox.values import as_number

    if "burst" in options and "rate" not in options:
        raise ConfigError(f"Sink {sink.name!r} burst: give rate as well")
    if "rate" in options:
        sink = LimitedSink(sink, rate=as_number(options["rate"]), burst=as_number(options.get("burst")))
    transform = options.get("transform")
    if isinstance(transform, str):
        transform = load_function(transform, what=f"Sink {sink.name!r} transform")
    return sink if transform is None else TransformSink(sink, transform)


def list_schemes() -> list[str]:
    """Return the URL schemes there is a sink for: ours first, then those of other packages."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - _OWN.keys())]


def _load_factory(url: SinkUrl) -> Any:
    if url.scheme in _OWN:
        return EntryPoint(url.scheme, _OWN[url.scheme], ENTRY_POINTS).load()
    points = {point.value: point for point in entry_points(group=ENTRY_POINTS, name=url.scheme)}
    if not points:
        schemes = list_schemes()
        near = get_close_matches(url.scheme, schemes, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        expected = f"{', '.join(schemes[:-1])} or {schemes[-1]}"
        raise ConfigError(f"Sink {url.name!r}: expected a url with scheme {expected}; got {mask_url(url.text)!r}{hint}")
    if len(points) > 1:
        raise ConfigError(
            f"Sink {url.name!r}: scheme {url.scheme!r} belongs to several packages "
            f"({', '.join(sorted(points))}); uninstall all but one"
        )
    point = next(iter(points.values()))
    try:
        return point.load()
    except PillarboxError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"Sink {url.name!r}: the adapter {point.value!r} of scheme {url.scheme!r} cannot be loaded: {error}"
        ) from error
