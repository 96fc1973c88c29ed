"""Tables: their DDL for each database, creating them when asked to, and what differs from it in a live one."""

from pillarbox.schema.autovacuum import autovacuum_sql
from pillarbox.schema.check import (
    Comparison,
    Drift,
    check_schema,
    check_store,
    check_tables,
    compare_schema,
    compare_store,
)
from pillarbox.schema.create import Created, create, create_tables
from pillarbox.schema.ddl import DIALECTS, ddl
from pillarbox.schema.diff import migration

__all__ = [
    "DIALECTS",
    "Comparison",
    "Created",
    "Drift",
    "autovacuum_sql",
    "check_schema",
    "check_store",
    "check_tables",
    "compare_schema",
    "compare_store",
    "create",
    "create_tables",
    "ddl",
    "migration",
]
