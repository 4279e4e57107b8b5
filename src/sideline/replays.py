"""What becomes of events that come back. Pure: no clock, no socket.

The order of a replay is that of its queues: whatever stands in a queue behind an event that fails
stays where it is, whichever of the queue's keys it has (K15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct, structs

from sideline.events import Event
from sideline.slices import NOTHING, Failure, Handled
from sideline.views import Content

# A release begins with few events, and takes more with every slice: what fails again is noticed
# before much of it has failed.
FIRST_EVENTS = 64
GROWTH = 4
# A release stops by itself when so large a share of so many events failed again.
LEAST_TRIED = 10
# A queue of no more than this share of a slice is not cut.
SHORT = 0.125
# The state of events without which the stream has gone on: later ones of their key may be applied.
DEAD = "dead"
_STATE, _QUEUE, _ITEM = attrgetter("state"), attrgetter("queue"), attrgetter("item")
_PLACE, _GENERATION = attrgetter("place"), attrgetter("generation")
_CONSUMED = attrgetter("partition", "state", "incarnation")


class Item(NamedTuple):
    """What an operation applies to: a queue, or one event."""

    operation: int
    number: int
    kind: str
    rate: float | None
    """Events a second of the operation as a whole."""
    queue: int | None
    partition: int | None
    offset: int | None
    incarnation: int | None
    events: int | None
    """How many wait in the queue; None: there is no such queue, or it is an event."""
    tried: int
    """How many events of the operation were tried in this partition so far."""


class Waiting(Struct, frozen=True, gc=False):
    """An event as the ledger had it when it was read; made as often as events are."""

    item: int
    """Its item, by the place among those chosen."""
    place: int
    partition: int
    incarnation: int
    state: str
    fingerprint: str | None
    """Why it is parked, if it failed itself."""
    generation: int
    queue: int | None
    event: Event
    lost: bool = False
    """Whether its bytes are gone: it cannot be applied any more."""

    @property
    def order(self) -> int | bytes | None:
        """What it must not overtake in a replay: its queue, or its record's key without one."""
        return self.event.key if self.queue is None else self.queue

    def with_content(self, content: Content | None) -> Waiting:
        """The same with bytes that were fetched from elsewhere; None: they are gone."""
        if content is None:
            return structs.replace(self, lost=True)
        event = structs.replace(self.event, value=content.value, headers=content.headers)
        return structs.replace(self, event=event, lost=False)


class Verdict(NamedTuple):
    """What a replay came to, by the events' places in it; all others stay where they were."""

    applied: list[int]
    filtered: list[int]
    failed: dict[int, Failure]
    duplicates: Sequence[int] = ()
    """Their messages were applied before."""

    @property
    def gone(self) -> list[int]:
        """Those that came back, in order."""
        if not self.filtered and not self.duplicates:
            return self.applied
        return sorted([*self.applied, *self.filtered, *self.duplicates])


class Choice(NamedTuple):
    """What the next slice of a replay is about."""

    queues: list[Item]
    limits: list[int]
    """Events of each queue at most."""
    events: list[Item]
    gone: list[int]
    """Numbers of items for which there is nothing left to do."""
    left: int | None = None
    """The number of the first item named twice: it has to wait for another slice."""

    @property
    def items(self) -> list[Item]:
        """What the slice is about: queues go first, single events have slices of their own."""
        return self.queues or self.events

    @property
    def is_whole(self) -> bool:
        """Whether it takes queues, each to its end: what comes next has other items."""
        whole = sum(self.limits) == sum([item.events or 0 for item in self.queues])
        return bool(self.queues) and whole and self.until is None

    @property
    def until(self) -> int | None:
        """The number of the first item that has to wait for another slice; None: of none here."""
        single = [self.events[0].number] if self.queues and self.events else []
        named = [] if self.left is None else [self.left]
        return min(single + named, default=None)

    def passed(self, states: Mapping[int, str]) -> tuple[int, dict[int, str]]:
        """How far the operation is here, and what has to be said of items one by one.

        ``states``: what became of items, by their place. All items up to the number are over,
        and done unless something else is said of them.
        """
        items = self.items
        left = self.until
        seen = -1
        for place, item in enumerate(items):
            if place not in states or (left is not None and item.number > left):
                break
            seen = item.number
        said = {
            items[place].number: state
            for place, state in states.items()
            if state != "done" or items[place].number > seen
        }
        return seen, said


def pace(slice_size: int, tried: int) -> int:
    """How many events the next slice of a release may take."""
    return min(slice_size, max(FIRST_EVENTS, GROWTH * tried))


def choose(items: Sequence[Item], limit: int) -> Choice:
    """The first items of one operation that make up a slice; a long queue goes in several (K17)."""
    queues: list[Item] = []
    limits: list[int] = []
    events: list[Item] = []
    gone: list[int] = []
    twice: list[int] = []
    room = limit
    seen: set[int] = set()
    for item in items:
        if room <= 0:
            break
        if item.queue is None:
            events.append(item)
            room -= 1
        elif item.queue in seen:
            # Named twice: the second one finds nothing, or what came since, in its own turn.
            twice.append(item.number)
        elif not item.events:
            gone.append(item.number)
        elif queues and room < item.events <= limit * SHORT:
            # Whole in the next slice: a key rejoins with one update, and nothing is counted twice.
            break
        else:
            seen.add(item.queue)
            queues.append(item)
            limits.append(min(room, item.events))
            room -= item.events
    return Choice(queues, limits, events, gone, min(twice, default=None))


def chosen_again(items: list[Item], left: int | None) -> Choice:
    """What a slice was about, as far as its end has to know."""
    queued = items[0].queue is not None
    return Choice(items if queued else [], [], [] if queued else items, [], left)


def one_key_each(waiting: Sequence[Waiting]) -> bool:
    """Whether the records' keys tell the queues apart, so that nothing else has to."""
    pairs = {(one.queue, one.event.key) for one in waiting}
    pairs.discard((None, None))
    queues = {queue for queue, _ in pairs}
    keys = {key for _, key in pairs}
    return None not in queues and None not in keys and len(pairs) == len(queues) == len(keys)


def judge(
    handled: Handled, waiting: Sequence[Waiting], failed: Mapping[int, Failure | None]
) -> Verdict:
    """What to write down of handled events, once their effects are written.

    ``failed``: those whose effects were refused, and their followers. Whatever comes behind a
    failed one in its order stays where it is.
    """
    setbacks = {**handled.parked, **failed}
    if not setbacks and not handled.duplicates:
        filtered = [place for place, effects in enumerate(handled.effects) if not effects]
        count = len(handled.effects)
        if not filtered:
            return Verdict(list(range(count)), [], {})
        return Verdict(sorted(set(range(count)).difference(filtered)), filtered, {})
    duplicates: list[int] = []
    verdict = Verdict([], [], {}, duplicates)
    stopped: set[Hashable] = set()
    for place, effects in enumerate(handled.effects):
        order = waiting[place].order
        if order in stopped:
            continue
        if place in handled.duplicates:
            duplicates.append(place)
        elif place in setbacks:
            failure = setbacks[place]
            if failure is not None:
                verdict.failed[place] = failure
            if order is not None:
                stopped.add(order)
        elif effects == NOTHING:
            verdict.filtered.append(place)
        else:
            verdict.applied.append(place)
    return verdict


def dead_places(waiting: Sequence[Waiting]) -> list[int]:
    """Where dead events stand: nowhere, mostly."""
    states = list(map(_STATE, waiting))
    return [place for place, state in enumerate(states) if state == DEAD] if DEAD in states else []


class Going(NamedTuple):
    """Events that leave their queues, and what the statements that take them out ask of them."""

    rows: Sequence[Waiting]
    queued: int
    """How many of them stood in queues."""
    places: int
    """The sum of their places."""
    generations: int
    less: Counter[int]
    """How many leave each queue."""
    lasts: dict[int, int]
    """The place of the last one of each queue: all before it leave, too."""
    causes: Counter[tuple[int, str]]
    consumed: Counter[tuple[int, str, int]]
    """How many were consumed in which partition, and are there in which state and incarnation."""
    items: set[tuple[int | None, int]]
    """Queues and items."""


def going(rows: Sequence[Waiting]) -> Going:
    """What it takes to let these go, in the order of their replay."""
    queued = rows
    queues: list[int | None] = list(map(_QUEUE, rows))
    items = set(zip(queues, map(_ITEM, rows), strict=True))
    if None in queues:
        queued = [one for one in rows if one.queue is not None]
        queues = list(map(_QUEUE, queued))
    places = list(map(_PLACE, queued))
    named: list[int] = queues  # type: ignore[assignment]  # as filtered
    return Going(
        rows,
        len(queued),
        sum(places),
        sum(map(_GENERATION, queued)),
        Counter(named),
        dict(zip(named, places, strict=True)),
        causes_left(rows),
        Counter(map(_CONSUMED, rows)),
        items,
    )


def causes_left(events: Iterable[Waiting]) -> Counter[tuple[int, str]]:
    """How many of these events were parked for which cause: (partition, fingerprint)."""
    return Counter(
        (one.partition, one.fingerprint)
        for one in events
        if one.fingerprint is not None and one.state == "parked"
    )
