"""No part of a password is shown, whatever url it stands in, however it is written, and whoever complains.

Passwords are made of letters that no message of ours has in a row, and of everything that means something in a url.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pillarbox.cli import main
from pillarbox.config import load_config
from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.inbox.database import _EngineDatabase
from pillarbox.sinks import open_sink
from pillarbox.sources.url import open_source
from pillarbox.stores.url import open_store
from pillarbox.sync.writers import open_writer
from pillarbox.urls import Secrets, mask_url, show_database
from tests.contract.sources import Letters

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
LETTERS = "QXZJVKW"
PASSWORDS = st.text(st.sampled_from(LETTERS * 3 + "@:/?#%&=+[]$,;~!'\"\\ é1"), min_size=6, max_size=24)
PIECES = st.lists(st.sampled_from(["QXZJ", "VKWQX", "ZJ", *"@:/?#%&=+;,1"]), min_size=2, max_size=8).map("".join)
HOWS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "escaped": lambda text: quote(text, safe=""),
    "half escaped": lambda text: quote(text, safe="@:/?#[]"),
}
SCHEMES = [
    *("postgresql", "mysql", "mariadb", "oracle", "postgres"),
    *("kafka", "nats", "tls", "amqp", "amqps", "redis", "rediss", "mqtt", "mqtts", "http", "https"),
    *("sqlite", "file", "stdout", "null", "libsql", "nonsense", ""),
]
FORMS = [
    "{scheme}://user:{secret}@127.0.0.1:1/shop",
    "{scheme}://user:{secret}@127.0.0.1/shop?option=1",
    "{scheme}://:{secret}@127.0.0.1:1/shop",
    "{scheme}://user:{secret}@127.0.0.1:bad/shop",
    "{scheme}://user:{secret}@[::1/shop",
    "{scheme}://user:{secret}@127.0.0.1:1,127.0.0.1:2/shop",
    "{scheme}://user:a@b:{secret}@127.0.0.1/shop",
    "{scheme}:/user:{secret}@127.0.0.1/shop",
    "{scheme}:user:{secret}@127.0.0.1/shop",
    "user:{secret}@127.0.0.1/shop",
]
QUERIES = [
    "{scheme}://127.0.0.1:1/shop?password={secret}",
    "{scheme}://127.0.0.1:1/shop?option=1&auth_token={secret}&topic=a",
    "{scheme}://127.0.0.1:1/shop?sasl_password={secret}",
    "{scheme}://127.0.0.1:1/shop?option=1;password={secret}",
    "{scheme}://127.0.0.1:1/shop;password={secret}",
    "{scheme}://127.0.0.1:1/shop#password={secret}",
    "{scheme}:host=127.0.0.1;Password={secret}",
    "host=127.0.0.1 password={secret}",
]


def parts_of(secret: str) -> set[str]:
    """What must not be seen: every four letters in a row."""
    runs = re.findall(f"[{LETTERS}]{{4,}}", secret)
    return {run[start : start + 4].lower() for run in runs for start in range(len(run) - 3)}


def check(secret: str, said: str) -> None:
    shown = said.lower()
    assert [part for part in parts_of(secret) if part in shown] == [], said


def make_everything(url: str) -> list[Callable[[], Any]]:
    return [
        lambda: open_store(url).name,
        lambda: open_store("postgresql://127.0.0.1/shop", listen_url=url).name,
        lambda: open_sink(url).name,
        lambda: open_sink(url, name="orders").name,
        lambda: open_source(url, group="g", dead=Letters()).name,
        lambda: open_writer(url),
        lambda: repr(load_config(env={"PILLARBOX_STORE": url, "PILLARBOX_SINK": url})),
        lambda: load_config(env={"PILLARBOX_STORE": url}).open_store().name,
        lambda: load_config(env={}, overrides={"relay.batch_size": url}),
        lambda: load_config(env={}, overrides={"relay.claim": url}),
        lambda: _EngineDatabase(sa.create_engine(url), sa.Table("inbox", sa.MetaData())).name,
    ]


def say(make: Callable[[], Any]) -> str:
    """What is shown of it when it works, and when it does not, with the traceback."""
    try:
        return str(make())
    except PillarboxError as error:
        return "".join(traceback.format_exception(error))
    except (sa.exc.SQLAlchemyError, ValueError, ImportError, TypeError, NotImplementedError) as error:
        if "_EngineDatabase" in "".join(traceback.format_exception(error)):
            return ""  # SQLAlchemy's own, about an engine that the user makes
        raise


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=60, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(secret=PASSWORDS | PIECES, scheme=st.sampled_from(SCHEMES), form=st.sampled_from(FORMS))
def test_no_part_of_a_password_is_in_a_name_or_an_error(how: str, secret: str, scheme: str, form: str) -> None:
    url = form.format(scheme=scheme, secret=HOWS[how](secret))
    check(secret, mask_url(url))
    for make in make_everything(url):
        check(secret, say(make))


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=60, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(secret=PASSWORDS | PIECES, scheme=st.sampled_from(SCHEMES), form=st.sampled_from(QUERIES))
def test_no_part_of_a_secret_option_is_in_a_name_or_an_error(how: str, secret: str, scheme: str, form: str) -> None:
    url = form.format(scheme=scheme, secret=HOWS[how](secret))
    check(secret, mask_url(url))
    for make in make_everything(url):
        check(secret, say(make))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u@h/db?password=a&SECRET", "postgresql://***@h/db?password=***"),
        ("postgresql://u@h/db?password=&SECRET", "postgresql://***@h/db?password=***"),
        ("postgresql://u@h/db?password=a&&SECRET&sslmode=off", "postgresql://***@h/db?password=***&sslmode=off"),
        ("postgresql://u@h/db?password=a&SECRET=b&sslmode=off", "postgresql://***@h/db?password=***&sslmode=off"),
        ("postgresql://u@h/db?password=&sslmode=off", "postgresql://***@h/db?password=&sslmode=off"),
        ("postgresql://h/db?topic=a&b", "postgresql://h/db?topic=a&b"),
    ],
)
def test_secret_option_goes_on_to_the_next_option(url: str, shown: str) -> None:
    assert mask_url(url) == shown
    assert Secrets(url).hide("no SECRET here, but sslmode off") == (
        "no *** here, but sslmode off" if "SECRET" in url else "no SECRET here, but sslmode off"
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u@127.0.0.1:9/db?password=a@SECRET", "postgresql://***@…"),
        ("postgresql://u:SECRET@127.0.0.1:9/db?sslpassword=a@SECRET", "postgresql://u:***@…"),
        ("redis://127.0.0.1:9?password=a@SECRET", "redis://127.0.0.1:9?…"),
        ("redis://127.0.0.1:9/0?password=a@SECRET", "redis://127.0.0.1:9/…"),
        ("redis://[::1]:9,h:10?password=a@SECRET", "redis://[::1]:9,h:10?…"),
        ("kafka://127.0.0.1:9?topic=a@b", "kafka://127.0.0.1:9?…"),
        ("redis://ann:12?SECRET@127.0.0.1", "redis://ann:***@…"),
        ("redis://SECRET?b@127.0.0.1", "redis://***@…"),
        ("kafka://127.0.0.1:9;password=a@SECRET", "kafka://127.0.0.1:***@…"),
        ("host=127.0.0.1 password=a@SECRET", "***@…"),
    ],
)
def test_nothing_is_shown_from_an_at_sign_on_that_may_be_a_part_of_an_option(url: str, shown: str) -> None:
    assert mask_url(url) == shown
    assert mask_url(shown) == shown
    hide = Secrets(url).hide
    assert hide("unknown option 'password', 'topic' or 'sslpassword'") == (
        "unknown option 'password', 'topic' or 'sslpassword'"
    )
    said = hide("cannot resolve SECRET; 'a@SECRET', '12?SECRET@127.0.0.1'")
    assert ("SECRET" in said) == ("SECRET" not in url)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb"])
@pytest.mark.parametrize(
    "rest",
    [
        "u@127.0.0.1:9/db?password=a@SECRET",
        "127.0.0.1:9/db?password=a@SECRET",
        "127.0.0.1/db?password=a@SECRET",
        "u:b@127.0.0.1:9/db?sslpassword=a@SECRET",
        "/db?password=a@SECRET",
    ],
)
def test_bare_at_sign_in_an_option_of_a_database_is_refused_before_any_connection(
    scheme: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"connects: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    url = f"{scheme}://{rest}"
    for command in COMMANDS:
        code, said = run_here(*command, "--store", url)
        assert code == 1
        assert "has a bare '@' in its password, name or options; write it as %40" in said
        assert "SECRET" not in said
    with pytest.raises(ConfigError) as refused:
        open_sink(url)
    assert "SECRET" not in str(refused.value)


def test_name_of_a_database_that_may_be_a_part_of_a_password_is_not_shown() -> None:
    for secret in ("@/:SECRET", "a@b/SECRET", "a@SECRET"):
        url = sa.make_url(f"postgresql://user:{secret}@127.0.0.1:1/shop")
        assert show_database(url) == "postgresql://user:***@…"
    # Taken apart by SQLAlchemy for an engine of the user's: the option is a part of the password there.
    option = sa.make_url("postgresql://127.0.0.1:1/shop?sasl_password=a@SECRET")
    assert show_database(option) == "postgresql://127.0.0.1:***@…"
    assert show_database(sa.make_url("postgresql://u:a%3Fb%3Dc@h/shop")) == "postgresql://u:***@h/shop"
    assert show_database(sa.make_url("sqlite:///a@b.db")) == "sqlite:///a%40b.db"
    assert show_database(sa.make_url("mysql://ann%40x:pw@h/shop")) == "mysql://ann%40x:***@h/shop"


@pytest.mark.parametrize("password", ["a/bKey=", "auth=b", "pw==", "a/b"])
def test_password_that_looks_like_an_option_is_a_password(password: str) -> None:
    url = f"postgresql://u:{password}@127.0.0.1:9/db"
    assert mask_url(url) == "postgresql://u:***@127.0.0.1:9/db"
    assert open_store(url).name == "postgresql://u:***@127.0.0.1:9/db (outbox)"


def test_unknown_option_is_named_where_a_value_has_a_bare_at_sign() -> None:
    with pytest.raises(ConfigError, match=r"'redis://127.0.0.1:9\?…': unknown option 'password'; scheme 'redis' takes"):
        open_sink("redis://127.0.0.1:9?password=a@SECRET")


def test_address_behind_an_at_sign_in_a_harmless_option_is_taken_as_it_is_meant() -> None:
    assert open_sink("redis://127.0.0.1:9?stream=a@b").name == "redis://127.0.0.1:9?…"


@pytest.mark.parametrize("url", ["https:/127.0.0.1/hook/{}", "https:127.0.0.1/hook/{}", "http:{}"])
def test_path_of_a_webhook_without_its_slashes_is_not_shown(url: str) -> None:
    assert mask_url(url.format("QXZJVKWQ")) == f"{url.partition(':')[0]}:…"


def test_user_without_a_password_may_be_a_token() -> None:
    assert mask_url("rediss://QXZJVKWQ:@127.0.0.1:1/0") == "rediss://***@127.0.0.1:1/0"


@pytest.mark.parametrize(
    "text",
    [
        "['{}']\n",
        "{} = 1\n",
        "[store]\nurl = 'sqlite:///shop.db'\nlayout = '{}'\n",
        "[store]\nurl = 'sqlite:///shop.db'\ntable = '{}'\n",
        "[store]\nurl = 'sqlite:///shop.db'\n[sinks.a]\nurl = 'null:'\n[[routes]]\nto = ['{}']\n",
        "[handlers]\nregistry = '{}'\n[store]\nurl = 'sqlite:///shop.db'\n",
        "[retry]\npolicy = '{}'\n",
        "[sink]\nurl = 'null:'\n[store]\nurl = '${{SHOP}}'\nlanes = '${{SHOP}}'\n",
    ],
)
def test_no_secret_is_shown_of_a_url_that_stands_anywhere_in_the_settings(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql://ann:a@QXZJVKWQ@127.0.0.1:1/shop"
    monkeypatch.setenv("SHOP", url)
    (tmp_path / "shop.db").touch()
    (tmp_path / "pillarbox.toml").write_text(text.format(url if "{} =" not in text else f"'{url}'"))
    for args in (["status"], ["handlers", "list"], ["relay", "--drain", "--sink", "null:"]):
        code, said = run_here(*args)
        assert code in (1, 2), said
        check("QXZJVKWQ", said)


@pytest.mark.parametrize("how", HOWS)
@settings(max_examples=300, deadline=None)
@given(secret=PASSWORDS)
def test_texts_of_others_lose_the_secret_in_every_form(how: str, secret: str) -> None:
    url = f"postgresql://user:{HOWS[how](secret)}@127.0.0.1/shop"
    hide = Secrets(url, {"headers": {"Authorization": f"Bearer {secret}"}}).hide
    escaped = quote(secret, safe="")
    for text in (f"login with {secret} failed", f"got {secret!r}", f"GET /?p={escaped}", f"invalid DSN {url}"):
        check(secret, hide(text))


COMMANDS = [
    ("status",),
    ("relay", "--drain", "--sink", "null:"),
    ("events", "list", "-vv"),
    ("schema", "check"),
]


@settings(max_examples=15, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    secret=PASSWORDS,
    scheme=st.sampled_from(["postgresql", "mysql", "mariadb", "oracle"]),
    form=st.sampled_from(FORMS),
    how=st.sampled_from(sorted(HOWS)),
    command=st.sampled_from(COMMANDS),
)
def test_no_command_shows_a_part_of_a_password(secret: str, scheme: str, form: str, how: str, command: Any) -> None:
    url = form.format(scheme=scheme, secret=HOWS[how](secret))
    code, said = run_here(*command, "--store", url)
    assert code in (1, 2)
    assert "this is a defect" not in said
    check(secret, said)


@settings(max_examples=15, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    secret=PASSWORDS,
    scheme=st.sampled_from(["kafka", "redis", "amqp", "nats", "http", "mysql", "postgresql"]),
    form=st.sampled_from([form for form in FORMS + QUERIES if "127.0.0.1:1/" not in form]),
    how=st.sampled_from(sorted(HOWS)),
)
def test_no_relay_shows_a_part_of_its_sinks_password(secret: str, scheme: str, form: str, how: str) -> None:
    url = form.format(scheme=scheme, secret=HOWS[how](secret))
    said = asyncio.run(_open_and_close(url))
    check(secret, said)


async def _open_and_close(url: str) -> str:
    try:
        return open_sink(url).name
    except PillarboxError as error:
        return "".join(traceback.format_exception(error))


def run_here(*args: str) -> tuple[int, str]:
    out = io.StringIO()
    argv, root = sys.argv, logging.getLogger()
    handlers, level = list(root.handlers), root.level
    sys.argv = ["pillarbox", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = argv
        logging.captureWarnings(False)
        logging.getLogger("pillarbox").setLevel(logging.NOTSET)
        logging.basicConfig(level=level, handlers=handlers, force=True)
    return int(ended.value.code or 0), out.getvalue()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PILLARBOX_")]:
        monkeypatch.delenv(name)
