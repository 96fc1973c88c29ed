"""The care of monthly partitions as one statement, for pg_cron and for those who run SQL only."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from pillarbox.errors import ConfigError
from pillarbox.schema.partitions import LOCK_TIMEOUT, check_number, name_partition, quote, quote_text, split_name


def partitions_sql(table: str, *, schema: str | None = None, keep: int = 12) -> str:
    """Return a statement that makes this and the next month's partition and drops those before the kept months.

    It needs nothing but PostgreSQL, so that pg_cron can run it. The session's time zone, date style and lock timeout
    are set until the end of its transaction.
    """
    check_number("keep", keep, least=1)
    wanted, name = split_name(table, schema)
    name_partition(name, datetime(2000, 1, 1, tzinfo=UTC))
    parent = quote(name) if wanted is None else f"{quote(wanted)}.{quote(name)}"
    if "$pillarbox$" in parent:
        raise ConfigError(f"Table {table!r}: its name cannot be written into a DO block")
    milliseconds = int(LOCK_TIMEOUT / timedelta(milliseconds=1))
    values = {":timeout": f"'{milliseconds}ms'", ":kept": str(keep - 1), ":parent": quote_text(parent)}
    return re.sub("|".join(values), lambda each: values[each[0]], _BLOCK)


_BLOCK: Final = """\
DO $pillarbox$
DECLARE
    parent CONSTANT regclass := :parent;
    this_month CONSTANT timestamp := date_trunc('month', now() AT TIME ZONE 'UTC');
    home name;
    title name;
    month timestamp;
    made text;
    old regclass;
BEGIN
    PERFORM set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO, YMD', true),
            set_config('lock_timeout', :timeout, true);
    SELECT n.nspname, c.relname INTO home, title
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = parent;
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE UPDATE EXCLUSIVE MODE', parent);

    FOR ahead IN 0..1 LOOP
        month := this_month + make_interval(months => ahead);
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid,
                replace(replace(pg_get_expr(c.relpartbound, c.oid),
                    'MINVALUE', $$'-infinity'$$), 'MAXVALUE', $$'infinity'$$) AS bounds,
                regexp_match(bounds, $$FROM \\('(.+)'\\) TO \\('(.+)'\\)$$) AS bound
            WHERE i.inhparent = parent
              AND bound[1]::timestamp <= month AND bound[2]::timestamp >= month + interval '1 month'
        );
        made := format('%I.%I', home, title || '_' || to_char(month, 'YYYY_MM'));
        EXECUTE format(
            'CREATE TABLE %s (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE)',
            made, parent);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
            parent, made, month::text || '+00', (month + interval '1 month')::text || '+00');
    END LOOP;

    FOR old IN
        SELECT c.oid::regclass
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid,
            regexp_match(pg_get_expr(c.relpartbound, c.oid), $$FROM \\('(\\d.+)'\\) TO \\('(\\d.+)'\\)$$) AS bound
        WHERE i.inhparent = parent AND c.relkind IN ('r', 'p')
          AND bound[1]::timestamp = date_trunc('month', bound[1]::timestamp)
          AND bound[2]::timestamp = bound[1]::timestamp + interval '1 month'
          AND bound[2]::timestamp <= this_month - interval ':kept months'
    LOOP
        EXECUTE format('DROP TABLE %s', old);
    END LOOP;
END
$pillarbox$;
"""
