"""What a driver looks after beside its rounds, once a second.

Progress as the ledger has it, pauses, the group's offsets, topics that change, alerts. Nothing
here is done per event.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import KafkaException

from sideline import alerts
from sideline.crashpoints import reach
from sideline.engine import positions, retries, rounds
from sideline.engine.alarm import Alarm
from sideline.engine.lease import Partition
from sideline.engine.rounds import State
from sideline.errors import (
    DatabaseUnreachableError,
    FencedError,
    KafkaUnreachableError,
    NotFoundError,
    RefusedError,
    SidelineError,
)
from sideline.ledger import cleaning
from sideline.ledger.place import PartitionRow, Place
from sideline.retention import Retention
from sideline.topics import stash

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster, TopicInfo

# The group's offsets are shown to lag tools this often, and again when idle: brokers forget them.
KEEP_SECONDS = 1.0
GROUP_REFRESH_SECONDS = 3600.0
TOPIC_CHECK_SECONDS = 5.0
POINTER_CHECK_SECONDS = 60.0
# Where there was none, and none is made by this pipeline itself.
NO_POINTER_CHECK_SECONDS = 600.0
IDLE_BEAT_SECONDS = 10.0
# What is old can wait: first comes what somebody waits for.
FIRST_CLEAN_SECONDS = 30.0
CLEAN_AGAIN_SECONDS = 600.0

log = logging.getLogger(__name__)


class House:
    """What is known of a pipeline's partitions, and what has to be told of them."""

    def __init__(  # noqa: PLR0913 - what a driver is told
        self,
        pipeline: Pipeline,
        place: Place,
        cluster: Cluster,
        *,
        once: bool = False,
        fed: bool = False,
        alerting: alerts.Alerting | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._place = place
        self._cluster = cluster
        # What is not read here is read by a query, and starts where that does.
        self._once = once or fed
        self._fed = fed
        self._alarm = Alarm(pipeline, place, alerting or alerts.Alerting())
        self._retention = retention
        self._cleans_at = time.monotonic() + FIRST_CLEAN_SECONDS
        self._other_rows: list[PartitionRow] = []
        self._committed: dict[Partition, int] = {}
        self._kept_at = 0.0
        self._topics_at = 0.0
        self._refreshed_at = 0.0
        self._foreign = False
        self._expiring: dict[str, str] = {}
        self._pointers_at = 0.0
        self._beat_at = 0.0
        self._beat_consumed = 0
        self._rate = 0.0
        self._attempts: dict[Partition, int] = {}
        self._paused: str | None = None
        self.rows: list[PartitionRow] = []
        """Progress of the declared topics, as last read."""
        self.states: dict[Partition, State] = {}
        self.delays: dict[str, int] = {}
        """Retry topics, and how long copies wait in them, in milliseconds."""
        self.troubles: dict[str, str] = {}
        """What is not as it should be, by partition or service; for status."""
        self.crashes = 0
        """Rounds in a row that ended in a crash and moved nothing."""
        self.went_well = False
        """Whether a round of this run came to its end."""

    # Every second

    @property
    def keeps_at(self) -> float:
        """Monotonic time at which it is worth calling `keep` again."""
        return self._kept_at + KEEP_SECONDS

    def look_again(self) -> None:
        """Read the rows now: something has happened that they may explain."""
        self._guarded("database", self.refresh)

    def keep(self) -> None:
        """Do what is due; a service that is away is a trouble, not an end."""
        now = time.monotonic()
        if now < self.keeps_at:
            return
        self._kept_at = now
        self._guarded("database", self._look_at_rows)
        if "database" not in self.troubles:
            self._guarded("kafka", self._look_at_kafka)
        self._look_for_alerts()
        if now >= self._cleans_at and "database" not in self.troubles:
            self._guarded("database", self._clean)

    def reached(self, look: Callable[[], None]) -> bool:
        """Ask the services something; False: one is away, a trouble until `keep` finds it back."""
        try:
            look()
        except (DatabaseUnreachableError, psycopg.OperationalError) as error:
            self.troubles["database"] = str(error)
        except (KafkaUnreachableError, KafkaException) as error:
            self.troubles["kafka"] = str(error)
        else:
            return True
        return False

    def _guarded(self, service: str, look: Callable[[], None]) -> None:
        if self.reached(look):
            self.troubles.pop(service, None)

    def _look_at_rows(self) -> None:
        self.refresh()
        self._beat(time.monotonic())

    def _look_at_kafka(self) -> None:
        now = time.monotonic()
        # Until Kafka has answered nobody knows that it is back.
        if now > self._topics_at + TOPIC_CHECK_SECONDS or "kafka" in self.troubles:
            self._topics_at = now
            self._watch_topics()
            self._watch_ends()
            self._watch_pointers()
        self.show_group()

    def _clean(self) -> None:
        """Take a bite of what is over and old; the next one soon, if there is more."""
        if self._retention is None or self._pipeline.again is not None:
            self._cleans_at = float("inf")
            return
        try:
            taken = self._place.ask(partial(self._bite, self._retention))
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            # A role that may not delete, say: what is old can wait.
            self.troubles["cleaning"] = str(error).strip()
            self._cleans_at = time.monotonic() + CLEAN_AGAIN_SECONDS
            return
        self.troubles.pop("cleaning", None)
        pause = CLEAN_AGAIN_SECONDS if cleaning.is_done(taken) else 0.0
        self._cleans_at = time.monotonic() + pause

    def _bite(self, keep: Retention, connection: Connection) -> dict[str, int]:
        try:
            return cleaning.step(connection, self._pipeline.name, keep)
        except psycopg.Error:
            if not (connection.broken or connection.closed):
                connection.rollback()
            raise

    def _beat(self, now: float) -> None:
        """Write down how fast it goes; seldom while nothing moves."""
        consumed = sum(row.consumed for row in self.rows)
        seconds = now - self._beat_at
        rate = (consumed - self._beat_consumed) / seconds if self._beat_at else 0.0
        if rate or self._rate or seconds > IDLE_BEAT_SECONDS:
            self._place.run("driver_beat", events_per_second=rate)
            self._rate, self._beat_at, self._beat_consumed = rate, now, consumed

    # Rows

    def refresh(self) -> None:
        """Read progress and pauses; find out whether the place is still ours."""
        rows = self._place.rows()
        # A topic that the pipeline named once and names no more keeps its rows, unread.
        self.rows = [row for row in rows if self.reads(row.topic)]
        self._other_rows = [row for row in rows if not self.reads(row.topic)]
        paused, note = self._place.paused()
        operations = self._place.operations()
        homes = {home for _, _, home in operations if home is not None}
        for row in self.rows:
            self._know(row, paused=paused)
        for row in self._other_rows:
            self._know_what_is_left(row, homes, paused=paused)
        for state in self.states.values():
            if state.waits_for and rounds.may_start(state, self.states):
                self._place.run(
                    "stop_waiting",
                    topic=state.partition.topic,
                    partition=state.partition.number,
                )
                state.waits_for = None
        self._say_pause(note, whole=paused)
        for partition, state in self.states.items():
            state.replay = partition in homes
        self._look_at_operations(operations)
        if any(row.lease[0] > self._place.epoch for row in self.rows):
            message = f"pipeline {self._pipeline.name!r} is run by another process now."
            raise FencedError(message, hint="Nothing was written after it took over.")

    def reads(self, topic: str) -> bool:
        """Whether events of a topic are read; of others there may be something left to do."""
        return topic in self._pipeline.topics or topic in self.delays

    def _look_at_operations(self, found: list[tuple[int, str | None, Partition | None]]) -> None:
        """End those of which nothing waits, and say what the others wait for."""
        if any(home is None for _, _, home in found):
            self._place.run("finish_operations")
        notes = {
            f"operation {number}": note
            for number, note, _ in found
            if note is not None and note.startswith("waits: ")
        }
        for name in [name for name in self.troubles if name.startswith("operation ")]:
            if name not in notes:
                del self.troubles[name]
        self.troubles.update(notes)

    def _know(self, row: PartitionRow, *, paused: bool) -> None:
        partition = Partition(row.topic, row.partition)
        state = self.states.get(partition)
        if state is None:
            # What there was not when it began is not part of "all there is now".
            bound = row.next_offset if self._once else None
            state = self.states[partition] = State(partition, row.next_offset, bound=bound)
        state.next_offset = max(state.next_offset, row.next_offset)
        state.due_at = row.due_at.timestamp() if row.due_at else 0.0
        if state.due_at <= time.time():
            state.due_at = 0.0
        state.trouble = row.trouble
        state.unsent = row.unsent
        state.delay_ms = self.delays.get(row.topic)
        state.paused = paused or row.paused or row.held_for is not None
        waits = {int(number): offset for number, offset in (row.waits_for or {}).items()}
        state.waits_for = waits or None
        self._say_attempt(partition, row)

    def _know_what_is_left(
        self, row: PartitionRow, homes: Container[Partition], *, paused: bool
    ) -> None:
        """Of a topic that is read no more: what it left behind is still sent and brought back."""
        partition = Partition(row.topic, row.partition)
        state = self.states.get(partition)
        if state is None:
            if not row.unsent and partition not in homes:
                return
            state = self.states[partition] = State(partition, row.next_offset)
        # Nothing of it is read: it stands at its end (K23, R1).
        state.next_offset = state.bound = row.next_offset
        state.unsent = row.unsent
        state.paused = paused or row.paused or row.held_for is not None

    def _say_attempt(self, partition: Partition, row: PartitionRow) -> None:
        """A line for each attempt that a lease left behind: its pauses grow, so they are few."""
        if row.attempts > self._attempts.get(partition, 0):
            event = "" if row.stuck_at is None else f" at event {partition}/{row.stuck_at}"
            again = f", again at {row.due_at.astimezone():%T}" if row.due_at else ""
            log.warning(
                "%s: %s%s waits after attempt %d%s: %s",
                *(self._pipeline.name, partition, event, row.attempts, again, row.trouble),
            )
        self._attempts[partition] = row.attempts

    def _say_pause(self, note: str | None, *, whole: bool) -> None:
        names = [f"{row.topic}/{row.partition}" for row in self.rows if row.paused]
        runs = sorted({row.held_for for row in self.rows if row.held_for is not None})
        if runs:
            # It goes on by itself when the run is over.
            self.troubles["held"] = f"waits for run {self._pipeline.name}@{runs[0]} to end"
        else:
            self.troubles.pop("held", None)
        said = None
        if whole or names:
            said = ("everything" if whole else ", ".join(names)) + (f" ({note})" if note else "")
        if said != self._paused:
            about = f"paused: {said}" if said else "nothing is paused any more"
            log.warning("%s: %s", self._pipeline.name, about)
        self._paused = said
        if said:
            self.troubles["paused"] = said
        else:
            self.troubles.pop("paused", None)

    # Kafka

    def show_group(self, *, final: bool = False) -> None:
        """Commit the group's offsets, so that ordinary lag tools see the pipeline (C5)."""
        if self._pipeline.again is not None or self._pipeline.publishes_exactly_once:
            # A range that is applied again is nobody's lag. Where slices are transactions of
            # Kafka, the group's offsets are part of them.
            return
        now = time.monotonic()
        offsets = {
            Partition(row.topic, row.partition): row.next_offset
            for row in self.rows
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

    def saw_topics(self) -> None:
        """They were looked at just now."""
        self._topics_at = time.monotonic()

    def _watch_topics(self) -> None:
        topics = self._find_known_topics()
        known = {(row.topic, row.partition): row for row in self.rows}
        for topic in topics:
            ids = {row.topic_id for row in self.rows if row.topic == topic.name}
            if ids and ids != {topic.id}:
                positions.check_losses(self._cluster, self._place, topics, accept_loss=False)
            if self._pipeline.again is not None:
                # Its partitions were fixed when it was planned.
                continue
            if self._fed and not ids:
                continue
            if topic.name in self.delays:
                retries.store_starts(self._cluster, self._place, [topic])
                continue
            if any((topic.name, number) not in known for number in topic.partitions):
                positions.store_starts(self._pipeline, self._cluster, self._place, [topic])
                self.refresh()

    def _watch_pointers(self) -> None:
        """Find events whose bytes retention will soon take from their source.

        Whatever ``stash=`` is now: it may have been another one, and imported events may be kept
        like this, too.
        """
        if time.monotonic() < self._pointers_at:
            return
        pointers = self._place.ask(partial(stash.pointers, self._pipeline.name))
        likely = pointers or self._pipeline.stash == "pointer"
        pause = POINTER_CHECK_SECONDS if likely else NO_POINTER_CHECK_SECONDS
        self._pointers_at = time.monotonic() + pause
        self._expiring = stash.expiring(self._cluster, pointers, time.time())

    def _watch_ends(self) -> None:
        """Nobody reports the ends of partitions that are not leased."""
        idle = [state.partition for state in self.states.values() if state.paused or state.due_at]
        idle = [
            partition
            for partition in idle
            if self.reads(partition.topic) and partition.topic not in self.troubles
        ]
        for partition, end in (self._cluster.ends(idle) if idle else {}).items():
            self.states[partition].end = max(self.states[partition].end, end)

    def _find_known_topics(self) -> list[TopicInfo]:
        found = []
        for name in (*self._pipeline.topics, *self.delays):
            try:
                found.append(self._cluster.topic(name))
                self.troubles.pop(name, None)
            except NotFoundError as error:
                # Deleted under our feet: it may come back, with another id.
                self.troubles[name] = error.message
        return found

    # Alerts

    def _look_for_alerts(self) -> None:
        services = self._services()
        if "database" in services:
            self._alarm.outage(services, time.time())
            return
        scene = alerts.Scene(
            self.rows,
            self._other_rows,
            # What waits in retry topics is not late.
            {
                str(state.partition): state.lag
                for state in self.states.values()
                if state.delay_ms is None
            },
            services,
            self.crashes,
            self.troubles.get("spark", ""),
            self.went_well,
            self._expiring,
        )
        try:
            self._alarm.look(scene, time.time())
            self.troubles.pop("alerts", None)
        except DatabaseUnreachableError as error:
            self.troubles["database"] = str(error)
        except psycopg.Error as error:
            # An alert that cannot be written is no reason to stop what can.
            self.troubles["alerts"] = str(error).strip()

    def _services(self) -> dict[str, str]:
        names = ("database", "kafka", alerts.WORKERS, *self._pipeline.topics, *self.delays)
        if "database" in self.troubles:
            # What keeps the workers waiting is the same.
            names = ("database", "kafka")
        return {name: self.troubles[name] for name in names if name in self.troubles}

    # Ending

    def leave(self, failure: tuple[alerts.Key, str] | None) -> None:
        """Show where it stands, and raise what ended it."""
        try:
            self.refresh()
            self.show_group(final=True)
        except (SidelineError, psycopg.Error, KafkaException) as error:
            log.debug("the last offsets were not shown to the group: %s", error)
        try:
            if failure is None:
                self._look_for_alerts()
            else:
                self._alarm.fail(*failure)
        except (SidelineError, psycopg.Error) as error:
            log.debug("the last alerts were not written: %s", error)

    def close(self) -> None:
        """Wait a little for those who are to be told."""
        self._alarm.close()
