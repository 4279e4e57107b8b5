"""A ground whose pipeline publishes: its effects are what a reader of committed records sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from sideline.homes.transactions import home_group
from tests.support.chain import Chain
from tests.support.checkers import Place
from tests.support.ground import Ground
from tests.support.records import until_over
from tests.support.waiting import patiently

PATIENCE_SECONDS = 60.0


def read_committed(kafka: str, topic: str, partition: int, **properties: Any) -> list[Any]:
    """All records of a partition that are there for good, in order, once no transaction is open."""
    until_over(kafka, topic, partition, **properties)
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            **properties,
            "group.id": "nobody",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    found = []
    consumer.assign([TopicPartition(topic, partition, 0)])
    while True:
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None, f"{topic}/{partition} has no end"
        error = message.error()
        if error is None:
            found.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            break
    consumer.close()
    return found


class Outputs(Ground):
    """One pipeline from one topic to another."""

    out: str
    out_partitions: int

    def messages(self) -> list[Any]:
        """What was published, each key's in order."""
        return [
            message
            for partition in range(self.out_partitions)
            for message in read_committed(self.kafka, self.out, partition)
        ]

    def effects(self) -> list[Place]:
        """What took effect."""
        places = []
        for message in self.messages():
            topic, partition, offset = message.value().decode().split(" ")
            key = None if message.key() is None else message.key().decode()
            places.append(Place(topic, int(partition), int(offset), key))
        return places

    def committed(self, group: str | None = None) -> dict[int, tuple[int, str | None]]:
        """Offset and metadata that Kafka shows, by partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka,
                "group.id": group or home_group(self.options["name"]),
                "isolation.level": "read_committed",
            }
        )
        spots = [TopicPartition(self.topic, number) for number in self.partitions]
        found = patiently(lambda: consumer.committed(spots, PATIENCE_SECONDS))
        consumer.close()
        return {spot.partition: (spot.offset, spot.metadata) for spot in found}

    def open(self) -> list[tuple[Any, ...]]:
        """Slices that are neither applied nor dropped, and events that they name."""
        return self.query(
            "select topic, partition, pending from sideline.progress where pending is not null"
        ) + self.query("select topic, partition, state from sideline.events where state='pending'")

    def check(self, note: object = "") -> None:
        """The same as everywhere, and nothing is left open."""
        super().check(note)
        assert not self.open(), (self.open(), note)


@pytest.fixture
def outputs(
    database: str, kafka: str, topics: Callable[..., str], nursery: Any
) -> Iterator[Callable[..., Outputs]]:
    """Grounds that publish: ``outputs(partitions=2, bad=["v3"])``."""
    made: list[Outputs] = []

    def make(
        partitions: int = 1,
        *,
        out_partitions: int = 2,
        out_config: Any = None,
        argument: Any = None,
        **options: Any,
    ) -> Outputs:
        source = topics(partitions=partitions)
        out = topics(partitions=out_partitions, **(out_config or {}))
        wanted = {"publishes": True, "handler": "publish"}
        given = {"argument": {"to": out, **(argument or {})}}
        ground = Outputs(database, kafka, source, nursery, **wanted | given | options)
        ground.out, ground.out_partitions = out, out_partitions
        made.append(ground)
        return ground

    yield make
    for ground in made:
        ground.close()


@pytest.fixture
def chained(
    outputs: Callable[..., Outputs], _admin: AdminClient, tmp_path: Path
) -> Iterator[Callable[..., Chain]]:
    """Pipelines that publish and whose failures leave: ``chained(delays=["50ms"])``."""
    made: list[Chain] = []

    def make(**options: Any) -> Chain:
        folder = tmp_path / f"tries{len(made)}"
        folder.mkdir()
        argument = {"folder": str(folder), **options.pop("argument", {})}
        given = {"handler": "flaky_publish", "argument": argument, "independent": True}
        made.append(Chain(outputs(**given | options), _admin, folder))
        return made[-1]

    yield make
    for chain in made:
        chain.close()
