"""The door through which Spark's Python workers come in: one lease a task."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
from pyspark import Broadcast, TaskContext, cloudpickle

from sideline.engine.lease import Lease, Report, failure_of
from sideline.engine.worker import Access, Worker
from sideline.errors import RefusedError, SidelineError
from sideline.ledger.connection import place

FAREWELL_SECONDS = 0.1

log = logging.getLogger(__name__)

# Spark reuses its Python workers: connections and consumers live as long as the process.
_workers: dict[str, Worker] = {}


class Task:
    """What Spark ships: a reference to the pipeline, never the pipeline, never a secret."""

    def __init__(self, run: str, pipeline: Broadcast[bytes], folders: tuple[str, ...] = ()) -> None:
        self.run = run
        self.pipeline = pipeline
        self.folders = folders
        """Where the driver finds modules: those beside the user's own among them."""

    def __call__(self, leases: Iterable[str]) -> Iterator[str]:
        """Work the leases of this task (there is one)."""
        context = TaskContext.get()
        # Unique and growing within a Spark application, whichever stage or attempt it is.
        attempt = context.taskAttemptId() if context is not None else 0
        for text in leases:
            lease = Lease.from_dict(orjson.loads(text))
            try:
                report = self._worker(lease).work(lease, attempt)
            except SidelineError as error:
                # A host that is set up otherwise: no attempt of any round would fare better.
                failure = failure_of(error, event=None, stage="setup")
                report = Report(lease.round, failure=failure)
            yield orjson.dumps(report.as_dict()).decode()

    def _worker(self, lease: Lease) -> Worker:
        worker = _workers.get(self.run)
        if worker is None:
            if not _workers:
                _begin_process()
            sys.path += [folder for folder in self.folders if folder not in sys.path]
            pipeline = cloudpickle.loads(self.pipeline.value)
            worker = _workers[self.run] = Worker(pipeline, access(lease))
            _spare_garbage_collection()
        return worker


class Farewell:
    """Ends what a run left in a worker process, wherever it happens to find one."""

    def __init__(self, run: str) -> None:
        self.run = run

    def __call__(self, items: Iterable[int]) -> Iterator[int]:
        """Close the run's worker, if it is in this process."""
        worker = _workers.pop(self.run, None)
        if worker is not None:
            _close(worker)
        # Long enough that every slot has to use a process of its own.
        time.sleep(FAREWELL_SECONDS)
        yield from items


def access(lease: Lease) -> Access:
    """Addresses and passwords: from the run's private file, else from this host's settings."""
    if lease.secrets is not None and Path(lease.secrets).exists():
        data: dict[str, Any] = orjson.loads(Path(lease.secrets).read_bytes())
        return Access(data["database"], data["kafka"])
    from sideline import settings  # noqa: PLC0415 - only on a cluster's executors

    found = settings.load()
    database = found.require_database()
    if lease.database not in {None, place(database)}:
        message = (
            f"this host's settings name the database {place(database)}, "
            f"but the pipeline runs with {lease.database}."
        )
        hint = "Set SIDELINE_DATABASE on the executors to the database of the pipeline."
        raise RefusedError(message, hint=hint)
    return Access(database, found.kafka_client())


def _spare_garbage_collection() -> None:
    """A slice makes a hundred thousand objects and no cycles: looking for some costs a quarter."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def _begin_process() -> None:
    # Spark ends its workers by SIGHUP when the application ends.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _end_process)


def _end_process(_number: int, _frame: object) -> None:
    for worker in _workers.values():
        _close(worker)
    os._exit(0)


def _close(worker: Worker) -> None:
    try:
        worker.close()
    except Exception:
        log.exception("teardown failed")
