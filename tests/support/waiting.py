"""Wait for an event, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(event: Callable[[], T], *, what: str, within_seconds: float = 30) -> T:
    """Ask until the answer is true; fail with ``what`` when the time is over."""
    deadline = time.monotonic() + within_seconds
    while not (answer := event()):
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.02)
    return answer
