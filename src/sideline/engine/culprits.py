"""Which events fail where only a whole set can be tried: halving (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sideline.engine.jvm_errors import Told
from sideline.engine.lease import Partition
from sideline.engine.prepared import Id

# Each try is a Spark job: what is not known by then waits for the next round.
MOST_TRIES = 150


class Piece(NamedTuple):
    """Offsets of a partition, or events that come back."""

    spot: Partition | None
    start: int = 0
    end: int = 0
    back: tuple[Id, ...] = ()

    @property
    def size(self) -> int:
        """Events at most."""
        return self.end - self.start if self.spot is not None else len(self.back)

    def cut(self, size: int) -> tuple[Piece, Piece]:
        """The first so many, and the rest."""
        if self.spot is None:
            return Piece(None, back=self.back[:size]), Piece(None, back=self.back[size:])
        middle = self.start + size
        return self._replace(end=middle), self._replace(start=middle)

    @property
    def only(self) -> Id:
        """The event, where there is one."""
        if self.spot is None:
            return self.back[0]
        return (False, self.spot.topic, self.spot.number, self.start)


Try = Callable[[list[Piece]], Told | None]
"""Whether these events pass; if not, what was said."""


@dataclasses.dataclass(slots=True)
class Found:
    """What came of a search."""

    failing: dict[Id, Told] = dataclasses.field(default_factory=dict)
    ends: dict[Partition, int] = dataclasses.field(default_factory=dict)
    """Where a partition has to end for now: behind it nobody knows."""
    unknown_back: set[Id] = dataclasses.field(default_factory=set)
    world: Told | None = None
    """What heals by itself; nobody is to blame."""
    tries: int = 0

    def cut(self, most: int) -> None:
        """Keep so many of each partition at most; it ends before the next one."""
        by_spot: dict[Partition, list[int]] = {}
        for back, topic, number, offset in sorted(self.failing):
            if not back:
                by_spot.setdefault(Partition(topic, number), []).append(offset)
        for spot, offsets in by_spot.items():
            if len(offsets) > most:
                self.ends[spot] = min(self.ends.get(spot, offsets[most]), offsets[most])
        self.failing = {
            name: why
            for name, why in self.failing.items()
            if name[0] or name[3] < self.ends.get(Partition(name[1], name[2]), name[3] + 1)
        }

    @property
    def nothing(self) -> bool:
        """Whether everything passed."""
        return not (self.failing or self.ends or self.unknown_back or self.world)


def search(pieces: Sequence[Piece], attempt: Try, *, most_tries: int = MOST_TRIES) -> Found:
    """The events that fail by themselves, the first of each partition before later ones."""
    found = Found()
    _walk([piece for piece in pieces if piece.size], attempt, found, most_tries, fails=False)
    return found


def _walk(pieces: list[Piece], attempt: Try, found: Found, most_tries: int, *, fails: bool) -> bool:
    """Look through pieces; whether they all passed. ``fails``: it is known that they do not."""
    size = sum(piece.size for piece in pieces)
    if not size or found.world is not None:
        return True
    if found.tries >= most_tries:
        _give_up(pieces, found)
        return False
    # One alone is always tried: what failed beside others may not fail by itself.
    if not fails or size == 1:
        found.tries += 1
        error = attempt(pieces)
        if error is None:
            return True
        if error.heals:
            found.world = error
            return False
        if size == 1:
            found.failing[pieces[0].only] = error
            return False
    first, second = halves(pieces)
    passed = _walk(first, attempt, found, most_tries, fails=False)
    _walk(second, attempt, found, most_tries, fails=passed)
    return False


def halves(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Two lists with as many events each."""
    left = (sum(piece.size for piece in pieces) + 1) // 2
    first: list[Piece] = []
    second: list[Piece] = []
    for piece in pieces:
        one, rest = piece.cut(min(left, piece.size))
        left -= one.size
        first += [one] if one.size else []
        second += [rest] if rest.size else []
    return first, second


def _give_up(pieces: Sequence[Piece], found: Found) -> None:
    for piece in pieces:
        if piece.spot is None:
            found.unknown_back.update(piece.back)
        else:
            found.ends[piece.spot] = min(found.ends.get(piece.spot, piece.start), piece.start)
