"""Rows of one shape, judged and folded by whole columns: a microsecond an event (pure)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

from sideline.effects import Upsert
from sideline.folding import Row
from sideline.homes.judge import identities, ordered_as, vouches
from sideline.homes.plans import MOST_SUSPECTS, Bulk, Touch, Work, effects_in
from sideline.homes.statements import Shape, Shapes

# A value costs 40 ns in a crowd and 3 us alone.
_JUDGED_TOGETHER = 32


class Folded(NamedTuple):
    """One statement's worth of rows, or those who must be left out first."""

    touch: Touch
    step: Bulk | None
    suspects: set[int]


def alike(batch: Sequence[Work], shapes: Shapes) -> tuple[Shape, list[list[Any]]] | None:
    """The one shape of all effects and their columns of values, if there is but one."""
    try:
        effects: list[Any] = [effect for (effect,) in effects_in(batch)]
        if set(map(type, effects)) != {Upsert}:
            return None
        tables, rows, keys, versions = zip(*effects, strict=True)
        if any(part.count(part[0]) < len(effects) for part in (tables, keys, versions)):
            return None
        if len(set(map(len, rows))) > 1:
            return None
        shape = shapes.of(effects[0])
        # As many columns, and each of these: then they are the same.
        return shape, columns_of(shape, rows)
    except Exception:  # noqa: BLE001 - whatever it is, the long way finds whose it is
        return None


def fold_alike(
    shape: Shape, columns: list[list[Any]], events: Sequence[int], shapes: Shapes
) -> Folded | None:
    """Upserts of one shape with the last of each row left; None: it takes a closer look."""
    ids = _ids(shape, columns)
    places = None if ids is None else _last_places(shape, columns, ids)
    if ids is None or places is None:
        return None
    touch = Touch(shape.table, events, ids)
    if len(places) < len(events):
        doubts = _doubts(shape, columns, set(places.values()), shapes)
        if doubts is None or len(doubts) > MOST_SUSPECTS:
            return None
        if doubts:
            return Folded(touch, None, {events[place] for place in doubts})
    order = sorted(places)  # type: ignore[type-var]  # identities of one kind compare
    chosen = [places[key] for key in order]
    kept = [[column[place] for place in chosen] for column in columns]
    return Folded(touch, Bulk(shape, kept, order, touch), set())


def _doubts(
    shape: Shape, columns: list[list[Any]], kept: set[int], shapes: Shapes
) -> Collection[int] | None:
    """The places that nobody vouches for, among all or those not kept; None: cannot be told."""
    if shape.table.unfolded or not shape.complete:
        return None
    found = set() if all(map(vouches, shape.columns, columns)) else set(doubtful(shape, columns))
    if not shape.table.checks or len(found) > MOST_SUSPECTS:
        return found
    settled = kept | found
    asked = [place for place in range(len(columns[0])) if place not in settled]
    refused = shapes.refused(shape, [[column[place] for place in asked] for column in columns])
    return None if refused is None else found | {asked[place] for place in refused}


def columns_of(shape: Shape, rows: Sequence[Row]) -> list[list[Any]]:
    """The values of the rows by column, in the shape's order."""
    names = [column.name for column in shape.columns]
    return [[row[name] for row in rows] for name in names]


def _ids(shape: Shape, columns: list[list[Any]]) -> Sequence[Hashable] | None:
    """Who is who among rows of one shape; None: it cannot be told from here."""
    unique = shape.table.unique_on(shape.key)
    if unique is None or not unique.deterministic:
        return None
    found = [
        identities(column, values)
        for column, values in zip(shape.columns, columns, strict=True)
        if column.name in shape.key
    ]
    if any(values is None for values in found):
        return None
    return found[0] if len(found) == 1 else list(zip(*found, strict=True))


def _last_places(
    shape: Shape, columns: list[list[Any]], ids: Sequence[Hashable]
) -> dict[Hashable, int] | None:
    """For each row the place of the version that stays; None: it cannot be told from here."""
    if shape.version is None:
        return dict(zip(ids, range(len(ids)), strict=True))
    place = next(
        place for place, column in enumerate(shape.columns) if column.name == shape.version
    )
    versions: list[Any] = [ordered_as(shape.columns[place], value) for value in columns[place]]
    if None in versions:
        return None
    # Stable: of equal versions the later one comes last.
    order = sorted(range(len(versions)), key=versions.__getitem__)
    return {ids[place]: place for place in order}


def vouched(shape: Shape, columns: list[list[Any]]) -> bool:
    """Whether PostgreSQL would take each of these rows by itself."""
    table = shape.table
    if shape.verb != "delete" and (table.unfolded or table.checks or not shape.complete):
        return False
    return all(map(vouches, shape.columns, columns))


def doubtful(shape: Shape, columns: Sequence[Sequence[Any]]) -> list[int]:
    """The places of rows with a value that nobody vouches for."""
    found: set[int] = set()
    for column, values in zip(shape.columns, columns, strict=True):
        for start in range(0, len(values), _JUDGED_TOGETHER):
            block = values[start : start + _JUDGED_TOGETHER]
            if not vouches(column, block):
                found.update(
                    start + place
                    for place, value in enumerate(block)
                    if not vouches(column, [value])
                )
    return sorted(found)
