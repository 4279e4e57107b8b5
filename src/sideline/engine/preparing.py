"""Rounds of a pipeline with ``prepare=``: the JVM makes rows of a round's events, then leases run.

One Spark job a round. Its first stage reads the planned offsets with Spark's Kafka connector and
runs the user's step; rows are then brought to the task of their lease. So whatever fails in the JVM
fails before any lease begins, and is pinned on its events by halving (`culprits`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
import psycopg
import pyarrow as pa
from confluent_kafka import KafkaException
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, functions

from sideline.causes import message_of
from sideline.engine.culprits import Piece, search
from sideline.engine.jobs import Jobs
from sideline.engine.jvm_errors import Told
from sideline.engine.lease import Lease, Partition, PartitionReport, Report, failure_of
from sideline.engine.prepared import BACK, NOTE, ORDER, SLOT, Id, Note
from sideline.engine.session import hushed
from sideline.engine.steps import TYPES, Span, Step, Unprepared, told
from sideline.engine.task import Task
from sideline.errors import RefusedError, SidelineError, UnreachableError
from sideline.events import ALONE
from sideline.ledger.connection import connect
from sideline.ledger.place import partition_rows
from sideline.ledger.replay import Replays
from sideline.ledger.store import Claim
from sideline.replays import choose

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from sideline.events import Event
    from sideline.ledger.connection import Connection
    from sideline.ledger.records import Elsewhere
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster

# Without anything to read, a round ends after this, so that the driver looks around.
LOOK_SECONDS = 2.0
LOOK_PAUSE_SECONDS = 0.1
# How long a lease may work on its rows, once they are there.
WORK_SECONDS = 30.0
# Events of a partition in the first round; twice as many in the next one if that was quick.
FIRST_EVENTS = 2_000
MOST_EVENTS = 50_000
QUICK_SECONDS = 5.0
# Events of a partition that may fail in the JVM in one round: each costs a source more.
MOST_CULPRITS = 8
# Released events that go through the JVM in one round.
MOST_BACK = 1_000
# Before a round tries again what the world did not let pass.
RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)

REPORT = "report string"
# By what rows are sorted, and what they are where there are none.
EMPTY = {BACK: "boolean", **TYPES}
# What a service says that is away; it heals (F1).
AWAY = (UnreachableError, psycopg.OperationalError, KafkaException)
# What a job of Spark raises, beside what it has classes for.
_JVM = (Py4JJavaError,)


@dataclasses.dataclass(slots=True)
class Plan:
    """What a round is about."""

    leases: list[Lease]
    spans: dict[Partition, Span]
    """Offsets that are read, of each partition."""
    back: dict[Id, Event]
    """Events that come back from the ledger."""
    slots: dict[Id, int]
    """The lease of each of them, by its place in the list."""
    failing: dict[Id, Told] = dataclasses.field(default_factory=dict)
    ready: set[Id] = dataclasses.field(default_factory=set)

    @property
    def pieces(self) -> list[Piece]:
        """Everything that goes through the JVM."""
        live = [Piece(spot, start, end) for spot, (start, end) in self.spans.items()]
        return [*live, Piece(None, back=tuple(self.back))] if self.back else live


class PreparedJobs(Jobs):
    """Runs rounds whose events go through the JVM first."""

    def __init__(  # noqa: PLR0913 - what a round depends on, by keyword
        self,
        spark: SparkSession,
        code: bytes,
        pipeline: Pipeline,
        *,
        cluster: Cluster,
        database: str,
        kafka: dict[str, Any],
        elsewhere: Callable[[Connection], Elsewhere],
    ) -> None:
        super().__init__(spark, code)
        self._spark = spark
        self._pipeline = pipeline
        self._cluster = cluster
        self._database = database
        self._elsewhere = elsewhere
        self._step = Step(spark, pipeline, kafka)
        self._connection: Connection | None = None
        self._back: dict[Id, Event] = {}
        self._most = FIRST_EVENTS

    def __call__(self, leases: list[Lease]) -> list[Report]:
        """One round: a lease's events through the JVM, then the lease."""
        try:
            plan = self._look(leases)
        except AWAY as error:
            return [self._wait(leases, error)]
        if plan is None:
            return []
        try:
            return self._round(plan)
        except Unprepared as error:
            failure = failure_of(error.because, event=None, stage="prepare")
            return [Report(leases[0].round, failure=failure)]

    def end(self) -> None:
        """Tear down what the run left."""
        if self._connection is not None:
            self._connection.close()
        super().end()

    def _wait(self, leases: list[Lease], error: Exception) -> Report:
        """Kafka or PostgreSQL does not answer the driver: nothing was begun, so nothing is lost."""
        if self._connection is not None:
            self._connection.close()
        time.sleep(RETRY_SECONDS)
        return Report(leases[0].round, trouble=f"prepare: {message_of(error)}")

    # What there is to do

    def _look(self, leases: list[Lease]) -> Plan | None:
        """What the round is about, once there is something; None: nothing came."""
        until = min(time.monotonic() + LOOK_SECONDS, time.monotonic() + _left(leases))
        while True:
            plan = self._plan(leases)
            if plan is not None or self.stopping() or time.monotonic() >= until:
                return plan
            time.sleep(LOOK_PAUSE_SECONDS)

    def _plan(self, leases: list[Lease]) -> Plan | None:
        connection = self._connected()
        rows = {
            Partition(row.topic, row.partition): row
            for row in partition_rows(connection, self._pipeline.name)
        }
        connection.rollback()
        # Of what stands at its bound nothing is read: its topic may be gone.
        live = [
            share.of
            for lease in leases
            for share in lease.shares
            if not share.relay and (share.bound is None or share.bound > rows[share.of].next_offset)
        ]
        ends = self._cluster.ends(live) if live else {}
        plan = Plan([], {}, {}, {})
        for lease in leases:
            shares = []
            for share in lease.shares:
                row = rows[share.of]
                if share.relay:
                    shares.append(share)
                    continue
                start = row.next_offset
                most = ends.get(share.of, start)
                bound = most if share.bound is None else share.bound
                end = max(start, min(bound, most, start + self._most))
                if end > start:
                    plan.spans[share.of] = start, end
                if end > start or share.replay or row.unsent:
                    shares.append(dataclasses.replace(share, bound=end, ahead=False))
                if share.replay:
                    self._plan_back(plan, share.of, len(plan.leases))
            if shares:
                plan.leases.append(dataclasses.replace(lease, shares=tuple(shares)))
        return plan if plan.leases else None

    def _plan_back(self, plan: Plan, home: Partition, slot: int) -> None:
        """The released events that the owner of a partition would handle next."""
        connection = self._connected()
        claim = Claim(self._pipeline.name, (0,), uuid.uuid4(), uuid.uuid4())
        # Only looked at: neither the lease nor the keys are touched.
        replays = Replays(connection, claim, SimpleNamespace(), self._elsewhere(connection))  # type: ignore[arg-type]
        held: Any = SimpleNamespace(partition=home)
        items = replays.items(held, MOST_BACK, ())
        if not items or items[0].kind != "release":
            return
        waiting, _ = replays.read(held, choose(items, MOST_BACK), ALONE)
        for one in waiting:
            name = (True, one.event.topic, one.event.partition, one.event.offset)
            if name in plan.back:
                # Of a topic that was made again: one of the two has to wait for the next round.
                break
            plan.back[name] = one.event
            plan.slots[name] = slot

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed or self._connection.broken:
            self._connection = connect(self._database, role=f"prepare {self._pipeline.name}")
        return self._connection

    # A round

    def _round(self, plan: Plan) -> list[Report]:
        plan.ready = set(plan.back)
        self._back = plan.back
        if not plan.spans and not plan.back:
            reports = super().__call__(plan.leases)
            if not any(_moved(report) for report in reports):
                # Somebody keeps it waiting: no reason to ask Spark all the time.
                time.sleep(LOOK_PAUSE_SECONDS)
            return reports
        started = time.monotonic()
        try:
            reports = self._job(plan)
        except (PySparkException, *_JVM) as error:
            return self._after(plan, error)
        if time.monotonic() - started < QUICK_SECONDS:
            self._most = min(2 * self._most, MOST_EVENTS)
        return reports

    def _after(self, plan: Plan, error: Exception) -> list[Report]:
        """The job failed, in the JVM's step or in a lease: find out, and run what can be run."""
        with hushed(self._spark):
            found = search(plan.pieces, self._try)
        if found.nothing:
            raise error
        if found.world is not None:
            return [_waits(plan, found.world)]
        found.cut(MOST_CULPRITS)
        plan.failing = found.failing
        plan.ready -= found.unknown_back
        for spot, end in found.ends.items():
            # Behind it nobody knows yet who else fails.
            plan.spans[spot] = plan.spans[spot][0], min(end, plan.spans[spot][1])
        plan.leases = [_cut(lease, plan.spans) for lease in plan.leases]
        log.warning(
            "%s: %d events fail in prepare=, first: %s",
            self._pipeline.name,
            len(found.failing),
            next(iter(found.failing.values()), None),
        )
        try:
            return self._job(plan)
        except (PySparkException, *_JVM) as again:
            # It failed otherwise now: in a lease, or not always in the same way.
            told_again = told(again, self._pipeline.recoverable)
            if told_again.heals:
                return [_waits(plan, told_again)]
            raise

    def _try(self, pieces: list[Piece]) -> Told | None:
        """Whether the JVM's step takes these events; if not, what it said."""
        spans = {piece.spot: [(piece.start, piece.end)] for piece in pieces if piece.spot}
        frame = self._rows(spans, [name for piece in pieces for name in piece.back])
        try:
            # Every column of every row is made, and goes nowhere.
            frame.write.format("noop").mode("overwrite").save()
        except (PySparkException, *_JVM) as error:
            return told(error, self._pipeline.recoverable)
        return None

    def _rows(self, spans: Mapping[Partition, list[Span]], back: list[Id]) -> DataFrame:
        """What the user's step makes of live events and of those that come back.

        Each stretch between two culprits is a source of its own: a filter before the step would be
        no wall to Spark, which may well parse first and filter then.
        """
        frames = []
        for turn in range(max(map(len, spans.values()), default=0)):
            some = {spot: found[turn] for spot, found in spans.items() if turn < len(found)}
            frames.append(self._step.live(some).withColumn(BACK, functions.lit(False)))  # noqa: FBT003
        if back:
            events = [self._back[name] for name in back]
            frames.append(self._step.back(events).withColumn(BACK, functions.lit(True)))  # noqa: FBT003
        return reduce(DataFrame.unionByName, frames)

    def _job(self, plan: Plan) -> list[Report]:
        spans = {
            spot: between(span, [name[3] for name in plan.failing if name[:3] == (False, *spot)])
            for spot, span in plan.spans.items()
        }
        spans = {spot: found for spot, found in spans.items() if found}
        back = [name for name in plan.back if name in plan.ready and name not in plan.failing]
        marked = self._marks(plan)
        if spans or back:
            slots = {SLOT: _slot(plan), ORDER: functions.lit(1)}
            rows = self._rows(spans, back).withColumns(slots)
            marked = rows.unionByName(marked, allowMissingColumns=True)
        else:
            marked = marked.withColumns(
                {name: functions.lit(None).cast(kind) for name, kind in EMPTY.items()}
            )
        preparing = Preparing(self.task)
        self._used = True

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return preparing(batches)

        found = (
            marked.repartitionById(len(plan.leases), functions.col(SLOT))
            .sortWithinPartitions(ORDER, *EMPTY)
            .mapInArrow(work, REPORT)
            .collect()
        )
        return [Report.from_dict(orjson.loads(row.report)) for row in found]

    def _marks(self, plan: Plan) -> DataFrame:
        """A row for each lease, before all others of its task."""
        rows = []
        for number, lease in enumerate(plan.leases):
            spots = {share.of for share in lease.shares}
            mine = {
                name: why
                for name, why in plan.failing.items()
                if (plan.slots[name] == number if name[0] else Partition(*name[1:3]) in spots)
            }
            back = frozenset(name for name in plan.ready if plan.slots[name] == number)
            note = Note({name: (why.name, why.message) for name, why in mine.items()}, back)
            text = orjson.dumps({"lease": lease.as_dict(), "note": note.dump()}).decode()
            rows.append((number, 0, text))
        return self._spark.createDataFrame(rows, f"{SLOT} int, {ORDER} int, {NOTE} string")


class Preparing:
    """What Spark ships for a round: the rows of a task are put beside its lease."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keep all rows of this task, then work its lease."""
        # A Ctrl-C at the terminal is the driver's business; Spark listens to it before every task.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context = TaskContext.get()
        attempt = context.taskAttemptId() if context is not None else 0
        # The name under which a driver removes what killed processes left.
        folder = Path(tempfile.mkdtemp(prefix=f"sideline-run-{os.getpid()}-"))
        try:
            text = _keep(batches, folder)
            if text is not None:
                given = orjson.loads(text)
                (folder / "note.json").write_bytes(orjson.dumps(given["note"]))
                lease = Lease.from_dict(given["lease"])
                ends_at = max(lease.ends_at, time.time() + WORK_SECONDS)
                lease = dataclasses.replace(lease, ends_at=ends_at, prepared=str(folder))
                report = orjson.dumps(self._work(lease, attempt).as_dict()).decode()
                yield pa.RecordBatch.from_pydict({"report": [report]})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _work(self, lease: Lease, attempt: int) -> Report:
        try:
            worker = self._task.cell(lease) if lease.care else self._task.worker(lease)
            return worker.work(lease, attempt)
        except SidelineError as error:
            # Rows that do not fit, or a host that is set up otherwise.
            stage = "batch" if issubclass(type(error), RefusedError) else "setup"
            return Report(lease.round, failure=failure_of(error, event=None, stage=stage))


def _keep(batches: Iterator[pa.RecordBatch], folder: Path) -> str | None:
    """Write the rows to a file; what the first one says, which is the lease's own."""
    text = None
    writer = None
    with (folder / "rows.arrow").open("wb") as file:
        for batch in batches:
            rows = batch
            if batch.num_rows and not batch.column(ORDER)[0].as_py():
                text = batch.column(NOTE)[0].as_py()
                rows = batch.slice(1)
            rows = rows.drop_columns([ORDER, SLOT, NOTE])
            writer = writer or pa.ipc.new_stream(file, rows.schema)
            writer.write_batch(rows)
        if writer is not None:
            writer.close()
    return text


def _left(leases: list[Lease]) -> float:
    return max(lease.ends_at for lease in leases) - time.time()


def _moved(report: Report) -> bool:
    return any(part.consumed or part.replayed or part.failed_again for part in report.partitions)


def _cut(lease: Lease, spans: Mapping[Partition, Span]) -> Lease:
    """The lease, no further than is known."""
    shares = [
        dataclasses.replace(share, bound=spans[share.of][1]) if share.of in spans else share
        for share in lease.shares
    ]
    return dataclasses.replace(lease, shares=tuple(shares))


def _waits(plan: Plan, why: Told) -> Report:
    """The world is broken: all partitions of the round wait a little."""
    trouble = f"prepare: {why.name}: {why.message}"
    parts = [
        PartitionReport(
            spot.topic,
            spot.number,
            next_offset=start,
            high=end,
            trouble=trouble,
            retry_in_seconds=RETRY_SECONDS,
        )
        for spot, (start, end) in plan.spans.items()
    ]
    return Report(plan.leases[0].round, partitions=parts, trouble=trouble)


def between(span: Span, culprits: Iterable[int]) -> list[Span]:
    """What is left of a span without some of its offsets."""
    start, end = span
    found = []
    for offset in [*sorted(one for one in culprits if start <= one < end), end]:
        if offset > start:
            found.append((start, offset))
        start = offset + 1
    return found


def _slot(plan: Plan) -> Column:
    """The task that a row belongs to: that of its partition, or of the key that comes back."""
    live = {
        f"{share.topic}/{share.partition}": number
        for number, lease in enumerate(plan.leases)
        for share in lease.shares
    }
    slot = _looked_up(live, functions.concat_ws("/", "topic", "partition"))
    if not plan.slots:
        return slot
    back = {"/".join(map(str, name[1:])): number for name, number in plan.slots.items()}
    own = _looked_up(back, functions.concat_ws("/", "topic", "partition", "offset"))
    return functions.when(functions.col(BACK), own).otherwise(slot)


def _looked_up(known: Mapping[str, int], name: Column) -> Column:
    pairs = [functions.lit(part) for pair in known.items() for part in pair]
    # A row of an event that nobody planned goes to the first task, which leaves it alone.
    return functions.coalesce(functions.create_map(*pairs)[name], functions.lit(0))
