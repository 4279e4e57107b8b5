"""The flood guard against a plain list of what happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sideline.flood import BUCKETS, Tally, describe, judge
from sideline.policies import FloodGuard

histories = st.lists(st.lists(st.booleans(), max_size=80), max_size=8)


@given(histories, st.integers(1, 12))
def test_failures_in_a_row_are_counted_across_slices(slices, in_a_row):
    """However a stream is cut, it stops before the same event (F12, K9)."""
    guard = FloodGuard(share=1.0, of=100_000, in_a_row=in_a_row)
    memory, row = None, 0
    for outcomes in slices:
        failed = [place for place, bad in enumerate(outcomes) if bad]
        verdict = judge(guard, memory, len(outcomes), failed)
        expected = None
        for place, bad in enumerate(outcomes):
            if bad and row + 1 >= in_a_row:
                expected = place
                break
            row = row + 1 if bad else 0
        assert verdict.trips_at == expected
        memory = verdict.memory
        if expected is not None:
            again = judge(guard, memory, 1, [0])
            assert again.trips_at == 0, "a restart must not park another one"
            return


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 60), st.floats(0.1, 1.0))
def test_the_share_is_of_the_last_events(outcomes, of, share):
    """It trips neither below the share nor later than a twentieth of the window beyond (F12)."""
    guard = FloodGuard(share=share, of=of, in_a_row=10**9)
    failed = [place for place, bad in enumerate(outcomes) if bad]
    trips_at = judge(guard, None, len(outcomes), failed).trips_at
    size = max(1, of // BUCKETS)
    for place in failed:
        window = outcomes[max(0, place + 1 - of) : place + 1]
        wider = outcomes[max(0, place + 1 - of - size) : place + 1]
        if sum(window) >= share * of + size:
            assert trips_at is not None
            assert trips_at <= place
        if trips_at == place:
            assert sum(wider) >= share * of


@given(histories, st.integers(1, 60), st.integers(1, 400))
def test_slices_are_counted_at_once_as_one_by_one(slices, of, in_a_row):
    """What is remembered of a slice is what its events left behind one after the other."""
    guard = FloodGuard(share=1.0, of=of, in_a_row=in_a_row)
    memory, tally = None, Tally(guard, None)
    for outcomes in slices:
        failed = [place for place, bad in enumerate(outcomes) if bad]
        for bad in outcomes:
            if bad and tally.too_many():
                return
            if bad:
                tally.fail()
            else:
                tally.pass_by(1)
        memory = judge(guard, memory, len(outcomes), failed).memory
        assert memory == tally.memory()
        tally = Tally(guard, memory)


def test_nothing_is_remembered_of_a_stream_without_failures():
    """The happy path pays nothing, and forgets what is long past."""
    guard = FloodGuard()
    assert judge(guard, None, 25_000, ()).memory is None
    tally = Tally(guard, None)
    tally.fail()
    assert judge(guard, tally.memory(), 25_000, ()).memory is None


def test_it_says_what_it_saw():
    """For the person who has to decide."""
    guard = FloodGuard(in_a_row=3)
    assert describe(guard, [2, 0, 2]) == "3 events failed in a row"
    assert describe(guard, [0, 0, 2]) == "more than 50% of the last 1,000 events failed"
