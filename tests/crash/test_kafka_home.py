"""From Kafka to Kafka: workers killed and frozen at every step, and outputs counted one by one."""

from __future__ import annotations

import random
import signal
import threading

import pytest
from confluent_kafka import Consumer, TopicPartition

from sideline.engine.worker import Access, Worker
from sideline.homes.transactions import Transactor
from tests.support import handlers
from tests.support.ground import numbered
from tests.support.operations import balanced, counts, operate, states
from tests.support.waiting import wait_for

# The steps of a slice, in their order.
POINTS = (
    "lease-taken",
    "after-handler",
    "before-home-init",
    "after-home-init",
    "after-pending",
    "kafka-produced",
    "before-kafka-commit",
    "after-kafka-commit",
    "after-apply",
    "before-release",
)


def test_every_event_is_published_once(outputs):
    """Each event has one record, in the order of its key, and both groups show the end (P2, C3)."""
    ground = outputs(partitions=3, slice_size=10)
    ground.publish(numbered(100))
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()
    for group in (None, ground.options["name"]):
        assert {spot: at for spot, (at, _) in ground.committed(group).items()} == ground.ends()
    ids = [dict(message.headers())["message-id"] for message in ground.messages()]
    assert len(set(ids)) == 100


# Between these nothing happens that the other home does not do as well.
RARELY = {"lease-taken", "after-handler", "after-home-init", "after-apply", "before-release"}


@pytest.mark.parametrize(
    "point",
    [pytest.param(one, marks=pytest.mark.long) if one in RARELY else one for one in POINTS],
)
def test_killed_at_a_point(outputs, point):
    """A worker that dies at any step leaves no record twice, lost or in disorder (P2, K18, K19)."""
    ground = outputs(partitions=2, slice_size=10)
    ground.publish(numbered(80))
    # A producer is made once for each of the two partitions.
    most = {"lease-taken": 1, "before-release": 1, "before-home-init": 2, "after-home-init": 2}
    for count in sorted({1, most.get(point, 3)}):
        ground.killed(ground.start(ground.lease(), crash_at=f"{point}:{count}"))
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


# What fails

BAD = ["v7", "v23", "v24"]
# The steps of a slice in which something failed.
FAILING = ("before-pending", "after-pending", "before-kafka-commit", "after-kafka-commit")


@pytest.mark.parametrize("point", [pytest.param(FAILING[0], marks=pytest.mark.long), *FAILING[1:]])
def test_killed_while_a_key_steps_aside(outputs, tmp_path, point):
    """The key is not forgotten, nor remembered for nothing, and comes back whole (P2, K18, K21)."""
    mended = tmp_path / "mended"
    ground = outputs(slice_size=10, argument={"bad": BAD, "mended": str(mended)})
    ground.publish([*numbered(30, keys=5), (None, "v7"), (None, "v31")])
    for count in (1, 2):
        ground.killed(ground.start(ground.lease(), crash_at=f"{point}:{count}"))
        balanced(ground.database)
    ground.run()
    ground.check()
    balanced(ground.database)
    # v7 of k2, v23 of k3 and v24 of k4, with all that follows them; and one without a key.
    assert len(ground.parked()) == 5 + 2 + 2 + 1
    mended.touch()
    operation = operate(ground.database, "ground")
    ground.killed(ground.start(ground.lease(), crash_at=point))
    balanced(ground.database)
    ground.run()
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    assert counts(ground.database, operation) == ("done", 10, 0, 0, 0)
    assert ground.query("select count(*) from sideline.queues, sideline.keys") == [(0,)]


def test_what_fails_again_stays_and_its_followers_wait(outputs):
    """A replay publishes what can be, in one transaction with an unmoved offset (P2, R3, K18)."""
    ground = outputs(slice_size=10, argument={"bad": ["v0", "v1"]})
    ground.publish([("a", "v0"), ("b", "v1"), ("a", "v2"), ("b", "v3"), ("c", "v4")])
    ground.run()
    operation = operate(ground.database, "ground")
    ground.run(pipeline={"argument": {"to": ground.out, "bad": ["v1"]}})
    ground.check()
    balanced(ground.database)
    assert states(ground.database, operation) == ["done", "failed"]
    assert [place.offset for place in ground.parked()] == [1, 3]
    assert sorted(place.offset for place in ground.effects()) == [0, 2, 4]


def test_discard_and_restore(outputs):
    """A person gives an event up and wants it back: no record is published for it (R6)."""
    ground = outputs(slice_size=10, argument={"bad": ["v0"]})
    ground.publish([("a", "v0"), ("a", "v1")])
    ground.run()
    operate(ground.database, "ground", "discard", events=[(0, 0)])
    ground.run()
    balanced(ground.database)
    operate(ground.database, "ground", "restore", events=[(0, 0)])
    ground.run()
    balanced(ground.database)
    assert ground.effects() == []
    assert [place.offset for place in ground.parked()] == [0, 1]


def test_a_record_that_cannot_be_sent_parks_its_event(outputs):
    """Too large, no such topic, no such partition: found before the transaction (F3)."""
    ground = outputs(argument={"drop": ["v2"]})
    ground.publish([("a", "v0"), ("b", "big"), ("b", "v1"), ("c", "v2")])
    ground.run()
    ground.run(pipeline={"argument": {"to": "no-such-topic"}})
    ground.publish([("d", "v3")])
    ground.run(pipeline={"argument": {"to": "no-such-topic"}})
    balanced(ground.database)
    assert [place.offset for place in ground.effects()] == [0]
    assert [place.offset for place in ground.parked()] == [1, 2, 4]
    told = ground.query("select message from sideline.events where why = 'failed' order by place")
    assert "too large" in told[0][0]
    assert "does not exist" in told[1][0]


@pytest.mark.parametrize("point", ["after-pending", "before-kafka-commit", "after-home-init"])
def test_frozen_and_overtaken(outputs, point):
    """An owner wakes when another has taken over: nothing of its slice appears (P2, K18, K20)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(30))
    zombie = ground.start(ground.lease(), crash_at=f"{point}:1:STOP", grace_seconds=2.5)
    zombie.frozen()
    ground.run(grace_seconds=2.5)
    ground.check()
    zombie.signal(signal.SIGCONT)
    assert zombie.end() == 0
    ground.publish(numbered(10, start=30))
    ground.run(grace_seconds=2.5)
    ground.check()
    assert ground.next_offsets() == ground.ends()


def test_a_zombie_fences_its_successor(outputs):
    """It was frozen between its look and its init: the owner makes a new producer (P2, K20)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(30))
    zombie = ground.start(ground.lease(), crash_at="before-home-init:1:STOP", grace_seconds=2.5)
    zombie.frozen()
    owner = ground.start(ground.lease(bounded=False, seconds=200.0), grace_seconds=2.5)
    wait_for(lambda: ground.next_offsets() == ground.ends(), what="its successor")
    zombie.signal(signal.SIGCONT)
    assert zombie.end() == 0
    ground.publish(numbered(10, start=30))
    # Without another lease: the one that was fenced goes on.
    wait_for(lambda: ground.next_offsets() == ground.ends(), what="the owner to go on")
    ground.check()
    owner.kill()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("after-pending", marks=pytest.mark.long),
        "before-kafka-commit",
        pytest.param("after-kafka-commit", marks=pytest.mark.long),
    ],
)
def test_frozen_with_a_key_aside_and_in_a_replay(outputs, tmp_path, point):
    """Overtaken by a second attempt, then by a second driver: all of it once (P2, K20, K21)."""
    mended = tmp_path / "mended"
    ground = outputs(slice_size=10, argument={"bad": ["v3"], "mended": str(mended)})
    # Its first transaction only says where it begins.
    ground.run()
    ground.publish(numbered(10, keys=5))
    lease = ground.lease()
    zombie = ground.start(lease, crash_at=f"{point}:1:STOP", grace_seconds=2.5)
    zombie.frozen()
    ground.run(lease, attempt=1, grace_seconds=2.5)
    ground.check()
    zombie.signal(signal.SIGCONT)
    assert zombie.end() == 0
    balanced(ground.database)
    assert [place.offset for place in ground.parked()] == [3, 8]
    mended.touch()
    operation = operate(ground.database, "ground")
    zombie = ground.start(ground.lease(), crash_at=f"{point}:1:STOP", grace_seconds=2.5)
    zombie.frozen()
    ground.begin()
    ground.run(grace_seconds=2.5)
    ground.check()
    zombie.signal(signal.SIGCONT)
    assert zombie.end() == 0
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    assert counts(ground.database, operation) == ("done", 2, 0, 0, 0)


def test_a_producer_is_used_again_by_the_last_owner_alone(outputs, monkeypatch):
    """Two leases of one process, one of another, and the first again: three producers (K20)."""
    ground = outputs(slice_size=10)
    begin, begun = Transactor.begin, []

    def counted(self):
        begun.append(self)
        begin(self)

    monkeypatch.setattr(Transactor, "begin", counted)
    access = Access(ground.database, {"bootstrap.servers": ground.kafka})
    one, other = (Worker(handlers.build(**ground.options), access) for _ in range(2))
    for number, (worker, producers) in enumerate([(one, 1), (one, 1), (other, 2), (one, 3)]):
        ground.publish(numbered(15, start=15 * number))
        report = worker.work(ground.lease(), 0)
        assert report.failure is None
        assert len(begun) == producers
    for worker in (one, other):
        worker.close()
    # A broker says that a transaction is over before its readers may see it.
    wait_for(lambda: not ground.faults(), what="records to be seen")
    ground.check()
    assert ground.next_offsets() == ground.ends()


SIDES = [
    pytest.param({"handler": "publish"}, marks=pytest.mark.long, id="threads"),
    pytest.param({"handler": "publish_async"}, id="async"),
]


@pytest.mark.parametrize("side", SIDES)
def test_the_ledger_is_lost_between_the_two_commits(outputs, side):
    """Side by side, too, what Kafka has is not handled on top of it: no record twice (P2, K19)."""
    argument = {"bad": ["v13"], "seconds": 0.03}
    ground = outputs(slice_size=10, concurrency=4, argument=argument, **side)
    ground.publish(numbered(60))
    # The first transaction only says where the partition begins.
    worker = ground.start(ground.lease(), crash_at="after-kafka-commit:2:STOP")
    worker.frozen()
    ground.query(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name like 'sideline worker%'"
    )
    worker.signal(signal.SIGCONT)
    worker.reports()
    ground.run()
    ground.check()
    balanced(ground.database)
    assert ground.next_offsets() == ground.ends()
    assert len(ground.effects()) == 57


@pytest.mark.parametrize("side", SIDES)
def test_side_by_side_a_partition_waits_in_place(outputs, tmp_path, side):
    """Block: nothing behind the failing event is published, through deaths neither (P2, K11)."""
    mended = tmp_path / "mended"
    argument = {"bad": ["v13"], "mended": str(mended)}
    ground = outputs(slice_size=10, block=True, concurrency=4, argument=argument, **side)
    ground.publish(numbered(40))
    ground.killed(ground.start(ground.lease(), crash_at="after-kafka-commit:2"))
    ground.run_until(
        lambda: ground.next_offsets() == {0: 13},
        what="all that comes before it",
        lease=lambda: ground.lease(seconds=2.5),
    )
    assert sorted(place.offset for place in ground.effects()) == list(range(13))
    mended.touch()
    ground.killed(ground.start(ground.lease(), crash_at="before-kafka-commit:2"))
    ground.run()
    ground.check()
    balanced(ground.database)
    assert ground.next_offsets() == ground.ends()


# The shape of Kafka's own test of transactions


class Watcher(threading.Thread):
    """Reads committed records while they appear, and looks at each."""

    def __init__(self, ground):
        super().__init__(daemon=True)
        self.found, self.wrong = [], []
        self._over = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": ground.kafka,
                "group.id": "watcher",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([TopicPartition(ground.out, n, 0) for n in range(2)])

    def run(self):
        seen, last = set(), {}
        while not self._over.is_set():
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            assert message.error() is None, message.error()
            place = tuple(message.value().decode().split(" "))
            order = last.setdefault(message.key(), -1)
            if place in seen or int(place[2]) <= order:
                self.wrong.append(place)
            seen.add(place)
            last[message.key()] = int(place[2])
            self.found.append(place)
        self._consumer.close()

    def end(self):
        self._over.set()
        self.join()


def _outlive(outputs, messages, kills):
    ground = outputs(partitions=4, slice_size=250)
    watcher = Watcher(ground)
    watcher.start()
    ground.publish(numbered(messages, keys=500))
    while ground.kills < kills:
        point = random.choice(["after-pending", *POINTS[5:9]])
        worker = ground.start(ground.lease(), crash_at=f"{point}:{random.randint(1, 3)}")
        ground.killed(worker)
    ground.run()
    wait_for(lambda: len(watcher.found) >= messages, what="all records", within_seconds=60)
    watcher.end()
    assert watcher.wrong == []
    assert len(watcher.found) == messages
    ground.check()
    assert ground.next_offsets() == ground.ends()


def test_outputs_are_inputs_through_ten_deaths(outputs):
    """Set by set the same, no duplicate, order per key, also while it runs (P2, C2, K18 to K20)."""
    _outlive(outputs, messages=10_000, kills=10)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_outputs_are_inputs_through_a_hundred_deaths(outputs):
    """The same with a hundred thousand messages."""
    _outlive(outputs, messages=100_000, kills=100)
