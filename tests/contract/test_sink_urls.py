"""Sinks by URL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sinks import list_schemes, open_sink
from pillarbox.sinks.file import FileSink
from pillarbox.sinks.null import NullSink
from pillarbox.sinks.stdout import StdoutSink
from pillarbox.urls import mask_url

SCHEMES = (
    "null, stdout, file, kafka, nats, tls, amqp, amqps, redis, rediss, mqtt, mqtts, http, https, postgresql, mysql, "
    "mariadb or sqlite"
)


@pytest.mark.parametrize(
    ("url", "kind", "name"),
    [
        ("null:", NullSink, "null:"),
        ("null://", NullSink, "null://"),
        ("stdout:", StdoutSink, "stdout:"),
        ("file:out.jsonl", FileSink, "file:out.jsonl"),
        ("FILE:///tmp/out.jsonl", FileSink, "FILE:///tmp/out.jsonl"),
    ],
)
def test_url_opens_its_sink(url, kind, name):
    sink = open_sink(url)
    assert type(sink) is kind
    assert sink.name == name
    assert open_sink(url, name="orders").name == "orders"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:/tmp/a%20b%23.jsonl", "/tmp/a b#.jsonl"),
        ("file:///tmp/x", "/tmp/x"),
        ("file:/x?lock_timeout=5s", "/x"),
    ],
)
def test_file_url_names_its_path(url, path):
    sink = open_sink(url)
    assert isinstance(sink, FileSink)
    assert sink.path == Path(path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafak://b:9092", f"expected a url with scheme {SCHEMES}; got 'kafak://b:9092'. Did you mean 'kafka'?"),
        ("flie:/tmp/x", f"expected a url with scheme {SCHEMES}; got 'flie:/tmp/x'. Did you mean 'file'?"),
        ("orders.jsonl", f"expected a url with scheme {SCHEMES}; got 'orders.jsonl'"),
        ("", f"expected a url with scheme {SCHEMES}; got ''"),
        ("stdout:x", "expected 'stdout:' alone, got 'stdout:x'"),
        ("null://host", "expected 'null:' alone, got 'null://host'"),
        ("file:", "expected 'file:PATH' or 'file:///PATH', got 'file:'"),
        ("file://out/x", "expected 'file:PATH' or 'file:///PATH', got 'file://out/x'"),
        ("file:%00", "expected the path of a file, got '\\x00'"),
        ("file:/x#1", "expected a url without a fragment, got 'file:/x#1'; write '#' as '%23'"),
        ("file:/x\n", "expected a url without control characters and outer blanks, got 'file:/x\\n'"),
        (
            "file:/x?lock_timeot=1s",
            "unknown option 'lock_timeot'; scheme 'file' takes the options lock_timeout. Did you mean 'lock_timeout'?",
        ),
        ("null:?a=1", "unknown option 'a'; scheme 'null' takes no options."),
        (
            "file:/x?lock_timeout=1s&lock_timeout=2s",
            "option 'lock_timeout' is given twice; give it in the url or beside it, once",
        ),
        ("http://[bad", "the url 'http://[bad' cannot be read; escape special characters with %"),
    ],
)
def test_bad_url_is_refused_with_what_was_expected(url, message):
    with pytest.raises(ConfigError) as refusal:
        open_sink(url, name="orders")
    assert str(refusal.value) == f"Sink 'orders': {message}"


def test_option_beside_the_url_is_checked_too():
    with pytest.raises(ConfigError, match="unknown option 'colour'; scheme 'stdout' takes no options"):
        open_sink("stdout:", colour=True)
    with pytest.raises(ConfigError, match="Sink 'file:/x' lock_timeout: expected a duration with its unit"):
        open_sink("file:/x", lock_timeout=5)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://user:hunter2@host/vhost", "amqp://user:***@host/vhost"),
        ("amqp://user:hun/te?r@2@host", "amqp://user:***@…"),
        ("https://hunter2@host/x", "https://host/…"),
        ("redis://:hunter2@host", "redis://:***@host"),
        ("redis:user:hunter2@host", "redis:***@host"),
        ("kafka://b?sasl_password=hunter2&acks=all", "kafka://b?sasl_password=***&acks=all"),
        ("https://host/x?a=1&API_KEY=hunter2#f", "https://host/…"),
        ("amqp://host/x?a=1&API_KEY=hun#ter2", "amqp://host/x?a=1&API_KEY=***"),
        ("nats://host:4222/subject", "nats://host:4222/subject"),
    ],
)
def test_secrets_of_a_url_are_masked(url, shown):
    assert mask_url(url) == shown
    try:
        said = open_sink(url).name
    except ConfigError as refusal:
        said = str(refusal)
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "url", ["amqp://u:hunter2@[bad", "amqp://u:hunter2@host\n", "null://u:hunter2@x", "file://u:hunter2@x/y"]
)
def test_secrets_of_a_broken_url_are_masked(url):
    with pytest.raises(ConfigError) as refusal:
        open_sink(url)
    assert "hunter2" not in str(refusal.value)


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    info = tmp_path / "carrier_pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier-pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pillarbox.sinks]\npigeon = carrier_pigeon:open_pigeon\nowl = carrier_pigeon:missing\n"
    )
    (tmp_path / "carrier_pigeon.py").write_text(
        "from pillarbox.sinks.memory import MemorySink\n"
        "def open_pigeon(url):\n"
        "    url.refuse_options('ring')\n"
        "    return MemorySink(f'{url.name} to {url.location} with {url.options}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("carrier_pigeon", None)


def test_another_package_may_add_a_scheme(other_package):
    assert open_sink("pigeon://loft/3?ring=7", name="orders").name == "orders to //loft/3 with {'ring': '7'}"
    assert list_schemes() == [*SCHEMES.replace(" or ", ", ").split(", "), "owl", "pigeon"]
    with pytest.raises(ConfigError, match=r"Did you mean 'pigeon'\?$"):
        open_sink("pidgeon://loft")


def test_adapter_that_cannot_be_loaded_is_named(other_package):
    with pytest.raises(ConfigError, match="the adapter 'carrier_pigeon:missing' of scheme 'owl' cannot be loaded"):
        open_sink("owl:")


def test_adapters_are_imported_only_when_asked_for():
    script = (
        "import sys; from pillarbox.sinks import open_sink; open_sink('null:');"
        "print([name for name in sys.modules if name.startswith('pillarbox.sinks.')])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pillarbox.sinks.null" in found.stdout
    assert "pillarbox.sinks.file" not in found.stdout
    assert "pillarbox.sinks.stdout" not in found.stdout
