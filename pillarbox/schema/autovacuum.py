"""PostgreSQL's vacuum settings for a table whose rows come and go.

By default a table is vacuumed when a fifth of it has died. A queue is small when it is read and has been large: its
dead rows stay for long and every claim reads past them. A fixed number of dead rows suits it better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.errors import ConfigError
from pillarbox.schema.compare import Difference
from pillarbox.schema.postgres import read_settings

VACUUM_THRESHOLD = 1000
INSERT_THRESHOLD = 1000

_FACTORS = ("autovacuum_vacuum_scale_factor", "autovacuum_vacuum_insert_scale_factor")
_THRESHOLDS = ("autovacuum_vacuum_threshold", "autovacuum_vacuum_insert_threshold")


def autovacuum_sql(
    table: sa.Table | str,
    *,
    vacuum_threshold: int = VACUUM_THRESHOLD,
    insert_threshold: int = INSERT_THRESHOLD,
    cost_delay: float | None = None,
    cost_limit: int | None = None,
) -> str:
    """The statement that lets PostgreSQL vacuum a table after a number of dead or new rows.

    `cost_delay` (milliseconds) and `cost_limit` say how hard a vacuum works; the server's own values without them.
    """
    for name, value in (("vacuum_threshold", vacuum_threshold), ("insert_threshold", insert_threshold)):
        if value < 0:
            raise ConfigError(f"{name}: expected a number of rows from 0 on; got {value!r}")
    settings: dict[str, float | int | None] = {
        _FACTORS[0]: 0,
        _THRESHOLDS[0]: vacuum_threshold,
        _FACTORS[1]: 0,
        _THRESHOLDS[1]: insert_threshold,
        "autovacuum_vacuum_cost_delay": cost_delay,
        "autovacuum_vacuum_cost_limit": cost_limit,
    }
    listed = ", ".join(f"{name} = {value}" for name, value in settings.items() if value is not None)
    return f"ALTER TABLE {_name(table)} SET ({listed})"


def _name(table: sa.Table | str) -> str:
    preparer = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]
    if isinstance(table, sa.Table):
        return str(preparer.format_table(table))
    return ".".join(preparer.quote(part) for part in table.split("."))


def compare_settings(db: sa.Connection, table: sa.Table) -> Iterator[tuple[Difference, list[str], list[str]]]:
    """Where a table, or a partition of it, lacks the settings: the scale factors 0 and a number of rows."""
    if db.dialect.name != "postgresql":
        return
    for name, settings in read_settings(db, table).items():
        wrong = [key for key in _FACTORS if float(settings.get(key, "1")) != 0]
        wrong += [key for key in _THRESHOLDS if key not in settings]
        if not wrong:
            continue
        expected = "scale factors 0 and thresholds in rows"
        found = ", ".join(f"{key}={settings[key]}" for key in settings if key.startswith("autovacuum"))
        difference = Difference("autovacuum", name, expected, found or None)
        yield difference, [_mend(name, settings)], _undo(name, settings)


def _mend(name: str, settings: Mapping[str, str]) -> str:
    # A threshold that somebody has chosen stays.
    text = autovacuum_sql(
        "t",
        vacuum_threshold=int(settings.get(_THRESHOLDS[0], VACUUM_THRESHOLD)),
        insert_threshold=int(settings.get(_THRESHOLDS[1], INSERT_THRESHOLD)),
    )
    return text.replace("ALTER TABLE t ", f"ALTER TABLE {name} ", 1)


def _undo(name: str, settings: Mapping[str, str]) -> list[str]:
    names = (*_FACTORS, *_THRESHOLDS)
    again = ", ".join(f"{key} = {settings[key]}" for key in names if key in settings)
    reset = ", ".join(key for key in names if key not in settings)
    return [
        *([f"ALTER TABLE {name} SET ({again})"] if again else []),
        *([f"ALTER TABLE {name} RESET ({reset})"] if reset else []),
    ]
