"""Slices as transactions of Kafka: records, and the offset with its number, all or nothing.

One transactional producer a partition: a new owner's init fences the one before. Whatever goes
wrong in a transaction, its producer is thrown away; the next one's init ends what the old one left
open, and the committed offset says what became of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from sideline.homes.numbers import Shown, shown
from sideline.homes.offsets import Offsets
from sideline.leaving import MESSAGE_ID, Plain, Record
from sideline.topics.refusals import culprits, refused

if TYPE_CHECKING:
    from sideline.engine.lease import Partition

ANSWER_SECONDS = 10.0
INIT_SECONDS = 15.0
# No handler runs inside a transaction: only Kafka itself is waited for.
COMMIT_SECONDS = 15.0
# What an owner that died left open is in the way of readers for so long at most.
TRANSACTION_MS = 20_000
# The broker completes a transaction after it has said so. Whoever begins the next one before that
# waits for 0.1 s and more (CONCURRENT_TRANSACTIONS): a little patience is quicker.
PATIENCE_SECONDS = 0.02
# Brokers forget offsets of groups without members after a week.
REFRESH_SECONDS = 12 * 3600.0

PRODUCER: dict[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "linger.ms": 5,
    "transaction.timeout.ms": TRANSACTION_MS,
    "message.timeout.ms": 12_000,
    # The topic's own limit decides, not the client's.
    "message.max.bytes": 1_000_000_000,
    "topic.metadata.propagation.max.ms": 2_000,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 1_048_576,
    "partitioner": "murmur2_random",
    "log_level": 0,
}

log = logging.getLogger(__name__)


class Unsent(Exception):  # noqa: N818 - a fact, not an error
    """Whether a slice was published only its successor can tell; or it was not, for sure."""

    def __init__(self, reason: str, refused: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.refused = refused or {}
        """Why Kafka refuses records, by their place among those of the slice."""


class Sent(NamedTuple):
    """Where Kafka put a record."""

    partition: int
    offset: int


def home_group(pipeline: str) -> str:
    """The group whose offsets are the truth; no pipeline's name begins like this."""
    return f"__sideline.home.{pipeline}"


class Groups:
    """The two groups under which offsets are committed: one for us, a copy for everybody else."""

    def __init__(self, kafka: Mapping[str, Any], pipeline: str) -> None:
        own = {"enable.auto.commit": False, "log_level": 0}
        # Stable offsets only: those of transactions that are over.
        stable = {"group.id": home_group(pipeline), "isolation.level": "read_committed"}
        self._private = Consumer({**kafka, **own, **stable})
        # A run that applies a range again has no group that anybody would look for.
        self._public = None if "@" in pipeline else Consumer({**kafka, **own, "group.id": pipeline})

    @property
    def members(self) -> list[Any]:
        """What a transaction has to know of each group."""
        both = [self._private, *([self._public] if self._public is not None else [])]
        return [consumer.consumer_group_metadata() for consumer in both]

    def shown(self, partition: Partition) -> Shown:
        """What Kafka shows of a partition, once every transaction on it is over."""
        spot = TopicPartition(partition.topic, partition.number)
        (found,) = self._private.committed([spot], ANSWER_SECONDS)
        if found.error is not None:
            raise KafkaException(found.error)
        return shown(found.offset, found.metadata)

    def close(self) -> None:
        """Leave Kafka."""
        self._private.close()
        if self._public is not None:
            self._public.close()


class Transactor:
    """The transactions of one partition."""

    def __init__(
        self,
        kafka: Mapping[str, Any],
        pipeline: str,
        partition: Partition,
        groups: Groups,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._kafka = dict(kafka)
        self._partition = partition
        self._groups = groups
        self._pause = pause
        # Topics and pipelines have no slash in their names.
        self._id = f"sideline.home/{pipeline}/{partition.topic}/{partition.number}"
        self._producer: Producer | None = None
        self._offsets = Offsets()
        self._blames = False
        """Whether each record is asked after: the last transaction was refused."""
        self._one_by_one = False
        self._over_at = 0.0
        self._spoke_at = float("-inf")
        self.sent: dict[int, Sent] = {}
        """Where Kafka put the records that were asked after, by their place."""

    @property
    def ready(self) -> bool:
        """Whether its producer is made, and not known to be worth nothing."""
        return self._producer is not None

    @property
    def outdated(self) -> bool:
        """Whether brokers might forget the offsets: nobody here has written them for long."""
        return time.monotonic() - self._spoke_at > REFRESH_SECONDS

    def begin(self) -> None:
        """Make the producer, whoever had one before.

        Only for whoever has just seen that the partition is its own: it fences the owner before.
        """
        self.drop()
        own: dict[str, Any] = {"transactional.id": self._id}
        if self._one_by_one:
            # A batch of several may be too large where each of them is not.
            own["batch.num.messages"] = 1
        producer = Producer({**self._kafka, **PRODUCER, **own})
        try:
            producer.init_transactions(INIT_SECONDS)
        except KafkaException as error:
            raise Unsent(_told(error)) from error
        self._producer = producer

    def shown(self) -> Shown:
        """What Kafka shows of the partition."""
        try:
            return self._groups.shown(self._partition)
        except KafkaException as error:
            raise Unsent(_told(error)) from error

    def send(self, records: Sequence[Plain | Record], offset: int, word: str) -> None:
        """One slice. Raises `Unsent` where it is not known to be committed."""
        producer = self._producer
        if producer is None:
            message = "the producer was not begun"
            raise RuntimeError(message)
        wait = self._over_at + PATIENCE_SECONDS - time.monotonic()
        if wait > 0:
            self._pause(wait)
        failed: dict[int, KafkaError] = {}
        self.sent.clear()
        spot = TopicPartition(self._partition.topic, self._partition.number, offset, metadata=word)
        try:
            producer.begin_transaction()
            self._produce(producer, records, failed)
            if self._one_by_one:
                self._wait_for_a_refusal(producer, failed)
            reach("kafka-produced")
            self._offsets.add(producer, spot, self._groups.members, ANSWER_SECONDS)
            reach("before-kafka-commit")
            producer.commit_transaction(COMMIT_SECONDS)
        except KafkaException as error:
            # Whether it was committed, and whether an abort would be, only its successor can tell.
            self.drop()
            raise self._unsent(error, failed) from error
        producer.poll(0)
        self._blames = self._one_by_one = False
        self._over_at = self._spoke_at = time.monotonic()
        reach("after-kafka-commit")

    def _produce(
        self,
        producer: Producer,
        records: Sequence[Plain | Record],
        failed: dict[int, KafkaError],
    ) -> None:
        produce, blames = producer.produce, self._blames
        for place, record in enumerate(records):
            if type(record) is not Plain:
                self._produce_one(producer, place, record, failed)  # type: ignore[arg-type]
                continue
            if not blames:
                try:
                    produce(
                        record.topic, record.value, record.key, headers=[(MESSAGE_ID, record.id)]
                    )
                except BufferError:
                    producer.poll(0.1)
                else:
                    continue
            self._produce_one(producer, place, record.record, failed)

    def _wait_for_a_refusal(self, producer: Producer, failed: dict[int, KafkaError]) -> None:
        """Do not commit what cannot be: the rest would be waited for until its time is over."""
        until = time.monotonic() + COMMIT_SECONDS
        while len(producer) and not failed and time.monotonic() < until:
            producer.poll(0.1)
        if failed:
            raise KafkaException(failed[min(failed)])

    def _produce_one(
        self, producer: Producer, place: int, record: Record, failed: dict[int, KafkaError]
    ) -> None:
        more: dict[str, Any] = {"headers": list(record.headers)}
        if record.partition is not None:
            more["partition"] = record.partition
        if record.timestamp_ms is not None:
            more["timestamp"] = record.timestamp_ms
        if self._blames or record.of is not None:
            more["on_delivery"] = self._asking(place, failed)
        while True:
            try:
                producer.produce(record.topic, record.value, record.key, **more)
            except BufferError:
                producer.poll(0.1)
            except KafkaException as error:
                failed[place] = error.args[0]
                raise
            else:
                return

    def _asking(
        self, place: int, failed: dict[int, KafkaError]
    ) -> Callable[[KafkaError | None, Message], None]:
        def told(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed[place] = error
            else:
                self.sent[place] = Sent(message.partition() or 0, message.offset() or 0)

        return told

    def _unsent(self, error: KafkaException, failed: dict[int, KafkaError]) -> Unsent:
        """What is known; the next transaction asks after each record, to find the culprit."""
        self._blames = True
        if blamed := culprits(failed, alone=self._one_by_one):
            return Unsent(next(iter(blamed.values())), blamed)
        if not (some := refused(failed)):
            return Unsent(_told(error))
        # Which one of a batch it is shows where each of them is one.
        self._one_by_one = True
        return Unsent(f"a batch was refused: {next(iter(some.values())).str()}")

    def drop(self) -> None:
        """Throw the producer away: the next one fences what it may still have under way."""
        if self._producer is not None:
            throw_away(self._producer)
            self._producer = None
            self._offsets.rest()


def _told(error: KafkaException) -> str:
    reason = error.args[0]
    return str(reason.str()) if isinstance(reason, KafkaError) else str(reason)
