"""What a slice is to become: the values that planning makes and the writer carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, overload

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


class Batch(Sequence[Work]):
    """Works as two columns: the keys are wanted only where something failed."""

    __slots__ = ("_derive", "_keys", "effects")

    def __init__(
        self, effects: Sequence[tuple[Effect, ...]], keys: Callable[[], Sequence[Hashable | None]]
    ) -> None:
        self.effects = effects
        self._derive = keys
        self._keys: Sequence[Hashable | None] | None = None

    def __len__(self) -> int:
        return len(self.effects)

    @overload
    def __getitem__(self, place: int) -> Work: ...
    @overload
    def __getitem__(self, place: slice) -> list[Work]: ...
    def __getitem__(self, place: int | slice) -> Work | list[Work]:
        if self._keys is None:
            self._keys = self._derive()
        if isinstance(place, slice):
            return list(map(Work, self._keys[place], self.effects[place]))
        return Work(self._keys[place], self.effects[place])


def effects_in(batch: Sequence[Work]) -> Sequence[tuple[Effect, ...]]:
    """The effects of each event of a batch."""
    return batch.effects if isinstance(batch, Batch) else [work[1] for work in batch]


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
