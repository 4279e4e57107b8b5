"""Events that a person gives up, or wants back: the ledger's part (R6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline import arrays
from sideline.ledger.operating import Counts, Done, Operating, places
from sideline.ledger.sql import queries
from sideline.replays import Item

if TYPE_CHECKING:
    from sideline.ledger.store import Held


class Discardable(NamedTuple):
    """An event that a person gives up or wants back, as it was when it was read."""

    item: int
    place: int
    partition: int
    offset: int
    incarnation: int
    state: str
    why: str
    fingerprint: str | None
    generation: int
    queue: int | None
    former: str | None
    former_queue: int | None
    erased: bool


class Discards(Operating):
    """Operations that handle nothing: events are given up or put back."""

    def read(self, held: Held, items: Sequence[Item]) -> list[Discardable]:
        """The events that an operation gives up or wants back."""
        names = self._names(held) | places(items)
        rows = self._connection.execute(queries()["discardable_events"], names).fetchall()
        self._connection.commit()
        # Named twice, it is there once: the second item finds nothing to do.
        found = {row[2:5]: Discardable(row[0] - 1, *row[1:]) for row in reversed(rows)}
        return sorted(found.values())

    def give_up(self, held: Held, items: Sequence[Item], found: Sequence[Discardable]) -> Done:
        """Discard what is still parked or dead; whatever waits behind it may go on."""
        fit = [one for one in found if one.state in {"parked", "dead"}]
        names = self._names(held) | _rows(fit) | _as_read(fit)
        if fit and self._connection.execute(queries()["discard"], names).rowcount < len(fit):
            self._stale()
        self._uncount(held, _causes([one for one in fit if one.state == "parked"]))
        less = Counter([one.queue for one in fit if one.queue is not None])
        ended, rejoined = self._shrink(less, {})
        counts = Counts()
        for one in _counted(fit):
            counts[one.partition][one.state] -= 1
            counts[one.partition]["discarded"] += 1
        counts[held.partition.number]["rejoined"] += len(ended)
        self._count(held, counts)
        done = Done(discarded=len(fit), rejoined=rejoined)
        return self._account(held, items[0].operation, _marks(items, fit), done)

    def restore(self, held: Held, items: Sequence[Item], found: Sequence[Discardable]) -> Done:
        """Put back what was discarded, in its old place, unless its key has gone on without it."""
        there = self.lock(one.former_queue for one in found if one.former_queue is not None)
        fit = [one for one in found if _can_return(one, there)]
        names = (
            self._names(held)
            | _rows(fit)
            | {"queues": arrays.numbers([one.former_queue for one in fit])}
        )
        if fit and self._connection.execute(queries()["restore"], names).rowcount < len(fit):
            self._stale()
        causes = _causes([one for one in fit if one.former == "parked"])
        self._uncount(held, Counter({cause: -count for cause, count in causes.items()}))
        grown = Counter(one.former_queue for one in fit if one.former_queue is not None)
        if grown:
            longer = sorted(grown)
            grow = {
                "queues": arrays.numbers(longer),
                "events": arrays.numbers([grown[queue] for queue in longer]),
                "home": None,
            }
            self._connection.execute(queries()["grow"], grow)
        counts = Counts()
        for one in _counted(fit):
            counts[one.partition][one.former or "parked"] += 1
            counts[one.partition]["discarded"] -= 1
        self._count(held, counts)
        done = Done(restored=len(fit))
        return self._account(held, items[0].operation, _marks(items, fit), done)


def _can_return(one: Discardable, there: dict[int, tuple[int, int]]) -> bool:
    """Whether its key is still aside, and has not passed its place."""
    if one.state != "discarded" or one.erased:
        return False
    if one.former_queue is None:
        return True
    return one.former_queue in there and there[one.former_queue][1] < one.place


def _causes(rows: Sequence[Discardable]) -> Counter[tuple[int, str]]:
    return Counter(
        (one.partition, one.fingerprint)
        for one in rows
        if one.why == "failed" and one.fingerprint is not None
    )


def _counted(rows: Sequence[Discardable]) -> list[Discardable]:
    """Without those that were imported: this pipeline never consumed them."""
    return [one for one in rows if one.incarnation >= 0]


def _marks(items: Sequence[Item], fit: Sequence[Discardable]) -> dict[int, str]:
    states = {item.number: "gone" for item in items}
    return states | {items[one.item].number: "done" for one in fit}


def _rows(rows: Sequence[Discardable]) -> dict[str, Any]:
    return {
        "partitions": arrays.numbers([one.partition for one in rows]),
        "offsets": arrays.numbers([one.offset for one in rows]),
        "incarnations": arrays.numbers([one.incarnation for one in rows]),
    }


def _as_read(rows: Sequence[Discardable]) -> dict[str, Any]:
    return {
        "generations": arrays.numbers([one.generation for one in rows]),
        "states": arrays.texts([one.state for one in rows]),
        "queues": arrays.numbers([one.queue for one in rows]),
    }
