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
            paused=draw(st.booleans()),
        )
        for name, value in fixed.items():
            setattr(state, name, value)
        made[state.partition] = state
    return made


@given(states())
def test_a_partition_is_leased_unless_something_speaks_against_it(made):
    """Not when its bound is reached, not before it is due, not while it is paused (K4)."""
    chosen = {state.partition for state in rounds.eligible(made, NOW)}
    for partition, state in made.items():
        finished = state.bound is not None and state.next_offset >= state.bound
        free = state.due_at <= NOW and not state.paused
        assert (partition in chosen) == (not finished and free)


@given(states())
def test_what_is_paused_will_not_reach_its_bound(made):
    """And nothing else is held up, as long as no partition waits for another."""
    left = {state.partition for state in rounds.held_up(made)}
    assert left == {
        partition for partition, state in made.items() if state.paused and not state.finished
    }


def test_what_waits_for_a_paused_partition_is_held_up_too():
    """Partitions that a topic gained, one after the other, while the first one is paused."""
    first = State(Partition("t", 0), 5, bound=10, paused=True)
    second = State(Partition("t", 1), 0, bound=10, waits_for={0: 10})
    third = State(Partition("t", 2), 0, bound=10, waits_for={0: 5, 1: 10})
    other = State(Partition("u", 1), 0, bound=10, waits_for={0: 10})
    made = {state.partition: state for state in (third, second, first, other)}
    assert rounds.held_up(made) == [first, second, third]
    first.next_offset = 10
    assert rounds.held_up(made) == []


@given(states(), st.integers(0, 60))
def test_a_new_partition_waits_for_the_old_ones(made, passed):
    """It is read only after they have passed the ends they had when it appeared (C1)."""
    new = State(Partition("t", 99), 0, waits_for={0: passed})
    made[new.partition] = new
    may = rounds.may_start(new, made)
    assert may == (made[Partition("t", 0)].next_offset >= passed)
    assert (new in rounds.eligible(made, NOW)) == may


def test_bounds_reach_as_far_as_others_wait():
    """A run with bounds reads what its new partitions wait for, however far that is (C1)."""
    first = State(Partition("t", 0), 10, bound=10)
    second = State(Partition("t", 1), 0, bound=0, waits_for={0: 15})
    third = State(Partition("t", 2), 0, bound=5, waits_for={0: 10, 1: 20})
    made = {state.partition: state for state in (first, second, third)}
    rounds.extend_bounds(made)
    assert [state.bound for state in made.values()] == [15, 20, 5]
    assert rounds.eligible(made, NOW) == [first]


def test_bounds_stay_where_nobody_has_anything_to_read():
    """An open transaction is not waited for if nothing comes behind it."""
    first = State(Partition("t", 0), 10, bound=10)
    second = State(Partition("t", 1), 0, bound=0, waits_for={0: 15})
    gone = State(Partition("t", 2), 0, bound=5, waits_for={7: 15})
    rounds.extend_bounds({state.partition: state for state in (first, second, gone)})
    assert [first.bound, second.bound] == [10, 0]


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
    waiting = [s.due_at for s in made.values() if s.due_at and not (s.finished or s.paused)]
    assert rounds.next_due(made.values()) == min(waiting, default=float("inf"))


@given(states(), st.sampled_from([0, rounds.WORTH_READING_AHEAD]))
def test_leases_are_short_while_somebody_is_behind(made, further):
    """Partitions are spread anew then; while all follow, every hand-over would be felt."""
    for state in made.values():
        state.end += further
    seconds = rounds.lease_seconds(made.values())
    behind = any(state.lag >= rounds.WORTH_READING_AHEAD for state in made.values())
    assert seconds == (rounds.LEASE_SECONDS if behind else rounds.CALM_LEASE_SECONDS)


def test_the_flood_guard_can_be_overridden_for_a_run():
    """Every lease says so (F12)."""
    (lease,) = rounds.leases(
        [[State(Partition("t", 0), 5)]],
        pipeline="p",
        epoch=1,
        number=2,
        ends_at=NOW,
        rate=None,
        secrets=None,
        guard=False,
    )
    assert not Lease.from_dict(lease.as_dict()).guard


def test_after_a_death_leases_go_with_care_until_the_next_events_are_passed():
    """Of the partitions that the dead worker held, and of no others."""
    held, other = State(Partition("t", 0), 100), State(Partition("t", 1), 100)
    rounds.go_with_care([held], events=50)

    def careful() -> list[bool]:
        (lease,) = rounds.leases(
            [[held, other]], pipeline="p", epoch=1, number=2, ends_at=NOW, rate=None, secrets=None
        )
        return [share.care for share in lease.shares]

    assert careful() == [True, False]
    held.next_offset = 149
    assert careful() == [True, False]
    held.next_offset = 150
    assert careful() == [False, False]


def test_with_care_a_lease_lasts_longer():
    """A keeper has to start, and may lose some workers."""
    state = State(Partition("t", 0), 0, end=rounds.WORTH_READING_AHEAD)
    assert rounds.lease_seconds([state]) == rounds.LEASE_SECONDS
    rounds.go_with_care([state], events=50)
    assert rounds.lease_seconds([state]) == rounds.BUSY_LEASE_SECONDS


def test_leases_and_reports_travel_as_json():
    """What Spark carries comes out as it went in."""
    state = State(Partition("t", 0), 5, bound=9)
    (lease,) = rounds.leases(
        [[state]], pipeline="p", epoch=1, number=2, ends_at=NOW, rate=None, secrets="file"
    )
    assert Lease.from_dict(lease.as_dict()) == lease
    assert lease.guard
    report = Report(2, "host", 1, [PartitionReport("t", 0, taken=True, consumed=2**40)])
    assert Report.from_dict(report.as_dict()) == report


def test_whoever_publishes_has_long_leases_unless_somebody_waits():
    """A new owner needs a producer; what is due in between waits no longer than it must (K20)."""
    state = State(Partition("users", 0), 0, end=1_000_000)
    seconds = rounds.lease_seconds([state], publishes=True)
    assert seconds == rounds.PUBLISHING_LEASE_SECONDS
    for wait, expected in ((-5.0, 10.0), (25.0, 25.0), (600.0, 60.0)):
        assert rounds.lease_seconds([state], publishes=True, due_in_seconds=wait) == expected
    state.care_until = 10
    assert rounds.lease_seconds([state], publishes=True) == rounds.BUSY_LEASE_SECONDS


def test_retry_topics_go_along_with_where_their_copies_came_from():
    """Both change one partition's books: in one slot nobody waits for the other (K4, F8)."""
    sources = [State(Partition("t", n), 0, end=1_000 - n) for n in range(4)]
    retries = [State(Partition("t.g.retry.1", n), 0, end=5, delay_ms=100) for n in range(6)]
    groups = rounds.pack([*retries, *sources], 2, {})
    slot_of = {state.partition: slot for slot, group in enumerate(groups) for state in group}
    assert {slot_of[Partition("t", n)] for n in range(4)} == {0, 1}
    for n in range(4):
        assert slot_of[Partition("t.g.retry.1", n)] == slot_of[Partition("t", n)]
    assert {Partition("t.g.retry.1", 4), Partition("t.g.retry.1", 5)} <= set(slot_of)
