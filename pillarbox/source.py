"""Where settings come from: the command line, else the environment, else the file; see `config`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from pillarbox.errors import ConfigError
from pillarbox.topology import TABLES
from pillarbox.values import Given, Read, check_known, fill, show

PREFIX: Final = "PILLARBOX_"


class Known(NamedTuple):
    """What may be given: the keys of each table with their readers, and the variables with the key each overrides."""

    sections: Mapping[str, Mapping[str, Read]]
    variables: Mapping[str, str]

    def variable_of(self, dotted: str) -> str:
        return next((variable for variable, key in self.variables.items() if key == dotted), "")


class Source:
    """What was given: on the command line, in the environment, in the file.

    The file's texts are filled in when they are asked for: what is overridden needs no variables.
    """

    def __init__(
        self,
        name: str,
        document: Mapping[str, Any],
        variables: Mapping[str, str],
        overrides: Mapping[str, object],
        known: Known,
        *,
        where: str | None = None,
    ) -> None:
        self._known = known
        self._where = where
        self.name = name
        self._document = document
        self._variables = variables
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        self._check()

    def _check(self) -> None:
        for key in self._overrides:
            check_known(key, self._known.variables.values(), "Override")
        for variable in self._variables:
            # Names that are not near one of ours may belong to somebody else.
            ours = self._known.variables
            if variable.startswith(PREFIX) and get_close_matches(variable, ours, n=1, cutoff=0.92):
                check_known(variable, ours, "Environment", kind="variable")
        for section, value in self._document.items():
            check_known(section, [*self._known.sections, *TABLES, "retry"], self.name, kind="table")
            if not isinstance(value, dict) and section not in ("retry", "routes"):
                raise ConfigError(f"{self.name}: expected a table [{section}], got {show(value)}")
            if section in self._known.sections and section not in ("sink", "source"):
                for key in value:
                    check_known(key, self._known.sections[section], self._where or f"{self.name}, [{section}]")

    def find(self, dotted: str) -> Given | None:
        """The value that counts: of the command line, else of the environment, else of the file."""
        if dotted in self._overrides:
            return Given(self._overrides[dotted], dotted)
        # A variable says nothing of one among several stores or sinks.
        variable = "" if self._where else self._known.variable_of(dotted)
        if self._variables.get(variable):
            return Given(self._variables[variable], variable, rank=1, is_text=True)
        section, _, key = dotted.partition(".")
        table = self._document.get(section)
        if table is None or (key and key not in table):
            return None
        value = table[key] if key else table
        where = f"{self._where or f'{self.name}, [{section}]'} {key}".rstrip()
        filled = fill(value, self._variables, where)
        return Given(filled, where, rank=2, is_text=filled != value)

    def read(self, section: str) -> dict[str, Any]:
        found = {key: (self.find(f"{section}.{key}"), read) for key, read in self._known.sections[section].items()}
        return {key: read(given) for key, (given, read) in found.items() if given is not None}

    def filled(self, section: str) -> dict[str, Any]:
        """A table or a list of tables, with its variables filled in."""
        if section not in self._document:
            return {}
        return {section: fill(self._document[section], self._variables, f"{self.name}, [{section}]")}

    def split(self, section: str) -> dict[str, Source]:
        """The tables of `[stores.NAME]` or `[sinks.NAME]`, each as if it were the only one."""
        single = section.removesuffix("s")
        parts: dict[str, Source] = {}
        for name, table in self._document.get(section, {}).items():
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{self.name}, [{section}]: expected tables [{section}.NAME], got {name} = {show(table)}"
                )
            where = f"{self.name}, [{section}.{name}]"
            parts[name] = Source(self.name, {single: table}, self._variables, {}, self._known, where=where)
        return parts

    def choose_store(self, stores: dict[str, Source]) -> str | None:
        """The one of several stores that was named instead of a url; other settings of a store are then its own."""
        given = {key: value for key, value in self._overrides.items() if key.startswith("store.")}
        name = given.pop("store.url", None)
        if not stores or (not given and name is None):
            return None
        if not isinstance(name, str) or name not in stores:
            what = f"{name!r}" if name is not None else f"{next(iter(given))} = {next(iter(given.values()))!r}"
            raise ConfigError(f"{self.name} has several stores; choose one by name ({', '.join(stores)}), got {what}")
        for key in list(self._overrides):
            if key.startswith("store."):
                del self._overrides[key]
        stores[name]._overrides.update(given)
        return name

    def names(self, section: str) -> list[str]:
        return list(self._document.get(section, {}))
