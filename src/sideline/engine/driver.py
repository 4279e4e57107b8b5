"""One process per pipeline: plan a round, run it, fold its reports, again.

Nothing here is done per event: the driver sees leases and reports only.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psycopg

from sideline.alerts import FAILED, FLOOD, WORKERS, Alerting, Key
from sideline.crashpoints import reach
from sideline.engine import positions, retries, rounds
from sideline.engine.housekeeping import House
from sideline.engine.lease import Lease, Partition, Report
from sideline.engine.room import Room
from sideline.engine.rounds import State
from sideline.errors import (
    DataLostError,
    EventFailedError,
    FencedError,
    GuardrailError,
    NotFoundError,
    PartialError,
    RefusedError,
    SidelineError,
    UnclearError,
    is_interrupt,
)
from sideline.ledger.place import PartitionRow, Place
from sideline.retention import Retention

if TYPE_CHECKING:
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster, TopicInfo

# The next round is submitted this long before the last one ends: a job takes 60 ms to start, a
# worker that has to be forked and connected some 200 more, and all of it longer on a busy machine.
HAND_OVER_SECONDS = 1.0
# Nobody of the second round has run before: its workers are forked, connect and find the broker.
FIRST_HAND_OVER_SECONDS = 4.0
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
    replay_only: bool = False
    """Read no live events; end when the operations that run are done."""
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
    guard: bool = True
    """Whether the flood guard stands."""
    alerting: Alerting = dataclasses.field(default_factory=Alerting)
    retention: Retention = dataclasses.field(default_factory=Retention)
    bounds: Mapping[Partition, int] | None = None
    """Where a run that applies a range again ends; its partitions are stored already."""
    fed: bool = False
    """Live events come from a query's batches; see `sideline.engine.batches`."""


@dataclasses.dataclass(slots=True)
class Job:
    """A round under way."""

    number: int
    ends: float
    """Monotonic time at which its leases end."""
    states: list[State] = dataclasses.field(default_factory=list)
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
        self._ends = options.once or options.replay_only
        self._house = House(
            pipeline,
            place,
            cluster,
            once=self._ends,
            fed=options.fed,
            alerting=options.alerting,
            retention=options.retention,
        )
        self._states = self._house.states
        self._before: dict[Partition, int] = {}
        self._round = 0
        self._jobs: list[Job] = []
        self._ended: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._calm_at = 0.0
        self._failed_at: tuple[str, str] = (FAILED, "")
        self.troubles = self._house.troubles
        """What is not as it should be, by partition or service; for status."""

    def stop(self) -> None:
        """Start no further round; leases end at their next slice boundary."""
        self._stop.set()
        self._ended.put(None)

    def ask(self, call: Any) -> None:  # noqa: ANN401 - see `sideline.engine.batches`
        """Have the driver's thread answer a question, where it answers questions."""
        self._ended.put(call)

    @property
    def stopping(self) -> bool:
        """Whether no further round is wanted."""
        return self._stop.is_set()

    def rows(self) -> list[PartitionRow]:
        """Progress as last read."""
        return list(self._house.rows)

    def states(self) -> list[State]:
        """What is known of the partitions."""
        return list(self._states.values())

    def run(self) -> None:
        """Everything from taking the place to leaving it."""
        state, note = "failed", None
        failure: BaseException | None = None
        try:
            self._begin()
            self._loop()
            state = "stopped"
        except SidelineError as error:
            note, failure = error.message, error
            raise
        except BaseException as error:
            note, failure = f"{type(error).__name__}: {error}", error
            raise
        finally:
            self._finish_jobs()
            self._leave(state, note, failure)
        self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        """All there is now was wanted, and a person keeps some of it waiting."""
        left = rounds.held_up(self._states)
        kept = [state for state in self._states.values() if state.paused and state.replay]
        if not self._ends or self._stop.is_set() or not (left or kept):
            return
        names = ", ".join(str(state.partition) for state in left or kept)
        what = "not all was read of" if left else "what was released still waits in"
        message = f"pipeline {self._pipeline.name!r} is paused; {what} {names}."
        hint = f"`sideline status {self._pipeline.name}` says who paused it, and how to resume it."
        raise PartialError(message, hint=hint)

    # Beginning

    def _begin(self) -> None:
        if self._options.start_given and self._place.rows():
            message = (
                f"pipeline {self._pipeline.name!r} has progress already; --from is for new ones."
            )
            hint = (
                "Run it without --from to go on where it stopped; `sideline reprocess` applies a\n"
                "range again."
            )
            raise RefusedError(message, hint=hint)
        topics = self._find_topics()
        if self._stop.is_set():
            return
        self.troubles.pop("topics", None)
        self._place.hold(take_over=self._options.take_over)
        self._place.run("bury_workers")
        if not self._options.guard:
            self._place.change("override guard", (), {})
        retry_topics = self._find_retry_topics()
        bounds = self._options.bounds
        positions.check_losses(
            self._cluster,
            self._place,
            [*topics, *retry_topics],
            accept_loss=self._options.accept_loss,
            bounds=bounds,
        )
        if bounds is None:
            self._store_starts(topics)
            retries.store_starts(self._cluster, self._place, retry_topics)
        self._house.saw_topics()
        self._house.refresh()
        read = {one: state for one, state in self._states.items() if self._house.reads(one.topic)}
        ends = self._cluster.ends(read)
        for partition, state in read.items():
            state.end = ends.get(partition, -1)
            state.bound = state.end if self._options.once else None
            if bounds is not None:
                state.bound = bounds.get(partition, state.next_offset)
            if self._options.replay_only or self._options.fed:
                state.bound = state.next_offset
        if self._options.once and bounds is None:
            rounds.extend_bounds(self._states)

    def _store_starts(self, topics: list[TopicInfo]) -> None:
        positions.store_starts(self._pipeline, self._cluster, self._place, topics)

    def _find_retry_topics(self) -> list[TopicInfo]:
        if self._pipeline.again is not None:
            # A range that is applied again has its failures elsewhere.
            return []
        known = retries.know(self._pipeline, self._place)
        found = retries.find(self._pipeline, self._cluster, known)
        names = {topic.name for topic in found}
        self._house.delays = {
            retry.topic: retry.delay_ms for retry in known if retry.topic in names
        }
        return found

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
            # First what somebody waits for: the house asks PostgreSQL and Kafka for a while.
            self._submit_if_due()
            self._house.keep()
            self._await(self._pause())

    def _all_done(self) -> bool:
        if not self._ends or self._jobs:
            return False
        left = {state.partition for state in rounds.held_up(self._states)}
        now = time.time()
        return all(
            (rounds.is_done(state, now) and not (state.replay and not state.paused))
            or (state.partition in left and not state.unsent)
            for state in self._states.values()
        )

    def _submit_if_due(self) -> None:
        now = time.monotonic()
        if now < self._calm_at:
            return
        live = [job for job in self._jobs if now < job.ends + rounds.LEASE_SECONDS]
        room = self._options.room()
        if live:
            if not room.hand_over or len(live) > 1:
                return
            if live[-1].ends - now > self._ahead():
                return
        elif (not room.hand_over and self._jobs) or len(self._jobs) >= MOST_ROUNDS:
            return
        ready, relay = self._due()
        if not ready and not relay:
            return
        self._submit(ready, relay, live, room.slots)

    def _due(self) -> tuple[list[State], list[State]]:
        """What the next round leases, and of what only the outbox is sent."""
        return rounds.eligible(self._states, time.time()), rounds.relaying(self._states)

    def _ahead(self) -> float:
        """How long before the end of a round the next one is submitted."""
        # Those who are behind need the machine more than they mind a gap.
        if self._round == 1 and not rounds.behind(self._states.values()):
            return FIRST_HAND_OVER_SECONDS
        return HAND_OVER_SECONDS

    def _submit(self, ready: list[State], relay: list[State], live: list[Job], slots: int) -> None:
        self._round += 1
        groups = rounds.pack([*ready, *relay], slots, self._before)
        self._before = {
            state.partition: slot for slot, group in enumerate(groups) for state in group
        }
        seconds = rounds.lease_seconds(
            ready,
            concurrency=self._pipeline.concurrency,
            publishes=self._pipeline.publishes_exactly_once,
            due_in_seconds=rounds.next_due(self._states.values()) - time.time(),
        )
        if live:
            seconds += max(0.0, live[-1].ends - time.monotonic())
        leases = rounds.leases(
            groups,
            pipeline=self._pipeline.name,
            epoch=self._place.epoch,
            number=self._round,
            ends_at=time.time() + seconds,
            rate=self._pipeline.rate,
            guard=self._options.guard,
            relay={state.partition for state in relay},
            secrets=self._options.secrets,
            database=self._options.database,
        )
        job = Job(self._round, time.monotonic() + seconds, ready)
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
        moments = [self._house.keeps_at]
        if self._jobs:
            if self._options.room().hand_over:
                moments.append(self._jobs[-1].ends - self._ahead())
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
            moved |= any(
                part.consumed or part.replayed or part.failed_again for part in report.partitions
            )
            self._fold_report(report)
        crashes = [report.crash for report in job.reports if report.crash]
        if moved:
            self._house.crashes = 0
        elif crashes:
            self._count_crash(job, crashes[0])
        elif time.monotonic() < job.ends - HAND_OVER_SECONDS:
            # Nothing was done, and not because the time was over: somebody paused it, perhaps.
            self._house.look_again()
        if moved and any(state.replay for state in job.states):
            # Whether more is to come back; without it a partition may have nothing left to do.
            self._house.look_again()
        troubles = [report.trouble for report in job.reports if report.trouble]
        if troubles:
            self.troubles[WORKERS] = troubles[0]
        else:
            self.troubles.pop(WORKERS, None)
            self._house.went_well = True

    def _fold_report(self, report: Report) -> None:
        for part in report.partitions:
            partition = Partition(part.topic, part.partition)
            state = self._states.get(partition)
            if state is None:
                continue
            state.next_offset = max(state.next_offset, part.next_offset)
            state.end = max(state.end, part.high)
            state.unsent = part.unsent
            if not report.crash and state.next_offset >= state.end:
                # Everything there is was done with care.
                state.care_until = -1
            state.due_at = time.time() + part.retry_in_seconds if part.retry_in_seconds else 0.0
            if part.trouble:
                self.troubles[str(partition)] = part.trouble
            else:
                self.troubles.pop(str(partition), None)
        if report.failure is not None:
            self._failed_at = _place_of(report.failure)
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
        # Which worker it was, and with which event in hand, only a lease with care will tell.
        self._house.look_again()
        rounds.go_with_care(job.states, events=self._pipeline.slice_size)
        self._count_crash(job, _last_line(job.error))

    def _count_crash(self, job: Job, reason: str) -> None:
        self._house.crashes += 1
        crashes = self._house.crashes
        log.warning("round %d ended in a crash: %s", job.number, reason)
        self.troubles["spark"] = reason
        # The first may be an accident; what crashes again is not hurried into the next one.
        self._calm_at = time.monotonic() + min(3.0, 0.1 * 2 ** (crashes - 1))
        if crashes >= CRASHES:
            message = f"{crashes} rounds in a row ended in a crash: {reason}"
            raise PartialError(message, hint="Run with --debug to see Spark's own words.")

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

    def _leave(self, state: str, note: str | None, error: BaseException | None) -> None:
        if not self._place.epoch:
            self._place.close()
            return
        if self._ends and all(one.finished for one in self._states.values()):
            # There may have been nothing to do, and no round to say so.
            self._house.went_well = True
        self._house.leave(self._alert_of(error, note))
        self._say_what_is_unsent()
        try:
            self._place.leave(state, note)
        except (SidelineError, psycopg.Error) as problem:
            log.debug("the end was not recorded: %s", problem)
        self._house.close()

    def _say_what_is_unsent(self) -> None:
        unsent = sum(state.unsent for state in self._states.values())
        if unsent:
            records = "1 record waits" if unsent == 1 else f"{unsent:,} records wait"
            log.warning(
                "%s: %s to be sent; the next run sends what this one could not",
                self._pipeline.name,
                records,
            )

    def _alert_of(self, error: BaseException | None, note: str | None) -> tuple[Key, str] | None:
        """What somebody should know of the end; whoever was fenced has nothing to say."""
        if error is None or isinstance(error, FencedError) or is_interrupt(error):
            return None
        return Key(*self._failed_at), f"the run ended: {note}"


def _place_of(failure: dict[str, Any]) -> tuple[str, str]:
    """The alert for it, and its subject: the partition, if the failure has one."""
    kind = FLOOD if failure["stage"] == "guard" else FAILED
    return kind, "/".join((failure["event"] or "").split("/")[:2])


# Failures that say everything themselves.
_SAID: dict[str, type[SidelineError]] = {
    "home": UnclearError,
    "batch": RefusedError,
    "refused": RefusedError,
}
# Where an event is that met the guardrail.
_KEPT = {"guardrail": "is parked", "guardrail-retry": "stays in its retry topic"}


def _failed(  # noqa: PLR0911 - a table, read from the top
    pipeline: Pipeline, failure: dict[str, Any]
) -> SidelineError:
    if failure["stage"] == "setup":
        message = (
            f"the setup of pipeline {pipeline.name!r} failed: "
            f"{failure['error']}: {failure['message']}"
        )
        broken = PartialError(message, hint="Mend it, then run again; it goes on where it stood.")
        broken.add_note(failure["traceback"])
        return broken
    if failure["stage"] in _SAID:
        return _SAID[failure["stage"]](failure["message"], hint=failure["hint"])
    if failure["stage"] == "prepare" and failure["event"] is None:
        message = (
            f"prepare= of pipeline {pipeline.name!r} failed as a whole: "
            f"{failure['error']}: {failure['message']}"
        )
        hint = failure["hint"] or "Mend it, then run again; it goes on where it stood."
        return PartialError(message, hint=hint)
    if failure["stage"] in _KEPT:
        kept = f"Event {failure['event']} {_KEPT[failure['stage']]}; nothing of it applied."
        return GuardrailError(f"{failure['message']} {kept}", hint=failure["hint"])
    if failure["stage"] == "guard":
        message = (
            f"too many events of pipeline {pipeline.name!r} fail; it stopped at event "
            f"{failure['event']}: {failure['error']}: {failure['message']}"
        )
        hint = (
            "Everything before it is done or parked. Mend the handler and run again, or park\n"
            "whatever fails with --override-guard."
        )
        flood = EventFailedError(message, hint=hint)
        flood.add_note(failure["traceback"])
        return flood
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
    hint = "Everything before it is applied. Mend the handler and run again: it goes on there."
    if pipeline.again is not None:
        hint = (
            "Everything before it is applied. Mend the handler and go on with --resume, or leave\n"
            "out what fails with --resume --skip-failures."
        )
    error = EventFailedError(message, hint=f"{hint}\n--debug shows the handler's traceback.")
    error.add_note(failure["traceback"])
    return error


def _last_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Exception" in line or "exit" in line]
    # Behind it stands only how the JVM noticed.
    worker = [line for line in telling if "Python worker exited" in line]
    return (worker or telling or lines or [type(error).__name__])[-1][:300]
