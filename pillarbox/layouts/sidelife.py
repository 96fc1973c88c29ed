"""The life of a row in a side table: what each transition writes there, the same for every layout that has one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import sqlalchemy as sa

from pillarbox.layouts import side
from pillarbox.layouts.clock import later, now
from pillarbox.layouts.layout import Grave, Lease, Update, Wait

LEASED: Final = sa.literal_column(str(side.LEASED), sa.SmallInteger)
WAITING: Final = sa.literal_column(str(side.WAITING), sa.SmallInteger)
DEAD: Final = sa.literal_column(str(side.DEAD), sa.SmallInteger)


def _entry(state: Any, **values: Any) -> dict[str, Any]:
    return {"state": state, "token": None, "until_at": None, **values}


def _options(row: str) -> dict[str, Any]:
    return {
        "attempts": "attempts",
        "is_counted_at_claim": True,
        "error": "error",
        "waits": (
            Wait("until_at", lambda c: c.state == LEASED),
            Wait("until_at", lambda c: c.state == WAITING),
        ),
        "lease": Lease(
            fence="token",
            at="until_at",
            claim=lambda c, given: _entry(
                LEASED, token=given.fence, until_at=later(given.delay), attempts=given.attempt
            ),
            renew=lambda c, given: {"until_at": later(given.delay)},
            lapsed=lambda c, seconds: (c.state == LEASED) & (c.until_at <= now()),
            lapse=Update(lambda c, given: _entry(WAITING, until_at=later(given.delay), error=given.error)),
        ),
        "retry": Update(
            lambda c, given: _entry(WAITING, until_at=later(given.delay), attempts=given.attempt, error=given.error)
        ),
        "dead": Update(lambda c, given: _entry(DEAD, attempts=given.attempt, error=given.error, died_at=now())),
        "grave": Grave("state", row, "died_at", "error", "attempts", lambda c: c.state == DEAD),
        "release": Update(lambda c, given: _entry(WAITING, until_at=now(), attempts=given.attempt - 1)),
        "redrive": Update(
            lambda c, given: {"state": WAITING, "until_at": now(), "attempts": 0, "error": None, "died_at": None}
        ),
    }


SIDE_LIFE: Final = SimpleNamespace(
    options=_options,
    counts={"retrying": lambda c: c.state == WAITING, "held": lambda c: c.state == LEASED},
)
