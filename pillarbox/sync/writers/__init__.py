"""Writers: how statements reach a remote database.

A writer is any class with `async write_batch(statements)`. What it promises beyond that it says in attributes, which
are all optional; the built-in ones are chosen by the scheme of a URL.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, get_args
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError
from pillarbox.retry import describe_error
from pillarbox.urls import Secrets, mask_url
from pillarbox.values import check_known

Statement: TypeAlias = tuple[str, Sequence[Any]]
"""SQL with `?` for its arguments, and the arguments: None, bool, int, float, str, bytes, list or dict."""
Batches: TypeAlias = Literal["atomic", "ordered", "single"]
Dialect: TypeAlias = Literal["sqlite", "postgresql", "mysql"]


class Writer(Protocol):
    """Writes statements to one database.

    `write_batch` returns one dict a statement, in order: `{"ok": True, "rows_affected": 1}`, `{"ok": True, "rows":
    [[…], …]}` for a SELECT, `{"ok": False, "error": "…"}`. Raising means that the database cannot be reached or that
    nobody knows what was done: the whole batch is tried again.

    Optional attributes: `batches`, what one call is: `"atomic"` (one transaction, all or nothing), `"ordered"` (one
    after the other up to the first failure) or `"single"` (not known: it gets one statement a call); `dialect`,
    `"sqlite"`, `"postgresql"` or `"mysql"`; `concurrency`, how many calls may run at once; `async open()` and
    `async close()`. A failure may carry a `kind`: `"bad"` (it can never be written), `"later"` (it may be), `"down"`
    (as if it had been raised).
    """

    async def write_batch(self, statements: Sequence[Statement]) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class WriterTraits:
    """What a writer promises; a class that says nothing promises the least."""

    batches: Batches = "single"
    dialect: Dialect = "sqlite"
    concurrency: int = 1


def describe(writer: Writer) -> WriterTraits:
    """Read a writer's optional attributes; raises `ConfigError` for a value that means nothing."""
    name = type(writer).__name__
    batches: Any = getattr(writer, "batches", "single")
    dialect: Any = getattr(writer, "dialect", "sqlite")
    concurrency = getattr(writer, "concurrency", 1)
    for attribute, value, choices in (("batches", batches, get_args(Batches)), ("dialect", dialect, get_args(Dialect))):
        if value not in choices:
            raise ConfigError(f"Writer {name}.{attribute}: expected one of {', '.join(choices)}; got {value!r}")
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise ConfigError(f"Writer {name}.concurrency: expected a whole number of 1 or more; got {concurrency!r}")
    return WriterTraits(batches, dialect, concurrency)


# -- built-in writers ------------------------------------------------------------------------------------------------

_BUILT_IN: Final = {
    **dict.fromkeys(("postgresql", "postgres"), "pillarbox.sync.writers.postgres:PostgresWriter"),
    **dict.fromkeys(("mysql", "mariadb"), "pillarbox.sync.writers.mysql:MysqlWriter"),
    "sqlite": "pillarbox.sync.writers.sqlite:SqliteWriter",
    **dict.fromkeys(("libsql", "http", "https"), "pillarbox.sync.writers.libsql:LibsqlWriter"),
}


def open_writer(url: str, **options: Any) -> Writer:
    """Make the built-in writer for a URL; it connects when it first writes.

    `options` are what a configuration says beside the URL, such as `connections` and `timeout`. Raises `ConfigError`
    for a scheme or an option that is not known, and `MissingExtra` when the driver is not installed.
    """
    expected = f"expected a url with scheme {', '.join(_BUILT_IN)}"
    if not isinstance(url, str):
        raise ConfigError(f"Writer: {expected}; got {type(url).__name__}")
    try:
        scheme = urlsplit(url).scheme.partition("+")[0]
    except ValueError:
        raise ConfigError(f"Writer: {mask_url(url)!r} cannot be read; escape special characters with %") from None
    if scheme not in _BUILT_IN:
        raise ConfigError(f"Writer: {expected}; got {mask_url(url)!r}")
    module, _, name = _BUILT_IN[scheme].partition(":")
    made = getattr(import_module(module), name)
    known = [each for each in inspect.signature(made).parameters if each != "url"]
    for option in options:
        check_known(option, known, f"Writer {mask_url(url)!r}", kind="option")
    return cast(Writer, made(url, **options))


# -- classes of the user's -------------------------------------------------------------------------------------------


def load_writer_class(path: str) -> type[Writer]:
    """Import a writer class by `"module:Class"`; raises `ConfigError` naming what is not there or not as expected."""
    module_name, separator, name = path.partition(":")
    if not (separator and module_name and name):
        raise ConfigError(f"Writer class {path!r}: expected 'module:Class', such as 'shop.writers:TursoWriter'")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise ConfigError(f"Writer class {path!r}: module {module_name!r} needs {missing!r}: {error}") from error
        raise ConfigError(
            f"Writer class {path!r}: there is no module {missing!r}. Install it, or put it beside the configuration"
        ) from error
    except Exception as error:
        raise ConfigError(f"Writer class {path!r}: module {module_name!r} fails: {describe_error(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"Writer class {path!r}: module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not inspect.isclass(found):
        raise ConfigError(f"Writer class {path!r}: expected a class, got {type(found).__name__} {name!r}")
    if not inspect.iscoroutinefunction(getattr(found, "write_batch", None)):
        raise ConfigError(f"Writer class {path!r}: expected a method 'async def write_batch(self, statements)'")
    return cast(type[Writer], found)


def make_user_writer(path: str, connection: Mapping[str, Any]) -> Writer:
    """Make a writer of a user's class with the connection table as keyword arguments; errors show no values of it."""
    made = load_writer_class(path)
    try:
        inspect.signature(made).bind(**connection)
    except TypeError as error:
        keys = ", ".join(sorted(connection)) or "none"
        raise ConfigError(f"Writer class {path!r}: does not fit the keys of its connection ({keys}): {error}") from None
    except ValueError:
        pass  # a class without a signature: its constructor decides
    # Any of its values may be a secret, whatever its name.
    secrets = Secrets({"secrets": [str(value) for value in connection.values()]}, connection)
    try:
        return made(**connection)
    except Exception as error:
        raise ConfigError(
            f"Writer class {path!r}: its constructor failed: {secrets.hide(describe_error(error))}"
        ) from None
