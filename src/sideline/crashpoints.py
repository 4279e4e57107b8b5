"""Named moments at which a test may kill or freeze the process; nothing in production.

``SIDELINE_CRASH_AT=after-commit:3`` sends SIGKILL to the process when it gets to
``after-commit`` for the third time; ``after-commit:3:STOP`` freezes it instead.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "between-starts",
    "lease-taken",
    "after-handler",
    "before-claim",
    "after-claim",
    "after-claim-committed",
    "before-first-write",
    "after-park",
    "after-tries",
    "after-copy-written",
    "after-stash-written",
    "after-settle",
    "copies-found",
    "copies-claimed",
    "after-publish-written",
    "before-outbox-init",
    "after-outbox-init",
    "before-send",
    "between-produce-and-commit",
    "between-send-and-mark",
    "after-mark",
    "between-write-and-commit",
    "between-effects-and-progress",
    "after-commit",
    "before-release",
    "before-group-commit",
    "while-stopping",
    "before-holes",
    "batch-committed",
    "erased",
    "forgotten",
    "before-home-init",
    "after-home-init",
    "before-pending",
    "after-pending",
    "kafka-produced",
    "before-kafka-commit",
    "after-kafka-commit",
    "after-apply",
    "replay-read",
    "replay-handled",
    "replay-written",
    "replay-ahead",
    "replay-rejoin",
    "replay-before-commit",
    "replay-after-commit",
)

_armed: dict[str, tuple[int, int]] = {}


def arm(text: str | None) -> None:
    """Set the point from its text form; None disarms."""
    _armed.clear()
    if text:
        name, _, rest = text.partition(":")
        count, _, kind = rest.partition(":")
        if name not in POINTS:
            message = f"{name!r} is not a crash point"
            raise ValueError(message)
        _armed[name] = (int(count or 1), getattr(signal, f"SIG{kind or 'KILL'}"))


def armed(name: str) -> bool:
    """Whether a test waits for that moment."""
    return name in _armed


def reach(name: str) -> None:
    """Be at a named moment."""
    if _armed and name in _armed:
        count, number = _armed[name]
        if count > 1:
            _armed[name] = (count - 1, number)
        else:
            _armed.clear()
            os.kill(os.getpid(), number)


arm(os.environ.get("SIDELINE_CRASH_AT"))
