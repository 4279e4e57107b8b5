"""From the effects of a slice to the steps that write them (no I/O of its own).

Between two ``Execute`` effects the rows of a table may be written together: folded where
that cannot be seen, in layers where every row must be written, and in log order where neither
is safe. Tables go parents first, deletes before them and children first, rows in key order.
An error that this order causes is found like any other, and then log order decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sideline.classify import kind_of
from sideline.effects import Effect, Execute
from sideline.folding import Layer, Row, in_key_order, layers
from sideline.homes.alike import alike, columns_of, fold_alike, fold_rest, vouched
from sideline.homes.judge import identities, ordered_as
from sideline.homes.plans import Batch, Bulk, Ordered, Plan, Step, Touch, Usual
from sideline.homes.statements import RowEffect, Shape, Shapes
from sideline.homes.tables import Table

# More changes of one row than this are quicker one by one than in as many statements.
MOST_LAYERS = 64


def plan(batch: Batch, shapes: Shapes, *, folded: bool) -> Plan:
    """The steps that write a batch."""
    return _plan(batch, range(len(batch)), shapes, folded=folded, judged=False)


def plan_usual(batch: Batch, shapes: Shapes) -> Plan | None:
    """The same for the usual slice alone; None: it is not one."""
    return _usual(batch, range(len(batch)), shapes, judged=False)


def plan_rest(
    batch: Batch, made: Plan, shapes: Shapes, *, folded: bool, without: Collection[int]
) -> Plan:
    """The steps that write a batch that was planned before, except some of its events.

    What is left of the usual slice has been judged then, and without them nothing more is folded
    away.
    """
    rest = None if made.usual is None else fold_rest(made.usual, without)
    if rest is not None and rest.step is not None:
        return Plan([rest.step], [rest.touch], usual=made.usual)
    events, left = batch.without(without)
    return _plan(left, events, shapes, folded=folded, judged=True)


def _plan(
    batch: Batch, events: Sequence[int], shapes: Shapes, *, folded: bool, judged: bool
) -> Plan:
    usual = _usual(batch, events, shapes, judged=judged) if folded else None
    if usual is not None:
        return usual
    made = Plan()
    for segment in _segments(batch, events):
        if isinstance(segment, Ordered):
            made.opaque = True
            _in_order(made, segment.effects)
        else:
            _close(made, segment, shapes, folded=folded)
    return made


def _usual(batch: Batch, events: Sequence[int], shapes: Shapes, *, judged: bool) -> Plan | None:
    """The plan for the usual slice: one upsert each, all alike. None: not usual."""
    found = alike(batch, shapes)
    if found is None or found[0].table.in_log_order or _reaches_others([found[0]]):
        return None
    folded = fold_alike(*found, events, shapes, judged=judged)
    if folded is None:
        return None
    steps: list[Step] = [] if folded.step is None else [folded.step]
    # Of a part of a batch no other part can be made: its events are numbered otherwise.
    whole = None if judged or folded.touch.keys is None else Usual(*found, folded.touch.keys)
    return Plan(steps, [folded.touch], folded.suspects, usual=whole)


class _Segment(NamedTuple):
    """Effects between two barriers, in log order."""

    events: Sequence[int]
    effects: Sequence[Any]


def _segments(batch: Batch, events: Sequence[int]) -> Iterator[_Segment | Ordered]:
    lists = batch.effects
    effects = [effect for several in lists for effect in several]
    owners = [event for event, several in zip(events, lists, strict=True) for _ in several]
    if Execute not in set(map(type, effects)):
        yield _Segment(owners, effects)
        return
    start = 0
    for place, effect in enumerate(effects):
        if type(effect) is Execute:
            if start < place:
                yield _Segment(owners[start:place], effects[start:place])
            yield Ordered([(owners[place], effect)])
            start = place + 1
    yield _Segment(owners[start:], effects[start:])


def _in_order(made: Plan, effects: Sequence[tuple[int, Effect]]) -> None:
    if made.steps and isinstance(made.steps[-1], Ordered):
        made.steps[-1].effects.extend(effects)
    else:
        made.steps.append(Ordered(list(effects)))


class _Group(NamedTuple):
    """What a segment does to one table, in log order."""

    events: Sequence[int]
    effects: Sequence[RowEffect]
    shapes: Sequence[Shape]


def _close(made: Plan, segment: _Segment, shapes: Shapes, *, folded: bool) -> None:
    """Plan the effects between two barriers."""
    whole = _with_shapes(made, segment, shapes)
    groups = _by_table(whole)
    if folded and not _reaches_others(set(whole.shapes)):
        _arrange(made, groups, shapes)
        return
    made.touches.extend(
        Touch(table, group.events, _identities(table, group)) for table, group in groups.items()
    )
    _in_order(made, list(zip(whole.events, whole.effects, strict=True)))


def _with_shapes(made: Plan, segment: _Segment, shapes: Shapes) -> _Group:
    """The effects that statements can be made of; events with others are suspects."""
    found = shapes.known(segment.effects)
    if found is not None:
        return _Group(segment.events, segment.effects, found)
    group: _Group = _Group([], [], [])
    for event, effect in zip(*segment, strict=True):
        try:
            shape = shapes.of(effect)
        except Exception as error:
            if kind_of(error) != "data":
                raise
            made.suspects.add(event)
        else:
            for part, value in zip(group, (event, effect, shape), strict=True):
                part.append(value)  # type: ignore[attr-defined]  # lists, made above
    return group


def _by_table(whole: _Group) -> dict[Table, _Group]:
    tables = {shape.table for shape in set(whole.shapes)}
    if len(tables) == 1:
        return {tables.pop(): whole}
    places: dict[Table, list[int]] = {table: [] for table in tables}
    for place, shape in enumerate(whole.shapes):
        places[shape.table].append(place)
    return {
        table: _Group(*([part[place] for place in chosen] for part in whole))  # type: ignore[arg-type]
        for table, chosen in places.items()
    }


def _reaches_others(shapes: Iterable[Shape]) -> bool:
    """Whether they change rows that they do not name; then only log order is sure."""
    for shape in shapes:
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
        made.suspects.update(planned[table].suspects)
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
    touch: Touch
    deletes: Sequence[Step] = ()
    writes: Sequence[Step] = ()
    suspects: Collection[int] = ()


def _table_steps(table: Table, group: _Group, shapes: Shapes) -> _TableSteps:
    kinds = set(group.shapes)
    verbs = {shape.verb for shape in kinds}
    versions = {shape.version for shape in kinds if shape.verb == "upsert"}
    if table.in_log_order or len(verbs - {"delete"}) > 1 or len(versions) > 1:
        return _one_by_one(Touch(table, group.events, _identities(table, group)), group)
    if verbs == {"insert"}:
        # New rows share nothing, as far as can be known.
        return _TableSteps(Touch(table, group.events, group.events), (), list(_inserts(group)))
    if len(kinds) == 1 and verbs == {"upsert"}:
        folded = _folded(group, shapes)
        if folded is not None:
            return folded
    touch = Touch(table, group.events, _identities(table, group))
    if touch.keys is None or "insert" in verbs:
        return _one_by_one(touch, group)
    version = next(iter(versions), None)
    target = _Target(table, group.shapes[0].key, version, shapes)
    return _in_layers(target, group, touch)


def _one_by_one(touch: Touch, group: _Group) -> _TableSteps:
    effects: list[tuple[int, Effect]] = list(zip(group.events, group.effects, strict=True))
    return _TableSteps(touch, (), [Ordered(effects)])


def _folded(group: _Group, shapes: Shapes) -> _TableSteps | None:
    """Upserts that are all alike, by whole columns."""
    shape = group.shapes[0]
    columns = columns_of(shape, [effect.row for effect in group.effects])
    folded = fold_alike(shape, columns, group.events, shapes)
    if folded is None:
        return None
    writes: list[Step] = [] if folded.step is None else [folded.step]
    return _TableSteps(folded.touch, (), writes, folded.suspects)


def _inserts(group: _Group) -> Iterator[Bulk]:
    """Runs of one shape: rows are numbered by their defaults in log order."""
    start = 0
    ends = [
        place
        for place, (shape, before) in enumerate(
            zip(group.shapes[1:], group.shapes, strict=False), 1
        )
        if shape is not before
    ]
    for end in [*ends, len(group.shapes)]:
        shape = group.shapes[start]
        columns = columns_of(shape, [effect.row for effect in group.effects[start:end]])
        yield Bulk(shape, columns, group.events[start:end], None)
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
            passed[shape] = vouched(shape, columns_of(shape, rows))
        return passed[shape]

    def single(place: int) -> bool:
        shape = group.shapes[place]
        return vouched(shape, columns_of(shape, [group.effects[place].row]))

    def every(places: Sequence[int]) -> bool:
        return all(whole(group.shapes[place]) or single(place) for place in places)

    return every


class _Target(NamedTuple):
    table: Table
    key: frozenset[str]
    version: str | None
    shapes: Shapes


def _in_layers(target: _Target, group: _Group, touch: Touch) -> _TableSteps:
    """Write each row as often as it must be; the first deletes before all writes of the segment."""
    rows = [
        None if shape.verb == "delete" else effect.row
        for effect, shape in zip(group.effects, group.shapes, strict=True)
    ]
    newer = None if target.version is None else _newer(target.table, target.version)
    stack = layers(touch.keys or (), rows, vouched=_voucher(group), newer=newer)
    if len(stack) > MOST_LAYERS:
        return _one_by_one(touch, group)
    effects = dict(zip(touch.keys or (), group.effects, strict=True))
    deletes: list[Step] = []
    writes: list[Step] = []
    for depth, layer in enumerate(stack):
        ordered = in_key_order(layer)
        (writes if depth else deletes).extend(_deletes(ordered, target, effects, touch))
        writes.extend(_upserts(ordered, target, touch))
    return _TableSteps(touch, deletes, writes)


def _deletes(
    layer: Layer, target: _Target, effects: Mapping[Hashable, RowEffect], touch: Touch
) -> Iterator[Bulk]:
    ids = [key for key, (delete, _) in layer.items() if delete]
    if ids:
        shape = target.shapes.make("delete", target.table, target.key, target.key, None)
        rows = [effects[key].row for key in ids]
        yield Bulk(shape, columns_of(shape, rows), ids, touch)


def _upserts(layer: Layer, target: _Target, touch: Touch) -> Iterator[Bulk]:
    rows: dict[tuple[str, ...], tuple[list[Row], list[Hashable]]] = {}
    for key, (_, row) in layer.items():
        if row is not None:
            written, ids = rows.setdefault(tuple(row), ([], []))
            written.append(row)
            ids.append(key)
    for names, (written, ids) in rows.items():
        columns = frozenset(names)
        shape = target.shapes.make("upsert", target.table, columns, target.key, target.version)
        yield Bulk(shape, columns_of(shape, written), ids, touch)
