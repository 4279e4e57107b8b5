"""Owners that freeze, die, come late or come twice: only one of them writes."""

from __future__ import annotations

import signal

import pytest

from tests.support.ground import numbered
from tests.support.waiting import wait_for

# Longer than the time between two signs of life, much longer than a slice of these tests.
GRACE_SECONDS = 3.0


def written_by(ground, pid):
    return ground.query("select count(*) from history where pid = %s", pid)[0][0]


# Leases


def test_a_late_lease_returns_at_once(ground):
    """Its deadline has passed: nothing is taken, read or written (K1)."""
    ground.publish(numbered(20))
    (report,) = ground.run(ground.lease(seconds=-1))
    assert report.partitions == []
    assert ground.query("select lease from sideline.progress") == [([ground.epoch],)]


def test_what_is_not_mine_is_returned_without_an_exception(ground):
    """A lower lease finds a higher one in the row, and is done (K1)."""
    ground.publish(numbered(20))
    late = ground.lease(round=1)
    ground.run(ground.lease(round=2))
    (report,) = ground.run(late)
    assert report.partitions == []
    assert report.fenced == [f"{ground.topic}/0"]
    ground.check()


def test_a_lease_goes_on_where_the_last_one_ended(grounds):
    """Many short leases in one process: release, take, read on (K1, K2)."""
    ground = grounds(partitions=3, slice_size=7)
    for start in range(0, 200, 50):
        ground.publish(numbered(50, start=start))
        (report,) = ground.run()
        assert not report.fenced
    ground.check()


def test_one_process_holds_lease_after_lease(grounds):
    """A consumer that is kept from lease to lease stands where progress says (K2)."""
    ground = grounds(partitions=2, slice_size=7)
    ground.publish(numbered(30))
    leases = [ground.lease()]
    ground.publish(numbered(30, start=30))
    leases += [ground.lease(), ground.lease(0), ground.lease(1)]
    other = ground.lease()
    ground.publish(numbered(30, start=60))
    leases += [ground.lease(), ground.lease()]
    ground.start(*leases).reports()
    ground.run(other)
    ground.check()


# Frozen owners


@pytest.mark.parametrize("point", ["between-write-and-commit", "before-first-write"])
def test_frozen_inside_its_transaction(ground, point):
    """The successor ends the backend that holds the row; the zombie writes nothing (K3)."""
    ground.publish(numbered(60))
    zombie = ground.start(ground.lease(), crash_at=f"{point}:2:STOP", grace_seconds=GRACE_SECONDS)
    zombie.frozen()
    ground.run(grace_seconds=GRACE_SECONDS)
    before = written_by(ground, zombie.pid)
    assert before == 10
    zombie.signal(signal.SIGCONT)
    (report,) = zombie.reports()
    assert report.fenced or report.trouble
    assert written_by(ground, zombie.pid) == before
    ground.check()


@pytest.mark.parametrize("point", ["lease-taken:1", "after-handler:2", "after-commit:2"])
def test_frozen_between_transactions(ground, point):
    """It holds no lock, and is replaced after the grace; awake again, it finds the fence (K3)."""
    ground.publish(numbered(60))
    zombie = ground.start(ground.lease(), crash_at=f"{point}:STOP", grace_seconds=GRACE_SECONDS)
    zombie.frozen()
    before = written_by(ground, zombie.pid)
    ground.run(grace_seconds=GRACE_SECONDS)
    zombie.signal(signal.SIGCONT)
    (report,) = zombie.reports()
    assert report.fenced == [f"{ground.topic}/0"]
    assert written_by(ground, zombie.pid) == before
    ground.check()


def test_without_the_fence_a_zombie_writes_twice(ground):
    """What the two tests above would see if a slice did not check (K1, K3)."""
    ground.publish(numbered(60))
    zombie = ground.start(
        ground.lease(),
        crash_at="after-handler:2:STOP",
        grace_seconds=GRACE_SECONDS,
        without=["lease and owner", "next_offset = start"],
    )
    zombie.frozen()
    ground.run(grace_seconds=GRACE_SECONDS)
    zombie.signal(signal.SIGCONT)
    zombie.end()
    assert "duplicate" in ground.faults()


def test_a_dead_owner_is_replaced_at_once(ground):
    """No grace for a worker whose backend is gone: the successor's lease is shorter (K3)."""
    ground.publish(numbered(60))
    ground.killed(ground.start(ground.lease(), crash_at="between-write-and-commit:2"))
    (report,) = ground.run(grace_seconds=3600)
    assert report.partitions[0].next_offset == 60
    ground.check()


def test_a_slow_owner_is_not_replaced(grounds):
    """Longer than the grace without a commit, but with signs of life (K3)."""
    # Signs of life come every second, on a loaded machine some seconds later.
    grace = GRACE_SECONDS * 2
    ground = grounds(handler="slow", argument=grace * 1.5)
    ground.publish(numbered(1))
    owner = ground.start(ground.lease(), grace_seconds=grace)
    wait_for(lambda: not ground.query("select released from sideline.progress")[0][0], what="take")
    successor = ground.start(ground.lease(), grace_seconds=grace)
    (report,) = owner.reports()
    assert report.partitions[0].applied == 1
    assert not report.fenced
    successor.reports()
    ground.check()


# Two at once


@pytest.mark.parametrize("crash", [None, "after-handler:3", "between-write-and-commit:2"])
def test_two_attempts_of_one_task_at_once(grounds, crash):
    """Spark may start a task again while the first attempt still runs (K1)."""
    ground = grounds(partitions=2, slice_size=5)
    ground.publish(numbered(120))
    lease = ground.lease()
    first = ground.start(lease, attempt=1)
    second = ground.start(lease, attempt=2, crash_at=crash)
    third = ground.start(lease, attempt=3)
    first.reports()
    second.end()
    third.reports()
    ground.run()
    ground.check()


def test_the_higher_attempt_wins_and_the_lower_one_gives_way(ground):
    """The later attempt took the partition: the earlier one comes too late for it (K1)."""
    ground.publish(numbered(20))
    lease = ground.lease()
    ground.run(lease, attempt=2)
    (report,) = ground.run(lease, attempt=1)
    assert report.fenced == [f"{ground.topic}/0"]
    ground.check()


def test_warmed_up_before_the_take(grounds):
    """A successor that prefetched while its predecessor went on uses only what still fits (K2)."""
    ground = grounds(handler="slow", argument=0.01, slice_size=10)
    ground.publish(numbered(200))
    lease = ground.lease()
    ground.publish(numbered(100, start=200))
    before = ground.start(lease)
    wait_for(lambda: ground.next_offsets()[0] > 0, what="the first slice")
    after = ground.start(ground.lease(), pipeline={"argument": 0})
    (first,) = before.reports()
    (second,) = after.reports()
    assert first.partitions[0].applied
    assert second.partitions[0].applied
    ground.check()


def test_many_hand_overs_in_a_row(grounds):
    """Each successor waits for the release of its predecessor while events arrive (K1, K2)."""
    ground = grounds(partitions=3, slice_size=20)
    workers = []
    published = 0
    for number in range(8):
        ground.publish(numbered(100, start=published))
        published += 100
        workers.append(ground.start(ground.lease(seconds=1.0 + number * 0.3, bounded=False)))
    for worker in workers:
        worker.reports()
    ground.run()
    ground.check()


# A new driver


def test_a_new_epoch_stops_a_worker_in_backoff(grounds, tmp_path):
    """The old worker waits for its due time; what it does then is nothing (K3)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="waiting", argument=str(flag), slice_size=10)
    ground.publish([*numbered(5), ("k5", "wait"), *numbered(5, start=6)])
    old = ground.start(ground.lease())
    wait_for(lambda: ground.next_offsets()[0] == 5, what="the events before")
    ground.begin()
    flag.unlink()
    new = ground.start(ground.lease())
    old.reports()
    new.reports()
    assert written_by(ground, old.pid) == 5
    ground.check()


def test_a_new_epoch_fences_a_worker_in_its_slice(ground):
    """A driver that comes while a slice is open waits for it or ends it, then fences (K3)."""
    ground.publish(numbered(60))
    zombie = ground.start(ground.lease(), crash_at="after-handler:3:STOP")
    zombie.frozen()
    ground.begin()
    before = written_by(ground, zombie.pid)
    zombie.signal(signal.SIGCONT)
    (report,) = zombie.reports()
    assert report.fenced == [f"{ground.topic}/0"]
    assert written_by(ground, zombie.pid) == before
    ground.run()
    ground.check()


def test_a_lower_epoch_never_takes(ground):
    """Leases of the driver before are worth nothing, whatever their round (K1)."""
    ground.publish(numbered(20))
    old = ground.lease(round=1000)
    ground.begin()
    (report,) = ground.run(old)
    assert report.partitions == []
    assert ground.effects() == []
    assert ground.query("select lease from sideline.progress") == [([ground.epoch],)]
