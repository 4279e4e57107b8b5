"""One lease, from the warm-up to the release.

The way of an event: `Reader` -> a slice -> the handler -> the home's commit.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import uuid
from typing import TYPE_CHECKING, Any, Self

import psycopg
from confluent_kafka import KafkaException

from sideline.classify import kind_of
from sideline.crashpoints import reach
from sideline.engine.handling import handle
from sideline.engine.lease import Lease, Partition, PartitionReport, Report, failure_of
from sideline.engine.reader import Lost, Span
from sideline.errors import FencedError, SidelineError
from sideline.homes.calls import CallsHome
from sideline.homes.postgres import PostgresHome
from sideline.ledger.store import Claim, Held, Ledger, Parting
from sideline.policies import Block
from sideline.sinks import Calls
from sideline.slices import SLICE_BYTES, Failure, Handled, Outcome, admit

if TYPE_CHECKING:
    from sideline.engine.worker import Worker
    from sideline.events import Event

# How often a task looks again at partitions that nobody announced as released.
LOOK_AGAIN_SECONDS = 0.25
# While behind, wait this long for a slice to fill up: a big slice folds better. Longer while so
# many events come with every look that it will soon be full.
FILL_SECONDS = 0.05
FLOOD_SECONDS = 0.5
FLOOD_EVENTS = 500
# Live and busy, wait this long: a transaction per poll starves a busy machine.
LINGER_SECONDS = 0.003
BUSY_EVENTS_PER_SECOND = 2_000
# No wait for events is longer, so that a stop is noticed.
IDLE_SECONDS = 0.5
# While partitions are still to be taken, look up from the others this often.
HAND_OVER_SECONDS = 0.01
BUFFER_BYTES = 2 * SLICE_BYTES
# How long a lease may look for a database that went away, beyond its own end.
OUTAGE_SECONDS = 5.0
# Our own timeouts and the server's statement_timeout: half a slice may pass.
SLICE_TOO_LONG = frozenset({"25P03", "25P04", "57014"})
DEADLOCK = "40P01"
# At most once, a slice is over only when all of it is handled: how many events fit is learned.
UNSURE_EVENTS = 64
UNSURE_SECONDS = 0.25

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Hand:
    """What a lease knows of one partition that it holds."""

    held: Held
    bound: int | None
    report: PartitionReport
    due: float = 0.0
    """Monotonic time before which it is left alone."""
    first_at: float = 0.0
    """Monotonic time at which the oldest buffered event came."""
    trouble: str | None = None
    limit: int = 0
    """Events of the next slice at most; halved when a transaction took too long."""
    pace: int = UNSURE_EVENTS
    """At most once: events of the next slice at most, so that a death loses little."""
    unsure: Handled | None = None
    """At most once: what progress has passed and what is not written yet."""

    @property
    def finished(self) -> bool:
        """Whether the bound is reached, with nothing left to be written."""
        if self.bound is None or self.unsure is not None:
            return False
        return self.held.next_offset >= self.bound


class Holding:
    """What a worker holds during one lease: events one after the other."""

    def __init__(self, worker: Worker, lease: Lease, attempt: int, report: Report) -> None:
        self._worker = worker
        self._pipeline = worker.pipeline
        self._clock = worker.clock
        self._lease = lease
        self._report = report
        self._claim = Claim(
            lease.pipeline,
            (lease.epoch, lease.round, attempt),
            uuid.uuid4(),
            worker.pulse.worker,
        )
        self._bounds = {share.of: share.bound for share in lease.shares}
        self._wanted = set(self._bounds)
        self._hands: dict[Partition, Hand] = {}
        now = self._clock.monotonic()
        self._ends = now + lease.ends_at - self._clock.now()
        self._look_at = now
        self._budget = 0.0
        self._budget_at = now
        self._busy = False
        self._flood = False

    def __enter__(self) -> Self:
        self._connect(self._ends)
        self._reader = self._worker.reader(self._lease, self._claim.lease)
        self._reader.drop_all()
        self._worker.pulse.start(self._lease.epoch, self._connection)
        self._worker.look_at_tables_again()
        # Warm-up: connect and prefetch, nothing else. What counts is read after the take.
        ahead = {share.of for share in self._lease.shares if share.ahead}
        for partition, offset in self._ledger.guesses(ahead).items():
            self._reader.aim(partition, offset)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._report.partitions = [self._summary(hand) for hand in self._hands.values()]
        # After a release nothing is prefetched: what comes then belongs to the next owner.
        self._reader.drop_all()
        reach("before-release")
        if error is None:
            self._ledger.release([self._parting(hand) for hand in self._hands.values()])

    def loop(self) -> None:
        """Take, read, handle, commit, until the time is over."""
        while not self._over():
            try:
                self._take()
                if not self._hands:
                    self._wait_for_release()
                    continue
                self._resume()
                self._read()
                for hand in self._ripe():
                    self._slice(hand)
                    if self._over():
                        break
            except Lost as lost:
                self._lose(lost)
            except KafkaException as error:
                self._kafka_trouble(error)
            except psycopg.Error as error:
                if not self._gone():
                    raise
                self._reconnect(error)

    # Ownership

    def _take(self) -> None:
        now = self._clock.monotonic()
        released = self._worker.pulse.released
        if not self._wanted or (now < self._look_at and not released.is_set()):
            return
        released.clear()
        self._look_at = now + LOOK_AGAIN_SECONDS
        replace_dead = not isinstance(self._pipeline.sink, Calls)
        for held in self._ledger.take(self._wanted, replace_dead=replace_dead):
            self._wanted.discard(held.partition)
            summary = PartitionReport(held.partition.topic, held.partition.number, taken=True)
            hand = Hand(held, self._bounds[held.partition], summary)
            # What has failed before is tried in smaller pieces: it may have taken too long.
            hand.limit = max(1, self._pipeline.slice_size >> min(held.attempts, 20))
            self._hands[held.partition] = hand
            hand.due = now + held.wait_seconds if held.wait_seconds > 0 else 0.0
            if hand.due or hand.finished:
                self._reader.drop(held.partition)
            else:
                self._reader.own(held.partition, held.next_offset)
            reach("lease-taken")
        if self._wanted:
            for partition in self._ledger.not_mine(self._wanted):
                self._wanted.discard(partition)
                self._reader.drop(partition)
                self._report.fenced.append(str(partition))
        if self._wanted:
            self._ledger.end_frozen(self._wanted)

    def _wait_for_release(self) -> None:
        wait = min(LOOK_AGAIN_SECONDS, self._ends - self._clock.monotonic())
        if wait > 0:
            self._worker.pulse.released.wait(wait)

    def _resume(self) -> None:
        """Read on where a backoff is over."""
        now = self._clock.monotonic()
        for partition, hand in self._hands.items():
            if hand.due <= now and not hand.finished and not self._reader.reads(partition):
                self._reader.aim(partition, hand.held.next_offset)

    def _fenced(self, hand: Hand) -> None:
        partition = hand.held.partition
        self._report.fenced.append(str(partition))
        del self._hands[partition]
        self._reader.drop(partition)

    # Reading

    def _read(self) -> None:
        now = self._clock.monotonic()
        waiting = [hand for hand in self._hands.values() if not hand.finished and hand.due <= now]
        if not waiting:
            self._rest(max(0.0, min(self._next_due(), self._ends) - now))
            return
        buffered = any(self._reader.span(hand.held.partition).events for hand in waiting)
        if self._full():
            return
        if buffered:
            # Behind, with a slice that is not worth it yet: there is something to wait for.
            pause = LINGER_SECONDS if self._busy or not self._ripe() else 0.0
            self._flood = self._reader.linger(pause) >= FLOOD_EVENTS
        else:
            idle = IDLE_SECONDS if not self._wanted else HAND_OVER_SECONDS
            wait = max(0.0, min(idle, self._ends - now))
            started = now
            self._reader.fill(wait)
            self._report.idle_seconds += self._clock.monotonic() - started
        self._stamp(waiting)

    def _rest(self, seconds: float) -> None:
        """Nothing to read: wait, but no longer than a release or a stop may wait (K4)."""
        if self._wanted:
            self._worker.pulse.released.wait(min(seconds, LOOK_AGAIN_SECONDS))
        else:
            self._clock.sleep(min(seconds, IDLE_SECONDS))

    def _stamp(self, hands: list[Hand]) -> None:
        now = self._clock.monotonic()
        for hand in hands:
            if not hand.first_at and self._reader.span(hand.held.partition).events:
                hand.first_at = now

    def _full(self) -> bool:
        if self._reader.buffered_bytes >= BUFFER_BYTES:
            self._reader.keep(self._hands)
        return self._reader.buffered_bytes >= BUFFER_BYTES or any(
            len(self._reader.span(partition).events) >= hand.limit
            for partition, hand in self._hands.items()
        )

    def _ripe(self) -> list[Hand]:
        """The partitions whose slice is worth a transaction now, the fullest first."""
        now = self._clock.monotonic()
        full = self._reader.buffered_bytes >= BUFFER_BYTES
        ripe = []
        for hand in self._hands.values():
            span = self._reader.span(hand.held.partition)
            if hand.due > now or hand.finished:
                continue
            if hand.unsure is not None:
                ripe.append(hand)
            elif span.events:
                late = now - hand.first_at >= (FLOOD_SECONDS if self._flood else FILL_SECONDS)
                if late or full or len(span.events) >= hand.limit or self._is_live(hand, span):
                    ripe.append(hand)
            elif span.at_end and span.end > hand.held.next_offset:
                ripe.append(hand)
        ripe.sort(key=lambda hand: -len(self._reader.span(hand.held.partition).events))
        return ripe

    def _is_live(self, hand: Hand, span: Span) -> bool:
        """Whether nothing more is to come at once.

        The end of a partition is announced only with the next fetch, half a second later; the
        end of the log came along with the events.
        """
        return span.at_end or span.end >= self._reader.high(hand.held.partition)

    # Slices

    def _slice(self, hand: Hand) -> None:
        events, end = self._cut(hand, self._reader.span(hand.held.partition))
        if not events and end <= hand.held.next_offset and hand.unsure is None:
            # At most once: progress may have passed what is still buffered.
            self._reader.done(hand.held.partition, hand.held.next_offset)
            return
        started = self._clock.monotonic()
        try:
            outcome = self._process(hand, events, end)
        except FencedError:
            self._fenced(hand)
        except psycopg.Error as error:
            self._refused(hand, error)
        except SidelineError as error:
            self._give_up(error, event=str(hand.held.partition), stage="write")
        else:
            self._committed(hand, outcome, started)

    def _cut(self, hand: Hand, span: Span) -> tuple[list[Event], int]:
        """The events of the next slice, and where progress stands behind them."""
        if hand.unsure is not None:
            return [], hand.held.next_offset
        events = span.events
        limit = min(hand.limit, len(events))
        if self._pipeline.delivery == "at-most-once":
            limit = min(limit, hand.pace)
        limit = self._allowance(limit)
        if span.bytes > SLICE_BYTES:
            limit = min(limit, max(1, len(events) * SLICE_BYTES // span.bytes))
        whole = limit >= len(events)
        chosen = admit(events[:limit], hand.held.next_offset, hand.bound)
        if whole and len(chosen) == len(events):
            # Beyond the last event there may be holes, as far as the end of the log was seen.
            return chosen, span.end
        if chosen:
            return chosen, chosen[-1].offset + 1
        return [], self._beyond(hand, span)

    def _beyond(self, hand: Hand, span: Span) -> int:
        """How far progress may go over holes, with no event left on the way."""
        bound, here = hand.bound, hand.held.next_offset
        if span.events and (bound is None or span.events[0].offset < bound):
            return here
        if bound is not None and span.end >= bound:
            return max(bound, here)
        return max(span.end, here) if span.at_end else here

    def _process(self, hand: Hand, events: list[Event], end: int) -> Outcome:
        if self._pipeline.wants_transaction:
            return self._rows.run(hand.held, events, end, self._clock)
        if self._pipeline.delivery == "at-most-once":
            hand.unsure = hand.unsure or self._begin_unsure(hand, events, end)
            outcome = self._home.finish_unsure(hand.held, hand.unsure)
            hand.unsure = None
            return outcome
        handled, failure = self._handle(hand, events, end)
        reach("after-handler")
        if failure is not None and not handled.events:
            return Outcome(hand.held.next_offset, failure=failure)
        outcome = self._home.commit(hand.held, handled)
        return outcome if outcome.failure or not failure else outcome._replace(failure=failure)

    def _begin_unsure(self, hand: Hand, events: list[Event], end: int) -> Handled:
        """Pass events first, then handle them; what fails is left out."""
        started = self._clock.monotonic()
        self._home.begin_unsure(hand.held, events, end)
        effects: list[Any] = []
        skipped = 0
        executes = False
        keys: list[Any] = []
        while len(effects) < len(events):
            rest = events[len(effects) :]
            handled, failure = self._handle(hand, rest, end)
            effects.extend(handled.effects)
            skipped += handled.skipped
            executes = executes or handled.executes
            keys.extend(handled.keys or ())
            if failure is not None:
                # Progress has passed it already: there is no second time.
                effects.append(())
                keys.append(None)
                skipped += 1
        reach("after-handler")
        quick = self._clock.monotonic() - started < UNSURE_SECONDS
        hand.pace = min(hand.pace * 2, self._pipeline.slice_size) if quick else hand.pace // 2 or 1
        whole = Handled(hand.held.next_offset, end, events, effects, skipped, executes)
        return whole if self._pipeline.key is None else whole._replace(keys=keys)

    def _handle(self, hand: Hand, events: list[Event], end: int) -> tuple[Handled, Failure | None]:
        started = self._clock.monotonic()
        result = handle(
            self._pipeline, events, start=hand.held.next_offset, end=end, clock=self._clock
        )
        self._report.handle_seconds += self._clock.monotonic() - started
        return result

    def _committed(self, hand: Hand, outcome: Outcome, started: float) -> None:
        partition = hand.held.partition
        self._reader.done(partition, outcome.end)
        hand.first_at = self._clock.monotonic() if self._reader.span(partition).events else 0.0
        summary = hand.report
        summary.consumed += outcome.consumed
        summary.applied += outcome.applied
        summary.slices += 1
        took = self._clock.monotonic() - started
        self._report.slice_seconds += took
        self._budget -= outcome.consumed
        self._busy = outcome.consumed > BUSY_EVENTS_PER_SECOND * (took + LINGER_SECONDS)
        if outcome.consumed:
            hand.held.attempts = 0
            hand.trouble = None
            hand.limit = self._pipeline.slice_size
        if outcome.failure is not None:
            self._failed(hand, outcome.failure)
        elif hand.finished:
            # What lies beyond the bound would take the room of partitions that are not there yet.
            self._reader.drop(partition)

    # Trouble

    def _failed(self, hand: Hand, failure: Failure) -> None:
        blocks = isinstance(self._pipeline.on_failure, Block)
        if blocks or self._pipeline.recovers(failure.error):
            self._back_off(hand, f"{type(failure.error).__name__}: {failure.error}")
            log.warning("event %s waits: %s", failure.event.id, hand.trouble)
            return
        self._give_up(failure.error, event=failure.event.id, stage=failure.stage)

    def _back_off(self, hand: Hand, trouble: str) -> None:
        """Leave the partition alone for a while; it takes no room from the others then (K4)."""
        hand.held.attempts += 1
        wait = self._pipeline.retry.wait_seconds(hand.held.attempts, random.random())  # noqa: S311
        hand.due = self._clock.monotonic() + wait
        hand.trouble = trouble
        self._reader.drop(hand.held.partition)

    def _refused(self, hand: Hand, error: psycopg.Error) -> None:
        """PostgreSQL said no to the slice as a whole."""
        if error.sqlstate in SLICE_TOO_LONG:
            hand.limit = max(1, hand.limit // 2)
        if self._gone():
            # Counted, so that the next lease does not begin with a slice as big (K10).
            hand.held.attempts += error.sqlstate in SLICE_TOO_LONG
            raise error
        self._connection.rollback()
        self._worker.writer().forget()
        if kind_of(error) != "recoverable":
            self._give_up(
                error, event=f"{hand.held.partition}/{hand.held.next_offset}", stage="write"
            )
            return
        if error.sqlstate == DEADLOCK:
            hand.trouble = str(error).strip()
            return
        self._back_off(hand, str(error).strip())
        log.warning("partition %s waits: %s", hand.held.partition, hand.trouble)

    def _give_up(self, error: BaseException, *, event: str, stage: str) -> None:
        self._report.failure = failure_of(error, event=event, stage=stage)

    def _lose(self, lost: Lost) -> None:
        hand = self._hands.get(lost.partition)
        if hand is None:
            # A guess before the take may be behind what Kafka has.
            self._reader.drop(lost.partition)
            return
        self._report.lost.append(str(lost.partition))
        hand.trouble = f"Kafka has nothing at offset {lost.offset}"
        hand.due = float("inf")
        self._reader.drop(lost.partition)

    def _kafka_trouble(self, error: KafkaException) -> None:
        log.warning("Kafka: %s", error)
        for hand in self._hands.values():
            hand.trouble = str(error)
        self._worker.lose_reader()
        # It reads nothing yet: whatever is due is read again from its progress on.
        self._reader = self._worker.reader(self._lease, self._claim.lease)
        self._clock.sleep(min(1.0, max(0.0, self._ends - self._clock.monotonic())))

    def _gone(self) -> bool:
        return self._connection.broken or self._connection.closed

    def _reconnect(self, error: psycopg.Error) -> None:
        """The database went away in the middle of something."""
        log.warning("PostgreSQL: %s", error)
        for hand in self._hands.values():
            hand.trouble = str(error).strip()
        self._connect(self._ends + OUTAGE_SECONDS)
        self._ledger.reannounce()
        for hand in list(self._hands.values()):
            # At most once: whether it was written nobody knows, so it is not written again.
            hand.unsure = None
            try:
                hand.held.next_offset = self._ledger.settle(hand.held)
            except FencedError:
                self._fenced(hand)
                continue
            if self._reader.reads(hand.held.partition):
                self._reader.own(hand.held.partition, hand.held.next_offset)

    def _connect(self, until: float) -> None:
        self._connection = self._worker.connection(until)
        self._ledger = Ledger(self._connection, self._claim, grace_seconds=self._grace())
        if isinstance(self._pipeline.sink, Calls):
            self._home: CallsHome | PostgresHome = CallsHome(self._connection, self._ledger)
        else:
            self._home = self._rows = PostgresHome(
                self._pipeline, self._connection, self._worker.writer(), self._ledger
            )

    def _grace(self) -> float:
        # A call that is still under way must not be overtaken by its successor.
        if isinstance(self._pipeline.sink, Calls) and self._pipeline.handler_timeout:
            return self._worker.grace_seconds + self._pipeline.handler_timeout
        return self._worker.grace_seconds

    # Time and pace

    def _over(self) -> bool:
        if self._report.failure is not None or self._worker.pulse.stop_wanted.is_set():
            return True
        if self._clock.monotonic() >= self._ends:
            return True
        if self._wanted:
            return False
        return all(hand.finished or hand.due == float("inf") for hand in self._hands.values())

    def _next_due(self) -> float:
        dues = [hand.due for hand in self._hands.values() if not hand.finished]
        return min(dues, default=self._ends)

    def _allowance(self, wanted: int) -> int:
        """How many events the pace allows now; at least one when its time has come."""
        rate = self._lease.rate
        if rate is None:
            return wanted
        now = self._clock.monotonic()
        self._budget = min(rate, self._budget + (now - self._budget_at) * rate)
        self._budget_at = now
        if self._budget < 1:
            self._clock.sleep(min((1 - self._budget) / rate, max(0.0, self._ends - now)))
            return min(wanted, 1)
        return min(wanted, int(self._budget))

    # Reporting

    def _parting(self, hand: Hand) -> Parting:
        wait = self._wait_left(hand) or None
        return Parting(hand.held.partition, wait, hand.held.attempts, hand.trouble)

    def _wait_left(self, hand: Hand) -> float:
        wait = hand.due - self._clock.monotonic()
        return wait if 0 < wait < float("inf") else 0.0

    def _summary(self, hand: Hand) -> PartitionReport:
        summary = hand.report
        summary.next_offset = hand.held.next_offset
        summary.high = self._reader.high(hand.held.partition)
        summary.trouble = hand.trouble
        summary.attempts = hand.held.attempts
        summary.retry_in_seconds = self._wait_left(hand)
        return summary
