"""The Hrana protocol without its transport: statements as JSON requests, and what the answers say.

Several statements are one transaction in one request: each step runs only if the one before it succeeded, so that after
a failure nothing but the ROLLBACK runs. Only an answer to COMMIT says that something was written.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from pillarbox.sinks.sql.failures import Kind, judge_code
from pillarbox.sync.writers.shared import BadStatement, check_arguments, check_statement

_CLOSE: Final = {"type": "close"}
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1

# What the server says itself, by prefix; the rest are SQLite's own names.
_KINDS: Final = {
    "SQL_": Kind.BAD,
    "ARGS_": Kind.BAD,
    # SQLITE_ERROR, no such table among others, has no name in the server's library.
    "SQLITE_UNKNOWN": Kind.WRONG,
    "TRANSACTION_": Kind.CONFLICT,
    "SQLITE_SCHEMA": Kind.CONFLICT,
    "BLOCKED": Kind.DOWN,
    "PROXY_ERROR": Kind.DOWN,
}


class BrokenAnswer(Exception):
    """An answer that is not what the protocol promises: what was done is not known."""


class Failure(NamedTuple):
    """What the server says of a statement or a request that failed."""

    message: str
    code: str

    @property
    def kind(self) -> Kind:
        """Whose fault it is; a code that nobody knows may mean something else the next time."""
        if self.code.startswith("SQLITE_CONSTRAINT") and "FOREIGN KEY" in self.message:
            return Kind.LATER  # some servers tell only the first part of SQLite's code
        own = next((kind for prefix, kind in _KINDS.items() if self.code.startswith(prefix)), None)
        return own or (judge_code(self.code) if self.code.startswith("SQLITE_") else None) or Kind.LATER

    def __str__(self) -> str:
        return f"{self.message} ({self.code})" if self.code else self.message


Step = dict[str, Any] | Failure | None
"""The result of a step in a writer's form, its failure, or None when it was left out."""


# -- requests --------------------------------------------------------------------------------------------------------


def encode_statement(sql: str, args: Sequence[Any]) -> dict[str, Any]:
    """Give a statement its form; raises `ValueError` for what has none, or would end the transaction around it."""
    _check_text(sql, len(args))
    encoded = [encode_value(value, place) for place, value in enumerate(check_arguments(args), 1)]
    [text] = check_arguments([sql])
    return {"sql": text, "args": encoded}


@lru_cache(maxsize=4096)
def _check_text(sql: str, count: int) -> None:
    check_statement(sql, "sqlite", arguments=count)


def encode_value(value: Any, place: int) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case int():
            if not _SMALLEST <= value <= _LARGEST:
                raise BadStatement(f"argument {place}: {str(value)[:100]} does not fit into 64 bits")
            return {"type": "integer", "value": str(int(value))}
        case float():
            if not math.isfinite(value):
                raise BadStatement(f"argument {place}: {value!r} has no form in JSON")
            return {"type": "float", "value": value}
        case bytes():
            return {"type": "blob", "base64": b64encode(value).decode("ascii")}
    return {"type": "text", "value": value}


def make_transaction(statements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All statements or none, as one request; its answer is read by `read_steps`."""
    steps: list[dict[str, Any]] = [{"stmt": {"sql": "BEGIN IMMEDIATE"}}]
    for statement in [*statements, {"sql": "COMMIT"}]:
        steps.append({"stmt": statement, "condition": _succeeded(len(steps) - 1)})
    undo = {"sql": "ROLLBACK"}
    steps.append({"stmt": undo, "condition": {"type": "not", "cond": _succeeded(len(steps) - 1)}})
    return {"type": "batch", "batch": {"steps": steps}}


def make_trial(statement: dict[str, Any]) -> dict[str, Any]:
    """A request that has a statement parsed and never run: its condition is a failure of SELECT 1."""
    first = {"stmt": {"sql": "SELECT 1"}}
    return {
        "type": "batch",
        "batch": {"steps": [first, {"stmt": statement, "condition": {"type": "error", "step": 0}}]},
    }


def make_body(requests: Sequence[Mapping[str, Any]]) -> bytes:
    """The requests on a stream of their own, which is closed after them."""
    return orjson.dumps({"baton": None, "requests": [*requests, _CLOSE]})


def _succeeded(step: int) -> dict[str, Any]:
    return {"type": "ok", "step": step}


# -- answers ---------------------------------------------------------------------------------------------------------


def read_answer(body: bytes, count: int) -> list[dict[str, Any] | Failure]:
    """The answer to each of `count` requests, without the one to close."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BrokenAnswer(f"it is not JSON: {error}") from error
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != count + 1:
        raise BrokenAnswer(f"expected {count + 1} results, got {_count(results)}")
    return [_read_response(each) for each in results[:count]]


def read_result(result: Any) -> dict[str, Any]:
    """A statement's result in a writer's form."""
    match result:
        case {"cols": [], "affected_row_count": int(affected)}:
            return {"ok": True, "rows_affected": affected}
        case {"cols": list(), "rows": list() as rows}:
            return {"ok": True, "rows": [[decode_value(each) for each in row] for row in rows]}
    raise BrokenAnswer("a result lacks its cols, rows or affected_row_count")


def read_steps(result: Mapping[str, Any], count: int) -> list[Step]:
    """What became of BEGIN, each of `count` statements, and COMMIT, in order."""
    width = count + 3
    results, errors = result.get("step_results"), result.get("step_errors")
    if not isinstance(results, list) or not isinstance(errors, list) or not len(results) == len(errors) == width:
        raise BrokenAnswer(f"expected {width} steps, got {_count(results)} results and {_count(errors)} errors")
    return [_read_step(done, failed) for done, failed in zip(results[:-1], errors[:-1], strict=True)]


def decode_value(value: Any) -> Any:
    match value:
        case {"type": "null"}:
            return None
        case {"type": "integer", "value": str(digits)}:
            return int(digits)
        case {"type": "float", "value": int() | float() as number}:
            return float(number)
        case {"type": "float", "value": None}:
            return math.nan  # an infinity, whose sign JSON could not tell
        case {"type": "text", "value": str(text)}:
            return text
        case {"type": "blob", "base64": str(digits)}:
            # Servers leave the padding out.
            return b64decode(digits + "=" * (-len(digits) % 4))
    raise BrokenAnswer(f"a row has a value of no known type: {str(value)[:100]}")


def _read_response(result: Any) -> dict[str, Any] | Failure:
    match result:
        case {"type": "ok", "response": {"result": dict() as found}}:
            return found
        case {"type": "error", "error": error}:
            return _read_failure(error)
    raise BrokenAnswer("a result is neither ok nor an error")


def _read_step(done: Any, failed: Any) -> Step:
    if failed is not None:
        return _read_failure(failed)
    return None if done is None else read_result(done)


def _read_failure(error: Any) -> Failure:
    match error:
        case {"message": str(message)}:
            return Failure(message, str(error.get("code") or ""))
    raise BrokenAnswer("an error has no message")


def _count(found: Any) -> str:
    return str(len(found)) if isinstance(found, list) else "none"
