"""Workers killed at every named point, and at any other moment."""

from __future__ import annotations

import contextlib
import random
import signal
import threading

import pytest

from tests.support.ground import numbered

GRACE_SECONDS = 2.5
# The points that a worker without Spark reaches in an exactly-once pipeline.
POINTS = (
    "lease-taken",
    "after-handler",
    "before-first-write",
    "between-write-and-commit",
    "after-commit",
    "before-release",
)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(grounds, point, count):
    """A worker that dies at any step leaves nothing half done; its successor goes on (C2, C3)."""
    ground = grounds(partitions=3, slice_size=10)
    ground.publish(numbered(150))
    if point == "before-release":
        count = 1
    ground.killed(ground.start(ground.lease(), crash_at=f"{point}:{count}"))
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


def _random_point(slices: int) -> str:
    point = random.choice(POINTS[1:5])
    return f"{point}:{random.randint(1, slices)}"


def test_killed_again_and_again(grounds):
    """Thirty deaths at random points while events flow: nothing lost, twice or out of order."""
    ground = grounds(partitions=4, slice_size=8)
    _die(ground, deaths=30)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_hundreds_of_times(grounds):
    """The same with five hundred deaths."""
    ground = grounds(partitions=4, slice_size=8)
    _die(ground, deaths=500)


def _die(ground, deaths):
    published = 0
    while ground.kills < deaths:
        ground.publish(numbered(80, start=published))
        published += 80
        point = _random_point(8)
        worker = ground.start(ground.lease(), crash_at=point)
        ground.perhaps_killed(worker)
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


@pytest.mark.parametrize("handler", ["record", "insert"])
def test_killed_at_any_moment(grounds, handler):
    """SIGKILL whenever it comes, also inside PostgreSQL's and Kafka's own code."""
    ground = grounds(partitions=2, slice_size=20, handler=handler)
    _die_anytime(ground, deaths=8)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_any_moment_for_long(grounds):
    """The same, a hundred times."""
    _die_anytime(grounds(partitions=2, slice_size=20), deaths=100)


def _die_anytime(ground, deaths):
    published = 0
    while ground.kills < deaths:
        ground.publish(numbered(600, start=published))
        published += 600
        worker = ground.start(ground.lease())
        timer = threading.Timer(random.uniform(0.02, 0.4), _kill, [worker])
        timer.start()
        code = worker.end()
        timer.cancel()
        ground.kills += code == -signal.SIGKILL
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


def _kill(worker):
    # It may have come to its end already.
    with contextlib.suppress(ProcessLookupError):
        worker.signal(signal.SIGKILL)


def test_killed_and_frozen_with_successors_waiting(grounds):
    """Rounds overlap; owners die or freeze anywhere and wake up when others have taken over."""
    _overlap(grounds(partitions=3, slice_size=8), workers=20)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_and_frozen_for_long(grounds):
    """The same, with hundreds of workers."""
    _overlap(grounds(partitions=3, slice_size=8), workers=300)


def _overlap(ground, workers):
    alive, frozen, ended, plan = [], [], [], []
    for number in range(workers):
        ground.publish(numbered(40, start=number * 40))
        some = random.choice([None, _random_point(6), f"{_random_point(6)}:STOP"])
        plan.append(some if number else "after-commit:1")
        lease = ground.lease(seconds=20)
        alive.append(ground.start(lease, crash_at=plan[-1], grace_seconds=GRACE_SECONDS))
        if len(alive) > 2:
            worker = alive.pop(0)
            (ended if worker.ends() else frozen).append(worker)
    # Those that froze wake up long after others have taken over.
    for worker in [*frozen, *alive]:
        if not worker.ends():
            worker.signal(signal.SIGCONT)
    codes = [worker.end() for worker in [*ended, *frozen, *alive]]
    ground.run(grace_seconds=GRACE_SECONDS)
    ground.check(plan)
    assert set(codes) <= {0, -signal.SIGKILL}
    assert -signal.SIGKILL in codes
    assert ground.next_offsets() == ground.ends()
