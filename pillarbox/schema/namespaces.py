"""Schemas of PostgreSQL and databases of MySQL and MariaDB: creating one when asked to, and the right that it takes."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from pillarbox.errors import SchemaError
from pillarbox.schema.ddl import quote_name, schema_statement

_MYSQL_ACCESS_DENIED = 1044
_MYSQL_RIGHTS = "CREATE, INDEX, SELECT, INSERT, UPDATE, DELETE"


def missing_grant(dialect: str, user: str, schema: str, *, database: str | None = None) -> str:
    """The statement an administrator runs so that a user may create a schema and tables in it.

    On MySQL and MariaDB a user is `name@host`. On PostgreSQL the right to create a schema belongs to a `database`;
    without one the statement is for a schema that is there.
    """
    if dialect == "postgresql":
        role = quote_name(dialect, user)
        if database is None:
            return f"GRANT USAGE, CREATE ON SCHEMA {quote_name(dialect, schema)} TO {role}"
        return f"GRANT CREATE ON DATABASE {quote_name(dialect, database)} TO {role}"
    name, _, host = user.rpartition("@") if "@" in user else (user, "", "%")
    # In a grant the name is a pattern, in which both characters match others.
    pattern = schema.replace("`", "``").replace("_", "\\_").replace("%", "\\%")
    return f"GRANT {_MYSQL_RIGHTS} ON `{pattern}`.* TO {_text(name)}@{_text(host)}"


def create_schema(db: sa.Connection, schema: str) -> bool:
    """Create a schema or database unless it is there, and say whether it is new.

    Raises `SchemaError`, which holds the GRANT that is missing, when the user may not create it or tables in it. On
    PostgreSQL it is part of the caller's transaction; MySQL and MariaDB commit that.
    """
    if db.dialect.name == "sqlite":
        raise SchemaError(f"Schema {schema!r}: SQLite has no schemas; name the table alone")
    if db.dialect.name == "postgresql":
        return _create_on_postgres(db, schema)
    return _create_on_mysql(db, schema)


def _create_on_postgres(db: sa.Connection, schema: str) -> bool:
    user, database, may_create = db.execute(
        sa.text("SELECT current_user, current_database(), has_database_privilege(current_database(), 'CREATE')")
    ).one()
    may_use = db.execute(
        sa.text(
            "SELECT has_schema_privilege(oid, 'USAGE') AND has_schema_privilege(oid, 'CREATE') "
            "FROM pg_namespace WHERE nspname = :schema"
        ),
        {"schema": schema},
    ).scalar()
    if may_use is None:
        if not may_create:
            raise _refused(user, "create schema", schema, missing_grant("postgresql", user, schema, database=database))
        _run(db, schema_statement("postgresql", schema))
        return True
    if not may_use:
        raise _refused(user, "create tables in schema", schema, missing_grant("postgresql", user, schema))
    return False


def _create_on_mysql(db: sa.Connection, schema: str) -> bool:
    # A user without any right on a database does not see it here; creating it then fails all the same.
    is_new = schema not in sa.inspect(db).get_schema_names()
    try:
        _run(db, schema_statement("mysql", schema))
    except DBAPIError as error:
        arguments = getattr(error.orig, "args", ())
        if not arguments or arguments[0] != _MYSQL_ACCESS_DENIED:
            raise
        user = db.execute(sa.text("SELECT CURRENT_USER()")).scalar_one()
        raise _refused(user, "create database", schema, missing_grant("mysql", user, schema)) from error
    return is_new


def _refused(user: str, wish: str, schema: str, grant: str) -> SchemaError:
    return SchemaError(f"User {user!r} may not {wish} {schema!r}. Let an administrator run: {grant};")


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _run(db: sa.Connection, statement: str) -> None:
    db.exec_driver_sql(statement.replace("%", "%%"))


__all__ = ["create_schema", "missing_grant", "schema_statement"]
