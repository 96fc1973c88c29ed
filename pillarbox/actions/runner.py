"""Functions as actions: the body of an action that can be run again when its transaction lost a conflict."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, overload

from sqlalchemy.orm import Session

from pillarbox.actions.action import Action, Call
from pillarbox.actions.conflicts import Policies, Retries, Tries, merge_policies
from pillarbox.actions.scope import ActionScope, Books
from pillarbox.actions.spans import Span
from pillarbox.retry import RetryPolicy

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

P = TypeVar("P")
R = TypeVar("R")

Retry = Retries | RetryPolicy | int | None


class _Unchanged:
    def __repr__(self) -> str:
        return "…"


UNCHANGED: Final = _Unchanged()
"""Where no retry is given, that of the function or of the log counts."""

MakeCall = Callable[[str, object, str | None, str | None], Call]


class _Runner:
    def __init__(
        self, function: Callable[..., Any], *, name: str, books: Books, make_call: MakeCall, policies: Policies
    ) -> None:
        # First: it copies the function's own attributes.
        update_wrapper(self, function)  # type: ignore[arg-type]
        self.name = name
        self._function = function
        self._books = books
        self._make_call = make_call
        self._policies = policies

    def _tries(self, retry: Retry | _Unchanged, session: object) -> Tries:
        # In the caller's transaction nothing can be run again.
        if session is not None:
            return Tries({})
        return Tries(self._policies if isinstance(retry, _Unchanged) else merge_policies(self._policies, retry))


class AsyncRunner(_Runner, Generic[P, R]):
    """An asynchronous function as an action: call it with the parameters, as often as the action is done."""

    async def __call__(
        self,
        params: P,
        *,
        actor: str | None = None,
        idempotency_key: str | None = None,
        session: AsyncSession | None = None,
        retry: Retry | _Unchanged = UNCHANGED,
    ) -> R:
        """Do the action and return the function's result; `session` joins it to a transaction of the caller's.

        After a conflict the function is called again, with another session, action id and start. `retry` says for this
        call what else it would be for the function. In a joined session nothing is tried again.
        """
        call = self._make_call(self.name, params, actor, idempotency_key)
        tries, span = self._tries(retry, session), Span(call)
        try:
            while True:
                try:
                    async with ActionScope(self._books, call, session, span=span) as act:
                        result: R = await self._function(act, params)
                except Exception as error:
                    delay = tries.next_delay(error)
                    if delay is None:
                        raise
                    span.note_retry(error)
                else:
                    break
                await asyncio.sleep(delay.total_seconds())
        except BaseException as error:
            span.end(error)
            raise
        span.end(None)
        return result


class SyncRunner(_Runner, Generic[P, R]):
    """A function as an action: call it with the parameters, as often as the action is done."""

    def __call__(
        self,
        params: P,
        *,
        actor: str | None = None,
        idempotency_key: str | None = None,
        session: Session | None = None,
        retry: Retry | _Unchanged = UNCHANGED,
    ) -> R:
        """`AsyncRunner.__call__` for functions that are not asynchronous."""
        call = self._make_call(self.name, params, actor, idempotency_key)
        tries, span = self._tries(retry, session), Span(call)
        try:
            while True:
                try:
                    with ActionScope(self._books, call, session, span=span) as act:
                        result: R = self._function(act, params)
                        _check_result(result, self.name)
                except Exception as error:
                    delay = tries.next_delay(error)
                    if delay is None:
                        raise
                    span.note_retry(error)
                else:
                    break
                time.sleep(delay.total_seconds())
        except BaseException as error:
            span.end(error)
            raise
        span.end(None)
        return result


class Decorator(Protocol):
    """Makes a runner of a function `(act, params)`."""

    @overload
    def __call__(self, function: Callable[[Action[AsyncSession], P], Awaitable[R]], /) -> AsyncRunner[P, R]: ...

    @overload
    def __call__(self, function: Callable[[Action[Session], P], R], /) -> SyncRunner[P, R]: ...


def make_runner(function: Callable[..., Any], *, name: str, **options: Any) -> Any:
    forms = (function, type(function).__call__)
    if any(inspect.isgeneratorfunction(form) or inspect.isasyncgenfunction(form) for form in forms):
        raise TypeError(
            f"Action {name!r}: expected a function that does the action when it is called or awaited, got a generator "
            f"function, {function!r}. Return a list instead of yielding."
        )
    is_async = any(inspect.iscoroutinefunction(form) for form in forms)
    return AsyncRunner(function, name=name, **options) if is_async else SyncRunner(function, name=name, **options)


def _check_result(result: object, name: str) -> None:
    if not inspect.isawaitable(result):
        return
    if inspect.iscoroutine(result):
        result.close()  # it never runs
    raise TypeError(
        f"Action {name!r}: its function returned something to await, {result!r}, which would be done after the end of "
        "the action. Make it an `async def`."
    )
