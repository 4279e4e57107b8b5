"""A publisher on a real broker: what became of each record is known, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import uuid
from collections import Counter
from datetime import UTC, datetime

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from sideline import Publisher
from sideline.errors import (
    ConfigurationError,
    FencedError,
    KafkaUnreachableError,
    NotDeliveredError,
    NotFoundError,
    PartialError,
    RefusedError,
    UnclearCommitError,
    UsageError,
)
from sideline.topics import admin
from tests.support.records import records, until_over


def publish_all(kafka: str, topic: str, given: list, error: type[Exception] | None = None) -> None:
    """Publish, and look at no handle; raise an error of one's own at the end, if there is one."""
    with Publisher(kafka=kafka) as publisher:
        for key, value in given:
            publisher.publish(topic, value, key=key)
        if error:
            raise error


def test_what_is_published_arrives_and_the_handle_says_where(kafka, topics):
    """Value, key, headers, partition and timestamp as given; both ids are there (P1)."""
    topic = topics(partitions=2)
    with Publisher(kafka=kafka) as publisher:
        first = publisher.publish(topic, {"name": "Zoë"}, key="7").result(30)
        at = datetime(2026, 5, 6, tzinfo=UTC)
        handle = publisher.publish(
            topic,
            None,
            key=b"\xff",
            headers=[("a", "1"), ("a", None)],
            partition=1,
            timestamp=at,
            message_id="mine",
            correlation_id="story",
        )
        second = handle.result(30)
    found = {(one.partition(), one.offset()): one for one in records(kafka, topic, 2)}

    one = found[first.partition, first.offset]
    headers = dict(one.headers())
    assert one.value() == '{"name":"Zoë"}'.encode()
    assert one.key() == b"7"
    assert uuid.UUID(first.message_id).version == 7
    assert headers == {
        "message-id": first.message_id.encode(),
        "correlation-id": first.message_id.encode(),
    }
    two = found[second.partition, second.offset]
    assert (two.partition(), two.key(), two.value()) == (1, b"\xff", None)
    assert two.timestamp()[1] == round(at.timestamp() * 1000) == second.timestamp_ms
    assert two.headers() == [
        ("a", b"1"),
        ("a", None),
        ("message-id", b"mine"),
        ("correlation-id", b"story"),
    ]
    assert (handle.topic, handle.partition, handle.done, handle.error) == (topic, 1, True, None)


def test_ids_among_the_headers_are_kept_and_none_are_added_where_none_are_wanted(kafka, topics):
    """A record that is passed on stays the record that it was (P1, S3)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka) as publisher:
        publisher.publish(topic, b"", key="a", headers={"message-id": "old"})
        with pytest.raises(UsageError, match="twice"):
            publisher.publish(topic, b"", key="a", headers={"message-id": "a"}, message_id="b")
    with Publisher(kafka=kafka, ids=False) as publisher:
        publisher.publish(topic, b"", key="a", headers=[("x", b"1")])
        publisher.publish(topic, b"", key="a")
    kept, plain, bare = records(kafka, topic)

    assert kept.headers() == [("message-id", b"old"), ("correlation-id", b"old")]
    assert plain.headers() == [("x", b"1")]
    assert not bare.headers()


def test_bad_records_are_refused_before_anything_is_sent(kafka, topics):
    """Wrong names, types, partitions and keys: one sentence, and nothing in the topic (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka) as publisher:
        for wrong in (
            {"topic": "a topic"},
            {"topic": ""},
            {"topic": ["users"]},
            {"topic": None},
            {"topic": "x" * 250},
            {"key": None},
            {"key": 7},
            {"value": {1, 2}},
            {"partition": 1},
            {"partition": -1},
            {"partition": "0"},
            {"timestamp": 0},
            {"headers": {"a": 1}},
            {"message_id": ""},
            {"correlation_id": 5},
        ):
            given = {"topic": topic, "value": b"x", "key": "k"} | wrong
            with pytest.raises(UsageError):
                publisher.publish(**given)
        with pytest.raises(NotFoundError, match="does not exist"):
            publisher.publish(f"{topic}-nowhere", b"x", key="k")
        with pytest.raises(RefusedError, match="larger than the buffer"):
            publisher.publish(topic, b"x" * (65 << 20), key="k")
        with pytest.raises(UsageError, match="no transactions"):
            publisher.transaction()

    assert records(kafka, topic) == []


def test_a_topic_that_is_missing_is_not_made(kafka):
    """A mistyped name ends in an error, not in a topic (P1)."""
    name = f"missing-{uuid.uuid4().hex[:8]}"
    with Publisher(kafka=kafka) as publisher, pytest.raises(NotFoundError):
        publisher.publish(name, b"x", key="k")

    assert name not in AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=30).topics


def test_keyless_is_said_in_so_many_words(kafka, topics):
    """Without it a key is required (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka, keyless=True) as publisher:
        publisher.publish(topic, b"x")

    assert [one.key() for one in records(kafka, topic)] == [None]


def test_failures_nobody_looked_at_are_raised_at_the_end(kafka, topics):
    """The handle was thrown away; the error is not (P1). Its neighbours arrive."""
    topic = topics(partitions=1)
    big = os.urandom(2 << 20)
    with pytest.raises(NotDeliveredError, match="MSG_SIZE_TOO_LARGE") as caught:
        publish_all(kafka, topic, [("k", b"before"), ("big", big), ("k", b"after")])

    assert caught.value.count == 1
    (failed,) = caught.value.failures
    assert (failed.key, failed.topic, failed.partition) == (b"big", topic, None)
    assert [one.value() for one in records(kafka, topic)] == [b"before", b"after"]


def test_flush_raises_once_and_what_result_raised_is_not_raised_again(kafka, topics):
    """Each failure is told once, to whoever asks first (P1)."""
    topic = topics(partitions=1)
    big = os.urandom(2 << 20)
    with Publisher(kafka=kafka) as publisher:
        publisher.publish(topic, big, key="k")
        with pytest.raises(NotDeliveredError):
            publisher.flush()
        publisher.flush()
        handle = publisher.publish(topic, big, key="k")
        with pytest.raises(NotDeliveredError):
            handle.result(30)
        assert "MSG_SIZE_TOO_LARGE" in handle.error
        publisher.flush()


def test_an_error_of_the_body_is_not_hidden(kafka, topics):
    """What was not delivered besides is a note on it; what was published is sent (P1)."""
    topic = topics(partitions=1)
    given = [("k", b"sent"), ("k", os.urandom(2 << 20))]
    with pytest.raises(ZeroDivisionError) as caught:
        publish_all(kafka, topic, given, error=ZeroDivisionError)

    assert "not delivered" in caught.value.__notes__[0]
    assert [one.value() for one in records(kafka, topic)] == [b"sent"]


def test_a_close_that_is_interrupted_can_be_done_again(kafka, topics, monkeypatch):
    """Ctrl-C while it waits loses nothing that the next close, or the end, would not send (P1)."""
    topic = topics(partitions=1)
    publisher = Publisher(kafka=kafka)
    publisher.publish(topic, b"sent", key="k")
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "_empty", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publisher.close()
    publisher.close()

    assert [one.value() for one in records(kafka, topic)] == [b"sent"]


def interrupt(_timeout: float | None) -> None:
    raise KeyboardInterrupt


def test_a_small_buffer_slows_down_and_loses_nothing(kafka, topics):
    """More than fits under way: publish waits, BufferError is nobody's problem (P1)."""
    topic = topics(partitions=2)
    with Publisher(kafka=kafka, buffer_records=10, linger=0) as publisher:
        handles = [publisher.publish(topic, f"{n}", key=f"{n % 7}") for n in range(2_000)]
    found = records(kafka, topic, 2)

    assert Counter(one.value() for one in found) == Counter(f"{n}".encode() for n in range(2_000))
    assert {(h.partition, h.offset) for h in handles} == {
        (one.partition(), one.offset()) for one in found
    }
    last: dict[bytes, int] = {}
    for one in found:
        assert int(one.value()) > last.get(one.key(), -1)
        last[one.key()] = int(one.value())


def test_threads_share_one_publisher(kafka, topics):
    """Each thread's records arrive, once (P1)."""
    topic = topics(partitions=2)
    with Publisher(kafka=kafka) as publisher:

        def work(name: int) -> None:
            for number in range(500):
                publisher.publish(topic, f"{name}/{number}", key=f"{name}")

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    values = Counter(one.value().decode() for one in records(kafka, topic, 2))
    assert values == Counter(f"{name}/{number}" for name in range(4) for number in range(500))


def test_room_that_another_thread_made_meanwhile_is_used(kafka, topics, monkeypatch):
    """Full at first, and empty when it is looked at: a record that fits is not refused (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka) as publisher:
        produce, full = publisher._produce, [True]

        def filled_by_others(*args: object) -> None:
            if full:
                full.pop()
                raise BufferError
            produce(*args)

        monkeypatch.setattr(publisher, "_produce", filled_by_others)
        assert publisher.publish(topic, b"x", key="k").result(30).offset == 0


def test_a_closed_publisher_says_so(kafka, topics):
    """Publishing, flushing and transactions are refused; closing again is not (P1)."""
    topic = topics(partitions=1)
    publisher = Publisher(kafka=kafka)
    handle = publisher.publish(topic, b"x", key="k")
    publisher.close()
    publisher.close()

    assert handle.result(0).offset == 0
    for call in (publisher.flush, lambda: publisher.publish(topic, b"x", key="k")):
        with pytest.raises(UsageError, match="closed"):
            call()
    with pytest.raises(UsageError):
        publisher.__reduce__()


SCRIPT = """
import os, sys
from sideline import Publisher
kafka, topic = sys.argv[1:]
publisher = Publisher(kafka=kafka)
publisher.publish(topic, "parent", key="k")
child = os.fork()
if child == 0:
    try:
        publisher.publish(topic, "lost", key="k")
    except Exception as error:
        print(type(error).__name__, flush=True)
    with Publisher(kafka=kafka) as own:
        own.publish(topic, "child", key="k")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
publisher.publish(topic, os.urandom(2 << 20), key="k")
publisher.publish(topic, "last", key="k")
"""


def test_forks_and_ends_without_a_close_lose_nothing(kafka, topics):
    """A child is refused its parent's publisher; at exit all is sent, failures are said (P1)."""
    topic = topics(partitions=1)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), kafka, topic],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["UsageError"]
    assert "a record was not delivered" in ended.stderr
    values = [one.value() for one in records(kafka, topic)]
    assert sorted(values) == [b"child", b"last", b"parent"]


def test_kafka_out_of_reach_is_said_at_the_first_record(monkeypatch):
    """Not after two minutes in a queue (P1)."""
    monkeypatch.setattr(admin, "ANSWER_SECONDS", 1.0)
    with (
        Publisher(kafka="127.0.0.1:1", delivery_timeout="1s") as publisher,
        pytest.raises(KafkaUnreachableError),
    ):
        publisher.publish("users", b"x", key="k")


def test_a_topic_for_smaller_batches_is_refused(kafka, topics):
    """The broker would refuse whole batches, with records that are no larger than others (P1)."""
    topic = topics(partitions=1, max_message_bytes=20_000)
    with (
        Publisher(kafka=kafka) as publisher,
        pytest.raises(ConfigurationError, match="20,000 bytes") as caught,
    ):
        publisher.publish(topic, b"x", key="k")
    assert "batch_bytes=20000" in caught.value.hint

    with Publisher(kafka=kafka, batch_bytes=20_000, compression="none") as publisher:
        for _ in range(500):
            publisher.publish(topic, os.urandom(200), key="k")
    assert len(records(kafka, topic)) == 500


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_weaker_modes_deliver_while_nothing_breaks(kafka, topics, delivery):
    """And tell where each record is (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka, delivery=delivery) as publisher:
        handles = [publisher.publish(topic, f"{n}", key="k") for n in range(100)]

    assert [handle.offset for handle in handles] == list(range(100))
    assert [one.value() for one in records(kafka, topic)] == [f"{n}".encode() for n in range(100)]


# Transactions


def test_a_transaction_is_seen_as_a_whole_or_not_at_all(kafka, topics):
    """Committed at the end of the block, aborted when the block raises (P1)."""
    topic = topics(partitions=2)
    with Publisher(kafka=kafka, transactional_id=f"tx-{topic}") as publisher:
        with publisher.transaction():
            kept = [publisher.publish(topic, f"{n}", key=f"{n}") for n in range(10)]
        with pytest.raises(ZeroDivisionError), publisher.transaction():  # noqa: PT012
            for n in range(10):
                gone = publisher.publish(topic, f"not {n}", key=f"{n}")
            gone.result(30)
            raise ZeroDivisionError
        with publisher.transaction():
            publisher.publish(topic, "more", key="m")
    for number in range(2):
        until_over(kafka, topic, number)
    seen = [one.value().decode() for one in records(kafka, topic, 2)]

    assert sorted(seen) == sorted([*map(str, range(10)), "more"])
    assert all(handle.result(0).offset >= 0 for handle in kept)
    with pytest.raises(NotDeliveredError, match="aborted"):
        gone.result(0)


def test_nothing_is_published_outside_of_a_transaction(kafka, topics):
    """And no transaction inside another one (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka, transactional_id=f"tx-{topic}") as publisher:
        with pytest.raises(UsageError, match="transactions only"):
            publisher.publish(topic, b"x", key="k")
        with publisher.transaction(), pytest.raises(UsageError, match="open already"):
            publisher.transaction()


def test_a_record_that_fails_takes_its_transaction_along(kafka, topics):
    """Aborted, with the reason; the publisher goes on (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka, transactional_id=f"tx-{topic}") as publisher:
        with pytest.raises(PartialError, match="MSG_SIZE_TOO_LARGE"), publisher.transaction():  # noqa: PT012
            publisher.publish(topic, b"good", key="k")
            publisher.publish(topic, os.urandom(2 << 20), key="k")
        with publisher.transaction():
            publisher.publish(topic, b"again", key="k")

    until_over(kafka, topic)
    assert [one.value() for one in records(kafka, topic)] == [b"again"]


def test_a_second_publisher_with_the_id_puts_the_first_out(kafka, topics):
    """Fenced: said clearly, nothing of it is seen, and it stays out (P1)."""
    topic = topics(partitions=1)
    first = Publisher(kafka=kafka, transactional_id=f"tx-{topic}")
    second = Publisher(kafka=kafka, transactional_id=f"tx-{topic}")
    with first, second:
        with pytest.raises(FencedError, match="another publisher"), first.transaction():  # noqa: PT012
            first.publish(topic, b"first", key="k").result(30)
            with second.transaction():
                second.publish(topic, b"second", key="k")
        with pytest.raises(FencedError):
            first.transaction()

    until_over(kafka, topic)
    assert [one.value() for one in records(kafka, topic)] == [b"second"]


class Unclear:
    """A producer whose commit is carried out, and never answered."""

    def __init__(self, producer) -> None:
        self._producer = producer

    def __getattr__(self, name):
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def commit_transaction(self, timeout):
        self._producer.commit_transaction(timeout)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "nobody answers"))


def test_a_commit_that_nobody_answers_is_called_unclear(kafka, topics):
    """Neither done nor undone is claimed; the publisher is of no use any more (P1)."""
    topic = topics(partitions=1)
    with Publisher(kafka=kafka, transactional_id=f"tx-{topic}") as publisher:
        publisher._producer = Unclear(publisher._producer)
        with pytest.raises(UnclearCommitError, match="did not say"), publisher.transaction():
            publisher.publish(topic, b"maybe", key="k")
        with pytest.raises(UnclearCommitError):
            publisher.transaction()

    until_over(kafka, topic)
    assert [one.value() for one in records(kafka, topic)] == [b"maybe"]
