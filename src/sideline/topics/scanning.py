"""Reads a topic from one end to the other, or single records of it, and moves nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from sideline.engine.lease import Partition
from sideline.engine.reader import readable_headers
from sideline.errors import KafkaUnreachableError
from sideline.events import Event

# Records that are handed over together, and what they may weigh.
BATCH_RECORDS = 1_000
BATCH_BYTES = 8 * 1024 * 1024
# Without a record or the end of a partition for so long, nobody answers.
PATIENCE_SECONDS = 30.0


def scan(
    properties: Mapping[str, Any], begins: Mapping[Partition, int], ends: Mapping[Partition, int]
) -> Iterator[list[Event]]:
    """Every committed record between two offsets of each partition, in batches."""
    left = {spot: end for spot, end in ends.items() if begins[spot] < end}
    if not left:
        return
    consumer = _consumer(properties)
    try:
        consumer.assign([TopicPartition(spot.topic, spot.number, begins[spot]) for spot in left])
        yield from _batches(consumer, left)
    finally:
        consumer.close()


def pick(properties: Mapping[str, Any], wanted: Iterable[tuple[Partition, int]]) -> Iterator[Event]:
    """Single records, by their offsets; those that are gone are left out.

    One behind a transaction that is still open is waited for: it is there, only not to be read yet.
    """
    spots: dict[Partition, list[int]] = {}
    for spot, offset in wanted:
        spots.setdefault(spot, []).append(offset)
    if not spots:
        return
    consumer = _consumer(properties)
    try:
        for spot, offsets in spots.items():
            yield from _pick(consumer, spot, sorted(set(offsets)))
    finally:
        consumer.close()


def _consumer(properties: Mapping[str, Any]) -> Consumer:
    return Consumer(
        {
            **properties,
            # A group of nobody: nothing is joined and nothing is committed.
            "group.id": "sideline-scan",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": 16 * 1024,
            "log_level": 0,
        }
    )


def _batches(consumer: Consumer, left: dict[Partition, int]) -> Iterator[list[Event]]:
    batch: list[Event] = []
    size = 0
    for spot, event, _ in _records(consumer, left):
        if event is not None and event.offset < left.get(spot, 0):
            batch.append(event)
            size += len(event.value or b"") + len(event.key or b"")
        if event is None or event.offset + 1 >= left.get(spot, 0):
            left.pop(spot, None)
        if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _records(
    consumer: Consumer, left: Mapping[Partition, int]
) -> Iterator[tuple[Partition, Event | None, int]]:
    """Records as they come, with their offsets; None at the end of a partition.

    Until nothing is left.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while left:
        messages = consumer.consume(500, 0.5)
        if messages:
            until = time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() > until:
            silence = "Kafka has not answered for a while."
            raise KafkaUnreachableError(silence, hint="Check SIDELINE_KAFKA, and try again.")
        for message in messages:
            spot = Partition(message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is None:
                yield spot, event_of(message), message.offset() or 0
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                yield spot, None, message.offset() or 0
            elif error.fatal() or not (error.retriable() or error.code() < 0):
                raise KafkaException(error)


def _pick(consumer: Consumer, spot: Partition, offsets: list[int]) -> Iterator[Event]:
    wanted = set(offsets)
    at = offsets[0]
    while wanted:
        consumer.assign([TopicPartition(spot.topic, spot.number, at)])
        for _, event, offset in _records(consumer, {spot: 0}):
            if event is None:
                if not _is_hidden(consumer, spot, max(wanted), offset):
                    return
                continue
            wanted -= {offset for offset in wanted if offset < event.offset}
            if event.offset in wanted:
                wanted.discard(event.offset)
                yield event
            if not wanted:
                return
            if min(wanted) > event.offset + BATCH_RECORDS:
                # Far away: ask for it rather than read on.
                at = min(wanted)
                break


def _is_hidden(consumer: Consumer, spot: Partition, offset: int, committed: int) -> bool:
    """Whether a record stands behind the end of what is committed, and before that of the log."""
    place = TopicPartition(spot.topic, spot.number)
    _, end = consumer.get_watermark_offsets(place, cached=True)
    return committed <= offset < end


def event_of(message: Message) -> Event:
    """A message as an event."""
    kind, stamp = message.timestamp()
    headers, _ = readable_headers(message)
    return Event(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        stamp if kind else -1,
        message.key(),
        message.value(),
        headers,
    )
