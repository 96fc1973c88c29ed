"""Secrets of a connection do not get out through what its writer says."""

from __future__ import annotations

import pytest

from pillarbox.urls import Secrets

CONNECTION = {
    "url": "postgresql://ann:pa%40ss@db/x?sslmode=require&auth_token=t0k3n",
    "db_token": "ey.secret",
    "nested": {"auth": {"value": "deep-one"}, "region": "eu-west"},
    "keys": ["first-key", "second-key"],
    "pin": "1",
    "broken": "http://[oops",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login as ann with pa%40ss failed", "login as ann with *** failed"),
        ("login with pa@ss failed", "login with *** failed"),
        ("GET ?auth_token=t0k3n&sslmode=require", "GET ?auth_token=***&sslmode=require"),
        ("Bearer ey.secret refused by eu-west", "Bearer *** refused by eu-west"),
        ("deep-one, first-key and second-key", "***, *** and ***"),
        ("row 1 failed", "row 1 failed"),
        ("cannot open http://[oops", "cannot open http://[oops"),
    ],
)
def test_secrets_are_hidden_and_nothing_else(text: str, expected: str) -> None:
    assert Secrets(CONNECTION).hide(text) == expected


def test_connection_without_secrets_hides_nothing() -> None:
    assert Secrets({}).hide("as it is") == "as it is"
