"""Pipelines end to end: Kafka, Spark, PostgreSQL."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from pyspark import RDD, SparkContext

from sideline import Delete, Event, Insert, Pipeline, Recoverable, Skip, Upsert
from sideline.errors import ConfigurationError, PartialError
from sideline.policies import FloodGuard
from tests.support.pipelines import (
    applied,
    counted,
    execute,
    faults,
    group_offsets,
    numbered,
    progress,
    publish,
    query,
    recorder,
)
from tests.support.waiting import wait_for


def test_every_event_takes_effect_once_and_in_order(finish, ready, kafka, topics):
    """Four partitions through Spark: nothing lost, doubled or reordered (C1, C2, C3)."""
    topic = topics(partitions=4)
    sent = publish(kafka, topic, numbered(5_000))

    finish(recorder("happy", topic))

    assert faults(applied(ready.database), sent) == []
    assert counted(ready.database, "happy") == 5_000


def test_a_table_follows_its_topic(finish, ready, kafka, topics):
    """The last name wins, a tombstone deletes, nothing else is touched (C1, C7, E1)."""
    topic = topics(partitions=4)
    execute(ready.database, "create table users (id text primary key, name text)")
    rename = [("1", "Zoey"), ("2", "Ann"), ("1", "Zo\u00eb"), ("1", "Zoiee"), ("3", "Bob")]
    users = [(key, json.dumps({"id": key, "name": name})) for key, name in rename]
    publish(kafka, topic, [*users, ("3", None)])
    pipeline = Pipeline("login", topics=topic)

    @pipeline.handler
    def login(event: Event):
        user = event.json()
        if user is None:
            return Delete("users", {"id": event.key.decode()})
        return Upsert("users", {"id": user["id"], "name": user["name"]}, key="id")

    finish(pipeline)

    rows = query(ready.database, "select id, name from users order by id")
    assert rows == [("1", "Zoiee"), ("2", "Ann")]


def test_what_a_handler_leaves_out_is_counted_as_filtered(finish, ready, kafka, topics):
    """consumed = applied + filtered (C3): an event without an effect is no lost event."""
    topic = topics(partitions=2)
    publish(kafka, topic, numbered(100))
    pipeline = Pipeline("half", topics=topic)

    @pipeline.handler
    def half(event: Event):
        if event.offset % 2:
            return None
        return Insert("applied", {"topic": event.topic, "number": event.offset})

    status = finish(pipeline)

    written = len(applied(ready.database))
    assert 0 < written < 100
    assert (status["consumed"], status["applied"], status["filtered"]) == (
        100,
        written,
        100 - written,
    )


def test_a_round_is_one_spark_job(start, spark, kafka, topics, ready, monkeypatch):
    """However many partitions and slices, Spark sees one job a round; idle rounds are rare.

    The pipeline is shipped once; of the events' payload nothing comes back through the JVM.
    """
    topic = topics(partitions=8)
    marked = "payload " * 100
    sent = publish(kafka, topic, [(key, marked + value) for key, value in numbered(2_000)])
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    shipped, results = [], []
    broadcast, collect = SparkContext.broadcast, RDD.collect

    def ship(context, value):
        shipped.append(value)
        return broadcast(context, value)

    def gather(rdd):
        results.extend(found := collect(rdd))
        return found

    monkeypatch.setattr(SparkContext, "broadcast", ship)
    monkeypatch.setattr(RDD, "collect", gather)

    running = start(recorder("jobs", topic, slice_size=10), once=True)
    assert running.wait(120)

    def jobs() -> int:
        # By their numbers: Spark forgets the oldest.
        return len(set(tracker.getJobIdsForGroup()) - before)

    # And one job in which the workers say goodbye. Spark counts them a moment later.
    wanted = running.driver._round + 1
    wait_for(lambda: jobs() >= wanted, what=f"{wanted} jobs")
    assert jobs() == wanted < 20
    assert len(shipped) == 1
    assert len(results) >= running.driver._round
    assert not any("payload" in str(result) for result in results)
    assert faults(applied(ready.database), sent) == []


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (Upsert("nowhere", {"id": "1"}, key="id"), "nowhere"),
        (Upsert("users", {"id": "1", "colour": "red"}, key="id"), "colour"),
        (Upsert("users", {"id": "1", "name": "Zoey"}, key="name"), "no unique index"),
    ],
    ids=["table", "column", "index"],
)
def test_what_could_never_be_written_is_refused_at_start(start, ready, kafka, topics, effect, said):
    """With what is missing and what would mend it; nothing is made, no job is begun."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))
    execute(ready.database, "create table users (id text primary key, name text)")
    pipeline = Pipeline("misfit", topics=topic, effects=[effect])
    pipeline.handler(lambda event: effect)

    with pytest.raises(ConfigurationError, match=said) as caught:
        start(pipeline, once=True)

    assert caught.value.hint
    assert query(ready.database, "select from pg_namespace where nspname = 'sideline'") == []


def test_the_start_says_which_tables_are_not_folded(finish, ready, kafka, topics, caplog):
    """By name, with the reason: what is slower than it could be is no riddle (K9)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))
    execute(ready.database, "create table plain (id text primary key)")
    execute(ready.database, "create table users (id text primary key)")
    execute(
        ready.database,
        "create function see() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger see before insert on users for each row execute function see()",
    )
    effects = [Upsert(table, {"id": "1"}, key="id") for table in ("plain", "users")]
    pipeline = Pipeline("slow", topics=topic, effects=effects)
    pipeline.handler(lambda event: effects[1])

    finish(pipeline)

    said = [record.getMessage() for record in caplog.records if "not folded" in record.getMessage()]
    assert len(said) == 1
    assert said[0] == "slow: table public.users is not folded: it has a BEFORE INSERT trigger"


def test_several_topics(finish, ready, kafka, topics):
    """One pipeline reads several topics, each with partitions of its own."""
    first, second = topics(partitions=2), topics(partitions=3)
    sent = publish(kafka, first, numbered(300)) + publish(kafka, second, numbered(400))

    finish(recorder("both", [first, second]))

    assert faults(applied(ready.database), sent) == []
    assert len(progress(ready.database, "both")) == 5


def test_several_pipelines_share_a_session(start, ready, kafka, topics):
    """Three pipelines in one session of four slots all go on while events come."""
    names = ["one", "two", "three"]
    made = {name: topics(partitions=2) for name in names}
    sent = [place for topic in made.values() for place in publish(kafka, topic, numbered(200))]
    for name in names:
        start(recorder(name, made[name]))

    wait_for(lambda: len(applied(ready.database)) >= 600, what="600 events", within_seconds=90)
    sent += [place for topic in made.values() for place in publish(kafka, topic, numbered(50))]
    wait_for(lambda: len(applied(ready.database)) >= 750, what="750 events", within_seconds=90)

    assert faults(applied(ready.database), sent) == []


def test_a_topic_that_is_no_longer_declared_is_left_alone(finish, ready, kafka, topics):
    """A pipeline reads the topics that it names now, not those it named once."""
    kept, dropped = topics(partitions=1), topics(partitions=1)
    sent = publish(kafka, kept, numbered(10)) + publish(kafka, dropped, numbered(10))
    finish(recorder("fewer", [kept, dropped]))
    sent += publish(kafka, kept, numbered(5))
    publish(kafka, dropped, numbered(5))

    finish(recorder("fewer", kept))

    assert faults(applied(ready.database), sent) == []


def test_events_that_come_while_it_runs_are_applied(start, ready, kafka, topics):
    """A live pipeline goes from lease to lease without losing or doubling anything (C1, C2)."""
    topic = topics(partitions=4)
    start(recorder("live", topic))
    sent = []

    def all_applied() -> bool:
        return len(applied(ready.database)) >= len(sent)

    for number in range(8):
        sent += publish(kafka, topic, numbered(50, start=50 * number))
        wait_for(all_applied, what=f"{50 * number + 50} events applied", within_seconds=60)

    assert faults(applied(ready.database), sent) == []


def test_lag_tools_see_the_group(start, ready, kafka, topics):
    """Group offsets follow the effects within seconds, and equal progress at the end (C5)."""
    topic = topics(partitions=3)
    publish(kafka, topic, numbered(300))
    running = start(recorder("seen", topic))
    wait_for(lambda: len(applied(ready.database)) == 300, what="300 events", within_seconds=60)

    def shown():
        return sum(group_offsets(kafka, "seen", topic, 3).values()) == 300

    wait_for(shown, what="the group's offsets", within_seconds=30)
    publish(kafka, topic, numbered(30))
    wait_for(lambda: len(applied(ready.database)) == 330, what="330 events", within_seconds=60)
    running.stop()
    assert running.wait(60)

    stands = {number: at for (_, number), at in progress(ready.database, "seen").items()}
    assert group_offsets(kafka, "seen", topic, 3) == stands


def test_a_foreign_member_of_the_group_is_a_warning(start, ready, kafka, topics, caplog):
    """Somebody else's consumer in the group hides us from lag tools, and stops nothing (C5)."""
    topic = topics(partitions=1)
    foreign = Consumer(
        {"bootstrap.servers": kafka, "group.id": "guest", "session.timeout.ms": 6_000}
    )
    with closing(foreign), caplog.at_level(logging.WARNING, logger="sideline"):
        foreign.subscribe([topic])

        def joined():
            foreign.poll(0.1)
            return foreign.assignment()

        wait_for(joined, what="a foreign member", within_seconds=60)
        sent = publish(kafka, topic, numbered(100))
        running = start(recorder("guest", topic))

        def warned():
            foreign.poll(0.05)
            return "group" in running.status()["troubles"]

        wait_for(warned, what="a warning", within_seconds=60)
        wait_for(lambda: len(applied(ready.database)) == 100, what="100 events", within_seconds=60)

    assert "foreign consumer" in caplog.text
    wait_for(
        lambda: group_offsets(kafka, "guest", topic, 1) == {0: 100},
        what="the group's offsets after the guest left",
        within_seconds=60,
    )
    wait_for(lambda: "group" not in running.status()["troubles"], what="the end of the warning")
    assert faults(applied(ready.database), sent) == []


def login(event: Event):
    """Cannot take Zoë."""
    if "ë" in event.text():
        message = "this name I cannot digest"
        raise ValueError(message)
    row = {"key": event.key.decode(), "name": event.text()}
    return Upsert("names", row, key="key")


def test_zoiee_waits_behind_zoe_and_bob_does_not(finish, ready, kafka, topics):
    """Zoë fails and is parked, Zoiee behind her, in this run and in the next (C1, F3, F4, S1)."""
    topic = topics(partitions=2)
    execute(ready.database, "create table names (key text primary key, name text)")
    publish(
        kafka,
        topic,
        [("1", "Zoey"), ("2", "Bob"), ("1", "Zoë"), ("2", "Bobby"), ("1", "Zoiee"), ("3", "Eve")],
    )
    pipeline = Pipeline("login", topics=topic)
    pipeline.handler(login)

    status = finish(pipeline)
    assert (status["consumed"], status["applied"], status["parked"]) == (6, 4, 2)
    publish(kafka, topic, [("1", "Zo"), ("2", "Robert")])
    status = finish(pipeline)

    assert (status["parked"], status["aside"]) == (3, 1)
    names = query(ready.database, "select name from names order by key")
    assert names == [("Zoey",), ("Robert",), ("Eve",)]
    waiting = query(
        ready.database,
        "select convert_from(value, 'utf8'), why, error from sideline.events order by place",
    )
    assert waiting == [
        ("Zoë", "failed", "ValueError"),
        ("Zoiee", "follows", None),
        ("Zo", "follows", None),
    ]


def test_a_flood_stops_the_pipeline_until_somebody_overrides_the_guard(
    finish, ready, kafka, topics
):
    """Exit 7 with what to do; nothing beyond the guard is parked, and nothing is lost (F12)."""
    topic = topics(partitions=1)
    execute(ready.database, "create table names (key text primary key, name text)")
    publish(kafka, topic, [("a", "Ann"), *((f"k{n}", "Zoë") for n in range(20)), ("b", "Bob")])
    pipeline = Pipeline("flood", topics=topic, guard=FloodGuard(in_a_row=5))
    pipeline.handler(login)

    for _ in range(2):
        with pytest.raises(PartialError) as caught:
            finish(pipeline)
        assert caught.value.exit_code == 7
        assert "--override-guard" in str(caught.value.hint)
        assert query(ready.database, "select count(*) from sideline.events") == [(4,)]
    status = finish(pipeline, override_guard=True)
    assert (status["applied"], status["parked"]) == (2, 20)


def test_a_failing_row_is_parked(finish, ready, kafka, topics):
    """A row that PostgreSQL refuses is its event's failure, not the slice's (C3, F3)."""
    topic = topics(partitions=1)
    publish(kafka, topic, [("a", "1"), ("b", "2"), ("c", "not a number"), ("d", "4"), ("c", "5")])
    execute(ready.database, "create table numbers (key text primary key, number int not null)")
    pipeline = Pipeline("rows", topics=topic)

    @pipeline.handler
    def number(event: Event):
        return Upsert("numbers", {"key": event.key.decode(), "number": event.text()}, key="key")

    finish(pipeline)

    found = query(ready.database, "select * from numbers order by key")
    assert found == [("a", 1), ("b", 2), ("d", 4)]
    parked = query(ready.database, 'select "offset", stage from sideline.events order by place')
    assert parked == [(2, "write"), (4, None)]


def test_skip_leaves_out_and_counts(finish, ready, kafka, topics):
    """Skip() goes on behind a failing event and counts it (F5)."""
    topic = topics(partitions=1)
    publish(kafka, topic, [("a", "ok"), ("b", "poison"), ("c", "ok")])
    pipeline = Pipeline("skips", topics=topic, on_failure=Skip())

    @pipeline.handler
    def maybe(event: Event):
        if event.value == b"poison":
            raise ValueError
        return Insert("applied", {"number": event.offset})

    status = finish(pipeline)

    assert [effect.offset for effect in applied(ready.database)] == [0, 2]
    assert (status["consumed"], status["applied"], status["skipped"]) == (3, 2, 1)


def test_a_recoverable_error_waits_in_place(finish, ready, kafka, topics, tmp_path):
    """The world heals, the event is tried again, nothing overtakes it (C1, F2)."""
    topic = topics(partitions=1)
    sent = publish(kafka, topic, numbered(20))
    tries = str(tmp_path / "tries")
    pipeline = Pipeline("heals", topics=topic)

    @pipeline.handler
    def heal(event: Event):
        if event.offset == 10:
            with open(tries, "a") as file:  # noqa: PTH123 - pickled by value: no imports
                file.write("x")
                if file.tell() < 5:
                    message = "away"
                    raise Recoverable(message)
        return Insert(
            "applied", {"topic": event.topic, "partition": event.partition, "number": event.offset}
        )

    finish(pipeline)

    assert Path(tries).read_text() == "xxxxx"
    assert faults(applied(ready.database), sent) == []


def test_a_rate_is_kept(finish, ready, kafka, topics):
    """rate= bounds the events per second of the whole pipeline."""
    topic = topics(partitions=4)
    sent = publish(kafka, topic, numbered(400))
    pipeline = Pipeline("paced", topics=topic, rate=100)

    @pipeline.handler
    def stamp(event: Event):
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        # Here, and not where it is written: how long PostgreSQL takes is not the pace's affair.
        return Insert("applied", row | {"at": time.time()})

    execute(ready.database, "alter table applied add at float8")
    finish(pipeline)

    assert faults(applied(ready.database), sent) == []
    # In no window of two seconds more than twice the rate, what a lease may have saved, and the
    # part of an event that a worker keeps.
    busiest = query(
        ready.database,
        """
        select max(count) from (
            select count(*) over (order by at range between 2::float8 preceding and current row)
            from applied
        ) as windows
        """,
    )
    assert busiest[0][0] <= 2 * 100 + 100 + 4


def test_a_worker_that_dies_costs_nothing(start, ready, kafka, topics, tmp_path):
    """A handler that kills its worker once: the slice is done again, once in effect (P4, C2)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(500))
    once = str(tmp_path / "died")
    pipeline = Pipeline("dies", topics=topic)

    @pipeline.handler
    def die(event: Event):
        if event.offset == 100 and not os.path.exists(once):  # noqa: PTH110
            with open(once, "w"):  # noqa: PTH123
                os.kill(os.getpid(), 9)
        return Insert(
            "applied", {"topic": event.topic, "partition": event.partition, "number": event.offset}
        )

    running = start(pipeline, once=True)
    assert running.wait(120)

    assert Path(once).exists()
    assert faults(applied(ready.database), sent) == []


def test_a_stopped_pipeline_leaves_nothing_in_the_session(start, ready, kafka, topics, tmp_path):
    """Workers of a session that lives on are torn down; no connection of the run is left (E1)."""
    topic = topics(partitions=4)
    publish(kafka, topic, numbered(200))
    notes = str(tmp_path)
    pipeline = recorder("guest", topic)

    @pipeline.setup
    def begin():
        with open(f"{notes}/begun-{os.getpid()}", "w"):  # noqa: PTH123
            return os.getpid()

    @pipeline.teardown
    def end(pid):
        with open(f"{notes}/ended-{pid}", "w"):  # noqa: PTH123
            pass

    running = start(pipeline)
    wait_for(lambda: len(applied(ready.database)) == 200, what="200 events", within_seconds=60)
    running.stop()
    assert running.wait(60)

    begun = {file.name.removeprefix("begun-") for file in tmp_path.glob("begun-*")}
    assert begun

    def all_ended() -> bool:
        return {file.name.removeprefix("ended-") for file in tmp_path.glob("ended-*")} == begun

    # The goodbye goes on without the run where it takes its time.
    wait_for(all_ended, what="every teardown")
    sessions = """
        select application_name
        from pg_stat_activity
        where datname = current_database() and application_name like 'sideline%%'
    """
    wait_for(lambda: query(ready.database, sessions) == [], what="the end of all sessions")
