"""The user's handler over a run of events: what it returned, and where it stopped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline import Block, Calls, Event, Execute, Insert, Pipeline, Recoverable, Skip, Upsert
from sideline.engine.handling import HANDLING_SECONDS, handle
from sideline.errors import ParkedByHand
from sideline.flood import Tally
from sideline.policies import FloodGuard
from sideline.slices import Aside
from sideline.testing import FakeClock, event, run_slice

ROW = Upsert("users", {"id": 1}, key="id")


def several():
    yield ROW
    yield Insert("log", {"id": 1})


def broken():
    yield ROW
    message = "in the generator"
    raise ValueError(message)


def raising(error):
    def act():
        raise error

    return act


GOOD = {
    "an upsert": lambda: ROW,
    "nothing": lambda: None,
    "several": several,
    "a list": lambda: [ROW, ROW],
    "sql": lambda: Execute("select 1"),
}
BAD = {
    "an error": raising(ValueError("no")),
    "to be tried again": raising(Recoverable("later")),
    "an exit": raising(SystemExit(3)),
    # next() of nothing: to a loop inside ours it would look like the end of the events.
    "the end of an iterator": raising(StopIteration()),
    "the end of a generator": raising(GeneratorExit()),
    "no effect": lambda: 7,
    "a broken generator": broken,
}
ACTS = GOOD | BAD


def pipeline_of(**options):
    pipeline = Pipeline("login", topics="users", **options)
    pipeline.handler(lambda event: ACTS[event.value.decode()]())
    return pipeline


def events_of(names, keys=None):
    return [
        Event("users", 0, 2 * number, number, keys[number] if keys else None, name.encode())
        for number, name in enumerate(names)
    ]


def run(pipeline, events, clock=None, **options):
    clock = clock or FakeClock()
    return handle(pipeline, events, start=0, end=2 * len(events) + 5, clock=clock, **options)


NAMES = st.sampled_from(sorted(ACTS)) | st.just("an upsert")
names = st.lists(NAMES, max_size=60)
KEYS = st.sampled_from([None, b"", b"a", b"b", b"c", b"\xff\x00"])
keyed = st.lists(st.tuples(NAMES, KEYS), max_size=60)
# Derived, it is the same key, said by other means.
deriving = st.sampled_from([{}, {"key": lambda event: event.key}])
LATER = "to be tried again"


@given(names, deriving)
def test_everything_before_the_first_that_waits_is_handled(wanted, options):
    """And nothing behind it; the failure is that event's, whatever it raised (C1, F6, F14)."""
    events = events_of(wanted)
    handled, failure = run(pipeline_of(on_failure=Block(), **options), events)
    first = next((n for n, name in enumerate(wanted) if name in BAD), len(wanted))
    assert list(handled.events) == events[:first]
    assert len(handled.effects) == first
    assert not handled.skipped
    if first < len(wanted):
        assert failure is not None
        assert failure.event == events[first]
        assert handled.end == events[first].offset
    else:
        assert failure is None
        assert handled.end == 2 * len(events) + 5
    assert handled.executes == ("sql" in wanted[:first])


@given(keyed, deriving, st.sets(KEYS.filter(lambda key: key is not None)))
def test_what_fails_is_set_aside_and_its_key_waits_behind_it(wanted, options, already):
    """Others go on; keys that are aside already only get longer (F3, F4, C1)."""
    events = events_of([name for name, _ in wanted], [key for _, key in wanted])
    aside = Aside(1, *(((), already) if options else (already,)))
    handled, failure = run(pipeline_of(**options), events, aside=aside)
    waiting, failed, follows = set(already), [], []
    for place, (name, key) in enumerate(wanted):
        if key in waiting:
            follows.append(place)
        elif name == LATER:
            assert failure is not None
            assert failure.event == events[place]
            break
        elif name in BAD:
            failed.append(place)
            waiting |= {key} - {None}
    else:
        place = len(wanted)
        assert failure is None
    assert list(handled.events) == events[:place]
    assert [n for n, why in sorted(handled.parked.items()) if why is None] == follows
    assert [n for n, why in sorted(handled.parked.items()) if why is not None] == failed
    assert all(handled.effects[n] == () for n in handled.parked)
    assert all(
        handled.effects[n]
        for n in range(place)
        if n not in handled.parked and wanted[n][0] != "nothing"
    )


def test_an_event_whose_key_nobody_can_tell_waits_under_its_record_key():
    """It may belong to whatever has that record key: that waits, and its own key too (F14, K15)."""
    pipeline = Pipeline("login", topics="users", key=lambda event: event.json()["id"])
    pipeline.handler(lambda event: ROW)
    bodies = [b'{"id": 1}', b"not json", b'{"id": 2}', b'{"id": 2}', b'{"id": 3}']
    records = [b"k", b"k", b"k", b"other", b"other"]
    events = [
        Event("users", 0, number, 0, key, body)
        for number, (key, body) in enumerate(zip(records, bodies, strict=True))
    ]
    handled, failure = run(pipeline, events)
    assert failure is None
    assert sorted(handled.parked) == [1, 2, 3]
    assert handled.parked[1].stage == "key"
    assert handled.own_key(1) == (b"k", False)
    assert handled.own_key(2) == (b"2", True)


@given(keyed, st.integers(1, 5), deriving)
def test_a_flood_ends_before_the_event_that_is_one_too_many(wanted, in_a_row, options):
    """Followers do not count, and what came before it is kept (F12)."""
    wanted = [(name, key) for name, key in wanted if name != LATER]
    events = events_of([name for name, _ in wanted], [key for _, key in wanted])
    tally = Tally(FloodGuard(in_a_row=in_a_row), None)
    handled, failure = run(pipeline_of(**options), events, tally=tally)
    row = 0
    for place in range(len(handled.events)):
        if place not in handled.parked:
            row = 0
        elif handled.parked[place] is not None:
            row += 1
        assert row < in_a_row
    if len(handled.events) < len(events):
        assert failure is not None
        assert failure.stage == "guard"
        assert row == in_a_row - 1
    else:
        assert failure is None


@pytest.mark.parametrize("options", [{}, {"on_failure": Block()}, {"on_failure": Skip()}])
def test_an_event_that_a_person_set_aside_is_not_tried(options):
    """Whatever the policy is: its partition waited for it."""
    events = events_of(["an upsert", "an upsert", "an upsert"], [b"a", b"b", b"b"])
    handled, failure = run(pipeline_of(**options), events, forced={2: ParkedByHand("enough")})
    assert failure is None
    assert isinstance(handled.parked[1].error, ParkedByHand)
    assert handled.parked[2] is None
    assert handled.effects[0] == (ROW,)


def test_a_persons_word_comes_before_what_key_says():
    """Also where key= is what fails: the event is set aside by the record's own key (F6)."""
    events = events_of(["an upsert", "an upsert"], [b"a", b"a"])
    pipeline = pipeline_of(on_failure=Block(), key=lambda event: 1 // event.offset)
    handled, failure = run(pipeline, events, forced={0: ParkedByHand("enough")})
    assert failure is None
    assert isinstance(handled.parked[0].error, ParkedByHand)
    assert handled.parked[1] is None
    assert handled.own_key(0) == (b"a", False)


@given(names, deriving)
def test_failing_events_are_left_out(wanted, options):
    """Skip leaves out what fails for a reason of its own; what heals still waits (F5, F2)."""
    events = events_of(wanted)
    handled, failure = run(pipeline_of(on_failure=Skip(), **options), events)
    waits = wanted.index(LATER) if LATER in wanted else len(wanted)
    assert list(handled.events) == events[:waits]
    assert sorted(handled.skipped) == [n for n, name in enumerate(wanted[:waits]) if name in BAD]
    assert (failure is None) == (waits == len(wanted))
    if handled.keys is not None:
        assert len(handled.keys) == len(handled.events)


@pytest.mark.parametrize("options", [{}, {"on_failure": Skip()}])
def test_ctrl_c_is_nobodys_failure(options):
    """Whoever stops the worker does not make an event fail."""
    pipeline = Pipeline("login", topics="users", **options)
    pipeline.handler(raising_event(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(pipeline, events_of(["an upsert"]))


def raising_event(error):
    def handler(event):
        raise error

    return handler


@pytest.mark.parametrize("options", [{}, {"key": lambda event: event.key}])
def test_a_slice_ends_when_its_time_is_over(options):
    """A lease ends in time, however slow a handler is; what was handled counts."""
    clock = FakeClock()
    pipeline = Pipeline("login", topics="users", **options)

    @pipeline.handler
    def slow(event):
        clock.advance(HANDLING_SECONDS / 4)
        return ROW

    events = events_of(["an upsert"] * 50)
    handled, failure = run(pipeline, events, clock)
    assert failure is None
    assert 4 <= len(handled.events) <= 8
    assert handled.end == events[len(handled.events)].offset


def test_an_event_is_handled_once_a_slice():
    """However runs are cut, every event is handled once, in log order (C1)."""
    seen = []
    pipeline = Pipeline("calls", topics="users", sink=Calls())
    pipeline.handler(lambda event: seen.append(event.offset))
    events = events_of(["nothing"] * 1000)
    run(pipeline, events)
    assert seen == [event.offset for event in events]


@pytest.mark.parametrize("first", ["no effect", "a broken generator", "an error"])
def test_a_later_failure_of_a_key_only_follows(first):
    """Whether both were tried in one run or not (F4)."""
    names = [*["an upsert"] * 7, first, "an error", "an upsert"]
    keys = [*[b"other"] * 7, b"k", b"k", b"k"]
    handled, _ = run(pipeline_of(), events_of(names, keys))
    assert {place: why is None for place, why in handled.parked.items()} == {
        7: False,
        8: True,
        9: True,
    }


def test_slices_in_tests_know_keys():
    """`run_slice` shows that ``key=`` fails, as a run would see it; the handler is not asked."""
    pipeline = Pipeline("p", topics="t", key=lambda one: one.json()["id"])
    asked = []
    pipeline.handler(lambda one: asked.append(one.offset))
    result = run_slice(pipeline, [event({"id": "1"}, offset=0), event({"name": "x"}, offset=1)])
    assert asked == [0]
    assert (result.failures[1].stage, type(result.failures[1].error)) == ("key", KeyError)
