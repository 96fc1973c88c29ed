"""A function of this process as a sink, called once an event."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.errortext import describe_failure
from pillarbox.event import DELIVERED, Claim, Dead, Delivered, Outcome, Released, Retry
from pillarbox.sinks import Sink
from pillarbox.sinks.order import group_by_key
from pillarbox.sinks.threads import finish
from pillarbox.sinks.workers import send_groups


class Submitting(Protocol):
    """A thread, or several."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]: ...


class CallableSink(Sink):
    """Calls a function with each event: one at a time a key, up to `concurrency` keys at once.

    The function is async or sync and takes the `Event`, or the `Claim` if its parameter is annotated so.
    Returning None means delivered; it may return an `Outcome` instead. Raising means `Retry`, except for
    `SinkUnavailable`: no further call is started, those running end, and the exception goes on with the
    outcomes won so far.

    A sync function runs in a thread and cannot be stopped. A cancelled delivery therefore waits for the
    calls that run, so that they do not act on claims given back; a second cancellation does not wait. After
    `timeout` its event is retried while the old call may still run, and keeps its place among `concurrency`
    until it ends: a sync function does better to limit what it waits for itself. An async function is
    cancelled at its timeout.
    """

    is_quick: bool = False

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        concurrency: int = 16,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> None:
        called = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.name = name or f"callable:{getattr(function, '__module__', None) or '?'}.{called}"
        _check_limits(self.name, concurrency, timeout)
        self._function = function
        self._takes_claim = _takes_claim(function, self.name)
        self._is_async = _is_async(function)
        self._concurrency = concurrency
        self._timeout = timeout
        self._slots = asyncio.Semaphore(concurrency)
        self._threads: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        pass

    async def check(self) -> None:
        pass

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        async def send(step: Sequence[Claim]) -> Sequence[Outcome]:
            return [await self._judge(self._perform(step[0]))]

        return await send_groups(claims, group_by_key(claims), send, slots=self._slots, width=self._concurrency)

    async def close(self) -> None:
        """Let the threads go; a call that still runs after its timeout ends on its own."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def _judge(self, call: Awaitable[object]) -> Outcome:
        """Await a call and say what became of its event."""
        try:
            outcome = judge_result(await call, self.name)
        except SinkUnavailable:
            raise
        except asyncio.CancelledError as error:
            # A function may raise this of its own, say from a task of its own that was cancelled.
            if _is_cancelled():
                raise
            outcome = Retry(describe_failure(error), cause=error)
        except (Exception, SystemExit) as error:
            outcome = Retry(describe_failure(error), cause=error)
        if _is_cancelled():
            raise asyncio.CancelledError  # the function swallowed it
        return outcome

    async def _perform(self, claim: Claim) -> object:
        """Call the function in a slot that the caller has taken and this gives back."""
        return await self._apply(claim if self._takes_claim else claim.event)

    async def _apply(self, argument: object) -> object:
        """Call the function and give the slot back."""
        return await (self._call_async(argument) if self._is_async else self._call_in_thread(argument))

    async def _call_async(self, argument: object) -> object:
        try:
            return await self._limit(self._function(argument))
        finally:
            self._slots.release()

    async def _call_in_thread(self, argument: object, thread: Submitting | None = None) -> object:
        context = contextvars.copy_context()
        try:
            call = (thread or self._get_threads()).submit(context.run, _catch, self._function, argument)
        except RuntimeError:  # the interpreter is going down
            self._slots.release()
            raise
        work = asyncio.wrap_future(call)
        # Not when the wait ends but when the thread does: a slot is a free thread.
        work.add_done_callback(lambda _: self._slots.release())
        seconds = None if self._timeout is None else self._timeout.total_seconds()
        try:
            result, error = await finish(work, call.cancel, timeout=seconds)
        except TimeoutError:
            raise self._timed_out() from None
        if error is not None:
            raise error
        # A sync function may hand back a coroutine, as a lambda around an async one does.
        return await self._limit(result) if inspect.isawaitable(result) else result

    def _get_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="pillarbox-sink")
        return self._threads

    async def _limit(self, awaitable: Awaitable[object]) -> object:
        if self._timeout is None:
            return await awaitable
        limit = asyncio.timeout(self._timeout.total_seconds())
        try:
            async with limit:
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise self._timed_out() from None
            raise

    def _timed_out(self) -> TimeoutError:
        assert self._timeout is not None
        return TimeoutError(f"Sink {self.name!r}: no answer within {format_duration(self._timeout)}")


def _catch(function: Callable[..., Any], argument: object) -> tuple[object, BaseException | None]:
    # Exceptions as values: a StopIteration that is set on a future would leave its waiter waiting.
    try:
        return function(argument), None
    except StopIteration as error:
        wrapped = RuntimeError("function raised StopIteration")
        wrapped.__cause__ = error
        return None, wrapped
    except BaseException as error:
        return None, error


def judge_result(result: object, name: str) -> Outcome:
    if result is None:
        return DELIVERED
    if isinstance(result, Delivered | Retry | Dead | Released):
        return result
    raise TypeError(f"Sink {name!r}: expected None or an outcome from its function, got {result!r}")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _takes_claim(function: Callable[..., Any], name: str) -> bool:
    try:
        signature = _read_signature(function)
    except ValueError:  # a builtin without a signature
        return False
    try:
        bound = signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"Sink {name!r}: expected a function that can be called with one Event or Claim; "
            f"got one that takes {signature}"
        ) from error
    parameter = signature.parameters[next(iter(bound.arguments))]
    annotation = parameter.annotation
    return annotation is Claim or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Claim")


def _read_signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError):
        # An annotation may name what is imported for type checkers only; then its text has to do.
        return inspect.signature(function)


def _check_limits(name: str, concurrency: object, timeout: object) -> None:
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise ConfigError(f"Sink {name!r} concurrency: expected a whole number of 1 or more, got {concurrency!r}")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ConfigError(f"Sink {name!r} timeout: expected a timedelta above zero or None, got {timeout!r}")
