"""Events for the other systems' tables, generated: blanks, capitals, lengths and numbers at the borders."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import strategies as st

from pillarbox import Event, InvalidEvent
from pillarbox.event import RELEASED
from pillarbox.stores.sql import SqlStore

# Blanks of several kinds, letters of several widths, and what looks empty and is not.
TEXTS = st.text(
    st.sampled_from([" ", "\u00a0", "\u2003", "\u3000", "\u200b", "a", "B", "é", "Ω", "😀", "-"]), max_size=5
)
_JSON_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_JSON_NUMBERS = st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | _JSON_NUMBERS | _JSON_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_JSON_TEXTS, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(_JSON_TEXTS, VALUES, max_size=3)
TEXT_HEADERS = st.dictionaries(
    TEXTS | st.text("abAB", min_size=1, max_size=2) | st.text("x", min_size=63, max_size=66),
    TEXTS | st.text("vé", min_size=510, max_size=514),
    max_size=3,
) | st.integers(97, 102).map(lambda count: {f"h{number}": "x" for number in range(count)})
_RESERVED = st.sampled_from(["content-type", "correlation_id", "pillarbox-type", "pillarbox-id", "pillarbox-source"])
_NUMBERS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False)
HEADERS = TEXT_HEADERS | st.dictionaries(_RESERVED | TEXTS, TEXTS | _NUMBERS, max_size=2)
OPTIONAL = st.none() | TEXTS | st.text("é", min_size=62, max_size=66)
DELAYS = st.none() | st.timedeltas(timedelta(0), timedelta(days=366)) | st.just(timedelta(days=365))


def some_of(usual: dict[str, Any], odd: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """The usual fields with a few odd ones: with all of them odd, next to nothing would be taken."""
    names = st.lists(st.sampled_from(sorted(odd)), max_size=3, unique=True)
    chosen = names.flatmap(lambda found: st.fixed_dictionaries({name: odd[name] for name in found}))
    return chosen.map(lambda fields: {**usual, **fields})


def make_generated(fields: dict[str, Any], **fixed: Any) -> Event | None:
    """The event, or None for one that no table takes."""
    try:
        return Event(**{**fields, **fixed})
    except InvalidEvent:
        return None


async def read_back(store: SqlStore) -> list[Event]:
    """The events that wait in a table, as our relay reads them."""
    batch = await store.claim(10, mode="lease", lease=store.lease)
    await batch.settle([RELEASED for _ in batch.claims])
    return [claim.event for claim in batch.claims]
