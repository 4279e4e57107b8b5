"""One lease, from the warm-up to the release.

The way of an event: `Reader` -> a slice -> the handler -> the home's commit.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Self

import psycopg
from confluent_kafka import KafkaException

from sideline.causes import Cause, message_of
from sideline.classify import kind_of
from sideline.crashpoints import reach
from sideline.engine.forwarding import FAREWELL_SECONDS, MOST_UNSENT
from sideline.engine.hand import Hand, cut, due_copies, still_ahead
from sideline.engine.lease import Lease, Partition, PartitionReport, Report, failure_of
from sideline.engine.processing import Processor
from sideline.engine.reader import Lost, Span
from sideline.engine.tools import Tools
from sideline.engine.turns import Turns
from sideline.errors import (
    FencedError,
    GuardrailError,
    RefusedError,
    SidelineError,
    UnclearError,
)
from sideline.homes.savepoints import DEADLOCK, is_data
from sideline.homes.transactions import Unsent
from sideline.ledger.store import Claim, Held, Parting, Stale
from sideline.policies import DeadLetter
from sideline.sinks import Calls
from sideline.slices import (
    SLICE_BYTES,
    Failure,
    Outcome,
)

if TYPE_CHECKING:
    from sideline.engine.worker import Worker

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
# Copies become due one after the other: several at a time are worth a transaction.
GATHER_COPIES_SECONDS = 0.25
# While live events come in numbers: what they wait for then is a slice of few copies, with as many
# round trips as one of thousands of events.
BUSY_COPIES_SECONDS = 1.0
# A lease that is fed ends when nothing was done for so long: Block, a backoff, an outage.
FED_SECONDS = 10.0
# How long a lease may look for a database that went away, beyond its own end.
OUTAGE_SECONDS = 5.0
# An event that waits is written down at once, then no more often than this.
NOTE_SECONDS = 1.0
# Our own timeouts and the server's statement_timeout: half a slice may pass.
SLICE_TOO_LONG = frozenset({"25P03", "25P04", "57014"})

log = logging.getLogger(__name__)


class Holding:
    """What a worker holds during one lease: events one after the other."""

    _side_by_side = False

    def __init__(self, worker: Worker, lease: Lease, attempt: int, report: Report) -> None:
        self._worker = worker
        self._pipeline = worker.pipeline
        self._clock = worker.clock
        self._lease = lease
        self._report = report
        self._claim = Claim(
            lease.pipeline,
            lease.number(attempt),
            uuid.uuid4(),
            worker.pulse.worker,
        )
        self._shares = {share.of: share for share in lease.shares}
        self._wanted = set(self._shares)
        self._hands: dict[Partition, Hand] = {}
        self._parted: list[PartitionReport] = []
        now = self._clock.monotonic()
        self._ends = now + lease.ends_at - self._clock.now()
        self._look_at = now
        self._pace = worker.pace
        self._pace.begin(lease.rate, self._ends)
        self._busy = False
        self._flood = False
        self._refreshed = False
        self._turns = Turns(worker, self._allowance, self._lasts)

    def __enter__(self) -> Self:
        # First, because it finds its broker in the background.
        self._reader = self._worker.reader(self._lease, self._claim.lease)
        self._reader.drop_all()
        self._connect(self._ends)
        self._worker.pulse.start(self._lease.epoch, self._tools.connection)
        self._worker.look_at_tables_again()
        # Warm-up: connect and prefetch, nothing else. What counts is read after the take.
        ahead = {share.of for share in self._lease.shares if share.ahead and not share.relay}
        for partition, offset in (self._tools.ledger.guesses(ahead) if ahead else {}).items():
            self._reader.aim(partition, offset)
        self._reader.meet({share.topic for share in self._lease.shares if not share.ahead})
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._forward_rest()
        summaries = [self._summary(hand) for hand in self._hands.values()]
        self._report.partitions = self._parted + summaries
        # After a release nothing is prefetched: what comes then belongs to the next owner.
        self._reader.drop_all()
        reach("before-release")
        if error is None:
            self._tools.ledger.release([self._parting(hand) for hand in self._hands.values()])

    def loop(self) -> None:
        """Take, read, handle, commit, until the time is over."""
        while not self._over():
            try:
                if self._worker.pulse.paused or self._worker.pulse.all_paused:
                    self._let_go(self._worker.pulse.paused)
                self._take()
                if not self._hands:
                    self._wait_for_release()
                    continue
                self._resume()
                self._replay()
                self._read()
                self._slices()
            except Lost as lost:
                self._lose(lost)
            except KafkaException as error:
                self._kafka_trouble(error)
            except psycopg.Error as error:
                if not self._tools.gone:
                    raise
                self._reconnect(error)

    def _slices(self) -> None:
        """Commit what is ripe, then send what was committed."""
        ripe = self._ripe()
        # Those that have to wait for Kafka come last: until then it may have answered.
        for hand in sorted(ripe, key=lambda hand: hand.held.unsent > MOST_UNSENT):
            if hand.held.partition not in self._hands:
                # Its outbox has shown meanwhile that it has another owner.
                continue
            if hand.held.unsent > MOST_UNSENT and not self._make_room(hand):
                continue
            self._slice(hand)
            if self._over():
                break
            # At once, so that Kafka works while the next slice is handled.
            self._forward(idle=False)
        self._forward(idle=not ripe)

    # Ownership

    def _take(self) -> None:
        now = self._clock.monotonic()
        released = self._worker.pulse.released
        if not self._wanted or (now < self._look_at and not released.is_set()):
            return
        # What was read ahead is known only once it is fetched from librdkafka.
        self._reader.drain()
        released.clear()
        anyway = now >= self._look_at
        if anyway:
            self._look_at = now + LOOK_AGAIN_SECONDS
        replace_dead = not isinstance(self._pipeline.sink, Calls)
        for held in self._tools.ledger.take(self._wanted, replace_dead=replace_dead):
            self._wanted.discard(held.partition)
            summary = PartitionReport(held.partition.topic, held.partition.number, taken=True)
            share = self._shares[held.partition]
            hand = Hand(held, share.bound, summary, delay_ms=share.delay_ms, relay_only=share.relay)
            held.tries = self._tries(held) if share.delay_ms is None else None
            # What has failed before is tried in smaller pieces: it may have taken too long.
            hand.limit = max(1, self._pipeline.slice_size >> min(held.attempts, 20))
            # Where keys are derived, those of one aggregate may stand in several partitions.
            held.shared = held.shared or self._pipeline.key is not None
            self._hands[held.partition] = hand
            hand.due = now + held.wait_seconds if held.wait_seconds > 0 else 0.0
            hand.relayed_at = now
            reach("lease-taken")
            self._tools.home.taken(held)
            if held.pending is not None and not self._resolve(hand):
                continue
            if hand.due or hand.finished:
                self._reader.drop(held.partition)
            else:
                self._reader.own(held.partition, held.next_offset)
        # Not between two releases: those who wait for the second one would wait longer.
        if self._wanted and anyway:
            self._look_who_holds()

    def _look_who_holds(self) -> None:
        for partition in self._tools.ledger.not_mine(self._wanted):
            self._wanted.discard(partition)
            self._reader.drop(partition)
            self._report.fenced.append(str(partition))
        if self._wanted:
            self._tools.ledger.end_frozen(self._wanted)

    def _let_go(self, paused: Container[Partition]) -> None:
        """Give back what a person paused; what is read of it meanwhile is somebody's later."""
        everything = self._worker.pulse.all_paused

        def is_paused(partition: Partition) -> bool:
            # Somebody always sends what was committed (K23).
            return (everything or partition in paused) and not self._shares[partition].relay

        for partition in [partition for partition in self._wanted if is_paused(partition)]:
            self._wanted.discard(partition)
            self._reader.drop(partition)
        for hand in [hand for spot, hand in self._hands.items() if is_paused(spot)]:
            self._part(hand)

    def _part(self, hand: Hand) -> None:
        partition = hand.held.partition
        until = self._clock.monotonic() + FAREWELL_SECONDS
        if not self._still_ours(hand, partial(self._tools.forwarder.finish, hand, until)):
            return
        self._parted.append(self._summary(hand))
        del self._hands[partition]
        self._reader.drop(partition)
        self._tools.ledger.release([self._parting(hand)])

    def _wait_for_release(self) -> None:
        wait = min(LOOK_AGAIN_SECONDS, self._ends - self._clock.monotonic())
        if wait > 0:
            self._worker.pulse.released.wait(wait)

    def _resume(self) -> None:
        """Read on where a backoff is over."""
        now = self._clock.monotonic()
        for partition, hand in list(self._hands.items()):
            if hand.due <= now and not hand.finished and not self._reader.reads(partition):
                if hand.held.pending is not None and not self._resolve(hand):
                    continue
                self._reader.aim(partition, hand.held.next_offset)

    def _refresh(self, hands: list[Hand]) -> None:
        """Once a lease, see to one of the partitions in which nothing happens (K19).

        By chance: each has its turn long before brokers forget a group.
        """
        idle = [hand for hand in hands if self._reader.span(hand.held.partition).at_end]
        if idle and not self._refreshed:
            self._refreshed = True
            self._asked(random.choice(idle), self._tools.home.refresh)  # noqa: S311

    def _resolve(self, hand: Hand) -> bool:
        """Find out what became of a slice; False: not yet, or the partition is not ours (K19)."""
        return self._asked(hand, self._tools.home.resolve)

    def _asked(self, hand: Hand, step: Callable[[Held], None]) -> bool:
        """Whether the home could do what it was asked."""
        try:
            step(hand.held)
        except FencedError:
            self._fenced(hand)
        except Unsent as unsent:
            self._unsent(hand, unsent)
        except Stale:
            self._back_off(hand, "what its last slice changes is being changed elsewhere")
        except psycopg.Error as error:
            self._refused(hand, error)
            # Nothing of it is read before it is known where to go on.
            self._reader.drop(hand.held.partition)
        except SidelineError as error:
            self._give_up(error, event=str(hand.held.partition), stage="write")
        else:
            return True
        return False

    def _fenced(self, hand: Hand) -> None:
        partition = hand.held.partition
        self._report.fenced.append(str(partition))
        del self._hands[partition]
        self._reader.drop(partition)

    # Reading

    def _read(self) -> None:
        now = self._clock.monotonic()
        waiting = [hand for hand in self._hands.values() if not hand.finished and hand.due <= now]
        patience = min(
            self._turns.wait_seconds(self._hands),
            self._tools.forwarder.wait_seconds(self._hands.values()),
        )
        if not waiting:
            self._rest(max(0.0, min(self._next_due() - now, self._ends - now, patience)))
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
            wait = max(0.0, min(idle, self._ends - now, patience))
            started = now
            if self._reader.fill(wait):
                self._go_on()
            else:
                self._busy = False
                if not self._wanted:
                    self._refresh(waiting)
            self._report.idle_seconds += self._clock.monotonic() - started
        self._stamp(waiting)

    def _go_on(self) -> None:
        """Rows come only once: while something is done, a lease that is fed does not end."""
        if self._lease.fed:
            self._ends = max(self._ends, self._clock.monotonic() + FED_SECONDS)
            self._pace.extend(self._ends)

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
        ripe = [hand for hand in self._hands.values() if self._is_ripe(hand, now, full=full)]
        ripe.sort(key=lambda hand: -len(self._reader.span(hand.held.partition).events))
        return ripe

    def _is_ripe(self, hand: Hand, now: float, *, full: bool) -> bool:
        span = self._reader.span(hand.held.partition)
        if hand.due > now or hand.finished:
            return False
        if hand.unsure is not None:
            return True
        if span.events:
            late = now - hand.first_at >= (FLOOD_SECONDS if self._flood else FILL_SECONDS)
            return late or full or len(span.events) >= hand.limit or self._is_live(hand, span)
        return span.at_end and span.end > hand.held.next_offset

    def _is_live(self, hand: Hand, span: Span) -> bool:
        """Whether nothing more is to come at once.

        The end of a partition is announced only with the next fetch, half a second later; the
        end of the log came along with the events.
        """
        return span.at_end or span.end >= self._reader.high(hand.held.partition)

    # What comes back

    def _replay(self) -> None:
        """Give released events their turn; live ones wait for no more than a slice of them."""
        live = self._has_live()
        # A person who paused a partition did not mean its outbox, but what comes back.
        homes = [partition for partition, hand in self._hands.items() if not hand.relay_only]
        for partition in self._turns.due(homes, live=live):
            hand = self._hands[partition]
            try:
                tried = self._turns.take(hand.held, self._reader.delivery, hand.report, live=live)
            except FencedError:
                self._fenced(hand)
                continue
            except SidelineError as error:
                self._give_up(error, event=str(partition), stage="write")
                return
            self._pace.spend(tried)
            if self._over():
                return

    def _has_live(self) -> bool:
        return any(
            self._reader.span(partition).events
            for partition, hand in self._hands.items()
            if not hand.finished and hand.due <= self._clock.monotonic()
        )

    # Slices

    def _slice(self, hand: Hand) -> None:
        span = self._reader.span(hand.held.partition)
        events, end = cut(hand, span, partial(self._most, hand))
        if not events and end <= hand.held.next_offset and hand.unsure is None:
            # At most once: progress may have passed what is still buffered.
            self._reader.done(hand.held.partition, hand.held.next_offset)
            return
        if hand.delay_ms is not None:
            events, end, wait = due_copies(hand, events, end, self._clock.now() * 1000)
            if wait:
                gather = BUSY_COPIES_SECONDS if self._busy else GATHER_COPIES_SECONDS
                hand.due = self._clock.monotonic() + max(wait, gather)
                self._reader.drop(hand.held.partition)
                return
        started = self._clock.monotonic()
        try:
            outcome = self._processor.process(hand, events, end, span.unreadable)
        except FencedError:
            self._fenced(hand)
        except Stale:
            # Nothing is written; its events are still here, and are admitted anew.
            return
        except Unsent as unsent:
            self._unsent(hand, unsent)
        except psycopg.Error as error:
            self._refused(hand, error)
        except SidelineError as error:
            self._give_up(error, event=str(hand.held.partition), stage="write")
        else:
            self._committed(hand, outcome, started)

    def _committed(self, hand: Hand, outcome: Outcome, started: float) -> None:
        partition = hand.held.partition
        self._reader.done(partition, outcome.end)
        hand.first_at = self._clock.monotonic() if self._reader.span(partition).events else 0.0
        summary = hand.report
        summary.consumed += outcome.consumed
        summary.applied += outcome.applied
        summary.parked += outcome.parked
        summary.skipped += outcome.skipped
        summary.slices += 1
        took = self._clock.monotonic() - started
        self._report.slice_seconds += took
        self._spend(hand, outcome.consumed)
        if hand.delay_ms is None:
            self._busy = outcome.consumed > BUSY_EVENTS_PER_SECOND * (took + LINGER_SECONDS)
        self._go_on()
        if outcome.consumed or outcome.copies:
            hand.held.attempts = 0
            hand.held.stuck_at = None
            hand.trouble = None
            hand.limit = self._pipeline.slice_size
            if hand.held.tries:
                hand.held.tries = still_ahead(hand.held.tries, outcome.end)
        if outcome.failure is not None:
            self._failed(hand, outcome.failure)
        elif hand.finished:
            # What lies beyond the bound would take the room of partitions that are not there yet.
            self._reader.drop(partition)

    # Trouble

    def _failed(self, hand: Hand, failure: Failure) -> None:
        if failure.stage == "guard" or issubclass(type(failure.error), GuardrailError):
            stage = failure.stage
            if stage != "guard":
                stage = "guardrail" if hand.delay_ms is None else "guardrail-retry"
            event = failure.event.id
            self._give_up(failure.error, event=event, stage=stage, cause=failure.told)
            return
        if failure.stage != "copy":
            fate = self._pipeline.fate(failure.error, own=failure.stage == "write")
            if fate == "stops":
                self._give_up(failure.error, event=failure.event.id, stage=failure.stage)
                return
        held = hand.held
        # What it waits for may have changed when its turn comes again: its records are sent again.
        self._worker.blamed.pop(failure.event.id, None)
        if hand.delay_ms is None:
            held.stuck_at = failure.event.offset
        if held.tries is not None and failure.stage != "copy":
            held.tries[str(held.stuck_at)] = held.tries_of(failure.event.offset) + 1
        self._back_off(hand, _told(failure.error))
        log.warning("event %s waits: %s", failure.event.id, hand.trouble)
        self._note(hand)

    def _note(self, hand: Hand) -> None:
        """Let people see what a partition waits for while it does, not when its lease ends."""
        held, now = hand.held, self._clock.monotonic()
        if not held.tries and held.attempts > 1 and now < hand.noted_at + NOTE_SECONDS:
            return
        hand.noted_at = now
        try:
            self._tools.ledger.note_tries(held, hand.trouble, self._wait_left(hand))
            reach("after-tries")
        except FencedError:
            self._fenced(hand)
        except psycopg.Error as error:
            if self._tools.gone:
                raise
            # It waits all the same, and is written down when the lease ends.
            self._tools.connection.rollback()
            log.warning("partition %s: %s", held.partition, error)

    def _tries(self, held: Held) -> dict[str, int] | None:
        """How often events failed in place, where the policy counts it (F7)."""
        if not isinstance(self._pipeline.on_failure, DeadLetter):
            return None
        return still_ahead(held.tries or {}, held.next_offset)

    def _back_off(self, hand: Hand, trouble: str) -> None:
        """Leave the partition alone for a while; it takes no room from the others then (K4)."""
        hand.held.attempts += 1
        wait = self._pipeline.retry.wait_seconds(hand.held.attempts, random.random())  # noqa: S311
        hand.due = self._clock.monotonic() + wait
        hand.trouble = trouble
        self._reader.drop(hand.held.partition)

    def _unsent(self, hand: Hand, unsent: Unsent) -> None:
        """Kafka did not say that it has the slice: it is asked, then the slice is done again."""
        self._back_off(hand, f"Kafka: {unsent}")
        log.warning("partition %s waits: %s", hand.held.partition, hand.trouble)
        self._note(hand)

    def _refused(self, hand: Hand, error: psycopg.Error) -> None:
        """PostgreSQL said no to the slice as a whole."""
        if error.sqlstate in SLICE_TOO_LONG:
            hand.limit = max(1, hand.limit // 2)
        if self._tools.gone:
            # Counted, so that the next lease does not begin with a slice as big (K10).
            hand.held.attempts += error.sqlstate in SLICE_TOO_LONG
            raise error
        self._tools.connection.rollback()
        self._worker.writer().forget()
        if is_data(error) and self._worker.writer().judge_early():
            # Only COMMIT found out: done again, the row is pinned on its event (K8).
            return
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
        self._note(hand)

    def _give_up(
        self, error: BaseException, *, event: str, stage: str, cause: Cause | None = None
    ) -> None:
        if issubclass(type(error), UnclearError):
            stage = "home"
        elif stage == "write" and issubclass(type(error), RefusedError):
            stage = "refused"
        self._report.failure = failure_of(error, event=event, stage=stage, cause=cause)

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

    def _reconnect(self, error: psycopg.Error) -> None:
        """The database went away in the middle of something; it may go again before we know."""
        while True:
            log.warning("PostgreSQL: %s", error)
            for hand in self._hands.values():
                hand.trouble = str(error).strip()
            try:
                self._connect(self._ends + OUTAGE_SECONDS)
                self._settle_all()
            except psycopg.Error as again:
                if not self._tools.gone or self._clock.monotonic() > self._ends:
                    raise
                error = again
                self._rest(LOOK_AGAIN_SECONDS)
            else:
                return

    def _settle_all(self) -> None:
        """Find out how far each partition has come."""
        self._tools.ledger.reannounce()
        for hand in list(self._hands.values()):
            # At most once: whether it was written nobody knows, so it is not written again.
            hand.unsure = None
            # Whether its last slice set keys aside is not known either.
            self._worker.asides.clear()
            try:
                hand.held.next_offset = self._tools.ledger.settle(hand.held)
            except FencedError:
                self._fenced(hand)
                continue
            if self._reader.reads(hand.held.partition):
                self._reader.own(hand.held.partition, hand.held.next_offset)

    def _connect(self, until: float) -> None:
        self._tools = Tools(self._worker, self._lease, self._claim, self._worker.connection(until))
        self._processor = self._processor_of(self._tools)
        pool = self._worker.pool() if self._side_by_side else None
        self._turns.replayer = self._tools.replayer(pool)

    def _processor_of(self, tools: Tools) -> Processor:
        return Processor(self._worker, tools, self._report)

    # The outbox

    def _forward(self, *, idle: bool) -> None:
        """Send what slices wrote, where it is time for it."""
        for hand in list(self._hands.values()):
            forwarder = self._tools.forwarder
            if forwarder.is_due(hand, idle=idle):
                self._still_ours(hand, partial(forwarder.forward, hand, self._ends, idle=idle))

    def _forward_rest(self) -> None:
        """The lease ends: whatever can be sent quickly is."""
        until = self._clock.monotonic() + FAREWELL_SECONDS
        # All at once, so that nobody waits for Kafka's answer to another.
        self._forward(idle=True)
        for hand in list(self._hands.values()):
            self._still_ours(hand, partial(self._tools.forwarder.finish, hand, until))

    def _still_ours(self, hand: Hand, step: Callable[[], None]) -> bool:
        """Whether the partition is still ours after a step for its outbox."""
        try:
            step()
        except FencedError:
            self._fenced(hand)
            return False
        return True

    def _make_room(self, hand: Hand) -> bool:
        """Whether what waits to be sent is little enough for another slice (K23)."""
        until = min(self._ends, self._clock.monotonic() + IDLE_SECONDS)
        finish = partial(self._tools.forwarder.finish, hand, until, enough=MOST_UNSENT)
        if not self._still_ours(hand, finish):
            return False
        if hand.held.unsent > MOST_UNSENT:
            self._hold_back(hand)
            return False
        return True

    def _hold_back(self, hand: Hand) -> None:
        """Too much waits to be sent already: nothing more is read meanwhile (K23)."""
        hand.due = self._clock.monotonic() + IDLE_SECONDS
        hand.trouble = f"{hand.held.unsent:,} records wait to be sent: {hand.relay_trouble}"
        self._reader.drop(hand.held.partition)

    # Time and pace

    def _over(self) -> bool:
        if self._report.failure is not None or self._worker.pulse.stop_wanted.is_set():
            return True
        if self._clock.monotonic() >= self._ends:
            return True
        if self._wanted:
            return False
        return all(self._is_over(hand) for hand in self._hands.values())

    def _lasts(self, seconds: float) -> bool:
        """Whether the lease goes on for so long, as far as can be seen."""
        stops = self._worker.pulse.stop_wanted.is_set() or self._worker.pulse.all_paused
        return not stops and self._clock.monotonic() + seconds < self._ends

    def _is_over(self, hand: Hand) -> bool:
        """Whether the lease has nothing more to do for a partition."""
        if not hand.relay_only and self._turns.pending(hand.held.partition):
            return False
        # All there is now is wanted: that copies come to their turn is not waited for.
        once = hand.delay_ms is not None and hand.bound is not None
        waits = once and hand.due > self._clock.monotonic()
        done = hand.finished or waits or self._reader.spent(hand.held.partition)
        return (done and not hand.held.unsent) or hand.due == float("inf")

    def _next_due(self) -> float:
        dues = [hand.due for hand in self._hands.values() if not hand.finished]
        return min(dues, default=self._ends)

    def _most(self, hand: Hand, wanted: int) -> int:
        if self._pipeline.delivery == "at-most-once":
            wanted = min(wanted, hand.pace)
        return self._allowance(wanted)

    def _allowance(self, wanted: int, *, patient: bool = True) -> int:
        """How many events the pace allows now; none if their time is after the lease."""
        stopped = self._worker.pulse.stop_wanted.is_set
        return self._pace.allow(wanted, stopped, patient=patient)

    def _spend(self, _hand: Hand, events: int) -> None:
        self._pace.spend(events)

    # Reporting

    def _parting(self, hand: Hand) -> Parting:
        wait = self._wait_left(hand) or None
        held = hand.held
        return Parting(held.partition, wait, held.attempts, hand.trouble, held.stuck_at, held.tries)

    def _wait_left(self, hand: Hand) -> float:
        wait = hand.due - self._clock.monotonic()
        return wait if 0 < wait < float("inf") else 0.0

    def _summary(self, hand: Hand) -> PartitionReport:
        summary = hand.report
        summary.next_offset = hand.held.next_offset
        summary.high = self._reader.high(hand.held.partition)
        summary.spent = self._reader.spent(hand.held.partition)
        summary.trouble = hand.trouble
        summary.attempts = hand.held.attempts
        summary.retry_in_seconds = self._wait_left(hand)
        summary.unsent = hand.held.unsent
        return summary


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"
