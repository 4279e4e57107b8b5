"""What is published: user events of about 200 bytes, or larger ones, by key."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Iterator

import orjson
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

# Twenty thousand users who change again and again: measures folding as much as engines.
REPEATED_KEYS = 20_000
EVENT_BYTES = 200
# A prime: keys come in an order that is neither sorted nor clustered.
_STRIDE = 7_919
TIME_ORDERED, RANDOM = 7, 4
_EPOCH_MS, _PER_MS = 1_790_000_000_000, 10
_TOPIC_SECONDS = 30
_REPORT_EVERY = 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """A topic full of events: how many, over how many partitions and keys, how large."""

    name: str
    events: int
    partitions: int
    keys: int
    size: int = EVENT_BYTES
    # Of a thousand events, how many belong to one hot key.
    hot_per_mille: int = 0
    # Which message ids the events carry: none, those that grow with time (7), or random ones (4).
    ids: int = 0

    def headers(self, index: int) -> list[tuple[str, bytes]] | None:
        """The message id of the event at ``index``, as text, if it carries one."""
        return [("message-id", str(self.message_id(index)).encode())] if self.ids else None

    def message_id(self, index: int) -> uuid.UUID:
        """The id of the message that the event at ``index`` brings."""
        drawn = hashlib.sha256(f"{self.name}{index}".encode()).digest()[:16]
        if self.ids == TIME_ORDERED:
            drawn = (_EPOCH_MS + index // _PER_MS).to_bytes(6, "big") + drawn[6:]
        # By hand: not every Python's uuid knows version 7.
        versioned = bytes([*drawn[:6], drawn[6] & 0x0F | self.ids << 4, drawn[7]])
        varied = bytes([drawn[8] & 0x3F | 0x80, *drawn[9:]])
        return uuid.UUID(bytes=versioned + varied)

    def event(self, index: int) -> tuple[int, bytes, bytes]:
        """Partition, key and value of the event at ``index``; a key stays in one partition."""
        if self.hot_per_mille and index % 1000 < self.hot_per_mille:
            number = self.keys
        else:
            number = index * _STRIDE % self.keys
        key = f"user-{number:08d}"
        return number % self.partitions, key.encode(), user(key, index, self.size)

    def all(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Every event, in the order in which it is published."""
        return map(self.event, range(self.events))


def user(key: str, index: int, size: int) -> bytes:
    """One user as JSON of ``size`` bytes; the name differs in every event."""
    body = {
        "id": key,
        "name": f"Zoey {index}",
        "email": f"{key}@mail.example",
        "seq": index,
        "about": "",
    }
    room = size - len(orjson.dumps(body))
    # Text that does not compress to nothing, cheap to make.
    filler = hashlib.sha256(key.encode()).hexdigest()
    body["about"] = (filler * (1 + max(room, 0) // len(filler)))[: max(room, 0)]
    return orjson.dumps(body)


def create_topic(bootstrap: str, name: str, partitions: int, **config: str) -> None:
    """Create an empty topic and wait until the broker has it."""
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
    admin = _admin(bootstrap)  # held until the answer: it ends with its last reference
    for future in admin.create_topics([topic]).values():
        future.result(timeout=_TOPIC_SECONDS)


def delete_topic(bootstrap: str, name: str) -> None:
    """Delete a topic and wait until it is gone."""
    admin = _admin(bootstrap)
    for future in admin.delete_topics([name]).values():
        future.result(timeout=_TOPIC_SECONDS)


def _admin(bootstrap: str) -> AdminClient:
    # Without librdkafka's chatter about its own end.
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 3})


def publish(bootstrap: str, topic: Topic, progress: Callable[[int], None]) -> None:
    """Create the topic and fill it; ``progress`` is told how many events were handed over."""
    create_topic(bootstrap, topic.name, topic.partitions)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
        }
    )
    for count, (partition, key, value) in enumerate(topic.all(), 1):
        _produce(producer, topic.name, partition, key, value, topic.headers(count - 1))
        if count % _REPORT_EVERY == 0:
            progress(count)
    if producer.flush(_TOPIC_SECONDS):
        message = f"the broker did not take all events of {topic.name} in time"
        raise KafkaException(message)
    progress(topic.events)


def _produce(  # noqa: PLR0913, PLR0917 - what a record is made of
    producer: Producer,
    topic: str,
    partition: int,
    key: bytes,
    value: bytes,
    headers: list[tuple[str, bytes]] | None,
) -> None:
    while True:
        try:
            producer.produce(topic, value=value, key=key, partition=partition, headers=headers)
        except BufferError:
            producer.poll(0.1)
        else:
            return
