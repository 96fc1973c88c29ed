"""The option for TLS in the url of a store, however it is called there."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from pillarbox.stores.postgres import _with_tls


@pytest.mark.parametrize("given", ["ssl", "sslmode"])
def test_option_is_called_as_libpq_calls_it(given: str) -> None:
    url = _with_tls(sa.make_url(f"postgresql://db/shop?{given}=require&target=1"))
    assert dict(url.query) == {"sslmode": "require", "target": "1"}


def test_url_without_the_option_stays_as_it_is() -> None:
    url = sa.make_url("postgresql://db/shop?target=1")
    assert _with_tls(url) == url
