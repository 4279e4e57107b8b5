"""PostgreSQL goes away under a worker's hands and comes back: it goes on by itself."""

from __future__ import annotations

import os
import signal
from collections import defaultdict

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from sideline.engine import holding
from sideline.engine.worker import Access, Worker
from sideline.ledger.store import Ledger
from sideline.stack import ports
from tests.conftest import _create
from tests.support import handlers
from tests.support.ground import Ground, numbered
from tests.support.proxy import wire
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


def stop(ground):
    """Ask the worker to stop, once the database hears of it."""

    def asked():
        try:
            ground.query("update sideline.pipelines set stop_requested = true")
        except psycopg.OperationalError:
            return False
        return True

    wait_for(asked, what="a database that answers")


@pytest.mark.parametrize("options", [{}, {"handler": "insert"}, {"concurrency": 4}])
def test_backends_are_terminated(grounds, options):
    """An administrator ends all sessions, again and again; one lease survives them all (K5)."""
    slow = {"handler": "slow", "argument": 0.004}
    ground = grounds(slice_size=10, **slow | options)
    ground.publish(numbered(400))
    worker = ground.start(ground.lease(seconds=120))
    for offset in range(50, 350, 50):
        passed(ground, offset)
        ground.query(BACKENDS)
    (report,) = worker.reports()
    assert not report.fenced
    assert ground.next_offsets() == {0: 400}
    ground.check()


def test_the_connection_goes_again_before_it_is_known_how_far_it_came(grounds, monkeypatch):
    """Ended while the worker asks what became of its last slice: it asks once more (K5)."""
    ground = grounds(slice_size=10)
    ground.publish(numbered(60))
    settle, asked = Ledger.settle, []

    def settling(ledger, held):
        asked.append(held.next_offset)
        if len(asked) <= 2:
            ground.query(BACKENDS)
        return settle(ledger, held)

    def ending(point):
        if point == "lease-taken":
            ground.query(BACKENDS)

    monkeypatch.setattr(Ledger, "settle", settling)
    monkeypatch.setattr(holding, "reach", ending)
    access = Access(ground.database, {"bootstrap.servers": ground.kafka})
    worker = Worker(handlers.build(**ground.options), access)
    report = worker.work(ground.lease(), 0)
    worker.close()
    assert (report.trouble, report.fenced, len(asked)) == (None, [], 3)
    assert ground.next_offsets() == {0: 60}
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
    # Without a bound: it is still there to be killed, however late anybody looks.
    worker = ground.start(ground.lease(seconds=250, bounded=False))
    passed(ground, 40)
    restart(stack, signal.SIGQUIT)
    passed(ground, 120)
    restart(stack, signal.SIGINT)
    passed(ground, 200)
    ((pid,),) = ground.query(WORKER)
    # The server ends all sessions and recovers, as after a crash of its own.
    os.kill(pid, signal.SIGKILL)
    # Whatever was done by then: without a new session nobody gets beyond.
    ground.publish(numbered(10, start=400))
    passed(ground, 410)
    stop(ground)
    (report,) = worker.reports()
    assert not report.fenced
    assert ground.next_offsets() == {0: 410}
    ground.check()


def test_an_outage_longer_than_the_lease(own):
    """The lease ends with its trouble told; the next one goes on (K5)."""
    # More than a lease is long enough for.
    stack, ground = own(slice_size=10, handler="slow", argument=0.05)
    ground.publish(numbered(400))
    worker = ground.start(ground.lease(seconds=10))
    passed(ground, 20)
    pid = stack.status().pids["postgres"]
    os.kill(pid, signal.SIGQUIT)
    (report,) = worker.reports()
    assert report.trouble.startswith("PostgreSQL: ")
    stack.up(services=("postgres",))
    ground.run(pipeline={"argument": 0})
    ground.check()


# With keys that fail for reasons of their own, all the while

BAD = "bad"
SECONDS = 0.004
BREAKING = {
    "handler": {"handler": "slow_failing", "argument": [SECONDS, "handler"]},
    "database": {"handler": "slow_failing", "argument": [SECONDS, "database"]},
    "transaction": {"handler": "slow_failing_tx", "argument": SECONDS},
    "threads": {
        "handler": "slow_failing",
        "argument": [3 * SECONDS, "handler"],
        "concurrency": 3,
    },
}


def breaking(count, *, start=0):
    """Events of 40 keys; every fifth key has one that fails."""
    return [
        (f"k{number % 40}", BAD if number % 40 % 5 == 0 and number // 40 == 2 else f"v{number}")
        for number in range(start, start + count)
    ]


def check_only_the_broken_wait(ground):
    """Nothing is parked because of the outage; every healthy key has arrived (F2, F4)."""
    ground.check()
    assert ground.next_offsets() == ground.ends()
    waiting = defaultdict(list)
    for place in ground.parked():
        waiting[place.key].append(place.offset)
    expected = defaultdict(list)
    rows = ground.query(
        "select partition, \"offset\" from sideline.events where why = 'failed'"
        " and value = 'bad'::bytea"
    )
    first = {place.key: place.offset for place in ground.produced if place[1:3] in set(rows)}
    for place in ground.produced:
        if place.offset >= first.get(place.key, 1 << 62):
            expected[place.key].append(place.offset)
    assert waiting == expected
    assert set(waiting) == {f"k{number}" for number in range(0, 40, 5)}
    assert ground.query("select count(*) from sideline.events where why = 'failed'") == [(8,)]
    errors = ground.query("select distinct error from sideline.causes")
    assert len(errors) == 1, errors


@pytest.mark.parametrize("how", BREAKING)
def test_keys_fail_while_the_database_is_away(own, how):
    """It is stopped for real, twice, while events flow and some keys fail (F2, F4, C1)."""
    stack, ground = own(slice_size=10, **BREAKING[how])
    ground.publish(breaking(300))
    worker = ground.start(ground.lease(seconds=250, bounded=False))
    for offset, quickly in ((40, signal.SIGQUIT), (110, signal.SIGINT)):
        passed(ground, offset)
        os.kill(stack.status().pids["postgres"], quickly)
        wait_for(lambda: stack.status().dead, what="the server's end")
        # Events arrive while nobody can apply them.
        ground.publish(breaking(20, start=len(ground.produced)))
        stack.up(services=("postgres",))
    passed(ground, 340)
    stop(ground)
    (report,) = worker.reports()
    assert report.failure is None
    check_only_the_broken_wait(ground)


@pytest.mark.parametrize("how", BREAKING)
def test_keys_fail_while_leases_end_in_the_outage(own, how):
    """The database is away longer than a lease lasts (F2, F4)."""
    stack, ground = own(slice_size=10, **BREAKING[how])
    ground.publish(breaking(300))
    worker = ground.start(ground.lease(seconds=10))
    passed(ground, 100)
    os.kill(stack.status().pids["postgres"], signal.SIGQUIT)
    (report,) = worker.reports()
    assert report.failure is None
    stack.up(services=("postgres",))
    ground.run()
    check_only_the_broken_wait(ground)


@pytest.mark.parametrize("how", BREAKING)
def test_keys_fail_while_the_wire_is_cut_again_and_again(grounds, how):
    """Anywhere, also inside a message, many times in one lease (F2, F4, K5)."""
    ground = grounds(slice_size=10, **BREAKING[how])
    # Enough for three cuts, however few slices they make.
    ground.publish(breaking(500))
    with wire(ground.database, every=30_000) as proxy:
        (report,) = ground.run(ground.lease(seconds=120), database=proxy.url)
        cuts = proxy.plan.cuts
    assert report.failure is None
    assert cuts > 2
    ground.run()
    check_only_the_broken_wait(ground)


def test_keys_fail_while_the_broker_is_away(own_stack, database, nursery):
    """Kafka is killed in the middle of a lease and comes back: no loss, nothing twice (F2, P4)."""
    stack = own_stack("broker")
    info = stack.up(services=("kafka",))
    admin = AdminClient({"bootstrap.servers": info.bootstrap, "log_level": 0})
    _create(admin, NewTopic("away", 1, 1))
    ground = Ground(database, info.bootstrap, "away", nursery, slice_size=10, **BREAKING["handler"])
    try:
        ground.publish(breaking(300))
        worker = ground.start(ground.lease(seconds=250, bounded=False))
        passed(ground, 60)
        os.kill(info.pids["kafka-1"], signal.SIGKILL)
        wait_for(lambda: stack.status().dead, what="the broker's end")
        # Where clients look for it: its last threads may hold the port a moment longer.
        port = int(info.bootstrap.rpartition(":")[2])
        wait_for(lambda: ports.is_free(port), what="the broker's port")
        again = stack.up(services=("kafka",))
        assert again.bootstrap == info.bootstrap
        # The old one may still wait a while before it tries again.
        ground._producer = Producer({"bootstrap.servers": info.bootstrap, "log_level": 0})
        ground.publish(breaking(20, start=300))
        passed(ground, 320)
        stop(ground)
        (report,) = worker.reports()
        assert report.failure is None
        check_only_the_broken_wait(ground)
    finally:
        ground.close()
