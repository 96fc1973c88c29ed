"""What the commands share: the options that choose a store and events, and what they lead to."""

from __future__ import annotations

import getpass
import inspect
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Protocol
from uuid import UUID

import typer

from pillarbox.cli.logs import set_up_logging
from pillarbox.cli.terminal import keep_secret
from pillarbox.config import Config, load_config
from pillarbox.durations import parse_duration
from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.sizes import parse_size
from pillarbox.stores import Filter
from pillarbox.stores.sql import SqlStore

Command = Callable[..., None]


class UsageError(PillarboxError):
    """The command line does not say what to do; exit code 2."""


class Load(Protocol):
    """Loads the settings; `overrides` are the command's own options by dotted key, None when not given."""

    def __call__(self, overrides: Mapping[str, object] = ...) -> Config: ...


# -- reading values ----------------------------------------------------------------------------------------


def parse_duration_option(text: str) -> timedelta:
    """Read a duration of the command line; a bad one is a usage error."""
    try:
        return parse_duration(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix("Duration: ")) from error


def parse_size_option(text: str) -> int:
    """Read a size of the command line; a bad one is a usage error."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix("Size: ")) from error


def parse_moment_option(text: str) -> datetime:
    """Read an ISO date or datetime, UTC unless it says otherwise, or how long ago: "2h"."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except ValueError:
        pass
    try:
        return datetime.now(UTC) - parse_duration(text)
    except (ConfigError, OverflowError) as error:
        raise typer.BadParameter(
            f"expected a time such as 2026-01-31T12:00, in UTC, or how long ago, such as 2h; got {text!r}"
        ) from error


def parse_id_option(text: str) -> UUID:
    """Read an event's id."""
    try:
        return UUID(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected an event's id, a UUID; got {text!r}") from error


def duration_option(*names: str, example: str, text: str) -> Any:
    return typer.Option(*names, parser=parse_duration_option, metavar=example, help=text)


def _moment_option(name: str, text: str) -> Any:
    return typer.Option(name, parser=parse_moment_option, metavar="TIME|AGO", help=text)


def default_actor() -> str:
    """Who is at work, for the audit table."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user of a container may have no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


# -- options that several commands have --------------------------------------------------------------------

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
ActorOption = Annotated[
    str | None, typer.Option("--actor", metavar="NAME", help="Who did it, for the audit table (user@host).")
]

_Option = tuple[Any, Any]  # its annotation and its default

_SETTINGS: Final[Mapping[str, _Option]] = {
    "store": (
        Annotated[
            str | None,
            typer.Option(
                "--store", metavar="URL", help="postgresql://…, mysql://…, sqlite:///file, or a store's name."
            ),
        ],
        None,
    ),
    "layout": (
        Annotated[str | None, typer.Option("--layout", metavar="NAME", help="The table's layout (pillarbox).")],
        None,
    ),
    "table": (
        Annotated[str | None, typer.Option("--table", metavar="[SCHEMA.]NAME", help="The outbox table (outbox).")],
        None,
    ),
    "config": (
        Annotated[
            Path | None,
            typer.Option("--config", metavar="FILE", help="Settings file (pillarbox.toml if it exists)."),
        ],
        None,
    ),
}

_RECIPIENT: Final[Mapping[str, _Option]] = {
    "recipient": (
        Annotated[
            str | None,
            typer.Option("--recipient", metavar="NAME", help="Only the rows for this sink or handler (all)."),
        ],
        None,
    ),
}

LOGGING: Final[Mapping[str, _Option]] = {
    "verbose": (
        Annotated[
            int,
            typer.Option("--verbose", "-v", count=True, show_default=False, help="Log more; -vv with tracebacks."),
        ],
        0,
    ),
    "quiet": (
        Annotated[
            int,
            typer.Option("--quiet", "-q", count=True, show_default=False, help="Log warnings only; -qq errors."),
        ],
        0,
    ),
}

_FILTER: Final[Mapping[str, _Option]] = {
    "ids": (
        Annotated[
            list[UUID] | None,
            typer.Option("--id", parser=parse_id_option, metavar="ID", help="This event; may be repeated."),
        ],
        None,
    ),
    "key": (Annotated[str | None, typer.Option("--key", metavar="TEXT", help="Events of this key.")], None),
    "topic": (
        Annotated[str | None, typer.Option("--topic", metavar="TEXT", help="Events of this topic.")],
        None,
    ),
    "type": (
        Annotated[str | None, typer.Option("--type", metavar="TEXT", help="Events of this type.")],
        None,
    ),
    "error": (
        Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Events whose error contains this.")],
        None,
    ),
    "since": (
        Annotated[
            datetime | None,
            _moment_option(
                "--since",
                "Put (died, delivered) since this UTC time, or since 2h ago.",
            ),
        ],
        None,
    ),
    "until": (
        Annotated[datetime | None, _moment_option("--until", "And before this time.")],
        None,
    ),
}


def takes_settings(function: Command) -> Command:
    """Add the options that choose a store; the command's parameter `load` reads the settings they lead to."""
    return _take_settings(function, _SETTINGS)


def takes_rows(function: Command) -> Command:
    """The same for a command that may be about the rows of one sink only."""
    return _take_settings(function, {**_SETTINGS, **_RECIPIENT})


def _take_settings(function: Command, options: Mapping[str, _Option]) -> Command:
    def make(chosen: Mapping[str, Any]) -> Load:
        set_up_logging(chosen["verbose"] - chosen["quiet"])
        names = {"store.url": "store", "store.layout": "layout", "store.table": "table", "store.recipient": "recipient"}
        store = {key: chosen[name] for key, name in names.items() if name in chosen}

        def load(overrides: Mapping[str, object] = MappingProxyType({})) -> Config:
            given = {**store, **overrides}
            keep_secret(*given.values())
            config = load_config(chosen["config"], overrides=given)
            sinks = (config.sink, *config.sinks.values())
            keep_secret(config.store.url, config.store.listen_url, *(each.url for each in config.stores.values()))
            keep_secret(config.source.url, config.source.options, *(each.url for each in sinks))
            # Where no url belongs.
            keep_secret(config.store.schema, config.store.table, config.handlers.registry)
            keep_secret(*(each.options for each in sinks))
            return config

        return load

    return add_options(function, "load", make, first=options, last=LOGGING)


def takes_filter(function: Command) -> Command:
    """Add the options that choose events; the command's parameter `where` is the filter they make."""

    def make(chosen: Mapping[str, Any]) -> Filter:
        return Filter(**{**chosen, "ids": tuple(chosen["ids"] or ())})

    return add_options(function, "where", make, first=_FILTER)


def add_options(
    function: Command,
    name: str,
    make: Callable[[Mapping[str, Any]], object],
    *,
    first: Mapping[str, _Option],
    last: Mapping[str, _Option] = MappingProxyType({}),
) -> Command:
    """Put options in the place of the parameter `name`, which gets what `make` makes of them."""

    @wraps(function)
    def command(**given: Any) -> None:
        chosen = {option: given.pop(option) for option in (*first, *last)}
        function(**{name: make(chosen)}, **given)

    # Typer reads a command's options from its signature.
    own = dict(inspect.signature(function, eval_str=True).parameters)
    del own[name]
    parameters = [*_parameters(first), *own.values(), *_parameters(last)]
    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters(options: Mapping[str, _Option]) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]


# -- the store ---------------------------------------------------------------------------------------------


def check_stores(config: Config) -> None:
    """Raise a usage error when nobody said which store."""
    if config.store.url is None and not config.stores:
        raise UsageError("No store given: use --store URL, PILLARBOX_STORE, or url under [store] in pillarbox.toml.")


def open_configured_store(config: Config, *, variant: str | None = None) -> SqlStore:
    """Make the store; it is a usage error when nobody said which."""
    check_stores(config)
    if config.stores:
        raise UsageError(f"Several stores: choose one with --store NAME: {', '.join(config.stores)}.")
    return config.open_store(variant=variant)


@asynccontextmanager
async def connect_parts(config: Config) -> AsyncIterator[dict[str, SqlStore]]:
    """Yield a store for the rows of each sink there is, by its name; "" are those that were not routed.

    With a recipient in the settings there is one only.
    """
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(connect(config))
        if config.store.recipient is not None:
            known = await describe_unknown_recipient(first, config)
            if known is not None:
                # A misspelt name is no empty answer.
                name = config.store.recipient
                raise ConfigError(f"Recipient {name!r}: there is no sink or handler of this name; {known}")
            yield {config.store.recipient: first}
            return
        parts = {"": first}
        for name in await first.sinks():
            if name:
                parts[name] = await stack.enter_async_context(connect(config.choose_recipient(name)))
        yield parts


async def describe_unknown_recipient(store: SqlStore, config: Config) -> str | None:
    """Say which recipients are known if the one in the settings has no rows, no settings and no handler; else None."""
    _check_file(store)
    wanted = config.store.recipient
    known = {*config.sinks, *(name for name in await store.sinks() if name)}
    # Rows may wait for one whose relay has never run, and for a handler that only its registry knows.
    if wanted in known or config.handlers.registry or await store.events(Filter(), limit=1):
        return None
    return f"known are {', '.join(sorted(known))}" if known else "no sink or handler has rows here"


@asynccontextmanager
async def connect(config: Config) -> AsyncIterator[SqlStore]:
    """Yield the store for one command of an operator: it connects at its first statement.

    Nothing is prepared for a relay, so that a user who may only read can look.
    """
    store = open_configured_store(config)
    try:
        _check_file(store)
        yield store
    finally:
        await store.close()


def _check_file(store: SqlStore) -> None:
    path = store.url.database or ""
    if store.dialect == "sqlite" and not Path(path).exists():
        raise ConfigError(f"Store {store.name}: there is no file {path!r}. Run `pillarbox schema create` first.")
