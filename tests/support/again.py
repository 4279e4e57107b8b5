"""A run that applies a range again, without Spark: beside the ground whose events they are."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from sideline.again import derive
from sideline.engine.lease import Lease, Partition, Report, Share
from sideline.ledger import runs
from sideline.ledger.connection import connect
from sideline.ledger.place import Place as DriverPlace
from sideline.ledger.runs import Range, RunRow, Wish
from tests.support import handlers
from tests.support.checkers import Place
from tests.support.ground import Ground
from tests.support.lease_process import LeaseProcess

WHO = "tester@example"


class AgainRun:
    """A run over everything that the ground's pipeline has passed, or over some of it."""

    def __init__(
        self, ground: Ground, *, first: int = 0, beyond: int | None = None, **wish: Any
    ) -> None:
        self.ground = ground
        self.round = 0
        self.epoch = 0
        ((self.mark,),) = ground.query("select coalesce(max(seq), 0) from history")
        ranges = [
            Range(Partition(ground.topic, number), first, min(end, beyond or end))
            for number, end in ground.next_offsets().items()
        ]
        wish = {"guarded": False, "repeat_effects": True} | wish
        with connect(ground.database, role="test") as connection:
            self.row: RunRow = runs.begin(
                connection, handlers.build(**ground.options), Wish(ranges, **wish), WHO
            )
        self.begin()

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def again(self) -> dict[str, Any]:
        """What a worker has to know."""
        return {
            "run": self.name,
            "include_damaged": self.row.include_damaged,
            "repeat_effects": self.row.repeat_effects,
            "skip_failures": self.row.skip_failures,
            "guarded": not self.row.alone,
        }

    def begin(self) -> None:
        """A driver's epoch: what was handed out before is worth nothing."""
        place = DriverPlace(
            self.ground.database, derive(handlers.build(**self.ground.options), **self.again)
        )
        place.hold()
        self.epoch = place.epoch
        place.close()

    def lease(self, seconds: float = 60.0) -> Lease:
        self.round += 1
        shares = tuple(
            Share(partition.topic, partition.number, bound)
            for partition, bound in self.row.ends.items()
        )
        return Lease(self.name, self.epoch, self.round, shares, time.time() + seconds)

    def start(self, lease: Lease | None = None, **job: Any) -> LeaseProcess:
        pipeline = {**job.pop("pipeline", {}), "again": self.again}
        return self.ground.start(lease or self.lease(), pipeline=pipeline, **job)

    def run(self, **job: Any) -> Report:
        (report,) = self.start(**job).reports()
        return report

    def finish(self) -> bool:
        with connect(self.ground.database, role="test") as connection:
            return runs.finish(connection, self.row, WHO)

    def cancel(self) -> None:
        with connect(self.ground.database, role="test") as connection:
            runs.cancel(connection, self.row, WHO)

    def effects(self) -> list[Place]:
        """What took effect since the run was begun, in that order."""
        rows = self.ground.query(
            "select topic, partition, number, key from history where seq > %s order by seq",
            self.mark,
        )
        return [Place(*row) for row in rows]

    def progress(self) -> dict[str, int]:
        """The run's own counters, in all."""
        names = ("consumed", "applied", "filtered", "skipped", "parked")
        sums = ", ".join(f"sum({name})" for name in names)
        (row,) = self.ground.query(
            f"select {sums} from sideline.progress where pipeline = %s", self.name
        )
        return dict(zip(names, map(int, row), strict=True))


def damage(ground: Ground, offset: int, state: str, *, partition: int = 0) -> None:
    """An event that was applied is dead, or discarded, instead."""
    ((topic, key),) = ground.query(
        "select topic, key from history where partition = %s and number = %s limit 1",
        *(partition, offset),
    )
    with psycopg.connect(ground.database) as connection:
        connection.execute(
            'insert into sideline.events (pipeline, topic, partition, "offset", state, why, key,'
            " timestamp_ms, fingerprint, error, message, stage, handler_version)"
            " values (%s, %s, %s, %s, %s, 'failed', %s, 0, 'f', 'ValueError', '', 'handler', 'v')",
            (ground.options["name"], topic, partition, offset, state, key and key.encode()),
        )
        connection.execute(
            f"update sideline.progress set applied = applied - 1, {state} = {state} + 1"
            " where pipeline = %s and partition = %s",
            (ground.options["name"], partition),
        )
