"""A pipeline whose failures leave as copies: its own topics, leases for all of them, readers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from sideline import accounting
from sideline.durations import seconds
from sideline.engine.lease import Lease, Report, Share
from sideline.engine.relay import private_group
from tests.conftest import _create
from tests.support.ground import Ground
from tests.support.records import records, until_over
from tests.support.waiting import patiently, wait_for

RETRY = {"message.timestamp.type": "LogAppendTime"}


class Chain:
    """A ground with retry and dead-letter topics."""

    def __init__(self, ground: Ground, admin: AdminClient, folder: Path) -> None:
        self.ground = ground
        self.folder = folder
        self._admin = admin
        self.delays: list[str] = ground.options.get("delays") or []
        self.made: list[str] = []
        self.dlq = f"{ground.topic}.ground.dlq"
        self.retries = [f"{ground.topic}.ground.retry.{n + 1}" for n in range(len(self.delays))]
        self.make(self.dlq)
        for topic in self.retries:
            self.make(topic, RETRY)
            self._follow(topic)

    def make(self, topic: str, config: dict[str, str] | None = None, partitions: int = 1) -> None:
        """Create a topic by its exact name."""
        _create(self._admin, NewTopic(topic, partitions, 1, config=config or {}))
        self.made.append(topic)

    def delete(self, topic: str) -> None:
        """Delete a topic under the pipeline's feet."""
        self._admin.delete_topics([topic], operation_timeout=30)[topic].result()
        wait_for(
            lambda: topic not in patiently(lambda: self._admin.list_topics(timeout=30)).topics,
            what=f"the end of {topic}",
        )
        self.made.remove(topic)

    def _follow(self, topic: str) -> None:
        holder = self.ground._hold()
        holder.add(topic, 0, "an id", 0)
        holder.close()

    def close(self) -> None:
        for future in self._admin.delete_topics(self.made, operation_timeout=30).values():
            future.result()

    # Leases

    def lease(self, *, seconds_: float = 60.0, relay: bool = False) -> Lease:
        """The next round's lease of everything, as far as the logs go now."""
        ground = self.ground
        ground.round += 1
        shares = [
            Share(ground.topic, number, end, relay=relay) for number, end in ground.ends().items()
        ]
        for topic, delay in zip(self.retries, self.delays, strict=True):
            bound = self.end(topic)
            shares.append(
                Share(topic, 0, bound, delay_ms=round(seconds(delay) * 1000), relay=relay)
            )
        return Lease("ground", ground.epoch, ground.round, tuple(shares), time.time() + seconds_)

    def run(self, **job: Any) -> list[Report]:
        """One lease of everything there is and due."""
        return self.ground.run(self.lease(), **job)

    def settle(self, patience_seconds: float = 120.0) -> None:
        """Lease after lease until nothing waits for its turn and everything is sent."""
        until = time.monotonic() + patience_seconds
        while time.monotonic() < until:
            self.run()
            if not self.unsent() and not self.ground.query(
                "select 1 from sideline.events where state in ('retrying', 'pending')"
            ):
                return
            self._until_due()
        raise AssertionError(self.states())

    def _until_due(self) -> None:
        """Wait for the moment at which the next copy may be due."""
        ((wait,),) = self.ground.query(
            "select extract(epoch from min(due_at) - clock_timestamp()) from sideline.events"
            " where state = 'retrying'"
        )
        if wait is not None and wait > 0:
            time.sleep(float(wait))

    def until_seen(self) -> None:
        """Wait until readers see every copy that was sent."""
        for topic in self.retries:
            until_over(self.ground.kafka, topic)

    def until_all_due(self) -> None:
        """Wait until every copy that is not read yet is due, by the broker's time."""
        rows = self.ground.query("select topic, next_offset from sideline.progress")
        read = dict(rows)
        for topic, delay in zip(self.retries, self.delays, strict=True):
            for record in self.committed(topic):
                if record.offset() >= read[topic]:
                    due = record.timestamp()[1] / 1000 + seconds(delay)
                    time.sleep(max(0.0, due - time.time()))

    # Looking

    def end(self, topic: str) -> int:
        """The end of a topic's log."""
        spot = TopicPartition(topic, 0)
        return int(patiently(lambda: self.ground._watcher.get_watermark_offsets(spot, 30))[1])

    def unsent(self) -> int:
        """Records that wait in outboxes."""
        ((count,),) = self.ground.query(
            "select sum(outbox_last - outbox_sent) from sideline.progress"
        )
        return int(count)

    def states(self) -> list[tuple[Any, ...]]:
        """What the ledger says of each event that failed."""
        return self.ground.query(
            'select "offset", state, attempts from sideline.known_events order by "offset"'
        )

    def committed(self, topic: str, *, over: bool = True) -> list[Message]:
        """All records of a topic that readers of committed ones see, once nothing is under way.

        Without ``over``: now, whoever may have left a transaction open there.
        """
        if over:
            until_over(self.ground.kafka, topic)
        return records(self.ground.kafka, topic)

    def dead_letters(self, *, over: bool = True) -> list[int]:
        """Offsets of the events in the dead-letter topic, in its order."""
        return [
            int(_header(record, "sideline-origin-offset"))
            for record in self.committed(self.dlq, over=over)
        ]

    def tries(self, offset: int, partition: int = 0) -> list[float]:
        """When the handler saw an event."""
        path = self.folder / f"{self.ground.topic}~{partition}~{offset}"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def word(self) -> str | None:
        """What Kafka remembers of the source partition's outbox."""
        consumer = Consumer(
            {"bootstrap.servers": self.ground.kafka, "group.id": private_group("ground")}
        )
        spot = TopicPartition(self.ground.topic, 0)
        (found,) = patiently(lambda: consumer.committed([spot], 30))
        consumer.close()
        return found.metadata

    def check(self, dead: set[int] | None = None) -> None:
        """Every event applied once or dead with one copy, the books balanced, nothing unsent."""
        ground = self.ground
        rows = ground.query("select \"offset\" from sideline.events where state = 'dead'")
        gone = {offset for (offset,) in rows}
        if dead is not None:
            assert gone == dead, self.states()
        letters = self.dead_letters()
        assert sorted(letters) == sorted(gone), "dead letters"
        effects = [place.offset for place in ground.effects()]
        wanted = [place.offset for place in ground.produced if place.offset not in gone]
        assert sorted(effects) == sorted(wanted), "each event applied once"
        assert self.unsent() == 0
        self.check_books()

    def check_books(self) -> None:
        """`sideline status --check` finds nothing."""
        (books,) = accounting.check(self.ground.database, "ground")
        assert not books.differences, books.differences


def _header(record: Message, name: str) -> bytes:
    found = dict(record.headers() or ())[name]
    assert isinstance(found, bytes)
    return found


@pytest.fixture
def chains(grounds: Any, _admin: AdminClient, tmp_path: Path) -> Iterator[Any]:
    """Pipelines whose failures leave: ``chains(delays=["50ms"])``, ``chains(dead_letter=3)``."""
    made: list[Chain] = []

    def make(**options: Any) -> Chain:
        folder = tmp_path / f"tries{len(made)}"
        folder.mkdir()
        options = {"handler": "flaky", "argument": str(folder), "independent": True} | options
        made.append(Chain(grounds(**options), _admin, folder))
        return made[-1]

    yield make
    for chain in made:
        chain.close()
