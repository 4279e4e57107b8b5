"""Which rows refer to a row that does not exist: asked once, instead of trying them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg

from sideline.homes.names import quote
from sideline.homes.plans import ROWS_PER_STATEMENT
from sideline.homes.statements import Shape

FOREIGN_KEY = "23503"
# Of a constraint by its name, as an error tells it. A regclass is written with the quotes it needs.
_REFERENCE = """
select array(
         select attname
         from unnest(conkey) with ordinality as given (number, place)
         join pg_attribute on attrelid = conrelid and attnum = given.number
         order by given.place
       )::text[] as columns,
       confrelid::regclass::text as parent,
       array(
         select attname
         from unnest(confkey) with ordinality as given (number, place)
         join pg_attribute on attrelid = confrelid and attnum = given.number
         order by given.place
       )::text[] as keys
from pg_constraint
where conrelid = %s
  and conname = %s
  and contype = 'f'
  and confmatchtype = 's'
"""
_PLACE = '"place in the arrays"'


class _Reference(NamedTuple):
    columns: list[str]
    parent: str
    keys: list[str]


def orphans(
    connection: psycopg.Connection[Any], shape: Shape, columns: Sequence[Sequence[Any]], name: str
) -> list[int]:
    """The places of rows without a parent, by the constraint of that name; none: it cannot tell."""
    row = connection.execute(_REFERENCE, (shape.table.oid, name)).fetchone()
    if row is None:
        return []
    reference = _Reference(*row)
    written = {column.name: place for place, column in enumerate(shape.columns)}
    if not written.keys() >= set(reference.columns):
        return []
    sql = _asked(shape, reference)
    found: list[int] = []
    for start in range(0, len(columns[0]), ROWS_PER_STATEMENT):
        part = [column[start : start + ROWS_PER_STATEMENT] for column in columns]
        arguments = shape.arguments(part)
        needed = [arguments[written[name]] for name in reference.columns]
        ((places,),) = connection.execute(sql, [*needed, len(part[0]) - 1]).fetchall()
        found.extend(start + place for place in places)
    return found


def _asked(shape: Shape, reference: _Reference) -> str:
    by_name = {column.name: column for column in shape.columns}
    items = "".join(
        f"unnest(%s::{column.stage}[])"
        + ("" if column.cast is None else f"::{column.cast}")
        + f" as {quote(name)}, "
        for name, column in ((name, by_name[name]) for name in reference.columns)
    )
    present = " and ".join(f"s.{quote(name)} is not null" for name in reference.columns)
    same = " and ".join(
        f"p.{quote(key)} = s.{quote(name)}"
        for key, name in zip(reference.keys, reference.columns, strict=True)
    )
    parent = reference.parent.replace("%", "%%")
    return (
        f"select coalesce(array_agg(s.{_PLACE}), '{{}}')\n"
        f"from (select {items}generate_series(0, %s) as {_PLACE}) as s\n"
        f"where {present}\n"
        f"  and not exists (select from {parent} as p where {same})"
    )
