"""Tables: their DDL for each database, and creating them when asked to."""

from pillarbox.schema.create import Created, create, create_tables
from pillarbox.schema.ddl import DIALECTS, ddl

__all__ = ["DIALECTS", "Created", "create", "create_tables", "ddl"]
