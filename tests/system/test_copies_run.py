"""`sideline run` with policies whose failures leave as copies: the whole way, through Spark."""

from __future__ import annotations

import signal
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from sideline import accounting
from tests.support.pipelines import applied, publish, query
from tests.support.records import until_over
from tests.support.waiting import wait_for

APP = """
from pathlib import Path
from sideline import DeadLetter, Event, Insert, Pipeline, Recoverable, RetryTopics

mended = Path({mended!r})
letters = Pipeline({name!r}, topics={topic!r}, on_failure=DeadLetter(attempts=2))
# Nothing is dead before the world is mended, however long that takes to be seen.
chain = RetryTopics(delays=("200ms", "1s", "20s"))
retried = Pipeline({name!r}, topics={topic!r}, on_failure=chain)


@letters.handler
@retried.handler
def record(event: Event):
    if event.value == b"never":
        raise ValueError("it does not fit")
    if event.value == b"heals" and not mended.exists():
        raise Recoverable("the world is broken")
    row = {{"topic": event.topic, "partition": event.partition, "number": event.offset}}
    return Insert("applied", row | {{"value": event.text()}})
"""


@pytest.fixture
def app(tmp_path, topics, kafka):
    """Write the app; its topics are deleted afterwards."""
    topic, name = topics(partitions=2), f"g{uuid4().hex[:8]}"
    (tmp_path / "app.py").write_text(
        APP.format(name=name, topic=topic, mended=str(tmp_path / "mended"))
    )
    yield topic, name, f"{tmp_path}/app.py"
    admin = AdminClient({"bootstrap.servers": kafka})
    own = [one for one in admin.list_topics(timeout=30).topics if one.startswith(f"{topic}.{name}")]
    for future in admin.delete_topics(own, operation_timeout=30).values() if own else ():
        future.result()


def _letters(kafka, topic):
    """Where the events of dead letters came from, as readers of committed records see them."""
    reader = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    parts = sorted(reader.list_topics(topic, timeout=30).topics[topic].partitions)
    for part in parts:
        until_over(kafka, topic, part)
    reader.assign([TopicPartition(topic, part, 0) for part in parts])
    found, ended = [], 0
    while ended < len(parts):
        message = reader.poll(30)
        assert message is not None
        if message.error() is not None:
            ended += 1
        else:
            found.append(message.key().decode())
    reader.close()
    return sorted(found)


def test_dead_letters_through_spark(app, command, ready, database, kafka):
    """Applied or dead with one copy, the books balanced, exit 0 (F7)."""
    topic, name, file = app
    sent = publish(kafka, topic, [(f"k{n}", "never" if n % 5 == 0 else "fine") for n in range(60)])
    created = command("topics", "create", f"{file}:letters")
    assert created.end(60) == 0, created.err
    run = command("run", f"{file}:letters", "--once", "--json")
    assert run.end(180) == 0, run.err
    status = run.json()
    assert (status["consumed"], status["applied"], status["lag"]) == (60, 48, 0)
    dead = query(
        database, 'select partition, "offset" from sideline.events where state = %s', "dead"
    )
    assert _letters(kafka, f"{topic}.{name}.dlq") == sorted(f"{topic}/{p}/{o}" for p, o in dead)
    done = [(effect.partition, effect.offset) for effect in applied(database)]
    assert len(sent) == len({*done, *dead}) == len(done) + len(dead), "each applied or dead, once"
    (books,) = accounting.check(database, name)
    assert not books.differences


def test_retry_topics_through_spark(app, command, ready, database, kafka, tmp_path):
    """Through the chain while the world is broken, applied once when it heals (F8)."""
    topic, name, file = app
    words = ["fine", "heals", "never"]
    publish(kafka, topic, [(f"k{n}", words[n % 3]) for n in range(30)])
    assert command("topics", "create", f"{file}:retried").end(60) == 0
    run = command("run", f"{file}:retried")
    wait_for(
        lambda: (
            query(database, "select to_regclass('sideline.events') is not null")[0][0]
            and query(database, "select 1 from sideline.events where attempts > 1 offset 9")
        ),
        what="all ten in the second retry topic",
        within_seconds=180,
    )
    (tmp_path / "mended").touch()
    wait_for(lambda: len(applied(database)) == 20, what="what healed", within_seconds=120)
    wait_for(
        lambda: (
            query(database, "select sum(outbox_last - outbox_sent) from sideline.progress")
            == [(0,)]
        ),
        what="what was dead to leave",
        within_seconds=60,
    )
    run.signal(signal.SIGTERM)
    assert run.end(120) == 0, run.err
    assert len({(one.partition, one.offset) for one in applied(database)}) == 20
    assert len(_letters(kafka, f"{topic}.{name}.dlq")) == 10
    (books,) = accounting.check(database, name)
    assert not books.differences
