"""Settings: from the command line, else the environment, else `pillarbox.toml`, else a default.

Every text of the file may contain `${VAR}` or `${VAR:-default}` (`$${` is a plain `${`), filled from the
environment and from a `.env` beside the file. `PILLARBOX_STORE`, `PILLARBOX_SINK` and `PILLARBOX_` with the
name of any other key override the file. A sink given outside the file replaces its whole `[sink]` table,
because options belong to their url.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import sqlalchemy as sa

from pillarbox.errors import ConfigError
from pillarbox.group import RelayGroup, route_relays
from pillarbox.hooks import Hook
from pillarbox.layouts import Layout, get_layout
from pillarbox.layouts.pillarbox import pillarbox_layout
from pillarbox.outbox import MAX_PAYLOAD, Outbox
from pillarbox.relay import BATCH_BYTES, Relay
from pillarbox.retry import Exponential, RetryPolicy, parse_policy
from pillarbox.silence import OPERATION_TIMEOUT, STATEMENT_TIMEOUT
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.forms import Form, choose_form
from pillarbox.source import PREFIX, Known, Source
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store, parse_store_url
from pillarbox.topology import RouteConfig, read_routes, read_routing, routes_of
from pillarbox.urls import Secrets
from pillarbox.values import (
    Read,
    as_number,
    one_of,
    read_dotenv,
    read_duration,
    read_number,
    read_pause,
    read_size,
    read_switch,
    read_text,
    read_texts,
)

FILE_NAME: Final = "pillarbox.toml"


def _key(read: Read, default: Any = None, *, is_secret: bool = False) -> Any:
    return field(default=default, repr=not is_secret, metadata={"read": read})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """`[store]`: the database and the table. `table` may name its schema: `sales.outbox`."""

    url: str | None = _key(read_text, is_secret=True)
    layout: str = _key(read_text, "pillarbox")
    table: str | None = _key(read_text)
    schema: str | None = _key(read_text)
    lanes: int | None = _key(read_number)
    topics: tuple[str, ...] | None = _key(read_texts)
    recipient: str | None = _key(read_text)
    pooler: bool | None = _key(read_switch)
    hold_behind_pooler: bool | None = _key(read_switch)
    notify: bool | None = _key(read_switch)
    listen_url: str | None = _key(read_text, is_secret=True)
    statement_timeout: timedelta = _key(read_pause, STATEMENT_TIMEOUT)
    operation_timeout: timedelta = _key(read_pause, OPERATION_TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig:
    """`[sink]`: the destination; every key besides `url` and `name` is an option of that sink."""

    url: str | None = _key(read_text, is_secret=True)
    name: str | None = _key(read_text)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def open(self, name: str | None = None, *, message: str | None = None) -> Sink:
        """Make the sink; the relay connects it. `message` is the form of its messages where no option says it."""
        if self.url is None:
            where = "[sink]" if name is None else f"[sinks.{name}]"
            raise ConfigError(f"No sink: give --sink, {PREFIX}SINK, or url under {where} in {FILE_NAME}")
        chosen = {} if message is None else {"message": message}
        return open_sink(self.url, name=self.name or name, **chosen, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """`[relay]`: how events are claimed; see `Relay`. `retention` is how long delivered events are kept."""

    batch_size: int = _key(read_number, 500)
    batch_bytes: int = _key(read_size, BATCH_BYTES)
    in_flight: int | None = _key(read_number)
    claim: Literal["auto", "hold", "lease"] = _key(one_of("auto", "hold", "lease"), "auto")
    lease: timedelta | None = _key(read_duration)
    poll: timedelta = _key(read_pause, timedelta(seconds=1))
    dead: Literal["park", "skip"] = _key(one_of("park", "skip"), "park")
    stop_timeout: timedelta = _key(read_duration, timedelta(seconds=10))
    retention: timedelta | None = _key(read_duration)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxConfig:
    """`[outbox]`: what applies when events are put."""

    max_payload: int = _key(read_number, MAX_PAYLOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """`[source]`: the broker that messages are consumed from; every key besides these is an option of that source.

    `stored` takes messages into the inbox's queue before they are handled. `remember` is how long a message is known,
    so that it is not handled again.
    """

    url: str | None = _key(read_text, is_secret=True)
    name: str | None = _key(read_text)
    group: str | None = _key(read_text)
    stored: bool = _key(read_switch, False)
    unmatched: Literal["dead", "skip"] = _key(one_of("dead", "skip"), "dead")
    remember: timedelta = _key(read_duration, timedelta(days=7))
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlersConfig:
    """`[handlers]`: where the registry of handlers is, `module:attribute`, and the namespace of their action log."""

    registry: str | None = _key(read_text)
    namespace: str | None = _key(read_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings; `path` is the file they came from, if there was one."""

    store: StoreConfig = StoreConfig()
    sink: SinkConfig = SinkConfig()
    stores: Mapping[str, StoreConfig] = field(default_factory=dict)
    sinks: Mapping[str, SinkConfig] = field(default_factory=dict)
    routes: Sequence[RouteConfig] = ()
    unmatched: str = "dead"
    routing_table: str | None = None
    relay: RelayConfig = RelayConfig()
    outbox: OutboxConfig = OutboxConfig()
    source: SourceConfig = SourceConfig()
    handlers: HandlersConfig = HandlersConfig()
    retry: RetryPolicy = field(default_factory=Exponential)
    path: Path | None = None
    store_name: str = ""
    """Which of several stores `store` is."""

    def get_layout(self) -> Layout:
        """The layout, with the number of lanes its table was made with."""
        layout = get_layout(self.store.layout)
        if self.store.lanes is None or (layout.order is not None and self.store.lanes == layout.order.lanes):
            return layout
        if layout.order is None:
            raise ConfigError(f"Layout {layout.name!r} has no lanes of its own; leave lanes = {self.store.lanes} out")
        return pillarbox_layout(self.store.lanes, is_partitioned=layout.history is not None)

    def open_store(self, *, variant: str | None = None) -> SqlStore:
        """Make the store; it connects when it is opened. Its tables are those of a variant of the layout, if named."""
        store = self.store
        if store.url is None:
            raise ConfigError(f"No store: give --store, {PREFIX}STORE, or url under [store] in {FILE_NAME}")
        names = ("pooler", "hold_behind_pooler", "notify", "listen_url")
        options = {name: getattr(store, name) for name in names if getattr(store, name) is not None}
        with Secrets(store.url, store.listen_url).hidden():
            backend = parse_store_url(store.url).get_backend_name()
            if options and backend != "postgresql":
                raise ConfigError(f"[store] {next(iter(options))} is for PostgreSQL only; the store is {backend}")
            return open_store(
                store.url,
                layout=self.get_layout() if variant is None else self.get_layout().as_variant(variant),
                table=store.table,
                schema=store.schema,
                retention=self.relay.retention,
                topics=store.topics,
                sink=store.recipient or "",
                statement_timeout=store.statement_timeout,
                operation_timeout=store.operation_timeout,
                **options,
            )

    def open_sink(self) -> Sink:
        """Make the sink; the relay connects it."""
        return self.sink.open(message=self.choose_forms()[""].name)

    def make_relay(self, store: SqlStore, sink: Sink, *, hook: Hook | None = None) -> Relay:
        """Make the relay from a store to a sink."""
        options = {item.name: getattr(self.relay, item.name) for item in fields(RelayConfig)}
        del options["retention"]
        return Relay(store, sink, retry=self.retry, hook=hook, **options)

    def choose_store(self, name: str) -> Config:
        """The same settings for one of several stores."""
        return replace(self, store=self.stores[name], stores={}, store_name=name)

    def choose_recipient(self, name: str) -> Config:
        """The same settings for the rows of one sink; "" are those that were not routed."""
        return replace(self, store=replace(self.store, recipient=name or None))

    def choose_forms(self) -> dict[str, Form]:
        """The form of the messages to each sink that names none: that of the publisher of the tables it serves."""
        used: dict[str, list[Config]] = {}
        for config in self._list_stores():
            names = routes_of(config.store_name, self.routes, self.unmatched).sinks if self.routes else ("",)
            for name in names:
                used.setdefault(name, []).append(config)
        return {name: self._choose_form(name, configs) for name, configs in used.items()}

    def _choose_form(self, name: str, configs: Sequence[Config]) -> Form:
        sink = self.sinks[name] if name else self.sink
        layouts = {config.store.layout: config.get_layout() for config in configs}
        forms = {choose_form(sink.url or "", sink.options, own=layout.message) for layout in layouts.values()}
        if len({form.name for form in forms}) > 1:
            where = f"[sinks.{name}]" if name else "[sink]"
            raise ConfigError(
                f"{where}: its stores have the layouts {', '.join(sorted(layouts))}, whose own messages differ; "
                "give message, or each its own sink"
            )
        return min(forms, key=lambda form: form.note)

    def _list_stores(self) -> list[Config]:
        return [self.choose_store(name) for name in self.stores] or [self]

    def make_group(self, *, hook: Hook | None = None) -> RelayGroup:
        """Make the relays from every store to its sinks, named by sink, and by store where there are several.

        All stores share the sinks, with their connections, limits and names at their destinations.
        """
        forms = self.choose_forms()

        @cache
        def open_sink(name: str) -> Sink:
            return (self.sinks[name] if name else self.sink).open(name or None, message=forms[name].name)

        group = RelayGroup({})
        for config in self._list_stores():
            group.add(config._make_relays(open_sink, hook))
        return group

    def _make_relays(self, open_sink: Callable[[str], Sink], hook: Hook | None) -> RelayGroup:
        prefix = f"{self.store_name}." if self.store_name else ""
        if not self.routes:
            sink = open_sink("")
            return RelayGroup({f"{prefix}{sink.name}": self.make_relay(self.open_store(), sink, hook=hook)})
        routes = routes_of(self.store_name, self.routes, self.unmatched)
        if self.store.recipient is not None:
            raise ConfigError(f"[store] recipient: routes decide who gets a row; leave {self.store.recipient!r} out")
        into = self._make_routing_outbox()

        def open_part(recipient: str) -> SqlStore:
            if not recipient:
                # What was routed on is not kept: its copies are.
                return replace(self, relay=replace(self.relay, retention=None)).open_store()
            part = self.choose_recipient(recipient)
            if into is not None:
                part = replace(part, store=replace(part.store, layout="pillarbox", table=into.table.name, topics=None))
            return part.open_store()

        return route_relays(
            open_part,
            {name: open_sink(name) for name in routes.sinks},
            routes,
            make_relay=lambda store, sink, hook: self.make_relay(store, sink, hook=hook),
            into=into,
            prefix=prefix,
            hook=hook,
        )

    def _make_routing_outbox(self) -> Outbox | None:
        """The outbox that events of another system's table are routed into."""
        if self.routing_table is None:
            return None
        layout = self.get_layout()
        if layout.order is not None:
            raise ConfigError(f"[routing] table: layout {layout.name!r} routes within its own table; leave it out")
        return Outbox(sa.MetaData(), table=self.routing_table, schema=self.store.schema)

    def make_outbox(self, metadata: sa.MetaData) -> Outbox:
        """Declare the configured tables on `metadata`, for an application that puts events into them."""
        return Outbox(
            metadata,
            self.get_layout(),
            table=self.store.table,
            schema=self.store.schema,
            max_payload=self.outbox.max_payload,
            notify=self.store.notify is not False,
            retention=self.relay.retention,
        )


_SECTIONS: Final[Mapping[str, type[Any]]] = {
    "store": StoreConfig,
    "sink": SinkConfig,
    "relay": RelayConfig,
    "outbox": OutboxConfig,
    "source": SourceConfig,
    "handlers": HandlersConfig,
}


def _list_keys(section: str) -> dict[str, Read]:
    return {item.name: item.metadata["read"] for item in fields(_SECTIONS[section]) if "read" in item.metadata}


def _list_variables() -> dict[str, str]:
    variables = {f"{PREFIX}STORE": "store.url", f"{PREFIX}SINK": "sink.url", f"{PREFIX}RETRY": "retry"}
    variables |= {f"{PREFIX}SOURCE": "source.url", f"{PREFIX}GROUP": "source.group"}
    variables |= {f"{PREFIX}STORED": "source.stored", f"{PREFIX}HANDLERS": "handlers.registry"}
    for section in ("store", "relay", "outbox", "handlers"):
        keys = [key for key in _list_keys(section) if f"{section}.{key}" not in variables.values()]
        variables |= {PREFIX + key.upper(): f"{section}.{key}" for key in keys}
    return variables


VARIABLES: Final[Mapping[str, str]] = MappingProxyType(_list_variables())
"""The environment variables that override a key of the file, with that key."""

_KNOWN: Final = Known({section: _list_keys(section) for section in _SECTIONS}, VARIABLES)


def load_config(
    path: str | Path | None = None,
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] = MappingProxyType({}),
) -> Config:
    """Read the settings; raises `ConfigError` for anything that is not understood.

    Without a `path` the file is `PILLARBOX_CONFIG`, or `pillarbox.toml` in the working directory if there is
    one. `overrides` are those of the command line, by dotted key such as `relay.batch_size`; None is nothing.
    """
    found = _find_file(path, env)
    document = {} if found is None else _read_file(found)
    dotenv = None if found is None else found.with_name(".env")
    variables = {**(read_dotenv(dotenv) if dotenv is not None and dotenv.is_file() else {}), **env}
    # A url may stand where none belongs.
    with Secrets(document, list(variables.values())).hidden():
        return _make_config(Source(str(found or FILE_NAME), document, variables, overrides, _KNOWN), found)


def _make_config(source: Source, found: Path | None) -> Config:
    stores, sinks = source.split("stores"), source.split("sinks")
    chosen = source.choose_store(stores)
    routes = read_routes(source.filled("routes"), source.name, sinks=list(sinks), stores=list(stores))
    _check_routes(source, sinks, routes)
    unmatched, routing_table = read_routing(source.filled("routing"), source.name, sinks=list(sinks))
    config = Config(
        store=_make_store(source),
        sink=_make_sink(source),
        stores={name: _make_store(each) for name, each in stores.items()},
        sinks={name: _make_sink(each) for name, each in sinks.items()},
        routes=routes,
        unmatched=unmatched,
        routing_table=routing_table,
        relay=RelayConfig(**source.read("relay")),
        outbox=OutboxConfig(**source.read("outbox")),
        source=_make_source(source),
        handlers=HandlersConfig(**source.read("handlers")),
        retry=_make_retry(source),
        path=found,
    )
    return config if chosen is None else config.choose_store(chosen)


def _check_routes(source: Source, sinks: Mapping[str, Source], routes: Sequence[RouteConfig]) -> None:
    single = source.find("sink.url")
    if sinks and not routes:
        raise ConfigError(f"{source.name}: [sinks.NAME] need [[routes]] that say which events go to them")
    if routes and single is not None:
        raise ConfigError(f"{single.where}: the [[routes]] of {source.name} decide where events go; leave the sink out")
    if source.names("stores") and source.find("store.url") is not None:
        raise ConfigError(f"{source.name}: give a single store, or several as [stores.NAME]; not both")


def _make_store(source: Source) -> StoreConfig:
    store = StoreConfig(**source.read("store"))
    table, schema = source.find("store.table"), source.find("store.schema")
    if table is None or store.table is None or "." not in store.table:
        return store
    named, _, name = store.table.partition(".")
    if schema is not None and schema.rank == table.rank and store.schema != named:
        raise ConfigError(f"{table.where}: {store.table!r} names its schema, but {schema.where} is {store.schema!r}")
    is_overridden = schema is not None and schema.rank < table.rank
    return replace(store, table=name, schema=store.schema if is_overridden else named)


def _make_sink(source: Source) -> SinkConfig:
    url = source.find("sink.url")
    if url is not None and url.rank < 2 and "url" in source.names("sink"):
        return SinkConfig(url=read_text(url))
    return SinkConfig(**source.read("sink"), options=_list_options(source, "sink"))


def _make_source(source: Source) -> SourceConfig:
    url = source.find("source.url")
    is_replaced = url is not None and url.rank < 2 and "url" in source.names("source")
    # Options belong to their url.
    options = {} if is_replaced else _list_options(source, "source")
    return SourceConfig(**source.read("source"), options=options)


def _list_options(source: Source, section: str) -> Mapping[str, Any]:
    """What the adapter's own options are, besides the keys that we know."""
    names = [key for key in source.names(section) if key not in _list_keys(section)]
    given = {key: source.find(f"{section}.{key}") for key in names}
    return MappingProxyType({key: each.value for key, each in given.items() if each is not None})


def _make_retry(source: Source) -> RetryPolicy:
    given = source.find("retry")
    if given is None:
        return Exponential()
    value = given.value
    if isinstance(value, dict) and given.is_text:
        # No option of a policy is a text of digits: it came from a variable.
        value = {key: as_number(item) for key, item in value.items()}
    return parse_policy(value, what=given.where)


def _find_file(path: str | Path | None, env: Mapping[str, str]) -> Path | None:
    chosen = path or env.get(f"{PREFIX}CONFIG")
    found = Path(chosen or FILE_NAME)
    if found.is_file():
        return found
    if not chosen:
        return None
    raise ConfigError(f"Configuration file {str(found)!r}: there is no such file")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
