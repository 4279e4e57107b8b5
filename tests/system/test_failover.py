"""Three brokers, one of them killed again and again: that costs time, and nothing else."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from sideline import Event, Kafka, Pipeline, Publish, Publisher
from sideline.deliveries import Handle
from sideline.stack import Stack
from tests.support.pipelines import APPLIED as TABLE
from tests.support.pipelines import (
    Applied,
    applied,
    counted,
    execute,
    faults,
    query,
    recorder,
    settings,
)
from tests.support.records import records
from tests.support.waiting import patiently, wait_for

BROKERS = 3
PARTITIONS = 3
KEYS = 20
# A broker is missed after its session (6 s), and a busy machine takes its time.
PATIENCE_SECONDS = 120


class Cluster:
    """Three brokers of a test's own, with topics that outlive the loss of one."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.bootstrap = stack.up(brokers=BROKERS, services=("kafka",)).bootstrap
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def topic(self, name: str) -> str:
        # A test that failed may have left one dead.
        self.heal()
        made = NewTopic(name, PARTITIONS, BROKERS, config={"min.insync.replicas": "2"})
        self.admin.create_topics([made])[name].result()
        wait_for(
            lambda: self._known(name),
            what=f"word of {name} at every broker",
            within_seconds=PATIENCE_SECONDS,
        )
        self.heal()
        return name

    def _known(self, name: str) -> bool:
        """Whether each broker knows a topic: the controller tells them in its own time."""
        return all(
            name in patiently(lambda: client.list_topics(timeout=30)).topics  # noqa: B023
            for client in self._each()
        )

    def _each(self) -> list[AdminClient]:
        """A client for every broker, which asks that one first."""
        return [
            AdminClient({"bootstrap.servers": one, "log_level": 0})
            for one in self.bootstrap.split(",")
        ]

    def kill_leader(self, topic: str, partition: int) -> int:
        """SIGKILL for whoever leads the partition; returns when somebody else does."""
        leader = self._leader(topic, partition)
        os.kill(self._stack.status().pids[f"kafka-{leader}"], signal.SIGKILL)
        wait_for(
            lambda: self._leader(topic, partition) not in {leader, -1},
            what=f"another leader than {leader}",
            within_seconds=PATIENCE_SECONDS,
        )
        return leader

    def heal(self) -> None:
        """Bring back who was killed, and wait until every replica is in sync again."""
        self._stack.up(brokers=BROKERS, services=("kafka",))
        wait_for(self._in_sync, what="all replicas in sync", within_seconds=PATIENCE_SECONDS)

    def _leader(self, topic: str, partition: int) -> int:
        known = patiently(lambda: self.admin.list_topics(topic, timeout=30)).topics[topic]
        return known.partitions[partition].leader

    def _in_sync(self) -> bool:
        known = patiently(lambda: self.admin.list_topics(timeout=30)).topics.values()
        return all(
            len(part.isrs) == BROKERS for topic in known for part in topic.partitions.values()
        )


class Stream:
    """Publishes in a thread of its own until it is told to end."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.handles: list[Handle] = []
        self._publisher = Publisher(kafka=bootstrap)
        self._bootstrap = bootstrap
        self.topic = topic
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for number in itertools.count():
                if self._end.wait(0.02 if not number % 10 else 0):
                    break
                key = f"k{number % KEYS}"
                self.handles.append(self._publisher.publish(self.topic, f"v{number}", key=key))
            self._publisher.close()
        except BaseException as error:  # noqa: BLE001 - raised to whoever ends it
            self._error = error

    def abandon(self) -> None:
        """End it, whatever became of its records."""
        self._end.set()
        self._thread.join()

    def end(self) -> list[tuple[str, int, int]]:
        """Where every record stands; raises what was not delivered."""
        self.abandon()
        if self._error is not None:
            raise self._error
        # Read, not told: a broker that has a record already does not say where.
        found: dict[str, list[tuple[str, int, int]]] = {}
        for one in records(self._bootstrap, self.topic, PARTITIONS):
            place = (self.topic, one.partition(), one.offset())
            found.setdefault(one.value().decode(), []).append(place)
        assert {value: places for value, places in found.items() if len(places) > 1} == {}
        assert found.keys() == {f"v{number}" for number in range(len(self.handles))}
        return [places[0] for places in found.values()]


class Flow:
    """A pipeline on the topic, with one effect for every event."""

    def __init__(self, database: str, cluster: Cluster, pipeline: Pipeline) -> None:
        self.database, self.cluster, self.pipeline = database, cluster, pipeline

    def count(self) -> int:
        """How many events it has consumed, by its own books."""
        known = query(self.database, "select to_regclass('sideline.progress') is not null")
        return counted(self.database, self.pipeline.name) if known[0][0] else 0


class Rows(Flow):
    """The PostgreSQL home: a row for every event."""

    def __init__(self, database: str, cluster: Cluster, topic: str) -> None:
        super().__init__(database, cluster, recorder(f"failover-{topic}", topic))

    def seen(self) -> list[Applied]:
        return applied(self.database)


class Outputs(Flow):
    """The Kafka home: a record for every event, in a topic that is read committed."""

    def __init__(self, database: str, cluster: Cluster, topic: str) -> None:
        out = self.out = cluster.topic(f"{topic}-out")
        super().__init__(
            database, cluster, Pipeline(f"failover-{topic}", topics=topic, sink=Kafka())
        )

        @self.pipeline.handler
        def copy(event: Event) -> Publish:
            place = f"{event.topic} {event.partition} {event.offset}"
            return Publish(out, f"{place} {event.text()}", key=event.key)

    def seen(self) -> list[Applied]:
        found = []
        for one in records(self.cluster.bootstrap, self.out, PARTITIONS):
            topic, partition, offset, value = one.value().decode().split(" ")
            found.append(Applied(topic, int(partition), int(offset), one.key().decode(), value))
        return found


def arrived(flow: Any, running: Any, everything: int) -> bool:
    """Whether every event has had its effect."""
    assert running.is_alive or running.wait(0)
    return len(flow.seen()) >= everything


def lose_a_leader(cluster: Cluster, flow: Flow, running: Any, stream: Stream, number: int) -> None:
    """Kill it; what is published while it is away gets through; bring it back."""
    cluster.kill_leader(stream.topic, number)
    mark = len(stream.handles) + 200

    def through() -> bool:
        assert running.is_alive or running.wait(0)
        return flow.count() > mark

    wait_for(through, what=f"{mark} events", within_seconds=PATIENCE_SECONDS)
    cluster.heal()


@pytest.fixture(scope="module")
def cluster(run) -> Iterator[Cluster]:
    """One for all tests of this module: each leaves it whole."""
    stack = Stack(run.directory("three"))
    yield Cluster(stack)
    stack.down()
    shutil.rmtree(stack.directory)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("home", "kills"),
    [
        pytest.param(Rows, 1, id="postgres-once"),
        pytest.param(Outputs, 1, id="kafka-once"),
        pytest.param(Rows, 5, id="postgres-five-times", marks=pytest.mark.long),
        pytest.param(Outputs, 5, id="kafka-five-times", marks=pytest.mark.long),
    ],
)
def test_a_leader_that_is_killed_costs_time_and_nothing_else(
    cluster, database, spark, home: type[Any], kills: int
):
    """Nothing lost, nothing twice, no hand needed: publisher, pipeline, sink (P4, P1, C1)."""
    execute(database, TABLE)
    topic = cluster.topic(f"users-{uuid4().hex[:8]}")
    flow = home(database, cluster, topic)
    running = flow.pipeline.start(spark, settings=settings(cluster.bootstrap, database))
    stream = Stream(cluster.bootstrap, topic)
    try:
        wait_for(lambda: flow.count() > 100, what="a stream that flows", within_seconds=120)
        for kill in range(kills):
            lose_a_leader(cluster, flow, running, stream, kill % PARTITIONS)
        places = stream.end()
        seen = partial(arrived, flow, running, len(places))
        wait_for(seen, what=f"{len(places)} events", within_seconds=PATIENCE_SECONDS)
    finally:
        stream.abandon()
        running.stop()
        assert running.wait(60)
    assert faults(flow.seen(), places) == []
    inputs = records(cluster.bootstrap, topic, PARTITIONS)
    assert Counter(one.value().decode() for one in inputs) == Counter(
        f"v{number}" for number in range(len(places))
    )
    last: dict[bytes, int] = {}
    for one in inputs:
        number = int(one.value()[1:])
        assert number > last.get(one.key(), -1), "two records of a key changed places"
        last[one.key()] = number
    assert {TopicPartition(*place) for place in places} == {
        TopicPartition(one.topic(), one.partition(), one.offset()) for one in inputs
    }
