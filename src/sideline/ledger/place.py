"""The place of a pipeline's one driver: a session lock, and an epoch that fences the loser."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from sideline import crashpoints, guardrail
from sideline.engine.lease import Partition
from sideline.errors import AlreadyRunningError, FencedError, RefusedError
from sideline.ledger import audit
from sideline.ledger.connection import Connection, connect, reach, unreachable
from sideline.ledger.sql import queries
from sideline.sinks import Calls
from sideline.topics.names import refuse_shared

if TYPE_CHECKING:
    from sideline.pipeline import Pipeline

T = TypeVar("T")

# The first half of the advisory lock's number; the second is the pipeline's hash.
LOCK_SPACE = 0x51DE
# A frozen worker may hold a progress row; longer than its own transaction may take, we do not wait.
FENCE_SECONDS = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionRow:
    """A progress row."""

    topic: str
    partition: int
    topic_id: str | None
    next_offset: int
    lease: list[int]
    released: bool
    waits_for: dict[str, int] | None
    due_at: datetime | None
    attempts: int
    trouble: str | None
    stuck_at: int | None
    """The event that it waits for, while it backs off or blocks."""
    paused: bool
    consumed: int
    applied: int
    filtered: int
    skipped: int
    unknown: int
    parked: int
    retrying: int
    dead: int
    discarded: int
    duplicate: int
    aside: int
    """Keys at home here that are aside."""
    event_at: datetime | None
    updated_at: datetime
    held_for: int | None = None
    """The run that applies a range again, for which nobody takes the partition meanwhile."""
    copies: int = 0
    """Of a retry topic: how many were read."""
    unsent: int = 0
    """Records in its outbox."""
    outbox_trouble: str | None = None


class NewPartition(NamedTuple):
    """A partition that is not known yet, and where it starts."""

    topic: str
    partition: int
    topic_id: str
    next_offset: int
    waits_for: dict[int, int] | None = None
    """The ends that older partitions have to pass first."""


class Place:
    """Held by the driver for as long as it runs."""

    def __init__(self, url: str, pipeline: Pipeline) -> None:
        self._url = url
        self._pipeline = pipeline
        self._role = f"driver {pipeline.name}"
        self._connection = reach(url, role=self._role)
        self.epoch = 0

    def hold(self, *, take_over: bool = False) -> None:
        """Lock the place, begin an epoch and fence everything that was before."""
        evicted = None
        if not self._lock():
            if not take_over:
                raise self._taken()
            evicted = self._driver()
            self._evict()
        self._begin(evicted)

    def rows(self) -> list[PartitionRow]:
        """Progress of every partition."""
        return self.ask(self._rows)

    def paused(self) -> tuple[bool, str | None]:
        """Whether a person keeps the whole pipeline waiting, and who and why."""
        return self.ask(self._paused)

    def add(
        self,
        topic: str,
        partition: int,
        topic_id: str,
        next_offset: int,
        waits_for: dict[int, int] | None = None,
    ) -> None:
        """Store where a new partition starts, before anybody reads it."""
        self.add_all([NewPartition(topic, partition, topic_id, next_offset, waits_for)])

    def add_all(self, starts: Collection[NewPartition], shared: Collection[str] = ()) -> None:
        """Store where new partitions start, all of them or none.

        A topic that is half known looks like one that has grown: the rest would start elsewhere.
        ``shared`` names topics whose keys may live in several partitions.
        """

        def store(connection: Connection) -> None:
            whose = {"pipeline": self._pipeline.name, "epoch": self.epoch}
            for start in starts:
                waits_for = Jsonb(start.waits_for) if start.waits_for else None
                row = start._asdict() | {"waits_for": waits_for}
                connection.execute(queries()["add_partition"], whose | row)
                crashpoints.reach("between-starts")
            for topic in shared:
                connection.execute(queries()["share_partitions"], whose | {"topic": topic})
            connection.commit()

        self.ask(store)

    def operations(self) -> list[tuple[int, str | None, Partition | None]]:
        """Operations that run, with what keeps them waiting and where something of them waits."""

        def look(connection: Connection) -> list[tuple[int, str | None, Partition | None]]:
            named = {"pipeline": self._pipeline.name}
            rows = connection.execute(queries()["operations_under_way"], named).fetchall()
            connection.commit()
            return [
                (number, note, None if topic is None else Partition(topic, partition))
                for number, note, topic, partition in rows
            ]

        return self.ask(look)

    def run(self, query: str, **parameters: Any) -> int:  # noqa: ANN401 - query parameters
        """Run a named statement about this pipeline; how many rows it touched."""

        def execute(connection: Connection) -> int:
            named = {"pipeline": self._pipeline.name, "epoch": self.epoch} | parameters
            count = connection.execute(queries()[query], named).rowcount
            connection.commit()
            return count

        return self.ask(execute)

    def change(
        self,
        action: str,
        statements: Sequence[tuple[str, Mapping[str, Any]]],
        subject: Mapping[str, Any],
        *,
        count: int | None = None,
    ) -> None:
        """Run named statements that a person wanted, and write it down, in one transaction (S6)."""

        def execute(connection: Connection) -> None:
            for query, parameters in statements:
                named = {"pipeline": self._pipeline.name, "epoch": self.epoch, **parameters}
                connection.execute(queries()[query], named)
            self._record(connection, action, subject, count)
            connection.commit()

        self.ask(execute)

    def _record(
        self, connection: Connection, action: str, subject: Mapping[str, Any], count: int | None
    ) -> None:
        # A run that applies a range again is its pipeline's affair.
        pipeline, at, _ = self._pipeline.name.partition("@")
        about = dict(subject) | ({"run": self._pipeline.name} if at else {})
        audit.record(
            connection,
            action,
            actor=audit.actor(),
            pipeline=pipeline,
            subject=about,
            count=count,
        )

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Use the connection; if it broke, get the place back first, or find that it is lost."""
        try:
            return question(self._connection)
        except psycopg.OperationalError:
            if not (self._connection.broken or self._connection.closed):
                self._connection.rollback()
                raise
        self._regain()
        return question(self._connection)

    def leave(self, state: str, note: str | None = None) -> None:
        """Say how it ended, and free the place."""
        try:
            self.run("end_epoch", state=state, note=note)
            # The server notices a little later that a connection is closed; whoever starts now
            # need not wait for that.
            self.run("unlock_place", space=LOCK_SPACE)
        finally:
            self._connection.close()

    def close(self) -> None:
        """Free the place without a word: it was never held."""
        self._connection.close()

    def _rows(self, connection: Connection) -> list[PartitionRow]:
        rows = partition_rows(connection, self._pipeline.name)
        connection.commit()
        return rows

    def _paused(self, connection: Connection) -> tuple[bool, str | None]:
        named = {"pipeline": self._pipeline.name}
        row = connection.execute(queries()["is_paused"], named).fetchone()
        connection.commit()
        return (bool(row[0]), row[1]) if row else (False, None)

    def _lock(self) -> bool:
        parameters = {"space": LOCK_SPACE, "pipeline": self._pipeline.name}
        row = self._connection.execute(queries()["lock_place"], parameters).fetchone()
        self._connection.commit()
        return bool(row and row[0])

    def _taken(self) -> AlreadyRunningError:
        row = describe_pipeline(self._connection, self._pipeline.name)
        self._connection.rollback()
        who = "another process"
        if row is not None and row["driver_since"] is not None:
            since = row["driver_since"].astimezone().strftime("%Y-%m-%d %H:%M:%S")
            who = f"process {row['driver_pid']} on {row['driver_host']}, since {since}"
            if row["handler_version"] != self._pipeline.version:
                who += f", with other code ({row['handler_version']})"
        message = f"pipeline {self._pipeline.name!r} is run already by {who}."
        hint = "Stop that one first; if its host is gone for good, use --take-over."
        return AlreadyRunningError(message, hint=hint)

    def _driver(self) -> dict[str, Any]:
        """Whose place it is."""
        row = describe_pipeline(self._connection, self._pipeline.name)
        self._connection.rollback()
        return {} if row is None else {"host": row["driver_host"], "pid": row["driver_pid"]}

    def _evict(self) -> None:
        """End the session that holds the place; its driver finds itself fenced."""
        parameters = {"space": LOCK_SPACE, "pipeline": self._pipeline.name}
        until = time.monotonic() + FENCE_SECONDS
        while not self._lock():
            row = self._connection.execute(queries()["place_holder"], parameters).fetchone()
            if row is not None:
                self._connection.execute(
                    queries()["terminate"], {"pid": row[0], "timeout_ms": 5_000}
                )
            self._connection.commit()
            if time.monotonic() > until:
                raise self._taken()

    def _begin(self, evicted: Mapping[str, Any] | None) -> None:
        parameters = {
            "pipeline": self._pipeline.name,
            "version": self._pipeline.version,
            "topics": list(self._pipeline.topics),
            "own_topics": [topic.name for topic in self._pipeline.own_topics],
            "stashes": Jsonb(_by_source(self._pipeline, "stash")),
            "dead_letters": Jsonb(_by_source(self._pipeline, "dead-letter")),
            "order_free": guardrail.is_order_free(self._pipeline),
            "sink": type(self._pipeline.sink).__name__,
            "delivery": self._pipeline.delivery,
            "ids_kept": None
            if self._pipeline.dedupe is None
            else timedelta(seconds=self._pipeline.dedupe.keep_seconds),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        until = time.monotonic() + FENCE_SECONDS
        while True:
            try:
                self._connection.execute("set local lock_timeout = '500ms'")
                self._refuse_shared_topics()
                self._refuse_renamed_topics(parameters)
                began = self._connection.execute(queries()["begin_epoch"], parameters).fetchall()
                ((epoch,),) = began
                self._connection.execute(
                    queries()["fence_partitions"],
                    {
                        "pipeline": self._pipeline.name,
                        "epoch": epoch,
                        "at_once": not isinstance(self._pipeline.sink, Calls),
                    },
                )
                if evicted is not None:
                    self._record(self._connection, "take over", evicted, None)
                self._connection.commit()
            except psycopg.errors.LockNotAvailable:
                self._connection.rollback()
                self._end_holders(last=time.monotonic() > until)
                continue
            self.epoch = int(epoch)
            return

    def _refuse_shared_topics(self) -> None:
        """Two groups never meet in a topic (F11)."""
        own = self._pipeline.own_topics
        if not own:
            return
        self._connection.execute(queries()["claim_own_topics"])
        named = {"pipeline": self._pipeline.name}
        others = self._connection.execute(queries()["others_own_topics"], named).fetchall()
        try:
            refuse_shared(self._pipeline.name, own, dict(others))
        except RefusedError:
            self._connection.rollback()
            raise

    def _refuse_renamed_topics(self, declared: dict[str, Any]) -> None:
        """Under another name nobody would find, or take out, what is in the topic."""
        rows = self._connection.execute(queries()["renamed_topics"], declared).fetchall()
        for kind, name, events in rows:
            self._connection.rollback()
            many = "1 event" if events == 1 else f"{events:,} events"
            message = (
                f"pipeline {self._pipeline.name!r} gives its {kind} topic {name!r} another name, "
                f"but the ledger knows of {many} with a record there."
            )
            hint = (
                "Keep the name with names=TopicNames(...). To change it, release or discard these "
                "events\nand `sideline purge` them first."
            )
            raise RefusedError(message, hint=hint)

    def _end_holders(self, *, last: bool) -> None:
        """A worker of the epoch before sits in an open transaction: wait for it, then end it."""
        rows = partition_rows(self._connection, self._pipeline.name)
        parameters = {
            "pipeline": self._pipeline.name,
            "topics": [row.topic for row in rows],
            "partitions": [row.partition for row in rows],
            "grace": "0s" if last else "5s",
        }
        query = queries()["frozen_holders"].replace("%(grace)s", "%(grace)s::interval")
        for (pid,) in self._connection.execute(query, parameters).fetchall():
            self._connection.execute(queries()["terminate"], {"pid": pid, "timeout_ms": 5_000})
        self._connection.commit()

    def _regain(self) -> None:
        """After an outage: the place is ours again only if nobody else began an epoch."""
        self._connection.close()
        try:
            self._connection = connect(self._url, role=self._role)
        except psycopg.OperationalError as error:
            raise unreachable(self._url, error) from error
        parameters = {"pipeline": self._pipeline.name, "epoch": self.epoch}
        ours = self._connection.execute(queries()["rejoin_epoch"], parameters).fetchone()
        self._connection.commit()
        if ours is None or not self._lock_after_outage():
            message = f"pipeline {self._pipeline.name!r} is run by another process now."
            raise FencedError(message, hint="Nothing was written after it took over.")

    def _lock_after_outage(self) -> bool:
        # The server may not have noticed yet that the old session is gone.
        until = time.monotonic() + FENCE_SECONDS
        while not self._lock():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True


def partition_rows(connection: Connection, pipeline: str) -> list[PartitionRow]:
    """Progress of a pipeline's partitions."""
    rows = connection.execute(queries()["partitions"], {"pipeline": pipeline}).fetchall()
    return [PartitionRow(*row) for row in rows]


def describe_pipeline(connection: Connection, pipeline: str) -> dict[str, Any] | None:
    """A pipeline's row; None if it never ran."""
    cursor = connection.cursor(row_factory=dict_row)
    return cursor.execute(queries()["pipeline"], {"pipeline": pipeline}).fetchone()


def is_held(connection: Connection, pipeline: str) -> bool:
    """Whether a driver stands."""
    parameters = {"space": LOCK_SPACE, "pipeline": pipeline}
    return connection.execute(queries()["place_holder"], parameters).fetchone() is not None


def _by_source(pipeline: Pipeline, kind: str) -> dict[str, str]:
    return {topic.source: topic.name for topic in pipeline.own_topics if topic.kind == kind}
