"""From the effects of a slice to the steps that write them (no I/O of its own).

Between two ``Execute`` effects the rows of a table may be written together: folded where
that cannot be seen, in layers where every row must be written, and in log order where neither
is safe. Tables go parents first, deletes before them and children first, rows in key order.
An error that this order causes is found like any other, and then log order decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sideline.classify import kind_of
from sideline.effects import Effect, Execute, Upsert
from sideline.folding import Layer, Row, in_key_order, layers
from sideline.homes.catalogue import Table
from sideline.homes.judge import identities, ordered_as, vouches
from sideline.homes.statements import RowEffect, Shape, Shapes

# The literals of a statement stay in the processor's cache, and arrays in one piece.
ROWS_PER_STATEMENT = 5_000
# A few events are quicker applied alone than all others unfolded because of them.
MOST_SUSPECTS = 200
# A value costs 40 ns in a crowd and 3 us alone.
_JUDGED_TOGETHER = 32
# More changes of one row than this are quicker one by one than in as many statements.
MOST_LAYERS = 64


class Work(NamedTuple):
    """One event's work; a batch is in log order."""

    key: Hashable | None
    """What its order belongs to; None: the event stands alone."""
    effects: tuple[Effect, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Touch:
    """Which events change which rows of a table; without ``keys`` it cannot be told."""

    table: Table
    events: Sequence[int]
    keys: Sequence[Hashable] | None


class Bulk(NamedTuple):
    """Rows of one shape, each row at most once."""

    shape: Shape
    columns: list[list[Any]]
    """In the order of the shape's columns."""
    ids: Sequence[Hashable]
    """The rows' keys in ``touch``, or the events themselves where there is none."""
    touch: Touch | None


class Ordered(NamedTuple):
    """Effects that are applied one by one, in log order."""

    effects: list[tuple[int, Effect]]


Step = Bulk | Ordered


@dataclasses.dataclass(slots=True)
class Plan:
    """What to write, in order, and what is known about who writes what."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    touches: list[Touch] = dataclasses.field(default_factory=list)
    suspects: set[int] = dataclasses.field(default_factory=set)
    """Events that must be applied alone: an effect of which no statement can be made, or a row
    that would be left out although nobody vouches for it."""
    opaque: bool = False
    """User's SQL is among it: nobody knows which rows it touches."""

    @property
    def short(self) -> bool:
        """Whether one statement does it all."""
        if len(self.steps) != 1 or self.deferrable:
            return False
        step = self.steps[0]
        return isinstance(step, Bulk) and len(step.ids) <= ROWS_PER_STATEMENT

    @property
    def deferrable(self) -> bool:
        """Whether a constraint may wait until COMMIT with its complaint."""
        return self.opaque or any(touch.table.deferrable for touch in self.touches)


def plan(
    batch: Sequence[Work], shapes: Shapes, *, folded: bool, without: Collection[int] = ()
) -> Plan:
    """The steps that write a batch, except the events ``without``."""
    events: Sequence[int] = range(len(batch))
    chosen = batch
    if without:
        events = [event for event in events if event not in without]
        chosen = [batch[event] for event in events]
    if folded:
        uniform = _uniform(chosen, events, shapes)
        if uniform is not None:
            return uniform
    made = Plan()
    segment: list[tuple[int, Effect]] = []
    for event in events:
        for effect in batch[event].effects:
            if type(effect) is Execute:
                _close(made, segment, shapes, folded=folded)
                segment = []
                made.opaque = True
                _in_order(made, [(event, effect)])
            else:
                segment.append((event, effect))
    _close(made, segment, shapes, folded=folded)
    return made


def _uniform(batch: Sequence[Work], events: Sequence[int], shapes: Shapes) -> Plan | None:
    """The plan for the usual slice: one upsert each, all alike. None: not usual.

    Whole columns at a time, so that an event costs about a microsecond.
    """
    alike = _alike(batch, shapes)
    if alike is None or alike[0].table.in_log_order:
        return None
    shape, columns = alike
    ids = _key_of_columns(shape, columns)
    places = None if ids is None else _last_places(shape, columns, ids)
    if ids is None or places is None:
        return None
    touch = Touch(shape.table, events, ids)
    if len(places) < len(batch) and not _vouched(shape, columns):
        return _without_doubtful(shape, columns, touch)
    order = sorted(places)  # type: ignore[type-var]  # identities of one kind compare
    chosen = [places[key] for key in order]
    kept = [[column[place] for place in chosen] for column in columns]
    return Plan(steps=[Bulk(shape, kept, order, touch)], touches=[touch])


def _without_doubtful(shape: Shape, columns: list[list[Any]], touch: Touch) -> Plan | None:
    """No steps, but who must be left out for the usual plan; None: there are too many."""
    places = [] if shape.table.unfolded or not shape.complete else doubtful(shape, columns)
    if not places or len(places) > MOST_SUSPECTS:
        return None
    return Plan(touches=[touch], suspects={touch.events[place] for place in places})


def _alike(batch: Sequence[Work], shapes: Shapes) -> tuple[Shape, list[list[Any]]] | None:
    """The one shape of all effects and their columns of values, if there is but one."""
    try:
        effects: list[Any] = [effect for (effect,) in [work[1] for work in batch]]
        table, _, key, version = effects[0]
        # By index: half the price of a name.
        rows = [
            effect[1]
            for effect in effects
            if type(effect) is Upsert
            and effect[0] == table
            and effect[2] == key
            and effect[3] == version
        ]
        if len(rows) < len(batch) or len(set(map(len, rows))) > 1:
            return None
        shape = shapes.of(effects[0])
        # As many columns, and each of these: then they are the same.
        return shape, columns_of(shape, rows)
    except Exception:  # noqa: BLE001 - whatever it is, the long way finds whose it is
        return None


def columns_of(shape: Shape, rows: Sequence[Row]) -> list[list[Any]]:
    """The values of the rows by column, in the shape's order."""
    names = [column.name for column in shape.columns]
    return [[row[name] for row in rows] for name in names]


def _key_of_columns(shape: Shape, columns: list[list[Any]]) -> Sequence[Hashable] | None:
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


def _vouched(shape: Shape, columns: list[list[Any]]) -> bool:
    """Whether PostgreSQL would take each of these rows by itself."""
    if shape.verb != "delete" and (shape.table.unfolded or not shape.complete):
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


def _in_order(made: Plan, effects: Sequence[tuple[int, Effect]]) -> None:
    if made.steps and isinstance(made.steps[-1], Ordered):
        made.steps[-1].effects.extend(effects)
    else:
        made.steps.append(Ordered(list(effects)))


class _Group(NamedTuple):
    """What a segment does to one table, in log order."""

    events: list[int]
    effects: list[RowEffect]
    shapes: list[Shape]


def _close(made: Plan, segment: list[tuple[int, Effect]], shapes: Shapes, *, folded: bool) -> None:
    """Plan the effects between two barriers."""
    groups: dict[Table, _Group] = {}
    for event, effect in segment:
        try:
            shape = shapes.of(effect)  # type: ignore[arg-type]  # Publish has no row
        except Exception as error:
            if kind_of(error) != "data":
                raise
            made.suspects.add(event)
            continue
        group = groups.get(shape.table)
        if group is None:
            group = groups[shape.table] = _Group([], [], [])
        group.events.append(event)
        group.effects.append(effect)  # type: ignore[arg-type]  # see above
        group.shapes.append(shape)
    if not folded or any(map(_reaches_others, groups.values())):
        made.touches.extend(
            Touch(table, group.events, _identities(table, group)) for table, group in groups.items()
        )
        _in_order(made, [item for item in segment if item[0] not in made.suspects])
        return
    _arrange(made, groups, shapes)


def _reaches_others(group: _Group) -> bool:
    """Whether the group changes rows that it does not name; then only log order is sure."""
    for shape in set(group.shapes):
        if shape.verb == "delete" and shape.table.delete_cascades:
            return True
        changed = {column.name for column in shape.columns} - shape.key
        if shape.verb == "upsert" and changed & shape.table.update_cascades:
            return True
    return False


def _arrange(made: Plan, groups: dict[Table, _Group], shapes: Shapes) -> None:
    """Deletes children first, then everything else parents first."""
    tables = parents_first(groups)
    planned = {table: _table_steps(table, groups[table], shapes) for table in tables}
    for table in reversed(tables):
        made.steps.extend(planned[table].deletes)
    for table in tables:
        made.touches.append(planned[table].touch)
        for step in planned[table].writes:
            if isinstance(step, Ordered):
                _in_order(made, step.effects)
            else:
                made.steps.append(step)


def parents_first(tables: Iterable[Table]) -> list[Table]:
    """Tables after those that they refer to; by name where that does not decide."""
    waiting = sorted(tables, key=lambda table: table.label)
    found: list[Table] = []
    while waiting:
        open_ = {table.oid for table in waiting}
        ready = [table for table in waiting if not table.parents & (open_ - {table.oid})]
        chosen = ready or waiting[:1]  # a circle: somebody has to be first
        found.extend(chosen)
        waiting = [table for table in waiting if table not in chosen]
    return found


class _TableSteps(NamedTuple):
    deletes: list[Step]
    writes: list[Step]
    touch: Touch


def _table_steps(table: Table, group: _Group, shapes: Shapes) -> _TableSteps:
    verbs = {shape.verb for shape in group.shapes}
    if verbs == {"insert"} and not table.in_log_order:
        # New rows share nothing, as far as can be known.
        return _TableSteps([], list(_inserts(group)), Touch(table, group.events, group.events))
    keys = _identities(table, group)
    touch = Touch(table, group.events, keys)
    versions = {shape.version for shape in group.shapes if shape.verb == "upsert"}
    if table.in_log_order or keys is None or "insert" in verbs or len(versions) > 1:
        return _TableSteps([], [_one_by_one(group)], touch)
    rows = [
        None if shape.verb == "delete" else effect.row
        for effect, shape in zip(group.effects, group.shapes, strict=True)
    ]
    version = next(iter(versions), None)
    newer = None if version is None else _newer(table, version)
    stack = layers(keys, rows, vouched=_voucher(group), newer=newer)
    if len(stack) > MOST_LAYERS:
        return _TableSteps([], [_one_by_one(group)], touch)
    identifying = next(iter(group.shapes)).key
    return _in_layers(stack, _Target(table, identifying, version, shapes), group, touch)


def _one_by_one(group: _Group) -> Ordered:
    return Ordered(list(zip(group.events, group.effects, strict=True)))


def _inserts(group: _Group) -> Iterator[Bulk]:
    """Runs of one shape: rows are numbered by their defaults in log order."""
    start = 0
    for end in range(1, len(group.shapes) + 1):
        if end == len(group.shapes) or group.shapes[end] is not group.shapes[start]:
            rows = [effect.row for effect in group.effects[start:end]]
            shape = group.shapes[start]
            yield Bulk(shape, columns_of(shape, rows), group.events[start:end], None)
            start = end


def _identities(table: Table, group: _Group) -> Sequence[Hashable] | None:
    """For each effect the row that it changes; None: rows cannot be told apart from here."""
    keys = {shape.key for shape in group.shapes}
    if len(keys) != 1:
        return None
    (key,) = keys
    unique = table.unique_on(key)
    if unique is None or not unique.deterministic:
        return None
    names = sorted(key)
    columns = [
        _column_identities(table, name, group, distinct_nulls=unique.nulls_distinct)
        for name in names
    ]
    if any(column is None for column in columns):
        return None
    if len(columns) == 1:
        return columns[0]
    return list(zip(*columns, strict=True))


class _Nobody:
    """The identity of a row whose key is NULL: equal to no other."""


def _column_identities(
    table: Table, name: str, group: _Group, *, distinct_nulls: bool
) -> Sequence[Hashable] | None:
    column = table.columns[name]
    values = [effect.row[name] for effect in group.effects]
    if None not in values:
        return identities(column, values)
    if not (column.not_null or distinct_nulls):
        return None
    present = [value for value in values if value is not None]
    found = identities(column, present) if present else []
    if found is None:
        return None
    known = iter(found)
    return [_Nobody() if value is None else next(known) for value in values]


def _newer(table: Table, version: str) -> Callable[[Row, Row], bool | None]:
    column = table.columns[version]

    def newer(standing: Row, coming: Row) -> bool | None:
        old, new = standing[version], coming[version]
        if old is None:
            return True
        if new is None:
            return False
        old, new = ordered_as(column, old), ordered_as(column, new)
        return None if old is None or new is None else bool(new >= old)

    return newer


def _voucher(group: _Group) -> Callable[[Sequence[int]], bool]:
    """Judge whole shapes first, single rows only where a shape does not pass as a whole."""
    passed: dict[Shape, bool] = {}

    def whole(shape: Shape) -> bool:
        if shape not in passed:
            rows = [
                effect.row
                for effect, other in zip(group.effects, group.shapes, strict=True)
                if other is shape
            ]
            passed[shape] = _vouched(shape, columns_of(shape, rows))
        return passed[shape]

    def single(place: int) -> bool:
        shape = group.shapes[place]
        return _vouched(shape, columns_of(shape, [group.effects[place].row]))

    def vouched(places: Sequence[int]) -> bool:
        return all(whole(group.shapes[place]) or single(place) for place in places)

    return vouched


class _Target(NamedTuple):
    table: Table
    key: frozenset[str]
    version: str | None
    shapes: Shapes


def _in_layers(stack: list[Layer], target: _Target, group: _Group, touch: Touch) -> _TableSteps:
    """The first layer's deletes apart: they go before all writes of the segment."""
    keys = dict(zip(touch.keys or (), group.effects, strict=True))
    deletes: list[Step] = []
    writes: list[Step] = []
    for depth, layer in enumerate(stack):
        ordered = in_key_order(layer)
        (writes if depth else deletes).extend(_deletes(ordered, target, keys, touch))
        writes.extend(_upserts(ordered, target, touch))
    return _TableSteps(deletes, writes, touch)


def _deletes(
    layer: Layer, target: _Target, effects: Mapping[Hashable, RowEffect], touch: Touch
) -> Iterator[Bulk]:
    ids = [key for key, change in layer.items() if change.delete]
    if ids:
        shape = target.shapes.make("delete", target.table, target.key, target.key, None)
        rows = [effects[key].row for key in ids]
        yield Bulk(shape, columns_of(shape, rows), ids, touch)


def _upserts(layer: Layer, target: _Target, touch: Touch) -> Iterator[Bulk]:
    rows: dict[frozenset[str], tuple[list[Row], list[Hashable]]] = {}
    for key, change in layer.items():
        if change.row is not None:
            found = rows.setdefault(frozenset(change.row), ([], []))
            found[0].append(change.row)
            found[1].append(key)
    for columns, (written, ids) in rows.items():
        shape = target.shapes.make("upsert", target.table, columns, target.key, target.version)
        yield Bulk(shape, columns_of(shape, written), ids, touch)


def related(batch: Sequence[Work], made: Plan, seeds: Iterable[int]) -> set[int]:
    """The seeds and every event that shares a key or a row with one of them, however far."""
    found: set[int] = set()
    new = set(seeds)
    while new:
        found |= new
        keys = {batch[event].key for event in new} - {None}
        more = {event for event, (key, _) in enumerate(batch) if key in keys}
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
    refused = {step.ids[place] for place in places}
    theirs = events if step.touch is None else rows_of(step.touch, events)
    return refused.issuperset(theirs.intersection(step.ids))
