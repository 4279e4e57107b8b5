"""``prepare=``: a step in the JVM before the handler, on a real broker, Spark and PostgreSQL."""

from __future__ import annotations

import json
import os
import threading

import psycopg
import pytest
from pyspark.sql import functions as f

from sideline import Insert, Pipeline
from sideline.engine import preparing
from sideline.errors import KafkaUnreachableError, PartialError, RefusedError
from sideline.topics.admin import Cluster
from tests.support.operations import balanced, counts, operate
from tests.support.pipelines import applied, faults, numbered, publish, query, write_app
from tests.support.waiting import wait_for

SHAPE = "id string, name string, n int"


def parse(mode="PERMISSIVE"):
    """Parse the value as JSON; drafts are left out."""

    def prepare(frame):
        user = f.from_json(f.col("value").cast("string"), SHAPE, {"mode": mode})
        return frame.withColumn("user", user).where("user.name is null or user.name <> 'draft'")

    return prepare


def flow(name, topic, prepare, **options):
    """Writes what the JVM made of an event, and how long its own bytes are."""
    made = Pipeline(name, topics=topic, prepare=prepare, **options)

    @made.handler
    def record(event):
        user = event.row["user"] or {"name": None, "n": None}
        value = f"{user['name']} {user['n']} {len(event.value)}"
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode(), "value": value})

    return made


def user(name, n, key="k"):
    return (key, json.dumps({"id": key, "name": name, "n": n}))


def accounts(database):
    return query(
        database,
        "select sum(consumed), sum(applied), sum(filtered), sum(parked) from sideline.progress",
    )[0]


@pytest.fixture
def finish(start):
    """Run a pipeline once, to its end: with every round a Spark job, that takes its time."""

    def run(pipeline):
        running = start(pipeline, once=True)
        assert running.wait(240), f"not done: {running.status()}"
        return running.status()

    return run


def written(database, key="k"):
    found = query(database, "select value from applied where key = %s order by seq", key)
    return [value for (value,) in found]


def test_rows_of_the_jvm_reach_the_handler(finish, ready, kafka, topics):
    """Parsed and filtered in the JVM, in order, once; what was left out is counted (C1, C3)."""
    topic = topics(partitions=3)
    names = ["draft" if n % 5 == 0 else f"name {n}" for n in range(300)]
    sent = [user(name, n, key=f"k{n % 7}") for n, name in enumerate(names)]
    publish(kafka, topic, sent)

    status = finish(flow("shop", topic, parse()))

    assert (status["consumed"], status["applied"], status["filtered"]) == (300, 240, 60)
    for key in range(7):
        wanted = [
            f"{name} {n} {len(sent[n][1])}"
            for n, name in enumerate(names)
            if n % 7 == key and name != "draft"
        ]
        assert written(ready.database, f"k{key}") == wanted
    balanced(ready.database)
    publish(kafka, topic, [user("draft", 1), user("draft", 2)])
    assert finish(flow("shop", topic, parse()))["filtered"] == 62


def test_a_small_table_is_joined_in_the_jvm(finish, ready, kafka, topics, spark):
    """A broadcast join keeps one row an event, in order; no match is no loss (C1, C3)."""
    topic = topics(partitions=2)
    places = spark.createDataFrame([("k0", "Köln"), ("k1", "Lima")], "id string, place string")
    publish(kafka, topic, numbered(60, keys=3))

    def join(frame):
        return frame.join(f.broadcast(places), f.col("key").cast("string") == places.id, "left")

    made = Pipeline("shop", topics=topic, prepare=join)

    @made.handler
    def record(event):
        row = {"key": event.key.decode(), "value": f"{event.text()} {event.row['place']}"}
        return Insert("applied", row)

    status = finish(made)

    assert (status["consumed"], status["applied"]) == (60, 60)
    for key, place in enumerate(("Köln", "Lima", None)):
        wanted = [f"v{n} {place}" for n in range(key, 60, 3)]
        assert written(ready.database, f"k{key}") == wanted


@pytest.mark.timeout(600)
def test_what_fails_in_the_jvm_is_its_events_and_comes_back(finish, ready, kafka, topics):
    """Malformed JSON parks its event with its exact bytes; mended, it comes back (F13, F14, R1)."""
    topic = topics(partitions=2)
    bad = b'{"id": "zoey", "name": \xff'
    before = [user(f"a{n}", n, key="ann") for n in range(4)]
    publish(kafka, topic, [*before[:2], user("Zoey", 1, "zoey"), ("zoey", bad), *before[2:]])
    publish(kafka, topic, [user("Zoiee", 3, "zoey"), user("draft", 4, "zoey")])

    finish(flow("shop", topic, parse("FAILFAST")))

    assert accounts(ready.database) == (8, 5, 0, 3)
    assert len(written(ready.database, "ann")) == 4
    rows = query(
        ready.database,
        'select value, why, stage, error, message from sideline.events order by "offset"',
    )
    value, why, stage, error, message = rows[0]
    assert (bytes(value), why, stage, error) == (bad, "failed", "prepare", "SparkException")
    assert message.startswith("[MALFORMED_RECORD_IN_PARSING")
    assert [row[1] for row in rows[1:]] == ["follows", "follows"]

    operation = operate(ready.database, "shop")
    finish(flow("shop", topic, parse("FAILFAST")))
    assert counts(ready.database, operation)[1:3] == (0, 1)
    operation = operate(ready.database, "shop")
    finish(flow("shop", topic, parse()))

    assert counts(ready.database, operation)[:3] == ("done", 3, 0)
    assert written(ready.database, "zoey") == [
        f"Zoey 1 {len(user('Zoey', 1, 'zoey')[1])}",
        f"None None {len(bad)}",
        f"Zoiee 3 {len(user('Zoiee', 3, 'zoey')[1])}",
    ]
    assert accounts(ready.database) == (8, 7, 1, 0)
    balanced(ready.database)


def test_a_udf_that_raises_fails_its_event(finish, ready, kafka, topics):
    """Several of them in one round, each under the name of what its UDF raised (F3).

    What it says may quote the event, and the event anything.
    """
    topic = topics(partitions=2)

    @f.udf("struct<name:string,n:int>")
    def convert(value):
        name = json.loads(bytes(value))["name"]
        if name.startswith("bad"):
            raise ValueError(f"cannot read {name}: java.net.SocketException: reset")
        return name, 0

    def prepare(frame):
        return frame.withColumn("user", convert("value")).drop("value", "headers", "timestamp")

    names = [f"bad {n}" if n in {3, 4} else f"good {n}" for n in range(8)]
    publish(kafka, topic, [user(name, n, key=f"k{n}") for n, name in enumerate(names)])

    finish(flow("shop", topic, prepare))

    assert accounts(ready.database) == (8, 6, 0, 2)
    rows = query(ready.database, "select error, message, stage from sideline.events order by key")
    assert rows == [
        ("ValueError", f"cannot read bad {n}: java.net.SocketException: reset", "prepare")
        for n in (3, 4)
    ]


def test_what_heals_in_a_udf_is_waited_for(finish, ready, kafka, topics, tmp_path):
    """A service that does not answer, asked by a UDF, parks nobody (F1, F2)."""
    topic = topics(partitions=1)
    asked = tmp_path / "asked"

    @f.udf("struct<name:string,n:int>")
    def ask(value):
        with asked.open("a+") as log:
            log.write("once\n")
            log.seek(0)
            if len(log.readlines()) <= 2:
                raise ConnectionRefusedError("not yet")
        return json.loads(bytes(value))["name"], 0

    publish(kafka, topic, [user("Zoey", 1)])

    finish(flow("shop", topic, lambda frame: frame.withColumn("user", ask("value"))))

    assert accounts(ready.database) == (1, 1, 0, 0)


def test_an_event_that_ends_its_worker_is_found(finish, ready, kafka, topics):
    """Leases with care have their rows too; only the culprit is parked (F3, C3)."""
    topic = topics(partitions=1)
    publish(kafka, topic, [user(f"name {n}", n, key=f"k{n}") for n in range(12)])
    made = Pipeline("shop", topics=topic, prepare=parse())

    @made.handler
    def record(event):
        if event.row["user"]["n"] == 7:
            os._exit(3)
        return Insert("applied", {"number": event.offset, "value": event.row["user"]["name"]})

    finish(made)

    assert accounts(ready.database) == (12, 11, 0, 1)
    assert query(ready.database, "select count(*), count(distinct number) from applied") == [
        (11, 11)
    ]
    found = query(ready.database, "select error, key from sideline.events")
    assert found == [("sideline.errors.WorkerCrashed", b"k7")]


def test_an_outage_is_waited_for(start, ready, kafka, topics, monkeypatch):
    """Neither Kafka nor PostgreSQL away from the driver ends a run, or parks anybody (F2, K5)."""
    topic = topics(partitions=1)
    monkeypatch.setattr(preparing, "RETRY_SECONDS", 0.05)
    ends, rows = Cluster.ends, preparing.partition_rows
    away = {"kafka": 0, "database": 0}
    ready_to_fail = threading.Event()

    def is_away(service):
        # More often than a run lets its rounds crash.
        away[service] += ready_to_fail.is_set()
        return ready_to_fail.is_set() and away[service] <= 12

    def ask_kafka(cluster, partitions):
        if is_away("kafka"):
            raise KafkaUnreachableError("Kafka does not answer.")
        return ends(cluster, partitions)

    def ask_database(*given):
        if is_away("database"):
            raise psycopg.OperationalError("the connection is lost")
        return rows(*given)

    monkeypatch.setattr(Cluster, "ends", ask_kafka)
    monkeypatch.setattr(preparing, "partition_rows", ask_database)
    publish(kafka, topic, [user("Zoey", 1)])
    running = start(flow("shop", topic, parse()))
    wait_for(lambda: written(ready.database), what="a round", within_seconds=240)
    ready_to_fail.set()
    wait_for(lambda: away["kafka"] > 12, what="the outage to end", within_seconds=120)
    publish(kafka, topic, [user("Zoë", 2)])
    wait_for(
        lambda: len(written(ready.database)) == 2 or not running.is_alive,
        what="the event behind it",
        within_seconds=240,
    )
    assert running.is_alive
    assert accounts(ready.database) == (2, 2, 0, 0)
    # The round that wrote it has its end before it.
    wait_for(lambda: not running.status()["troubles"], what="no trouble", within_seconds=120)


@pytest.mark.timeout(600)
def test_killed_in_the_middle_everything_is_applied_once(command, ready, kafka, topics, tmp_path):
    """SIGKILL of the driver and of all it started, then a new run: nothing lost or twice (C3, K1).

    It is killed while slices of a round are committed, one by one.
    """
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(600))
    # Whoever is killed is far from the end by then.
    slow = tmp_path / "slow"
    slow.touch()
    wait = f"time.sleep(0.05 * os.path.exists({str(slow)!r}))"
    app = write_app(
        tmp_path,
        "shop",
        topic,
        before=f"assert event.row['size'] == len(event.value); {wait}",
        options="slice_size=20, prepare=lambda df: df.selectExpr('*', 'length(value) as size')",
    )
    run = command("run", app, "--once")
    wait_for(
        lambda: run.process.poll() is not None or some(ready.database),
        what="some slices",
        within_seconds=240,
    )
    run.kill()
    assert 0 < len(applied(ready.database)) < 600, run.err
    slow.unlink()

    assert command("run", app, "--once", "--take-over").end(240) == 0

    assert faults(applied(ready.database), sent) == []
    assert accounts(ready.database) == (600, 600, 0, 0)


def some(database):
    there = query(database, "select to_regclass('sideline.progress') is not null")[0][0]
    return there and (accounts(database)[0] or 0) >= 40


@pytest.mark.parametrize(
    ("prepare", "error", "said"),
    [
        (lambda df: df.withColumn("n", f.explode(f.array(f.lit(1), f.lit(2)))), RefusedError,
         "several rows of event"),
        (lambda df: df.select("value", "partition"), PartialError, "lost or changed the columns"),
        (lambda df: df.withColumn("offset", f.lit("x")), PartialError, "the columns offset"),
        (lambda df: df.collect(), PartialError, "returned a list"),
        (lambda df: df.withColumn("n", f.col("nowhere")), PartialError, "nowhere"),
    ],
)  # fmt: skip
def test_a_step_that_breaks_a_promise_is_refused(start, ready, kafka, topics, prepare, error, said):
    """With the reason, before anything is written (C3)."""
    topic = topics(partitions=1)
    publish(kafka, topic, [user("Zoey", 1), user("Zoey", 2)])
    running = start(flow("shop", topic, prepare), once=True)
    with pytest.raises(error, match=said):
        running.wait(240)
    assert accounts(ready.database) == (0, 0, 0, 0)
    assert written(ready.database) == []
