"""What becomes of each event of a slice, for any slice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline import Delete, Event, Execute, Insert, Upsert
from sideline.effects import Publish
from sideline.slices import (
    NOTHING,
    Failure,
    Handled,
    account,
    admit,
    effects_of,
    release,
    setback,
)

ROWS = (Upsert, Insert, Delete, Execute)
EFFECT = Insert("t", {"a": 1})


def events_at(offsets):
    return [Event("t", 0, offset, offset * 10, b"k", b"v") for offset in offsets]


offsets = st.lists(st.integers(0, 200), unique=True).map(sorted)


@given(offsets, st.integers(0, 200), st.none() | st.integers(0, 200))
def test_admitted_is_what_is_neither_done_nor_beyond_the_bound(log, next_offset, bound):
    """Exactly those events, in log order, whatever holes there are (C1)."""
    admitted = admit(events_at(log), next_offset, bound)
    wanted = [o for o in log if o >= next_offset and (bound is None or o < bound)]
    assert [event.offset for event in admitted] == wanted


@given(offsets, st.integers(0, 200))
def test_admitting_changes_nothing(log, next_offset):
    """The buffer that the events come from stays as it is."""
    events = events_at(log)
    before = list(events)
    admit(events, next_offset)
    assert events == before


@st.composite
def handled_slices(draw):
    log = draw(offsets)
    effects = [draw(st.sampled_from([NOTHING, (EFFECT,), (EFFECT, EFFECT)])) for _ in log]
    idle = effects.count(NOTHING)
    skipped = draw(st.integers(0, idle))
    start = draw(st.integers(0, log[0] if log else 200))
    end = draw(st.integers(log[-1] + 1 if log else start, 300))
    keys = draw(st.none() | st.just([b"k"] * len(log)))
    return Handled(start, end, events_at(log), effects, skipped, keys=keys)


@given(handled_slices())
def test_every_event_has_one_outcome(handled):
    """Consumed is applied, filtered and skipped, and nothing else."""
    counts = account(handled)
    assert counts.consumed == len(handled.events)
    assert counts.consumed == counts.applied + counts.filtered + counts.skipped
    assert min(counts.applied, counts.filtered, counts.skipped) >= 0
    assert counts.end == handled.end
    assert counts.failure is None


@given(handled_slices(), st.integers(0, 200))
def test_a_prefix_ends_where_the_rest_begins(handled, count):
    """Progress behind a prefix stands at the first event that is not in it: none is passed (C1)."""
    prefix = handled.prefix(count)
    rest = handled.events[count:]
    assert list(prefix.events) == list(handled.events[:count])
    assert list(prefix.effects) == list(handled.effects[:count])
    assert prefix.keys is None or len(prefix.keys) == len(prefix.events)
    assert prefix.start == handled.start
    assert prefix.end == (rest[0].offset if rest else handled.end)
    assert all(event.offset >= prefix.end for event in rest)


def test_whoever_has_no_effects_waits_behind_a_refused_row_too():
    """Filtered or failed by itself: a slice's end between the two would change nothing (K9)."""
    events = [Event("t", 0, offset, 0, key.encode(), b"") for offset, key in enumerate("aabbaa")]
    own = Failure(events[4], "handler", ValueError())
    handled = Handled(0, 6, events, [(EFFECT,), (), (EFFECT,), (), (), (EFFECT,)], parked={4: own})
    refused = Failure(events[0], "write", ValueError())
    left = setback(handled, {0: refused, 5: None}, _parks)
    assert left.parked == {0: refused, 1: None, 4: None, 5: None}
    assert [bool(effects) for effects in left.effects] == [False, False, True, False, False, False]
    assert setback(handled, {2: refused}, _parks).parked == {2: refused, 3: None, 4: own}


# What a handler may return


@pytest.mark.parametrize(
    ("result", "effects"),
    [
        (None, ()),
        (EFFECT, (EFFECT,)),
        ([EFFECT, EFFECT], (EFFECT, EFFECT)),
        ((EFFECT,), (EFFECT,)),
        ([], ()),
        (iter([EFFECT]), (EFFECT,)),
        ({EFFECT.table: EFFECT}.values(), (EFFECT,)),
    ],
)
def test_effects_come_one_by_one_or_several(result, effects):
    """One, several, a generator, or None."""
    assert effects_of(result, ROWS) == effects


@pytest.mark.parametrize(
    "result",
    ["users", b"users", {"id": 1}, 7, True, object(), [EFFECT, None], [EFFECT, "x"], ("t", {})],
)
def test_anything_else_is_the_events_own_error(result):
    """Text and mappings are iterable too: they are not taken for effects."""
    with pytest.raises(TypeError, match="handler returned"):
        effects_of(result, ROWS)


@pytest.mark.parametrize("result", [Publish("t", b"v"), [Publish("t", b"v")]])
def test_an_effect_of_another_sink_does_not_fit(result):
    """An effect is a tuple; it must not pass as a tuple of effects."""
    with pytest.raises(TypeError, match="Publish"):
        effects_of(result, ROWS)
    with pytest.raises(TypeError, match="takes no effects"):
        effects_of(EFFECT, ())


def _parks(_failure):
    return "parked"


class Traced:
    """Tells when it is freed."""

    def __init__(self, name, freed):
        self.name, self.freed = name, freed

    def __del__(self):
        self.freed.append(self.name)


def test_a_slice_with_failures_is_freed_last_made_first():
    """Memory comes back in the order in which the next slice wants it."""
    freed = []
    effects = [(Traced(place, freed),) if place not in {2, 5} else NOTHING for place in range(8)]
    parked = {2: Failure(None, "handler", Traced(2, freed)), 3: None}
    dead = {5: Failure(None, "handler", Traced(5, freed))}
    handled = Handled(0, 8, (), effects, parked=parked, dead=dead)
    del effects, parked, dead
    release(handled)
    assert freed == [7, 6, 5, 4, 3, 2]
    assert handled.setbacks == set()
    del handled
    assert freed == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("effects", [[NOTHING] * 3, (NOTHING,) * 3])
def test_a_slice_without_failures_is_left_alone(effects):
    """It is freed in the right order by itself; and what is no list cannot be cut."""
    handled = Handled(0, 3, (), effects)
    release(handled)
    assert handled.effects == effects
