"""Batches of a Structured Streaming query as the events of a pipeline.

The query's first batch takes the driver's place, and a thread keeps it while the query lives: what
comes back, copies, outboxes, alerts and the group's offsets are looked after as in any run, by
rounds of their own. Only live events are different: they are in Spark's hands already. So each
batch is a job whose tasks are leases that are fed with its rows, until all of them are done.
Progress is the same rows as ever: what lies below it is dropped, whatever Spark repeats.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from sideline.crashpoints import reach
from sideline.engine import feeding, positions, rounds, session
from sideline.engine.batch import Batch, Query, Range, check_ids, look
from sideline.engine.driver import Driver, Job
from sideline.engine.gaps import first_event
from sideline.engine.holding import FED_SECONDS
from sideline.engine.lease import Lease, Partition, Share
from sideline.errors import RefusedError, SidelineError
from sideline.ledger.place import NewPartition
from sideline.sinks import Kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sideline.engine.rounds import State
    from sideline.engine.running import Running
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import TopicInfo

T = TypeVar("T")

# How long a batch waits for what was released before it, and no longer: some of it may be paced.
REPLAY_SECONDS = 10.0
# Before a batch looks again at what it waits for.
LOOK_SECONDS = 0.2
# No wait in place is longer, so that a change of mind (pause, park) is noticed.
MOST_WAIT_SECONDS = 1.0
# The ends of retry topics are asked for this often.
COPIES_SECONDS = 1.0
LEAVE_SECONDS = 30.0
# What a job says that lost a worker or an executor: worth another one. Whatever else went wrong
# is the query's own.
CRASHES = ("Python worker exited unexpectedly", "ExecutorLostFailure", "ExecutorExited")

log = logging.getLogger(__name__)


class Call:
    """A question to the driver's thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def answer(self) -> None:
        """In the driver's thread: what fails ends the driver too."""
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.done.set()


class BatchDriver(Driver):
    """Keeps a pipeline's place while a query brings its live events."""

    query: Query
    kafka: Mapping[str, Any]

    def __init__(self, *parts: Any) -> None:  # noqa: ANN401 - the driver's own
        super().__init__(*parts)
        self._topics: dict[str, TopicInfo] = {}
        self._fed: frozenset[Partition] = frozenset()
        """In the hands of a batch."""
        self._spent: dict[Partition, int] = {}
        """Up to where nothing is left, though progress does not say so yet."""
        self._copies_at = 0.0
        self._checked = False

    def _store_starts(self, topics: list[TopicInfo]) -> None:
        """A query has its own starts: they are known with its first batch."""
        known = {row.topic for row in self._place.rows()}
        positions.store_starts(
            self._pipeline, self._cluster, self._place, [t for t in topics if t.name in known]
        )
        self._topics = {topic.name: topic for topic in topics}

    def _all_done(self) -> bool:
        return False

    def _await(self, seconds: float) -> None:
        try:
            item: Any = self._ended.get(timeout=seconds)
        except queue.Empty:
            item = None
        if isinstance(item, Call):
            item.answer()
        elif item is not None:
            self._jobs.remove(item)
            self._fold(item)
        elif not self.query.is_active:
            self.stop()

    def _pause(self) -> float:
        # Somebody may wait for the end of the query, to start something else.
        return min(super()._pause(), LOOK_SECONDS)

    def _due(self) -> tuple[list[State], list[State]]:
        """What is not in the hands of a batch."""
        self._house.reached(self._look_for_copies)
        ready, relay = super()._due()
        return (
            [state for state in ready if state.partition not in self._fed],
            [state for state in relay if state.partition not in self._fed],
        )

    def _look_for_copies(self) -> None:
        """Retry topics are read as far as they go: nobody holds a slot to wait for more."""
        copies = [state for state in self._states.values() if state.delay_ms is not None]
        if not copies or time.monotonic() < self._copies_at:
            return
        self._copies_at = time.monotonic() + COPIES_SECONDS
        for partition, end in self._cluster.ends(state.partition for state in copies).items():
            self._states[partition].end = self._states[partition].bound = end

    # A batch, step by step; all of it in the driver's thread

    def admit(self, batch: Batch) -> float | None:
        """Know where the query stands, and refuse what would lose or mistake events.

        How long to wait before it is asked again, where a service is away.
        """
        admitted = self._house.reached(partial(self._admit, batch))
        return None if admitted else LOOK_SECONDS

    def _admit(self, batch: Batch) -> None:
        strange = sorted({one.topic for one in batch.starts} - set(self._pipeline.topics))
        if strange:
            message = f"the query reads {', '.join(strange)}, not a topic of {self._pipeline!r}."
            raise RefusedError(message, hint="Name it in topics=, or leave it out of the query.")
        self._house.refresh()
        self._check_cluster(batch)
        self._meet(batch)
        self._close_gaps(batch)
        self._spent.clear()

    def replaying(self) -> bool:
        """Whether something that was released still waits."""
        return any(state.replay and not state.paused for state in self._states.values())

    def step(self, batch: Batch) -> dict[int, Lease] | float | None:
        """The leases of the next job, by its task; or how long to wait; None: all is done."""
        if not self._house.reached(self._pass_holes):
            return LOOK_SECONDS
        self._fed = frozenset(one.partition for task in batch.tasks for one in task)
        left = [one for task in batch.tasks for one in task if self._is_left(one)]
        if not left:
            self._fed = frozenset()
            return None
        self._house.keep()
        wait = self._calm_at - time.monotonic()
        if wait > 0:
            return wait
        now = time.time()
        ready = {one.partition for one in left if self._is_ready(one.partition, left, now)}
        if not ready:
            dues = [self._states[one.partition].due_at - now for one in left]
            return max(LOOK_SECONDS, min(dues))
        self._round += 1
        return self._leases(batch, ready)

    def fold(self, job: Job, leases: Mapping[int, Lease]) -> None:
        """What a job has done."""
        self._fold(job)
        bounds = {share.of: share.bound for lease in leases.values() for share in lease.shares}
        for report in job.reports:
            for part in report.partitions:
                partition = Partition(part.topic, part.partition)
                bound = bounds.get(partition)
                if part.spent and bound is not None:
                    self._spent[partition] = bound
        moved = any(part.consumed for report in job.reports for part in report.partitions)
        if job.error is None and not moved and not self._spent:
            self._calm_at = time.monotonic() + LOOK_SECONDS

    def job(self, leases: Mapping[int, Lease]) -> Job:
        """A job as the driver knows it."""
        held = [share.of for lease in leases.values() for share in lease.shares]
        ends = time.monotonic() + FED_SECONDS
        return Job(self._round, ends, [self._states[partition] for partition in held])

    def _is_left(self, one: Range) -> bool:
        return self._states[one.partition].next_offset < one.until

    def _is_ready(self, partition: Partition, left: list[Range], now: float) -> bool:
        state = self._states[partition]
        if state.paused or state.due_at > now:
            return False
        # A partition that a topic gained waits for the older ones, as far as the batch has them.
        others = {one.partition.number for one in left if one.partition.topic == partition.topic}
        return rounds.may_start(state, self._states) or not (
            others & set(map(int, state.waits_for or ()))
        )

    def _leases(self, batch: Batch, ready: set[Partition]) -> dict[int, Lease]:
        found: dict[int, Lease] = {}
        for number, task in enumerate(batch.tasks):
            shares = tuple(self._share(one) for one in task if one.partition in ready)
            if shares and any(self._is_left(one) for one in task):
                found[number] = Lease(
                    self._pipeline.name,
                    self._place.epoch,
                    self._round,
                    shares,
                    ends_at=0.0,
                    secrets=self._options.secrets,
                    database=self._options.database,
                    guard=self._options.guard,
                    fed=True,
                )
        if self._pipeline.rate and found:
            rate = self._pipeline.rate / min(len(found), self._options.room().slots)
            found = {
                number: dataclasses.replace(lease, rate=rate) for number, lease in found.items()
            }
        return found

    def _share(self, one: Range) -> Share:
        state = self._states[one.partition]
        # With care only as far as the event may be that ended a worker.
        bound = min(one.until, state.care_until) if state.careful else one.until
        return Share(
            one.partition.topic,
            one.partition.number,
            bound,
            ahead=False,
            care=state.careful,
            replay=state.replay,
            start=state.next_offset,
        )

    # Positions

    def _check_cluster(self, batch: Batch) -> None:
        """The query and the pipeline name their Kafka each for itself."""
        if self._checked:
            return
        known = {name: set(topic.partitions) for name, topic in self._topics.items()}
        there = [one for one in batch.ends if one.number in known.get(one.topic, ())]
        # The query's own ends are those of the log, whatever transactions are open in it.
        ends = self._cluster.ends_written(there)
        for partition, end in batch.ends.items():
            if ends.get(partition, -1) < end:
                message = (
                    f"the query reads {partition} as far as {end}, but the Kafka of the "
                    f"pipeline's settings ends at {ends.get(partition, 0)}."
                )
                hint = "Set SIDELINE_KAFKA to the query's kafka.bootstrap.servers."
                raise RefusedError(message, hint=hint)
        self._checked = True

    def _meet(self, batch: Batch) -> None:
        """Store partitions that are not known yet: a new topic's where the query starts."""
        fresh = [one for one in batch.starts if one not in self._states]
        if not fresh:
            return
        known = {partition.topic for partition in self._states}
        new: list[NewPartition] = []
        for name in sorted({one.topic for one in fresh}):
            topic = self._topics[name] = self._cluster.topic(name)
            if name in known:
                positions.store_starts(self._pipeline, self._cluster, self._place, [topic])
                continue
            new += [
                NewPartition(name, one.number, topic.id, batch.starts[one])
                for one in fresh
                if one.topic == name
            ]
        self._place.add_all(new)
        self._house.refresh()

    def _close_gaps(self, batch: Batch) -> None:
        """What lies between progress and the batch must be nothing: Kafka is asked."""
        for partition, start in batch.starts.items():
            state = self._states[partition]
            if state.next_offset >= start:
                continue
            name = self._pipeline.name
            found = first_event(dict(self.kafka), name, partition, state.next_offset, start)
            if found is not None:
                at = {
                    str(one.number): self._states[one].next_offset
                    for one in batch.starts
                    if one.topic == partition.topic
                }
                raise _gap(name, partition, found, start, at)
            self._spent[partition] = start
        self._pass_holes()

    def _pass_holes(self) -> None:
        """Move progress over what has no event, up to where the rows of a batch end."""
        moves = {
            partition: until
            for partition, until in self._spent.items()
            if self._states[partition].next_offset < until
        }
        if not moves:
            return
        reach("before-holes")
        self._place.run(
            "pass_holes",
            topics=[partition.topic for partition in moves],
            partitions=[partition.number for partition in moves],
            seen=[self._states[partition].next_offset for partition in moves],
            until=list(moves.values()),
        )
        self._house.refresh()
        for partition, until in moves.items():
            if self._states[partition].next_offset >= until:
                del self._spent[partition]


class Door:
    """A pipeline that a query feeds, from its first batch to its end."""

    def __init__(self, pipeline: Pipeline, frame: DataFrame, query: Query) -> None:
        from sideline.engine.running import Running  # noqa: PLC0415 - it knows this module

        self.query = query
        self._jvm: Any = frame.sparkSession.sparkContext._jvm  # noqa: SLF001
        self._running: Running = Running.begin(pipeline, frame.sparkSession, query=query)
        driver = self._running.driver
        if not isinstance(driver, BatchDriver):
            raise TypeError(driver)
        self._driver: BatchDriver = driver
        self._batch = threading.Lock()

    def apply(self, frame: DataFrame, batch: Batch) -> None:
        """Commit all of a batch, wherever it was before; wait in place for what heals."""
        with self._batch:
            if batch.may_multiply:
                feeding.check_rows(frame)
            while (wait := self._ask(partial(self._driver.admit, batch))) is not None:
                self._sleep(wait)
            self._wait_for_replays()
            while (step := self._ask(partial(self._driver.step, batch))) is not None:
                if isinstance(step, float):
                    self._sleep(min(step, MOST_WAIT_SECONDS))
                else:
                    self._run(frame, step, named=batch.mixed)
            reach("batch-committed")

    def end(self) -> None:
        """Free the place."""
        self._running.stop()
        try:
            self._running.wait(LEAVE_SECONDS)
        # Whoever waited for the batch has heard of it.
        except BaseException as error:  # noqa: BLE001
            log.debug("the pipeline ended: %s", error)

    @property
    def is_open(self) -> bool:
        """Whether it still keeps the place."""
        return self._running.is_alive

    def _run(self, frame: DataFrame, leases: dict[int, Lease], *, named: bool) -> None:
        job = self._ask(partial(self._driver.job, leases))
        try:
            job.reports = feeding.collect(frame, self._running.jobs.task, leases, named=named)
        except Exception as error:
            if not any(words in str(error) for words in CRASHES) or not self.query.is_active:
                raise
            job.error = error
        self._ask(partial(self._driver.fold, job, leases))

    def _wait_for_replays(self) -> None:
        until = time.monotonic() + REPLAY_SECONDS
        while time.monotonic() < until and self._ask(self._driver.replaying):
            self._sleep(LOOK_SECONDS)

    def _sleep(self, seconds: float) -> None:
        """In the JVM, in the query's own thread: there it is heard when the query is stopped."""
        self._jvm.java.lang.Thread.sleep(int(seconds * 1000))

    def _ask(self, function: Callable[[], T]) -> T:
        call = Call(function)
        self._driver.ask(call)
        while not call.done.wait(LOOK_SECONDS):
            if not self._running.is_alive:
                break
        if not call.done.is_set():
            # It tells why it ended, if something was wrong.
            self._running.wait()
            message = "the pipeline's driver has ended before the batch."
            raise RefusedError(message, hint="Start the query again.")
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result


_doors: WeakKeyDictionary[Pipeline, Door] = WeakKeyDictionary()
_opening = threading.Lock()


def apply(pipeline: Pipeline, frame: DataFrame, _number: int) -> None:
    """Apply a batch of a query to its pipeline; see `Pipeline.foreach_batch`."""
    try:
        _check(pipeline)
        query = Query.of(frame)
        check_ids(pipeline.dedupe, frame)
        door = _doors.get(pipeline)
        if door is None or not door.query.same(query):
            session.check(frame.sparkSession)
            query.check(frame)
        batch = look(frame, query)
        _door(pipeline, frame, query).apply(frame, batch)
    except SidelineError as error:
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            # Spark shows the traceback of what ends a query, and nothing else.
            error.add_note(error.hint)
        raise


def _check(pipeline: Pipeline) -> None:
    if isinstance(pipeline.sink, Kafka):
        # Its progress is in Kafka too, in transactions of its own producers.
        message = f"pipeline {pipeline.name!r} has Kafka() as its sink: no query can feed it."
        raise RefusedError(message, hint="Run it with `sideline run`.")
    if getattr(pipeline, "prepare", None) is not None:
        message = f"pipeline {pipeline.name!r} has prepare=: the query's own steps stand for it."
        raise RefusedError(message, hint="Drop prepare=, and put it before writeStream.")


def _door(pipeline: Pipeline, frame: DataFrame, query: Query) -> Door:
    with _opening:
        door = _doors.get(pipeline)
        if door is not None and not (door.query.same(query) and door.is_open):
            if door.query.is_active and not door.query.same(query):
                message = f"pipeline {pipeline.name!r} is fed by another query already."
                raise RefusedError(message, hint="Stop that one first, or name another pipeline.")
            door.end()
            del _doors[pipeline]
            door = None
        if door is None:
            door = _doors[pipeline] = Door(pipeline, frame, query)
        return door


@atexit.register
def _close_doors() -> None:
    for door in list(_doors.values()):
        door.end()


def _gap(
    name: str, partition: Partition, found: int, start: int, positions: dict[str, int]
) -> RefusedError:
    message = (
        f"the query goes on at {partition}/{start}, but pipeline {name!r} has not had event "
        f"{partition}/{found} yet: its events would be lost."
    )
    hint = (
        "Start the query with a new checkpoint where the pipeline stands, by the option\n"
        f'startingOffsets={{"{partition.topic}": {_json(positions)}}}\n'
        "or apply what lies between with `sideline run --once` first."
    )
    return RefusedError(message, hint=hint)


def _json(positions: dict[str, int]) -> str:
    return "{" + ", ".join(f'"{number}": {at}' for number, at in positions.items()) + "}"
