"""Where a pipeline starts, and what it does when its topic is not what it was."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from sideline import Event, Insert, Pipeline
from sideline.errors import ConfigurationError, DataLostError, NotFoundError, RefusedError
from tests.support.pipelines import applied, faults, numbered, progress, publish, query, recorder
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


def make_again(admin: AdminClient, topic: str, partitions: int) -> None:
    """Delete a topic, and make one of the same name."""
    admin.delete_topics([topic], operation_timeout=30)[topic].result(30)

    def made() -> bool:
        # The broker may still be deleting.
        future = admin.create_topics([NewTopic(topic, partitions, 1)])[topic]
        return future.exception(30) is None

    wait_for(made, what=f"{topic} made again")


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

    with pytest.raises(ConfigurationError, match="start names"):
        finish(recorder("wrong", topic), start=start_at)

    assert progress(ready.database, "wrong") == {}
    finish(recorder("wrong", topic), start={0: 5})
    assert applied(ready.database) == []


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
    assert query(ready.database, "select epoch, state, note from sideline.pipelines") == before
    assert len(applied(ready.database)) == 10


def test_new_partitions_wait_for_the_old_ones(start, ready, kafka, topics, admin, tmp_path):
    """A topic that grows while its old partitions lag: the new ones come after (C1)."""
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
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode()})

    sent = publish(kafka, topic, numbered(100))
    start(pipeline)
    wait_for(lambda: progress(ready.database, "grows").get((topic, 0), 0) >= 50, what="half")
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    wait_for(
        lambda: len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 3,
        what="three partitions",
    )
    for number in (1, 2):
        sent += publish(kafka, topic, numbered(30), partition=number)
    wait_for(lambda: len(progress(ready.database, "grows")) == 3, what="three positions")
    gate.touch()

    wait_for(lambda: len(applied(ready.database)) >= 160, what="160 events", within_seconds=60)

    effects = applied(ready.database)
    assert faults(effects, sent) == []
    order = [effect.partition for effect in effects]
    assert set(order[:100]) == {0}, "a new partition was read before the old one had passed its end"


def test_partitions_gained_while_it_was_down_are_read_from_the_beginning(
    finish, ready, kafka, topics, admin
):
    """A known topic's new partitions start at earliest, not where the pipeline says (C5)."""
    topic = topics(partitions=1)
    sent = publish(kafka, topic, numbered(10))
    finish(recorder("later", topic, start="earliest"))
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(30)
    wait_for(
        lambda: len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 2,
        what="two partitions",
    )
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
    """The lost range by partition; --accept-loss goes on behind it (C5)."""
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
    wait_for(lambda: progress(ready.database, "overtaken").get((topic, 0)) == 20, what="20 events")
    delete_records(admin, topic, 0, 40)

    with pytest.raises(DataLostError, match=f"{topic}/0 offsets 20 to 39"):
        running.wait(90)

    assert offsets(ready.database) == list(range(20))
