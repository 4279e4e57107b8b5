"""The door through which Spark's Python workers come in: one lease a task."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

import orjson
from pyspark import Broadcast, TaskContext, cloudpickle

from sideline import loading
from sideline.engine import current, secrets
from sideline.engine.cell import Cell, Charge
from sideline.engine.lease import Lease, Report, failure_of
from sideline.engine.worker import Access, Worker
from sideline.errors import SidelineError

FAREWELL_SECONDS = 0.1
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(event_id)s %(message)s"

log = logging.getLogger(__name__)

# What a worker has for its last words once Spark has hung up.
LAST_SECONDS = 10
# Spark reuses its Python workers: connections and consumers live as long as the process.
_workers: dict[str, Worker] = {}
_cells: dict[str, Cell] = {}
# Runs whose workers have held a lease here, and have been spared once more since.
_settled: set[str] = set()


class Task:
    """What Spark ships: a reference to the pipeline, never the pipeline, never a secret."""

    def __init__(self, run: str, pipeline: Broadcast[bytes], folders: tuple[str, ...] = ()) -> None:
        self.run = run
        self.pipeline = pipeline
        self.folders = folders
        """Where the driver finds modules: those beside the user's own among them."""

    def __call__(self, leases: Iterable[str]) -> Iterator[str]:
        """Work the leases of this task (there is one)."""
        # A Ctrl-C at the terminal is the driver's business; Spark listens to it before every task.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context = TaskContext.get()
        # Unique and growing within a Spark application, whichever stage or attempt it is.
        attempt = context.taskAttemptId() if context is not None else 0
        for text in leases:
            lease = Lease.from_dict(orjson.loads(text))
            try:
                worker = self.cell(lease) if lease.care else self.worker(lease)
                report = worker.work(lease, attempt)
            except SidelineError as error:
                # A host that is set up otherwise: no attempt of any round would fare better.
                failure = failure_of(error, event=None, stage="setup")
                report = Report(lease.round, failure=failure)
            yield orjson.dumps(report.as_dict()).decode()

    def worker(self, lease: Lease) -> Worker:
        """The run's worker in this process."""
        worker = _workers.get(self.run)
        if worker is None:
            self._begin()
            pipeline = cloudpickle.loads(self.pipeline.value)
            worker = _workers[self.run] = Worker(pipeline, access(lease))
            _spare_garbage_collection()
        elif self.run not in _settled:
            # Spark collects after every task, and the first lease has loaded what all of them use.
            # Not again and again: what is frozen is never found to be garbage.
            _settled.add(self.run)
            _spare_garbage_collection()
        return worker

    def cell(self, lease: Lease) -> Cell:
        """For leases with care; a worker that is here already keeps its connections."""
        cell = _cells.get(self.run)
        if cell is None:
            self._begin()
            charge = Charge(self.pipeline.value, access(lease), tuple(sys.path))
            cell = _cells[self.run] = Cell(charge)
        return cell

    def _begin(self) -> None:
        if not (_workers or _cells):
            _begin_process()
        loading.find_like(self.folders)


class Farewell:
    """Ends what a run left in a worker process, wherever it happens to find one."""

    def __init__(self, run: str) -> None:
        self.run = run

    def __call__(self, items: Iterable[int]) -> Iterator[int]:
        """Close the run's worker, if it is in this process."""
        for one in (_workers.pop(self.run, None), _cells.pop(self.run, None)):
            if one is not None:
                _close(one)
        _settled.discard(self.run)
        # Long enough that every slot has to use a process of its own.
        time.sleep(FAREWELL_SECONDS)
        yield from items


def access(lease: Lease) -> Access:
    """Addresses and passwords: from the run's private file, else from this host's settings."""
    return secrets.find(lease.secrets, lease.database)


def _spare_garbage_collection() -> None:
    """A slice makes a hundred thousand objects and no cycles: looking for some costs a quarter."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def _begin_process() -> None:
    # Spark ends its workers by SIGHUP when the application ends.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _end_process)
    begin_logs()


def begin_logs() -> None:
    """Let log lines carry the event's id."""
    current.mark_log_records()
    # What the user set up, in the handler's module or in setup, stands.
    logging.basicConfig(format=LOG_FORMAT)


def _end_process(_number: int, _frame: object) -> None:
    # A signal that comes inside of a consumer's poll closes the consumer there, and librdkafka
    # waits for ever for what the poll still holds: the kernel ends what does not end itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LAST_SECONDS)
    for worker in _workers.values():
        _close(worker)
    for cell in _cells.values():
        _close(cell)
    os._exit(0)


def _close(worker: Worker | Cell) -> None:
    try:
        worker.close()
    except Exception:
        log.exception("teardown failed")
