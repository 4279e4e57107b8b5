"""Who shares a row, a key or a unique value with whom (pure)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from sideline.homes.plans import Batch, Bulk, Ordered, Plan, Step, Touch


def behind(batch: Batch, made: Plan, seeds: Iterable[int]) -> set[int]:
    """The seeds and every later event that shares a key or a row with one of them, however far.

    What comes before them may well be written first.
    """
    # Where rows cannot be told apart, they are all the same one.
    groups = [_Line(range(len(batch)), batch.keys)] + [
        _Line(touch.events, touch.keys or [0] * len(touch.events)) for touch in made.touches
    ]
    found: set[int] = set()
    new = set(seeds)
    while new:
        found |= new
        more: set[int] = set()
        for group in groups:
            more |= group.later(new)
        new = more - found
    return found


class _Line:
    """Events that share names, and from where on each name is known to be spoilt."""

    def __init__(self, events: Sequence[int], names: Sequence[Hashable | None]) -> None:
        self._events = events
        self._names = names
        self._spoilt: dict[Hashable, int] = {}

    def later(self, found: set[int]) -> set[int]:
        """Who has the name of one of the found ones and comes after it, and was not told before."""
        fresh: dict[Hashable, int] = {}
        for event, name in self._named(found):
            if name is not None and event < min(
                fresh.get(name, event + 1), self._spoilt.get(name, event + 1)
            ):
                fresh[name] = event
        if not fresh:
            return set()
        self._spoilt |= fresh
        return {
            event
            for event, name in zip(self._events, self._names, strict=True)
            if name in fresh and event > fresh[name]
        }

    def _named(self, found: set[int]) -> Iterable[tuple[int, Hashable | None]]:
        if isinstance(self._events, range):
            # From zero on, as a batch counts: each event stands at its own place.
            return ((event, self._names[event]) for event in found)
        pairs = zip(self._events, self._names, strict=True)
        return (pair for pair in pairs if pair[0] in found)


def related(batch: Batch, made: Plan, seeds: Iterable[int]) -> set[int]:
    """The seeds and every event that shares a key or a row with one of them, however far."""
    found: set[int] = set()
    new = set(seeds)
    while new:
        found |= new
        keys = {batch.keys[event] for event in new} - {None}
        more = {event for event, key in enumerate(batch.keys) if key in keys}
        for touch in made.touches:
            more |= _sharing(touch, new)
        new = more - found
    return found


def _sharing(touch: Touch, events: set[int]) -> set[int]:
    """Who changes a row of the table that one of the events changes too."""
    if touch.keys is None:
        return set(touch.events) if not events.isdisjoint(touch.events) else set()
    rows = rows_of(touch, events)
    if not rows:
        return set()
    return {event for event, row in zip(touch.events, touch.keys, strict=True) if row in rows}


def rows_of(touch: Touch, events: Collection[int]) -> set[Hashable]:
    """The rows of a table that these events change, where rows can be told apart."""
    keys = touch.keys or ()
    return {row for event, row in zip(touch.events, keys, strict=True) if event in events}


def events_of(step: Step, places: Iterable[int]) -> set[int]:
    """The events that had a part in these rows of a step."""
    if isinstance(step, Ordered):
        return {step.effects[place][0] for place in places}
    rows = {step.ids[place] for place in places}
    if step.touch is None:
        return rows  # type: ignore[return-value]  # then they are events
    keys = step.touch.keys or ()
    return {event for event, row in zip(step.touch.events, keys, strict=True) if row in rows}


def last_of(step: Step, places: Iterable[int]) -> set[int]:
    """The last events that had a part in these rows of a step."""
    if isinstance(step, Ordered) or step.touch is None:
        return events_of(step, places)
    rows = {step.ids[place] for place in places}
    pairs = zip(step.touch.events, step.touch.keys or (), strict=True)
    return set({row: event for event, row in pairs if row in rows}.values())


def rivals_of(made: Plan, step: Bulk, places: Iterable[int]) -> set[int]:
    """Who wants the same unique values as these rows: among them log order decides, not ours."""
    found: set[int] = set()
    for unique in step.shape.table.exclusive:
        # NULL wants no place.
        wanted = {values for values in _values_on(step, unique, places) if None not in values}
        if unique == step.shape.key or not wanted:
            continue
        for other in made.steps:
            if isinstance(other, Bulk) and other.shape.table is step.shape.table:
                every = range(len(other.ids))
                values = _values_on(other, unique, every)
                same = [
                    place for place, value in zip(every, values, strict=False) if value in wanted
                ]
                found |= events_of(other, same)
    return found


def _values_on(
    step: Bulk, names: frozenset[str], places: Iterable[int]
) -> list[tuple[str | None, ...]]:
    """What the rows at these places say about the columns; nothing if they do not name them."""
    chosen = [
        values
        for column, values in zip(step.shape.columns, step.columns, strict=True)
        if column.name in names
    ]
    if len(chosen) < len(names):
        return []
    return [
        tuple(None if values[place] is None else str(values[place]) for values in chosen)
        for place in places
    ]


def wrote_none_of(made: Plan, refused: Mapping[int, Collection[int]], events: set[int]) -> bool:
    """Whether of these events nothing was written: each of their rows was refused at each step.

    ``refused``: by the number of the step, the places of its rows.
    """
    return all(
        _step_wrote_none_of(step, refused.get(number, ()), events)
        for number, step in enumerate(made.steps)
    )


def _step_wrote_none_of(step: Step, places: Collection[int], events: set[int]) -> bool:
    if isinstance(step, Ordered):
        return all(event not in events for event, _ in step.effects)
    # By places, not by ids: an event may insert several rows, of which some were taken.
    refused = set(places)
    theirs = events if step.touch is None else rows_of(step.touch, events)
    return all(place in refused for place, row in enumerate(step.ids) if row in theirs)
