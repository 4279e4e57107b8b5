"""Bytes of every kind: each event is applied, or kept exactly as it was."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from sideline.engine.reader import UNREADABLE_NAME
from tests.support.raw_producer import RawProducer

LONG_MAX = 2**63 - 1
TABLE = "create table fitting (partition int, at bigint, name text not null)"
WORDS = [
    "", " ", "a", "Zo\u00eb", 'quo"te', "back\\slash", "{braces}", "a,b", "new\nline", "tab\t",
    "NULL", "null", "\\x00", "%s", "%(name)s", "'; drop table fitting; --", "\u202e", "\U0001f600",
    "\ufffd", "\x7f", "\x01", "x" * 5_000,
]  # fmt: skip
BLOBS = [
    b"", b"\0", b"\xff\xfe", b"NULL", b"\\x41", b'"', b"{}", b"a,b", "\u00eb".encode(), b"\xc3",
    b"\xed\xa0\x80", b"x" * 20_000,
]  # fmt: skip
MISFITS = [
    None, b"", b"\xff", b"\0", b"null", b"{}", b"[]", b"0", b'"name"', b'{"name": null}',
    b'{"name": 7}', b'{"name": ["x"]}', b'{"name": "\\u0000"}', b'{"name": "\\ud800"}',
    b'{"name": 1e999}', b'{"name": "x"', b"[" * 100_000, b'{"name": "\xff"}', b"NaN",
    b'{"name": ' + b"9" * 5_000 + b"}",
]  # fmt: skip
# Few enough that many events have a predecessor.
KEYS = [*BLOBS, *(bytes([255, n % 256, n // 256]) for n in range(3_000))]
# Zero is the producer's word for now; the last ones are beyond what Python calls a time.
STAMPS = [0, 0, -1, 1, 123_456, 253_402_300_800_000, 2**62, LONG_MAX]


class Record(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    stamp: int


class Chance(random.Random):
    """Records at random; pytest-randomly prints the seed, and sets it."""

    def blob(self):
        return self.choice([self.choice(BLOBS), self.randbytes(self.randrange(40))])

    def record(self):
        return Record(self.key(), self.value(), self.headers(), self.choice(STAMPS))

    def key(self):
        if self.random() < 0.1:
            return None
        return self.choice(KEYS)

    def value(self):
        if self.random() < 0.7:
            return json.dumps({"name": self.choice(WORDS)}).encode()
        return self.choice([self.choice(MISFITS), self.blob()])

    def headers(self):
        if self.random() < 0.5:
            return []
        count = self.choice([1, 2, 5, 2_000 if self.random() < 0.01 else 3])
        values = [None, b"", b"v"]
        return [
            (self.choice(WORDS), self.choice([*values, self.blob()] if count < 10 else values))
            for _ in range(count)
        ]


def produce(ground, records):
    """Send records; what was sent, by place."""
    sent = {}

    def keep(record):
        def delivered(error, message):
            assert error is None, error
            sent[message.partition(), message.offset()] = record

        return delivered

    producer = Producer({"bootstrap.servers": ground.kafka, "log_level": 0})
    for record in records:
        producer.produce(
            ground.topic,
            key=record.key,
            value=record.value,
            headers=record.headers,
            timestamp=record.stamp,
            on_delivery=keep(record),
        )
        producer.poll(0)
    assert producer.flush(60) == 0
    return sent


def stamps(ground, places):
    """When Kafka says that records were made."""
    consumer = Consumer({"bootstrap.servers": ground.kafka, "group.id": "stamps"})
    consumer.assign([TopicPartition(ground.topic, number, 0) for number in ground.partitions])
    found = {}
    while len(found) < len(places):
        for message in consumer.consume(1_000, 1):
            assert message.error() is None
            found[message.partition(), message.offset()] = message.timestamp()[1]
    consumer.close()
    return found


def parked(ground):
    """What waits, by place: key, value, headers, time."""
    rows = ground.query(
        'select partition, "offset", key, value, header_names, header_values, timestamp_ms'
        " from sideline.events where state = 'parked'"
    )
    return {
        (partition, offset): (key, value, list(zip(names, values, strict=True)), stamp)
        for partition, offset, key, value, names, values, stamp in rows
    }


def applied(ground):
    return {
        (partition, offset): name
        for partition, offset, name in ground.query("select partition, at, name from fitting")
    }


def check(ground, sent):
    """Nothing lost, nothing twice, nothing overtaken, everything as it was."""
    effects, waiting = applied(ground), parked(ground)
    assert effects.keys() | waiting.keys() == sent.keys()
    assert not effects.keys() & waiting.keys()
    assert ground.query("select count(*) from fitting") == [(len(effects),)]
    made = stamps(ground, sent)
    for place, found in waiting.items():
        record = sent[place]
        stamp = record.stamp or made[place]
        assert found == (record.key, record.value, record.headers, stamp), place
    first = defaultdict(lambda: LONG_MAX)
    for partition, offset in waiting:
        name = (partition, sent[partition, offset].key)
        first[name] = min(first[name], offset)
    for (partition, offset), name in effects.items():
        record = sent[partition, offset]
        said = json.loads(record.value)["name"]
        # PostgreSQL takes some other things for text.
        assert name == said or not isinstance(said, str)
        assert record.key is None or offset < first[partition, record.key]
    accounts = ground.accounts().values()
    assert sum(row.consumed for row in accounts) == len(sent)
    assert sum(row.parked for row in accounts) == len(waiting)


@pytest.mark.parametrize(
    ("count", "options"),
    [(10_000, {"slice_size": 700}), (1_500, {"slice_size": 90, "concurrency": 3})],
    ids=["one by one", "side by side"],
)
def test_bytes_of_every_kind(grounds, count, options):
    """Nothing lost, nothing raised, what fails is kept exactly (F4, F13, F14)."""
    ground = grounds(
        partitions=3,
        topic={"message_timestamp_after_max_ms": LONG_MAX},
        handler="fitting",
        guard_off=True,
        **options,
    )
    ground.query(TABLE)
    chance = Chance(random.randrange(10**9))
    sent = produce(ground, [chance.record() for _ in range(count)])
    (report,) = ground.run(ground.lease(seconds=120))
    assert report.failure is None
    assert report.trouble is None
    check(ground, sent)
    assert len(parked(ground)) > count / 10
    assert len(applied(ground)) > count / 10


@pytest.mark.parametrize(
    "options", [{}, {"handler": "insert"}, {"concurrency": 3}, {"slice_size": 1}], ids=str
)
def test_header_names_that_are_no_text(grounds, options):
    """Python's client breaks on them; it is the failure of their event alone (F14)."""
    ground = grounds(**{"handler": "record", "slice_size": 5} | options)
    bad, fine = [(b"fine", b"1"), (b"\xff\xfe", b"2"), (b"", None)], [(b"fine", b"1")]
    producer = RawProducer(ground.kafka)
    for key, headers in [("a", fine), ("b", bad), ("a", fine), ("b", fine), ("a", bad), ("c", [])]:
        producer.produce(ground.topic, key.encode(), b"value", headers)
    producer.close()
    (report,) = ground.run()
    assert report.failure is None
    assert [place.offset for place in ground.effects()] == [0, 2, 5]
    waiting = parked(ground)
    kept = [("fine", b"1"), (UNREADABLE_NAME, b"2"), ("", None)]
    assert {place: headers for place, (_, _, headers, _) in waiting.items()} == {
        (0, 1): kept,
        (0, 3): [("fine", b"1")],
        (0, 4): kept,
    }
    rows = ground.query("select error, message from sideline.events where why = 'failed'")
    assert {error for error, _ in rows} == {"UnicodeError"}
    # The next lease, in another process, finds them done.
    (report,) = ground.run()
    assert report.failure is None


def test_header_names_with_a_nul(grounds):
    """librdkafka's names end there: what stands before it is kept, and nothing stops (F13, F14)."""
    ground = grounds(handler="failing")
    names = [(b"\0", b"1"), (b"a\0b", b"2"), (b"a\0\xff", None)]
    producer = RawProducer(ground.kafka)
    producer.produce(ground.topic, b"a", b"bad", names)
    producer.produce(ground.topic, b"b", b"fine", names)
    producer.close()
    (report,) = ground.run()
    assert report.failure is None
    assert [place.offset for place in ground.effects()] == [1]
    ((_, _, headers, _),) = parked(ground).values()
    assert headers == [("", b"1"), ("a", b"2"), ("a", None)]


def test_an_event_that_cannot_be_read_blocks_like_any_other(grounds):
    """Until somebody sets it aside by hand (F6, F14)."""
    ground = grounds(handler="record", block=True)
    producer = RawProducer(ground.kafka)
    producer.produce(ground.topic, b"a", b"1", [(b"\xff", b"")])
    producer.produce(ground.topic, b"b", b"2")
    producer.close()
    state = "select next_offset, stuck_at from sideline.progress"
    ground.run_until(
        lambda: ground.query(state) == [(0, 0)],
        what="the event that blocks",
        lease=lambda: ground.lease(seconds=2),
    )
    ground.query("update sideline.progress set park_at = 0, park_reason = 'known', due_at = null")
    ground.run()
    assert [place.offset for place in ground.parked()] == [0]
    assert [place.offset for place in ground.effects()] == [1]
