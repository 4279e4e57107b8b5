"""What becomes of an event that fails for a reason of its own."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sideline.durations import Duration

# Headers that copies bear besides our own, for tools that know them.
Dialect = Literal["spring", "connect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sideline:
    """Set the event's key aside; what follows it waits behind it; everything else goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Retry the event in place for ever; its partition waits, the others go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """Leave the event out and count it; alarm when the share of such events passes ``alarm``."""

    alarm: float = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """Try ``attempts`` times in place, then copy the event to the dead-letter topic."""

    attempts: int = 3
    dialect: Dialect | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RetryTopics:
    """Try again through a chain of topics with growing delays, then dead letter."""

    delays: tuple[Duration, ...] = ("10s", "1m", "10m")
    dialect: Dialect | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """End the run at the event: for runs that apply a range again, and nobody else."""


Policy = Sideline | Block | Skip | DeadLetter | RetryTopics | Stop


@dataclasses.dataclass(frozen=True, slots=True)
class FloodGuard:
    """Stop when ``share`` of the last ``of`` events fail, or ``in_a_row`` of them."""

    share: float = 0.5
    of: int = 1000
    in_a_row: int = 100
