"""What the driver asks the broker: topics, offsets, and the group's own offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from sideline.engine.lease import Partition
from sideline.errors import KafkaUnreachableError, NotFoundError, RefusedError

T = TypeVar("T")

ANSWER_SECONDS = 10.0
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001
_AWAY = {
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
    KafkaError.REQUEST_TIMED_OUT,
}
# With one of these the group has a member that is not ours.
_FOREIGN = {
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
}


class TopicInfo(NamedTuple):
    """A topic: its id changes when it is deleted and made again."""

    name: str
    id: str
    partitions: tuple[int, ...]


class Cluster:
    """The brokers, through one admin client."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.bootstrap = str(properties["bootstrap.servers"])
        # What goes wrong is raised; librdkafka's own lines on stderr would say it again.
        self._admin = AdminClient({**properties, "log_level": 0})

    def topic(self, name: str) -> TopicInfo:
        """One topic; NotFoundError if there is none."""
        futures = self._admin.describe_topics(
            TopicCollection([name]), request_timeout=ANSWER_SECONDS
        )
        try:
            found = self._answer(futures[name])
        except KafkaException as error:
            if error.args[0].code() in _MISSING:
                message = f"topic {name!r} does not exist at {self.bootstrap}."
                hint = "Create it, correct the name, or wait for it with --wait."
                raise NotFoundError(message, hint=hint) from error
            raise
        partitions = tuple(sorted(partition.id for partition in found.partitions))
        return TopicInfo(name, str(found.topic_id), partitions)

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Where the committed part of each partition ends now."""
        return self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def beginnings(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offset that each partition still has."""
        return self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]

    def at(self, partitions: Iterable[Partition], timestamp_ms: int) -> dict[Partition, int]:
        """The first event from a moment on; the end where there is none."""
        wanted = list(partitions)
        found = self._offsets(wanted, OffsetSpec.for_timestamp(timestamp_ms))
        late = [partition for partition in wanted if found[partition] < 0]
        return found | (self.ends(late) if late else {})

    def commit_group(self, group: str, offsets: Mapping[Partition, int]) -> bool:
        """Show progress to lag tools; False if a foreign member of the group forbids it."""
        if not offsets:
            return True
        positions = [
            TopicPartition(partition.topic, partition.number, offset)
            for partition, offset in offsets.items()
        ]
        futures = self._admin.alter_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, positions)], request_timeout=ANSWER_SECONDS
        )
        try:
            result = self._answer(futures[group])
        except KafkaException as error:
            if error.args[0].code() in _FOREIGN:
                return False
            raise
        return not any(
            position.error is not None and position.error.code() in _FOREIGN
            for position in result.topic_partitions or ()
        )

    def _offsets(self, partitions: Iterable[Partition], spec: OffsetSpec) -> dict[Partition, int]:
        wanted = {
            TopicPartition(partition.topic, partition.number): spec for partition in partitions
        }
        if not wanted:
            return {}
        futures = self._admin.list_offsets(
            wanted,
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=ANSWER_SECONDS,
        )
        return {
            Partition(position.topic, position.partition): int(self._answer(future).offset)
            for position, future in futures.items()
        }

    def _answer(self, future: Future[T]) -> T:
        try:
            return future.result(timeout=ANSWER_SECONDS + 5)
        except (KafkaException, TimeoutError) as error:
            code = error.args[0].code() if isinstance(error, KafkaException) else None
            if code is None or code in _AWAY:
                message = f"Kafka at {self.bootstrap} does not answer."
                hint = "Check SIDELINE_KAFKA, or start the embedded stack: sideline stack up"
                raise KafkaUnreachableError(message, hint=hint) from error
            if code in {
                KafkaError.TOPIC_AUTHORIZATION_FAILED,
                KafkaError.GROUP_AUTHORIZATION_FAILED,
                KafkaError.CLUSTER_AUTHORIZATION_FAILED,
                KafkaError._AUTHENTICATION,  # noqa: SLF001
                KafkaError.SASL_AUTHENTICATION_FAILED,
            }:
                message = f"Kafka at {self.bootstrap} refuses: {error.args[0].str()}."
                raise RefusedError(
                    message, hint="Check the client's credentials and ACLs."
                ) from error
            raise
