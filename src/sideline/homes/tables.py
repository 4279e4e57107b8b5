"""Tables and columns, as far as writing them is concerned (pure)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Column(NamedTuple):
    """One column, as far as writing it is concerned."""

    name: str
    type: str
    """The base type's name if PostgreSQL brings it along ("int4"), otherwise ""."""
    stage: str
    """The element type that values are sent as; always without length or precision."""
    cast: str | None
    """What the staged value must be cast to; None: it is sent as what it is."""
    category: str
    """``pg_type.typcategory`` of the base type: A arrays, D times, E enums, N numbers, S text."""
    typmod: int
    not_null: bool
    required: bool
    """Not null and without a default: a row that does not name it fails."""
    writable: bool
    """False: generated, or an identity that is always generated."""
    domain: bool
    indexed: bool
    deterministic: bool
    """Equal means the same bytes: the collation does not say otherwise."""
    labels: frozenset[str]
    """What an enum may be."""


class Unique(NamedTuple):
    """Columns of a unique index that ON CONFLICT can name."""

    columns: frozenset[str]
    nulls_distinct: bool
    deterministic: bool
    """Equal means the same bytes: no collation of the index says otherwise."""


class Check(NamedTuple):
    """A CHECK constraint."""

    columns: frozenset[str]
    """The columns that it speaks of."""
    sql: str
    """Its expression, for statements with parameters."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One table; compared by identity, the catalogue makes one for each."""

    oid: int
    label: str
    """For people: schema and name."""
    sql: str
    """For statements with parameters."""
    columns: dict[str, Column]
    uniques: tuple[Unique, ...]
    exclusive: tuple[frozenset[str], ...]
    """Columns of every unique index, also of those that ON CONFLICT cannot name."""
    parents: frozenset[int]
    """Tables that this one refers to."""
    in_log_order: str | None
    """Why rows must be written one by one in log order; None: they need not."""
    checks: tuple[Check, ...]
    unfolded: str | None
    """Why no row may be left out although a later one replaces it; None: it may."""
    delete_cascades: bool
    """Deleting a row changes or deletes rows that refer to it."""
    update_cascades: frozenset[str]
    """Columns whose change changes rows that refer to them."""
    deferrable: bool
    """A constraint may be checked as late as at COMMIT."""

    @property
    def required(self) -> frozenset[str]:
        """The columns that every new row must name."""
        return frozenset(name for name, column in self.columns.items() if column.required)

    def unique_on(self, columns: frozenset[str]) -> Unique | None:
        """The unique index on exactly these columns."""
        return next((unique for unique in self.uniques if unique.columns == columns), None)
