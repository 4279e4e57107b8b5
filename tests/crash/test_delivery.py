"""What each delivery promises when a worker dies at the worst moment (C2)."""

from __future__ import annotations

import signal

import psycopg
import pytest

from tests.support import checkers
from tests.support.ground import numbered
from tests.support.waiting import wait_for

EVENTS = 60
POINTS = ("after-handler", "before-first-write", "between-write-and-commit", "after-commit")


def die(ground, points):
    """Let workers die, one after the other, then work the rest."""
    for point in points:
        ground.killed(ground.start(ground.lease(), crash_at=point))
    ground.run()


# Rows


def test_at_least_once_never_loses(grounds):
    """Effects first: dying between them and progress repeats a slice (C2)."""
    ground = grounds(delivery="at-least-once", slice_size=10)
    ground.publish(numbered(EVENTS))
    die(ground, [*(f"{point}:2" for point in POINTS), "between-effects-and-progress:1"])
    effects = ground.effects()
    assert checkers.lost(ground.produced, effects) == []
    assert checkers.duplicate(effects), "the crash between effects and progress repeats"
    assert checkers.out_of_order(checkers.first_effects(effects)) == []
    assert ground.query("select count(*) from users where value like 'v5_'") == [(10,)]
    assert checkers.unaccounted(ground.produced, ground.accounts()) == []


def test_at_least_once_repeats_a_slice_at_most(grounds):
    """One death costs at most one slice's repetition (C2)."""
    ground = grounds(delivery="at-least-once", slice_size=10)
    ground.publish(numbered(EVENTS))
    die(ground, ["between-effects-and-progress:2"])
    assert [place.offset for place in checkers.duplicate(ground.effects())] == list(range(10, 20))


@pytest.mark.parametrize(
    ("point", "unknown"),
    [
        ("after-commit:1", 10),
        ("after-handler:1", 10),
        ("before-first-write:1", 10),
        ("between-write-and-commit:1", 10),
        ("after-commit:2", 0),
        ("after-handler:2", 10),
    ],
)
def test_at_most_once_never_repeats(grounds, point, unknown):
    """Progress first: a death loses at most the slice in hand, and the accounts say so (C2)."""
    ground = grounds(delivery="at-most-once", skip=True, slice_size=10)
    ground.publish(numbered(EVENTS))
    die(ground, [point])
    effects = ground.effects()
    assert checkers.duplicate(effects) == []
    assert checkers.out_of_order(effects) == []
    assert len(checkers.lost(ground.produced, effects)) == unknown
    row = ground.accounts()[ground.topic, 0]
    assert (row.consumed, row.unknown, row.applied) == (EVENTS, unknown, EVENTS - unknown)


def test_at_most_once_leaves_failing_events_out(grounds):
    """An event that fails is skipped and counted; nothing is unknown without a crash (C2, F5)."""
    ground = grounds(delivery="at-most-once", skip=True, handler="failing", slice_size=10)
    ground.publish([(f"k{n % 3}", "bad" if n % 4 == 0 else "good") for n in range(20)])
    ground.run()
    row = ground.accounts()[ground.topic, 0]
    assert (row.consumed, row.applied, row.skipped, row.unknown) == (20, 15, 5, 0)


def test_at_most_once_waits_for_what_heals(grounds):
    """A slice that PostgreSQL refused for the moment is written later, not lost (C2, F2)."""
    ground = grounds(delivery="at-most-once", skip=True, slice_size=10)
    ground.publish(numbered(EVENTS))
    ground.query("insert into users values ('k13', 'locked')")
    with psycopg.connect(ground.database) as locker:
        locker.execute("select from users where id = 'k13' for update")
        worker = ground.start(ground.lease())
        waiting = "select pid from pg_stat_activity where wait_event_type = 'Lock' and pid <> %s"
        found = wait_for(lambda: ground.query(waiting, 0), what="the worker waits for the row")
        assert ground.accounts()[ground.topic, 0].unknown == 10
        ground.query("select pg_cancel_backend(%s)", found[0][0])
    worker.reports()
    assert ground.accounts()[ground.topic, 0].unknown == 0
    ground.check()


def test_at_most_once_loses_little_of_slow_events(grounds, tmp_path):
    """The slower the handler, the fewer events a death makes unknown (C2)."""
    path = tmp_path / "calls"
    ground = grounds(
        delivery="at-most-once",
        skip=True,
        calls=True,
        handler="slow_call",
        argument=[str(path), 0.05],
        handler_timeout="30s",
    )
    ground.publish(numbered(200))
    ground.killed(ground.start(ground.lease(), crash_at="after-handler:2"))
    row = ground.accounts()[ground.topic, 0]
    assert 0 < row.unknown <= 32
    assert row.consumed < 200


def test_exactly_once_with_the_handlers_own_statements(grounds):
    """A handler that takes the transaction dies like the others (C2, C3)."""
    ground = grounds(handler="insert", slice_size=10)
    ground.publish(numbered(EVENTS))
    die(ground, ["lease-taken:1", "between-write-and-commit:2", "after-commit:1"])
    ground.check()


# Calls


def calls(grounds, tmp_path, **options):
    path = tmp_path / "calls"
    ground = grounds(
        calls=True,
        handler="call",
        argument=str(path),
        slice_size=10,
        **{"handler_timeout": "1s"} | options,
    )
    ground.publish(numbered(EVENTS))
    return ground, path


def test_calls_are_made_at_least_once(grounds, tmp_path):
    """Dying between the calls and progress repeats them; the event's id tells (C2)."""
    ground, path = calls(grounds, tmp_path)
    for point in ("after-handler:2", "between-write-and-commit:1", "after-commit:1"):
        ground.killed(ground.start(ground.lease(), crash_at=point, grace_seconds=1.5))
    ground.run(grace_seconds=1.5)
    made = ground.calls(path)
    assert checkers.lost(ground.produced, made) == []
    assert checkers.duplicate(made)
    assert checkers.out_of_order(checkers.first_effects(made)) == []
    assert checkers.unaccounted(ground.produced, ground.accounts()) == []


def test_calls_are_made_at_most_once(grounds, tmp_path):
    """Progress first: what a dead worker did not call is never called (C2)."""
    ground, path = calls(grounds, tmp_path, delivery="at-most-once", skip=True)
    for point in ("after-commit:1", "after-handler:1", "after-commit:3"):
        ground.killed(ground.start(ground.lease(), crash_at=point, grace_seconds=1.5))
    ground.run(grace_seconds=1.5)
    made = ground.calls(path)
    assert checkers.duplicate(made) == []
    assert checkers.out_of_order(made) == []
    row = ground.accounts()[ground.topic, 0]
    assert row.consumed == EVENTS
    # Of the slice whose calls were made before the death, nobody knows either.
    assert row.unknown >= len(checkers.lost(ground.produced, made)) > 0


def test_a_call_knows_its_lease(grounds, tmp_path):
    """A number that grows with every change of owner: a fencing token for the outside (K12)."""
    ground, path = calls(grounds, tmp_path)
    ground.killed(ground.start(ground.lease(), crash_at="after-commit:2", grace_seconds=1.5))
    ground.run(grace_seconds=1.5)
    leases = [
        tuple(map(int, line.split()[-1].split("."))) for line in path.read_text().splitlines()
    ]
    assert leases == sorted(leases)
    assert len(set(leases)) == 2


def test_a_dead_caller_is_not_replaced_at_once(grounds, tmp_path):
    """Without a connection it may still be calling: its successor waits for the grace (K3, K12)."""
    ground, path = calls(grounds, tmp_path)
    ground.killed(ground.start(ground.lease(), crash_at="after-commit:2"))
    before = len(ground.calls(path))
    (report,) = ground.run(ground.lease(seconds=2), grace_seconds=3600)
    assert report.partitions == []
    assert len(ground.calls(path)) == before


def test_a_new_driver_waits_for_a_call_under_way(grounds, tmp_path):
    """A driver that was killed leaves a worker in a call: it is not overtaken (C1, K12)."""
    ground, path = calls(grounds, tmp_path, handler_timeout="20s")
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    held = {"handler": "held_call", "argument": [str(path), str(begun), str(gate)]}
    old = ground.start(ground.lease(), pipeline=held, grace_seconds=1.5)
    wait_for(begun.exists, what="a call under way")
    ground.begin()
    new = ground.start(ground.lease(), grace_seconds=1.5)
    beat = "select beat_at from sideline.workers where pid = %s"
    wait_for(lambda: ground.query(beat, new.pid), what="the new worker")
    for _ in range(3):
        # Longer than the grace alone, and no longer than a handler may take.
        last = ground.query(beat, new.pid)
        wait_for(lambda last=last: ground.query(beat, new.pid) != last, what="a sign of life")
    gate.touch()
    old.reports()
    new.reports()
    made = ground.calls(path)
    assert checkers.lost(ground.produced, made) == []
    assert checkers.out_of_order(checkers.first_effects(made)) == []
    # The call that was under way came first, and was made again: at least once.
    assert made[:2] == [ground.produced[0], ground.produced[0]]


def test_a_new_driver_does_not_wait_for_callers_that_have_ended(grounds, tmp_path):
    """A worker that ends says so: after an ordinary end nobody waits for the grace (K12)."""
    # Longer than it is frozen: what wakes up behind its time is ended.
    ground, path = calls(grounds, tmp_path, handler_timeout="60s")
    old = ground.start(ground.lease(), crash_at="after-handler:2:STOP")
    old.frozen()
    ground.begin()
    old.signal(signal.SIGCONT)
    (report,) = old.reports()
    assert report.fenced
    assert ground.query("select worker from sideline.workers") == []
    (report,) = ground.run(grace_seconds=1.5)
    assert report.partitions[0].next_offset == EVENTS
    assert checkers.lost(ground.produced, ground.calls(path)) == []
