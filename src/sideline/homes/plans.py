"""What a slice is to become: the values that planning makes and the writer carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
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

    @property
    def keys(self) -> Sequence[Hashable | None]:
        """What each event's order belongs to."""
        if self._keys is None:
            self._keys = self._derive()
        return self._keys

    def without(self, places: Collection[int]) -> tuple[list[int], Batch]:
        """What is left, and where it stands in this one."""
        left = [place for place in range(len(self.effects)) if place not in places]
        return left, Batch(
            [self.effects[place] for place in left], lambda: [self.keys[place] for place in left]
        )

    def __len__(self) -> int:
        return len(self.effects)

    @overload
    def __getitem__(self, place: int) -> Work: ...
    @overload
    def __getitem__(self, place: slice) -> list[Work]: ...
    def __getitem__(self, place: int | slice) -> Work | list[Work]:
        if isinstance(place, slice):
            return list(map(Work, self.keys[place], self.effects[place]))
        return Work(self.keys[place], self.effects[place])


def batch_of(works: Sequence[Work]) -> Batch:
    """Works as a batch."""
    if isinstance(works, Batch):
        return works
    return Batch([work.effects for work in works], lambda: [work.key for work in works])


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


class Usual(NamedTuple):
    """A whole batch of upserts that are all alike, as it was planned first."""

    shape: Shape
    columns: list[list[Any]]
    ids: Sequence[Hashable]


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
    usual: Usual | None = None
    """What a plan without some of the events can be made from."""

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
