"""A lease in, a report out: a process that owns partitions for a short time, again and again.

Runs inside Spark's Python workers, and just as well without Spark.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import psycopg

from sideline.clock import Clock, SystemClock
from sideline.engine.concurrent import ConcurrentHolding
from sideline.engine.handling import allowed_effects
from sideline.engine.holding import Holding
from sideline.engine.lease import Lease, Report, failure_of
from sideline.engine.pulse import Pulse
from sideline.engine.reader import Reader
from sideline.engine.window import LoopPool, Pool, ThreadPool
from sideline.events import Delivery
from sideline.homes.writer import Writer
from sideline.ledger.connection import Connection, wait_for

if TYPE_CHECKING:
    from sideline.pipeline import Pipeline

# An owner without a sign of life for this long is replaced; longer than any slice of ours.
GRACE_SECONDS = 10.0
TRANSACTION_TIMEOUT = "60s"
# What a worker knows of tables is at most this old when a lease begins.
TABLES_SECONDS = 10.0
# Before a round tries again what setup could not reach.
SETUP_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Access:
    """How a worker reaches the outside: never part of what is shipped."""

    database: str = dataclasses.field(repr=False)
    kafka: dict[str, Any] = dataclasses.field(repr=False)


class Worker:
    """One process of a run: its connections outlive the leases."""

    def __init__(
        self,
        pipeline: Pipeline,
        access: Access,
        clock: Clock | None = None,
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.pipeline = pipeline
        self.grace_seconds = grace_seconds
        self._access = access
        self._clock = clock or SystemClock()
        self._connection: Connection | None = None
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._pulse = Pulse(access.database, pipeline.name)
        self._tables_at = self._clock.monotonic()
        self._pool: Pool | None = None
        self._context: Any = None
        self._is_set_up = False

    def work(self, lease: Lease, attempt: int = 0) -> Report:
        """Hold the lease's partitions as long as it lasts."""
        report = Report(lease.round, socket.gethostname(), os.getpid())
        if self._clock.now() >= lease.ends_at:
            return report
        released = False
        try:
            if self._set_up(report):
                with self._holding(lease, attempt, report) as holding:
                    holding.loop()
                released = True
        except psycopg.OperationalError as error:
            # The database is away: whatever was held is free, and nothing was half done.
            report.trouble = f"PostgreSQL: {str(error).strip()}"
        finally:
            self._pulse.rest()
            if not released:
                self._abandon()
        return report

    def _abandon(self) -> None:
        """Nothing may vouch for partitions that were not released, or nobody could take them."""
        self._pulse.renew()
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """End what setup began, and every connection."""
        if self._is_set_up and self.pipeline.tear_down is not None:
            self.pipeline.tear_down(self._context)
        self._is_set_up = False
        if self._pool is not None:
            self._pool.close()
        self._pulse.close()
        if self._reader is not None:
            self._reader.close()
        if self._connection is not None:
            self._connection.close()

    def _holding(self, lease: Lease, attempt: int, report: Report) -> Holding:
        if self.pipeline.concurrency > 1 or self.pipeline.is_async:
            return ConcurrentHolding(self, lease, attempt, report)
        return Holding(self, lease, attempt, report)

    def pool(self) -> Pool:
        """What handles events side by side; kept like the connections."""
        if self._pool is None:
            pipeline = self.pipeline
            kind = LoopPool if pipeline.is_async else ThreadPool
            self._pool = kind(
                pipeline.handle, pipeline.concurrency, allowed_effects(pipeline), pipeline.skips
            )
        return self._pool

    def _set_up(self, report: Report) -> bool:
        """Run the user's setup once; whether it worked. If not, the report says why."""
        if not self._is_set_up and self.pipeline.set_up is not None:
            try:
                self._context = self.pipeline.set_up()
            # Like a handler's: a result, never a crash of the task.
            except Exception as error:  # noqa: BLE001
                if self.pipeline.recovers(error):
                    report.trouble = f"setup: {type(error).__name__}: {error}"
                    self._clock.sleep(SETUP_PAUSE_SECONDS)
                else:
                    report.failure = failure_of(error, event=None, stage="setup")
                return False
        self._is_set_up = True
        return True

    def connection(self, until: float) -> Connection:
        """The worker's connection; a new one if the old one broke."""
        if self._connection is None or self._connection.closed or self._connection.broken:
            if self._connection is not None:
                self._connection.close()
            connection = wait_for(
                self._access.database, role=f"worker {self.pipeline.name}", until=until
            )
            _limit(connection)
            self._connection = connection
            self._writer = Writer(connection, fold=self.pipeline.fold)
        return self._connection

    def writer(self) -> Writer:
        """What writes rows through the current connection."""
        if self._writer is None:
            message = "the worker has no connection yet"
            raise RuntimeError(message)
        return self._writer

    def look_at_tables_again(self) -> None:
        """Forget the tables now and then: somebody may have added a constraint or a trigger."""
        now = self._clock.monotonic()
        if now - self._tables_at > TABLES_SECONDS:
            self.writer().forget()
            self._tables_at = now

    def reader(self, lease: Lease, number: tuple[int, ...]) -> Reader:
        """The worker's consumer."""
        if self._reader is None:
            self._reader = Reader({**self._access.kafka, "group.id": lease.pipeline})
        self._reader.delivery = Delivery(self._context, number)
        return self._reader

    def lose_reader(self) -> None:
        """Throw the consumer away: a new one has no memory."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def pulse(self) -> Pulse:
        """The sign of life."""
        return self._pulse

    @property
    def clock(self) -> Clock:
        """The time."""
        return self._clock


def _limit(connection: Connection) -> None:
    """A frozen worker must not hold its locks for ever."""
    connection.execute("select set_config('lock_timeout', '10s', false)")
    connection.execute(
        "select set_config('idle_in_transaction_session_timeout', %s, false)",
        (TRANSACTION_TIMEOUT,),
    )
    if connection.info.server_version >= 170_000:  # noqa: PLR2004 - where it was added
        connection.execute(
            "select set_config('transaction_timeout', %s, false)", (TRANSACTION_TIMEOUT,)
        )
    connection.commit()
