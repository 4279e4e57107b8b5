"""Messages that a producer sent twice, in the slice's transaction (C4, K7).

What is applied or filtered stores its message id; what failed does not. Whether an event is a
duplicate is decided here and nowhere else: right after the fence, before anything is staged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sideline.crashpoints import reach
from sideline.dedupe import MessageId, ids_of
from sideline.engine import current
from sideline.engine.current import Asking
from sideline.homes.transactions import Unsent
from sideline.ledger.messages import Brought, Claimed, InDoubt, Messages, Origin
from sideline.slices import NO_DUPLICATES, NOTHING, Duplicates, Failure, Handled

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Held
    from sideline.pipeline import Pipeline


class Conflict(Exception):  # noqa: N818 - a fact, not an error
    """Some id of the slice is there already, so that its transaction is of no use."""


class Cut(Exception):  # noqa: N818 - a fact, not an error
    """A slice has to be shorter: an event that failed is a duplicate, or nobody knows of one."""

    def __init__(self, shorter: Handled) -> None:
        super().__init__()
        self.shorter = shorter


class Doubtful(Unsent):
    """Whether an event is a duplicate is known once another slice is applied or dropped."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at
        """The event's place in its slice."""


class Ahead(NamedTuple):
    """How the next events are to be handled."""

    events: int
    what: Literal["new", "repeated", "broken", "again"]
    """Their messages are new, or were applied before; the first one's cannot be told; or others
    have stored some meanwhile, and it is to be asked again."""
    error: BaseException | None = None


class Claims:
    """The message ids of slices, through one connection."""

    def __init__(self, pipeline: Pipeline, connection: Connection) -> None:
        self._rule = pipeline.dedupe
        # A run that applies a range again asks what its pipeline has applied.
        name = pipeline.name if pipeline.again is None else pipeline.again.of
        self._again = pipeline.again is not None
        self._messages = Messages(connection, name)
        self._ids: Sequence[bytes | None] = ()
        self._of: Sequence[Event] | None = None
        self._errors: dict[int, BaseException] = {}
        self._mine: dict[int, Brought] = {}
        """What the open transaction has stored for the slice, by place."""
        self._expects = False
        """Whether the last slices had ids that were there already."""

    @property
    def wanted(self) -> bool:
        """Whether the pipeline checks for duplicates at all."""
        return self._rule is not None

    def errors(self, events: Sequence[Event]) -> dict[int, BaseException]:
        """Look at the ids of some events: by place, what the user's function raised."""
        if self._rule is None:
            return {}
        if self._of is not events:
            self._ids, self._errors = self._look(self._rule, events)
            self._of = events
        return self._errors

    def _look(
        self, rule: MessageId, events: Sequence[Event]
    ) -> tuple[list[bytes | None], dict[int, BaseException]]:
        if rule.of is None:
            return ids_of(rule, events)
        # Like a handler, it is the user's: what it logs is marked, and it is watched.
        hands = Asking()
        with current.of(hands):
            return ids_of(rule, hands.over(events))

    def expect(self) -> None:
        """Some id was there already: the next ones are claimed with that in mind."""
        self._expects = True

    def at_once(self, held: Held, handled: Handled) -> Mapping[str, Any] | None:
        """What a slice that is one statement stores along; Conflict: it cannot be one."""
        if self._rule is None:
            return None
        places = self._places(handled)
        if not places:
            return None
        ids = [self._ids[place] for place in places]
        if self._expects or len(set(ids)) < len(ids):
            raise Conflict
        return self._messages.arguments(*self._in_order(handled, places), _spot(held))

    def take(
        self, held: Held, handled: Handled, incarnations: Sequence[int] | None = None
    ) -> Duplicates:
        """Claim the ids of what is applied or filtered; which of these events are duplicates.

        Raises Conflict, with the transaction of no use, if an id is there that nobody expected:
        it is taken again then, in a new one.
        """
        self._mine = {}
        if self._rule is None or not handled.events:
            return NO_DUPLICATES
        self.errors(handled.events)
        places = self._places(handled)
        if not places:
            return NO_DUPLICATES
        reach("before-claim")
        live = handled.copies is None and incarnations is None
        first: dict[bytes | None, int] = {}
        twins: dict[int, int | None] = {}
        if (
            live
            and not self._expects
            and len({self._ids[place] for place in places}) == len(places)
        ):
            if not self._messages.store(*self._in_order(handled, places), _spot(held)):
                self.expect()
                raise Conflict
            self._mine = _Lazily(self, held, handled, places)
            reach("after-claim")
            return NO_DUPLICATES
        for place in places:
            before = first.setdefault(self._ids[place], place)
            if before != place:
                twins[place] = before
        mine = [place for place in places if place not in twins]
        brought = [self._brought(held, handled, place, incarnations) for place in mine]
        claimed = self._claim(brought, mine)
        known = {mine[number]: None for number in claimed.duplicates}
        # A twin of a duplicate is one of the same message.
        twins = {place: None if of in known else of for place, of in twins.items()}
        self._expects = bool(known or twins or claimed.before)
        self._mine = {
            place: brought[number]
            for number, place in enumerate(mine)
            if place not in known and number not in claimed.before
        }
        reach("after-claim")
        return {**known, **twins}

    def take_out(self, held: Held, handled: Handled, *, cuts: bool = True) -> Handled:
        """The slice without its duplicates, which the open transaction has claimed.

        Raises Cut if it has to be shorter, where it may be; Conflict like `take`; `Doubtful` if its
        first event has to wait.
        """
        if self._rule is None:
            return handled
        try:
            if cuts and (known := self.failed(held, handled)):
                first = min(known)
                raise Cut(handled.prefix(first) if first else as_duplicate(handled))
            return handled.taken_out(self.take(held, handled))
        except Doubtful as doubt:
            if not (cuts and doubt.at):
                raise
            raise Cut(handled.prefix(doubt.at)) from None

    def _claim(self, brought: Sequence[Brought], places: Sequence[int]) -> Claimed:
        try:
            return self._messages.claim(brought)
        except InDoubt as doubt:
            raise Doubtful(str(doubt), places[doubt.place]) from None

    def ahead(
        self, held: Held, handled: Handled, incarnations: Sequence[int] | None = None
    ) -> Ahead:
        """Claim before a handler that acts by itself: which events go together, as what.

        Only where all of them are new, the claim is one; otherwise it has to be rolled back.
        """
        errors = self.errors(handled.events)
        try:
            duplicates = self.take(held, handled, incarnations)
        except Conflict:
            return Ahead(len(handled.events), "again")
        stops = sorted({*duplicates, *errors})
        if not stops:
            return Ahead(len(handled.events), "new")
        if stops[0]:
            return Ahead(stops[0], "new")
        if 0 in errors:
            return Ahead(1, "broken", errors[0])
        count = next((place for place in stops if place + 1 not in duplicates), 0) + 1
        return Ahead(count, "repeated")

    def give_back(self, handled: Handled) -> None:
        """Of what was claimed, keep what is still applied or filtered."""
        if self._rule is None or not self._mine:
            return
        setbacks = handled.setbacks
        count = len(handled.events)
        self._messages.unclaim(
            self._mine[place]
            for place in self._mine
            if place in setbacks or place in handled.duplicates or place >= count
        )

    def keep_only(self, places: Collection[int]) -> None:
        """Of what was claimed, keep what is at these places."""
        if self._rule is not None and self._mine:
            wanted = set(places)
            self._messages.unclaim(self._mine[place] for place in self._mine if place not in wanted)

    def failed(
        self, held: Held, handled: Handled, incarnations: Sequence[int] | None = None
    ) -> Duplicates:
        """Events that failed although their messages were applied before."""
        if self._rule is None:
            return NO_DUPLICATES
        failures = {**handled.parked, **handled.skipped, **handled.retrying, **handled.dead}
        places = [
            place
            for place, failure in failures.items()
            if failure is not None and failure.stage not in {"admit", "dedupe"}
        ]
        if not places:
            return NO_DUPLICATES
        known = dict.fromkeys(self.known(held, handled, places, incarnations))
        # Those that bring what an earlier event of the slice brings, too.
        first = {self._ids[place]: place for place in reversed(self._places(handled))}
        twins = {place: first.get(self._ids[place], place) for place in places}
        return {**{place: of for place, of in twins.items() if of < place}, **known}

    def known(
        self,
        held: Held,
        handled: Handled,
        places: Sequence[int],
        incarnations: Sequence[int] | None = None,
    ) -> list[int]:
        """Which of some events bring a message that was applied before, by others."""
        self.errors(handled.events)
        some = [place for place in places if self._ids[place] is not None]
        if not some:
            return []
        brought = [self._brought(held, handled, place, incarnations) for place in some]
        try:
            stored = self._messages.known(brought)
        except InDoubt as doubt:
            raise Doubtful(str(doubt), some[doubt.place]) from None
        return sorted(some[number] for number, own in stored.items() if not own)

    def is_known(self, held: Held, event: Event) -> bool:
        """Whether one event's message is known to have been applied before, by another."""
        if self._rule is None:
            return False
        offset = event.offset
        alone = Handled(offset, offset + 1, [event], [()])
        try:
            return bool(self.known(held, alone, [0]))
        except Doubtful:
            return False

    def unclaim(
        self,
        held: Held,
        handled: Handled,
        places: Collection[int],
        incarnations: Sequence[int] | None = None,
    ) -> None:
        """Give back what an earlier transaction claimed for events that were not applied."""
        if self._rule is None or self._again or not places:
            # Of a run that applies a range again, nobody knows which ids were there before it.
            return
        self.errors(handled.events)
        self._messages.unclaim(
            self._brought(held, handled, place, incarnations)
            for place in sorted(places)
            if self._ids[place] is not None
        )

    def _places(self, handled: Handled) -> Sequence[int]:
        ids = self._ids
        if not (handled.setbacks or handled.duplicates) and None not in ids:
            return range(len(handled.events))
        left = handled.setbacks | set(handled.duplicates)
        return [
            place
            for place in range(len(handled.events))
            if place not in left and ids[place] is not None
        ]

    def _in_order(self, handled: Handled, places: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Ids and offsets, in the order of the ids: two slices never wait for each other."""
        ids: Sequence[Any] = self._ids
        order = sorted(places, key=ids.__getitem__)
        events = handled.events
        return [ids[place] for place in order], [events[place].offset for place in order]

    def _brought(
        self,
        held: Held,
        handled: Handled,
        place: int,
        incarnations: Sequence[int] | None,
    ) -> Brought:
        event = handled.events[place]
        incarnation = held.incarnation
        if incarnations is not None:
            incarnation = incarnations[place]
        elif handled.copies is not None:
            incarnation = handled.copies[place].incarnation
        origin = Origin(event.topic, event.partition, event.offset, incarnation)
        return Brought(self._ids[place] or b"", origin)


class _Lazily(dict[int, Brought]):
    """What a slice has stored, looked up only where something failed afterwards."""

    def __init__(self, claims: Claims, held: Held, handled: Handled, places: Sequence[int]) -> None:
        super().__init__()
        self._claims = claims
        self._held = held
        self._handled = handled
        self._places = places

    def __bool__(self) -> bool:
        return bool(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __missing__(self, place: int) -> Brought:
        return self._claims._brought(self._held, self._handled, place, None)  # noqa: SLF001


def cut_at(handled: Handled, failed: Collection[int]) -> int | None:
    """Where a slice has to end, because the first event of a message sent twice failed.

    Whoever brings it for the second time gets its chance in a slice of its own.
    """
    return min(
        (
            place
            for place, of in handled.duplicates.items()
            if of is not None and of in failed and place not in failed
        ),
        default=None,
    )


def as_duplicate(handled: Handled) -> Handled:
    """The first event of a slice alone, as a duplicate."""
    alone = handled.prefix(1)
    return alone._replace(
        effects=[NOTHING],
        executes=False,
        skipped={},
        parked={},
        retrying={},
        dead={},
        duplicates={0: None},
    )


def all_duplicates(start: int, end: int, events: Sequence[Event]) -> Handled:
    """Events whose messages were all applied before."""
    nothing = [NOTHING] * len(events)
    return Handled(start, end, events, nothing, duplicates=dict.fromkeys(range(len(events))))


def broken(handled: Handled, errors: Mapping[int, BaseException]) -> dict[int, Failure]:
    """Events of which the user's function could not say which message they bring."""
    return {
        place: Failure(handled.events[place], "dedupe", error)
        for place, error in errors.items()
        if place not in handled.setbacks
    }


def _spot(held: Held) -> Origin:
    return Origin(held.partition.topic, held.partition.number, 0, held.incarnation)
