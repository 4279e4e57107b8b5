"""Find the rows that PostgreSQL does not take, inside the server, and write all others.

One statement writes thousands of rows or none. Where it fails, an anonymous block writes the
same rows in chunks, each with an exception block of its own: a chunk that fails is cut smaller,
down to single rows. Halving from the client would pay a round trip for every step.

The rows travel as settings of the transaction: a block takes no parameters, and a temporary
table would need a right, and leave its traces in the catalogue with every bad slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from sideline.homes.statements import Shape, statement
from sideline.homes.values import column_literal

# Rows per exception block. Each costs a subtransaction, each failed one is done again.
CHUNKS = (128, 8, 1)
# A unique value, or a range that excludes others.
_CONFLICTS = frozenset({"23505", "23P01"})
_ANSWER = """
select
  current_setting('sideline.refused')::int[],
  current_setting('sideline.codes')::text[]
"""


class Apart(NamedTuple):
    """What became of rows that were written one apart from the other."""

    refused: list[int]
    """The places of those that were not written."""
    conflict: bool
    """One of them wanted a place that is taken; by whom depends on the order."""


def write_apart(
    connection: psycopg.Connection[Any], shape: Shape, columns: Sequence[Sequence[Any]]
) -> Apart:
    """Write the rows that can be written."""
    places = range(len(columns[0]))
    unsendable = _unsendable(shape, columns)
    if unsendable:
        sent = [place for place in places if place not in unsendable]
        if not sent:
            return Apart(sorted(unsendable), conflict=False)
        columns = [[column[place] for place in sent] for column in columns]
        places_sent: Sequence[int] = sent
    else:
        places_sent = places
    names = [f"sideline.c{number}" for number in range(len(columns))]
    for name, literal in zip(names, shape.arguments(columns), strict=True):
        connection.execute("select set_config(%s, %s, true)", (name, literal))
    connection.execute(_block(shape), prepare=False)
    row = connection.execute(_ANSWER).fetchone()
    for name in names:  # the memory, not the value, is what matters
        connection.execute("select set_config(%s, '', true)", (name,))
    numbers, codes = row or ([], [])
    found = {places_sent[number - 1] for number in numbers}
    return Apart(sorted(found | unsendable), conflict=not _CONFLICTS.isdisjoint(codes))


def _unsendable(shape: Shape, columns: Sequence[Sequence[Any]]) -> set[int]:
    """Places of rows with a value that never reaches the server as what it is."""
    found: set[int] = set()
    for column, values in zip(shape.columns, columns, strict=True):
        if not _is_sendable(column, values):
            found.update(
                place for place, value in enumerate(values) if not _is_sendable(column, (value,))
            )
    return found


def _is_sendable(column: Any, values: Sequence[Any]) -> bool:  # noqa: ANN401 - a Column
    try:
        literal = column_literal(column, values)
        literal.encode()
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything
        return False
    return "\0" not in literal


def _block(shape: Shape) -> str:
    numbers = range(len(shape.columns))
    declared = "\n".join(
        f"  a{number} text[] := current_setting('sideline.c{number}');\n  p{number} text[];"
        for number in numbers
    )
    cut = "\n".join(f"    p{number} := a{number}[first:last];" for number in numbers)
    large, middle, _ = CHUNKS
    body = f"""
#variable_conflict use_column
declare
{declared}
  total int := cardinality(a0);
  first int;
  last int;
  size int;
  refused int[] := '{{}}';
  codes text[] := '{{}}';
begin
  for chunk in 0 .. (total - 1) / {large} loop
    first := chunk * {large} + 1;
    last := least(total, first + {large} - 1);
    size := last - first + 1;
{cut}
    begin
      {_part(shape, "1", "size")};
    exception when others then
      for lower in 0 .. (size - 1) / {middle} loop
        begin
          {_part(shape, f"lower * {middle} + 1", f"least(size, lower * {middle} + {middle})")};
        exception when others then
          for place in lower * {middle} + 1 .. least(size, lower * {middle} + {middle}) loop
            begin
              {_part(shape, "place", "place")};
            exception when others then
              refused := refused || (first + place - 1);
              codes := codes || sqlstate;
            end;
          end loop;
        end;
      end loop;
    end;
  end loop;
  perform set_config('sideline.refused', refused::text, true);
  perform set_config('sideline.codes', codes::text, true);
end
"""
    return "do " + sql.Literal(body).as_string()


def _part(shape: Shape, first: str, last: str) -> str:
    """The shape's statement for a part of the arrays."""
    items = ", ".join(
        f"unnest(p{number}[{first}:{last}]) as c{number}" for number in range(len(shape.columns))
    )
    # No parameters here: a % in a name stands for itself.
    return statement(shape, f"(select {items}) as s").replace("%%", "%")
