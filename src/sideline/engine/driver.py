"""One process per pipeline: plan a round, run it, fold its reports, again.

Nothing here is done per event: the driver sees leases and reports only.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import KafkaException

from sideline.crashpoints import reach
from sideline.engine import positions, rounds
from sideline.engine.lease import Lease, Partition, Report
from sideline.engine.room import Room
from sideline.engine.rounds import State
from sideline.errors import (
    DatabaseUnreachableError,
    DataLostError,
    EventFailedError,
    FencedError,
    KafkaUnreachableError,
    NotFoundError,
    PartialError,
    RefusedError,
    SidelineError,
)
from sideline.ledger.place import PartitionRow, Place

if TYPE_CHECKING:
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster, TopicInfo

# The next round is submitted this long before the last one ends: a job takes 60 ms to start, a
# worker that has to be forked and connected some 200 more.
HAND_OVER_SECONDS = 0.3
# The group's offsets are shown to lag tools this often, and again when idle: brokers forget them.
GROUP_COMMIT_SECONDS = 1.0
GROUP_REFRESH_SECONDS = 3600.0
TOPIC_CHECK_SECONDS = 5.0
IDLE_BEAT_SECONDS = 10.0
STOP_SECONDS = 20.0
# Rounds that Spark has no slot for, or that hang, are not joined by ever more of them.
MOST_ROUNDS = 4
# So many rounds in a row that ended in a crash and moved nothing are no accident.
CRASHES = 10

log = logging.getLogger(__name__)

Runner = Callable[[list[Lease]], list[Report]]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a pipeline is run, beyond what it declares."""

    once: bool = False
    take_over: bool = False
    accept_loss: bool = False
    wait_for_topics: bool = False
    room: Callable[[], Room] = lambda: Room(2, hand_over=True)
    """What may be used of Spark; it changes with the other pipelines of the session."""
    secrets: str | None = None
    database: str | None = None
    """The database's place, as far as it may be shown."""
    start_given: bool = False
    """The start was said for this run: only a new pipeline may."""


@dataclasses.dataclass(slots=True)
class Job:
    """A round under way."""

    number: int
    ends: float
    """Monotonic time at which its leases end."""
    reports: list[Report] = dataclasses.field(default_factory=list)
    error: BaseException | None = None


class Driver:
    """Runs one pipeline until it is stopped, its bounds are reached, or it cannot go on."""

    def __init__(
        self,
        pipeline: Pipeline,
        place: Place,
        cluster: Cluster,
        run_round: Runner,
        options: Options,
    ) -> None:
        self._pipeline = pipeline
        self._place = place
        self._cluster = cluster
        self._run_round = run_round
        self._options = options
        self._states: dict[Partition, State] = {}
        self._rows: list[PartitionRow] = []
        self._before: dict[Partition, int] = {}
        self._round = 0
        self._jobs: list[Job] = []
        self._ended: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._crashes = 0
        self._calm_at = 0.0
        self._committed: dict[Partition, int] = {}
        self._group_at = 0.0
        self._topics_at = 0.0
        self._refreshed_at = 0.0
        self._foreign = False
        self._beat_at = 0.0
        self._beat_consumed = 0
        self._rate = 0.0
        self.troubles: dict[str, str] = {}
        """What is not as it should be, by partition or service; for status."""

    def stop(self) -> None:
        """Start no further round; leases end at their next slice boundary."""
        self._stop.set()
        self._ended.put(None)

    def rows(self) -> list[PartitionRow]:
        """Progress as last read."""
        return list(self._rows)

    def states(self) -> list[State]:
        """What is known of the partitions."""
        return list(self._states.values())

    def run(self) -> None:
        """Everything from taking the place to leaving it."""
        state, note = "failed", None
        try:
            self._begin()
            self._loop()
            state = "stopped"
        except SidelineError as error:
            note = error.message
            raise
        except BaseException as error:
            note = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._finish_jobs()
            self._leave(state, note)

    # Beginning

    def _begin(self) -> None:
        if self._options.start_given and self._place.rows():
            message = (
                f"pipeline {self._pipeline.name!r} has progress already; --from is for new ones."
            )
            hint = "Run it without --from to go on where it stopped, or give it another name."
            raise RefusedError(message, hint=hint)
        topics = self._find_topics()
        if self._stop.is_set():
            return
        self.troubles.pop("topics", None)
        self._place.hold(take_over=self._options.take_over)
        self._place.run("bury_workers")
        positions.check_losses(
            self._cluster, self._place, topics, accept_loss=self._options.accept_loss
        )
        positions.store_starts(self._pipeline, self._cluster, self._place, topics)
        self._topics_at = time.monotonic()
        self._refresh()
        ends = self._cluster.ends(self._states)
        for partition, state in self._states.items():
            state.end = ends.get(partition, -1)
            state.bound = state.end if self._options.once else None

    def _find_topics(self) -> list[TopicInfo]:
        while True:
            try:
                return [self._cluster.topic(name) for name in self._pipeline.topics]
            except NotFoundError as error:
                if not self._options.wait_for_topics:
                    raise
                if self._stop.is_set():
                    return []
                self.troubles["topics"] = error.message
                self._stop.wait(1.0)

    # Rounds

    def _loop(self) -> None:
        while not (self._stop.is_set() or self._all_done()):
            self._keep_house()
            self._submit_if_due()
            self._await(self._pause())

    def _all_done(self) -> bool:
        if not self._options.once or self._jobs:
            return False
        return all(state.finished for state in self._states.values())

    def _submit_if_due(self) -> None:
        now = time.monotonic()
        if now < self._calm_at:
            return
        live = [job for job in self._jobs if now < job.ends + rounds.LEASE_SECONDS]
        room = self._options.room()
        if live:
            if not room.hand_over or len(live) > 1:
                return
            if live[-1].ends - now > HAND_OVER_SECONDS:
                return
        elif (not room.hand_over and self._jobs) or len(self._jobs) >= MOST_ROUNDS:
            return
        ready = rounds.eligible(self._states, time.time())
        if not ready:
            return
        self._submit(ready, live, room.slots)

    def _submit(self, ready: list[State], live: list[Job], slots: int) -> None:
        self._round += 1
        groups = rounds.pack(ready, slots, self._before)
        self._before = {
            state.partition: slot for slot, group in enumerate(groups) for state in group
        }
        seconds = rounds.lease_seconds(ready, concurrency=self._pipeline.concurrency)
        if live:
            seconds += max(0.0, live[-1].ends - time.monotonic())
        leases = rounds.leases(
            groups,
            pipeline=self._pipeline.name,
            epoch=self._place.epoch,
            number=self._round,
            ends_at=time.time() + seconds,
            rate=self._pipeline.rate,
            secrets=self._options.secrets,
            database=self._options.database,
        )
        job = Job(self._round, time.monotonic() + seconds)
        self._jobs.append(job)
        threading.Thread(
            target=self._run_job,
            args=(job, leases),
            name=f"sideline-round-{job.number}",
            daemon=True,
        ).start()

    def _run_job(self, job: Job, leases: list[Lease]) -> None:
        try:
            job.reports = self._run_round(leases)
        # Spark's own errors have no common ancestor; the driver's thread decides what they mean.
        except BaseException as error:  # noqa: BLE001
            job.error = error
        self._ended.put(job)

    def _await(self, seconds: float) -> None:
        try:
            job = self._ended.get(timeout=seconds)
        except queue.Empty:
            return
        if job is not None:
            self._jobs.remove(job)
            self._fold(job)

    def _pause(self) -> float:
        """How long there is nothing to decide."""
        now = time.monotonic()
        moments = [self._group_at + GROUP_COMMIT_SECONDS]
        if self._jobs:
            if self._options.room().hand_over:
                moments.append(self._jobs[-1].ends - HAND_OVER_SECONDS)
        else:
            due = rounds.next_due(self._states.values())
            moments.append(now + max(0.02, due - time.time()))
        return max(0.005, max(min(moments), self._calm_at) - now)

    # Reports

    def _fold(self, job: Job) -> None:
        if job.error is not None:
            self._crashed(job)
            return
        self.troubles.pop("spark", None)
        moved = False
        for report in job.reports:
            moved |= any(part.consumed for part in report.partitions)
            self._fold_report(report)
        if moved:
            self._crashes = 0

    def _fold_report(self, report: Report) -> None:
        if report.trouble:
            self.troubles["workers"] = report.trouble
        else:
            self.troubles.pop("workers", None)
        for part in report.partitions:
            partition = Partition(part.topic, part.partition)
            state = self._states.get(partition)
            if state is None:
                continue
            state.next_offset = max(state.next_offset, part.next_offset)
            state.end = max(state.end, part.high)
            state.due_at = time.time() + part.retry_in_seconds if part.retry_in_seconds else 0.0
            if part.trouble:
                self.troubles[str(partition)] = part.trouble
            else:
                self.troubles.pop(str(partition), None)
        if report.failure is not None:
            raise _failed(self._pipeline, report.failure)
        if report.lost:
            self._lost(report.lost)

    def _lost(self, names: list[str]) -> None:
        topics = self._find_topics()
        positions.check_losses(self._cluster, self._place, topics, accept_loss=False)
        message = f"Kafka has no events at the position of {', '.join(names)}."
        raise DataLostError(message, hint="Go on without these events with --accept-loss.")

    def _crashed(self, job: Job) -> None:
        if isinstance(job.error, SidelineError):
            raise job.error
        self._crashes += 1
        reason = _last_line(job.error)
        log.warning("round %d ended in a crash: %s", job.number, reason)
        self.troubles["spark"] = reason
        # The first may be an accident; what crashes again is not hurried into the next one.
        self._calm_at = time.monotonic() + min(3.0, 0.1 * 2 ** (self._crashes - 1))
        if self._crashes >= CRASHES:
            message = f"{self._crashes} rounds in a row ended in a crash: {reason}"
            raise PartialError(message, hint="Run with --debug to see Spark's own words.")

    # Housekeeping

    def _keep_house(self) -> None:
        now = time.monotonic()
        if now < self._group_at + GROUP_COMMIT_SECONDS:
            return
        self._group_at = now
        try:
            self._refresh()
            self._beat(now)
            if now > self._topics_at + TOPIC_CHECK_SECONDS:
                self._topics_at = now
                self._watch_topics()
            self.troubles.pop("database", None)
            self._show_group(now)
            self.troubles.pop("kafka", None)
        except (DatabaseUnreachableError, psycopg.OperationalError) as error:
            self.troubles["database"] = str(error)
        except (KafkaUnreachableError, KafkaException) as error:
            self.troubles["kafka"] = str(error)

    def _beat(self, now: float) -> None:
        """Write down how fast it goes; seldom while nothing moves."""
        consumed = sum(row.consumed for row in self._rows)
        seconds = now - self._beat_at
        rate = (consumed - self._beat_consumed) / seconds if self._beat_at else 0.0
        if rate or self._rate or seconds > IDLE_BEAT_SECONDS:
            self._place.run("driver_beat", events_per_second=rate)
            self._rate, self._beat_at, self._beat_consumed = rate, now, consumed

    def _refresh(self) -> None:
        # A topic that the pipeline named once and names no more keeps its rows, unread.
        rows = self._place.rows()
        self._rows = [row for row in rows if row.topic in self._pipeline.topics]
        now = time.time()
        for row in self._rows:
            partition = Partition(row.topic, row.partition)
            state = self._states.get(partition)
            if state is None:
                # What there was not when it began is not part of "all there is now".
                bound = row.next_offset if self._options.once else None
                state = self._states[partition] = State(partition, row.next_offset, bound=bound)
            state.next_offset = max(state.next_offset, row.next_offset)
            state.due_at = row.due_at.timestamp() if row.due_at else 0.0
            state.trouble = row.trouble
            if state.due_at <= now:
                state.due_at = 0.0
            waits = {int(number): offset for number, offset in (row.waits_for or {}).items()}
            state.waits_for = waits or None
        for state in self._states.values():
            if state.waits_for and rounds.may_start(state, self._states):
                self._place.run(
                    "stop_waiting",
                    topic=state.partition.topic,
                    partition=state.partition.number,
                )
                state.waits_for = None
        if any(row.lease[0] > self._place.epoch for row in self._rows):
            message = f"pipeline {self._pipeline.name!r} is run by another process now."
            raise FencedError(message, hint="Nothing was written after it took over.")

    def _show_group(self, now: float, *, final: bool = False) -> None:
        """Commit the group's offsets, so that ordinary lag tools see the pipeline (C5)."""
        offsets = {
            Partition(row.topic, row.partition): row.next_offset
            for row in self._rows
            if row.next_offset > 0
        }
        stale = now > self._refreshed_at + GROUP_REFRESH_SECONDS
        changed = {
            partition: offset
            for partition, offset in offsets.items()
            if stale or self._committed.get(partition) != offset
        }
        if not changed:
            return
        reach("before-group-commit")
        try:
            shown = self._cluster.commit_group(self._pipeline.name, changed)
        except RefusedError as error:
            # Progress is in PostgreSQL: the group only shows it.
            self.troubles["group"] = error.message
            return
        if shown:
            self._committed |= changed
            self._foreign = False
            self.troubles.pop("group", None)
        elif not self._foreign:
            self._foreign = True
            self.troubles["group"] = (
                f"a foreign consumer is a member of group {self._pipeline.name!r}; "
                "lag tools do not see this pipeline until it leaves"
            )
            log.warning("%s", self.troubles["group"])
        if stale and not final:
            self._refreshed_at = now

    def _watch_topics(self) -> None:
        topics = self._find_known_topics()
        known = {(row.topic, row.partition): row for row in self._rows}
        for topic in topics:
            ids = {row.topic_id for row in self._rows if row.topic == topic.name}
            if ids and ids != {topic.id}:
                positions.check_losses(self._cluster, self._place, topics, accept_loss=False)
            if any((topic.name, number) not in known for number in topic.partitions):
                positions.store_starts(self._pipeline, self._cluster, self._place, [topic])
                self._refresh()

    def _find_known_topics(self) -> list[TopicInfo]:
        found = []
        for name in self._pipeline.topics:
            try:
                found.append(self._cluster.topic(name))
                self.troubles.pop(name, None)
            except NotFoundError as error:
                # Deleted under our feet: it may come back, with another id.
                self.troubles[name] = error.message
        return found

    # Ending

    def _finish_jobs(self) -> None:
        if not self._jobs or not self._place.epoch:
            return
        try:
            reach("while-stopping")
            self._place.run("request_stop")
        except (SidelineError, psycopg.Error) as error:
            log.warning("workers could not be told to stop: %s", error)
        until = time.monotonic() + STOP_SECONDS
        while self._jobs and time.monotonic() < until:
            try:
                job = self._ended.get(timeout=0.5)
            except queue.Empty:
                continue
            if job is not None and job in self._jobs:
                self._jobs.remove(job)

    def _leave(self, state: str, note: str | None) -> None:
        if not self._place.epoch:
            self._place.close()
            return
        try:
            self._refresh()
            self._show_group(time.monotonic(), final=True)
        except (SidelineError, psycopg.Error, KafkaException) as error:
            log.debug("the last offsets were not shown to the group: %s", error)
        try:
            self._place.leave(state, note)
        except (SidelineError, psycopg.Error) as error:
            log.debug("the end was not recorded: %s", error)


def _failed(pipeline: Pipeline, failure: dict[str, Any]) -> SidelineError:
    if failure["stage"] == "setup":
        message = (
            f"the setup of pipeline {pipeline.name!r} failed: "
            f"{failure['error']}: {failure['message']}"
        )
        broken = PartialError(message, hint="Mend it, then run again; it goes on where it stood.")
        broken.add_note(failure["traceback"])
        return broken
    if failure["kind"] == "deployment":
        message = (
            f"pipeline {pipeline.name!r} does not fit its database: {failure['message']} "
            f"(at event {failure['event']}; nothing of it was applied)"
        )
        return EventFailedError(message, hint="Mend the table or the handler, then run again.")
    message = (
        f"event {failure['event']} failed in the {failure['stage']}: "
        f"{failure['error']}: {failure['message']}"
    )
    error = EventFailedError(
        message,
        hint="Everything before it is applied. Mend the handler and run again: it goes on there.\n"
        "--debug shows the handler's traceback.",
    )
    error.add_note(failure["traceback"])
    return error


def _last_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Exception" in line or "exit" in line]
    return (telling or lines or [type(error).__name__])[-1][:300]
