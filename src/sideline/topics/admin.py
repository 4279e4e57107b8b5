"""What is asked of the broker: topics and their settings, offsets, the group's own offsets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn, TypeVar

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it comes without types
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    TopicDescription,
)
from confluent_kafka.admin._listoffsets import OffsetSpec

from sideline import clients
from sideline.engine.lease import Partition
from sideline.errors import KafkaUnreachableError, NotFoundError, RefusedError
from sideline.topics.plans import Found, Plan
from sideline.topics.standing import FOREIGN, Standing

T = TypeVar("T")

ANSWER_SECONDS = 10.0
# While an answer is awaited, listen this often why there may be none.
_LISTEN_SECONDS = 0.2
# While a partition's leader is being chosen, or a change spreads, ask again after this long.
ELECTION_SECONDS = 0.1
_ELECTING = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001
_AWAY = {
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
    KafkaError.REQUEST_TIMED_OUT,
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
        self._ears = clients.Ears(properties)
        # What goes wrong is raised; librdkafka's own lines on stderr would say it again.
        self._admin = clients.make(AdminClient, properties, log_level=0, error_cb=self._ears)
        self._properties = properties
        self._standings: dict[str, Standing] = {}

    def topic(self, name: str) -> TopicInfo:
        """One topic; NotFoundError if there is none."""
        try:
            found = self._patiently(lambda: self._answer(self._described(name)))
        except KafkaException as error:
            if error.args[0].code() in _MISSING:
                message = f"topic {name!r} does not exist at {self.bootstrap}."
                hint = "Create it, correct the name, or wait for it with --wait."
                raise NotFoundError(message, hint=hint) from error
            raise
        partitions = tuple(sorted(partition.id for partition in found.partitions))
        return TopicInfo(name, str(found.topic_id), partitions)

    def describe(self, name: str) -> Found | None:
        """A topic with its settings; None if there is none."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        configs = self._admin.describe_configs([resource], request_timeout=ANSWER_SECONDS)
        try:
            found = self._patiently(lambda: self._answer(self._described(name)))
            entries = self._answer(configs[resource])
        except KafkaException as error:
            if error.args[0].code() in _MISSING:
                return None
            raise
        return Found(
            name,
            len(found.partitions),
            min(len(partition.replicas) for partition in found.partitions),
            {key: entry.value for key, entry in entries.items()},
        )

    def await_change(self, name: str, seen: Callable[[Found | None], bool]) -> None:
        """Let a change of a topic reach the brokers: the controller answers before they know."""
        until = time.monotonic() + ANSWER_SECONDS
        while not seen(self.describe(name)) and time.monotonic() < until:
            time.sleep(ELECTION_SECONDS)

    def id(self) -> str:
        """What the cluster calls itself."""
        found = self._answer(self._admin.describe_cluster(request_timeout=ANSWER_SECONDS))
        return str(found.cluster_id)

    def brokers(self) -> int:
        """How many brokers there are now."""
        return len(self._answer(self._admin.describe_cluster(request_timeout=ANSWER_SECONDS)).nodes)

    def create(self, wanted: Plan) -> bool:
        """Make a topic; False if somebody else did meanwhile."""
        name = wanted.topic.name
        topic = NewTopic(
            name,
            int(wanted.partitions.value),
            int(wanted.replication.value),
            config={setting.name: setting.value for setting in wanted.settings},
        )
        future = self._admin.create_topics([topic], request_timeout=ANSWER_SECONDS)[name]
        try:
            self._answer(future)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            raise _refused(f"topic {name!r} cannot be created", error) from error
        return True

    def alter(self, name: str, settings: Mapping[str, str], partitions: int | None) -> None:
        """Change settings of a topic, and add partitions; nothing else of it is touched."""
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in settings.items()
        ]
        futures: list[Future[None]] = []
        if entries:
            resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=entries)
            futures += self._admin.incremental_alter_configs(
                [resource], request_timeout=ANSWER_SECONDS
            ).values()
        if partitions is not None:
            futures += self._admin.create_partitions(
                [NewPartitions(name, partitions)], request_timeout=ANSWER_SECONDS
            ).values()
        for future in futures:
            try:
                self._answer(future)
            except KafkaException as error:
                raise _refused(f"topic {name!r} cannot be altered", error) from error

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Where the committed part of each partition ends now."""
        return self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def ends_written(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Where each partition ends now, with what open transactions have written."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        return self._offsets(partitions, latest, IsolationLevel.READ_UNCOMMITTED)

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
        if group not in self._standings:
            self._standings[group] = Standing(self._properties, group, self._ears)
        try:
            shown = self._standings[group].commit(offsets, ANSWER_SECONDS)
        except (KafkaException, TimeoutError) as error:
            self._explain(error)
        self._ears.forget()
        return shown

    def forget_group(self, group: str) -> None:
        """Remove a group's offsets; one that is not there is no error."""
        futures = self._admin.delete_consumer_groups([group], request_timeout=ANSWER_SECONDS)
        try:
            self._answer(futures[group])
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.GROUP_ID_NOT_FOUND:
                return
            if code in FOREIGN:
                message = f"group {group!r} has members: somebody still consumes under its name."
                raise RefusedError(message, hint="Stop them first.") from error
            raise

    def _offsets(
        self,
        partitions: Iterable[Partition],
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[Partition, int]:
        wanted = {
            TopicPartition(partition.topic, partition.number): spec for partition in partitions
        }

        def ask() -> dict[Partition, int]:
            futures = self._admin.list_offsets(
                wanted, isolation_level=isolation, request_timeout=ANSWER_SECONDS
            )
            return {
                Partition(position.topic, position.partition): int(self._answer(future).offset)
                for position, future in futures.items()
            }

        return self._patiently(ask) if wanted else {}

    def _described(self, name: str) -> Future[TopicDescription]:
        wanted = TopicCollection([name])
        return self._admin.describe_topics(wanted, request_timeout=ANSWER_SECONDS)[name]

    @staticmethod
    def _patiently(ask: Callable[[], T]) -> T:
        """Ask again where a leader is not known: of a topic just made, of a broker just gone."""
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                return ask()
            except KafkaException as error:
                if error.args[0].code() not in _ELECTING or time.monotonic() > until:
                    raise
                time.sleep(ELECTION_SECONDS)

    def _awaited(self, future: Future[T]) -> T:
        """The answer, or as soon as it is known why there will be none."""
        until = time.monotonic() + ANSWER_SECONDS + 5
        while True:
            try:
                answer = future.result(timeout=_LISTEN_SECONDS)
            except TimeoutError:
                self._admin.poll(0)
                refusal = self._ears.refusal()
                if refusal is not None:
                    raise refusal from None
                if time.monotonic() > until:
                    raise
            else:
                self._ears.forget()
                return answer

    def _answer(self, future: Future[T]) -> T:
        try:
            return self._awaited(future)
        except (KafkaException, TimeoutError) as error:
            self._explain(error)

    def _explain(self, error: KafkaException | TimeoutError) -> NoReturn:
        """Raise it in a sentence, where it says who is away or who refuses."""
        code = error.args[0].code() if isinstance(error, KafkaException) else None
        if code is None or code in _AWAY:
            refusal = self._ears.refusal(at_last=True)
            if refusal is not None:
                raise refusal from error
            message = f"Kafka at {self.bootstrap} does not answer."
            hint = "Check SIDELINE_KAFKA, or start the embedded stack: sideline stack up"
            raise KafkaUnreachableError(message, hint=hint) from error
        if code in {
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        }:
            message = f"Kafka at {self.bootstrap} refuses: {error.args[0].str()}."
            hint = "Check the client's credentials and ACLs."
            raise RefusedError(message, hint=hint) from error
        raise error


def _refused(what: str, error: KafkaException) -> RefusedError:
    return RefusedError(f"{what}: {error.args[0].str()}.", hint="See `sideline topics plan`.")
