"""The GRANT that is missing when a database says that a user may not do something."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

ASK_ACCOUNT: Final = sa.text("SELECT CURRENT_USER()")
"""What MySQL and MariaDB answer with the account of a connection, whose host need not be the client's."""

_MYSQL_TABLE = re.compile(
    r"([A-Z ,]+?) command denied to user '(.*?)'@'(.*?)' for (?:table|column .*? in table) [`']?(.+)"
)
_MYSQL_DATABASE = re.compile(r"Access denied for user '(.*?)'@'(.*?)' to database '(.*)'")
_POSTGRES = re.compile(r"permission denied for (table|relation|sequence|schema) (\S+)")


def find_grant(error: DBAPIError, user: str | None, tables: Iterable[sa.Table]) -> str | None:
    """The statement for the owner of the tables, or None when the error is about something else."""
    text = str(error.orig)
    named = {table.name: table.fullname for table in tables}
    match = _MYSQL_TABLE.search(text)
    if match:
        # Whoever may change rows must read them, too; the name has no database where the server leaves it out.
        rights = ", ".join(dict.fromkeys(["SELECT", *match[1].strip().split(", ")]))
        name = re.split(r"[`'\")]", match[4].rpartition(".")[2].strip("`'"))[0]
        owner, _, host = (user or "").rpartition("@")
        account = f"'{owner}'@'{host}'" if owner else f"'{match[2]}'@'{match[3]}'"
        return f"GRANT {rights} ON {named.get(name, name)} TO {account}"
    match = _MYSQL_DATABASE.search(text)
    if match:
        return f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{match[3]}`.* TO '{match[1]}'@'{match[2]}'"
    match = _POSTGRES.search(text)
    if match is None:
        return None
    kind, name, grantee = match[1], match[2].strip('"'), _quote(user) if user else "CURRENT_USER"
    if kind in ("schema", "sequence"):
        return f"GRANT USAGE ON {kind.upper()} {_quote(name)} TO {grantee}"
    return f"GRANT {', '.join(_rights_for(error.statement or ''))} ON {named.get(name, _quote(name))} TO {grantee}"


def is_account_needed(error: DBAPIError) -> bool:
    """Whether the error names the user by the host that it came from, which need not be the account's."""
    return _MYSQL_TABLE.search(str(error.orig)) is not None


def _rights_for(statement: str) -> list[str]:
    """What a statement does to tables; one that locks rows needs the right to change them."""
    words = set(re.findall(r"\b(INSERT|UPDATE|DELETE)\b", statement.upper()))
    return ["SELECT", *(right for right in ("INSERT", "UPDATE", "DELETE") if right in words)]


def _quote(name: str) -> str:
    return name if re.fullmatch(r"[a-z_][a-z0-9_$]*", name) else '"' + name.replace('"', '""') + '"'
