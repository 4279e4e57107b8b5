"""How many events a worker may handle now, where a pipeline has a rate.

Time counts only while a lease runs: between two of them another worker has the slot, and the
share of the rate that goes with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sideline.clock import Clock

# No wait is longer before it looks whether it should end.
LOOK_SECONDS = 0.1
# Less than this of an event is the clock's own rounding.
_ROUNDING = 1e-6


class Pace:
    """What a worker has earned and spent; it outlives the leases."""

    def __init__(self, clock: Clock, credit: float | None = None) -> None:
        self._clock = clock
        # Of an event that no lease is long enough for, each worker would otherwise begin at
        # nothing: on average they all handle what they should.
        self._budget = random.random() if credit is None else credit  # noqa: S311
        self._rate: float | None = None
        self._at = 0.0
        self._until = 0.0

    def begin(self, rate: float | None, until: float) -> None:
        """A lease begins. What the last one did not use is gone, but for a part of an event."""
        self._rate = rate
        self._at = self._clock.monotonic()
        self._until = until
        self._budget = min(self._budget, 1.0)

    def extend(self, until: float) -> None:
        """The lease lasts longer."""
        self._until = until

    def allow(self, wanted: int, stopped: Callable[[], bool], *, patient: bool = True) -> int:
        """How many of so many events may come now.

        Waits for the first of them; none if its time does not come within the lease, or somebody
        wants it to end, or nobody is ``patient``.
        """
        if self._rate is None or not wanted:
            return wanted
        self._earn(self._rate)
        while self._budget < 1 - _ROUNDING:
            left = self._until - self._at
            if not patient or left <= 0 or stopped():
                return 0
            self._clock.sleep(min((1 - self._budget) / self._rate, left, LOOK_SECONDS))
            self._earn(self._rate)
        return min(wanted, int(self._budget + _ROUNDING))

    def spend(self, events: int) -> None:
        """So many were handled, or begun with."""
        self._budget -= events

    def _earn(self, rate: float) -> None:
        now = self._clock.monotonic()
        # No more than a second's worth at a time.
        self._budget = min(max(1.0, rate), self._budget + (now - self._at) * rate)
        self._at = now
