"""Shows where a pipeline stands to lag tools: the offsets of its consumer group.

By a consumer that never joins the group, and not by an admin client: where an admin client's
request to a coordinator times out and the coordinator comes back, librdkafka 2.16 ends the whole
process (an assertion on ``eonce->refcnt``). Which is what a broker's death looks like.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from sideline import clients
from sideline.engine.lease import Partition

_LISTEN_SECONDS = 0.1
# With one of these the group has a member that is not ours.
FOREIGN: Final = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.NON_EMPTY_GROUP,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
    }
)


class Standing:
    """The offsets of one group."""

    def __init__(self, properties: Mapping[str, Any], group: str, ears: clients.Ears) -> None:
        self._answer: tuple[KafkaError | None, list[TopicPartition]] | None = None
        self._asked = False
        self._consumer = clients.make(
            Consumer,
            properties,
            **{
                "group.id": group,
                "enable.auto.commit": False,
                "log_level": 0,
                "error_cb": ears,
                "on_commit": self._told,
            },
        )

    def commit(self, offsets: Mapping[Partition, int], within_seconds: float) -> bool:
        """Whether they are shown now; False if a foreign member of the group forbids it.

        TimeoutError if nobody has said so by then. What was asked for before is waited for first:
        it is still under way, and would come behind what is newer.
        """
        until = time.monotonic() + within_seconds
        if self._asked:
            self._await(until)
        self._answer, self._asked = None, True
        self._consumer.commit(
            offsets=[
                TopicPartition(partition.topic, partition.number, offset)
                for partition, offset in offsets.items()
            ],
            asynchronous=True,
        )
        error, positions = self._await(until)
        errors = [error, *[position.error for position in positions]]
        codes = {one.code() for one in errors if one is not None}
        if codes & FOREIGN:
            return False
        if error is not None:
            raise KafkaException(error)
        return not codes

    def _await(self, until: float) -> tuple[KafkaError | None, list[TopicPartition]]:
        while self._answer is None:
            # It reads nothing: this only lets the answer in.
            self._consumer.poll(_LISTEN_SECONDS)
            if self._answer is None and time.monotonic() > until:
                raise TimeoutError
        self._asked = False
        return self._answer

    def _told(self, error: KafkaError | None, positions: list[TopicPartition]) -> None:
        self._answer = error, positions
