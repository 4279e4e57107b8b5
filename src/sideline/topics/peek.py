"""Looks at single events without moving anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from sideline.engine.lease import Partition

PEEK_SECONDS = 5.0


def timestamps(properties: Mapping[str, Any], at: Mapping[Partition, int]) -> dict[Partition, int]:
    """When the first event from each offset on was made, in milliseconds; absent if unknown."""
    if not at:
        return {}
    consumer = Consumer(
        {
            **properties,
            # A group of nobody: nothing is joined and nothing is committed.
            "group.id": "sideline-peek",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.message.max.bytes": 64 * 1024,
            "log_level": 0,
        }
    )
    try:
        return _read(consumer, dict(at))
    except KafkaException:
        return {}
    finally:
        consumer.close()


def _read(consumer: Consumer, at: dict[Partition, int]) -> dict[Partition, int]:
    consumer.assign(
        [TopicPartition(spot.topic, spot.number, offset) for spot, offset in at.items()]
    )
    found: dict[Partition, int] = {}
    wanted = set(at)
    until = time.monotonic() + PEEK_SECONDS
    while wanted and time.monotonic() < until:
        message = consumer.poll(0.2)
        if message is None:
            continue
        spot = Partition(message.topic() or "", message.partition() or 0)
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                wanted.discard(spot)
            continue
        if spot in wanted:
            wanted.discard(spot)
            found[spot] = message.timestamp()[1]
            consumer.incremental_unassign([TopicPartition(spot.topic, spot.number)])
    return found
