"""The part of a configuration that names several stores, sinks and the routes between them.

[stores.shop]             one or several stores, or a single [store]
[sinks.orders]            one or several sinks by name, or a single [sink]
[[routes]]                the first route that matches an event says which sinks it goes to
[routing] unmatched       what becomes of an event that no route matches
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pillarbox.errors import ConfigError
from pillarbox.routing import Route, Routes
from pillarbox.values import Given, check_known, read_text, show

ROUTE_KEYS: Final = ("to", "topic", "type", "headers", "store")
TABLES: Final = ("stores", "sinks", "routes", "routing")


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """One of `[[routes]]`: the route, and the stores it is for (all when empty)."""

    route: Route
    stores: tuple[str, ...] = ()


def read_routes(
    document: Mapping[str, Any], where: str, *, sinks: Sequence[str], stores: Sequence[str]
) -> list[RouteConfig]:
    """Read `[[routes]]`; every sink and store that is named must be there."""
    given = document.get("routes", [])
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ConfigError(f"{where}: expected tables [[routes]], got {show(given)}")
    return [
        _read_route(each, f"{where}, [[routes]] {number}", sinks, stores) for number, each in enumerate(given, start=1)
    ]


def _read_route(table: dict[str, Any], where: str, sinks: Sequence[str], stores: Sequence[str]) -> RouteConfig:
    for key in table:
        check_known(key, ROUTE_KEYS, where)
    headers = table.get("headers", {})
    if not isinstance(headers, dict):
        raise ConfigError(f"{where} headers: expected a table of patterns, got {show(headers)}")
    route = Route(
        to=_read_names(table, "to", where),
        topic=_read_names(table, "topic", where),
        type=_read_names(table, "type", where),
        headers={name: read_text(Given(value, f"{where} headers.{name}")) for name, value in headers.items()},
    )
    if not route.to:
        raise ConfigError(f"{where}: expected to = the name of a sink, or a list of names")
    for name in route.to:
        check_known(name, sinks, f"{where} to", kind="sink")
    chosen = _read_names(table, "store", where)
    for name in chosen:
        check_known(name, stores, f"{where} store", kind="store")
    return RouteConfig(route, chosen)


def _read_names(table: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = table.get(key)
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, str) and each for each in listed):
        raise ConfigError(f"{where} {key}: expected text or a list of texts, got {show(value)}")
    return tuple(listed)


def read_routing(document: Mapping[str, Any], where: str, *, sinks: Sequence[str]) -> tuple[str, str | None]:
    """Read `[routing]`: what becomes of an unmatched event (dead, drop or a sink), and the table to route into."""
    table = document.get("routing", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table [routing], got {show(table)}")
    for key in table:
        check_known(key, ("unmatched", "table"), f"{where}, [routing]")
    unmatched = read_text(Given(table.get("unmatched", "dead"), f"{where}, [routing] unmatched"))
    if unmatched not in ("dead", "drop"):
        check_known(unmatched, ["dead", "drop", *sinks], f"{where}, [routing] unmatched", kind="choice")
    named = table.get("table")
    return unmatched, None if named is None else read_text(Given(named, f"{where}, [routing] table"))


def routes_of(store: str, routes: Sequence[RouteConfig], unmatched: str) -> Routes:
    """The routes for one of the stores."""
    chosen = [each.route for each in routes if not each.stores or store in each.stores]
    if not chosen:
        raise ConfigError(f"Store {store!r}: no route is for it; give one without store, or with store = {store!r}")
    return Routes(chosen, unmatched=unmatched)
