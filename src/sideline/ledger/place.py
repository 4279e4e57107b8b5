"""The place of a pipeline's one driver: a session lock, and an epoch that fences the loser."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from sideline.errors import AlreadyRunningError, FencedError
from sideline.ledger.connection import Connection, connect, reach, unreachable
from sideline.ledger.sql import queries
from sideline.sinks import Calls

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
    consumed: int
    applied: int
    filtered: int
    skipped: int
    unknown: int
    event_at: datetime | None
    updated_at: datetime


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
        if not self._lock():
            if not take_over:
                raise self._taken()
            self._evict()
        self._begin()

    def rows(self) -> list[PartitionRow]:
        """Progress of every partition."""
        return self.ask(self._rows)

    def add(
        self,
        topic: str,
        partition: int,
        topic_id: str,
        next_offset: int,
        waits_for: dict[int, int] | None = None,
    ) -> None:
        """Store where a new partition starts, before anybody reads it."""
        parameters = {
            "pipeline": self._pipeline.name,
            "topic": topic,
            "partition": partition,
            "topic_id": topic_id,
            "next_offset": next_offset,
            "epoch": self.epoch,
            "waits_for": Jsonb(waits_for) if waits_for else None,
        }
        self.run("add_partition", **parameters)

    def run(self, query: str, **parameters: Any) -> int:  # noqa: ANN401 - query parameters
        """Run a named statement about this pipeline; how many rows it touched."""

        def execute(connection: Connection) -> int:
            named = {"pipeline": self._pipeline.name, "epoch": self.epoch} | parameters
            count = connection.execute(queries()[query], named).rowcount
            connection.commit()
            return count

        return self.ask(execute)

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
        finally:
            self._connection.close()

    def close(self) -> None:
        """Free the place without a word: it was never held."""
        self._connection.close()

    def _rows(self, connection: Connection) -> list[PartitionRow]:
        rows = partition_rows(connection, self._pipeline.name)
        connection.commit()
        return rows

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

    def _begin(self) -> None:
        parameters = {
            "pipeline": self._pipeline.name,
            "version": self._pipeline.version,
            "topics": list(self._pipeline.topics),
            "sink": type(self._pipeline.sink).__name__,
            "delivery": self._pipeline.delivery,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        until = time.monotonic() + FENCE_SECONDS
        while True:
            try:
                self._connection.execute("set local lock_timeout = '500ms'")
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
                self._connection.commit()
            except psycopg.errors.LockNotAvailable:
                self._connection.rollback()
                self._end_holders(last=time.monotonic() > until)
                continue
            self.epoch = int(epoch)
            return

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
