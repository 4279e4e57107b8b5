"""A topic, a database and workers without Spark: where fences and crashes are tried."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from sideline.engine.lease import Lease, Report, Share
from sideline.ledger import place, schema
from tests.support import checkers, handlers
from tests.support.checkers import Accounts, Place
from tests.support.lease_process import Job, LeaseProcess, Nursery
from tests.support.waiting import patiently, wait_for

Record = tuple[str | None, str | None]


class Ground:
    """One pipeline on one topic, as its driver would prepare it."""

    def __init__(
        self, database: str, kafka: str, topic: str, nursery: Nursery, **options: Any
    ) -> None:
        self.database = database
        self.kafka = kafka
        self.topic = topic
        self.nursery = nursery
        self.options: dict[str, Any] = {"name": "ground", "topics": topic, **options}
        self.produced: list[Place] = []
        self.epoch = 0
        self.round = 0
        self.kills = 0
        self._producer = Producer({"bootstrap.servers": kafka, "linger.ms": 0, "log_level": 0})
        self._watcher = Consumer({"bootstrap.servers": kafka, "group.id": "watcher"})
        known = patiently(lambda: self._watcher.list_topics(topic, timeout=30)).topics[topic]
        self.partitions = sorted(known.partitions)
        self._prepare()

    # Before

    def _prepare(self) -> None:
        with psycopg.connect(self.database) as connection:
            schema.migrate(connection)
            for statement in handlers.TABLES:
                connection.execute(statement)
        self.begin()
        holder = self._hold()
        for partition in self.partitions:
            holder.add(self.topic, partition, "an id", 0)
        holder.close()

    def _hold(self) -> place.Place:
        pipeline = handlers.build(**self.options | {"handler": "record", "argument": None})
        holder = place.Place(self.database, pipeline)
        holder.epoch = self.epoch
        return holder

    def begin(self) -> int:
        """A new driver's epoch: everything handed out before is worth nothing."""
        holder = self._hold()
        holder.hold()
        self.epoch = holder.epoch
        holder.close()
        return self.epoch

    def publish(self, events: Iterable[Record], partition: int | None = None) -> list[Place]:
        """Send events (key, value); where each one stands."""
        places: list[Place] = []

        def sent(error: object, message: Any) -> None:
            assert error is None, error
            key = None if message.key() is None else message.key().decode()
            places.append(Place(message.topic(), message.partition(), message.offset(), key))

        where: dict[str, Any] = {} if partition is None else {"partition": partition}
        for key, value in events:
            self._producer.produce(self.topic, key=key, value=value, on_delivery=sent, **where)
            self._producer.poll(0)
        assert self._producer.flush(60) == 0
        self.produced += places
        return places

    def ends(self) -> dict[int, int]:
        """The end of the log of each partition."""
        return {number: patiently(partial(self._end, number)) for number in self.partitions}

    def _end(self, number: int) -> int:
        spot = TopicPartition(self.topic, number)
        return self._watcher.get_watermark_offsets(spot, timeout=30)[1]

    # Workers

    def lease(
        self,
        *partitions: int,
        seconds: float = 60.0,
        bounded: bool = True,
        round: int | None = None,  # noqa: A002 - the lease's own word
        epoch: int | None = None,
        care: bool = False,
    ) -> Lease:
        """The next round's lease of some partitions (all of them), as far as the log goes now.

        Where it has a bound it ends there, so its time may be long enough for a loaded machine.
        """
        self.round = self.round + 1 if round is None else round
        ends = self.ends() if bounded else {}
        return Lease(
            self.options["name"],
            self.epoch if epoch is None else epoch,
            self.round,
            tuple(
                Share(self.topic, number, ends.get(number), care=care)
                for number in partitions or self.partitions
            ),
            time.time() + seconds,
        )

    def start(self, *leases: Lease, **job: Any) -> LeaseProcess:
        """Start a worker with these leases, one after the other."""
        wanted = {"database": self.database, "kafka": self.kafka} | job
        pipeline = self.options | wanted.pop("pipeline", {})
        return self.nursery.start(Job(pipeline=pipeline, leases=leases, **wanted))

    def run(self, *leases: Lease, **job: Any) -> list[Report]:
        """Work these leases (by default: one for everything there is) to their end."""
        return self.start(*(leases or (self.lease(),)), **job).reports()

    def run_until(
        self, holds: Callable[[], object], *, what: str, lease: Callable[[], Lease], **job: Any
    ) -> list[Report]:
        """Work short leases, one after the other, until something holds; the last one's reports.

        For leases that nothing ends but their time: on a loaded machine, one may be too short.
        """
        reports: list[Report] = []

        def worked() -> object:
            reports[:] = self.run(lease(), **job)
            return holds()

        wait_for(worked, what=what)
        return reports

    def killed(self, worker: LeaseProcess) -> None:
        """Wait for the end of a worker that was to die."""
        assert worker.end() == -9, worker._said()
        self.kills += 1

    def perhaps_killed(self, worker: LeaseProcess) -> None:
        """Wait for the end of a worker that was to die, unless it came to its end before."""
        code = worker.end()
        assert code in {0, -9}, worker._said()
        self.kills += code == -9

    # Afterwards

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the database, directly."""
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def effects(self) -> list[Place]:
        """What took effect, in the order in which it did."""
        rows = self.query("select topic, partition, number, key from history order by seq")
        return [Place(*row) for row in rows]

    def calls(self, path: Path) -> list[Place]:
        """What the outside world saw."""
        lines = path.read_text().splitlines() if path.exists() else []
        places = []
        for line in lines:
            topic, partition, offset, key, _lease = line.split(" ")
            places.append(Place(topic, int(partition), int(offset), key or None))
        return places

    def accounts(self) -> dict[tuple[str, int], Accounts]:
        """The counters of every partition."""
        rows = self.query(
            "select topic, partition, next_offset, consumed, applied, filtered, skipped, unknown,"
            " parked from sideline.progress where pipeline = %s",
            self.options["name"],
        )
        return {(topic, number): Accounts(*rest) for topic, number, *rest in rows}

    def next_offsets(self) -> dict[int, int]:
        """How far each partition has come."""
        return {number: row.next_offset for (_, number), row in self.accounts().items()}

    def parked(self) -> list[Place]:
        """What waits, in the order in which it would be replayed."""
        rows = self.query(
            "select topic, partition, \"offset\", convert_from(key, 'utf8') from sideline.events"
            " where state = 'parked' order by place"
        )
        return [Place(*row) for row in rows]

    def faults(self) -> dict[str, Any]:
        """What contradicts exactly once, in order, and accounted for."""
        effects, parked = self.effects(), self.parked()
        applied_or_waiting = [place for place in self.produced if place not in set(parked)]
        found: dict[str, Any] = checkers.faults(applied_or_waiting, effects)
        if both := set(effects) & set(parked):
            found["applied and parked"] = sorted(both)
        if overtaken := checkers.overtaken(effects, parked):
            found["overtaken"] = overtaken
        if twice := checkers.duplicate(parked):
            found["parked twice"] = twice
        if unaccounted := checkers.unaccounted(self.produced, self.accounts()):
            found["unaccounted"] = unaccounted
        return found

    def check(self, note: object = "") -> None:
        """Exactly once, in order, accounted for, and the table as the last events say."""
        assert not self.faults(), (self.faults(), note)

    def check_prefix(self) -> None:
        """The same for what progress has passed: the rest is still to come."""
        here = {number: row.next_offset for (_, number), row in self.accounts().items()}
        everything = self.produced
        self.produced = [place for place in everything if place.offset < here[place.partition]]
        try:
            self.check()
        finally:
            self.produced = everything

    def close(self) -> None:
        """Leave Kafka."""
        self._watcher.close()


def numbered(count: int, *, start: int = 0, keys: int = 20) -> list[Record]:
    """Events of some keys, each with its own value."""
    return [(f"k{number % keys}", f"v{number}") for number in range(start, start + count)]


@pytest.fixture(scope="session")
def nursery(run: Any) -> Iterator[Nursery]:
    """Worker processes, forked quickly."""
    directory = run.directory("workers")
    started = Nursery(directory)
    yield started
    started.close()
    shutil.rmtree(directory)


@pytest.fixture
def grounds(
    database: str, kafka: str, topics: Callable[..., str], nursery: Nursery
) -> Iterator[Callable[..., Ground]]:
    """Grounds whose pipeline has options: ``grounds(partitions=2, delivery="at-most-once")``."""
    made: list[Ground] = []

    def make(partitions: int = 1, *, topic: dict[str, Any] | None = None, **options: Any) -> Ground:
        name = topics(partitions=partitions, **(topic or {}))
        made.append(Ground(database, kafka, name, nursery, **options))
        return made[-1]

    yield make
    for ground in made:
        ground.close()


@pytest.fixture
def ground(grounds: Callable[..., Ground]) -> Ground:
    """A pipeline of small slices on a topic of one partition."""
    return grounds(slice_size=10)
