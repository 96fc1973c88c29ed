"""Statements made ready for their remote database: an INSERT carries the number of its queue row in `outbox_seq`.

The text is edited at the offsets of its tokens and stays as it was everywhere else: comments, strings, case, functions.
Where a repeat must do nothing, the clause that is added is about `outbox_seq` alone, so that every violation of the
business data is still an error. An upsert by the user's own clause is done again all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from pillarbox.errors import UnsupportedStatement
from pillarbox.sync.binds import Binds, Dialect, find_binds, shorten
from pillarbox.sync.remote_sql import SEQ_COLUMN, quote_name
from pillarbox.sync.shapes import Insert, Kind, Outline, Row, read_insert, read_outline, read_set_end

OnRepeat = Literal["error", "ignore"]

# Where the sequence number goes in a text that is added; a ? there may be part of a name.
_SEQ: Final = "\0"
_CLAUSE: Final = f" ON CONFLICT ({SEQ_COLUMN}) WHERE {SEQ_COLUMN} <> 0 DO NOTHING"


@dataclass(frozen=True, slots=True)
class Plan:
    """How statements with one text are sent."""

    source: str
    """The text that was pushed."""
    sql: str
    """The text to send."""
    kind: Kind
    carries_seq: bool = False
    """Whether the rows it inserts, the first of several, have the number in outbox_seq."""
    needs_columns: bool = False
    """Whether it is an INSERT without a column list, which needs the names of the remote table's columns."""
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    """For each number of arguments that fits: the places among them where the sequence number goes."""

    def bind(self, args: Sequence[Any], seq: int) -> list[Any]:
        """Return the arguments for `sql`; `args` stays as it is."""
        if self.needs_columns:
            raise UnsupportedStatement(
                f"The statement {shorten(self.source)} names no columns. Expected the columns of its table to add "
                f"{SEQ_COLUMN} to them. Write INSERT INTO table (columns) VALUES (...)."
            )
        slots = self.slots.get(len(args))
        if slots is None:
            raise UnsupportedStatement(
                f"The statement {shorten(self.source)} was pushed with {len(args)} arguments; expected "
                f"{' or '.join(str(count) for count in self.slots)}, one for each ?."
            )
        bound = list(args)
        for place in reversed(slots):
            bound.insert(place, seq)
        return bound


def plan_statement(
    sql: str,
    *,
    dialect: Dialect,
    inject: bool,
    on_repeat: OnRepeat = "error",
    columns: Sequence[str] | None = None,
    table: str | None = None,
) -> Plan:
    """Tell how a statement is sent.

    With `inject` an INSERT of VALUES gets the column outbox_seq. `columns` are the remote table's in their order. What
    goes into another table than `table`, which need not have the column, is sent as it was pushed, and so is all else.

    Two queues that write to one table may give their rows the same number. With on_repeat="error" that is an error of
    the database, never the loss of a row: an INSERT whose own clause would settle it silently (OR IGNORE, OR REPLACE,
    ON CONFLICT without a target, ON DUPLICATE KEY UPDATE) carries no number. With on_repeat="ignore" a number that is
    there already is what a repeat is known by, so there such a row would be taken for one: give each queue a table of
    its own, or a writer whose batches are atomic.

    Raises UnsupportedStatement for what would end the transaction of its batch or change the session of later ones, for
    several statements in one text, and for texts that cannot be read.
    """
    return _plan(sql, dialect, inject, on_repeat, None if columns is None else tuple(columns), table)


def inject_outbox_seq(sql: str, args: Sequence[Any], seq: int, dialect: Dialect = "sqlite") -> tuple[str, list[Any]]:
    """Return an INSERT or UPDATE that also stores `seq` in outbox_seq, with its arguments; neither input is changed.

    A repeat of the INSERT does nothing, where its shape allows that. Raises UnsupportedStatement for anything else.
    """
    outline = read_outline(sql, dialect)
    if outline.kind == "update":
        plan = _plan_update(outline)
    else:
        plan = plan_statement(sql, dialect=dialect, inject=True, on_repeat="ignore")
        if not plan.carries_seq and not _names_seq(outline):
            raise UnsupportedStatement(
                f"{SEQ_COLUMN} cannot be added to {shorten(sql)}. Expected an INSERT of VALUES, or an UPDATE of one "
                "table."
            )
    return plan.sql, plan.bind(args, seq)


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str
    """What stands there instead, with `_SEQ` for each place of the sequence number."""


@lru_cache(maxsize=4096)
def _plan(
    sql: str,
    dialect: Dialect,
    inject: bool,
    on_repeat: OnRepeat,
    columns: tuple[str, ...] | None,
    table: str | None,
) -> Plan:
    outline = read_outline(sql, dialect)
    insert = read_insert(outline) if inject and outline.kind == "insert" else None
    if insert is None or insert.source == "query" or _is_named(insert.columns) or not _is_into(insert, table):
        return _unchanged(outline)
    is_bare = insert.columns is None and insert.source == "rows" and insert.rows[0].values > 0
    if is_bare and columns is None:
        return Plan(sql, sql, "insert", needs_columns=True)
    if on_repeat == "error" and _settles_any_conflict(insert):
        edits = [_column_edit(insert, outline, columns, added=())] if is_bare else []
        return _edited(outline, edits, carries_seq=False)
    edits = _carrying(insert, outline, columns)
    return _edited(outline, _guarded(insert, edits, dialect) if on_repeat == "ignore" else edits)


def _settles_any_conflict(insert: Insert) -> bool:
    is_about_seq = not insert.has_target or _is_named(insert.targets)
    return insert.policy in ("IGNORE", "REPLACE") or (insert.conflict != "" and is_about_seq)


def _unchanged(outline: Outline) -> Plan:
    counts = find_binds(outline.sql, outline.dialect).counts
    return Plan(outline.sql, outline.sql, outline.kind, slots=dict.fromkeys(counts, ()))


def _plan_update(outline: Outline) -> Plan:
    found = read_set_end(outline)
    if found is None:
        raise UnsupportedStatement(
            f"{SEQ_COLUMN} cannot be added to {shorten(outline.sql)}. Expected an UPDATE of one table with a SET list."
        )
    end, names = found
    if _is_named(names):
        return _unchanged(outline)
    return _edited(outline, [_Edit(end, end, f", {SEQ_COLUMN} = {_SEQ}")])


def _is_into(insert: Insert, table: str | None) -> bool:
    if table is None:
        return True
    # A schema that only one of the two names says nothing.
    wanted, found = table.lower().split("."), [name.lower() for name in insert.names]
    shared = min(len(wanted), len(found))
    return wanted[-shared:] == found[-shared:]


def _is_named(columns: tuple[str, ...] | None) -> bool:
    return any(name.lower() == SEQ_COLUMN for name in columns or ())


def _names_seq(outline: Outline) -> bool:
    insert = read_insert(outline) if outline.kind == "insert" else None
    return insert is not None and _is_named(insert.columns)


def _carrying(insert: Insert, outline: Outline, columns: tuple[str, ...] | None) -> list[_Edit]:
    if insert.source == "set":
        return [_Edit(insert.set_end, insert.set_end, f", {SEQ_COLUMN} = {_SEQ}")]
    if insert.source == "defaults":
        return [_Edit(*insert.keyword, f"({SEQ_COLUMN}) VALUES ({_SEQ})")]
    # Of several rows the first carries the number; 0, and NULL on MySQL, is outside of the unique index.
    others = "NULL" if outline.dialect == "mysql" else "0"
    edits = [_column_edit(insert, outline, columns, added=(SEQ_COLUMN,))]
    edits += [_value_edit(row, _SEQ if at == 0 else others) for at, row in enumerate(insert.rows)]
    if insert.alias_columns_end is not None:
        edits.append(_Edit(insert.alias_columns_end, insert.alias_columns_end, f", {SEQ_COLUMN}"))
    return edits


def _column_edit(insert: Insert, outline: Outline, columns: tuple[str, ...] | None, *, added: tuple[str, ...]) -> _Edit:
    if insert.columns is not None:
        separator = ", " if insert.columns else ""
        return _Edit(insert.columns_end, insert.columns_end, separator + ", ".join(added))
    known = tuple(name for name in columns or () if name != SEQ_COLUMN)
    values = insert.rows[0].values
    # PostgreSQL alone takes fewer values than there are columns.
    fits = values <= len(known) if outline.dialect == "postgresql" else values in (0, len(known))
    if not fits:
        raise UnsupportedStatement(
            f"The statement {shorten(outline.sql)} names no columns and has {values} values. Expected {len(known)}, "
            f"one for each of the columns {', '.join(known)} of its table."
        )
    names = [quote_name(name, outline.dialect) for name in known[:values]]
    return _Edit(insert.head_end, insert.head_end, f" ({', '.join([*names, *added])})")


def _value_edit(row: Row, value: str) -> _Edit:
    return _Edit(row.end, row.end, f", {value}" if row.values else value)


def _guarded(insert: Insert, edits: list[_Edit], dialect: Dialect) -> list[_Edit]:
    if len(insert.rows) > 1:
        # The rows after the first have no number: they may come only if the first was never there.
        return _selecting(insert, edits, dialect) if dialect == "sqlite" else edits
    if insert.policy == "IGNORE" or (insert.conflict == "nothing" and not insert.has_target):
        return edits
    if dialect == "sqlite" or (dialect == "postgresql" and not insert.conflict):
        end = insert.rows[0].end + 1 if insert.rows else insert.keyword[1]
        return [*edits, _Edit(end, end, _CLAUSE)]
    return _selecting(insert, edits, dialect) if _can_select(insert, dialect) else edits


def _can_select(insert: Insert, dialect: Dialect) -> bool:
    row = insert.rows[0] if insert.rows else None
    if row is None or row.is_constructed or row.has_default or insert.has_row_alias:
        return False
    # In MySQL a value may name a column to its left, which a SELECT does not have.
    return dialect != "mysql" or not row.has_names


def _selecting(insert: Insert, edits: list[_Edit], dialect: Dialect) -> list[_Edit]:
    unless = f"WHERE NOT EXISTS (SELECT 1 FROM {insert.table} WHERE {SEQ_COLUMN} = {_SEQ})"
    start, end = insert.keyword
    last = insert.rows[-1]
    if len(insert.rows) > 1:
        around = [_Edit(start, start, "SELECT * FROM ("), _Edit(last.end + 1, last.end + 1, f") {unless}")]
        return [*edits, *around]
    dual = "FROM DUAL " if dialect == "mysql" else ""
    value = f", {_SEQ}" if last.values else _SEQ
    return [
        *(edit for edit in edits if edit.start != last.end),
        _Edit(start, end, "SELECT"),
        _Edit(last.start, last.start + 1, " "),
        _Edit(last.end, last.end + 1, f"{value} {dual}{unless}"),
    ]


def _edited(outline: Outline, edits: list[_Edit], *, carries_seq: bool = True) -> Plan:
    binds = find_binds(outline.sql, outline.dialect)
    # Numbered placeholders of SQLite count for themselves: ours takes the number after the last.
    bind = f"?{binds.numbered + 1}" if binds.numbered else "?"
    pieces, done = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        text = edit.text.replace(_SEQ, bind)
        pieces += [outline.sql[done : edit.start], text, _space_between(text, outline.sql[edit.end : edit.end + 1])]
        done = edit.end
    sql = "".join([*pieces, outline.sql[done:]])
    return Plan(outline.sql, sql, outline.kind, carries_seq, slots=_slots(binds, edits))


def _space_between(text: str, following: str) -> str:
    # In `VALUES (?)ON CONFLICT` a parenthesis was the end of a word, which what is added is not.
    ends_word = text[-1].isalnum() or text[-1] in "_?"
    return " " if ends_word and (following.isalnum() or following in ("_", '"', "'", "`", "[", "$")) else ""


def _slots(binds: Binds, edits: list[_Edit]) -> dict[int, tuple[int, ...]]:
    places = sorted(edit.start for edit in edits for _ in range(edit.text.count(_SEQ)))
    if binds.numbered:
        return {binds.numbered: (binds.numbered,) if places else ()}
    return {
        count: tuple(sum(position < place for position in binds.chosen(count)) for place in places)
        for count in binds.counts
    }
