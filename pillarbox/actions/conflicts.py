"""Which failures of an action are worth another try, and how many each gets.

An exception is looked up by its class, then by its superclasses; the most specific class that is named wins. If none
is, its `__cause__` is looked up, and so on: what was raised `from` a conflict is one. An exception that was merely
being handled, or was suppressed by `from None`, is not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.exc import StaleDataError

from pillarbox.errors import ConfigError
from pillarbox.retry import Constant, Failure, NoRetry, RetryPolicy, describe_error
from pillarbox.stores.sql import is_conflict

DELAY: Final = timedelta(milliseconds=100)


class DatabaseConflict(Exception):
    """Stands in a `retry` mapping for transactions that the database undid.

    That is a serialization failure, a deadlock or a lock that did not come in time. The class is never raised: the
    driver's own error is.
    """


# Its keys are exception classes; a mapping's type has no place for their subclasses.
Retries = Mapping[Any, RetryPolicy | int | None]
"""By class of the exception: a policy, how many retries after about 100 ms, or None for none."""

Policies = Mapping[type[Exception], RetryPolicy]

NO_RETRIES: Final[Policies] = MappingProxyType({})


def retry_after(count: int, delay: timedelta = DELAY) -> RetryPolicy:
    """So many retries, each after a delay with jitter."""
    return Constant(delay, max_attempts=count + 1, jitter=True) if count else NoRetry()


DEFAULT: Final[Policies] = MappingProxyType({StaleDataError: retry_after(1), DatabaseConflict: retry_after(1)})


def merge_policies(known: Policies, given: Retries | RetryPolicy | int | None) -> Policies:
    """Policies with what a mapping names changed; one policy or number is for all of them; None is for no retries."""
    if given is None:
        return NO_RETRIES
    if not isinstance(given, Mapping):
        chosen = _read_policy("retry", given)
        return dict.fromkeys({**DEFAULT, **known}, chosen)
    return {**known, **{_check_kind(kind): _read_policy(kind.__name__, each) for kind, each in given.items()}}


class Tries:
    """Counts the failures of one call, those of each named class by themselves."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._failures: Counter[type[Exception]] = Counter()

    def next_delay(self, error: Exception) -> timedelta | None:
        """How long to wait before the next try, or None to give up."""
        kind = find_kind(error, self._policies)
        if kind is None:
            return None
        self._failures[kind] += 1
        failure = Failure(self._failures[kind], describe_error(error), error)
        return self._policies[kind].next_delay(failure)


def find_kind(error: BaseException, policies: Policies) -> type[Exception] | None:
    """The class under which an exception, or what it was raised from, is named."""
    for each in _causes(error):
        if isinstance(each, DBAPIError) and DatabaseConflict in policies and is_conflict(each):
            return DatabaseConflict
        for kind in type(each).__mro__:
            if kind in policies:
                return kind
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__


def _check_kind(kind: object) -> type[Exception]:
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        raise ConfigError(f"Action retry: expected exception classes and their policies, got {kind!r}")
    return kind


def _read_policy(what: str, given: object) -> RetryPolicy:
    if given is None:
        return NoRetry()
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return retry_after(given)
    if not (hasattr(given, "next_delay") and hasattr(given, "max_attempts")):
        raise ConfigError(f"Action {what}: expected a retry policy, a number of retries or None; got {given!r}")
    policy: RetryPolicy = given
    return policy
