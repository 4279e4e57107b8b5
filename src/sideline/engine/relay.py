"""Sends the records of outboxes to Kafka, each exactly once for those who read committed records.

One transactional producer a partition, made when there is something to send. Every transaction
commits the number of its last record as metadata of a private group's offset: whoever takes the
partition next reads it after its own init, and knows what has been sent (K24).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from sideline.clients import throw_away
from sideline.crashpoints import reach
from sideline.homes.offsets import Offsets
from sideline.topics.refusals import culprits, refused

if TYPE_CHECKING:
    from sideline.engine.lease import Partition
    from sideline.ledger.outbox import Numbered

# No wait for Kafka is longer: the lease's other partitions wait meanwhile.
ANSWER_SECONDS = 5.0
INIT_SECONDS = 5.0
# What an owner that died left open is in the way of readers for so long at most.
TRANSACTION_MS = 15_000

PRODUCER: dict[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "linger.ms": 5,
    "transaction.timeout.ms": TRANSACTION_MS,
    "message.timeout.ms": 10_000,
    # The topic's own limit decides, not the client's.
    "message.max.bytes": 1_000_000_000,
    # A topic that is not there is no secret for long.
    "topic.metadata.propagation.max.ms": 2_000,
    "queue.buffering.max.messages": 100_000,
    "partitioner": "murmur2_random",
    "log_level": 0,
}

log = logging.getLogger(__name__)


class NotSent(Exception):  # noqa: N818 - a fact, not an error
    """Nothing of a batch was sent; it will be tried again."""

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.number = number
        """The record that Kafka refuses, if it is one."""


def private_group(pipeline: str) -> str:
    """The group under which outboxes are remembered; no pipeline's name begins like this."""
    return f"__sideline.outbox.{pipeline}"


class Sender:
    """What sends the records of one partition's outbox."""

    def __init__(
        self,
        kafka: Mapping[str, Any],
        pipeline: str,
        partition: Partition,
        *,
        remembers: bool = False,
    ) -> None:
        self._kafka = dict(kafka)
        self._partition = partition
        self._group = private_group(pipeline)
        # Topics and pipelines have no slash in their names.
        self._id = f"sideline/{pipeline}/{partition.topic}/{partition.number}"
        self._producer: Producer | None = None
        self._offsets = Offsets()
        self._consumer: Consumer | None = None
        self._one_by_one = False
        self._flight: Future[object] | None = None
        self.sent = 0
        """The last number that it knows to be sent, marked or not."""
        self.word: tuple[int, int] | None = None
        """Number and stamp of the last record sent, as Kafka knew them after the init."""
        self.trusted = False
        """Whether the partition was seen to be ours after the init."""
        self._remembers = self._watched = remembers
        self.places: dict[int, tuple[int, int]] = {}
        """Partition and offset that Kafka gave to the records last sent, by their number."""

    @property
    def ready(self) -> bool:
        """Whether its producer is made, and not known to be worth nothing."""
        return self._producer is not None

    # Steps that wait for Kafka, in a thread: one at a time

    def launch(self, threads: Executor, step: Callable[[], object]) -> None:
        """Let a thread take a step."""
        self._flight = threads.submit(step)

    @property
    def under_way(self) -> bool:
        """Whether a step was begun and nobody has asked yet what came of it."""
        return self._flight is not None

    @property
    def landed(self) -> bool:
        """Whether the step is over."""
        return self._flight is not None and self._flight.done()

    def land(self) -> None:
        """Wait for the step, if there is one; NotSent if nothing came of it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.result()

    def begin(self) -> None:
        """Make the producer, whoever had one before, and read the word of the last record sent.

        Only for whoever has just seen that the partition is its own: it fences the owner before.
        """
        self.drop()
        self.places.clear()
        own: dict[str, Any] = {"transactional.id": self._id}
        if self._one_by_one:
            # A batch of several may be too large where each of them is not.
            own["batch.num.messages"] = 1
        self._producer = Producer({**self._kafka, **PRODUCER, **own})
        if self._consumer is None:
            self._consumer = Consumer(
                {
                    **self._kafka,
                    "group.id": self._group,
                    "enable.auto.commit": False,
                    # Stable offsets only: those of transactions that are over.
                    "isolation.level": "read_committed",
                    "log_level": 0,
                }
            )
        try:
            self._producer.init_transactions(INIT_SECONDS)
            reach("after-outbox-init")
            spot = TopicPartition(self._partition.topic, self._partition.number)
            (found,) = self._consumer.committed([spot], ANSWER_SECONDS)
        except KafkaException as error:
            self.drop()
            raise NotSent(_told(error)) from error
        if found.error is not None:
            self.drop()
            raise NotSent(str(found.error))
        self.word = _parse(found.metadata)

    def send(self, records: Sequence[Numbered]) -> int:
        """Send records in one transaction; returns the last one's number."""
        producer, consumer = self._producer, self._consumer
        if producer is None or consumer is None:
            message = "the producer was not begun"
            raise RuntimeError(message)
        self.places.clear()
        try:
            self._transact(producer, consumer, records)
        except NotSent:
            # Which of them is refused is found out by asking for each: dearer, and rarely needed.
            self._watched = True
            raise
        self._watched = self._remembers
        self._one_by_one = False
        self.sent = records[-1].number
        return self.sent

    def _transact(
        self,
        producer: Producer,
        consumer: Consumer,
        records: Sequence[Numbered],
    ) -> None:
        failed: dict[int, KafkaError] = {}
        last = records[-1]
        word = TopicPartition(
            self._partition.topic,
            self._partition.number,
            last.number,
            metadata=f"{last.number}:{last.stamp}",
        )
        try:
            producer.begin_transaction()
            self._produce_all(producer, records, failed if self._watched else None)
            reach("between-produce-and-commit")
            members = [consumer.consumer_group_metadata()]
            self._offsets.add(producer, word, members, ANSWER_SECONDS)
            producer.commit_transaction(ANSWER_SECONDS)
        except KafkaException as error:
            # Whether it was committed only a successor can tell. And to one that was aborted the
            # first records of the next transaction get lost.
            self.drop()
            raise self._not_sent(error, failed) from error
        if self._remembers:
            # Where Kafka put the records is told to whoever asks.
            producer.poll(0)

    def _produce_all(
        self,
        producer: Producer,
        records: Sequence[Numbered],
        failed: dict[int, KafkaError] | None,
    ) -> None:
        # Many, in a thread that takes its time from the slices: what most of them need, and no
        # call more.
        produce, plain = producer.produce, failed is None
        for numbered in records:
            record = numbered.record
            if plain and record.timestamp_ms is None:
                # -1: as the key says.
                to = -1 if record.partition is None else record.partition
                try:
                    produce(
                        record.topic,
                        record.value,
                        record.key,
                        to,
                        headers=list(record.headers),
                    )
                except BufferError:
                    pass
                else:
                    continue
            self._produce(producer, numbered, failed)

    def _produce(
        self, producer: Producer, numbered: Numbered, failed: dict[int, KafkaError] | None
    ) -> None:
        number, _, record = numbered
        where: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        if record.timestamp_ms is not None:
            where["timestamp"] = record.timestamp_ms
        if failed is not None:
            where["on_delivery"] = self._acknowledged(number, failed)
        while True:
            try:
                producer.produce(
                    record.topic,
                    key=record.key,
                    value=record.value,
                    headers=list(record.headers),
                    **where,
                )
            except BufferError:
                producer.poll(0.1)
            except KafkaException as error:
                if failed is not None:
                    failed[number] = error.args[0]
                raise
            else:
                return

    def _acknowledged(
        self, number: int, failed: dict[int, KafkaError]
    ) -> Callable[[KafkaError | None, Message], None]:
        def acknowledged(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed[number] = error
            elif self._remembers:
                self.places[number] = (message.partition() or 0, message.offset() or 0)

        return acknowledged

    def _not_sent(self, error: KafkaException, failed: dict[int, KafkaError]) -> NotSent:
        blamed = culprits(failed, alone=self._one_by_one)
        if blamed:
            number = min(blamed)
            return NotSent(blamed[number], number)
        if not (some := refused(failed)):
            return NotSent(_told(error))
        self._one_by_one = True
        return NotSent(f"a batch was refused: {next(iter(some.values())).str()}")

    def drop(self) -> None:
        """Throw the producer away: the next one fences what it may still have under way."""
        self.trusted = False
        if self._producer is not None:
            throw_away(self._producer)
            self._producer = None
            self._offsets.rest()

    def close(self) -> None:
        """Leave Kafka, once what is under way is over."""
        try:
            self.land()
        except NotSent as refusal:
            log.debug("not sent in the end: %s", refusal)
        self.drop()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def _parse(metadata: str | None) -> tuple[int, int] | None:
    number, _, stamp = (metadata or "").partition(":")
    if not (number.isdecimal() and stamp.isdecimal()):
        return None
    return int(number), int(stamp)


def _told(error: KafkaException) -> str:
    reason = error.args[0]
    return str(reason.str()) if isinstance(reason, KafkaError) else str(reason)
