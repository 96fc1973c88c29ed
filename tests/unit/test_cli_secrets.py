"""Secrets are hidden in what others say; in our own words a mask would tell that one of them is the password."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from pillarbox.cli.logs import set_up_logging
from pillarbox.cli.terminal import forget_secrets, hide_in_error, keep_secret
from tests.unit.test_secrets import run_here

HINT = "hint: is the database up, and are its url, user and password right?"


@pytest.mark.parametrize("password", ["password", "database", "Store", "outbox", "hint", "pillarbox"])
def test_words_of_ours_are_shown_whatever_the_password_is(password: str) -> None:
    code, said = run_here("status", "--store", f"postgresql://app:{password}@127.0.0.1:1/db")
    assert code == 1
    first, hint = said.splitlines()
    assert first.startswith("pillarbox: Store postgresql://app:***@127.0.0.1:1/db (outbox): ")
    assert hint == HINT


@pytest.fixture
def secret() -> Iterator[str]:
    keep_secret("postgresql://app:QXZJVK@127.0.0.1:1/db")
    yield "QXZJVK"
    forget_secrets()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Store a (outbox): no QXZJVK: QXZJVK", "Store a (outbox): no ***: ***"),
        ("Store postgresql://app:QXZJVK@h: no", "Store postgresql://app:***@h: no"),
        ("Sink 'redis://127.0.0.1?password=QXZJVK': no", "Sink 'redis://127.0.0.1?password=***': no"),
        ("QXZJVK: cannot be read", "***: cannot be read"),
        ("File 'QXZJVK' exists", "File '***' exists"),
        ("Layout 'QXZJVK': expected another", "Layout '***': expected another"),
    ],
)
def test_secret_is_hidden_in_every_part_of_an_error(secret: str, text: str, expected: str) -> None:
    assert hide_in_error(text) == expected


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    set_up_logging(0)
    yield out
    forget_secrets()
    logging.captureWarnings(False)
    logging.getLogger("pillarbox").setLevel(logging.NOTSET)
    logging.basicConfig(level=level, handlers=handlers, force=True)


def test_log_hides_what_others_say_only(stderr: io.StringIO) -> None:
    for password in ("store", "WARNING", "QXZJVK"):
        keep_secret(f"postgresql://app:{password}@127.0.0.1:1/db")
    log = logging.getLogger("pillarbox.relay")
    log.warning("The store is down for %d s: %s", 3, ConnectionError("no store for QXZJVK"))
    log.warning("Row %r of %s", "QXZJVK", ["QXZJVK", 1])
    logging.getLogger("driver").warning("no QXZJVK")
    try:
        raise ConnectionError("no QXZJVK")
    except ConnectionError:
        log.exception("It failed.")
    said = stderr.getvalue()
    assert "WARNING The store is down for 3 s: no *** for ***\n" in said
    assert "WARNING Row '***' of ['***', 1]\n" in said
    assert "WARNING no ***\n" in said
    assert "  ConnectionError: no ***\n" in said
    assert "QXZJVK" not in said


def test_log_hides_a_traceback_that_another_handler_has_written_already(stderr: io.StringIO) -> None:
    keep_secret("postgresql://app:QXZJVK@127.0.0.1:1/db")
    other = logging.StreamHandler(io.StringIO())
    logging.getLogger("pillarbox").addHandler(other)
    try:
        raise ConnectionError("no QXZJVK")
    except ConnectionError:
        logging.getLogger("pillarbox.relay").exception("It failed.")
    finally:
        logging.getLogger("pillarbox").removeHandler(other)
    assert "  ConnectionError: no ***\n" in stderr.getvalue()
