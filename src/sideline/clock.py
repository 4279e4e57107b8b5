"""The one place that reads the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the engine needs to know of time; `sideline.testing.FakeClock` is the other one."""

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment, never going back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's own clock."""

    # The functions themselves: they are asked once an event.
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
