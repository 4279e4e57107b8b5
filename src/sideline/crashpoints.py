"""Named moments at which a test may kill or freeze the process; nothing in production.

``SIDELINE_CRASH_AT=after-commit:3`` sends SIGKILL to the process when it gets to
``after-commit`` for the third time; ``after-commit:3:STOP`` freezes it instead.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "lease-taken",
    "after-handler",
    "before-first-write",
    "between-write-and-commit",
    "between-effects-and-progress",
    "after-commit",
    "before-release",
    "before-group-commit",
    "while-stopping",
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
