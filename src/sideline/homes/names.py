"""Table names as people write them (pure)."""

from __future__ import annotations

import re

from psycopg import sql

_PART = re.compile(r'"((?:[^"\x00]|"")+)"|([A-Za-z_\u0080-\U0010ffff][\w$]*)')
_MOST_PARTS = 2  # schema and table


def parse_table(name: str) -> tuple[str, ...]:
    """Split ``users``, ``app.users`` or ``"Weird Name"."T"`` into its parts.

    As in SQL: what is not quoted is folded to lower case.
    """
    if not isinstance(name, str):
        msg = f"A table name is text, not {type(name).__name__}."
        raise TypeError(msg)
    parts: list[str] = []
    position = 0
    while match := _PART.match(name, position):
        quoted, plain = match.groups()
        parts.append(quoted.replace('""', '"') if quoted is not None else plain.lower())
        position = match.end()
        if position == len(name) and len(parts) <= _MOST_PARTS:
            return tuple(parts)
        if name[position : position + 1] != ".":
            break
        position += 1
    msg = (
        f"{name!r} is not the name of a table: "
        'write users, app.users, or "Quoted Name" where a name is not a plain word.'
    )
    raise ValueError(msg)


def quote(*parts: str) -> str:
    """The name as it stands in a statement with parameters (where % is doubled)."""
    return sql.Identifier(*parts).as_string().replace("%", "%%")
