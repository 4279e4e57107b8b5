"""A lease whose handlers run side by side: the finished prefix commits while later ones run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import KafkaException

from sideline.crashpoints import reach
from sideline.engine.handling import runs_sql
from sideline.engine.holding import Hand, Holding
from sideline.engine.window import Window
from sideline.errors import FencedError, SidelineError
from sideline.slices import Handled, Outcome, admit

if TYPE_CHECKING:
    from sideline.engine.lease import Lease, Report
    from sideline.engine.worker import Worker

# While handlers run, results are gathered this long before they are worth a transaction.
GATHER_SECONDS = 0.02
# No wait for a handler is longer: meanwhile new events arrive.
WAIT_SECONDS = 0.005


class ConcurrentHolding(Holding):
    """Like `Holding`, with a window between reading and committing."""

    def __init__(self, worker: Worker, lease: Lease, attempt: int, report: Report) -> None:
        super().__init__(worker, lease, attempt, report)
        self._window = Window(worker.pool(), self._pipeline.key_of)
        self._gathered_at = 0.0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._window.close()
        if error is None:
            self._commit_rest()
        super().__exit__(kind, error, trace)

    def _read(self) -> None:
        if self._window.pending:
            if not self._full():
                self._reader.linger(0)
        else:
            super()._read()
        self._open()

    def _open(self) -> None:
        """Let the pool see everything that was read."""
        now = self._clock.monotonic()
        for partition, hand in self._hands.items():
            if hand.due > now or hand.finished:
                continue
            events = self._reader.span(partition).events
            seen = self._window.open_until(partition)
            if len(events) > seen:
                allowed = self._allowance(len(events) - seen)
                fresh = events[seen : seen + allowed]
                self._window.add(partition, admit(fresh, hand.held.next_offset, hand.bound))
        self._window.tidy()

    def _ripe(self) -> list[Hand]:
        ripe = self._committable()
        if not ripe and self._window.pending:
            if self._window.pending > self._pipeline.concurrency:
                # Something finishes all the time: whoever looked each time would do nothing else.
                self._clock.sleep(WAIT_SECONDS)
            else:
                self._window.wait(WAIT_SECONDS)
            ripe = self._committable()
        return ripe

    def _committable(self) -> list[Hand]:
        now = self._clock.monotonic()
        gathered = now - self._gathered_at >= GATHER_SECONDS
        ripe = []
        for partition, hand in self._hands.items():
            if hand.due > now or hand.finished:
                continue
            finished = self._window.finished(partition)
            pending = self._window.open_until(partition)
            worth = finished and (gathered or finished in {pending, hand.limit})
            if (
                worth
                or self._window.blocked(partition)
                or (
                    not pending
                    and self._beyond(hand, self._reader.span(partition)) > (hand.held.next_offset)
                )
            ):
                ripe.append(hand)
        if ripe:
            self._gathered_at = now
        return ripe

    def _slice(self, hand: Hand) -> None:
        started = self._clock.monotonic()
        try:
            outcome = self._commit_prefix(hand)
        except FencedError:
            self._fenced(hand)
        except psycopg.Error as error:
            self._window.drop(hand.held.partition)
            self._refused(hand, error)
        except SidelineError as error:
            self._give_up(error, event=str(hand.held.partition), stage="write")
        else:
            if outcome is not None:
                self._committed(hand, outcome, started)
                if outcome.failure is not None:
                    # Its turn comes again: everything behind it is handled anew.
                    self._window.drop(hand.held.partition)

    def _commit_prefix(self, hand: Hand) -> Outcome | None:
        partition = hand.held.partition
        span = self._reader.span(partition)
        taken, failure = self._window.take(partition, hand.limit)
        if taken:
            whole = len(taken) == len(span.events)
            end = span.end if whole and span.at_end else taken[-1].event.offset + 1
        elif self._window.open_until(partition):
            end = hand.held.next_offset
        else:
            end = self._beyond(hand, span)
        if end == hand.held.next_offset:
            return None if failure is None else Outcome(end, failure=failure)
        reach("after-handler")
        effects = [entry.effects for entry in taken]
        handled = Handled(
            hand.held.next_offset,
            end,
            [entry.event for entry in taken],
            effects,
            sum(entry.skipped for entry in taken),
            any(map(runs_sql, effects)),
            [entry.key for entry in taken],
        )
        outcome = self._home.commit(hand.held, handled)
        return outcome if outcome.failure or not failure else outcome._replace(failure=failure)

    def _commit_rest(self) -> None:
        """What was finished in order when the time was over."""
        for hand in list(self._hands.values()):
            if self._window.finished(hand.held.partition):
                self._slice(hand)

    def _fenced(self, hand: Hand) -> None:
        super()._fenced(hand)
        self._window.drop(hand.held.partition)

    def _kafka_trouble(self, error: KafkaException) -> None:
        # The events come again, and perhaps not quite the same ones: compaction goes on.
        for partition in self._hands:
            self._window.drop(partition)
        super()._kafka_trouble(error)

    def _reconnect(self, error: psycopg.Error) -> None:
        for partition in self._hands:
            self._window.drop(partition)
        super()._reconnect(error)
