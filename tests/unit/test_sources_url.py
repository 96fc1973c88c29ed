"""Sources by their urls: what is refused before anything is connected."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.sources.url import open_source
from tests.contract.sources import Letters


def make(url: str, **options: Any) -> Any:
    return open_source(url, **{"group": "billing", "dead": Letters(), **options})


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("kafak://b:9092", {}, "expected a url with scheme kafka, redis, rediss, nats, tls, amqp or amqps; got"),
        ("kafak://b:9092", {}, "Did you mean 'kafka'?"),
        ("kafka://b:9092", {}, "Source 'kafka://b:9092': expected the option topics"),
        ("kafka://b:9092/orders", {}, "expected nothing after the servers; use the option topics"),
        ("kafka://b:9092?topcs=a", {}, "unknown option 'topcs'"),
        ("kafka://b:9092?topcs=a", {}, "Did you mean 'topics'?"),
        ("kafka://b:9092?topics=a", {"start": "first"}, "start: expected earliest or latest, got 'first'"),
        ("kafka://b:9092?topics=a", {"group": " "}, "group: expected the name of a consumer group, got ' '"),
        ("kafka://b:9092?topics=a", {"config": {"enable.auto.commit": True}}, "'enable.auto.commit' is not taken here"),
        ("kafka://b:9092?topics=a", {"config": {"group.id": "x"}}, "'group.id' is not taken here"),
        ("kafka://b:9092?topics=a", {"config": {"no.such": 1}}, "the Kafka client refuses its settings"),
        ("kafka://user@b:9092?topics=a", {}, "Source 'kafka://***@b:9092?topics=a': expected both user and password"),
        ("redis://b", {}, "expected the option streams"),
        ("redis://b?streams=a&lease=10ms", {}, "lease: expected at least a second"),
        ("redis://b?streams=a&tls_ca=x", {}, "unknown option 'tls_ca'"),
        ("rediss://b?streams=a&tls_ca=/no/file", {}, "Source 'rediss://b?streams=a&tls_ca=/no/file' tls_ca: there is"),
        ("redis://b/x?streams=a", {}, "expected the number of a database"),
    ],
)
def test_bad_url_is_a_clear_error(url, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        make(url, **options)
    assert str(refused.value).startswith("Source ")


def test_name_has_no_secret():
    assert make("kafka://me:hush@b:9092?topics=a").name == "kafka://me:***@b:9092?topics=a"
    assert make("redis://me:hush@b?streams=a").name == "redis://me:***@b?streams=a"


@pytest.mark.parametrize(("scheme", "package"), [("kafka", "confluent_kafka"), ("redis", "redis")])
def test_missing_package_is_named(monkeypatch, scheme, package):
    for module in list(sys.modules):
        if module.startswith((f"pillarbox.sources.{scheme}", f"pillarbox.sinks.{scheme}")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'pillarbox\[{scheme}\]'"):
        make(f"{scheme}://b?topics=a&streams=a")
