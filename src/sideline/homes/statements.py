"""The statement of an effect: its shape decides the text, its values come as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from sideline.effects import Delete, Insert, Upsert
from sideline.homes.catalogue import Catalogue
from sideline.homes.names import quote
from sideline.homes.tables import Column, Table
from sideline.homes.values import column_literal

Verb = Literal["upsert", "insert", "delete"]
RowEffect = Upsert | Insert | Delete


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Everything about an effect but its values; compared by identity."""

    verb: Verb
    table: Table
    columns: tuple[Column, ...]
    """In the table's order, whatever the order of the row."""
    key: frozenset[str]
    """What identifies a row: an upsert's key, all columns of a delete."""
    version: str | None
    complete: bool
    """Every column that a new row must have is there."""
    sql: str
    fenced_sql: str
    """The same, of parameters c0, c1 ..: does nothing unless a query named ``fence`` has a row."""

    def arguments(self, columns: Sequence[Sequence[Any]]) -> list[str]:
        """The parameters of ``sql`` for these columns of values: an array for each."""
        return list(map(column_literal, self.columns, columns))

    def single(self, row: Mapping[str, Any]) -> list[str]:
        """The parameters of ``sql`` for one row."""
        return [column_literal(column, (row[column.name],)) for column in self.columns]


Refused = Callable[[Shape, list[list[Any]]], "Sequence[int] | None"]
"""Asks PostgreSQL which rows the table's CHECKs refuse; None: it cannot tell."""


class Shapes:
    """The shapes that were seen, each made once; and what PostgreSQL says about their rows."""

    def __init__(self, catalogue: Catalogue, refused: Refused) -> None:
        self._catalogue = catalogue
        self.refused = refused
        self._seen: dict[tuple[Any, ...], Shape] = {}
        self._made: dict[tuple[Any, ...], Shape] = {}

    def forget(self) -> None:
        """Make them anew: the catalogue has changed."""
        self._seen.clear()
        self._made.clear()

    def of(self, effect: RowEffect) -> Shape:
        """The shape of an effect; raises what is wrong with it whatever its values are."""
        kind = type(effect)
        if kind is Upsert:
            key, version = effect.key, effect.version  # type: ignore[union-attr]
            if isinstance(key, list):
                key = tuple(key)
        else:
            key, version = None, None
        if not isinstance(effect.row, dict | Mapping) or not effect.row:
            raise ValueError(f"an effect on table {effect.table} needs a row: columns and values")
        name = (kind, effect.table, (key, version) if kind is Upsert else (), tuple(effect.row))
        shape = self._seen.get(name)
        if shape is None:
            shape = self._seen[name] = self._find(effect, key, version)
        return shape

    def seen(self, effect: object) -> Shape | None:
        """The shape of an effect, if it is one on a row and nobody has to be asked for it."""
        found = self.known([effect])
        return found[0] if found else None

    def known(self, effects: Sequence[Any]) -> list[Shape] | None:
        """The shapes of many effects; None: one of them is new, or no effect on a row."""
        seen = self._seen
        try:
            if set(map(type, [effect.row for effect in effects])) != {dict}:
                return None
            return [
                seen[
                    kind := type(effect),
                    effect.table,
                    (effect.key, effect.version) if kind is Upsert else (),
                    tuple(effect.row),
                ]
                for effect in effects
            ]
        except (KeyError, TypeError, AttributeError):
            return None

    def _find(
        self, effect: RowEffect, key: str | tuple[str, ...] | None, version: str | None
    ) -> Shape:
        name = effect.table
        table = self._catalogue.table(name)
        for column in effect.row:
            self._catalogue.column(name, column)
        if isinstance(effect, Delete):
            return self.make("delete", table, frozenset(effect.row), frozenset(effect.row), None)
        _refuse_generated(table, effect.row)
        if isinstance(effect, Insert):
            return self.make("insert", table, frozenset(effect.row), frozenset(), None)
        keys = frozenset((key,) if isinstance(key, str) else key or ())
        _refuse_missing(name, effect.row, keys, "key")
        if version is not None:
            _refuse_missing(name, effect.row, frozenset((version,)), "version")
        return self.make("upsert", table, frozenset(effect.row), keys, version)

    def make(
        self,
        verb: Verb,
        table: Table,
        columns: frozenset[str],
        key: frozenset[str],
        version: str | None,
    ) -> Shape:
        """The one shape with these properties."""
        name = (verb, table, columns, key, version)
        shape = self._made.get(name)
        if shape is None:
            ordered = tuple(found for found in table.columns.values() if found.name in columns)
            shape = self._made[name] = Shape(
                verb,
                table,
                ordered,
                key,
                version,
                complete=columns >= table.required,
                sql=_parametrised(verb, table, ordered, key, version),
                fenced_sql=_parametrised(verb, table, ordered, key, version, fenced=True),
            )
        return shape


def _refuse_generated(table: Table, row: Mapping[str, Any]) -> None:
    for name in row:
        if not table.columns[name].writable:
            raise ValueError(f"column {name} of table {table.label} is generated: leave it out")


def _refuse_missing(table: str, row: Mapping[str, Any], wanted: frozenset[str], what: str) -> None:
    if not wanted or not wanted <= row.keys():
        names = ", ".join(sorted(wanted - row.keys())) or "(none)"
        raise ValueError(f"an upsert into {table} lacks its {what} column in the row: {names}")


def check_sql(shape: Shape) -> str | None:
    """Which rows the table's CHECKs refuse, as an array of places; None: they name more columns.

    Parameters as in ``Shape.arguments``, then the number of rows.
    """
    checks = shape.table.checks
    names = {column.name for column in shape.columns}
    if not all(check.columns <= names for check in checks):
        return None
    items = "".join(
        f"unnest(%s::{column.stage}[])"
        + ("" if column.cast is None else f"::{column.cast}")
        + f" as {quote(column.name)}, "
        for column in shape.columns
    )
    # NULL is no refusal.
    refused = " or ".join(f"({check.sql}) is false" for check in checks)
    return (
        f"select coalesce(array_agg({_PLACE}), '{{}}')\n"
        f"from (select {items}generate_series(0, %s) as {_PLACE}) as s\n"
        f"where {refused}"
    )


_PLACE = '"place in the arrays"'


def statement(shape: Shape, origin: str) -> str:
    """The shape's statement, fed by texts from somewhere else: columns c0, c1 .. of ``s``."""
    values = [f"s.c{number}::{_type(column)}" for number, column in enumerate(shape.columns)]
    return _sql(shape.verb, shape.table, shape.columns, values, origin, shape.key, shape.version)


def _type(column: Column) -> str:
    return column.stage if column.cast is None else column.cast


def _parametrised(  # noqa: PLR0913 - the parts of a statement
    verb: Verb,
    table: Table,
    columns: tuple[Column, ...],
    key: frozenset[str],
    version: str | None,
    *,
    fenced: bool = False,
) -> str:
    """The statement with an array for each column."""
    # Functions in the select list stream; unnest(a, b) in FROM would first fill a tuple store.
    items = ", ".join(
        f"unnest({f'%(c{number})s' if fenced else '%s'}::{column.stage}[]) as c{number}"
        for number, column in enumerate(columns)
    )
    values = [
        f"s.c{number}" if column.cast is None else f"s.c{number}::{column.cast}"
        for number, column in enumerate(columns)
    ]
    origin = f"(select {items}{' from fence' if fenced else ''}) as s"
    return _sql(verb, table, columns, values, origin, key, version)


def _sql(  # noqa: PLR0913, PLR0917 - the parts of a statement
    verb: Verb,
    table: Table,
    columns: tuple[Column, ...],
    values: list[str],
    origin: str,
    key: frozenset[str],
    version: str | None,
) -> str:
    names = [quote(column.name) for column in columns]
    if verb == "delete":
        same = " and ".join(
            f"t.{name} = {value}" for name, value in zip(names, values, strict=True)
        )
        return f"delete from {table.sql} as t\nusing {origin}\nwhere {same}"
    insert = (
        f"insert into {table.sql} as t ({', '.join(names)})\n"
        f"select {', '.join(values)}\n"
        f"from {origin}"
    )
    return insert if verb == "insert" else insert + "\n" + _on_conflict(columns, key, version)


def _on_conflict(columns: tuple[Column, ...], key: frozenset[str], version: str | None) -> str:
    target = ", ".join(quote(column.name) for column in columns if column.name in key)
    changed = [quote(column.name) for column in columns if column.name not in key]
    if not changed:
        return f"on conflict ({target}) do nothing"
    assignments = ", ".join(f"{name} = excluded.{name}" for name in changed)
    clause = f"on conflict ({target})\ndo update set {assignments}"
    if version is None:
        return clause
    guard = quote(version)
    # Equal versions: the later event wins. No version is older than any.
    return f"{clause}\nwhere t.{guard} is null or excluded.{guard} >= t.{guard}"
