"""What a handler returns: the changes that an event makes, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Upsert(NamedTuple):
    """Insert the row, or change the columns it names where ``key`` finds one.

    ``version`` names a column of the row: an older version never replaces a newer one.
    """

    table: str
    row: Row
    key: str | tuple[str, ...]
    version: str | None = None


class Insert(NamedTuple):
    """Insert the row."""

    table: str
    row: Row


class Delete(NamedTuple):
    """Delete what the columns of ``row`` identify; nothing there is no error."""

    table: str
    row: Row


class Execute(NamedTuple):
    """Run one SQL statement in the slice's transaction, in its place among the other effects."""

    sql: str
    params: Sequence[Any] | Mapping[str, Any] | None = None


class Publish(NamedTuple):
    """Send a record."""

    topic: str
    value: bytes | str | None
    key: bytes | str | None = None
    headers: Mapping[str, bytes | str | None] | None = None
    partition: int | None = None
    timestamp: int | None = None


Effect = Upsert | Insert | Delete | Execute | Publish
Effects = Effect | Iterable[Effect] | None
EFFECTS: tuple[type, ...] = (Upsert, Insert, Delete, Execute, Publish)
