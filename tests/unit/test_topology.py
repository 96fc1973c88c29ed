"""Several stores, sinks and routes in a configuration: what it makes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pillarbox.config import Config, load_config
from pillarbox.errors import ConfigError
from pillarbox.routing import Route

BASE = """
[store]
url = "sqlite:///shop.db"

[sinks.orders]
url = "null:"

[sinks.audit]
url = "file:audit.jsonl"
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str, env: dict[str, str] | None = None, **overrides: str) -> Config:
        Path("pillarbox.toml").write_text(text)
        return load_config(env=env or {}, overrides=overrides)

    return load


def test_routes_are_read_with_their_conditions(load):
    config = load(
        BASE
        + """
[routing]
unmatched = "drop"

[[routes]]
topic = ["shop-*", "web"]
type = "order.*"
headers = { tenant = "${TENANT}" }
to = ["orders", "audit"]

[[routes]]
to = "audit"
""",
        {"TENANT": "acme"},
    )
    first, second = (each.route for each in config.routes)
    assert first == Route(("orders", "audit"), ("shop-*", "web"), ("order.*",), {"tenant": "acme"})
    assert second == Route(("audit",))
    assert config.unmatched == "drop"
    assert list(config.make_group().relays) == ["fan-out", "orders", "audit"]


def test_each_store_gets_its_own_relays(load):
    config = load(
        """
[stores.shop]
url = "sqlite:///shop.db"

[stores.bank]
url = "sqlite:///bank.db"
table = "events"

[sinks.orders]
url = "null:"

[sinks.audit]
url = "null:"

[[routes]]
store = "shop"
type = "order.*"
to = "orders"

[[routes]]
to = "audit"
"""
    )
    relays = config.make_group().relays
    assert list(relays) == ["shop.fan-out", "shop.orders", "shop.audit", "bank.fan-out", "bank.audit"]
    assert relays["bank.audit"].store.tables["outbox"].name == "events"
    assert relays["shop.audit"].sink is relays["bank.audit"].sink


def test_several_stores_may_share_a_single_sink(load):
    config = load('[stores.a]\nurl = "sqlite:///a.db"\n[stores.b]\nurl = "sqlite:///b.db"\n[sink]\nurl = "null:"\n')
    relays = config.make_group().relays
    assert list(relays) == ["a.null:", "b.null:"]
    assert relays["a.null:"].sink is relays["b.null:"].sink


def test_one_of_several_stores_is_chosen_by_its_name(load):
    text = '[stores.a]\nurl = "sqlite:///a.db"\n[stores.b]\nurl = "sqlite:///b.db"\n[sink]\nurl = "null:"\n'
    config = load(text, **{"store.url": "b", "store.table": "events"})
    assert (config.store.url, config.store.table) == ("sqlite:///b.db", "events")
    assert list(config.make_group().relays) == ["b.null:"]


@pytest.mark.parametrize("given", [{"store.url": "c"}, {"store.table": "events"}])
def test_settings_for_one_store_need_its_name_among_several(load, given):
    text = '[stores.a]\nurl = "sqlite:///a.db"\n[stores.b]\nurl = "sqlite:///b.db"\n[sink]\nurl = "null:"\n'
    with pytest.raises(ConfigError, match=r"pillarbox.toml has several stores; choose one by name \(a, b\), got"):
        load(text, **given)


def test_what_was_routed_is_kept_by_its_sinks_alone(load):
    config = load(BASE + '[relay]\nretention = "7d"\n[[routes]]\nto = ["orders", "audit"]\n')
    relays = config.make_group().relays
    kept = {name: getattr(relay.store, "retention") is not None for name, relay in relays.items()}  # noqa: B009
    assert kept == {"fan-out": False, "orders": True, "audit": True}


ROUTE = '[[routes]]\nto = "orders"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE, r"\[sinks.NAME\] need \[\[routes\]\] that say which events go to them"),
        (BASE + '[[routes]]\ntype = "a"\n', r"\[\[routes\]\] 1: expected to = the name of a sink"),
        (
            BASE + '[[routes]]\nto = "order"\n',
            "to: unknown sink 'order'; expected orders, audit. Did you mean 'orders'",
        ),
        (BASE + '[[routes]]\nto = "orders"\ntopics = "a"\n', "unknown key 'topics'; .* Did you mean 'topic'?"),
        (BASE + '[[routes]]\nto = "orders"\ntype = 5\n', "type: expected text or a list of texts, got 5"),
        (BASE + '[[routes]]\nto = "orders"\nheaders = "a"\n', "headers: expected a table of patterns, got 'a'"),
        (BASE + '[[routes]]\nto = "orders"\nheaders = { a = 1 }\n', "headers.a: expected text, got 1"),
        (BASE + '[[routes]]\nto = "orders"\nstore = "x"\n', "store: unknown store 'x'"),
        (BASE + ROUTE + '[routing]\nunmatched = "die"\n', "unknown choice 'die'; expected dead, drop, orders, audit"),
        (BASE + ROUTE + '[routing]\nother = "dead"\n', "unknown key 'other'; expected unmatched"),
        (BASE + ROUTE + '[sink]\nurl = "null:"\n', "the .* decide where events go; leave the sink out"),
        (BASE + '[stores.a]\nurl = "sqlite:///a.db"\n' + ROUTE, "give a single store, or several as"),
        ("routes = 5\n" + BASE, r"expected tables \[\[routes\]\], got 5"),
        ("[sinks]\norders = 5\n", r"\[sinks\]: expected tables \[sinks.NAME\], got orders = 5"),
    ],
)
def test_what_makes_no_sense_is_refused(load, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_sink_on_the_command_line_is_refused_beside_routes(load):
    with pytest.raises(ConfigError, match=r"sink.url: the .* decide where events go"):
        load(BASE + ROUTE, **{"sink.url": "null:"})


def test_sinks_secrets_are_not_shown(load):
    config = load(BASE.replace("null:", "redis://u:hush@localhost/0") + ROUTE)
    assert "hush" not in repr(config)
