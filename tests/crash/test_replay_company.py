"""Replays in company: keys of two partitions, other owners, live events, deadly events, people."""

from __future__ import annotations

import json
import signal

import pytest

from sideline.cli import main
from tests.support import deadly  # noqa: F401 - its handlers, by name
from tests.support.operations import balanced, counts, operate, states
from tests.support.waiting import wait_for

BAD = "bad"
FIXED = {"handler": "record"}
PARTS = ("replay-read", "replay-written", "replay-before-commit")


def release(ground, *arguments, **options):
    return operate(ground.database, "ground", *arguments, **options)


def counters(ground):
    return ground.query(
        "select partition, aside, parked, applied from sideline.progress order by 1"
    )


def said(key, fails=False):
    return json.dumps({"id": key, **({"kind": "fail"} if fails else {})})


# Keys of two partitions


def two_partitions(grounds, **options):
    """A key whose producers do not agree where it belongs; its queue is at home in partition 0."""
    ground = grounds(partitions=2, handler="failing", slice_size=5, **options)
    for partition in (0, 1):
        ground.publish([("k", BAD), ("k", "later"), ("j", "fine")], partition=partition)
    ground.run(ground.lease(0))
    ground.run(ground.lease(1))
    assert counters(ground) == [(0, 1, 2, 1), (1, 0, 2, 1)]
    return ground


def test_each_event_is_counted_where_it_was_consumed(grounds):
    """Also when its queue is at home in another partition (K13)."""
    ground = two_partitions(grounds)
    operation = release(ground)
    ground.run(ground.lease(1), pipeline=FIXED)
    assert counts(ground.database, operation)[0] == "running", "not the home of anything"
    ground.run(ground.lease(0), pipeline=FIXED)
    balanced(ground.database)
    assert counters(ground) == [(0, 0, 0, 3), (1, 0, 0, 3)]
    assert counts(ground.database, operation) == ("done", 4, 0, 0, 0)
    # A process that remembers nothing, in either partition.
    for partition in (0, 1):
        ground.publish([("k", "after")], partition=partition)
    ground.run(pipeline=FIXED)
    ground.check()
    assert ground.parked() == []


@pytest.mark.parametrize("point", ["replay-read", "replay-handled"])
def test_a_follower_that_parks_meanwhile_is_not_forgotten(grounds, point):
    """From another partition, while the last ones are replayed: it stays aside (K14, K17)."""
    ground = two_partitions(grounds)
    operation = release(ground)
    owner = ground.start(ground.lease(0), crash_at=f"{point}:1:STOP", pipeline=FIXED)
    owner.frozen()
    ground.publish([("k", "behind")], partition=1)
    ground.query("update sideline.operations set state = 'paused'")
    ground.run(ground.lease(1), pipeline=FIXED)
    assert ground.query("select events from sideline.queues") == [(5,)]
    owner.signal(signal.SIGCONT)
    owner.reports()
    balanced(ground.database)
    assert [(place.partition, place.offset) for place in ground.parked()] == [(1, 3)]
    assert ground.query("select events from sideline.queues") == [(1,)]
    assert states(ground.database, operation) == ["waiting"]
    ground.query("update sideline.operations set state = 'running'")
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []


def test_a_key_that_rejoined_is_applied_by_whoever_remembers_it_aside(grounds):
    """Its next event is parked behind nothing: the slice is admitted anew (K13)."""
    ground = two_partitions(grounds)
    ground.publish([("k", "one")], partition=1)
    # Knows that the key is aside, and has it in hand.
    other = ground.start(ground.lease(1), crash_at="after-handler:1:STOP", pipeline=FIXED)
    other.frozen()
    release(ground)
    ground.run(ground.lease(0), pipeline=FIXED)
    other.signal(signal.SIGCONT)
    other.reports()
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []


def test_owners_replay_and_park_at_once_without_a_circle(grounds):
    """Locks are taken in one order; what waited is applied once and in order (K16)."""
    ground = grounds(partitions=2, handler="failing", slice_size=10, guard_off=True)
    ground.query("update sideline.progress set shared = true")
    for partition in (0, 1):
        ground.publish([(f"k{n % 20}", BAD if n < 20 else "v") for n in range(60)], partition)
    ground.run()
    operation = release(ground)
    for partition in (0, 1):
        ground.publish([(f"k{n % 20}", f"w{n}") for n in range(200)], partition)
    workers = [ground.start(ground.lease(partition), pipeline=FIXED) for partition in (0, 1)]
    for worker in workers:
        worker.reports()
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert counts(ground.database, operation)[0] == "done"
    assert ground.parked() == []
    ground.check()


def test_queues_that_turn_out_to_be_one_are_joined(grounds):
    """Only the mended key= can tell that an event belongs to a key that waits elsewhere (K15)."""
    ground = grounds(handler="failing", key="json_id", slice_size=10)
    ground.publish(
        [
            ("r1", said("d", fails=True)),
            ("r2", "no json"),
            ("r2", said("e")),
        ]
    )
    ground.run()
    assert ground.query("select events from sideline.queues order by id") == [(1,), (2,)]
    operation = release(ground, keys=["r2"])
    # From now on the damaged one is known to be of the same key as the first.
    ground.run(pipeline={"handler": "record", "key": "mended_id"})
    balanced(ground.database)
    assert states(ground.database, operation) == ["done"]
    assert ground.parked() == []
    assert [place.offset for place in ground.effects()] == [0, 1, 2]


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_what_was_to_happen_to_a_queue_happens_where_it_joined(grounds, state):
    """A live event ties a released queue to another before its turn: nobody waits on (K15)."""
    ground = grounds(handler="failing", key="json_id", slice_size=1)
    ground.publish(
        [
            ("r1", said("d", fails=True)),
            ("r0", said("x", fails=True)),
            ("r2", "no json"),
            ("r2", said("e")),
        ]
    )
    ground.run()
    operation = release(ground, keys=["x", "r2"])
    # What is over by then stays over.
    ground.killed(ground.start(ground.lease(), crash_at="replay-after-commit:1", pipeline=FIXED))
    ground.query("update sideline.operations set state = %s", state)
    assert states(ground.database, operation) == ["done", "waiting"]
    ground.publish([("r2", said("d"))])
    ground.run()
    assert ground.query("select events from sideline.queues") == [(4,)]
    assert states(ground.database, operation) == ["done", "waiting"]
    ground.query("update sideline.operations set state = 'running'")
    ground.run(pipeline={"handler": "record", "key": "mended_id"})
    balanced(ground.database)
    assert states(ground.database, operation) == ["done", "done"]
    assert ground.parked() == []
    assert [place.offset for place in ground.effects()] == [1, 0, 2, 3, 4]


def test_a_key_that_cannot_be_told_fails_again(grounds):
    """At the head of its queue, without the handler; others go on (F14, R3)."""
    ground = grounds(handler="failing", key="json_id", slice_size=10)
    ground.publish([("r1", "no json"), ("r1", said("a")), ("r2", said("b", fails=True))])
    ground.run()
    operation = release(ground)
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert [place.offset for place in ground.effects()] == [2]
    assert counts(ground.database, operation) == ("done", 1, 1, 0, 0)
    rows = ground.query(
        'select "offset", stage, generation from sideline.events where state = %s order by 1',
        "parked",
    )
    assert rows == [(0, "key", 1), (1, None, 0)]


# Live events


def test_live_events_flow_while_much_comes_back(grounds):
    """A large release does not hold up the keys that are not aside (R2)."""
    ground = grounds(handler="failing", slice_size=100, guard_off=True)
    ground.publish([(f"k{n % 50}", BAD if n < 50 else f"v{n}") for n in range(3_000)])
    ground.run()
    operation = release(ground)
    lease = ground.lease(bounded=False, seconds=200)
    # All of it takes half a minute.
    worker = ground.start(lease, pipeline={"handler": "slow", "argument": 0.01})
    wait_for(ground.effects, what="the first replay")
    (live,) = ground.publish([("live", "now")])
    wait_for(lambda: live in ground.effects(), what="a live event")
    assert counts(ground.database, operation)[0] == "running", "it was not at its end by then"
    worker.kill()
    ground.check_prefix()
    balanced(ground.database)


def test_a_new_operation_is_noticed_in_the_middle_of_a_lease(grounds):
    """Within a second or two, without a word from the driver."""
    ground = grounds(handler="failing")
    ground.publish([("zoe", BAD), ("zoe", "Zoiee")])
    ground.run()
    worker = ground.start(ground.lease(bounded=False, seconds=200), pipeline=FIXED)
    (live,) = ground.publish([("bob", "Bob")])
    wait_for(lambda: live in ground.effects(), what="a live event")
    operation = release(ground)
    wait_for(lambda: counts(ground.database, operation)[0] == "done", what="the operation")
    worker.kill()
    ground.check()


# Events that end their worker


def test_a_released_event_that_ends_its_worker_goes_back_aside(grounds):
    """Three deaths with it in hand, as for live events; the others of the release go on (R3)."""
    ground = grounds(handler="failing_all", slice_size=10, guard_off=True)
    ground.publish([("a", "1"), ("b", "segfault"), ("b", "2"), ("c", "3")])
    ground.run()
    operation = release(ground)
    killer = {"handler": "deadly"}
    ground.start(ground.lease(), pipeline=killer).end()
    ground.run(ground.lease(care=True), pipeline=killer)
    balanced(ground.database)
    ground.check()
    assert counts(ground.database, operation) == ("done", 2, 1, 0, 0)
    ((error, generation),) = ground.query(
        "select error, generation from sideline.events where state = 'parked' and why = 'failed'"
    )
    assert (error, generation) == ("sideline.errors.WorkerCrashed", 1)


def test_deaths_in_a_replay_are_remembered_by_the_ledger(grounds):
    """Whoever kept the workers that died before: the next death is enough (R3)."""
    ground = grounds(handler="failing_all", slice_size=10, guard_off=True)
    ground.publish([("b", "segfault"), ("b", "2")])
    ground.run()
    operation = release(ground)
    ground.query('update sideline.events set deaths = 7 where "offset" = 0')
    ground.run(ground.lease(care=True), pipeline={"handler": "deadly"})
    balanced(ground.database)
    assert counts(ground.database, operation) == ("done", 0, 1, 0, 0)
    ((message, deaths),) = ground.query(
        "select message, deaths from sideline.events where why = 'failed' and generation = 1"
    )
    assert "8 times" in message
    assert deaths == 0


# Outside calls, other deliveries and policies


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}])
def test_calls_are_made_again_when_they_are_released(grounds, tmp_path, options):
    """In order per key, at least once (R1, R2, K12)."""
    path = tmp_path / "calls"
    ground = grounds(
        calls=True, handler="failing_call", argument=str(path), slice_size=4, **options
    )
    ground.publish([(f"k{n % 3}", BAD if n < 3 else f"v{n}") for n in range(12)])
    ground.run()
    assert not ground.calls(path)
    operation = release(ground)
    ground.run(pipeline={"handler": "call"})
    balanced(ground.database)
    assert counts(ground.database, operation) == ("done", 12, 0, 0, 0)
    calls = ground.calls(path)
    assert sorted(place.offset for place in calls) == list(range(12))
    for key in ("k0", "k1", "k2"):
        offsets = [place.offset for place in calls if place.key == key]
        assert offsets == sorted(offsets)


def test_a_call_is_made_at_least_once_in_replay(grounds, tmp_path):
    """Killed between the call and the ledger, it is made again (C2)."""
    path = tmp_path / "calls"
    ground = grounds(calls=True, handler="failing_call", argument=str(path), handler_timeout="1s")
    ground.publish([("k", BAD), ("k", "v")])
    ground.run()
    release(ground)
    job = {"pipeline": {"handler": "call"}, "grace_seconds": 1.5}
    ground.killed(ground.start(ground.lease(), crash_at="replay-handled", **job))
    ground.run(**job)
    balanced(ground.database)
    assert [place.offset for place in ground.calls(path)] == [0, 1, 0, 1]


def test_at_most_once_makes_no_call_that_might_be_a_second_one(grounds, tmp_path):
    """The release stops and says why; rows are released like any others (C2)."""
    path = tmp_path / "calls"
    ground = grounds(calls=True, handler="failing_call", argument=str(path))
    ground.publish([("k", BAD)])
    ground.run()
    operation = release(ground)
    ground.run(pipeline={"handler": "call", "delivery": "at-most-once", "skip": True})
    assert counts(ground.database, operation)[0] == "stopped"
    assert ground.query("select note like '%at-least-once%' from sideline.operations") == [(True,)]
    assert ground.calls(path) == []


@pytest.mark.parametrize(
    "options", [{"skip": True}, {"block": True}, {"skip": True, "delivery": "at-most-once"}]
)
def test_whatever_the_policy_what_fails_in_replay_goes_back(grounds, options):
    """Nothing that a person released is left out, and nothing blocks because of it (R3)."""
    ground = grounds(handler="failing_all", slice_size=10)
    ground.publish([("a", "1"), ("b", BAD), ("b", "2")])
    ground.run()
    operation = release(ground)
    ground.run(pipeline={"handler": "failing", **options})
    balanced(ground.database)
    ground.check()
    assert counts(ground.database, operation) == ("done", 1, 1, 0, 0)
    assert [place.offset for place in ground.parked()] == [1, 2]


def test_a_database_that_does_not_fit_stops_the_release_not_the_pipeline(grounds):
    """The deployment's failure is no event's (F1)."""
    ground = grounds(handler="failing_all", slice_size=10)
    ground.publish([("a", "1")])
    ground.run()
    operation = release(ground)
    (report,) = ground.run(pipeline={"handler": "without_rights"})
    assert report.failure is None
    assert counts(ground.database, operation) == ("stopped", 0, 0, 0, 0)
    ground.query("update sideline.operations set state = 'running'")
    ground.run(pipeline=FIXED)
    ground.check()
    balanced(ground.database)
    assert counts(ground.database, operation) == ("done", 1, 0, 0, 0)


# Giving up, and taking that back


def queue_of_four(grounds, **options):
    ground = grounds(handler="failing_all", slice_size=10, **options)
    ground.publish([("k", BAD), ("k", "1"), ("k", "2"), ("k", "3"), (None, BAD)])
    ground.run()
    return ground


def test_a_discarded_head_lets_its_followers_come_back(grounds):
    """Counted, kept, and out of the way (R6)."""
    ground = queue_of_four(grounds)
    discard = release(ground, "discard", events=[(0, 0)])
    operation = release(ground)
    ground.run(pipeline={"handler": "failing"})
    balanced(ground.database)
    assert counts(ground.database, discard) == ("done", 0, 0, 1, 0)
    assert counts(ground.database, operation) == ("done", 3, 1, 0, 0)
    assert [place.offset for place in ground.effects()] == [1, 2, 3]
    assert ground.query("select discarded, parked, aside from sideline.progress") == [(1, 1, 0)]
    ((state, value),) = ground.query('select state, value from sideline.events where "offset" = 0')
    assert (state, value) == ("discarded", b"bad")


def test_restored_in_its_old_place_while_its_key_is_aside(grounds):
    """And refused once the key has gone on without it (R6, C1)."""
    ground = queue_of_four(grounds)
    release(ground, "discard", events=[(0, 1), (0, 4)])
    ground.run(pipeline=FIXED)
    restore = release(ground, "restore", events=[(0, 1), (0, 4)])
    again = release(ground, "restore", events=[(0, 1)])
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert states(ground.database, restore) == ["done", "done"]
    assert states(ground.database, again) == ["gone"]
    assert [place.offset for place in ground.parked()] == [0, 1, 2, 3, 4]
    release(ground, "discard", events=[(0, 0)])
    release(ground)
    ground.run(pipeline=FIXED)
    late = release(ground, "restore", events=[(0, 0)])
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert states(ground.database, late) == ["gone"]
    assert [place.offset for place in ground.effects()] == [1, 2, 3, 4]


def test_too_late_when_a_later_event_of_its_queue_was_applied(grounds):
    """Its key is still aside, but has passed it (R6, C1)."""
    ground = queue_of_four(grounds)
    release(ground, "discard", events=[(0, 0)])
    ground.run(pipeline=FIXED)
    release(ground, keys=["k"])
    worker = ground.start(
        ground.lease(), crash_at="replay-after-commit", pipeline=FIXED | {"slice_size": 1}
    )
    ground.killed(worker)
    ground.query("update sideline.operations set state = 'cancelled' where state = 'running'")
    restore = release(ground, "restore", events=[(0, 0)])
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert states(ground.database, restore) == ["gone"]
    assert [place.offset for place in ground.effects()] == [1]


def test_a_key_with_nothing_left_rejoins(grounds):
    """Also when the last of it was given up; events of other partitions count there (R6, K13)."""
    ground = two_partitions(grounds)
    discard = release(ground, "discard", events=[(0, 0), (0, 1), (1, 0), (1, 1)])
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert counts(ground.database, discard) == ("done", 0, 0, 4, 0)
    assert counters(ground) == [(0, 0, 0, 1), (1, 0, 0, 1)]
    ground.publish([("k", "again")], partition=0)
    ground.run(pipeline=FIXED)
    assert ground.parked() == []


@pytest.mark.parametrize("point", PARTS)
def test_killed_while_giving_up(grounds, point):
    """All of a slice or nothing (C3, R6)."""
    ground = queue_of_four(grounds)
    discard = release(ground, "discard", events=[(0, 0), (0, 2), (0, 4)])
    ground.killed(ground.start(ground.lease(), crash_at=point, pipeline=FIXED))
    balanced(ground.database)
    assert len(ground.parked()) == 5
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert counts(ground.database, discard) == ("done", 0, 0, 3, 0)
    assert [place.offset for place in ground.parked()] == [1, 3]


@pytest.mark.parametrize("point", [*PARTS, "replay-after-commit"])
def test_killed_while_putting_back(grounds, point):
    """All of a slice or nothing, in its old place, once (C3, R6)."""
    ground = queue_of_four(grounds)
    release(ground, "discard", events=[(0, 0), (0, 2), (0, 4)])
    ground.run(pipeline=FIXED)
    restore = release(ground, "restore", events=[(0, 0), (0, 2), (0, 4)])
    ground.killed(ground.start(ground.lease(), crash_at=point, pipeline=FIXED))
    balanced(ground.database)
    assert len(ground.parked()) == (5 if point == "replay-after-commit" else 2)
    ground.run(pipeline=FIXED)
    balanced(ground.database)
    assert counts(ground.database, restore) == ("done", 0, 0, 0, 3)
    assert [place.offset for place in ground.parked()] == [0, 1, 2, 3, 4]


def test_what_is_erased_meanwhile_is_not_put_back(grounds):
    """Looked at, then erased by a person: it is gone, and the others come back (R6)."""
    ground = queue_of_four(grounds)
    release(ground, "discard", events=[(0, 0), (0, 4)])
    ground.run(pipeline=FIXED)
    restore = release(ground, "restore", events=[(0, 0), (0, 4)])
    owner = ground.start(ground.lease(), crash_at="replay-read:1:STOP", pipeline=FIXED)
    owner.frozen()
    ground.query(
        "update sideline.events set erased_at = now(), key = null, value = null,"
        " header_names = '{}', header_values = '{}' where \"offset\" = 0"
    )
    owner.signal(signal.SIGCONT)
    owner.reports()
    balanced(ground.database)
    assert states(ground.database, restore) == ["gone", "done"]
    assert counts(ground.database, restore) == ("done", 0, 0, 0, 1)


# Dead events


@pytest.mark.parametrize("point", [None, "replay-written", "replay-after-commit"])
def test_dead_events_come_back_to_this_group_only(chains, capsys, point):
    """Frozen by the command, applied by the owner in order, once; no topic hears of it (F7)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish([("k", "one"), ("k", "two"), (None, "three")])
    ground.run(pipeline={"handler": "failing_all"})
    assert [row[1] for row in chain.states()] == ["dead"] * 3
    letters, ends = chain.dead_letters(), ground.ends()
    command = ["release", "ground", "--all", "--dead", "--execute", "--no-watch"]
    assert main.run([*command, "--reason", "mended", "--database", ground.database]) == 0
    capsys.readouterr()
    if point is not None:
        ground.killed(ground.start(ground.lease(), crash_at=f"{point}:1", pipeline=FIXED))
    ground.run(pipeline=FIXED)
    assert [place.offset for place in ground.effects()] == [0, 1, 2]
    assert dict(ground.query("select id, value from users")) == {"k": "two"}
    assert [row[1] for row in chain.states()] == ["resolved"] * 3
    assert ground.query("select consumed, applied, dead from sideline.progress") == [(3, 3, 0)]
    balanced(ground.database)
    # Neither another copy nor a record in the topic that others read.
    assert (chain.dead_letters(), ground.ends()) == (letters, ends)
    assert chain.unsent() == 0
