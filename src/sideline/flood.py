"""The flood guard: too many failures are a fault of the code, not of the events (pure).

It remembers how many events failed in a row, and how many failed among the last ones, by
buckets: exact to a twentieth of the window, and small enough to stand in the progress row, so
that a restart begins where the last run stopped and not with a clean slate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sideline.policies import FloodGuard

BUCKETS = 20

# In a row; events in the newest bucket; failures by bucket, the newest last.
Memory = list[int] | None
"""None: nothing failed lately."""


class Verdict(NamedTuple):
    """What a run of events adds up to."""

    memory: Memory
    trips_at: int | None
    """The first event that is one too many; the memory is then of those before it."""


def judge(guard: FloodGuard, memory: Memory, total: int, failed: Iterable[int]) -> Verdict:
    """Count ``total`` events, those at the ``failed`` places (rising) among them as failures."""
    places = list(failed)
    if memory is None and not places:
        return Verdict(None, None)
    count = Tally(guard, memory)
    if count.has_room_for(len(places)):
        count.take(total, places)
        return Verdict(count.memory(), None)
    done = 0
    for place in places:
        count.pass_by(place - done)
        if count.too_many():
            return Verdict(count.memory(), place)
        count.fail()
        done = place + 1
    count.pass_by(total - done)
    return Verdict(count.memory(), None)


def describe(guard: FloodGuard, memory: Memory) -> str:
    """What it saw, for the person who has to decide."""
    in_a_row = memory[0] + 1 if memory else 1
    if in_a_row >= guard.in_a_row:
        return f"{in_a_row} events failed in a row"
    return f"more than {guard.share:.0%} of the last {guard.of:,} events failed"


class Tally:
    """Counts events one after the other."""

    def __init__(self, guard: FloodGuard, memory: Memory) -> None:
        self._guard = guard
        self._size = max(1, guard.of // BUCKETS)
        self._most = -(-guard.of // self._size)
        self._in_a_row, self._filled, *self._buckets = memory or [0, 0, 0]

    def pass_by(self, events: int) -> None:
        """So many did not fail."""
        if events > 0:
            self._in_a_row = 0
            self._move(events)

    def too_many(self) -> bool:
        """Whether another failure would be one too many."""
        if self._in_a_row + 1 >= self._guard.in_a_row:
            return True
        return sum(self._buckets) + 1 >= self._guard.share * self._guard.of

    def has_room_for(self, failures: int) -> bool:
        """Whether so many are not too many, however they stand."""
        in_a_row = self._in_a_row + failures < self._guard.in_a_row
        return in_a_row and sum(self._buckets) + failures < self._guard.share * self._guard.of

    def take(self, events: int, failed: Sequence[int]) -> None:
        """So many events at once, of which those at some places (rising) failed."""
        at_the_end = 0
        for place in reversed(failed):
            if place != events - 1 - at_the_end:
                break
            at_the_end += 1
        self._in_a_row = at_the_end + (self._in_a_row if at_the_end == events else 0)
        newest, size, before = len(self._buckets) - 1, self._size, self._filled
        full, self._filled = divmod(before + events, size)
        buckets = self._buckets + [0] * full
        for bucket, count in Counter([(before + place) // size for place in failed]).items():
            buckets[newest + bucket] += count
        self._buckets = buckets[-self._most :]

    def fail(self) -> None:
        """One failed."""
        self._in_a_row += 1
        self._buckets[-1] += 1
        self._move(1)

    def memory(self) -> Memory:
        """What to remember."""
        if not self._in_a_row and not any(self._buckets):
            return None
        return [self._in_a_row, self._filled, *self._buckets]

    def _move(self, events: int) -> None:
        self._filled += events
        full, self._filled = divmod(self._filled, self._size)
        if full:
            fresh = [0] * min(full, self._most)
            self._buckets = (self._buckets + fresh)[-self._most :]
