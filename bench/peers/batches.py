"""How many events a Structured Streaming contestant takes at a time."""

from __future__ import annotations

# Few, large batches: from here on nobody gains by larger ones.
BATCH_EVENTS = 250_000
_BATCHES = 4


def batch_events(events: int) -> int:
    """At least four batches, so that three are measured after the first."""
    return min(BATCH_EVENTS, -(-events // _BATCHES))
