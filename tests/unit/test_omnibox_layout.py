"""What is looked at in a payload for omni-box's tables, without a server."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import Event, InvalidEvent
from pillarbox.encoding import Encoder
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.layouts.shared import has_zero

AGGREGATE = "0b7f3c52-8a4e-4a53-9a3f-0f2b6c1d7e10"
TOO_DEEP = "expects a payload of at most 254 levels, got a deeper one"
ZERO = "expects a payload without zero characters"
NUMBER = (
    "expects a payload whose whole numbers have at most 64 bits and others at most 16383 digits behind the point, got "
    "another number"
)


def check(payload: bytes) -> None:
    layout = get_layout("omnibox")
    about: dict[str, Any] = {"key": "k", "aggregate_type": "a", "aggregate_id": AGGREGATE}
    event = Event("placed", payload, content_type="application/json", **about)
    Encoder(layout, declare_layout(layout, sa.MetaData())["outbox"]).check(event)


def nest(levels: int, leaf: bytes) -> bytes:
    return b'{"a":' * levels + leaf + b"}" * levels


@pytest.mark.parametrize(
    "payload",
    [
        *(nest(254, leaf) for leaf in (b"1", b'"x"', b"1e5")),
        b'{"text": "%s"}' % (b"[{" * 1000),
        b'{"a": [%s]}' % b",".join([b'{"b": []}'] * 1000),
        b'{"a": 0e500, "b": 1e-16383, "c": 1e19, "d": 18446744073709551615}',
        rb'{"a": "\\u0000"}',
    ],
    ids=lambda payload: payload[:40].decode(),
)
def test_payload_is_taken(payload: bytes) -> None:
    check(payload)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        *((nest(levels, b"1"), TOO_DEEP) for levels in (255, 256, 1000)),
        (nest(1000, b"1e5"), TOO_DEEP),
        (nest(1000, rb'"\u0000"'), TOO_DEEP),
        (nest(254, rb'"\u0000"'), ZERO),
        (b'{"a": 1e-16384}', NUMBER),
        (b'{"a": 1e-999999999999999999999}', NUMBER),
        (b'{"a": 0e-16384}', NUMBER),
        (b'{"a": 0e999999999999999999999}', NUMBER),
        (b'{"a": 1e30}', NUMBER),
        (b'{"a": 18446744073709551616}', NUMBER),
    ],
    ids=lambda given: str(given[:40]),
)
def test_payload_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(InvalidEvent, match=re.escape(message)):
        check(payload)


def test_zero_is_found_however_deep_the_caller_is() -> None:
    payload = nest(254, rb'["\\u0000", "\u0000"]')

    def call(depth: int) -> bool:
        return call(depth - 1) if depth else has_zero(payload)

    assert call(sys.getrecursionlimit() // 2)


@pytest.mark.parametrize(
    ("payload", "is_there"),
    [
        (rb'{"a": "\u0000"}', True),
        (rb'{"a": "x\\\u0000"}', True),
        (rb'{"\u0000": 1}', True),
        (rb'{"a": "\u0000", "a": 1}', True),
        (rb'{"a": "\\u0000"}', False),
        (rb'{"a": "\\\\u0000"}', False),
        (b'{"a": "u0000"}', False),
    ],
)
def test_zero_is_told_from_a_backslash_before_text(payload: bytes, is_there: bool) -> None:
    assert has_zero(payload) is is_there
