"""Events come back: in order, once, behind their fence, through crashes and company."""

from __future__ import annotations

import signal

import psycopg
import pytest

from sideline.ledger import erasing
from tests.support.operations import balanced, counts, operate, states

BAD = "bad"
FIXED = {"handler": "record"}
POINTS = (
    "replay-read",
    "replay-handled",
    "replay-written",
    "replay-rejoin",
    "replay-before-commit",
    "replay-after-commit",
)


def story(ground):
    """Zoey, then Zoë (who fails), then Zoiee; and Bob, all the while."""
    ground.publish(
        [("zoe", "Zoey"), ("bob", "Bob"), ("zoe", BAD), ("bob", "Bobby"), ("zoe", "Zoiee")]
    )


def release(ground, **options):
    return operate(ground.database, "ground", **options)


def users(ground):
    return dict(ground.query("select id, value from users"))


@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        ({"handler": "failing"}, FIXED),
        ({"handler": "refused"}, FIXED),
        ({"handler": "failing", "concurrency": 3}, FIXED),
        ({"handler": "failing_tx"}, {"handler": "insert"}),
        ({"handler": "failing", "delivery": "at-least-once"}, FIXED),
        ({"handler": "failing", "fold": False, "slice_size": 1}, FIXED),
    ],
)
def test_what_waited_is_applied_in_order_and_its_key_rejoins(grounds, options, fixed):
    """By the same handler, whatever kind it is (C1, C3, R1, R2)."""
    ground = grounds(**options)
    story(ground)
    ground.run()
    operation = release(ground)
    ground.publish([("zoe", "Zoe the last"), ("bob", "Robert")])
    ground.run(pipeline=fixed)
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    # What arrives before the tail is empty waits behind it, and comes along.
    state, applied, *rest = counts(ground.database, operation)
    assert (state, rest) == ("done", [0, 0, 0])
    assert states(ground.database, operation) == ["done"]
    assert ground.query("select count(*) from sideline.queues, sideline.keys") == [(0,)]
    assert ground.query("select aside, parked, applied from sideline.progress") == [(0, 0, 7)]
    kept = ground.query(
        'select "offset", state, queue, generation from sideline.events union all '
        "select \"offset\", 'resolved', null, generation from sideline.resolved"
    )
    came_back = [2, 4, 5][:applied]
    assert sorted(kept) == [(offset, "resolved", None, 0) for offset in came_back]
    # Its next events are not behind anything.
    ground.publish([("zoe", "Zoe once more")])
    ground.run(pipeline=fixed)
    ground.check()
    assert ground.parked() == []


def test_words_of_a_released_event_are_erased_with_its_key(grounds):
    """Nothing of the key is left in the ledger, and of others' words nothing is gone (R6, S6)."""
    ground = grounds(handler="failing")
    ground.publish([("zoe", BAD), ("bob", "Bob")])
    ground.run()
    release(ground)
    ground.run(pipeline=FIXED)
    quoted = "select message <> '', traceback <> '', last_key from sideline.causes"
    assert ground.query(quoted) == [(True, True, b"zoe")]
    with psycopg.connect(ground.database) as connection:
        for key, causes in ((b"bob", 0), (b"zoe", 1)):
            assert erasing.find(connection, "ground", key).causes == causes
            erasing.erase(connection, "ground", key, actor="me", reason="request 815")
            assert ground.query(quoted) == [
                (True, True, b"zoe") if not causes else (False, False, None)
            ]
    balanced(ground.database)


def test_nothing_comes_back_unless_somebody_asks(grounds):
    """Also not when the code is fixed, and not what was not asked for (R1)."""
    ground = grounds(handler="failing")
    ground.publish([("zoe", BAD), ("bob", BAD), ("zoe", "later"), (None, BAD)])
    ground.run()
    ground.run(pipeline=FIXED)
    assert len(ground.parked()) == 4
    release(ground, keys=["zoe"])
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert [place.key for place in ground.parked()] == ["bob", None]


def test_what_fails_again_goes_back_and_its_followers_stay(grounds):
    """As the next generation, with its new reason; the other queues go on (R3)."""
    ground = grounds(handler="failing_all", slice_size=10)
    ground.publish([("a", "1"), ("b", "1"), ("a", BAD), ("b", "2"), ("a", "3"), (None, BAD)])
    ground.run()
    operation = release(ground)
    ground.run(pipeline={"handler": "failing"})
    ground.check()
    balanced(ground.database)
    assert [place.offset for place in ground.effects()] == [0, 1, 3]
    assert states(ground.database, operation) == ["failed", "done", "failed"]
    assert counts(ground.database, operation) == ("done", 3, 2, 0, 0)
    rows = ground.query(
        'select "offset", state, why, message, generation, attempts from sideline.events'
        ' where state = %s order by "offset"',
        "parked",
    )
    assert rows == [
        (2, "parked", "failed", "bad", 1, 2),
        (4, "parked", "follows", None, 0, 1),
        (5, "parked", "failed", "bad", 1, 2),
    ]
    again = release(ground)
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert counts(ground.database, again) == ("done", 3, 0, 0, 0)
    assert ground.parked() == []


@pytest.mark.parametrize("handler", ["failing", "refused", "failing_tx"])
def test_whoever_finds_it_in_the_middle_of_a_queue(grounds, handler):
    """What comes before it is applied, it and all behind it stay (R3, K9)."""
    ground = grounds(handler="failing_all", slice_size=100)
    ground.publish([("k", BAD if n == 5 else f"v{n}") for n in range(9)])
    ground.run()
    operation = release(ground)
    ground.run(pipeline={"handler": handler})
    ground.check()
    balanced(ground.database)
    assert [place.offset for place in ground.effects()] == [0, 1, 2, 3, 4]
    assert counts(ground.database, operation) == ("done", 5, 1, 0, 0)
    assert ground.query("select events, passed > 0 from sideline.queues") == [(4, True)]


@pytest.mark.parametrize(("share", "state"), [(0.1, "stopped"), (0.3, "done")])
def test_a_release_stops_at_the_share_that_was_asked_for(grounds, share, state):
    """One event in five fails again: too much for one in ten, not for three (R4)."""
    ground = grounds(handler="failing_all", guard_off=True)
    ground.publish([(f"k{n}", "v" if n % 5 else BAD) for n in range(300)])
    ground.run()
    operation = release(ground, stop_at=share)
    ground.run(pipeline={"handler": "failing"})
    balanced(ground.database)
    found, applied, failed, *_ = counts(ground.database, operation)
    assert found == state
    assert (applied + failed == 300) == (state == "done")
    assert failed >= share * (applied + failed) or state == "done"


def test_the_flood_guard_does_not_count_what_comes_back(grounds):
    """A release that fails stops by itself, not the pipeline (F12, R4)."""
    ground = grounds(handler="failing_all", guard_off=True)
    ground.publish([(f"k{n}", "v") for n in range(300)])
    ground.run()
    operation = release(ground)
    ground.publish([("new", "fine")])
    (report,) = ground.run(pipeline={"handler": "failing_old", "in_a_row": 5, "guard_off": False})
    assert report.failure is None
    balanced(ground.database)
    state, applied, failed, *_ = counts(ground.database, operation)
    assert (state, applied) == ("stopped", 0)
    assert 10 <= failed < 100, "the first slices of a release are small"
    ((note,),) = ground.query("select note from sideline.operations")
    assert note == f"{failed} of {failed} events failed again"
    assert states(ground.database, operation).count("waiting") == 300 - failed
    assert [place.key for place in ground.effects()] == ["new"]


def test_few_failures_stop_nothing(grounds):
    """A share below --stop-at, or fewer than ten events (R4)."""
    ground = grounds(handler="failing_all", guard_off=True)
    ground.publish([(f"k{n}", BAD if n % 3 == 0 else "v") for n in range(60)])
    ground.run()
    operation = release(ground)
    ground.run(pipeline={"handler": "failing"})
    assert counts(ground.database, operation) == ("done", 40, 20, 0, 0)
    few = release(ground, keys=[f"k{n}" for n in range(0, 27, 3)])
    ground.run(pipeline={"handler": "failing"})
    assert counts(ground.database, few) == ("done", 0, 9, 0, 0)
    balanced(ground.database)


def test_a_release_waits_in_place_while_the_world_is_broken(grounds, tmp_path):
    """Recoverable: nothing fails again, live events go on, and it says so (R3, F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="failing_all")
    ground.publish([("a", "1"), ("a", "wait"), ("a", "3")])
    ground.run()
    operation = release(ground)
    ground.publish([("b", "live")])
    waiting = {"handler": "waiting", "argument": str(flag)}
    noted = "select 1 from sideline.operations where note is not null"
    ground.run_until(
        lambda: len(ground.effects()) == 2 and ground.query(noted),
        what="a release that waits",
        lease=lambda: ground.lease(seconds=1.5),
        pipeline=waiting,
    )
    assert [place.offset for place in ground.effects()] == [0, 3] or [
        place.offset for place in ground.effects()
    ] == [3, 0]
    assert counts(ground.database, operation) == ("running", 1, 0, 0, 0)
    ((note,),) = ground.query("select note from sideline.operations")
    assert note.startswith("waits: event ")
    assert "the outside world is broken" in note
    # The next lease, whoever has it, waits longer each time (F2).
    attempts = "select attempts from sideline.operation_counts"
    ((before,),) = ground.query(attempts)
    assert before > 0
    ground.run_until(
        lambda: ground.query(attempts) > [(before,)],
        what="another attempt",
        lease=lambda: ground.lease(seconds=2.5),
        pipeline=waiting,
    )
    flag.unlink()
    ground.run(pipeline=waiting)
    ground.check()
    balanced(ground.database)
    assert counts(ground.database, operation) == ("done", 3, 0, 0, 0)
    assert ground.query("select note from sideline.operations") == [(None,)]
    assert ground.query("select attempts from sideline.operation_counts") == [(0,)]


@pytest.mark.parametrize(
    ("point", "handler"),
    [
        *((point, "failing") for point in POINTS),
        *((point, "failing_tx") for point in POINTS[1:3] + POINTS[-1:]),
    ],
)
def test_killed_in_replay(grounds, point, handler):
    """Effects, ledger and the keys' state together or not at all; it resumes exactly (C3, R2)."""
    ground = grounds(partitions=2, slice_size=7, handler=handler, guard_off=True)
    ground.publish([(f"k{n % 9}", BAD if n % 10 == 4 else f"v{n}") for n in range(120)])
    ground.run()
    operation = release(ground)
    ground.publish([(f"k{n % 9}", f"w{n}") for n in range(30)])
    fixed = {"handler": "insert" if handler == "failing_tx" else "record"}
    for count in (1, 3):
        worker = ground.start(ground.lease(), crash_at=f"{point}:{count}", pipeline=fixed)
        ground.perhaps_killed(worker)
        ground.check_prefix()
        balanced(ground.database)
    assert ground.kills
    ground.run(pipeline=fixed)
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    assert set(states(ground.database, operation)) == {"done"}
    assert ground.query("select count(*) from sideline.queues") == [(0,)]


def many(ground):
    """More than a slice of keys that wait with a follower each, all of them released."""
    ground.publish([(f"k{n % 400}", BAD if n < 400 else f"v{n}") for n in range(800)])
    ground.run()
    return release(ground)


@pytest.mark.parametrize(
    "point", ["replay-ahead", "replay-ahead:2", "replay-before-commit:4", "replay-after-commit:4"]
)
def test_killed_while_the_next_slice_is_handled(grounds, point):
    """The one before it is applied or not; what was handled ahead counts for nothing (C3, R2)."""
    ground = grounds(handler="failing", slice_size=100, guard_off=True)
    operation = many(ground)
    ground.killed(ground.start(ground.lease(), crash_at=point, pipeline=FIXED))
    ground.check_prefix()
    balanced(ground.database)
    assert ground.parked()
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    assert counts(ground.database, operation)[0] == "done"


def test_an_owner_that_is_frozen_while_it_handles_the_next_slice(grounds):
    """It wakes up when another has done it all, and writes nothing (K1, R2)."""
    ground = grounds(handler="failing", slice_size=100, guard_off=True)
    operation = many(ground)
    zombie = ground.start(
        ground.lease(), crash_at="replay-ahead:1:STOP", pipeline=FIXED, grace_seconds=1.0
    )
    zombie.frozen()
    ground.run(pipeline=FIXED, grace_seconds=1.0)
    zombie.signal(signal.SIGCONT)
    zombie.end()
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    assert counts(ground.database, operation)[0] == "done"


@pytest.mark.parametrize("point", ["replay-handled", "replay-before-commit"])
def test_an_owner_that_was_replaced_writes_nothing(grounds, point):
    """Frozen anywhere in a replay, it wakes up when another has done it all (K1, R2)."""
    ground = grounds(handler="failing", slice_size=5)
    story(ground)
    ground.run()
    operation = release(ground)
    zombie = ground.start(
        ground.lease(), crash_at=f"{point}:1:STOP", pipeline=FIXED, grace_seconds=1.0
    )
    zombie.frozen()
    ground.run(pipeline=FIXED, grace_seconds=1.0)
    zombie.signal(signal.SIGCONT)
    zombie.end()
    ground.check()
    balanced(ground.database)
    assert counts(ground.database, operation) == ("done", 2, 0, 0, 0)


def test_two_releases_of_the_same_keys_are_harmless(grounds):
    """The second finds nothing left to do (R4)."""
    ground = grounds(handler="failing", partitions=2)
    ground.publish([(f"k{n % 5}", BAD if n < 5 else f"v{n}") for n in range(20)])
    ground.publish([(None, BAD)])
    ground.run()
    first, second = release(ground), release(ground)
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert counts(ground.database, first) == ("done", 21, 0, 0, 0)
    assert counts(ground.database, second) == ("done", 0, 0, 0, 0)
    assert set(states(ground.database, second)) == {"gone"}


@pytest.mark.parametrize("state", ["paused", "cancelled", "stopped"])
def test_an_operation_that_does_not_run_is_left_alone(grounds, state):
    """Until it is resumed, between any two slices (R4)."""
    ground = grounds(handler="failing")
    story(ground)
    ground.run()
    operation = release(ground)
    ground.query("update sideline.operations set state = %s", state)
    ground.run(pipeline=FIXED)
    assert len(ground.parked()) == 2
    ground.query("update sideline.operations set state = 'running'")
    ground.run(pipeline=FIXED)
    ground.check()
    assert counts(ground.database, operation) == ("done", 2, 0, 0, 0)


def test_a_long_queue_goes_in_many_slices_and_stays_aside_between_them(grounds):
    """What arrives meanwhile goes behind, and the key rejoins only with an empty tail (K17)."""
    ground = grounds(handler="failing", slice_size=10)
    ground.publish([("hot", BAD)] + [("hot", f"v{n}") for n in range(200)])
    ground.run()
    operation = release(ground)
    worker = ground.start(ground.lease(), crash_at="replay-after-commit:2", pipeline=FIXED)
    ground.killed(worker)
    ground.check_prefix()
    balanced(ground.database)
    assert len(ground.parked()) == 181
    assert states(ground.database, operation) == ["waiting"]
    ground.publish([("hot", f"w{n}") for n in range(50)])
    # A code that reads on: new events go behind.
    ground.query("update sideline.operations set state = 'paused'")
    ground.run(pipeline=FIXED)
    assert len(ground.parked()) == 231
    ground.query("update sideline.operations set state = 'running'")
    ground.publish([("hot", f"x{n}") for n in range(50)])
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []


def test_a_rate_is_kept(grounds):
    """Events a second, over all partitions (R4)."""
    ground = grounds(handler="failing", partitions=2)
    ground.publish([(f"k{n}", BAD) for n in range(40)])
    ground.run()
    operation = release(ground, rate=10)
    ground.run_until(
        lambda: counts(ground.database, operation)[1] >= 8,
        what="some of them",
        lease=lambda: ground.lease(seconds=2.0),
        pipeline=FIXED,
    )
    state, applied, *_ = counts(ground.database, operation)
    assert state == "running"
    assert 8 <= applied <= 30
    ground.check()


def test_a_rate_is_kept_from_lease_to_lease(grounds):
    """Whoever has the next lease waits for the time of the next event too (R4)."""
    ground = grounds(handler="failing")
    ground.publish([(f"k{n}", BAD) for n in range(4)])
    ground.run()
    operation = release(ground, rate=0.01)
    for applied in (1, 2):
        ground.run_until(
            lambda applied=applied: counts(ground.database, operation)[1] >= applied,
            what="the next event",
            lease=lambda: ground.lease(seconds=1.5),
            pipeline=FIXED,
        )
        ground.run(ground.lease(seconds=1.5), pipeline=FIXED)
        assert counts(ground.database, operation)[1] == applied
        ground.query("update sideline.operation_counts set due_at = now()")
    ground.check()
