"""The connection to PostgreSQL is cut, and a COMMIT may or may not have come through."""

from __future__ import annotations

import random

import pytest

from sideline.errors import RefusedError
from sideline.ledger.connection import connect
from tests.support.ground import numbered
from tests.support.proxy import wire

EVENTS = 60
SLICES = 6
# Warm-up, the take and its questions commit too: this many before the first slice, at most.
OTHERS = 6


def run_through(ground, **plan):
    """Work everything through a wire that is cut as planned; how often it was."""
    job = {name: plan.pop(name) for name in ("without",) if name in plan}
    with wire(ground.database, **plan) as proxy:
        ground.run(ground.lease(), database=proxy.url, **job)
        return proxy.plan.cuts


@pytest.mark.parametrize("handler", ["record", "insert"])
def test_cut_before_the_commit_comes_through(grounds, handler):
    """The slice is not committed: the worker finds out and does it again (K5)."""
    ground = grounds(slice_size=10, handler=handler)
    for number in range(1, OTHERS + SLICES):
        ground.publish(numbered(EVENTS, start=len(ground.produced)))
        run_through(ground, before_commit=number)
    ground.run()
    ground.check()


@pytest.mark.parametrize("handler", ["record", "insert"])
def test_cut_after_the_commit_came_through(grounds, handler):
    """The slice is committed though the worker was told nothing: it is not done again (K5)."""
    ground = grounds(slice_size=10, handler=handler)
    for number in range(1, OTHERS + SLICES):
        ground.publish(numbered(EVENTS, start=len(ground.produced)))
        run_through(ground, after_commit=number)
    ground.run()
    ground.check()


def test_an_unclear_commit_is_not_taken_for_a_failure(ground):
    """What the test above would see if the worker believed the error (K5)."""
    for number in range(OTHERS, OTHERS + SLICES - 2):
        ground.publish(numbered(EVENTS, start=len(ground.produced)))
        run_through(ground, after_commit=number, without=["unclear commit", "next_offset = start"])
    assert "duplicate" in ground.faults()


def test_the_worker_goes_on_by_itself(ground):
    """One lease, one process: a cut in the middle costs a slice's time, not the lease (K5)."""
    ground.publish(numbered(EVENTS))
    assert run_through(ground, after_commit=OTHERS) == 1
    assert ground.next_offsets() == {0: EVENTS}
    ground.check()


def test_cut_at_any_byte(ground):
    """Wherever the wire is cut, also inside a message (K5)."""
    ground.publish(numbered(EVENTS))
    with wire(ground.database) as proxy:
        ground.run(ground.lease(), database=proxy.url)
        length = proxy.plan.bytes
    cuts = 0
    for _ in range(12):
        ground.publish(numbered(EVENTS, start=len(ground.produced)))
        cuts += run_through(ground, at_byte=random.randrange(length))
    assert cuts > 6
    ground.run()
    ground.check()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_cut_at_many_bytes(ground):
    """The same, a hundred times more."""
    for _ in range(300):
        ground.publish(numbered(EVENTS, start=len(ground.produced)))
        run_through(ground, at_byte=random.randrange(60_000))
    ground.run()
    ground.check()


def test_the_answer_to_the_take_is_lost(grounds):
    """The partition is not left with a lease that does not know of it (K5)."""
    ground = grounds(partitions=2, slice_size=10)
    ground.publish(numbered(EVENTS))
    for number in range(1, OTHERS):
        lease = ground.lease()
        with wire(ground.database, after_commit=number) as proxy:
            ground.start(lease, database=proxy.url).reports()
        released = ground.query("select bool_and(released) from sideline.progress")
        assert released == [(True,)], f"after commit {number}"
        ground.publish(numbered(20, start=len(ground.produced)))
    ground.run()
    ground.check()


def test_a_pooler_is_refused(database):
    """Behind a pooler neither session locks nor process ids mean anything (K3)."""
    with wire(database, fake_pid=True) as proxy, pytest.raises(RefusedError, match="pooler"):
        connect(proxy.url, role="worker test")


def test_a_plain_wire_is_no_pooler(database):
    """The proxy itself is not what is refused."""
    with wire(database) as proxy:
        connect(proxy.url, role="worker test").close()
