"""Which partitions go where in a round, for any state of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sideline.engine import rounds
from sideline.engine.lease import Lease, Partition, PartitionReport, Report
from sideline.engine.rounds import State

NOW = 1_000_000.0


@st.composite
def states(draw, **fixed):
    count = draw(st.integers(1, 12))
    made = {}
    for number in range(count):
        next_offset = draw(st.integers(0, 50))
        state = State(
            Partition("t", number),
            next_offset,
            end=draw(st.integers(-1, 100)),
            bound=draw(st.none() | st.integers(0, 100)),
            due_at=draw(st.sampled_from([0.0, NOW - 1, NOW + 1])),
        )
        for name, value in fixed.items():
            setattr(state, name, value)
        made[state.partition] = state
    return made


@given(states())
def test_a_partition_is_leased_unless_something_speaks_against_it(made):
    """Not when its bound is reached, not before it is due (K4)."""
    chosen = {state.partition for state in rounds.eligible(made, NOW)}
    for partition, state in made.items():
        finished = state.bound is not None and state.next_offset >= state.bound
        assert (partition in chosen) == (not finished and state.due_at <= NOW)


@given(states(), st.integers(0, 60))
def test_a_new_partition_waits_for_the_old_ones(made, passed):
    """It is read only after they have passed the ends they had when it appeared (C1)."""
    new = State(Partition("t", 99), 0, waits_for={0: passed})
    made[new.partition] = new
    may = rounds.may_start(new, made)
    assert may == (made[Partition("t", 0)].next_offset >= passed)
    assert (new in rounds.eligible(made, NOW)) == may


def test_a_partition_that_is_gone_is_not_waited_for():
    """Of a topic made again with fewer partitions."""
    new = State(Partition("t", 1), 0, waits_for={0: 10})
    assert rounds.may_start(new, {new.partition: new})


@given(states(), st.integers(1, 6))
def test_every_partition_is_packed_once(made, slots):
    """On some slot, and on no other: two leases of one round never share a partition (K1)."""
    groups = rounds.pack(made.values(), slots, {})
    packed = [state.partition for group in groups for state in group]
    assert sorted(packed) == sorted(made)
    assert len(groups) <= slots
    assert all(groups)


@given(states(), st.integers(1, 6))
def test_slots_are_packed_evenly(made, slots):
    """No slot has more to do than another by more than one partition's lag."""
    groups = rounds.pack(made.values(), slots, {})
    loads = [sum(state.lag for state in group) for group in groups]
    loads += [0] * (slots - len(groups))
    assert max(loads) - min(loads) <= max(state.lag for state in made.values())


@given(states(end=-1), st.integers(1, 4))
def test_idle_partitions_stay_where_they_were(made, slots):
    """Consumers are kept by worker: nothing moves without a reason."""
    first = rounds.pack(made.values(), slots, {})
    before = {state.partition: slot for slot, group in enumerate(first) for state in group}
    assert rounds.pack(made.values(), slots, before) == first


@given(states(), st.integers(1, 6), st.none() | st.floats(1, 1e6))
def test_leases_say_what_was_packed(made, slots, rate):
    """A lease a slot; together they obey the pipeline's rate."""
    groups = rounds.pack(made.values(), slots, {})
    leases = rounds.leases(
        groups, pipeline="p", epoch=3, number=7, ends_at=NOW, rate=rate, secrets=None
    )
    assert [[share.of for share in lease.shares] for lease in leases] == [
        [state.partition for state in group] for group in groups
    ]
    assert {(lease.epoch, lease.round, lease.ends_at) for lease in leases} == {(3, 7, NOW)}
    bounds = {share.of: share.bound for lease in leases for share in lease.shares}
    assert bounds == {partition: state.bound for partition, state in made.items()}
    if rate is None:
        assert {lease.rate for lease in leases} == {None}
    else:
        assert sum(lease.rate for lease in leases) <= rate * 1.0001


@given(states())
def test_the_next_due_time_is_the_first(made):
    """The driver sleeps until then, and no longer."""
    waiting = [s.due_at for s in made.values() if s.due_at and not s.finished]
    assert rounds.next_due(made.values()) == min(waiting, default=float("inf"))


@given(states())
def test_leases_are_short_while_there_is_work(made):
    """And long while there is none."""
    seconds = rounds.lease_seconds(made.values())
    behind = any(state.lag for state in made.values())
    assert seconds == (rounds.LEASE_SECONDS if behind else rounds.IDLE_LEASE_SECONDS)


def test_leases_and_reports_travel_as_json():
    """What Spark carries comes out as it went in."""
    state = State(Partition("t", 0), 5, bound=9)
    (lease,) = rounds.leases(
        [[state]], pipeline="p", epoch=1, number=2, ends_at=NOW, rate=None, secrets="file"
    )
    assert Lease.from_dict(lease.as_dict()) == lease
    report = Report(2, "host", 1, [PartitionReport("t", 0, taken=True, consumed=2**40)])
    assert Report.from_dict(report.as_dict()) == report
