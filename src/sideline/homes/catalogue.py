"""What PostgreSQL's catalogue says about the tables that effects name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.rows import namedtuple_row

from sideline.homes.names import parse_table, quote
from sideline.homes.tables import Check, Column, Table, Unique

# Tables and partitioned tables; foreign tables take rows too, but no ON CONFLICT DO UPDATE.
_TABLE_KINDS = frozenset("rp")
# Of BEFORE triggers: one that runs on INSERT, or for each statement. Others, such as those
# that keep a column updated_at, see one row that exists, and one row is all they change.
_ON_INSERT = 2


class UnknownNameError(LookupError):
    """An effect names a table or a column that was never there: the event's own mistake."""


class Catalogue:
    """Tables by the names that effects use, read once per connection.

    A name that was never there is the event's own mistake. What was there and is gone is the
    deployment's failure: then the error is the one that PostgreSQL would raise.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._by_name: dict[str, Table] = {}
        self._by_oid: dict[int, Table] = {}
        self._ever: dict[str, set[str]] = {}

    def table(self, name: str) -> Table:
        """The table of that name."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = self._find(name)
            self._ever.setdefault(name, set()).update(found.columns)
        return found

    def column(self, name: str, column: str) -> Column:
        """A column of the table of that name."""
        table = self.table(name)
        found = table.columns.get(column)
        if found is None:
            text = f"table {table.label} has no column {column}"
            raise self._missing(name, column, errors.UndefinedColumn(text))
        return found

    def _missing(self, name: str, column: str | None, error: psycopg.Error) -> Exception:
        ever = self._ever.get(name)
        vanished = ever is not None and (column is None or column in ever)
        return error if vanished else UnknownNameError(str(error))

    def seen(self) -> Sequence[Table]:
        """Every table that was asked for."""
        return list(self._by_oid.values())

    def forget(self) -> None:
        """Read everything anew when it is next asked for."""
        self._by_name.clear()
        self._by_oid.clear()

    def _find(self, name: str) -> Table:
        parts = parse_table(name)
        with self._connection.cursor(row_factory=namedtuple_row) as cursor:
            relation: Any = cursor.execute(
                _RELATION, (quote(*parts).replace("%%", "%"),)
            ).fetchone()
            if relation is None:
                text = f"table {name} does not exist"
                raise self._missing(name, None, errors.UndefinedTable(text))
            if relation.relkind not in _TABLE_KINDS:
                raise UnknownNameError(f"{name} is not a table: rows can be written to tables only")
            known = self._by_oid.get(relation.oid)
            if known is None:
                columns = cursor.execute(_COLUMNS, {"table": relation.oid}).fetchall()
                uniques = cursor.execute(_UNIQUES, (relation.oid,)).fetchall()
                checks = cursor.execute(_CHECKS, (relation.oid,)).fetchall()
                known = self._by_oid[relation.oid] = _table(relation, columns, uniques, checks)
            return known


def _table(
    relation: Any,  # noqa: ANN401 - a row
    columns: Sequence[Any],
    uniques: Sequence[Any],
    checks: Sequence[Any],
) -> Table:
    return Table(
        oid=relation.oid,
        label=f"{relation.nspname}.{relation.relname}",
        sql=quote(relation.nspname, relation.relname),
        columns={row.attname: _column(row) for row in columns},
        uniques=tuple(
            Unique(frozenset(row.columns), row.nulls_distinct, row.deterministic)
            for row in uniques
            if row.arbiter
        ),
        exclusive=tuple(frozenset(row.columns) for row in uniques if row.columns),
        parents=frozenset(relation.parents),
        in_log_order=_why_in_log_order(relation),
        checks=tuple(
            Check(frozenset(row.columns), row.expression.replace("%", "%%")) for row in checks
        ),
        unfolded=_why_unfolded(relation, columns),
        delete_cascades=relation.delete_cascades,
        update_cascades=frozenset(relation.update_cascades),
        deferrable=relation.deferrable,
    )


def _why_in_log_order(relation: Any) -> str | None:  # noqa: ANN401 - a row
    """A trigger or a rule may look at other rows, or change the key that a row is found by."""
    if relation.before_triggers == _ON_INSERT:
        return "it has a BEFORE INSERT trigger"
    if relation.relhasrules:
        return "it has a rule"
    return None


def _why_unfolded(relation: Any, columns: Sequence[Any]) -> str | None:  # noqa: ANN401 - rows
    """What only PostgreSQL can say about a row."""
    reasons = {
        "it has a BEFORE trigger": relation.before_triggers,
        "it has a CHECK constraint on the whole row": relation.whole_row_checks,
        "it has row security": relation.relrowsecurity,
        "it is partitioned": relation.relispartition or relation.relkind == "p",
        "it has an index on an expression": relation.expression_indexes,
        "it has a generated column": any(row.attgenerated for row in columns),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _column(row: Any) -> Column:  # noqa: ANN401 - a row
    # An array of arrays does not exist: such values travel as text and are read by a cast.
    stageable = row.has_array and row.typcategory != "A"
    type_sql = row.type_sql.replace("%", "%%")
    generated = bool(row.attgenerated) or row.attidentity == "a"
    return Column(
        name=row.attname,
        type=row.typname if row.builtin else "",
        stage=type_sql if stageable else "text",
        cast=None if stageable else type_sql,
        category=row.typcategory,
        typmod=row.typmod,
        not_null=row.attnotnull,
        required=row.attnotnull and not (row.atthasdef or row.attidentity or row.attgenerated),
        writable=not generated,
        domain=row.domain,
        indexed=row.indexed,
        deterministic=row.deterministic,
        labels=frozenset(row.labels),
    )


# One table, and what about it forbids a short cut.
_RELATION = """
select
  c.oid::bigint as oid,
  n.nspname,
  c.relname,
  c.relkind,
  c.relhasrules,
  c.relrowsecurity,
  c.relispartition,
  coalesce((
    -- tgtype: 1 for each row, 2 before, 4 insert, 8 delete, 16 update
    select max(case when t.tgtype & 5 = 1 then 1 else 2 end)
    from pg_trigger as t
    where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled <> 'D'
      and t.tgtype & 2 <> 0 and t.tgtype & 28 <> 0
  ), 0) as before_triggers,
  exists (
    select from pg_constraint as k
    where k.conrelid = c.oid and k.contype = 'c' and (0 >= any (k.conkey)) is not false
  ) as whole_row_checks,
  exists (
    select from pg_constraint as k
    where k.confrelid = c.oid and k.contype = 'f' and k.confdeltype in ('c', 'n', 'd')
  ) as delete_cascades,
  array(
    select distinct a.attname::text
    from pg_constraint as k
    join pg_attribute as a on a.attrelid = c.oid and a.attnum = any (k.confkey)
    where k.confrelid = c.oid and k.contype = 'f' and k.confupdtype in ('c', 'n', 'd')
  ) as update_cascades,
  exists (
    select from pg_constraint as k where k.conrelid = c.oid and k.condeferrable
  ) or exists (
    select from pg_constraint as k where k.confrelid = c.oid and k.condeferrable
  ) or exists (
    select from pg_trigger as t where t.tgrelid = c.oid and t.tgdeferrable and not t.tgisinternal
  ) as deferrable,
  exists (
    select from pg_index as i
    where i.indrelid = c.oid and (i.indexprs is not null or i.indpred is not null)
  ) as expression_indexes,
  array(
    select distinct k.confrelid::bigint from pg_constraint as k
    where k.conrelid = c.oid and k.contype = 'f' and k.confrelid <> c.oid
  ) as parents
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
where c.oid = to_regclass(%s)
"""

# Columns with the type at the bottom of their domains: a cast to a domain of varchar(10)
# would shorten a text without a word, while assigning to it raises an error.
_COLUMNS = """
with recursive typed as (
  select
    a.attnum, t.oid, t.typtype, t.typbasetype, a.atttypmod as typmod, t.typtypmod, false as domain
  from pg_attribute as a
  join pg_type as t on t.oid = a.atttypid
  where a.attrelid = %(table)s and a.attnum > 0 and not a.attisdropped
  union all
  select b.attnum, t.oid, t.typtype, t.typbasetype, b.typtypmod, t.typtypmod, true
  from typed as b
  join pg_type as t on t.oid = b.typbasetype
  where b.typtype = 'd'
)
select
  a.attname,
  a.attnotnull,
  a.atthasdef,
  a.attidentity,
  a.attgenerated,
  b.typmod,
  b.domain,
  t.typname,
  t.typcategory,
  t.typnamespace = 'pg_catalog'::regnamespace as builtin,
  t.typarray <> 0 and t.typdelim = ',' as has_array,
  format_type(b.oid, -1) as type_sql,
  coalesce(l.collisdeterministic, true) as deterministic,
  exists (
    select from pg_index as i where i.indrelid = a.attrelid and a.attnum = any (i.indkey)
  ) as indexed,
  array(
    select e.enumlabel::text from pg_enum as e where e.enumtypid = b.oid
  ) as labels
from typed as b
join pg_attribute as a on a.attrelid = %(table)s and a.attnum = b.attnum
join pg_type as t on t.oid = b.oid
left join pg_collation as l on l.oid = a.attcollation
where b.typtype <> 'd'
order by a.attnum
"""

# CHECK constraints: the expressions as PostgreSQL writes them, columns by their bare names.
_CHECKS = """
select
  pg_get_expr(k.conbin, k.conrelid) as expression,
  array(
    select a.attname::text from pg_attribute as a
    where a.attrelid = k.conrelid and a.attnum = any (k.conkey)
  ) as columns
from pg_constraint as k
where k.conrelid = %s and k.contype = 'c'
order by k.conname
"""

# Unique indexes, and whether ON CONFLICT (columns) accepts them.
_UNIQUES = """
select
  array(
    select a.attname::text from pg_attribute as a
    where a.attrelid = i.indrelid and a.attnum = any (i.indkey[0:i.indnkeyatts - 1])
  ) as columns,
  not i.indnullsnotdistinct as nulls_distinct,
  not exists (
    select from pg_collation as l
    where l.oid = any (i.indcollation) and not l.collisdeterministic
  ) as deterministic,
  i.indimmediate and i.indisvalid and i.indpred is null and i.indexprs is null as arbiter
from pg_index as i
where i.indrelid = %s and i.indisunique
"""
