"""Rows of one shape, judged and folded by whole columns: a microsecond an event (pure)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sideline.effects import Upsert
from sideline.folding import Row
from sideline.homes.judge import identities, ordered_as, refused_alone, vouches
from sideline.homes.plans import MOST_SUSPECTS, Batch, Bulk, Touch, Usual
from sideline.homes.statements import Shape, Shapes
from sideline.homes.tables import Column

_SHAPE = attrgetter("table"), attrgetter("key"), attrgetter("version")
# A value costs 40 ns in a crowd and 3 us alone.
_JUDGED_TOGETHER = (1024, 32, 1)


class Folded(NamedTuple):
    """One statement's worth of rows, or those who must be left out first."""

    touch: Touch
    step: Bulk | None
    suspects: set[int]


def alike(batch: Batch, shapes: Shapes) -> tuple[Shape, list[list[Any]]] | None:
    """The one shape of all effects and their columns of values, if there is but one."""
    try:
        effects: list[Any] = [effect for (effect,) in batch.effects]
        if set(map(type, effects)) != {Upsert}:
            return None
        if any(len(set(map(part, effects))) > 1 for part in _SHAPE):
            return None
        rows = [effect.row for effect in effects]
        if len(set(map(len, rows))) > 1:
            return None
        shape = shapes.of(effects[0])
        # As many columns, and each of these: then they are the same.
        return shape, columns_of(shape, rows)
    except Exception:  # noqa: BLE001 - whatever it is, the long way finds whose it is
        return None


def fold_alike(
    shape: Shape,
    columns: list[list[Any]],
    events: Sequence[int],
    shapes: Shapes,
    *,
    judged: bool = False,
) -> Folded | None:
    """Upserts of one shape with the last of each row left; None: it takes a closer look.

    ``judged``: they are left of more that passed here before.
    """
    ids = _ids(shape, columns)
    places = None if ids is None else _last_places(shape, columns, ids)
    if ids is None or places is None:
        return None
    touch = Touch(shape.table, events, ids)
    if len(places) < len(events) and not (judged and shape.complete and not shape.table.unfolded):
        doubts = _doubts(shape, columns, places.values(), shapes)
        if doubts is None or len(doubts) > MOST_SUSPECTS:
            return None
        if doubts:
            return Folded(touch, None, {events[place] for place in doubts})
    return Folded(touch, _last_ones(shape, columns, places, touch), set())


def fold_rest(usual: Usual, without: Collection[int]) -> Folded | None:
    """What is left of a batch that was folded and judged before; None: it takes a closer look."""
    shape, columns, ids = usual
    if shape.version is not None or not shape.complete or shape.table.unfolded:
        return None
    left = [place for place in range(len(ids)) if place not in without]
    if not left:
        return None
    touch = Touch(shape.table, left, list(map(ids.__getitem__, left)))
    places = dict(zip(touch.keys or (), left, strict=True))
    return Folded(touch, _last_ones(shape, columns, places, touch), set())


def _last_ones(
    shape: Shape, columns: list[list[Any]], places: dict[Hashable, int], touch: Touch
) -> Bulk:
    order = sorted(places)  # type: ignore[type-var]  # identities of one kind compare
    chosen = list(map(places.__getitem__, order))
    return Bulk(shape, [_picked(column, chosen) for column in columns], order, touch)


def _picked(values: list[Any], places: list[int]) -> list[Any]:
    # One place alone would come without a tuple around it.
    return list(itemgetter(*places)(values)) if len(places) > 1 else [values[places[0]]]


def _doubts(
    shape: Shape, columns: list[list[Any]], kept: Collection[int], shapes: Shapes
) -> Collection[int] | None:
    """The places that nobody vouches for, among all or those not kept; None: cannot be told."""
    if shape.table.unfolded or not shape.complete:
        return None
    found = set(doubtful(shape, columns))
    if not shape.table.checks or len(found) > MOST_SUSPECTS:
        return found
    settled = found.union(kept)
    asked = [place for place in range(len(columns[0])) if place not in settled]
    refused = shapes.refused(shape, [[column[place] for place in asked] for column in columns])
    return None if refused is None else found | {asked[place] for place in refused}


def columns_of(shape: Shape, rows: Sequence[Row]) -> list[list[Any]]:
    """The values of the rows by column, in the shape's order."""
    names = [column.name for column in shape.columns]
    return [list(map(itemgetter(name), rows)) for name in names]


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
        few = refused_alone(column, values)
        found.update(_doubted(column, values, 0) if few is None else few)
    return sorted(found)


def _doubted(column: Column, values: Sequence[Any], first: int) -> Iterator[int]:
    """Where the values are that nobody vouches for, the first of them at ``first``."""
    if vouches(column, values):
        return
    if len(values) == 1:
        yield first
        return
    size = next(size for size in _JUDGED_TOGETHER if size < len(values))
    for start in range(0, len(values), size):
        yield from _doubted(column, values[start : start + size], first + start)
