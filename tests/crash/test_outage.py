"""PostgreSQL goes away under a worker's hands and comes back: it goes on by itself."""

from __future__ import annotations

import os
import signal

import psycopg
import pytest

from tests.support.ground import Ground, numbered
from tests.support.waiting import wait_for

BACKENDS = """
    select pg_terminate_backend(pid)
    from pg_stat_activity
    where datname = current_database()
      and application_name like 'sideline %'
"""
WORKER = """
    select pid
    from pg_stat_activity
    where datname = current_database()
      and application_name like 'sideline worker %'
"""


def passed(ground, offset):
    """Wait until progress has passed an offset."""

    def reached():
        try:
            return ground.next_offsets()[0] >= offset
        except psycopg.OperationalError:
            return False

    wait_for(reached, what=f"progress beyond {offset}")


@pytest.mark.parametrize("options", [{}, {"handler": "insert"}, {"concurrency": 4}])
def test_backends_are_terminated(grounds, options):
    """An administrator ends all sessions, again and again; one lease survives them all (K5)."""
    slow = {"handler": "slow", "argument": 0.004}
    ground = grounds(slice_size=10, **slow | options)
    ground.publish(numbered(400))
    worker = ground.start(ground.lease(seconds=60))
    for offset in range(50, 350, 50):
        passed(ground, offset)
        ground.query(BACKENDS)
    (report,) = worker.reports()
    assert not report.fenced
    assert ground.next_offsets() == {0: 400}
    ground.check()


@pytest.fixture
def own(own_stack, kafka, topics, nursery):
    """A ground on a PostgreSQL that may be damaged, and the stack that it belongs to."""
    stack = own_stack("outage")
    made = []

    def make(**options):
        info = stack.up(services=("postgres",))
        made.append(Ground(info.database, kafka, topics(partitions=1), nursery, **options))
        return stack, made[-1]

    yield make
    for ground in made:
        ground.close()


def restart(stack, how):
    """End the server like ``pg_ctl stop -m``, and start it again."""
    pid = stack.status().pids["postgres"]
    os.kill(pid, how)
    wait_for(lambda: stack.status().dead, what="the server's end")
    stack.up(services=("postgres",))


def test_the_database_is_restarted(own):
    """Immediately, then fast, then one of its backends is killed: no loss, nothing twice (K5)."""
    stack, ground = own(slice_size=10, handler="slow", argument=0.01)
    ground.publish(numbered(400))
    worker = ground.start(ground.lease(seconds=120))
    passed(ground, 40)
    restart(stack, signal.SIGQUIT)
    passed(ground, 120)
    restart(stack, signal.SIGINT)
    passed(ground, 200)
    ((pid,),) = ground.query(WORKER)
    # The server ends all sessions and recovers, as after a crash of its own.
    os.kill(pid, signal.SIGKILL)
    (report,) = worker.reports()
    assert not report.fenced
    assert ground.next_offsets() == {0: 400}
    ground.check()


def test_an_outage_longer_than_the_lease(own):
    """The lease ends with its trouble told; the next one goes on (K5)."""
    stack, ground = own(slice_size=10, handler="slow", argument=0.01)
    ground.publish(numbered(200))
    worker = ground.start(ground.lease(seconds=4))
    passed(ground, 20)
    pid = stack.status().pids["postgres"]
    os.kill(pid, signal.SIGQUIT)
    (report,) = worker.reports()
    assert report.trouble.startswith("PostgreSQL: ")
    stack.up(services=("postgres",))
    ground.run()
    ground.check()
