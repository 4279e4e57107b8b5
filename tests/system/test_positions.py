"""Where a pipeline starts, and what it does when its topic is not what it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from sideline import Event, Insert, Pipeline
from sideline.errors import ConfigurationError, DataLostError, NotFoundError, RefusedError
from sideline.ledger import audit
from tests.support.pipelines import (
    applied,
    counted,
    faults,
    numbered,
    progress,
    publish,
    query,
    recorder,
)
from tests.support.waiting import wait_for


@pytest.fixture
def admin(kafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka})


def offsets(database: str) -> list[int]:
    """The offsets of what was applied, sorted."""
    return sorted(effect.offset for effect in applied(database))


def delete_records(admin: AdminClient, topic: str, partition: int, before: int) -> None:
    """Do what retention does."""
    futures = admin.delete_records([TopicPartition(topic, partition, before)])
    for future in futures.values():
        future.result(30)


def grow(admin: AdminClient, topic: str, partitions: int) -> None:
    """Give a topic more partitions, and wait until the brokers know."""
    admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(30)
    wait_for(
        lambda: len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == partitions,
        what=f"{partitions} partitions",
    )


def write_openly(kafka: str, topic: str, count: int) -> Producer:
    """Write events in a transaction that stays open."""
    # It stays open for as long as a driver may take.
    patient = {"transactional.id": f"open-{topic}", "transaction.timeout.ms": 300_000}
    producer = Producer({"bootstrap.servers": kafka, **patient})
    producer.init_transactions(30)
    producer.begin_transaction()
    for key, value in numbered(count):
        producer.produce(topic, partition=0, key=key, value=value)
    assert producer.flush(30) == 0
    return producer


def make_again(admin: AdminClient, topic: str, partitions: int) -> None:
    """Delete a topic, and make one of the same name."""

    def identity() -> str | None:
        future = admin.describe_topics(TopicCollection([topic]))[topic]
        return None if future.exception(30) else str(future.result().topic_id)

    before = identity()
    admin.delete_topics([topic], operation_timeout=30)[topic].result(30)

    def made() -> bool:
        # The broker may still be deleting.
        future = admin.create_topics([NewTopic(topic, partitions, 1)])[topic]
        return future.exception(30) is None

    wait_for(made, what=f"{topic} made again")
    # The controller answers before the broker knows: what is published now may go to the old one.
    wait_for(lambda: identity() not in {None, before}, what=f"word of the new {topic}")


def test_a_new_pipeline_starts_at_the_beginning(finish, ready, kafka, topics, admin):
    """earliest is what Kafka still has, which is no loss for a new pipeline (C5)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    delete_records(admin, topic, 0, 4)

    finish(recorder("early", topic))

    assert offsets(ready.database) == [4, 5, 6, 7, 8, 9]


def test_latest_takes_only_what_comes_later(start, ready, kafka, topics):
    """The position is stored before the first read: what comes then is not missed (C5)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    start(recorder("late", topic, start="latest"))
    wait_for(lambda: progress(ready.database, "late"), what="a stored position")
    publish(kafka, topic, numbered(5))

    wait_for(lambda: len(applied(ready.database)) == 5, what="five events", within_seconds=60)

    assert offsets(ready.database) == [10, 11, 12, 13, 14]


def test_a_start_in_time(finish, ready, kafka, topics):
    """From a moment on; a partition with nothing after it starts at its end (C5)."""
    topic = topics(partitions=2)
    # Not long ago: retention goes by these times.
    noon = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    at = int(noon.timestamp() * 1000)
    publish(kafka, topic, numbered(3), partition=0, timestamp_ms=at - 1)
    publish(kafka, topic, numbered(2), partition=0, timestamp_ms=at)
    publish(kafka, topic, numbered(4), partition=1, timestamp_ms=at - 60_000)

    finish(recorder("noon", topic, start=noon))

    places = [(effect.partition, effect.offset) for effect in applied(ready.database)]
    assert sorted(places) == [(0, 3), (0, 4)]
    assert progress(ready.database, "noon") == {(topic, 0): 5, (topic, 1): 4}


def test_a_start_at_offsets(finish, ready, kafka, topics):
    """Partitions that are not named start at the beginning (C5)."""
    topic = topics(partitions=2)
    publish(kafka, topic, numbered(5), partition=0)
    publish(kafka, topic, numbered(2), partition=1)

    finish(recorder("given", topic), start={0: 3})

    places = [(effect.partition, effect.offset) for effect in applied(ready.database)]
    assert sorted(places) == [(0, 3), (0, 4), (1, 0), (1, 1)]


@pytest.mark.parametrize("start_at", [{0: 6}, {7: 0}], ids=["beyond the end", "no such partition"])
def test_a_start_that_kafka_does_not_have_is_refused(finish, ready, kafka, topics, start_at):
    """A wrong offset is a wrong call, and leaves no progress behind that would say it is known."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))

    pipeline = recorder("wrong", topic, start="latest")
    with pytest.raises(ConfigurationError, match="start names"):
        finish(pipeline, start=start_at)

    assert progress(ready.database, "wrong") == {}
    # A start that was given for one run is no part of the pipeline.
    finish(pipeline)
    assert applied(ready.database) == []


def test_a_start_that_one_of_two_topics_does_not_have(desk, database, kafka, topics):
    """It is refused for both: no row of the first is left, which would make it known (C5)."""
    wide, narrow = topics(partitions=3), topics(partitions=1)
    for number in range(3):
        publish(kafka, wide, numbered(5), partition=number)

    driver = desk(recorder("wrong", [wide, narrow], start={2: 5}))

    assert isinstance(driver.end(), ConfigurationError)
    assert progress(database, "wrong") == {}


BEGIN = """
import sys
from tests.support.desk import Desk
from tests.support.pipelines import recorder

database, kafka, topic = sys.argv[1:]
Desk(database, kafka, recorder("late", topic, start="latest")).begun()
"""


@pytest.mark.parametrize("count", [1, 3])
def test_killed_while_starts_are_stored(desk, database, kafka, topics, count):
    """A new pipeline is new until all of it is known: nothing starts elsewhere (C5)."""
    topic = topics(partitions=3)
    for number in range(3):
        publish(kafka, topic, numbered(10), partition=number)
    first = subprocess.run(
        [sys.executable, "-c", BEGIN, database, kafka, topic],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"SIDELINE_CRASH_AT": f"between-starts:{count}"},
        check=False,
        timeout=60,
    )
    assert first.returncode == -signal.SIGKILL
    assert progress(database, "late") == {}

    desk(recorder("late", topic, start="latest"))

    assert progress(database, "late") == {(topic, number): 10 for number in range(3)}


def test_a_known_pipeline_continues(finish, ready, kafka, topics):
    """It goes on where it stopped, whatever start it declares (C5)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(100))
    finish(recorder("known", topic))
    sent += publish(kafka, topic, numbered(40))

    finish(recorder("known", topic, start="latest"))

    assert faults(applied(ready.database), sent) == []


def test_a_known_pipeline_refuses_another_start(finish, ready, kafka, topics):
    """--from is for new pipelines; nothing changes, not even the epoch (C5)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    finish(recorder("known", topic))
    before = query(ready.database, "select epoch, state, note from sideline.pipelines")

    with pytest.raises(RefusedError, match="has progress already") as caught:
        finish(recorder("known", topic), start="earliest")

    assert caught.value.exit_code == 5
    assert "without --from" in caught.value.hint
    assert "sideline reprocess" in caught.value.hint
    assert query(ready.database, "select epoch, state, note from sideline.pipelines") == before
    assert len(applied(ready.database)) == 10


def test_new_partitions_wait_for_the_old_ones(start, ready, kafka, topics, admin, tmp_path):
    """A topic that grows while its old partitions lag: the new ones come after (C1).

    What has the key of an event that failed before waits behind it, wherever it stands now (F4).
    """
    topic = topics(partitions=1)
    gate = tmp_path / "open"
    path = str(gate)
    pipeline = Pipeline("grows", topics=topic, slice_size=10)

    @pipeline.handler
    def record(event: Event):
        import os
        import time as clock

        while event.partition == 0 and event.offset == 50 and not os.path.exists(path):  # noqa: PTH110
            clock.sleep(0.02)
        if (event.partition, event.offset) == (0, 60):
            raise ValueError("bad")
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode()})

    sent = publish(kafka, topic, numbered(100))
    start(pipeline)
    wait_for(
        lambda: progress(ready.database, "grows").get((topic, 0), 0) >= 50,
        what="half",
        within_seconds=120,
    )
    grow(admin, topic, 3)
    for number in (1, 2):
        sent += publish(kafka, topic, numbered(30), partition=number)
    wait_for(lambda: len(progress(ready.database, "grows")) == 3, what="three positions")
    gate.touch()

    wait_for(lambda: counted(ready.database, "grows") >= 160, what="160 events", within_seconds=60)

    effects = applied(ready.database)
    parked = query(
        ready.database, 'select topic, partition, "offset" from sideline.events order by place'
    )
    # Of the same key, in three partitions.
    assert parked[0] == (topic, 0, 60)
    assert sorted(parked[1:]) == [(topic, 1, 10), (topic, 2, 10)]
    assert faults(effects, set(sent) - set(parked)) == []
    order = [effect.partition for effect in effects]
    assert set(order[:99]) == {0}, "a new partition was read before the old one had passed its end"


def test_new_partitions_wait_for_an_open_transaction(desk, database, kafka, topics, admin):
    """What it has written is older than they are, though nobody may read it yet (C1)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    desk(recorder("grows", topic)).stop()
    producer = write_openly(kafka, topic, 5)
    grow(admin, topic, 2)

    desk(recorder("grows", topic)).stop()

    producer.abort_transaction(30)
    waits = query(database, "select waits_for from sideline.progress where partition = 1")
    assert waits == [({"0": 15},)]


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "aborted"])
def test_a_run_once_reads_what_new_partitions_wait_for(
    start, finish, ready, kafka, topics, admin, commits
):
    """It ends, after the transaction that was open when the topic grew, and in order (C1)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    finish(recorder("grows", topic))
    producer = write_openly(kafka, topic, 5)
    grow(admin, topic, 2)
    publish(kafka, topic, numbered(3), partition=1)

    running = start(recorder("grows", topic), once=True)
    taken = (
        "select true from sideline.progress where partition = 0 and lease > array[2, 0]::bigint[]"
    )
    wait_for(lambda: query(ready.database, taken), what="the old partition's lease")
    if commits:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)

    assert running.wait(120), f"not done: {running.status()}"
    later = [(effect.partition, effect.offset) for effect in applied(ready.database)[10:]]
    older = [(0, at) for at in range(10, 15)] if commits else []
    assert later == [*older, (1, 0), (1, 1), (1, 2)]


def test_a_topic_made_again_waits_for_nothing_of_the_old_one(
    desk, database, kafka, topics, admin, cli, read
):
    """Offsets of the log that is gone are none of the new one's; status says who waits (C1, S4)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    desk(recorder("again", topic)).stop()
    grow(admin, topic, 2)
    desk(recorder("again", topic)).stop()
    _, gained = read("status", "again", "--kafka", kafka)["partitions"]
    assert gained["waits_for"] == {"0": 10}
    assert f"passed {topic}/0 at 10" in cli("status", "again", "--kafka", kafka)[1]
    make_again(admin, topic, 2)

    desk(recorder("again", topic), accept_loss=True).stop()

    asked = "select next_offset, waits_for from sideline.progress order by partition"
    assert query(database, asked) == [(0, None), (0, None)]


def test_partitions_gained_while_it_was_down_are_read_from_the_beginning(
    finish, ready, kafka, topics, admin
):
    """A known topic's new partitions start at earliest, not where the pipeline says (C5)."""
    topic = topics(partitions=1)
    sent = publish(kafka, topic, numbered(10))
    finish(recorder("later", topic, start="earliest"))
    grow(admin, topic, 2)
    sent += publish(kafka, topic, numbered(10), partition=1)

    finish(recorder("later", topic, start="latest"))

    assert faults(applied(ready.database), sent) == []


def test_a_topic_that_does_not_exist(finish, ready):
    """It is named, with the way to wait for it (exit 4)."""
    with pytest.raises(NotFoundError, match="'no-such-topic' does not exist") as caught:
        finish(recorder("nowhere", "no-such-topic"))

    assert caught.value.exit_code == 4
    assert "--wait" in caught.value.hint


def test_a_topic_that_does_not_exist_yet(start, ready, kafka, topics, admin):
    """With --wait the pipeline stands until the topic is made, and reads it from its start."""
    topic = f"yet-{time.time_ns()}"
    running = start(recorder("patient", topic), wait_for_topics=True)
    wait_for(lambda: "topics" in running.status()["troubles"], what="word of the missing topic")
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(30)
    try:
        sent = publish(kafka, topic, numbered(50))
        wait_for(lambda: len(applied(ready.database)) == 50, what="50 events", within_seconds=60)
    finally:
        admin.delete_topics([topic], operation_timeout=30)[topic].result(30)

    assert faults(applied(ready.database), sent) == []


def test_waiting_for_a_topic_can_be_stopped(start, ready):
    """Ctrl-C while waiting is an ordinary end."""
    running = start(recorder("impatient", "never-made"), wait_for_topics=True)
    wait_for(lambda: "topics" in running.status()["troubles"], what="word of the missing topic")

    running.stop()

    assert running.wait(30)


@pytest.mark.parametrize("partitions", [2, 1], ids=["as many partitions", "fewer partitions"])
def test_a_topic_deleted_and_made_again_stops_the_pipeline(
    finish, ready, kafka, topics, admin, partitions
):
    """Its offsets mean other events now: stop, name it, go on only when told (C5)."""
    topic = topics(partitions=2)
    publish(kafka, topic, numbered(20), partition=0)
    publish(kafka, topic, numbered(20), partition=1)
    finish(recorder("again", topic))
    make_again(admin, topic, partitions)
    publish(kafka, topic, [("a", "new"), ("b", "new")], partition=0)

    with pytest.raises(DataLostError, match="deleted and made again") as caught:
        finish(recorder("again", topic))

    assert f"{topic}/0 was deleted and made again at offset 20" in caught.value.message
    assert f"{topic}/1 " in caught.value.message
    assert caught.value.exit_code == 7
    assert len(applied(ready.database)) == 40
    finish(recorder("again", topic), accept_loss=True)
    assert [effect.value for effect in applied(ready.database)[40:]] == ["new", "new"]
    # From here on it is an ordinary topic again.
    publish(kafka, topic, [("c", "newer")], partition=0)
    finish(recorder("again", topic))
    assert len(applied(ready.database)) == 43


def test_a_topic_made_again_while_it_runs_stops_the_pipeline(start, ready, kafka, topics, admin):
    """Nobody has to restart it to find out."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(20))
    running = start(recorder("under", topic))
    wait_for(lambda: len(applied(ready.database)) == 20, what="20 events", within_seconds=60)
    make_again(admin, topic, 1)

    with pytest.raises(DataLostError, match=f"{topic}/0 was deleted and made again"):
        running.wait(90)

    assert len(applied(ready.database)) == 20


def test_what_retention_took_is_named_and_accepted(finish, ready, kafka, topics, admin):
    """The lost range by partition; --accept-loss goes on behind it, in the books (C5, S6)."""
    topic = topics(partitions=2)
    for number in (0, 1):
        publish(kafka, topic, numbered(10), partition=number)
    finish(recorder("slow", topic))
    for number in (0, 1):
        publish(kafka, topic, numbered(10), partition=number)
    delete_records(admin, topic, 0, 13)
    delete_records(admin, topic, 1, 15)

    with pytest.raises(DataLostError) as caught:
        finish(recorder("slow", topic))

    assert f"{topic}/0 offsets 10 to 12" in caught.value.message
    assert f"{topic}/1 offsets 10 to 14" in caught.value.message
    assert "--accept-loss" in caught.value.hint
    assert len(applied(ready.database)) == 20
    finish(recorder("slow", topic), accept_loss=True)
    later = {(effect.partition, effect.offset) for effect in applied(ready.database)[20:]}
    assert later == {(0, at) for at in range(13, 20)} | {(1, at) for at in range(15, 20)}
    asked = "select actor, action, pipeline, count, subject from sideline.audit"
    lost = [f"{topic}/0 offsets 10 to 12", f"{topic}/1 offsets 10 to 14"]
    ((*change, subject),) = query(ready.database, asked)
    assert change == [audit.actor(), "accept loss", "slow", 2]
    assert sorted(subject["lost"]) == lost


def test_retention_that_overtakes_a_running_pipeline_stops_it(
    start, ready, kafka, topics, admin, tmp_path
):
    """Events that vanish before they are read are no hole to jump over (C1, C5)."""
    topic = topics(partitions=1, segment_bytes=1_048_576)
    path = str(tmp_path / "open")
    pipeline = Pipeline("overtaken", topics=topic, slice_size=5)

    @pipeline.handler
    def stumble(event: Event):
        from pathlib import Path

        from sideline import Recoverable

        if event.offset == 20 and not Path(path).exists():
            message = "not yet"
            raise Recoverable(message)
        return Insert("applied", {"number": event.offset, "partition": 0, "topic": event.topic})

    publish(kafka, topic, numbered(50))
    running = start(pipeline)
    wait_for(
        lambda: progress(ready.database, "overtaken").get((topic, 0)) == 20,
        what="20 events",
        within_seconds=120,
    )
    delete_records(admin, topic, 0, 40)

    with pytest.raises(DataLostError, match=f"{topic}/0 offsets 20 to 39"):
        running.wait(90)

    assert offsets(ready.database) == list(range(20))
