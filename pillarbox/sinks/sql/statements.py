"""A statement of the user's an event: by its type, with named binds filled from the event, or made by a function.

`:type` is a field of the event, `:payload__customer__id` and `:headers__tenant` are found in its JSON payload and its
headers; a bind of another name is explained by `params`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson
import sqlalchemy as sa

from pillarbox.codec import decode_json, is_json
from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.sql.rows import encode_headers, encode_time
from pillarbox.values import check_known

ANY: Final = "*"
_PLAIN: Final = (
    *("type", "topic", "key", "content_type", "aggregate_type", "aggregate_id", "schema_version"),
    *("correlation_id", "causation_id", "trace_id", "source", "dedup_key"),
)
BINDS: Final = ("id", *_PLAIN, "payload", "payload_bytes", "headers", "created_at")
_ROOTS: Final = ("payload", "headers")

Statement = Callable[[Event], "sa.Executable | None"]
Prepared = tuple[Any, str, "dict[str, Any] | None"]
"""A statement, what tells it from others, and its parameters; None when it has them itself and must run alone."""


class _Missing:
    pass


_MISSING: Final = _Missing()


class Path(NamedTuple):
    """A place in the payload or the headers, and what stands for a value that is not there."""

    text: str
    root: str
    steps: tuple[str, ...]
    default: Any = _MISSING


class StatementWriter:
    """Runs the statement of an event's type, that of `*` for any other type."""

    def __init__(
        self,
        statements: Mapping[str, str],
        *,
        params: Mapping[str, Any] | None,
        ignores_unmatched: bool,
        what: str,
    ) -> None:
        if not statements:
            raise ConfigError(f"{what} statements: expected at least one, by the type of its events")
        self._what = what
        self._params = {name: _read_param(name, given, what) for name, given in (params or {}).items()}
        self._ignores_unmatched = ignores_unmatched
        self._compiled = {type_: self._compile(type_, sql) for type_, sql in statements.items()}
        unused = self._params.keys() - {name for _, fills in self._compiled.values() for name, _ in fills}
        if unused:
            raise ConfigError(f"{what} params.{min(unused)}: no statement has a bind of this name")
        self._encode_time: Callable[[datetime], Any] = encode_time("sqlite")

    def look(self, db: sa.Connection) -> None:
        """Learn which database it is: it decides the form of an instant."""
        name = db.dialect.name
        self._encode_time = (lambda value: value) if name == "postgresql" else encode_time(name)

    def prepare(self, event: Event) -> Prepared | None:
        """The statement and its parameters, None when there is nothing to run; raises `Refused` when one is missing."""
        found = self._compiled.get(event.type) or self._compiled.get(ANY)
        if found is None:
            if self._ignores_unmatched:
                return None
            raise Refused(f"There is no statement for events of type {event.type!r}")
        statement, fills = found
        view = _View(event, self._encode_time)
        return statement, event.type, {name: fill(view) for name, fill in fills}

    def write(self, db: sa.Connection, rows: Sequence[Prepared]) -> None:
        """Run the statements in their order; neighbours of one kind together."""
        run_together(db, rows)

    def _compile(self, type_: str, sql: object) -> tuple[sa.TextClause, list[tuple[str, Callable[[_View], Any]]]]:
        where = f"{self._what} statements.{type_}"
        if not isinstance(sql, str) or not sql.strip():
            raise ConfigError(f"{where}: expected a statement, got {sql!r}")
        statement = sa.text(sql)
        return statement, [(name, self._fill(name, where)) for name in statement.compile().params]

    def _fill(self, name: str, where: str) -> Callable[[_View], Any]:
        if name in self._params:
            path = self._params[name]
            return lambda view: view.find(path)
        if name in BINDS:
            return lambda view: view.field(name)
        root, *steps = name.split("__")
        if root not in _ROOTS or not all(steps):
            expected = (*BINDS, "payload__…", "headers__…", *self._params)
            check_known(name, expected, where, kind="bind")
        path = Path(".".join((root, *steps)), root, tuple(steps))
        return lambda view: view.find(path)


class FunctionWriter:
    """Runs what a function makes of each event; None is nothing to run."""

    def __init__(self, make: Statement) -> None:
        self._make = make
        self._dialect: sa.Dialect | None = None

    def look(self, db: sa.Connection) -> None:
        self._dialect = db.dialect

    def prepare(self, event: Event) -> Prepared | None:
        made = self._make(event)
        if made is None:
            return None
        if not isinstance(made, sa.sql.ClauseElement):
            raise Refused(f"The statement of event {event.id} is no SQLAlchemy statement but {made!r}")
        compiled: Any = made.compile(dialect=self._dialect, column_keys=[])
        if compiled.post_compile_params or compiled.literal_execute_params:
            # IN with a list: SQLAlchemy writes as many binds as the list is long, for one execution alone.
            return made, str(compiled), None
        # SQLAlchemy fills these in when the statement runs, but not where a value, even None, is given.
        defaults = {column.key for column in compiled.prefetch}
        return made, str(compiled), {name: value for name, value in compiled.params.items() if name not in defaults}

    def write(self, db: sa.Connection, rows: Sequence[Prepared]) -> None:
        run_together(db, rows)


def run_together(db: sa.Connection, rows: Iterable[Prepared]) -> None:
    """Run statements in their order; those in a row that differ by their parameters alone are one round trip."""
    for _, group in groupby(rows, key=itemgetter(1)):
        same = list(group)
        filled = [params for _, _, params in same if params is not None]
        if filled:
            db.execute(same[0][0], filled)
        else:
            for statement, _, _ in same:
                db.execute(statement)


class _View:
    """An event as statements see it; its payload is decoded when first asked for, once."""

    def __init__(self, event: Event, encode_time: Callable[[datetime], Any]) -> None:
        self._event = event
        self._encode_time = encode_time
        self._document: Any = _MISSING

    def field(self, name: str) -> Any:
        event = self._event
        match name:
            case "id":
                return str(event.id)
            case "payload":
                return self._text() if _is_text(event.content_type) else event.payload
            case "payload_bytes":
                return event.payload
            case "headers":
                return encode_headers(event.headers)
            case "created_at":
                return None if event.created_at is None else self._encode_time(event.created_at)
            case _:
                return getattr(event, name)

    def find(self, path: Path) -> Any:
        value: Any = self._event.headers if path.root == "headers" else self._payload(path)
        for step in path.steps:
            value = _step(value, step)
            if value is _MISSING:
                if path.default is _MISSING:
                    raise Refused(f"Event {self._event.id} has no {path.text}, which its statement needs")
                return path.default
        return orjson.dumps(value).decode() if isinstance(value, dict | list) else value

    def _payload(self, path: Path) -> Any:
        if self._document is _MISSING:
            event = self._event
            try:
                if not is_json(event.content_type):
                    raise ValueError(f"its content type is {event.content_type!r}")
                self._document = decode_json(event.payload)
            except ValueError as error:
                raise Refused(f"Statement needs {path.text}, but the payload is no JSON: {error}") from None
        return self._document

    def _text(self) -> str:
        try:
            return self._event.payload.decode()
        except UnicodeDecodeError as error:
            raise Refused(f"The payload is no UTF-8 text: {error}; bind :payload_bytes instead") from None


def _is_text(content_type: str) -> bool:
    return is_json(content_type) or content_type.startswith("text/")


def _step(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _MISSING)
    if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
        return value[int(step)]
    return _MISSING


def _read_param(name: str, given: object, what: str) -> Path:
    where = f"{what} params.{name}"
    table = given if isinstance(given, Mapping) else {"path": given}
    for key in table:
        check_known(key, ("path", "default"), where)
    text = table.get("path")
    root, *steps = text.split(".") if isinstance(text, str) else [""]
    if root not in _ROOTS or not steps or not all(steps):
        raise ConfigError(f"{where}: expected a path like 'payload.customer.id' or 'headers.tenant', got {given!r}")
    return Path(str(text), root, tuple(steps), table.get("default", _MISSING))
