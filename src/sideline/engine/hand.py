"""One partition in the hand of a lease: what is known of it, and what its next slice is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sideline.slices import SLICE_BYTES, admit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sideline.engine.lease import PartitionReport
    from sideline.engine.reader import Span
    from sideline.events import Event
    from sideline.ledger.store import Held
    from sideline.slices import Handled

# At most once, a slice is over only when all of it is handled: how many events fit is learned.
UNSURE_EVENTS = 64


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
    noted_at: float = float("-inf")
    """Monotonic time at which its trouble was written down."""
    limit: int = 0
    """Events of the next slice at most; halved when a transaction took too long."""
    pace: int = UNSURE_EVENTS
    """At most once: events of the next slice at most, so that a death loses little."""
    unsure: Handled | None = None
    """At most once: what progress has passed and what is not written yet."""
    delay_ms: int | None = None
    """Of a retry topic: how long its copies wait."""
    relay_only: bool = False
    """Nothing is read: only its outbox is sent."""
    relay_due: float = 0.0
    """Monotonic time before which its outbox is left alone."""
    relayed_at: float = 0.0
    relay_until: int | None = None
    """The last record that is sent before the one that was refused."""
    relay_attempts: int = 0
    relay_trouble: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the bound is reached, with nothing left to be written."""
        if self.relay_only:
            return True
        if self.bound is None or self.unsure is not None or self.held.pending is not None:
            return False
        return self.held.next_offset >= self.bound


def cut(hand: Hand, span: Span, most: Callable[[int], int]) -> tuple[list[Event], int]:
    """The events of the next slice, and where progress stands behind them.

    `most` says how many of so many events may come now.
    """
    if hand.unsure is not None:
        return [], hand.held.next_offset
    events = span.events
    limit = most(min(hand.limit, len(events)))
    if span.bytes > SLICE_BYTES:
        limit = min(limit, max(1, len(events) * SLICE_BYTES // span.bytes))
    whole = limit >= len(events)
    chosen = admit(events[:limit], hand.held.next_offset, hand.bound)
    if whole and len(chosen) == len(events):
        # Beyond the last event there may be holes, as far as the end of the log was seen.
        return chosen, span.end
    if chosen:
        return chosen, chosen[-1].offset + 1
    return [], beyond(hand, span)


def beyond(hand: Hand, span: Span) -> int:
    """How far progress may go over holes, with no event left on the way."""
    bound, here = hand.bound, hand.held.next_offset
    if span.events and (bound is None or span.events[0].offset < bound):
        return here
    if bound is not None and span.end >= bound:
        return max(bound, here)
    return max(span.end, here) if span.at_end else here


def due_copies(
    hand: Hand, events: list[Event], end: int, now_ms: float
) -> tuple[list[Event], int, float]:
    """The copies whose turn it is, where progress stands behind them, how long the first waits.

    The broker stamps them as they come, so that nothing behind one is due before it (F8).
    """
    delay_ms = hand.delay_ms or 0
    for place, event in enumerate(events):
        wait_ms = event.timestamp_ms + delay_ms - now_ms
        if wait_ms > 0:
            if place:
                return events[:place], event.offset, 0.0
            return [], hand.held.next_offset, wait_ms / 1000
    return events, end, 0.0


def still_ahead(tries: Mapping[str, int], offset: int) -> dict[str, int]:
    """Of the counts of failures in place, those that progress has not passed."""
    return {at: count for at, count in tries.items() if int(at) >= offset}
