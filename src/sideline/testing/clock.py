"""A clock that moves only when it is told to."""

from __future__ import annotations


class FakeClock:
    """Stands still until something sleeps or advances it."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._elapsed = 0.0

    def now(self) -> float:
        """Seconds since 1970."""
        return self._now + self._elapsed

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        """Move on by that long, at once."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move on."""
        if seconds < 0:
            message = "time does not go back"
            raise ValueError(message)
        self._elapsed += seconds
