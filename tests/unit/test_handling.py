"""The user's handler over a run of events: what it returned, and where it stopped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline import Calls, Event, Execute, Insert, Pipeline, Recoverable, Skip, Upsert
from sideline.engine.handling import HANDLING_SECONDS, handle
from sideline.testing import FakeClock

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


def events_of(names):
    return [
        Event("users", 0, 2 * number, number, b"k", name.encode())
        for number, name in enumerate(names)
    ]


def run(pipeline, events, clock=None):
    clock = clock or FakeClock()
    return handle(pipeline, events, start=0, end=2 * len(events) + 5, clock=clock)


names = st.lists(st.sampled_from(sorted(ACTS)) | st.just("an upsert"), max_size=60)
deriving = st.sampled_from([{}, {"key": lambda event: event.offset}])


@given(names, deriving)
def test_everything_before_the_first_failure_is_handled(wanted, options):
    """And nothing behind it; the failure is that event's, whatever it raised (C1, F14)."""
    events = events_of(wanted)
    handled, failure = run(pipeline_of(**options), events)
    first = next((n for n, name in enumerate(wanted) if name in BAD), len(wanted))
    assert list(handled.events) == events[:first]
    assert len(handled.effects) == first
    assert handled.skipped == 0
    if first < len(wanted):
        assert failure is not None
        assert failure.event == events[first]
        assert handled.end == events[first].offset
    else:
        assert failure is None
        assert handled.end == 2 * len(events) + 5
    assert handled.executes == ("sql" in wanted[:first])


@given(names, deriving)
def test_failing_events_are_left_out(wanted, options):
    """Skip leaves out what fails for a reason of its own; what heals still waits (F5, F2)."""
    events = events_of(wanted)
    handled, failure = run(pipeline_of(on_failure=Skip(), **options), events)
    waits = wanted.index("to be tried again") if "to be tried again" in wanted else len(wanted)
    assert list(handled.events) == events[:waits]
    assert handled.skipped == sum(name in BAD for name in wanted[:waits])
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
