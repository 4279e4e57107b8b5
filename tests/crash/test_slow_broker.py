"""A broker that answers too late, in the midst of a transaction: said, and nothing lost."""

from __future__ import annotations

import os
import signal

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.conftest import _create
from tests.support.chain import Chain
from tests.support.ground import Ground, numbered
from tests.support.outputs import Outputs
from tests.support.waiting import wait_for


@pytest.fixture
def slow(own_stack):
    """A broker that may be frozen: its address, an admin client, its process."""
    stack = own_stack("slow")
    info = stack.up(services=("kafka",))
    admin = AdminClient({"bootstrap.servers": info.bootstrap})
    _create(admin, NewTopic("orders", 1, 1))
    return info.bootstrap, admin, stack.status().pids["kafka-1"]


@pytest.fixture
def own(slow, database, nursery, tmp_path):
    """A pipeline with dead letters on a broker that may be frozen, and that broker's process."""
    kafka, admin, broker = slow
    folder = tmp_path / "tries"
    folder.mkdir()
    options = {"handler": "flaky", "argument": str(folder), "independent": True, "dead_letter": 1}
    ground = Ground(database, kafka, "orders", nursery, **options)
    yield Chain(ground, admin, folder), broker
    ground.close()


def test_a_broker_that_freezes_in_a_transaction(own):
    """What it did in the end is found out afterwards: sent once, in order (K23, K24)."""
    chain, broker = own
    ground = chain.ground
    ground.publish([(f"k{n}", "never" if n % 2 else "fine") for n in range(40)])
    worker = ground.start(chain.lease(seconds_=140), crash_at="between-produce-and-commit:1:STOP")
    worker.frozen()
    os.kill(broker, signal.SIGSTOP)
    try:
        worker.signal(signal.SIGCONT)
        wait_for(
            lambda: ground.query(
                "select 1 from sideline.progress where outbox_trouble is not null"
            ),
            what="somebody to say so",
        )
    finally:
        os.kill(broker, signal.SIGCONT)
    worker.reports()
    chain.check(dead=set(range(1, 40, 2)))
    assert chain.dead_letters() == list(range(1, 40, 2))
    assert ground.query("select outbox_trouble from sideline.progress") == [(None,)]


@pytest.mark.long
def test_the_answer_to_a_commit_is_lost(slow, database, nursery):
    """The broker commits, and nobody hears of it: its offset tells, no record twice (P2, K19)."""
    kafka, admin, broker = slow
    _create(admin, NewTopic("copies", 1, 1))
    options = {"publishes": True, "handler": "publish", "argument": {"to": "copies"}}
    ground = Outputs(database, kafka, "orders", nursery, slice_size=10, **options)
    ground.out, ground.out_partitions = "copies", 1
    ground.publish(numbered(30))
    worker = ground.start(
        ground.lease(seconds=90),
        crash_at="before-kafka-commit:2:STOP",
        without=["patience with Kafka"],
    )
    worker.frozen()
    os.kill(broker, signal.SIGSTOP)
    try:
        worker.signal(signal.SIGCONT)
        wait_for(lambda: "waits: Kafka" in worker._said(), what="somebody to say so")
    finally:
        os.kill(broker, signal.SIGCONT)
    worker.reports()
    ground.check()
    assert ground.next_offsets() == ground.ends()
    ground.close()
