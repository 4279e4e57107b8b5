"""Read a topic to its end."""

from __future__ import annotations

from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from tests.support.waiting import patiently, wait_for


def until_over(kafka: str, topic: str, partition: int = 0, **properties: Any) -> None:
    """Wait until no transaction is open in a partition, and readers see what was committed.

    A broker says that a transaction is over before that.
    """
    settings = {"bootstrap.servers": kafka, "log_level": 0, **properties, "group.id": "reader"}
    levels = ("read_committed", "read_uncommitted")
    consumers = [Consumer({**settings, "isolation.level": level}) for level in levels]
    spot = TopicPartition(topic, partition)

    def is_over() -> bool:
        seen, written = (
            patiently(partial(consumer.get_watermark_offsets, spot, timeout=30))[1]
            for consumer in consumers
        )
        return bool(seen == written)

    try:
        wait_for(is_over, what=f"the end of the transactions in {topic}/{partition}")
    finally:
        for consumer in consumers:
            consumer.close()


def records(
    kafka: str, topic: str, partitions: int = 1, *, committed: bool = True
) -> list[Message]:
    """Everything in the topic, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found, ends = [], set()
    try:
        while len(ends) < partitions:
            message = consumer.poll(60)
            assert message is not None, "Kafka is silent"
            if message.error() is None:
                found.append(message)
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ends.add(message.partition())
    finally:
        consumer.close()
    return sorted(found, key=lambda one: (one.partition(), one.offset()))
