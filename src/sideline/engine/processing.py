"""What happens to the events of a slice between the reader and the commit."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sideline import guardrail
from sideline.crashpoints import reach
from sideline.engine.handling import NOTHING_FORCED, handle
from sideline.errors import ParkedByHand
from sideline.homes.calls import CallsHome
from sideline.homes.duplicates import all_duplicates
from sideline.homes.transactions import Unsent
from sideline.ledger.copying import Unclaimed, Undecided
from sideline.ledger.parking import MOST_REMEMBERED, Key
from sideline.ledger.store import Move
from sideline.sinks import Calls
from sideline.slices import (
    NOTHING,
    Aside,
    Copy,
    Failure,
    Handled,
    Outcome,
    join,
    left_out,
    release,
)

if TYPE_CHECKING:
    from sideline.engine.hand import Hand
    from sideline.engine.lease import Report
    from sideline.engine.tools import Tools
    from sideline.engine.worker import Worker
    from sideline.events import Event

# At most once, a slice should not last longer.
UNSURE_SECONDS = 0.25
# Somebody else's slice is about to be applied.
UNDECIDED_SECONDS = 0.05

Unreadable = Mapping[int, BaseException]
"""Events that fail without being tried, by offset."""

log = logging.getLogger(__name__)


class Processor:
    """Handles the events of a slice one after the other, and commits them."""

    def __init__(self, worker: Worker, tools: Tools, report: Report) -> None:
        self._worker = worker
        self._tools = tools
        self._report = report
        self._pipeline = worker.pipeline
        self._clock = worker.clock
        # Looked up once: it takes a look at the handler's signature.
        self._in_transaction = worker.pipeline.wants_transaction
        self.unnamed: Unreadable = NOTHING_FORCED
        """The event at the head of a slice whose message nobody could name."""

    def process(self, hand: Hand, events: list[Event], end: int, unreadable: Unreadable) -> Outcome:
        """Handle a slice and commit it, up to the first event that has to wait in place."""
        if hand.delay_ms is not None:
            return self._process_copies(hand, events, end)
        aside = self.aside(hand, events)
        if self._in_transaction:
            return self._tools.rows.run(
                hand.held,
                events,
                end,
                self._clock,
                aside=aside,
                forced=self.forced(hand, events, unreadable),
            )
        if hand.unsure is None and self.claims_ahead:
            first = self.claim_ahead(hand, events, end)
            if first.duplicates:
                return self._tools.home.commit(hand.held, first, aside)
            events, end = list(first.events), first.end
            unreadable = {**unreadable, **self.unnamed}
        if self._pipeline.delivery == "at-most-once":
            hand.unsure = hand.unsure or self._begin_unsure(hand, events, end, aside, unreadable)
            return self._finish_unsure(hand, aside)
        handled, failure = self._handle(hand, events, end, aside, unreadable)
        reach("after-handler")
        if failure is not None and not handled.events:
            return self.first_waits(hand, failure, aside)
        outcome = self._tools.home.commit(hand.held, handled, aside)
        release(handled)
        return _with(failure, outcome, handled)

    def first_waits(self, hand: Hand, failure: Failure, aside: Aside) -> Outcome:
        """Nothing comes before an event that has to wait; a duplicate waits for nothing."""
        event, claims = failure.event, self._tools.claims
        if failure.stage in {"handler", "key"} and claims.is_known(hand.held, event):
            alone = all_duplicates(hand.held.next_offset, event.offset + 1, [event])
            return self._tools.home.commit(hand.held, alone, aside)
        if claims.wanted:
            self._tools.connection.commit()
        return Outcome(hand.held.next_offset, failure=failure)

    @property
    def claims_ahead(self) -> bool:
        """Whether messages are claimed before their events are handled."""
        return self._tools.claims.wanted and isinstance(self._tools.home, CallsHome)

    def claim_ahead(
        self, hand: Hand, events: list[Event], end: int, copies: list[Copy] | None = None
    ) -> Handled:
        """The events that are handled next, or passed as duplicates; all, mostly."""
        nothing = [NOTHING] * len(events)
        given = Handled(hand.held.next_offset, end, events, nothing, copies=copies)
        self.unnamed = NOTHING_FORCED
        home = self._tools.home
        if not events or not self.claims_ahead or not isinstance(home, CallsHome):
            return given
        while True:
            ahead = home.ahead(hand.held, given.events, given.copies)
            first = given.prefix(ahead.events)
            if ahead.what == "repeated":
                passed = all_duplicates(first.start, first.end, first.events)
                return passed._replace(copies=first.copies)
            if ahead.error is not None:
                self.unnamed = {first.events[0].offset: ahead.error}
                return first
            if ahead.events == len(given.events):
                return given
            given = first

    def _process_copies(self, hand: Hand, events: list[Event], end: int) -> Outcome:
        """Events whose turn it is again; what copies say is believed only as far as the ledger."""
        held = hand.held
        found, events, end = self._find(hand, events, end)
        if not events and end == held.next_offset:
            return Outcome(end)
        if len(found) < len(events):
            count = len(events) - len(found)
            log.warning("%d copies in %s stand for nothing that waits", count, held.partition)
        reach("copies-found")
        if found and (refused := guardrail.unseen(self._pipeline)) is not None:
            return Outcome(held.next_offset, failure=Failure(found[0][0], "guardrail", refused))
        found = self._claim(hand, found)
        origins, copies = [event for event, _ in found], [copy for _, copy in found]
        if self._in_transaction:
            return self._run_copies(hand, origins, copies, end)
        first = self.claim_ahead(hand, origins, end, copies)
        if first.duplicates:
            handled, failure = first, None
        else:
            copies, end = list(first.copies or ()), first.end
            handled, failure = self.handle_copies(hand, list(first.events), copies, end)
            handled, failure = self._in_order(handled, failure)
        reach("after-handler")
        if failure is not None and not handled.events:
            return Outcome(held.next_offset, failure=failure)
        while True:
            try:
                outcome = self._tools.home.commit(held, handled, Aside())
            except Unclaimed as late:
                handled = handled.without(late.places)
            else:
                break
        return _with(failure, outcome, handled)

    def _in_order(
        self, handled: Handled, failure: Failure | None
    ) -> tuple[Handled, Failure | None]:
        """What comes before the first event that would overwrite what overtook it (F9).

        The policy may be another one by now, under which the guardrail stands no more.
        """
        found = guardrail.first_forbidden(
            self._pipeline, handled.effects, range(len(handled.effects))
        )
        if found is None:
            return handled, failure
        place, error = found
        return handled.prefix(place), Failure(handled.events[place], "guardrail", error)

    def _run_copies(
        self, hand: Hand, origins: list[Event], copies: list[Copy], end: int
    ) -> Outcome:
        while True:
            try:
                return self._tools.rows.run(
                    hand.held, origins, end, self._clock, aside=Aside(), copies=copies
                )
            except Unclaimed as late:
                kept = [n for n in range(len(origins)) if n not in late.places]
                origins, copies = [origins[n] for n in kept], [copies[n] for n in kept]

    def _claim(self, hand: Hand, found: list[tuple[Event, Copy]]) -> list[tuple[Event, Copy]]:
        """What is called cannot be taken back: it is the copy's before it is handled (K7)."""
        if not found or not isinstance(self._pipeline.sink, Calls):
            return found
        held, ledger = hand.held, self._tools.ledger
        ctid = ledger.advance(held, Move.stay(held))
        ours = self._tools.setter.copying.claim_for_good(held, found)
        self._tools.connection.commit()
        held.ctid = ctid
        reach("copies-claimed")
        return [found[place] for place in ours]

    def _find(
        self, hand: Hand, events: list[Event], end: int
    ) -> tuple[list[tuple[Event, Copy]], list[Event], int]:
        """What the ledger has for copies, up to the first of which it does not know yet (K22)."""
        while True:
            try:
                return self._tools.setter.copying.find(hand.held, events), events, end
            except Undecided as early:
                end = early.offset
                events = [event for event in events if event.offset < end]
                if not events:
                    hand.due = self._clock.monotonic() + UNDECIDED_SECONDS
                    return [], [], hand.held.next_offset

    def handle_copies(
        self, hand: Hand, events: list[Event], copies: list[Copy], end: int
    ) -> tuple[Handled, Failure | None]:
        """Try events again whose copies were found in the ledger."""
        return self._timed(hand, events, end, copies=copies, forced=self.unnamed)

    def aside(self, hand: Hand, events: Iterable[Event]) -> Aside:
        """The keys that are aside, as far as these events are concerned."""
        held, known = hand.held, self._worker.asides
        if not held.shared and held.aside > MOST_REMEMBERED:
            return self._tools.parking.ask(
                held, (Key(event.key, derived=False) for event in events if event.key is not None)
            )
        spot = held.partition.topic if held.shared else held.partition
        aside = known.get(spot)
        if aside is None or aside.version < 0 or not held.shared:
            aside = known[spot] = self._tools.parking.read(
                held, aside, (event.key for event in events)
            )
        return aside

    def forced(self, hand: Hand, events: Sequence[Event], unreadable: Unreadable) -> Unreadable:
        """Events that fail, or are left out, without being tried, by offset."""
        held = hand.held
        if self._tools.registry is not None:
            return {**unreadable, **self._tools.registry.passed_over(held, events)}
        if held.park_at is None:
            return unreadable or NOTHING_FORCED
        by_hand = ParkedByHand(held.park_reason or "no reason given")
        return {**unreadable, held.park_at: by_hand}

    def _begin_unsure(
        self, hand: Hand, events: list[Event], end: int, aside: Aside, unreadable: Unreadable
    ) -> Handled:
        """Pass events first, then handle them; what fails is left out."""
        started = self._clock.monotonic()
        self._tools.home.begin_unsure(hand.held, events, end)
        whole = Handled(hand.held.next_offset, end, (), ())
        while len(whole.events) < len(events):
            rest = events[len(whole.events) :]
            handled, failure = self._handle(hand, rest, end, aside, unreadable)
            whole = join(whole, handled)
            if failure is not None:
                # Progress has passed it already: there is no second time.
                whole = join(whole, left_out(failure, derives=self._pipeline.key is not None))
        reach("after-handler")
        quick = self._clock.monotonic() - started < UNSURE_SECONDS
        hand.pace = min(hand.pace * 2, self._pipeline.slice_size) if quick else hand.pace // 2 or 1
        return whole

    def _finish_unsure(self, hand: Hand, aside: Aside) -> Outcome:
        assert hand.unsure is not None  # noqa: S101 - for the type checker
        try:
            outcome = self._tools.home.finish_unsure(hand.held, hand.unsure, aside)
        except Unsent:
            # Whether it was sent nobody knows, so it is not sent again: it stays unknown.
            hand.unsure = None
            raise
        hand.unsure = None
        return outcome

    def _handle(
        self, hand: Hand, events: list[Event], end: int, aside: Aside, unreadable: Unreadable
    ) -> tuple[Handled, Failure | None]:
        return self._timed(
            hand,
            events,
            end,
            aside=aside,
            forced=self.forced(hand, events, unreadable),
            tally=self._tools.setter.tally(hand.held),
            tries=hand.held.tries,
        )

    def _timed(
        self,
        hand: Hand,
        events: list[Event],
        end: int,
        **known: Any,  # noqa: ANN401 - as `handle` takes it
    ) -> tuple[Handled, Failure | None]:
        started = self._clock.monotonic()
        start, clock = hand.held.next_offset, self._clock
        result = handle(self._pipeline, events, start=start, end=end, clock=clock, **known)
        self._report.handle_seconds += self._clock.monotonic() - started
        return result


def _with(failure: Failure | None, outcome: Outcome, handled: Handled) -> Outcome:
    """What was committed, and the event behind it that waits, if it is right behind it."""
    if failure is None or outcome.failure is not None or outcome.end < handled.end:
        return outcome
    return outcome._replace(failure=failure)
