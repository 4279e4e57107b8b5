"""A lease in, a report out: a process that owns partitions for a short time, again and again.

Runs inside Spark's Python workers, and just as well without Spark.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import socket
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg

from sideline.causes import message_of
from sideline.clock import Clock, SystemClock
from sideline.engine import current
from sideline.engine.concurrent import ConcurrentHolding
from sideline.engine.current import Hands
from sideline.engine.handling import allowed_effects
from sideline.engine.holding import Holding
from sideline.engine.lease import Lease, Partition, Report, failure_of
from sideline.engine.pace import Pace
from sideline.engine.prepared import Preparation, Rows
from sideline.engine.pulse import Pulse
from sideline.engine.reader import Reader
from sideline.engine.relay import Sender
from sideline.engine.watchdog import LOOP_SECONDS, STDERR, Watchdog, in_time
from sideline.engine.window import LoopPool, Pool, ThreadPool
from sideline.errors import ConfigurationError
from sideline.events import Delivery
from sideline.guardrail import watched
from sideline.homes.publishing import publishing
from sideline.homes.records import Outlet
from sideline.homes.transactions import Groups, Transactor
from sideline.homes.writer import Writer
from sideline.ledger.ahead import ReadAhead
from sideline.ledger.connection import Connection, connect, wait_for
from sideline.sinks import Kafka
from sideline.slices import Aside
from sideline.topics.room import Rooms

if TYPE_CHECKING:
    from sideline.engine.feed import Feed
    from sideline.pipeline import Pipeline

# An owner without a sign of life for this long is replaced; longer than any slice of ours.
GRACE_SECONDS = 10.0
TRANSACTION_TIMEOUT = "60s"
# What a worker knows of tables is at most this old when a lease begins.
TABLES_SECONDS = 10.0
# Producers that are kept: each has threads and connections of its own.
MOST_SENDERS = 16
# Transactions of Kafka that are waited for at the same time.
RELAY_THREADS = 4
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
        last_words: int = STDERR,
    ) -> None:
        self.grace_seconds = grace_seconds
        self._access = access
        self._clock = clock or SystemClock()
        self._connection: Connection | None = None
        self._writer: Writer | None = None
        self.ahead = ReadAhead(self._connects_ahead)
        """What reads the next slice of a release in good time."""
        self._reader: Reader | None = None
        self._feed: Feed | None = None
        self._senders: dict[Partition, Sender] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.rooms = Rooms(access.kafka)
        """What topics take that records go to."""
        self.pipeline = pipeline
        self.blamed: dict[str, BaseException] = {}
        """Events whose records Kafka did not take."""
        if isinstance(pipeline.sink, Kafka):
            self.pipeline = copy.copy(pipeline)
            self.pipeline.handle = publishing(pipeline, self.rooms, self.blamed)
        self._groups: Groups | None = None
        self._transactors: dict[Partition, Transactor] = {}
        self._outlet: Outlet | None = None
        self.pace = Pace(self._clock)
        self._pulse = Pulse(access.database, pipeline.name)
        self._tables_at = self._clock.monotonic()
        self._pool: Pool | None = None
        self._context: Any = None
        self._is_set_up = False
        self.handler_version = pipeline.version
        self.preparation = None if pipeline.prepare is None else Preparation(pipeline)
        self.asides: dict[Partition | str, Aside] = {}
        """Keys that are aside, by partition, or by topic where its partitions share them."""
        self._watchdog: Watchdog | None = None
        if pipeline.handler_timeout is not None:
            patience = pipeline.handler_timeout + (LOOP_SECONDS if pipeline.is_async else 0.0)
            self._watchdog = Watchdog(patience, self._at_work, last_words=last_words)

    def work(self, lease: Lease, attempt: int = 0, feed: Feed | None = None) -> Report:
        """Hold the lease's partitions as long as it lasts; a feed brings its events, if given."""
        report = Report(lease.round, socket.gethostname(), os.getpid())
        if self._clock.now() >= lease.ends_at:
            return report
        self._feed = _kept_rows(lease) if feed is None and lease.rows else feed
        if self.preparation is not None and not self._prepared(lease, report):
            return report
        released = False
        if self._watchdog is not None:
            self._watchdog.start()
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
            if self._watchdog is not None:
                self._watchdog.rest()
            if not released:
                self._abandon()
            self._feed = None
        return report

    def _prepared(self, lease: Lease, report: Report) -> bool:
        """Lay out what the JVM made of the lease's events; whether they may be read."""
        assert self.preparation is not None  # noqa: S101 - for the type checker
        self.preparation.rows = None if lease.prepared is None else Rows.read(lease.prepared)
        if lease.prepared is None and any(
            share.bound is None and not share.relay for share in lease.shares
        ):
            message = f"pipeline {self.pipeline.name!r} has prepare=, which needs Spark."
            error = ConfigurationError(message, hint="Run it with `sideline run` or start().")
            report.failure = failure_of(error, event=None, stage="setup")
            return False
        return True

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
        if self._watchdog is not None:
            self._watchdog.close()
        if self._reader is not None:
            self._reader.close()
        for sender in self._senders.values():
            sender.close()
        for transactor in self._transactors.values():
            transactor.drop()
        if self._groups is not None:
            self._groups.close()
        if self._threads is not None:
            self._threads.shutdown()
        self.ahead.rest()
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
            handler = watched(pipeline, allowed_effects(pipeline))
            if pipeline.is_async and pipeline.handler_timeout is not None:
                handler = in_time(handler, pipeline.handler_timeout)
            self._pool = kind(
                handler, pipeline.concurrency, allowed_effects(pipeline), pipeline.fate
            )
        return self._pool

    def _at_work(self) -> Iterable[Hands]:
        # Handlers side by side have their events in the pool's hands, key= in this thread's.
        return [*current.at_work(), *(() if self._pool is None else list(self._pool.running))]

    def _set_up(self, report: Report) -> bool:
        """Run the user's setup once; whether it worked. If not, the report says why."""
        if not self._is_set_up and self.pipeline.set_up is not None:
            try:
                self._context = self.pipeline.set_up()
            # Like a handler's: a result, never a crash of the task.
            except Exception as error:  # noqa: BLE001
                if self.pipeline.recovers(error):
                    report.trouble = f"setup: {type(error).__name__}: {message_of(error)}"
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

    def _connects_ahead(self) -> Connection:
        role = f"ahead {self.pipeline.name}"
        connection = connect(self._access.database, role=role, autocommit=True)
        _limit(connection)
        return connection

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
        """The worker's consumer, or what the lease is fed from."""
        if self._reader is None and self._feed is None:
            self._reader = Reader({**self._access.kafka, "group.id": lease.pipeline})
        reader = self._feed or self._reader
        assert reader is not None  # noqa: S101 - for the type checker
        reader.delivery = Delivery(self._context, number)
        return reader

    def sender(self, partition: Partition) -> Sender:
        """What sends the records of a partition's outbox; the least used one has to make room."""
        sender = self._senders.pop(partition, None)
        if sender is None:
            sender = Sender(
                self._access.kafka,
                self.pipeline.name,
                partition,
                remembers=self.pipeline.stash == "topic",
            )
            while len(self._senders) >= MOST_SENDERS:
                self._senders.pop(next(iter(self._senders))).close()
        self._senders[partition] = sender
        return sender

    def transactor(self, partition: Partition) -> Transactor:
        """What publishes the slices of a partition; the least used one has to make room."""
        transactor = self._transactors.pop(partition, None)
        if transactor is None:
            if self._groups is None:
                self._groups = Groups(self._access.kafka, self.pipeline.name)
            transactor = Transactor(self._access.kafka, self.pipeline.name, partition, self._groups)
            while len(self._transactors) >= MOST_SENDERS:
                self._transactors.pop(next(iter(self._transactors))).drop()
        self._transactors[partition] = transactor
        return transactor

    @property
    def outlet(self) -> Outlet:
        """What publishes without transactions."""
        if self._outlet is None:
            self._outlet = Outlet(self._access.kafka)
        return self._outlet

    def known_sender(self, partition: Partition) -> Sender | None:
        """What sends a partition's records, if that was needed yet."""
        return self._senders.get(partition)

    @property
    def threads(self) -> Executor:
        """Where Kafka's answers are waited for."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(RELAY_THREADS, thread_name_prefix="sideline-relay")
        return self._threads

    @property
    def kafka(self) -> dict[str, Any]:
        """How Kafka is reached."""
        return self._access.kafka

    def lose_reader(self) -> None:
        """Throw the consumer away: a new one has no memory."""
        if self._reader is not None and self._feed is None:
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


def _kept_rows(lease: Lease) -> Feed:
    """What Spark's worker wrote down for those that go with care."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, where Spark's rows are the events

    from sideline.engine.feed import Feed  # noqa: PLC0415

    with pa.OSFile(str(lease.rows), "rb") as file:
        return Feed(list(pa.ipc.open_stream(file)), lease.shares)


def _limit(connection: Connection) -> None:
    """A frozen worker must not hold its locks for ever."""
    connection.execute("select set_config('lock_timeout', '10s', false)")
    # A worker that ends in the middle of a statement must not leave its locks behind either.
    connection.execute("select set_config('client_connection_check_interval', '1s', false)")
    connection.execute(
        "select set_config('idle_in_transaction_session_timeout', %s, false)",
        (TRANSACTION_TIMEOUT,),
    )
    if connection.info.server_version >= 170_000:  # noqa: PLR2004 - where it was added
        connection.execute(
            "select set_config('transaction_timeout', %s, false)", (TRANSACTION_TIMEOUT,)
        )
    connection.commit()
