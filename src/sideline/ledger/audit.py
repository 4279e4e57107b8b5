"""Every change by a person: who, when, what, why and how many (S6).

A record is written in the transaction of the change itself: neither is there without the other.
The application's role may add and read, never change or take away (`schema.grants`).
"""

from __future__ import annotations

import dataclasses
import getpass
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from sideline.errors import UsageError
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

MOST_CHARACTERS = 1_000
# Of a name of somebody or something.
MOST_NAME = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One change by a person."""

    id: int
    at: datetime
    actor: str
    action: str
    pipeline: str | None
    subject: dict[str, Any]
    """What it was done to."""
    count: int | None
    """How many of them."""
    reason: str | None


def record(  # noqa: PLR0913 - one parameter a column
    connection: Connection,
    action: str,
    *,
    actor: str,
    pipeline: str | None = None,
    subject: Mapping[str, Any] | None = None,
    count: int | None = None,
    reason: str | None = None,
) -> None:
    """Write down a change, in the transaction that makes it."""
    named = {
        "actor": _line(actor, MOST_NAME),
        "action": action,
        "pipeline": pipeline,
        "subject": Jsonb(_storable(dict(subject or {}))),
        "count": count,
        "reason": None if reason is None else _line(reason, MOST_CHARACTERS),
    }
    connection.execute(queries()["record_change"], named)


def page(  # noqa: PLR0913 - one parameter a filter
    connection: Connection,
    *,
    pipeline: str | None = None,
    action: str | None = None,
    actor: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int,
    after: int | None = None,
) -> list[Entry]:
    """Changes, the newest first, behind the one that the last page ended with."""
    named = {
        "pipeline": pipeline,
        "action": action,
        "actor": actor,
        "since": since,
        "until": until,
        "limit": limit,
        "after": after,
    }
    cursor = connection.cursor(row_factory=class_row(Entry))
    return cursor.execute(queries()["changes"], named).fetchall()


def actor() -> str:
    """Who sits at the command line: user@host."""
    try:
        name = getpass.getuser()
    # A container may run under a number that has no name.
    except (KeyError, OSError):
        name = "somebody"
    return f"{name}@{socket.gethostname()}"


def reason(text: str) -> str:
    """A person's reason, in one line that can be stored; an empty one is refused."""
    found = _line(text, MOST_CHARACTERS)
    if not found:
        raise UsageError("--reason is empty.", hint="Say why, for whoever looks at it later.")
    return found


def _line(text: str, characters: int) -> str:
    line = " ".join(text.replace("\0", "").split())
    return line.encode("utf-8", "replace").decode()[:characters]


def _storable(value: Any) -> Any:  # noqa: ANN401 - whatever can be JSON
    """Words from a shell may hold what no JSON in PostgreSQL can."""
    match value:
        case str():
            return value.replace("\0", "").encode("utf-8", "replace").decode()
        case datetime():
            return value.isoformat()
        case dict():
            return {str(name): _storable(part) for name, part in value.items()}
        case list() | tuple():
            return [_storable(part) for part in value]
        case _:
            return value
