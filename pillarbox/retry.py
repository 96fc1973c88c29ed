"""When to try a failed event again, and when to give up.

A policy is a pure function of the failure: it keeps no state, so one policy serves every relay and every row.
"""

from __future__ import annotations

import builtins
import math
import random as randomness
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, ClassVar, Final, Protocol

from pillarbox.durations import grow, parse_duration
from pillarbox.errors import ConfigError
from pillarbox.errortext import ERROR_LENGTH as ERROR_LENGTH
from pillarbox.errortext import describe_error as describe_error

LONGEST_DELAY: Final = timedelta(days=3650)
MOST_ATTEMPTS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of a failed delivery.

    `attempt` counts from 1 and includes the failed one; `age` is the time since the event was put, when the
    table has it; `max_attempts` is the row's own limit and overrides the policy's.
    """

    attempt: int
    error: str = ""
    cause: BaseException | None = None
    age: timedelta | None = None
    max_attempts: int | None = None


class RetryPolicy(Protocol):
    """Says how long to wait after a failure.

    An implementer's obligations:
    - `next_delay` answers for any attempt number without raising, and keeps no state between calls.
    - It answers None at the latest when `failure.max_attempts` (or else `max_attempts`) tries have been made.
    """

    @property
    def max_attempts(self) -> int | None:
        """The most tries an event can get, None when there is no limit."""

    def next_delay(self, failure: Failure) -> timedelta | None:
        """Return how long to wait before the next try, or None to give the event up as dead."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """Wait up to `first`, then `factor` times as long after each failure, never longer than `cap`.

    With `jitter` the delay is drawn evenly from zero to that bound, so that events which failed together do
    not come back together. `max_attempts` and `max_age` say when to give up; None says never.
    """

    first: timedelta = timedelta(seconds=1)
    factor: float = 2
    _: KW_ONLY
    cap: timedelta = timedelta(minutes=5)
    max_attempts: int | None = 20
    max_age: timedelta | None = None
    jitter: bool = True
    random: Callable[[], float] = field(default=randomness.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_delay(self, "first", self.first)
        _check_delay(self, "cap", self.cap, least=self.first)
        _check_factor(self.factor)
        _check_limits(self)

    def next_delay(self, failure: Failure) -> timedelta | None:
        if _gives_up(self, failure):
            return None
        bound = grow(self.first, factor=self.factor, steps=failure.attempt - 1, cap=self.cap)
        return bound * self.random() if self.jitter else bound


@dataclass(frozen=True, slots=True)
class Linear:
    """Wait `first`, then `step` longer after each failure, never longer than `cap`."""

    first: timedelta = timedelta(seconds=1)
    step: timedelta = timedelta(seconds=1)
    _: KW_ONLY
    cap: timedelta = timedelta(minutes=5)
    max_attempts: int | None = 20
    max_age: timedelta | None = None
    jitter: bool = False
    random: Callable[[], float] = field(default=randomness.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_delay(self, "first", self.first)
        _check_delay(self, "step", self.step)
        _check_delay(self, "cap", self.cap, least=self.first)
        _check_limits(self)

    def next_delay(self, failure: Failure) -> timedelta | None:
        if _gives_up(self, failure):
            return None
        # No more steps than fit below the cap: a timedelta overflows long before an attempt number does.
        steps = max(0, min(failure.attempt - 1, (self.cap - self.first) // self.step + 1))
        bound = min(self.cap, self.first + steps * self.step)
        return bound * self.random() if self.jitter else bound


@dataclass(frozen=True, slots=True)
class Constant:
    """Wait the same time after each failure."""

    delay: timedelta = timedelta(seconds=10)
    _: KW_ONLY
    max_attempts: int | None = 20
    max_age: timedelta | None = None
    jitter: bool = False
    random: Callable[[], float] = field(default=randomness.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_delay(self, "delay", self.delay)
        _check_limits(self)

    def next_delay(self, failure: Failure) -> timedelta | None:
        if _gives_up(self, failure):
            return None
        return self.delay * self.random() if self.jitter else self.delay


@dataclass(frozen=True, slots=True)
class NoRetry:
    """Give up at the first failure, whatever the row's own limit says."""

    max_attempts: ClassVar[int] = 1

    def next_delay(self, failure: Failure) -> timedelta | None:
        return None


class ByException:
    """Choose the policy by the class of the exception; the most specific class wins, None gives up at once.

    A class may be named by its dotted name, as in a configuration file: under the module that defines it or
    under any imported module that exports it. A failure without an exception goes to `default`.
    """

    def __init__(
        self,
        policies: Mapping[type[BaseException] | str, RetryPolicy | None],
        default: RetryPolicy | None,
    ) -> None:
        for kind, policy in policies.items():
            _check_exception(kind)
            _check_policy(f"ByException {kind!r}", policy)
        _check_policy("ByException default", default)
        self.policies = {kind: policy or NoRetry() for kind, policy in policies.items()}
        self.default = default or NoRetry()

    def __repr__(self) -> str:
        return f"ByException({self.policies!r}, default={self.default!r})"

    @property
    def max_attempts(self) -> int | None:
        limits = [policy.max_attempts for policy in (*self.policies.values(), self.default)]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    def next_delay(self, failure: Failure) -> timedelta | None:
        return self._choose(failure.cause).next_delay(failure)

    def _choose(self, cause: BaseException | None) -> RetryPolicy:
        for kind in type(cause).__mro__ if cause is not None else ():
            if kind in self.policies:
                return self.policies[kind]
            for name, policy in self.policies.items():
                if isinstance(name, str) and _is_named(kind, name):
                    return policy
        return self.default


def parse_policy(value: object, *, what: str = "Retry policy") -> RetryPolicy:
    """Read a policy from configuration: a kind ("exponential") or a table with `kind` and its parameters.

    Durations are texts such as "30s"; `max_attempts = "unlimited"` never gives up. A `by_exception` table has
    `exceptions`, a table of dotted names to policies, and `default`. `what` names the policy in errors.
    """
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: expected a kind such as 'exponential', or a table with a kind; got {value!r}")
    options = dict(value)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{what}: expected kind {_either(_KINDS)}; got {kind!r}{_hint(kind, _KINDS)}")
    known = _KINDS[kind]
    for name in options:
        if name not in known:
            expected = _either(known) if known else "none"
            raise ConfigError(
                f"{what}: unknown option {name!r} of kind {kind!r}; expected {expected}{_hint(name, known)}"
            )
    if kind == "none":
        return NoRetry()
    if kind == "by_exception":
        return _parse_by_exception(options, what)
    arguments = {name: _parse_option(name, option, f"{what} {name}") for name, option in options.items()}
    try:
        return _CLASSES[kind](**arguments)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


_CLASSES: Final[Mapping[str, Callable[..., RetryPolicy]]] = {
    "exponential": Exponential,
    "linear": Linear,
    "constant": Constant,
}


def _list_options(kind: type[Exponential | Linear | Constant]) -> tuple[str, ...]:
    return tuple(option.name for option in fields(kind) if option.name != "random")


_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "exponential": _list_options(Exponential),
    "linear": _list_options(Linear),
    "constant": _list_options(Constant),
    "none": (),
    "by_exception": ("exceptions", "default"),
}


def _parse_option(name: str, value: object, what: str) -> object:
    if name in ("factor", "jitter"):
        return value
    if name == "max_attempts":
        return None if value == "unlimited" else value
    return parse_duration(value, what=what)


def _parse_by_exception(options: dict[str, Any], what: str) -> ByException:
    exceptions = options.get("exceptions", {})
    if not isinstance(exceptions, Mapping):
        raise ConfigError(f"{what} exceptions: expected a table of exception names to policies, got {exceptions!r}")
    return ByException(
        {name: parse_policy(policy, what=f"{what} for {name!r}") for name, policy in exceptions.items()},
        default=parse_policy(options.get("default", "exponential"), what=f"{what} default"),
    )


def _gives_up(policy: Exponential | Linear | Constant, failure: Failure) -> bool:
    limit = policy.max_attempts if failure.max_attempts is None else failure.max_attempts
    if limit is not None and failure.attempt >= limit:
        return True
    return policy.max_age is not None and failure.age is not None and failure.age >= policy.max_age


def _is_named(kind: type, name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if kind.__qualname__ == attribute and kind.__module__ == (module or "builtins"):
        return True
    return any(found is kind for found in _find_imported(name))


def _find_imported(name: str) -> Iterator[object]:
    parts = name.split(".")
    for split in range(1, len(parts)):
        found: object = sys.modules.get(".".join(parts[:split]))
        for part in parts[split:]:
            found = getattr(found, part, None)
        yield found


def _check_delay(policy: object, name: str, value: object, *, least: timedelta | None = None) -> None:
    what = f"{type(policy).__name__} {name}"
    if not isinstance(value, timedelta):
        raise ConfigError(f"{what}: expected a timedelta, got {value!r}")
    if not timedelta(0) < value <= LONGEST_DELAY:
        raise ConfigError(f"{what}: expected above zero and at most {LONGEST_DELAY.days} days, got {value!r}")
    if least is not None and value < least:
        raise ConfigError(f"{what}: expected at least the first delay, {least!r}; got {value!r}")


def _check_limits(policy: Exponential | Linear | Constant) -> None:
    what = type(policy).__name__
    if policy.max_attempts is not None:
        _check_attempts(what, policy.max_attempts)
    age: object = policy.max_age
    if age is not None and not (isinstance(age, timedelta) and age > timedelta(0)):
        raise ConfigError(f"{what} max_age: expected a timedelta above zero, or None for never; got {age!r}")
    if not isinstance(policy.jitter, bool):
        raise ConfigError(f"{what} jitter: expected true or false, got {policy.jitter!r}")


def _check_attempts(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_ATTEMPTS:
        raise ConfigError(
            f"{what} max_attempts: expected a whole number from 1 to {MOST_ATTEMPTS}, or None for no limit; "
            f"got {value!r}"
        )


def _check_factor(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value < math.inf:
        raise ConfigError(f"Exponential factor: expected a number of 1 or more, got {value!r}")


def _check_exception(kind: object) -> None:
    if isinstance(kind, str) and "." in kind:
        return
    named = getattr(builtins, kind, None) if isinstance(kind, str) else kind
    if not isinstance(named, type) or not issubclass(named, BaseException):
        raise ConfigError(
            f"ByException: expected an exception class or its dotted name, such as 'httpx.ConnectError'; got {kind!r}"
        )


def _check_policy(what: str, policy: object) -> None:
    if policy is not None and not (hasattr(policy, "next_delay") and hasattr(policy, "max_attempts")):
        raise ConfigError(f"{what}: expected a retry policy or None, got {policy!r}")


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _hint(name: object, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f" (did you mean {near[0]!r}?)" if near else ""
