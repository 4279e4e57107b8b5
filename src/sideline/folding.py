"""What remains of many changes of one row (pure).

A slice writes each row once where that gives what writing every event would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Newer = Callable[[Row, Row], "bool | None"]
"""(standing, coming): whether the coming row replaces the standing one; None: cannot be told."""


Change = tuple[bool, "Row | None"]
"""One step of one row: whether it is deleted, and what is (then) written. A plain tuple: there
are as many as events."""
Layer = dict[Hashable, Change]
"""At most one change of each row: what one statement can do."""


def fold(rows: Sequence[Row | None], newer: Newer | None) -> list[Change]:
    """The fewest changes with the outcome of these upserts and deletes (None), in their order.

    Without ``newer`` the last one wins column by column. With it, a row replaces a standing one
    of the same columns or does nothing, so rows of different columns stay apart: which of them
    the version lets pass depends on the row in the database.
    """
    changes: list[Change] = []
    for row in rows:
        if row is None:
            changes = [(True, None)]
        elif not changes:
            changes = [(False, row)]
        else:
            _add(changes, row, newer)
    return changes


def _add(changes: list[Change], row: Row, newer: Newer | None) -> None:
    delete, standing = changes[-1]
    if standing is None:
        changes[-1] = (delete, row)
    elif newer is None:
        changes[-1] = (delete, {**standing, **row})
    else:
        replaces = newer(standing, row) if standing.keys() == row.keys() else None
        if replaces is None:
            changes.append((False, row))
        elif replaces:
            changes[-1] = (delete, row)


def unfolded(rows: Sequence[Row | None]) -> list[Change]:
    """Every change by itself."""
    return [(row is None, row) for row in rows]


def layers(
    keys: Sequence[Hashable],
    rows: Sequence[Row | None],
    *,
    vouched: Callable[[Sequence[int]], bool],
    newer: Newer | None,
) -> list[Layer]:
    """Sort the changes of a table into layers that are written one after the other.

    ``keys`` and ``rows`` run in parallel, in log order. Only rows that are ``vouched`` for (by
    their positions) may be left out or merged; the others all reach the database, where an
    error that a later row would have hidden is found.
    """
    if len(set(keys)) == len(keys):
        return [dict(zip(keys, unfolded(rows), strict=True))]
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    found: list[Layer] = []
    for key, places in positions.items():
        written = [rows[place] for place in places]
        if len(places) == 1 or not vouched(places):
            changes = unfolded(written)
        else:
            changes = fold(written, newer)
        for depth, change in enumerate(changes):
            if depth == len(found):
                found.append({})
            found[depth][key] = change
    return found


def in_key_order(layer: Layer) -> Layer:
    """The same for every partition, so that two of them never wait for each other in a circle."""
    try:
        return {key: layer[key] for key in sorted(layer)}  # type: ignore[type-var]
    except TypeError:  # keys of several types have no order that everybody shares
        return layer
