"""How long the ledger keeps what is over (pure)."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from sideline.durations import seconds
from sideline.errors import ConfigurationError

NEVER = "never"
# Before the first day of the calendar there is nothing to keep.
_LONGEST_SECONDS = 365_000 * 86_400.0


@dataclasses.dataclass(frozen=True, slots=True)
class Retention:
    """Ages at which rows go; None: never. What still waits has no age."""

    events: timedelta | None = timedelta(days=30)
    """Resolved and skipped events, and the bytes of discarded ones."""
    operations: timedelta | None = timedelta(days=90)
    """Operations and runs that are over."""
    alerts: timedelta | None = timedelta(days=90)
    """Alerts that were cleared."""
    audit: timedelta | None = None
    """Who did what."""


def age(text: object) -> timedelta | None:
    """An age as people write it: ``30d``, or ``never``; ValueError for anything else."""
    if text == NEVER:
        return None
    try:
        # A bare number would be seconds, and nobody means that.
        found = seconds(text) if isinstance(text, str) else -1.0
    except ConfigurationError:
        found = -1.0
    if not 0 <= found <= _LONGEST_SECONDS:
        raise ValueError("is neither an age like 30d nor never")
    return timedelta(seconds=found)


def shown(span: timedelta | None) -> str:
    """The same the other way round."""
    if span is None:
        return NEVER
    days = span.total_seconds() / 86_400
    return f"{days:g}d" if days >= 1 else f"{span.total_seconds():g}s"
