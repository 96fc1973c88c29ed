"""What may stand behind the ? of a store's url: what the driver knows, and nothing that is quietly ignored."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from pillarbox import open_store
from pillarbox.errors import ConfigError, PillarboxError, StoreUnavailable
from pillarbox.stores.refusals import is_refusal
from tests.servers import server_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mysql://u:p@127.0.0.1:1/shop?option=1", "unknown option 'option'; expected one of charset, client_flag,"),
        ("mariadb://u:p@127.0.0.1:1/shop?chraset=utf8", "unknown option 'chraset'; did you mean 'charset'?"),
        ("mysql://u:p@127.0.0.1:1/shop?connect_timeout=x", "has a wrong value: invalid literal for int()"),
        ("mysql://u:p@127.0.0.1:1/shop?ssl=yes", "ssl: expected true or false, got 'yes'"),
        ("mysql://u:p@127.0.0.1:1/shop?ssl_ca=/nowhere.pem", "cannot use its ssl_ca: FileNotFoundError"),
        ("sqlite:///shop.db?option=1", "unknown option 'option'; expected one of cached_statements,"),
        ("sqlite:///shop.db?timeout=long", "has a wrong value: could not convert string to float: 'long'"),
    ],
)
def test_option_that_the_driver_does_not_have_is_refused_by_its_name(url: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert expected in str(caught.value)
    assert "u:p@" not in str(caught.value)


@pytest.mark.parametrize("pooler", [None, False])
async def test_option_that_postgresql_does_not_know_is_refused_by_its_name(pooler: bool | None) -> None:
    store = open_store(f"{server_url('postgres')}?option=1", pooler=pooler)
    with pytest.raises(PillarboxError, match='unrecognized configuration parameter "option"') as caught:
        await store.open()
    assert not isinstance(caught.value, StoreUnavailable), "waiting does not help"
    await store.close()


@pytest.mark.parametrize(
    ("query", "ask", "answer"),
    [
        ("application_name=mine", "current_setting('application_name')", "mine"),
        ("options=-csearch_path%3Dmine", "current_setting('search_path')", "mine"),
        ("lock_timeout=1234", "current_setting('lock_timeout')", "1234ms"),
        ("connect_timeout=3", "1", 1),
        ("sslmode=disable", "1", 1),
        ("ssl=disable", "1", 1),
    ],
)
async def test_options_of_libpq_and_settings_of_the_server_count(query: str, ask: str, answer: Any) -> None:
    store = open_store(f"{server_url('postgres')}?{query}", pooler=False)
    try:
        assert await store.run(lambda db: db.execute(sa.text(f"SELECT {ask}")).scalar()) == answer
    finally:
        await store.close()


async def test_tls_that_the_url_of_mysql_asks_for_is_verified() -> None:
    # The server has a certificate that it made for itself, by an authority that nobody knows.
    for query, expected in (("ssl=false", "SELECT 1"), ("ssl=true", "certificate verify failed")):
        store = open_store(f"{server_url('mysql')}?{query}")
        try:
            said = str(await store.run(lambda db: db.execute(sa.text("SELECT 'SELECT 1'")).scalar()))
        except StoreUnavailable as error:
            said = str(error)
        finally:
            await store.close()
        assert expected in said


def test_certificate_that_does_not_verify_is_no_refusal_of_a_value() -> None:
    error = OperationalError("SELECT 1", {}, Exception(2003, "Can't connect"))
    assert error.orig is not None
    error.orig.__cause__ = ssl.SSLCertVerificationError("certificate verify failed")
    assert not is_refusal(error)
    assert not is_refusal(error.orig.__cause__)
    error.orig.__cause__ = ValueError("a lone surrogate")
    assert is_refusal(error)
