"""Sizes as people write them."""

from __future__ import annotations

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sizes import parse_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        ("1", 1),
        ("2B", 2),
        ("3KB", 3_000),
        ("3 kb", 3_000),
        ("3KiB", 3_072),
        ("64MB", 64_000_000),
        (" 64 MiB ", 67_108_864),
        ("1GB", 1_000_000_000),
        ("1gib", 1_073_741_824),
    ],
)
def test_size_is_read(given: object, expected: int) -> None:
    assert parse_size(given) == expected


@pytest.mark.parametrize(
    "given", ["", "MB", "-1MB", "0", "0MB", 0, -5, 1.5, "1.5MB", "1TB", "1 M B", True, None, "٣MB"]
)
def test_anything_else_is_refused_with_its_value(given: object) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_size(given, what="batch_bytes")
    assert str(refused.value).startswith("batch_bytes: expected a size of 1 or more with the unit B, KB")
    assert str(refused.value).endswith(f"or a number of bytes; got {given!r}")
