"""Whether a user may create tables, asked before the first is made: MySQL and MariaDB cannot take a half back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from pillarbox.errors import SchemaError
from pillarbox.schema.mysql import quote_account
from pillarbox.schema.shape import family_of

_DENIED = (1044, 1142, 1143)


@contextmanager
def needs_rights(db: sa.Connection, schema: str | None) -> Iterator[None]:
    """Raise `SchemaError` with the GRANT that is missing, before the statements run where that can be known."""
    family = family_of(db.dialect)
    if family == "postgresql":
        _check_postgres(db, schema)
    elif family == "mysql":
        _check_mysql(db, schema)
    try:
        yield
    except DBAPIError as error:
        number = error.orig.args[0] if error.orig is not None and error.orig.args else None
        if family != "mysql" or number not in _DENIED:
            raise
        raise _denied_mysql(db, schema) from error


def _check_postgres(db: sa.Connection, schema: str | None) -> None:
    chosen, user, quoted_user = db.exec_driver_sql(
        "SELECT current_schema(), current_user, quote_ident(current_user)"
    ).one()
    chosen = schema or chosen
    if chosen is None:
        raise SchemaError(
            f"User {user!r} has no schema to create tables in: none of its search_path exists. Name one: --table "
            "SCHEMA.NAME"
        )
    query = "SELECT has_schema_privilege(oid, 'CREATE'), quote_ident(nspname) FROM pg_namespace WHERE nspname = :schema"
    may_create, quoted = db.execute(sa.text(query), {"schema": chosen}).one()
    if not may_create:
        raise SchemaError(
            f"User {user!r} may not create tables in schema {chosen!r}. Let its owner run: GRANT CREATE ON SCHEMA "
            f"{quoted} TO {quoted_user}; or let somebody else run the statements of `pillarbox schema sql`."
        )


def _check_mysql(db: sa.Connection, schema: str | None) -> None:
    database = schema or db.exec_driver_sql("SELECT DATABASE()").scalar_one()
    held: set[str] = set()
    for (line,) in db.exec_driver_sql("SHOW GRANTS"):
        match = re.match(r"GRANT (.+?) ON (\*|`[^`]*`)\.(\*|`[^`]*`) TO ", line)
        if match is None:
            return  # a role, or something taken away: only trying tells
        rights = {word.strip() for word in match[1].split(",")}
        if match[3] != "*" and rights & {"CREATE", "INDEX", "ALL PRIVILEGES"}:
            return  # perhaps on these very tables
        if match[3] == "*" and (match[2] == "*" or _covers(match[2][1:-1], str(database))):
            held |= rights
    if "ALL PRIVILEGES" not in held and not {"CREATE", "INDEX"} <= held:
        raise _denied_mysql(db, schema)


def _covers(pattern: str, name: str) -> bool:
    parts = re.findall(r"\\.|.", pattern)
    wild = {"%": ".*", "_": "."}
    regex = "".join(wild.get(part) or re.escape(part.removeprefix("\\")) for part in parts)
    return re.fullmatch(regex, name) is not None


def _denied_mysql(db: sa.Connection, schema: str | None) -> SchemaError:
    database, user = db.exec_driver_sql("SELECT DATABASE(), CURRENT_USER()").one()
    chosen = schema or database
    # In a grant the name is a pattern, in which both characters match others.
    name = "`" + chosen.replace("`", "``").replace("_", "\\_").replace("%", "\\%") + "`"
    return SchemaError(
        f"User {user!r} may not create tables and indexes in database {chosen!r}. Let its owner run: GRANT SELECT, "
        f"CREATE, INDEX ON {name}.* TO {quote_account(user)}; or let somebody else run the statements of `pillarbox "
        "schema sql`."
    )
