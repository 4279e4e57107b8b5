"""The embedded stack: Kafka and PostgreSQL on loopback, for a machine that has neither.

Looking a running stack up (``current``) is quick and imports no client of either.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sideline.stack.state import Service, StackInfo, current

if TYPE_CHECKING:
    from sideline.stack.embedded import Stack

__all__ = ["Service", "Stack", "StackInfo", "current"]


def __getattr__(name: str) -> object:
    # Whoever only looks a stack up does not pay for what starts one.
    if name == "Stack":
        return import_module("sideline.stack.embedded").Stack
    raise AttributeError(name)
