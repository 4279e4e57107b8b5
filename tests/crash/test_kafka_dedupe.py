"""From Kafka to Kafka: a message that a producer sent twice is published once (C4)."""

from __future__ import annotations

import random
import signal

import pytest

from tests.support.again import AgainRun
from tests.support.dedupe_walk import Walk, duplicates, offsets, stored
from tests.support.operations import balanced, operate

PICKY = {"picky": True}
KINDS = {
    "exactly once": {},
    "side by side": {"concurrency": 3},
    "at least once": {"delivery": "at-least-once"},
}
CASES = [("exactly once", 2), ("exactly once", 10), ("side by side", 3), ("at least once", 3)]
# The steps of a slice that claims, in their order.
POINTS = (
    "after-handler",
    "before-claim",
    "after-claim",
    "before-pending",
    "after-pending",
    "before-kafka-commit",
    "after-kafka-commit",
    "after-apply",
)
# Between these nothing happens that others do not try as well.
RARELY = {"after-handler", "before-claim", "after-apply"}


def mended(ground):
    return {"argument": {"to": ground.out}}


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_message_sent_twice_is_published_once(outputs, kind, size):
    """In one slice, in the next one, and in another lease; what has no id always is (C4, P2)."""
    ground = outputs(dedupe="word", slice_size=size, **KINDS[kind])
    ground.publish([("a", "m1 x"), ("b", "m2 x"), ("a", "m1 x"), ("c", "none"), ("b", "m1 y")])
    ground.run()
    assert sorted(offsets(ground)) == [(0, 0), (0, 1), (0, 3)]
    ground.publish([("a", "m3 x"), ("c", "none"), ("b", "m2 x"), ("a", "m3 x"), ("d", "m1 z")])
    ground.run()
    assert sorted(offsets(ground)) == [(0, 0), (0, 1), (0, 3), (0, 5), (0, 6)]
    assert duplicates(ground) == 5
    assert stored(ground) == {(0, 0), (0, 1), (0, 5)}
    balanced(ground.database)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_parked_event_stores_no_id(outputs, kind, size):
    """Its duplicate waits behind it, or is published under another key; once in all (C4, K7)."""
    ground = outputs(dedupe="word", slice_size=size, argument=PICKY, **KINDS[kind])
    ground.publish([("a", "m1 bad"), ("a", "m1 x"), ("b", "m1 y"), ("a", "m2 x"), ("b", "m2 y")])
    ground.run()
    assert sorted(offsets(ground)) == [(0, 2), (0, 4)]
    assert [place.offset for place in ground.parked()] == [0, 1, 3]
    assert (duplicates(ground), stored(ground)) == (0, {(0, 2), (0, 4)})
    operate(ground.database, "ground")
    ground.run(pipeline=mended(ground))
    assert ground.parked() == []
    assert sorted(offsets(ground)) == [(0, 2), (0, 4)]
    assert duplicates(ground) == 3
    balanced(ground.database)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_released_event_is_no_duplicate_of_itself(outputs, kind, size):
    """And what waited behind it with the same message is one; what failed again is not (C4, R3)."""
    ground = outputs(dedupe="word", slice_size=size, argument=PICKY, **KINDS[kind])
    ground.publish([("a", "m1 bad"), ("a", "m1 x"), ("a", "m2 x"), ("a", "m2 x")])
    ground.run()
    operate(ground.database, "ground")
    ground.run()
    assert (stored(ground), len(ground.parked())) == (set(), 4)
    operate(ground.database, "ground")
    ground.run(pipeline=mended(ground))
    assert sorted(offsets(ground)) == [(0, 0), (0, 2)]
    assert stored(ground) == {(0, 0), (0, 2)}
    assert duplicates(ground) == 2
    balanced(ground.database)


@pytest.mark.parametrize("kind", KINDS)
def test_a_duplicate_that_would_fail_is_a_duplicate(outputs, kind):
    """It is neither parked, nor does its key step aside (C4, F4)."""
    ground = outputs(dedupe="word", slice_size=10, argument=PICKY, **KINDS[kind])
    ground.publish([("a", "m1 x"), ("b", "m2 x"), ("a", "m1 bad"), ("a", "m3 x")])
    ground.run()
    ground.publish([("b", "m2 bad"), ("b", "m4 x"), ("a", "m1 bad")])
    ground.run()
    assert ground.parked() == []
    assert sorted(offsets(ground)) == [(0, 0), (0, 1), (0, 3), (0, 5)]
    assert duplicates(ground) == 3
    balanced(ground.database)


def test_a_function_that_fails_is_its_events_failure(outputs):
    """It is parked with its stage, and what follows it by its key waits (C4, F3)."""
    ground = outputs(dedupe="raising", slice_size=4)
    ground.publish([("a", "raise x"), ("a", "m1 x"), ("b", "m1 x"), ("e", "nonsense x")])
    ground.run()
    assert offsets(ground) == [(0, 2)]
    assert [place.offset for place in ground.parked()] == [0, 1, 3]
    operate(ground.database, "ground")
    ground.run(pipeline={"dedupe": "word"})
    assert (ground.parked(), duplicates(ground)) == ([], 1)
    balanced(ground.database)


def test_at_most_once_publishes_a_message_once(outputs):
    """Ids are stored behind the progress (C2, C4)."""
    ground = outputs(dedupe="word", delivery="at-most-once", skip=True, slice_size=3)
    ground.publish([("a", "m1 x"), ("a", "m1 x"), ("b", "m2 x"), ("c", "m1 x"), ("c", "m3 x")])
    ground.run()
    assert sorted(offsets(ground)) == [(0, 0), (0, 2), (0, 4)]
    assert duplicates(ground) == 2
    balanced(ground.database)


def test_a_range_published_again_leaves_duplicates_out(outputs):
    """Originals go through again, duplicates are left out again, and no id is lost (C4, C6, R5)."""
    ground = outputs(dedupe="word", slice_size=3)
    ground.publish([("a", "m1 x"), ("b", "m1 x"), ("a", "m2 x"), ("c", "none"), ("b", "m2 x")])
    ground.run()
    before = stored(ground)
    again = AgainRun(ground)
    again.run()
    assert sorted(offsets(ground)) == sorted(2 * [(0, 0), (0, 2), (0, 3)])
    assert stored(ground) == before


def test_a_retried_event_is_no_duplicate_of_itself(chained):
    """And if its message came by another event meanwhile, it is one: once in all (C4, F8, K7)."""
    chain = chained(dedupe="word", delays=["50ms", "50ms"], slice_size=5)
    ground = chain.ground
    ground.publish([("a", "heals:1 x"), ("b", "m1 x"), ("a", "never:z x"), ("c", "m1 x")])
    chain.settle()
    assert sorted(place.offset for place in ground.effects()) == [0, 1]
    ground.publish([("d", "heals:1 x"), ("d", "never:z y")])
    chain.settle()
    assert sorted(place.offset for place in ground.effects()) == [0, 1]
    assert stored(ground) == {(0, 0), (0, 1)}
    assert duplicates(ground) == 2
    chain.check_books()


@pytest.mark.parametrize(
    "point",
    [pytest.param(one, marks=pytest.mark.long) if one in RARELY else one for one in POINTS],
)
def test_killed_around_the_claim(outputs, point):
    """Whoever dies there leaves no id without its record, no record without its id (K7, K18)."""
    ground = outputs(partitions=2, dedupe="word", slice_size=4, argument=PICKY)
    for partition in (0, 1):
        ground.publish([(f"k{n % 3}", f"m{n // 2} x") for n in range(24)], partition=partition)
    ground.publish([("k0", "m90 bad"), ("k0", "m91 x"), ("k1", "m90 x")], partition=0)
    for count in (1, 3):
        worker = ground.start(ground.lease(), crash_at=f"{point}:{count}")
        assert worker.end() in {0, -signal.SIGKILL}
    ground.run()
    assert stored(ground) == set(offsets(ground))
    assert len(offsets(ground)) == 12 + 1
    assert ground.next_offsets() == ground.ends()
    assert not ground.open()
    balanced(ground.database)


def test_killed_while_what_waited_is_published(outputs, tmp_path):
    """A release that was given up half way keeps no id, one that was published keeps all (K18)."""
    ready = tmp_path / "mended"
    ground = outputs(dedupe="word", slice_size=4, argument={**PICKY, "mended": str(ready)})
    ground.publish([("a", "m1 bad"), ("a", "m1 x"), ("a", "m2 x"), ("b", "m2 y"), ("a", "m3 x")])
    ground.run()
    ready.touch()
    operate(ground.database, "ground")
    for point in ("after-pending", "before-kafka-commit", "after-kafka-commit"):
        worker = ground.start(ground.lease(), crash_at=f"{point}:1")
        assert worker.end() in {0, -signal.SIGKILL}
    ground.run()
    assert sorted(offsets(ground)) == [(0, 0), (0, 3), (0, 4)]
    assert stored(ground) == set(offsets(ground))
    assert (ground.parked(), duplicates(ground), ground.open()) == ([], 2, [])
    balanced(ground.database)


def test_a_message_of_an_undecided_slice_is_waited_for(outputs):
    """It may still fail there: who brings it too is neither passed nor published before (K7).

    Partition 0 dies with its slice pending, and Kafka never gets it. Done again, its event fails
    and is left out: the message is published by partition 1.
    """
    ground = outputs(partitions=2, dedupe="word", slice_size=4, skip=True)
    ground.publish([("a", "m1 x")], partition=0)
    ground.publish([("b", "m0 x"), ("c", "m1 x"), ("b", "m2 x")], partition=1)
    ground.killed(ground.start(ground.lease(0), crash_at="after-pending:1"))
    assert stored(ground) == {(0, 0)}
    ground.run_until(
        lambda: ground.next_offsets() == {0: 0, 1: 1},
        what="all that comes before it",
        lease=lambda: ground.lease(1, seconds=3.0),
    )
    assert (offsets(ground), duplicates(ground)) == ([(1, 0)], 0)
    ground.run(ground.lease(0), pipeline={"argument": {"to": ground.out, "bad": ["m1 x"]}})
    ground.run(ground.lease(1))
    assert sorted(offsets(ground)) == [(1, 0), (1, 1), (1, 2)]
    assert stored(ground) == {(1, 0), (1, 1), (1, 2)}
    assert duplicates(ground) == 0
    balanced(ground.database)


def test_a_message_of_a_slice_that_was_published_is_a_duplicate(outputs):
    """Once its owner has asked Kafka (K7, K19)."""
    ground = outputs(partitions=2, dedupe="word", slice_size=4)
    ground.publish([("a", "m1 x")], partition=0)
    ground.publish([("c", "m1 x"), ("b", "m2 x")], partition=1)
    # The first transaction only says where the partition stands.
    ground.killed(ground.start(ground.lease(0), crash_at="after-kafka-commit:2"))
    ground.run()
    assert sorted(offsets(ground)) == [(0, 0), (1, 1)]
    assert duplicates(ground) == 1
    balanced(ground.database)


def test_two_partitions_bring_the_same_messages_at_once(outputs):
    """In opposite orders, by two workers: each is published once, nobody waits for ever (K7)."""
    ground = outputs(partitions=2, dedupe="word", slice_size=50)
    count = 200
    ground.publish([(f"k{n}", f"m{n} x") for n in range(count)], partition=0)
    ground.publish([(f"k{n}", f"m{n} x") for n in reversed(range(count))], partition=1)
    workers = [ground.start(ground.lease(0)), ground.start(ground.lease(1))]
    for worker in workers:
        worker.reports()
    assert len(offsets(ground)) == count
    assert stored(ground) == set(offsets(ground))
    assert duplicates(ground) == count
    balanced(ground.database)


def _walk(outputs, seed, steps):
    size = random.Random(seed).choice([1, 3, 20])
    ground = outputs(dedupe="word", slice_size=size, guard_off=True, argument=PICKY)
    points = [*POINTS, "replay-handled", "after-home-init"]
    Walk(ground, f"kafka {seed}", points=points, mended=mended(ground)).walk(steps)


def test_like_the_model(outputs):
    """Arrive, come twice, park, release, crash: what is published, stored and waits (C4, K7)."""
    _walk(outputs, seed=1, steps=8)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_like_the_model_for_long(outputs, seed):
    """The same, longer and by ten ways."""
    _walk(outputs, seed=seed, steps=30)
