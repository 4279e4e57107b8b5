"""A lease whose handlers run side by side: the finished prefix commits while later ones run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import KafkaException

from sideline.crashpoints import reach
from sideline.engine.hand import Hand, beyond
from sideline.engine.handling import publishes, runs_sql
from sideline.engine.holding import Holding
from sideline.engine.processing import Processor, Unreadable
from sideline.engine.window import Entry, Window
from sideline.errors import FencedError, GuardrailError, SidelineError
from sideline.homes.transactions import Unsent
from sideline.ledger.store import Stale
from sideline.slices import Aside, Copy, Failure, Handled, Outcome, admit

if TYPE_CHECKING:
    from sideline.engine.lease import Lease, Report
    from sideline.engine.tools import Tools
    from sideline.engine.worker import Worker
    from sideline.events import Event

# While handlers run, results are gathered this long before they are worth a transaction.
GATHER_SECONDS = 0.02
# No wait for a handler is longer: meanwhile new events arrive.
WAIT_SECONDS = 0.005


class SideBySide(Processor):
    """Like `Processor`, with events of different keys at the same time."""

    def fate(self, hand: Hand, event: Event, error: BaseException) -> str:
        """What becomes of an event that failed, as often as it did before."""
        return self._pipeline.fate(error, tries=hand.held.tries_of(event.offset))

    def handle_copies(
        self, hand: Hand, events: list[Event], copies: list[Copy], end: int
    ) -> tuple[Handled, Failure | None]:
        """Side by side, like others; the slice waits for all of them."""
        partition, held = hand.held.partition, hand.held
        attempts = {event.id: copy.attempt for event, copy in zip(events, copies, strict=True)}

        def fate(event: Event, error: BaseException) -> str:
            return self._pipeline.fate_of_copy(error, attempt=attempts[event.id])

        window = Window(self._worker.pool(), self._pipeline.key_of, derives=False)
        window.add(partition, events, Aside(), self.unnamed, fate=fate)
        while not window.is_over(partition):
            window.wait(WAIT_SECONDS)
        taken, failure = window.take(partition, len(events))
        window.drop(partition)
        window.close()
        count = len(taken)
        if count < len(copies):
            end = copies[count].offset
        handled = self.handled(taken, held.next_offset, end, Aside())
        return handled._replace(copies=copies[:count], keys=None), failure

    def handled(self, taken: list[Entry], start: int, end: int, aside: Aside) -> Handled:
        """Entries that are over, as a slice."""
        derives = self._pipeline.key is not None
        if aside:
            for entry in taken:
                # Its key stepped aside while it was handled: a row of an earlier one was refused.
                key = entry.key if derives else None
                if not entry.parked and aside.holds(entry.event, key):
                    entry.error = None
                    entry.skipped = False
                    entry.wait_behind()
        effects = [entry.effects for entry in taken]
        return Handled(
            start,
            end,
            [entry.event for entry in taken],
            effects,
            any(map(runs_sql, effects)),
            [entry.key for entry in taken] if derives else None,
            {
                place: failure
                for place, entry in enumerate(taken)
                if entry.skipped and (failure := entry.failure) is not None
            },
            {place: entry.failure for place, entry in enumerate(taken) if entry.parked},
            _leaving(taken, "retrying"),
            _leaving(taken, "dead"),
            duplicates={
                place: None
                for place, entry in enumerate(taken)
                if entry.duplicate and not entry.parked
            },
            publishes=any(map(publishes, effects)),
        )


class ConcurrentHolding(Holding):
    """Like `Holding`, with a window between reading and committing."""

    _side_by_side = True
    _processor: SideBySide

    def __init__(self, worker: Worker, lease: Lease, attempt: int, report: Report) -> None:
        super().__init__(worker, lease, attempt, report)
        pipeline = self._pipeline
        self._window = Window(worker.pool(), pipeline.key_of, derives=pipeline.key is not None)
        self._gathered_at = 0.0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._window.close()
        if error is None:
            self._commit_rest()
        super().__exit__(kind, error, trace)

    def _processor_of(self, tools: Tools) -> SideBySide:
        return SideBySide(self._worker, tools, self._report)

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
        for hand in list(self._hands.values()):
            if hand.due > now or hand.finished or hand.delay_ms is not None:
                continue
            try:
                self._open_one(hand)
            except FencedError:
                self._fenced(hand)
            except Stale:
                continue
            except psycopg.Error as error:
                self._window.drop(hand.held.partition)
                self._refused(hand, error)
        self._window.tidy()

    def _open_one(self, hand: Hand) -> None:
        partition = hand.held.partition
        if hand.held.pending is not None and not self._resolve(hand):
            self._window.drop(partition)
            return
        seen = self._window.open_until(partition)
        if not seen:
            # Whatever moved progress meanwhile: places in the window are counted from here on.
            self._reader.done(partition, hand.held.next_offset)
        span = self._reader.span(partition)
        if len(span.events) <= seen:
            return
        # Whoever waited for the pace meanwhile would keep back what is finished.
        patient = not any(map(self._window.open_until, self._hands))
        allowed = self._allowance(len(span.events) - seen, patient=patient)
        if not allowed:
            return
        fresh = span.events[seen : seen + allowed]
        admitted = admit(fresh, hand.held.next_offset, hand.bound)
        unreadable: Unreadable = span.unreadable
        if self._processor.claims_ahead:
            first = self._processor.claim_ahead(hand, admitted, hand.held.next_offset)
            admitted = list(first.events)
            if first.duplicates:
                self._pace.spend(len(admitted))
                self._window.pass_duplicates(partition, admitted)
                return
            unreadable = {**unreadable, **self._processor.unnamed}
        self._pace.spend(len(admitted))
        self._window.add(
            partition,
            admitted,
            self._processor.aside(hand, fresh),
            self._processor.forced(hand, fresh, unreadable),
            partial(self._processor.fate, hand),
        )

    def _spend(self, hand: Hand, events: int) -> None:
        # What went through the window was paid for as it began.
        if hand.delay_ms is not None:
            super()._spend(hand, events)

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
            if hand.delay_ms is not None:
                if self._is_ripe(hand, now, full=False):
                    ripe.append(hand)
                continue
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
                    and beyond(hand, self._reader.span(partition)) > (hand.held.next_offset)
                )
            ):
                ripe.append(hand)
        if ripe:
            self._gathered_at = now
        return ripe

    def _slice(self, hand: Hand) -> None:
        if hand.delay_ms is not None:
            super()._slice(hand)
            return
        started = self._clock.monotonic()
        try:
            outcome = self._commit_prefix(hand)
        except FencedError:
            self._fenced(hand)
        except Stale:
            # Nothing is written; perhaps an earlier slice turned out to be done.
            self._window.drop(hand.held.partition)
            self._reader.done(hand.held.partition, hand.held.next_offset)
        except Unsent as unsent:
            self._window.drop(hand.held.partition)
            self._unsent(hand, unsent)
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
            end = beyond(hand, span)
        if end == hand.held.next_offset:
            if failure is None:
                return None
            outcome = self._processor.first_waits(hand, failure, Aside())
            if outcome.failure is None:
                self._window.drop(partition)
            return outcome
        reach("after-handler")
        aside = self._processor.aside(hand, [entry.event for entry in taken])
        handled = self._processor.handled(taken, hand.held.next_offset, end, aside)
        outcome = self._tools.home.commit(hand.held, handled, aside)
        if outcome.end < end:
            # A duplicate that failed: what comes from it on is handled anew.
            self._window.drop(partition)
            return outcome
        failure = _forbidden(taken) or failure
        return outcome if outcome.failure or not failure else outcome._replace(failure=failure)

    def _commit_rest(self) -> None:
        """What was finished in order when the time was over."""
        for hand in list(self._hands.values()):
            if self._window.finished(hand.held.partition):
                self._slice(hand)

    def _part(self, hand: Hand) -> None:
        partition = hand.held.partition
        if self._window.finished(partition):
            self._slice(hand)
        self._window.drop(partition)
        if partition in self._hands:
            super()._part(hand)

    def _failed(self, hand: Hand, failure: Failure) -> None:
        tries = hand.held.tries
        if tries is not None and hand.delay_ms is None:
            # Those behind it that were tried meanwhile are tried again along with it.
            for event in self._window.failed(hand.held.partition):
                if event.offset != failure.event.offset:
                    tries[str(event.offset)] = hand.held.tries_of(event.offset) + 1
        super()._failed(hand, failure)

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


def _leaving(taken: list[Entry], fate: str) -> dict[int, Failure]:
    return {
        place: failure
        for place, entry in enumerate(taken)
        if entry.leaves == fate and (failure := entry.failure) is not None
    }


def _forbidden(taken: list[Entry]) -> Failure | None:
    """The first event that was set aside because the pipeline may not go on like this (F9)."""
    for entry in taken:
        if entry.error is not None and issubclass(type(entry.error), GuardrailError):
            return Failure(entry.event, "guardrail", entry.error)
    return None
