"""The door for Spark's rows: a task gets its lease, and its rows through `mapInArrow`."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from sideline.engine.feed import COLUMNS, HEADERS, PLACE, Feed, check_order, only, runs
from sideline.engine.holding import FED_SECONDS
from sideline.engine.lease import Lease, Partition, Report, failure_of
from sideline.engine.task import Task
from sideline.errors import RefusedError, SidelineError

REPORT = "report string"
FAULT = "message string, hint string"
# What Kafka's source adds and no event has.
NOT_WANTED = "timestampType"


class Feeding:
    """What Spark ships for a batch: the lease of each of its tasks."""

    def __init__(self, task: Task, leases: Mapping[int, Lease]) -> None:
        self._task = task
        self._leases = {
            number: orjson.dumps(lease.as_dict()).decode() for number, lease in leases.items()
        }

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work the lease of this task, if it has one, on the rows of this task."""
        # A Ctrl-C at the terminal is the driver's business; Spark listens to it before every task.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context = TaskContext.get()
        number, attempt = (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
        text = self._leases.get(number)
        if text is not None:
            lease = dataclasses.replace(
                Lease.from_dict(orjson.loads(text)), ends_at=time.time() + FED_SECONDS
            )
            report = orjson.dumps(self._work(lease, attempt, batches).as_dict()).decode()
            yield pa.RecordBatch.from_pydict({"report": [report]})
        # A worker whose rows were not all taken is thrown away by Spark.
        for _ in batches:
            pass

    def _work(self, lease: Lease, attempt: int, batches: Iterator[pa.RecordBatch]) -> Report:
        try:
            if lease.care:
                return self._work_with_care(lease, attempt, batches)
            feed = Feed(batches, lease.shares)
            return self._task.worker(lease).work(lease, attempt, feed)
        except SidelineError as error:
            # Rows that do not fit, or a host that is set up otherwise.
            stage = "batch" if issubclass(type(error), RefusedError) else "setup"
            return Report(lease.round, failure=failure_of(error, event=None, stage=stage))

    def _work_with_care(
        self, lease: Lease, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Report:
        """The keeper and its workers are processes of their own: they read the rows from a file."""
        handle, name = tempfile.mkstemp(prefix="sideline-rows-")
        try:
            with os.fdopen(handle, "wb") as file:
                _write(batches, lease, file)
            return self._task.cell(lease).work(dataclasses.replace(lease, rows=name), attempt)
        finally:
            Path(name).unlink()


def collect(
    frame: DataFrame, task: Task, leases: Mapping[int, Lease], *, named: bool
) -> list[Report]:
    """Run a batch as one Spark job; ``leases`` by the number of the Spark partition.

    ``named``: a task may read several partitions, so that each row has to name its own.
    """
    feeding = Feeding(task, leases)

    def feed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return feeding(batches)

    rows = chosen(frame, named=named).mapInArrow(feed, REPORT).collect()
    return [Report.from_dict(orjson.loads(row.report)) for row in rows]


def check_rows(frame: DataFrame) -> None:
    """Refuse rows that break a promise before any of them is applied: one more look at them all."""
    rows = frame.select("topic", "partition", "offset").mapInArrow(_faults, FAULT).collect()
    if rows:
        raise RefusedError(rows[0].message, hint=rows[0].hint)


def _faults(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What is wrong with the rows of a task, if something is: the first of it."""
    latest: dict[Partition, int] = {}
    said: list[SidelineError] = []
    for batch in batches:
        for partition, start, end in runs(batch) if batch.num_rows and not said else ():
            offsets = batch.column("offset").to_numpy()[start:end]
            try:
                check_order(partition, latest.get(partition, -1), offsets)
            except RefusedError as error:
                said.append(error)
                break
            latest[partition] = int(offsets[-1])
    for one in said:
        yield pa.RecordBatch.from_pydict({"message": [one.message], "hint": [one.hint]})


def chosen(frame: DataFrame, *, named: bool = True) -> DataFrame:
    """The columns that a feed wants, and those for ``event.row``.

    As SQL: a call each for the JVM, where a column made of functions takes dozens.
    """
    wanted = [name for name in COLUMNS if named or name not in PLACE]
    names = [*wanted, *([HEADERS] if HEADERS in frame.columns else []), *further(frame)]
    return frame.selectExpr(*map(_expression, names))


def _expression(name: str) -> str:
    quoted = f"`{name.replace('`', '``')}`"
    return f"unix_millis({quoted}) as {quoted}" if name == "timestamp" else quoted


def further(frame: DataFrame) -> list[str]:
    """The columns that are a query's own."""
    known = {*COLUMNS, HEADERS, NOT_WANTED}
    return [name for name in frame.columns if name not in known]


def _write(batches: Iterator[pa.RecordBatch], lease: Lease, file: object) -> None:
    """Keep the rows that the lease may come to."""
    shares = {share.of: share for share in lease.shares}
    sole = only(shares)
    writer = None
    for batch in batches:
        writer = writer or pa.ipc.new_stream(file, batch.schema)
        for partition, start, end in runs(batch, sole) if batch.num_rows else ():
            share = shares.get(partition)
            offsets = batch.column("offset").to_numpy()[start:end]
            beyond = share is not None and share.bound is not None and offsets.min() >= share.bound
            if not beyond and not (share is not None and offsets.max() < share.start):
                writer.write_batch(batch.slice(start, end - start))
    if writer is None:
        writer = pa.ipc.new_stream(file, pa.schema([]))
    writer.close()
