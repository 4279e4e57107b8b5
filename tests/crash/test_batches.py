"""A query's driver and workers killed between our COMMIT and Spark's own log of the batch."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import checkers
from tests.support.checkers import Place
from tests.support.pipelines import (
    APPLIED,
    Command,
    applied,
    counted,
    execute,
    numbered,
    publish,
    query,
    workers_of,
)
from tests.support.waiting import wait_for

PATIENCE_SECONDS = 240
PARTITIONS = 3
# Each has its events in one partition.
KEYS = 48
# What a user would run; the topic and the checkpoint come from the test. Some keys fail, and some
# events are left out, the last one of a batch among them. Each partition's last event waits for as
# long as a file is there.
QUERY = """
import os
import sys
import time

from sideline import Insert, Pipeline
from sideline.spark import session

topic, checkpoint, gate, last = sys.argv[1:]
flow = Pipeline("killed", topics=topic, slice_size=20)


@flow.handler
def record(event):
    time.sleep(0.01)
    while event.offset == int(last) and os.path.exists(gate):
        time.sleep(0.01)
    if int(event.text()[1:]) % 97 == 5:
        raise ValueError(event.text())
    row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
    return Insert("applied", row | {"key": event.key.decode(), "value": event.text()})


spark = session(slots=2)
query = (
    spark.readStream.format("kafka")
    .option("kafka.bootstrap.servers", os.environ["SIDELINE_KAFKA"])
    .option("subscribe", topic)
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 150)
    .load()
    .where("offset % 5 <> 4")
    .writeStream.foreachBatch(flow.foreach_batch)
    .option("checkpointLocation", checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
"""


class Killed:
    """A query that is started again and again, and what it did to the table."""

    def __init__(self, kafka: str, database: str, topic: str, folder: Path) -> None:
        self.kafka = kafka
        self.database = database
        self.topic = topic
        self.folder = folder
        self.published = 0
        self.produced: list[Place] = []
        """What the query does not leave out."""
        self.checkpoint = 0
        self.kills = 0
        self.started = 0
        self.running: Command | None = None
        self.gate = folder / "gate"

    def publish(self, count: int) -> None:
        """As many to each of three partitions, a key always to the same one."""
        events = numbered(count, start=self.published, keys=KEYS)
        for number in range(PARTITIONS):
            some = events[number::PARTITIONS]
            places = publish(self.kafka, self.topic, some, partition=number)
            self.produced += [
                Place(*place, key)
                for place, (key, _) in zip(places, some, strict=True)
                if place[2] % 5 != 4
            ]
        self.published += count

    def start(self, crash_at: str = "") -> Command:
        self.started += 1
        home = self.folder / str(self.started)
        home.mkdir()
        (home / "query.py").write_text(QUERY)
        checkpoint = self.folder / f"checkpoint-{self.checkpoint}"
        # The one behind it is left out.
        last = self.published // PARTITIONS - 2
        self.running = Command(
            [self.topic, str(checkpoint), str(self.gate), str(last)],
            home,
            program=["query.py"],
            SIDELINE_KAFKA=self.kafka,
            SIDELINE_DATABASE=self.database,
            **({"SIDELINE_CRASH_AT": crash_at} if crash_at else {}),
        )
        return self.running

    def driver_dies(self, at: str) -> None:
        """After our COMMIT of all of a batch, and before Spark writes down that it is done.

        Or before progress passes what the query left out at the batch's end.
        """
        query = self.start(crash_at=at)
        assert query.end(PATIENCE_SECONDS) == -signal.SIGKILL, query.err[-2000:]
        query.kill()

    def worker_dies(self) -> None:
        """In the middle of the batches, once some of them are committed."""
        before = counted(self.database, "killed")
        # Nobody is done with everything before somebody is killed.
        self.gate.touch()
        query = self.start()
        wait_for(
            lambda: counted(self.database, "killed") > before or query.process.poll() is not None,
            what=f"a commit:\n{query.err[-2000:]}",
            within_seconds=PATIENCE_SECONDS,
        )
        kills = self.kills
        for worker in workers_of(query):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                self.kills += 1
        assert self.kills > kills, f"nobody was there to be killed:\n{query.err[-2000:]}"
        self.gate.unlink()
        assert query.end(PATIENCE_SECONDS) == 0, query.err[-3000:]

    def parked(self) -> list[Place]:
        rows = query(
            self.database,
            "select topic, partition, \"offset\", convert_from(key, 'utf8') from sideline.events"
            " where state = 'parked' order by place",
        )
        return [Place(*row) for row in rows]

    def accounts(self) -> dict[tuple[str, int], checkers.Accounts]:
        rows = query(
            self.database,
            "select topic, partition, next_offset, consumed, applied, filtered, skipped, unknown,"
            " parked from sideline.progress",
        )
        return {(topic, number): checkers.Accounts(*rest) for topic, number, *rest in rows}

    def check(self) -> None:
        """Each event once, applied or waiting, in order, and accounted for."""
        effects = [Place(*effect[:4]) for effect in applied(self.database)]
        parked = self.parked()
        assert parked
        waiting = set(parked)
        assert not checkers.faults([one for one in self.produced if one not in waiting], effects)
        assert not checkers.duplicate(parked)
        assert not checkers.overtaken(effects, parked)
        assert not checkers.unaccounted(self.produced, self.accounts())
        reached = sum(row.next_offset for row in self.accounts().values())
        assert reached == self.published


@pytest.fixture
def killed(kafka, database, topics, tmp_path):
    """A query over a topic of three partitions."""
    execute(database, APPLIED)
    one = Killed(kafka, database, topics(partitions=PARTITIONS), tmp_path)
    yield one
    if one.running is not None:
        one.running.kill()


@pytest.mark.timeout(900)
def test_killed_between_our_commit_and_sparks(killed):
    """The batch comes again, under a new checkpoint everything does: each event once (C1, C3).

    Keys that fail step aside all the while, and nothing overtakes them (F4).
    """
    killed.publish(450)
    killed.driver_dies("batch-committed:1")
    killed.driver_dies("before-holes:1")
    killed.checkpoint += 1
    killed.worker_dies()
    killed.check()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_twenty_times(killed):
    """The same with twenty deaths, of drivers and of workers, and a new checkpoint at times."""
    for death in range(20):
        killed.publish(450)
        if death % 2:
            killed.worker_dies()
        else:
            point = random.choice(("batch-committed", "before-holes"))
            killed.driver_dies(f"{point}:{random.randint(1, 2)}")
        if death % 5 == 4:
            killed.checkpoint += 1
    query = killed.start()
    assert query.end(PATIENCE_SECONDS) == 0, query.err[-3000:]
    killed.check()
