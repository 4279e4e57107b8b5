"""What becomes of each event of a slice. Pure: no clock, no socket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.causes import Cause, cause_of
from sideline.effects import Effect, Execute
from sideline.events import Event
from sideline.keys import mark

if TYPE_CHECKING:
    from sideline.leaving import Leaving

# A slice is at most this big, whatever its events weigh.
SLICE_BYTES = 32 * 1024 * 1024
NOTHING: tuple[Effect, ...] = ()
# Of an event that could not be decoded far enough to know.
UNKNOWN_KEY = object()
# A handler that acts by itself has nothing to return, but its event is not filtered out.
ACTED: tuple[Effect, ...] = (Execute(""),)


class Failure(NamedTuple):
    """Why an event could not be handled or written."""

    event: Event
    stage: str
    """``key``, ``handler``, ``write`` or ``copy``; ``guard``: too many failed before it;
    ``admit``: a run that applies a range again left it out."""
    error: BaseException
    leaving: Leaving | None = None
    """What leaves because of it, once that is decided."""
    told: Cause | None = None
    """Why, if that was said before its error forgot where it was raised."""

    @property
    def cause(self) -> Cause:
        """Why, in words that can be stored."""
        return self.told or cause_of(self.error, self.stage)


# By the event's place in its slice: why it failed, or None where it only follows one that did.
Setbacks = Mapping[int, Failure | None]
NO_SETBACKS: Setbacks = MappingProxyType({})
# By the place of an event whose message was applied before: the place of the event in the same
# slice that brings it first, or None where it was stored before.
Duplicates = Mapping[int, int | None]
NO_DUPLICATES: Duplicates = MappingProxyType({})


class Aside:
    """The keys that are aside: later events of theirs wait."""

    __slots__ = ("absent", "derived", "kafka", "marks", "version")

    def __init__(
        self,
        version: int = 0,
        kafka: Iterable[bytes] = (),
        derived: Iterable[bytes] = (),
        marks: Collection[int] = frozenset(),
    ) -> None:
        self.version = version
        self.kafka = set(kafka)
        """Keys of records; with marks, those that were asked for."""
        self.derived = set(derived)
        """What the pipeline's ``key=`` said."""
        self.marks = marks
        """Of all keys of records that are aside, where not all of them were read."""
        self.absent: set[bytes] = set()
        """Keys with such a mark that are not aside."""

    def unsure(self, keys: Iterable[bytes | None]) -> list[bytes]:
        """The keys among these that may be aside, and of which it is not known."""
        if not self.marks:
            return []
        marks, kafka, absent = self.marks, self.kafka, self.absent
        marked = [key for key in set(keys) if key is not None and mark(key) in marks]
        return [key for key in marked if key not in kafka and key not in absent]

    def __bool__(self) -> bool:
        return bool(self.kafka or self.derived)

    def holds(self, event: Event, derived: bytes | None) -> bool:
        """Whether the event waits: it may have two keys, and either may be aside (K15)."""
        return event.key in self.kafka or derived in self.derived


class Copy(NamedTuple):
    """Where a retry topic says that it is an event's turn, and what the ledger has to say then."""

    offset: int
    """Of the record in the retry topic."""
    attempt: int
    """How often the event has failed."""
    incarnation: int
    """How often the event's own topic had been made again."""
    first_ms: int
    """When it failed for the first time."""


class Handled(NamedTuple):
    """A run of handled events of one partition, ready to be committed together."""

    start: int
    """Where the partition's progress stands."""
    end: int
    """Where it stands afterwards; offsets have holes, so this is not start + len(events)."""
    events: Sequence[Event]
    effects: Sequence[tuple[Effect, ...]]
    """One entry an event, in log order."""
    executes: bool = False
    """Whether SQL of the handler's own is among the effects."""
    keys: Sequence[Hashable] | None = None
    """What ``key=`` said, one entry an event; None: the Kafka keys."""
    skipped: Mapping[int, Failure] = NO_SETBACKS  # type: ignore[assignment]
    """Events among them that failed and are left out."""
    parked: Setbacks = NO_SETBACKS
    """Events among them that are set aside."""
    retrying: Mapping[int, Failure] = NO_SETBACKS  # type: ignore[assignment]
    """Events among them that are tried again later, through a retry topic."""
    dead: Mapping[int, Failure] = NO_SETBACKS  # type: ignore[assignment]
    """Events among them that nobody tries again by itself."""
    copies: Sequence[Copy] | None = None
    """Where the events come from retry topics: one entry an event."""
    duplicates: Duplicates = NO_DUPLICATES
    """Events among them whose message was applied before."""
    publishes: bool = False
    """Whether records to be published are among the effects."""

    @property
    def leaves(self) -> bool:
        """Whether copies of some of the events leave for other topics."""
        return bool(self.retrying or self.dead)

    def prefix(self, count: int) -> Handled:
        """The first ``count`` events alone."""
        if count >= len(self.events):
            return self
        return self._replace(
            end=(self.copies or self.events)[count].offset,
            events=self.events[:count],
            effects=self.effects[:count],
            keys=self.keys and self.keys[:count],
            skipped={place: why for place, why in self.skipped.items() if place < count},
            parked={place: why for place, why in self.parked.items() if place < count},
            retrying={place: why for place, why in self.retrying.items() if place < count},
            dead={place: why for place, why in self.dead.items() if place < count},
            copies=self.copies and self.copies[:count],
            duplicates={place: of for place, of in self.duplicates.items() if place < count},
        )

    def without(self, places: Collection[int]) -> Handled:
        """The same without some events; where progress stands afterwards does not change."""
        kept = [place for place in range(len(self.events)) if place not in places]
        new = {place: number for number, place in enumerate(kept)}

        def moved(some: Mapping[int, Any]) -> dict[int, Any]:
            return {new[place]: why for place, why in some.items() if place in new}

        return self._replace(
            events=[self.events[place] for place in kept],
            effects=[self.effects[place] for place in kept],
            keys=self.keys and [self.keys[place] for place in kept],
            skipped=moved(self.skipped),
            parked=moved(self.parked),
            retrying=moved(self.retrying),
            dead=moved(self.dead),
            copies=self.copies and [self.copies[place] for place in kept],
            duplicates={
                place: None if of is None else new.get(of)
                for place, of in moved(self.duplicates).items()
            },
        )

    @property
    def setbacks(self) -> set[int]:
        """The places of events that are neither applied nor filtered, duplicates apart."""
        return {*self.parked, *self.skipped, *self.retrying, *self.dead}

    def taken_out(self, duplicates: Duplicates) -> Handled:
        """The same with some events found to be duplicates: nothing of them is written."""
        if not duplicates:
            return self
        effects = list(self.effects)
        for place in duplicates:
            effects[place] = NOTHING
        return self._replace(effects=effects, duplicates={**self.duplicates, **duplicates})

    def own_key(self, place: int) -> tuple[bytes | None, bool]:
        """What an event's order belongs to, and whether ``key=`` said so.

        Where ``key=`` could not say, the record's own key stands for it.
        """
        if self.keys is None or self.keys[place] is UNKNOWN_KEY:
            return self.events[place].key, False
        return self.keys[place], True  # type: ignore[return-value]


def release(handled: Handled) -> None:
    """Free what a slice with failures was made of, last made first; it is of no use afterwards.

    Python hands memory out again in the reverse order in which it got it back. Effects freed by
    themselves, and what failed among them later, would leave the next slice's effects a little out
    of order, and each slice more than the last one: after a second or two everything that a worker
    does takes a fifth longer, for as long as it lives.
    """
    effects = handled.effects
    setbacks = [handled.parked, handled.skipped, handled.retrying, handled.dead]
    failed = [some for some in setbacks if isinstance(some, dict) and some]
    if not failed or not isinstance(effects, list):
        return
    places = sorted(chain.from_iterable(failed))
    while places:
        # Each number is freed with what stands there, too.
        place = places.pop()
        del effects[place:]
        for some in failed:
            some.pop(place, None)


class Outcome(NamedTuple):
    """What a slice has come to, once it is committed."""

    end: int
    consumed: int = 0
    applied: int = 0
    filtered: int = 0
    skipped: int = 0
    event_ms: int = -1
    """When the last of them was made."""
    parked: int = 0
    aside: int = 0
    """Queues that begin with this slice."""
    guard: list[int] | None = None
    """What the flood guard remembers, if it changed."""
    retrying: int = 0
    dead: int = 0
    copies: int = 0
    """Records of a retry topic; their events were consumed before."""
    duplicate: int = 0
    failure: Failure | None = None
    """The event right behind the committed ones, if it is what ended the slice."""


def account(handled: Handled) -> Outcome:
    """Count what committing this slice would do."""
    count = len(handled.events)
    skipped, parked = len(handled.skipped), len(handled.parked)
    retrying, dead = len(handled.retrying), len(handled.dead)
    failed = skipped + parked + retrying + dead
    duplicate = len(handled.duplicates)
    filtered = handled.effects.count(NOTHING) - failed - duplicate
    applied = count - filtered - failed - duplicate
    last_ms = handled.events[-1].timestamp_ms if count else -1
    return Outcome(
        handled.end,
        count,
        applied,
        filtered,
        skipped,
        last_ms,
        parked,
        retrying=retrying,
        dead=dead,
        duplicate=duplicate,
    )


def join(first: Handled, second: Handled) -> Handled:
    """Two runs of events, one behind the other, as one."""
    count = len(first.events)
    return Handled(
        first.start,
        second.end,
        [*first.events, *second.events],
        [*first.effects, *second.effects],
        first.executes or second.executes,
        None if second.keys is None else [*(first.keys or ()), *second.keys],
        {**first.skipped, **{count + place: why for place, why in second.skipped.items()}},
        {**first.parked, **{count + place: why for place, why in second.parked.items()}},
        {**first.retrying, **{count + place: why for place, why in second.retrying.items()}},
        {**first.dead, **{count + place: why for place, why in second.dead.items()}},
        duplicates={
            **first.duplicates,
            **{
                count + place: None if of is None else count + of
                for place, of in second.duplicates.items()
            },
        },
        publishes=first.publishes or second.publishes,
    )


def left_out(failure: Failure, *, derives: bool) -> Handled:
    """One event that failed and is not tried again."""
    offset = failure.event.offset
    keys = [UNKNOWN_KEY] if derives else None
    return Handled(offset, offset + 1, [failure.event], [NOTHING], keys=keys, skipped={0: failure})


def setback(
    handled: Handled, failed: Mapping[int, Failure | None], fate: Callable[[Failure], str]
) -> Handled:
    """Take events out that could not be written: whatever ``fate`` says of each."""
    effects = list(handled.effects)
    for place in failed:
        effects[place] = NOTHING
    fates: dict[str, dict[int, Failure]] = {"skipped": {}, "retrying": {}, "dead": {}}
    parked: dict[int, Failure | None] = {}
    for place, why in failed.items():
        where = "parked" if why is None else fate(why)
        if why is None or where not in fates:
            parked[place] = why
        else:
            fates[where][place] = why
    if parked:
        parked |= _followers(handled, parked)
    return handled._replace(
        effects=effects,
        parked={**handled.parked, **parked},
        skipped={**handled.skipped, **fates["skipped"]},
        retrying={**handled.retrying, **fates["retrying"]},
        dead={**handled.dead, **fates["dead"]},
        # What comes behind a parked event of its key waits there, duplicate or not.
        duplicates={place: of for place, of in handled.duplicates.items() if place not in parked},
    )


def _followers(handled: Handled, failed: Mapping[int, Failure | None]) -> dict[int, None]:
    """Events without effects, their handler's own failures among them, that wait for one of these.

    Had the slice ended between the two, the later one would not have been tried.
    """
    first: dict[tuple[bytes | None, bool], int] = {}
    for place in sorted(failed):
        if failed[place] is not None:
            first.setdefault(handled.own_key(place), place)
    return dict.fromkeys(
        place
        for place, effects in enumerate(handled.effects)
        if not effects
        and (own := handled.own_key(place))[0] is not None
        and first.get(own, place) < place
    )


def counted(handled: Handled) -> tuple[int, dict[int, int]]:
    """What the flood guard counts: events without followers, and the failed ones among them.

    Returns how many there are, and where each failed one stands among them and in the slice.
    """
    failed: dict[int, int] = {}
    followers = 0
    for place in sorted([*handled.parked, *handled.dead]):
        if place in handled.parked and handled.parked[place] is None:
            followers += 1
        else:
            failed[place - followers] = place
    return len(handled.events) - followers, failed


def effects_of(result: Any, allowed: tuple[type, ...]) -> tuple[Effect, ...]:  # noqa: ANN401
    """What a handler returned, as a tuple of effects; TypeError for anything else."""
    if result is None:
        return NOTHING
    if isinstance(result, allowed):
        return (result,)  # type: ignore[return-value]  # a cast would be a call an event
    # Text and mappings are iterable too, and certainly a mistake.
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise TypeError(_misfit(result, allowed))
    effects = tuple(result)
    for effect in effects:
        if not isinstance(effect, allowed):
            raise TypeError(_misfit(effect, allowed))
    return effects


def admit(events: list[Event], next_offset: int, bound: int | None = None) -> list[Event]:
    """Drop what is done already, and what lies beyond the bound.

    Progress, not the reader, says where a slice begins.
    """
    if events and events[0].offset < next_offset:
        events = [event for event in events if event.offset >= next_offset]
    if bound is not None and events and events[-1].offset >= bound:
        events = [event for event in events if event.offset < bound]
    return events


def _misfit(value: object, allowed: tuple[type, ...]) -> str:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 - one line
    if not allowed:
        return f"the handler returned {shown}, but this sink takes no effects"
    names = ", ".join(kind.__name__ for kind in allowed)
    return f"the handler returned {shown}, which is not one of {names}"
