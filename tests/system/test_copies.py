"""Drivers of pipelines whose failures leave as copies: retry topics, outboxes, status, alerts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from sideline import DeadLetter, Event, Insert, Pipeline, Recoverable, RetryTopics, accounting
from sideline.engine.room import Room
from sideline.engine.worker import Access, Worker
from sideline.errors import NotFoundError, RefusedError
from sideline.status import gather
from sideline.topics.admin import Cluster
from tests.support.outputs import read_committed
from tests.support.pipelines import execute, publish, query
from tests.support.waiting import wait_for

DELAYS = ("300ms", "500ms")


class Flow:
    """A pipeline with topics of its own, and a driver whose rounds are worked in this process."""

    def __init__(
        self,
        admin: AdminClient,
        create_topic: Callable[[NewTopic], None],
        kafka: str,
        database: str,
        desk: Any,
        topic: str,
    ) -> None:
        self.kafka, self.database, self.topic = kafka, database, topic
        self._admin, self._create_topic, self._desk = admin, create_topic, desk
        self._workers: list[Worker] = []
        self.made: list[str] = []
        self.healed = threading.Event()

    def pipeline(self, policy: DeadLetter | RetryTopics) -> Pipeline:
        pipeline = Pipeline("mails", topics=self.topic, on_failure=policy)

        @pipeline.handler
        def send(event: Event) -> Insert:
            if event.value == b"never":
                raise ValueError("never")
            if event.value == b"heals" and not self.healed.is_set():
                raise Recoverable("away")
            return Insert("applied", {"topic": event.topic, "number": event.offset})

        for own in pipeline.own_topics:
            if own.name not in self.made:
                config = {"message.timestamp.type": "LogAppendTime"} if own.n else {}
                self._create_topic(NewTopic(own.name, 2, 1, config=config))
                self.made.append(own.name)
        return pipeline

    def start(self, pipeline: Pipeline, **options: Any) -> Any:
        worker = Worker(pipeline, Access(self.database, {"bootstrap.servers": self.kafka}))
        self._workers.append(worker)
        return self._desk(pipeline, worker.work, room=lambda: Room(1, hand_over=False), **options)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return query(self.database, statement)

    def stamp(self, topic: str, kind: str) -> None:
        """Say whose times a topic has, and wait until the broker knows."""
        cluster = Cluster({"bootstrap.servers": self.kafka})
        cluster.alter(topic, {"message.timestamp.type": kind}, None)

        def known() -> bool:
            found = cluster.describe(topic)
            return found is not None and found.settings["message.timestamp.type"] == kind

        wait_for(known, what=f"{kind} in {topic}")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        for future in self._admin.delete_topics(self.made, operation_timeout=30).values():
            future.result()


@pytest.fixture
def flow(_admin, create_topic, kafka, database, ready, desk, topics) -> Iterator[Flow]:
    made = Flow(_admin, create_topic, kafka, database, desk, topics(partitions=2))
    yield made
    # Drivers first: their workers are still at work.
    made.healed.set()
    for one in getattr(desk, "made", []):
        one.stop()
    made.close()


def test_retried_events_come_back_by_themselves(flow, ready):
    """Through a chain while the world is broken, with status, then applied or dead (F8, S4)."""
    events = [("a", "fine"), ("b", "heals"), ("c", "never"), ("d", "heals")]
    publish(flow.kafka, flow.topic, events)
    policy = RetryTopics(delays=("300ms", "60s"))
    one = flow.start(flow.pipeline(policy))
    last = f"{flow.topic}.mails.retry.2"
    wait_for(
        lambda: flow.query(f"select 1 from sideline.events where copy_topic = '{last}' offset 1"),
        what="both in the second retry topic",
        within_seconds=60,
    )
    # The other partition may be slower.
    wait_for(lambda: gather(ready, "mails")[0]["consumed"] == 4, what="all to be read")
    (found,) = gather(ready, "mails")
    (waiting,) = found["retry_topics"]
    assert (waiting["topic"], waiting["events"]) == (last, 2)
    assert (found["retrying"], found["dead"]) == (2, 1)
    assert one.stop() is None
    # Another list of delays, the old topic is read to its end; its delay is as it was.
    flow.healed.set()
    execute(flow.database, "update sideline.retry_topics set delay_ms = 100")
    two = flow.start(flow.pipeline(RetryTopics(delays=DELAYS[:1])))
    wait_for(lambda: len(flow.query("select 1 from applied")) == 3, what="all", within_seconds=60)
    wait_for(lambda: ("dead", "") in two.open(), what="the alert")
    assert two.stop() is None
    (books,) = accounting.check(flow.database, "mails")
    assert not books.differences
    assert flow.query("select sum(applied), sum(dead), sum(retrying) from sideline.progress") == [
        (3, 1, 0)
    ]


def test_once_ends_when_everything_is_sent(flow):
    """A record that Kafka refuses keeps it, with an alert; nothing is left afterwards (K23)."""
    publish(flow.kafka, flow.topic, [("a", "never"), ("b", "never"), ("c", "fine")])
    pipeline = flow.pipeline(DeadLetter(attempts=1))
    flow.start(pipeline, once=True).end()
    assert flow.query("select count(*) from sideline.outbox") == [(0,)]
    assert flow.query("select sum(dead), sum(applied) from sideline.progress") == [(2, 1)]
    # As if a topic had gone between COMMIT and sending.
    execute(
        flow.database,
        "insert into sideline.outbox (pipeline, topic, partition, number, to_topic)"
        " select pipeline, topic, partition, outbox_last + 1, 'no topic'"
        " from sideline.progress where partition = 0",
        "update sideline.progress set outbox_last = outbox_last + 1 where partition = 0",
    )
    again = flow.start(pipeline, once=True)
    wait_for(lambda: ("outbox", f"{flow.topic}/0") in again.open(), what="the alert")
    assert again.error is None
    execute(flow.database, f"update sideline.outbox set to_topic = '{flow.made[0]}'")
    assert again.end() is None
    assert flow.query("select count(*) from sideline.outbox") == [(0,)]


@pytest.mark.parametrize(
    ("dialect", "theirs"),
    [
        (
            "spring",
            {
                "kafka_dlt-original-partition": bytes(4),
                "kafka_dlt-original-offset": bytes(8),
                "kafka_dlt-exception-fqcn": b"ValueError",
            },
        ),
        (
            "connect",
            {
                "__connect.errors.partition": b"0",
                "__connect.errors.offset": b"0",
                "__connect.errors.exception.class.name": b"ValueError",
            },
        ),
    ],
)
def test_dead_letters_speak_the_dialect_that_was_declared(flow, dialect, theirs):
    """Spring's and Connect's tools find their own headers behind ours (F7)."""
    publish(flow.kafka, flow.topic, [(None, "never")], partition=0)
    pipeline = flow.pipeline(DeadLetter(attempts=1, dialect=dialect))
    assert flow.start(pipeline, once=True).end() is None
    (letter,) = [
        record
        for partition in range(2)
        for record in read_committed(flow.kafka, flow.made[0], partition)
    ]
    headers = dict(letter.headers())
    assert headers["sideline-origin-topic"] == flow.topic.encode()
    assert {name: headers.get(name) for name in theirs} == theirs
    topic = {"spring": "kafka_dlt-original-topic", "connect": "__connect.errors.topic"}[dialect]
    assert headers[topic] == flow.topic.encode()


def test_a_paused_pipeline_sends_what_it_committed(flow):
    """The driver leases its partitions for their outbox alone (K23)."""
    publish(flow.kafka, flow.topic, [("a", "fine")])
    one = flow.start(flow.pipeline(DeadLetter(attempts=1)))
    wait_for(lambda: flow.query("select 1 from applied"), what="the first event")
    execute(flow.database, "update sideline.pipelines set paused = true")
    wait_for(lambda: "paused" in one.driver.troubles, what="the pause")
    # The worker hears of it by itself, and not in the same moment.
    held = "select 1 from sideline.progress where not released"
    wait_for(lambda: not flow.query(held), what="the end of the lease")
    execute(
        flow.database,
        "with one as (update sideline.progress set outbox_last = outbox_last + 1"
        " where partition = 1 returning *)"
        " insert into sideline.outbox (pipeline, topic, partition, number, to_topic, value)"
        f" select pipeline, topic, partition, outbox_last, '{flow.made[0]}', 'x' from one",
    )
    publish(flow.kafka, flow.topic, [("b", "fine")])
    wait_for(lambda: not flow.query("select 1 from sideline.outbox"), what="the record to leave")
    assert len(flow.query("select 1 from applied")) == 1
    assert one.stop() is None


def test_a_partition_that_backs_off_sends_what_it_committed(flow):
    """Its next event waits for the world; what was committed before does not (K23, K4)."""
    publish(flow.kafka, flow.topic, [("a", "fine")], partition=0)
    pipeline = flow.pipeline(DeadLetter(attempts=1))
    assert flow.start(pipeline, once=True).end() is None
    publish(flow.kafka, flow.topic, [("a", "fine")], partition=0)
    execute(
        flow.database,
        "update sideline.progress set due_at = now() + interval '1 hour', attempts = 3,"
        " trouble = 'away', outbox_last = outbox_last + 1 where partition = 0",
        "insert into sideline.outbox (pipeline, topic, partition, number, to_topic, value)"
        f" select pipeline, topic, partition, outbox_last, '{flow.made[0]}', 'x'"
        " from sideline.progress where partition = 0",
    )
    one = flow.start(pipeline)
    wait_for(lambda: not flow.query("select 1 from sideline.outbox"), what="the record to leave")
    assert one.stop() is None
    assert len(flow.query("select 1 from applied")) == 1
    assert flow.query("select attempts from sideline.progress where partition = 0") == [(3,)]


def test_times_of_producers_in_a_retry_topic_are_refused(flow):
    """A copy could come too early: said before anything is read, with what mends it (F8, P3)."""
    pipeline = flow.pipeline(RetryTopics(delays=DELAYS))
    (retry, *_) = [own.name for own in pipeline.own_topics if own.n]
    flow.stamp(retry, "CreateTime")
    publish(flow.kafka, flow.topic, [("a", "fine")])
    error = flow.start(pipeline).end()
    assert isinstance(error, RefusedError)
    assert retry in str(error)
    assert "topics create --alter" in (error.hint or "")
    flow.stamp(retry, "LogAppendTime")
    assert flow.start(pipeline, once=True).end() is None
    assert len(flow.query("select 1 from applied")) == 1


def test_a_missing_topic_is_said_at_the_start(desk, kafka, database, topics):
    """What a policy needs is there before anything is read (F7)."""
    pipeline = Pipeline("mails", topics=topics(partitions=1), on_failure=DeadLetter())
    stopped: Callable[..., Any] = desk(pipeline)
    error = stopped.end()
    assert isinstance(error, NotFoundError)
    assert ".mails.dlq" in str(error)
