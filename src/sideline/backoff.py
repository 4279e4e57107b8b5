"""How long to wait before an attempt is repeated."""

from __future__ import annotations

import dataclasses

from sideline.durations import Duration, seconds
from sideline.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow from ``first`` by ``factor`` up to ``limit``, spread by ``jitter``.

    An alert is raised when the waiting has lasted ``alert_after``.
    """

    first: Duration = "100ms"
    factor: float = 2.0
    limit: Duration = "30s"
    jitter: float = 0.1
    alert_after: Duration = "1m"

    def __post_init__(self) -> None:
        """Refuse what would spin or shrink."""
        if seconds(self.first, what="Backoff(first=)") <= 0:
            message = "Backoff(first=) is zero, which would retry without a pause."
            raise ConfigurationError(message, hint='Write Backoff(first="100ms").')
        seconds(self.limit, what="Backoff(limit=)")
        seconds(self.alert_after, what="Backoff(alert_after=)")
        if self.factor < 1 or not 0 <= self.jitter < 1:
            message = "Backoff(factor=) must be at least 1 and Backoff(jitter=) between 0 and 1."
            raise ConfigurationError(message)

    def wait_seconds(self, attempt: int, chance: float) -> float:
        """The wait after the ``attempt``-th failure (from 1); ``chance`` is a number in [0, 1)."""
        first, limit = seconds(self.first), seconds(self.limit)
        # The exponent is bounded: 2.0 ** 2000 is an error, not a long wait.
        wait = min(limit, first * self.factor ** min(attempt - 1, 64))
        return wait * (1 + self.jitter * (2 * chance - 1))
