"""`foreach_batch`: a Structured Streaming query whose batches are a pipeline's events."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.errors import IllegalArgumentException, StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from sideline import Block, Event, Insert, MessageId, Pipeline, Recoverable, RetryTopics
from sideline.engine.lease import Partition
from sideline.errors import (
    AlreadyRunningError,
    DatabaseUnreachableError,
    KafkaUnreachableError,
)
from sideline.ledger.place import Place
from sideline.topics.admin import Cluster
from tests.support.pipelines import (
    applied,
    counted,
    execute,
    faults,
    numbered,
    progress,
    publish,
    query,
)
from tests.support.raw_producer import RawProducer
from tests.support.waiting import wait_for

# Several queries, each with its batches: minutes on a machine that is busy with something else.
pytestmark = pytest.mark.timeout(900)
PATIENCE_SECONDS = 180
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Streams:
    """Queries of one test; they end with it."""

    def __init__(self, spark, kafka: str, database: str, folder: Path) -> None:
        self.spark = spark
        self.database = database
        self.kafka = kafka
        self.folder = folder
        self.queries = []
        self.checkpoint = "one"

    def start(
        self, pipeline, topics, *, change=lambda frame: frame, once=True, writer=None, **options
    ):
        given = {"startingOffsets": "earliest", "subscribe": topics} | options
        frame = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.kafka)
            .options(**given)
            .load()
        )
        written = change(frame).writeStream.foreachBatch(pipeline.foreach_batch)
        written = written.option("checkpointLocation", str(self.folder / self.checkpoint))
        written = written.trigger(availableNow=True) if once else written
        self.queries.append(written.options(**writer or {}).start())
        return self.queries[-1]

    def run(self, pipeline, topics, **options) -> None:
        """All there is now."""
        one = self.start(pipeline, topics, **options)
        assert one.awaitTermination(PATIENCE_SECONDS), one.lastProgress
        self.wait_for_place()

    def wait_for_place(self) -> None:
        """It is free when the driver has noticed the query's end."""
        wait_for(lambda: not _held(self.database), what="a free place", within_seconds=60)

    def refused(self, pipeline, topics, **options) -> str:
        """What ended the query: the sentence and the next step."""
        one = self.start(pipeline, topics, **options)
        with pytest.raises(StreamingQueryException) as caught:
            one.awaitTermination(PATIENCE_SECONDS)
        return str(caught.value)


@pytest.fixture
def streams(spark, ready, kafka, database, tmp_path, monkeypatch):
    """Queries with the test's services in their settings."""
    monkeypatch.setenv("SIDELINE_KAFKA", kafka)
    monkeypatch.setenv("SIDELINE_DATABASE", database)
    made = Streams(spark, kafka, database, tmp_path)
    yield made
    for one in made.queries:
        one.stop()
    made.wait_for_place()


def _held(database: str) -> bool:
    locks = "select 1 from pg_locks where locktype = 'advisory' and database = "
    return bool(
        query(database, f"{locks} (select oid from pg_database where datname = current_database())")
    )


def recorder(name, topics, *, fails=None, **options) -> Pipeline:
    """Writes a row for every event, except for one whose value is not wanted."""
    flow = Pipeline(name, topics=topics, **options)

    @flow.handler
    def record(event: Event) -> Insert:
        if fails is not None and event.text() == fails:
            raise ValueError(fails)
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        key = event.key and event.key.decode()
        return Insert("applied", row | {"key": key, "value": event.text()})

    return flow


def test_batches_and_runs_are_one_progress(streams, finish, topics, kafka, database, read):
    """Both doors, a new checkpoint and repeated batches: each event once, in order (C1, C3, C5)."""
    users, orders = topics(partitions=3), topics(partitions=1)
    places = publish(kafka, users, numbered(3_000)) + publish(kafka, orders, numbered(500))
    flow = recorder("both", [users, orders])
    both = f"{users},{orders}"
    # Two batches, and at most a part of each partition in the first.
    streams.run(flow, both, maxOffsetsPerTrigger=2_000)
    assert not faults(applied(database), places)
    assert counted(database, "both") == 3_500
    # Then as a run of its own; then the query again, whose checkpoint knows nothing of that.
    places += publish(kafka, users, numbered(1_000, start=3_000))
    assert finish(flow)["applied"] == 4_500
    places += publish(kafka, orders, numbered(100, start=500))
    streams.run(flow, both)
    assert not faults(applied(database), places)
    # A new checkpoint reads everything once more, and brings something new along.
    streams.checkpoint = "two"
    places += publish(kafka, users, numbered(10, start=4_000))
    streams.run(flow, both)
    assert not faults(applied(database), places)
    assert counted(database, "both") == len(places)
    # The group shows it to lag tools, and the state is that of an orderly end.
    status = read("status", "both")
    assert status["state"] == "stopped"
    assert status["lag"] == 0


def test_what_the_query_made_of_an_event_is_its_row(streams, topics, kafka, database):
    """Further columns, headers and what was filtered; progress passes what was left out (C3)."""
    topic = topics(partitions=2)
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(20):
        value = json.dumps({"name": f"Zoë {number}", "wanted": number % 2 == 0}).encode()
        producer.produce(topic, key=b"k", value=value, headers=[("n", b"%d" % number)])
    producer.flush()
    flow = Pipeline("rows", topics=topic)

    @flow.handler
    def record(event: Event) -> Insert:
        assert event.row is not None
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        names = {"key": event.header("n").decode(), "value": event.row["person"]["name"]}
        assert event.timestamp is not None
        assert event.row["select 1st"] == event.timestamp_ms
        return Insert("applied", row | names)

    def parse(frame):
        person = F.from_json(F.col("value").cast("string"), "name string, wanted boolean")
        odd = F.unix_millis("timestamp")
        parsed = frame.withColumn("person", person).withColumn("select 1st", odd)
        return parsed.where("person.wanted")

    streams.run(flow, topic, change=parse, includeHeaders="true")
    found = applied(database)
    assert [(effect.key, effect.value) for effect in found] == [
        (str(number), f"Zoë {number}") for number in range(0, 20, 2)
    ]
    assert counted(database, "rows") == 10
    assert sum(progress(database, "rows").values()) == 20


def test_tasks_that_read_several_partitions_keep_them_apart(streams, topics, kafka, database):
    """Where a query has fewer tasks than partitions, each event is still in its own (C1, C3)."""
    users, orders = topics(partitions=3), topics(partitions=1)
    places = publish(kafka, users, numbered(300)) + publish(kafka, orders, numbered(50))
    flow = recorder("few", [users, orders])
    streams.run(flow, f"{users},{orders}", change=lambda df: df.coalesce(2))
    assert not faults(applied(database), places)
    assert counted(database, "few") == len(places)
    assert sum(progress(database, "few").values()) == len(places)


def test_header_names_that_are_no_text_come_back_as_they_came(
    streams, topics, kafka, database, cli
):
    """What the JVM makes of them can be parked, and is the same in a release (F13, F14)."""
    topic = topics(partitions=1)
    names = [(b"a\0b", b"1"), (b"\xffc", b"2"), (b"fine", None)]
    producer = RawProducer(kafka)
    for key in (b"zoey", b"bob"):
        producer.produce(topic, key, b"value", names)
    producer.close()

    def flow(broken):
        made = Pipeline("names", topics=topic)

        @made.handler
        def record(event: Event) -> Insert:
            if event.key == b"zoey" and broken:
                raise ValueError("not yet")
            seen = " ".join(name for name, _ in event.headers)
            return Insert("applied", {"key": event.key.decode(), "value": seen})

        return made

    streams.run(flow(broken=True), topic, includeHeaders="true")
    kept = query(database, "select header_names, header_values from sideline.events")
    assert kept == [(["a\ufffdb", "\ufffdc", "fine"], [b"1", b"2", None])]
    assert cli("release", "names", "--all", "--execute")[0] == 0
    # A query without a new event has no batch, and nobody who would bring anything back.
    publish(kafka, topic, [("ann", "value")])
    streams.run(flow(broken=False), topic, includeHeaders="true")
    seen = {(effect.key, effect.value) for effect in applied(database)}
    assert seen - {("ann", "")} == {(key, "a\ufffdb \ufffdc fine") for key in ("zoey", "bob")}


def test_a_message_sent_twice_is_applied_once_by_a_query(streams, topics, kafka, database, read):
    """In one batch, in a later one, in another partition, and though batches come again (C4)."""
    topic = topics(partitions=2)
    producer = Producer({"bootstrap.servers": kafka, "log_level": 0})

    def send(*messages, partition=0):
        for name in messages:
            given = {"key": name, "value": name, "headers": [("message-id", name.encode())]}
            producer.produce(topic, partition=partition, **given)
        assert producer.flush(60) == 0

    flow = recorder("messages", topic, dedupe=MessageId())
    send("a", "b", "a")
    streams.run(flow, topic, includeHeaders="true")
    send("b", "c", partition=1)
    streams.run(flow, topic, includeHeaders="true")
    # Everything once more: what was applied is not taken for its own duplicate.
    streams.checkpoint = "two"
    send("c", "d")
    streams.run(flow, topic, includeHeaders="true")
    assert sorted(effect.value for effect in applied(database)) == ["a", "b", "c", "d"]
    status = read("status", "messages")
    assert (status["applied"], status["duplicate"], status["consumed"]) == (4, 3, 7)


def test_a_gap_is_asked_about(streams, topics, kafka, database, cli):
    """A checkpoint at latest never loses events in silence; what was aborted is nothing (K2).

    Whoever is paused is asked about too: nobody asks again when it goes on.
    """
    topic = topics(partitions=1)
    flow = recorder("gap", topic)
    places = publish(kafka, topic, numbered(10))
    streams.run(flow, topic)
    aborted = Producer({"bootstrap.servers": kafka, "transactional.id": f"{topic}-gap"})
    aborted.init_transactions()
    aborted.begin_transaction()
    aborted.produce(topic, key=b"k", value=b"never")
    aborted.flush()
    aborted.abort_transaction()
    cluster, spot = Cluster({"bootstrap.servers": kafka}), Partition(topic, 0)
    # The broker says so before it writes it down.
    wait_for(lambda: cluster.ends([spot]) == {spot: 12}, what="the end of the transaction")
    after = json.dumps({topic: {"0": 12}})
    places += publish(kafka, topic, numbered(5, start=10))
    streams.checkpoint = "behind the aborted one"
    streams.run(flow, topic, startingOffsets=after)
    assert not faults(applied(database), places)
    places += publish(kafka, topic, numbered(5, start=15))
    late = json.dumps({topic: {"0": 20}})
    streams.checkpoint = "behind others"
    said = streams.refused(flow, topic, startingOffsets=late)
    assert f"has not had event {topic}/0/17 yet: its events would be lost" in said
    assert f'startingOffsets={{"{topic}": {{"0": 17}}}}' in said
    assert cli("pause", "gap")[0] == 0
    streams.checkpoint = "behind others, paused"
    said = streams.refused(flow, topic, startingOffsets=late)
    assert f"has not had event {topic}/0/17 yet: its events would be lost" in said
    assert cli("resume", "gap")[0] == 0
    assert len(applied(database)) == 15
    streams.checkpoint = "as it was told"
    streams.run(flow, topic, startingOffsets=json.dumps({topic: {"0": 17}}))
    assert not faults(applied(database), places)


def test_queries_that_lose_the_order_are_refused(streams, topics, kafka, database):
    """Each with its reason, before anything is written (C1)."""
    topic = topics(partitions=2)
    publish(kafka, topic, numbered(40))
    flow = recorder("refused", topic)
    static = streams.spark.createDataFrame([("k1", 1), ("k1", 2)], "name string, number int")
    cases = {
        "minPartitions": ({"minPartitions": "4"}, None, "divides a partition of Kafka"),
        "shuffle": ({}, lambda df: df.repartition(3), "shuffles events before the sink"),
        "explode": (
            {},
            lambda df: df.withColumn("each", F.explode(F.array(F.lit(1), F.lit(2)))),
            "several rows of an event",
        ),
        "same": ({}, lambda df: df.union(df), "several tasks of the query read"),
        "several": (
            {},
            lambda df: df.join(
                F.broadcast(static), F.col("key").cast("string") == static.name, "left"
            ),
            "several rows for event",
        ),
        "value": (
            {},
            lambda df: df.withColumn("value", F.concat("value", "key")),
            "column value is made by the query",
        ),
        "offset": (
            {},
            lambda df: df.union(df.withColumn("offset", F.col("offset") + 1)),
            "column offset is made by the query",
        ),
    }
    for name, (options, change, reason) in cases.items():
        streams.checkpoint = name
        said = streams.refused(flow, topic, change=change or (lambda frame: frame), **options)
        assert reason in said, name
        assert applied(database) == [], name
    # In the query itself Spark takes no sorting; in a function before the sink it does.
    sorting = SimpleNamespace(
        foreach_batch=lambda df, number: flow.foreach_batch(df.sortWithinPartitions("key"), number)
    )
    streams.checkpoint = "sort in the batch"
    assert "the query sorts its rows" in streams.refused(sorting, topic)
    assert applied(database) == []
    # Spark says so itself, as far as it goes today.
    with pytest.raises(IllegalArgumentException, match="async progress tracking"):
        streams.start(flow, topic, once=False, writer={"asyncProgressTrackingEnabled": "true"})
    assert applied(database) == []
    outside = streams.spark.createDataFrame([(1,)], "one int")
    with pytest.raises(Exception, match="outside of a streaming query"):
        flow.foreach_batch(outside, 0)


def test_a_query_and_a_run_are_not_both(streams, start, topics, kafka, database):
    """The place belongs to one of them, and is free when the query has ended (C1)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    flow = recorder("place", topic)
    live = streams.start(flow, topic, once=False)
    wait_for(
        lambda: len(applied(database)) == 10,
        what="the first batch",
        within_seconds=PATIENCE_SECONDS,
    )
    with pytest.raises(AlreadyRunningError):
        start(recorder("place", topic)).wait(PATIENCE_SECONDS)
    streams.checkpoint = "beside it"
    assert "is fed by another query already" in streams.refused(flow, topic)
    live.stop()
    streams.wait_for_place()
    running = start(recorder("place", topic))
    publish(kafka, topic, numbered(1, start=10))
    wait_for(lambda: len(applied(database)) == 11, what="the run", within_seconds=PATIENCE_SECONDS)
    streams.checkpoint = "while it runs"
    assert "is run already by" in streams.refused(flow, topic)
    running.stop()
    assert running.wait(PATIENCE_SECONDS)


def test_released_keys_come_back_by_a_query(streams, topics, kafka, database, cli):
    """What was parked waits; released, it comes before what follows of its key (F4, R2)."""
    topic = topics(partitions=2)
    places = publish(kafka, topic, numbered(100, keys=5))
    streams.run(recorder("back", topic, fails="v7"), topic)
    waiting = [f"v{number}" for number in range(7, 100, 5)]
    assert {effect.value for effect in applied(database)}.isdisjoint(waiting)
    code, _, said = cli("release", "back", "--all", "--execute")
    assert code == 0, said
    places += publish(kafka, topic, [("k2", "last")])
    streams.run(recorder("back", topic), topic)
    found = applied(database)
    assert [effect.value for effect in found if effect.key == "k2"] == [
        *(f"v{number}" for number in range(2, 7, 5)),
        *waiting,
        "last",
    ]
    assert sorted((e.topic, e.partition, e.offset) for e in found) == sorted(places)


def test_a_batch_waits_in_place_and_ends_with_its_query(streams, topics, kafka, database):
    """Block and backoff hold the batch, in sight; stop is heard; nothing is lost (F2, F6)."""
    topic = topics(partitions=2)
    places = publish(kafka, topic, numbered(50))
    flow = recorder("waits", topic, fails="v20", on_failure=Block())
    blocked = streams.start(flow, topic)
    look = "select trouble from sideline.progress where pipeline = 'waits' and trouble is not null"
    found = wait_for(
        lambda: progress(database, "waits") and query(database, look),
        what="the trouble",
        within_seconds=PATIENCE_SECONDS,
    )
    assert "ValueError: v20" in found[0][0]
    assert blocked.isActive
    blocked.stop()
    streams.wait_for_place()
    streams.run(recorder("waits", topic), topic)
    assert not faults(applied(database), places)


def test_an_event_that_ends_its_worker_is_found(streams, topics, kafka, database):
    """Three deaths with the same row in hand, and it is parked; the batch goes on (F3)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(60))
    flow = Pipeline("deadly", topics=topic)

    @flow.handler
    def record(event: Event) -> Insert:
        import os

        if event.text() == "v30":
            os._exit(3)
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode(), "value": event.text()})

    streams.run(flow, topic)
    parked = query(database, "select error from sideline.events where state = 'parked'")
    assert [error for (error,) in parked] == ["sideline.errors.WorkerCrashed"]
    assert {effect.value for effect in applied(database)} == {
        f"v{number}" for number in range(60) if number != 30
    }


def test_a_recoverable_outage_parks_nobody(streams, topics, kafka, database, monkeypatch):
    """What heals is waited for inside the batch, whoever meets it: a handler, the driver (F2).

    An open transaction is no reason to take the broker for another one.
    """
    topic = topics(partitions=1)
    places = publish(kafka, topic, numbered(5))
    # It stays open for as long as a query may take.
    patient = {"transactional.id": f"{topic}-open", "transaction.timeout.ms": 800_000}
    is_open = Producer({"bootstrap.servers": kafka, **patient})
    is_open.init_transactions()
    is_open.begin_transaction()
    is_open.produce(topic, key=b"k5", value=b"v5")
    is_open.flush()
    places.append((topic, 0, 5))
    away = {"kafka": 3, "database": 3}
    ends, run = Cluster.ends_written, Place.run

    def ask_kafka(cluster, partitions):
        away["kafka"] -= 1
        if away["kafka"] >= 0:
            raise KafkaUnreachableError("Kafka does not answer.")
        return ends(cluster, partitions)

    def ask_database(place, name, **given):
        away["database"] -= name == "pass_holes"
        if name == "pass_holes" and away["database"] >= 0:
            raise DatabaseUnreachableError("PostgreSQL does not answer.")
        return run(place, name, **given)

    monkeypatch.setattr(Cluster, "ends_written", ask_kafka)
    monkeypatch.setattr(Place, "run", ask_database)
    flow = Pipeline("heals", topics=topic)

    @flow.setup
    def tries() -> list[int]:
        return []

    @flow.handler
    def record(event: Event) -> Insert:
        if event.offset == 3 and len(event.context) < 2:
            event.context.append(1)
            raise Recoverable("not yet")
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode(), "value": event.text()})

    streams.run(flow, topic, change=lambda df: df.where("offset < 5"))
    assert not faults(applied(database), places[:5])
    assert progress(database, "heals") == {(topic, 0): 6}
    assert max(away.values()) < 0
    is_open.abort_transaction()


def test_the_example_of_a_query(streams, topics, kafka, ready):
    """Parsed by Spark, applied by the pipeline (E1)."""
    module = runpy.run_path(str(EXAMPLES / "stream.py"))
    execute(ready.database, "create table members (id text primary key, name text, country text)")
    topic = topics(partitions=2)
    people = [("1", "Zoey", "fi"), ("2", None, "de"), ("1", "Zoiee", "se")]
    publish(
        kafka,
        topic,
        [(key, json.dumps({"name": name, "country": country})) for key, name, country in people],
    )
    module["members"].topics = (topic,)
    one = module["start"](streams.spark, kafka, str(streams.folder / "members"))
    streams.queries.append(one)
    assert one.awaitTermination(PATIENCE_SECONDS)
    assert query(ready.database, "select id, name, country from members") == [("1", "Zoiee", "SE")]


def test_copies_come_back_while_the_query_runs(streams, topics, create_topic, kafka, database):
    """What waits in a retry topic is read by leases of its own, when it is due (F8)."""
    topic = topics(partitions=2)
    policy = RetryTopics(delays=("200ms", "200ms"))
    flow = Pipeline("copies", topics=topic, independent=True, on_failure=policy)
    places = publish(kafka, topic, numbered(20))
    tried = str(streams.folder / "tried")

    @flow.handler
    def record(event: Event) -> Insert:
        if event.text() == "v7" and not Path(tried).exists():
            Path(tried).touch()
            raise Recoverable("later")
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode(), "value": event.text()})

    for each in flow.own_topics:
        create_topic(NewTopic(each.name, 1, 1, config={"message.timestamp.type": "LogAppendTime"}))
    streams.start(flow, topic, once=False)
    wait_for(
        lambda: len(applied(database)) == len(places),
        what="the event that failed",
        within_seconds=PATIENCE_SECONDS,
    )
    assert not faults(sorted(applied(database)), places)
    admin = AdminClient({"bootstrap.servers": kafka})
    for future in admin.delete_topics([each.name for each in flow.own_topics]).values():
        future.result()
