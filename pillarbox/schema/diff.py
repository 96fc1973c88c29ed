"""The differences as an Alembic migration: up to what the layout declares, and down to what was found."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

from pillarbox.schema.check import Drift

_MIGRATION = '''"""Mend {tables}.

Revision ID: {revision}
Revises: {revises}
"""

from alembic import op

revision = {revision!r}
down_revision = {down_revision!r}
branch_labels = None
depends_on = None


def upgrade() -> None:
{upgrade}


def downgrade() -> None:
{downgrade}
'''

_INDENT = "    "


def migration(drifts: Sequence[Drift], *, revises: str | None = None) -> str:
    """The text of a migration file; its revision follows from what it does, so that it is the same when run again."""
    upgrade = "\n".join(_write_upgrade(drifts))
    downgrade = "\n".join(_write_downgrade(drifts))
    digest = hashlib.sha256(f"{revises}\n{upgrade}\n{downgrade}".encode()).hexdigest()
    return _MIGRATION.format(
        tables=", ".join(dict.fromkeys(drift.table for drift in drifts)),
        revision=digest[:12],
        revises=revises or "",
        down_revision=revises,
        upgrade=upgrade or f"{_INDENT}pass",
        downgrade=downgrade or f"{_INDENT}pass",
    )


def _write_upgrade(drifts: Sequence[Drift]) -> Iterator[str]:
    seen: set[tuple[str, ...]] = set()
    for drift in drifts:
        yield from _comment(str(drift))
        if drift.statements not in seen:
            seen.add(drift.statements)
            yield from _execute(drift.statements)
    if all(text.startswith("--") for drift in drifts for text in drift.statements):
        yield f"{_INDENT}pass"


def _write_downgrade(drifts: Sequence[Drift]) -> Iterator[str]:
    groups = dict.fromkeys(drift.undo for drift in reversed(drifts))
    for group in groups:
        yield from _execute(group)


def _execute(statements: Iterable[str]) -> Iterator[str]:
    for statement in statements:
        if statement.startswith("--"):
            yield from _comment(statement.removeprefix("--").strip())
            continue
        yield f"{_INDENT}op.execute({_literal(_escape(statement))})"


def _comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"{_INDENT}# {line}"


# Alembic takes a text for one with parameters, which are words after a colon.
def _escape(statement: str) -> str:
    return re.sub(r"(?<![:\w\\]):(?=\w)", r"\:", statement)


def _literal(text: str) -> str:
    if "\n" not in text or '"""' in text or text.endswith('"'):
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    return f'"""\n{escaped}\n"""'
