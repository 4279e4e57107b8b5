"""The embedded stack: Kafka and PostgreSQL on loopback, for a machine that has neither.

Looking a running stack up (``current``) is quick and imports no client of either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sideline.stack.state import Service, StackInfo, current

if TYPE_CHECKING:
    from sideline.stack.embedded import Stack

__all__ = ["Service", "Stack", "StackInfo", "current"]


def __getattr__(name: str) -> Any:
    # Whoever only looks a stack up does not pay for what starts one.
    if name == "Stack":
        from sideline.stack.embedded import Stack

        return Stack
    raise AttributeError(name)
