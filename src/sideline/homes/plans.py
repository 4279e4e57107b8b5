"""What a slice is to become: the values that planning makes and the writer carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from sideline.effects import Effect
from sideline.homes.statements import Shape
from sideline.homes.tables import Table

# The literals of a statement stay in the processor's cache, and arrays in one piece.
ROWS_PER_STATEMENT = 5_000
# A few events are quicker applied alone than all others unfolded because of them.
MOST_SUSPECTS = 200


class Work(NamedTuple):
    """One event's work; a batch is in log order."""

    key: Hashable | None
    """What its order belongs to; None: the event stands alone."""
    effects: tuple[Effect, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Touch:
    """Which events change which rows of a table; without ``keys`` it cannot be told."""

    table: Table
    events: Sequence[int]
    keys: Sequence[Hashable] | None


class Bulk(NamedTuple):
    """Rows of one shape, each row at most once."""

    shape: Shape
    columns: list[list[Any]]
    """In the order of the shape's columns."""
    ids: Sequence[Hashable]
    """The rows' keys in ``touch``, or the events themselves where there is none."""
    touch: Touch | None


class Ordered(NamedTuple):
    """Effects that are applied one by one, in log order."""

    effects: list[tuple[int, Effect]]


Step = Bulk | Ordered


@dataclasses.dataclass(slots=True)
class Plan:
    """What to write, in order, and what is known about who writes what."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    touches: list[Touch] = dataclasses.field(default_factory=list)
    suspects: set[int] = dataclasses.field(default_factory=set)
    """Events that must be applied alone: an effect of which no statement can be made, or a row
    that would be left out although nobody vouches for it."""
    opaque: bool = False
    """User's SQL is among it: nobody knows which rows it touches."""

    @property
    def short(self) -> bool:
        """Whether one statement does it all."""
        if len(self.steps) != 1 or self.deferrable:
            return False
        step = self.steps[0]
        return isinstance(step, Bulk) and len(step.ids) <= ROWS_PER_STATEMENT

    @property
    def deferrable(self) -> bool:
        """Whether a constraint may wait until COMMIT with its complaint."""
        return self.opaque or any(touch.table.deferrable for touch in self.touches)
