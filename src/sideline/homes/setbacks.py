"""What every home does with events that could not be applied, in the slice's transaction."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from msgspec import structs

from sideline import flood
from sideline.causes import let_go
from sideline.crashpoints import reach
from sideline.errors import SidelineError
from sideline.homes.duplicates import broken
from sideline.leaving import Leaving, decide, shorter, stash
from sideline.ledger.copying import Copying
from sideline.ledger.parking import Parking, new_names, remember, stepping_aside
from sideline.policies import DeadLetter, RetryTopics, Sideline, Skip
from sideline.slices import Aside, Failure, Handled, Outcome, account, counted, setback
from sideline.topics.headers import ROOM_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sideline.flood import Tally
    from sideline.homes.duplicates import Claims
    from sideline.homes.outgoing import Outgoing
    from sideline.leaving import Record, State
    from sideline.ledger.store import Held
    from sideline.pipeline import Fate, Pipeline
    from sideline.topics.room import Rooms


log = logging.getLogger(__name__)


class Setter:
    """Sets events aside, or lets copies of them leave, unless they are too many."""

    def __init__(
        self,
        pipeline: Pipeline,
        parking: Parking,
        *,
        guarded: bool = True,
        room: Rooms | None = None,
        outgoing: Outgoing | None = None,
    ) -> None:
        self.pipeline = self._pipeline = pipeline
        self.parking = self._parking = parking
        self._guarded = guarded and (
            isinstance(pipeline.on_failure, Sideline) or pipeline.copies_failures
        )
        # Under these policies nothing waits behind an event that failed.
        self.keyed = not isinstance(pipeline.on_failure, Skip | DeadLetter | RetryTopics)
        self.outgoing = outgoing
        self._room = room
        """How many bytes a record of a topic may have; raises if nobody can write to it."""
        self.copying = Copying(
            parking.connection, parking.pipeline, parking, version=parking.version
        )

    def fate(
        self, held: Held, handled: Handled, place: int, error: BaseException, *, own: bool = True
    ) -> Fate:
        """What becomes of an event whose row was refused."""
        if handled.copies is not None:
            attempt = handled.copies[place].attempt
            return self._pipeline.fate_of_copy(error, own=own, attempt=attempt)
        tries = held.tries_of(handled.events[place].offset)
        return self._pipeline.fate(error, own=own, tries=tries)

    def tally(self, held: Held) -> Tally | None:
        """What stops a handler's run early, when too many of its events fail."""
        return flood.Tally(self._pipeline.guard, held.guard) if self._guarded else None

    def guard(self, held: Held, handled: Handled) -> tuple[Handled, Failure | None]:
        """Cut a slice before the event that is one failure too many (F12), or cannot leave yet."""
        failure: Failure | None = None
        if self._counts(handled) and (handled.parked or handled.dead):
            total, failed = counted(handled)
            verdict = flood.judge(self._pipeline.guard, held.guard, total, failed)
            if verdict.trips_at is not None:
                place = failed[verdict.trips_at]
                failure = handled.parked.get(place) or handled.dead.get(place)
                failure = failure and failure._replace(stage="guard")
                handled = handled.prefix(place)
        if not handled.leaves:
            return handled, failure
        handled, refused = self._prepare(held, handled)
        return handled, refused or failure

    def look_over(
        self, held: Held, handled: Handled, claims: Claims
    ) -> tuple[Handled, Failure | None]:
        """Events that fail before anything is written: nobody can name or send their messages."""
        errors = broken(handled, claims.errors(handled.events))
        if handled.publishes:
            errors = {**self.unsendable(handled), **errors}
        if not errors:
            return handled, None
        fates = {
            place: self.fate(held, handled, place, failure.error, own=False)
            for place, failure in errors.items()
        }
        waits = min((p for p, fate in fates.items() if fate in {"waits", "stops"}), default=None)
        stopped = None if waits is None else errors[waits]
        if waits is not None:
            handled = handled.prefix(waits)
            errors = {place: failure for place, failure in errors.items() if place < waits}
        if not errors:
            return handled, stopped
        failed: dict[int, Failure | None] = {**errors}
        if self.keyed and handled.copies is None:
            failed = {**dict.fromkeys(_behind(handled, errors)), **errors}
        offsets = {handled.events[place].id: fates[place] for place in errors}
        return setback(handled, failed, lambda failure: offsets[failure.event.id]), stopped

    def _counts(self, handled: Handled) -> bool:
        # What comes from retry topics has failed before.
        return self._guarded and handled.copies is None

    def _prepare(self, held: Held, handled: Handled) -> tuple[Handled, Failure | None]:
        """Decide what leaves, and make sure before COMMIT that its topic takes it."""
        retrying, dead = {**handled.retrying}, {**handled.dead}
        now_ms = int(time.time() * 1000)
        for place in sorted([*retrying, *dead]):
            state: State = "retrying" if place in retrying else "dead"
            failure = retrying[place] if state == "retrying" else dead[place]
            if failure.leaving is not None:
                continue
            copy = None if handled.copies is None else handled.copies[place]
            before = held.tries_of(failure.event.offset) if copy is None else copy.attempt
            leaving = decide(
                self._pipeline,
                failure,
                state,
                attempts=before + 1,
                now_ms=now_ms,
                incarnation=held.incarnation,
                copy=copy,
            )
            try:
                leaving = self._fit(failure, leaving, now_ms, held, handled, place)
            except SidelineError as error:
                ready = handled._replace(retrying=retrying, dead=dead)
                return ready.prefix(place), Failure(failure.event, "copy", error)
            retrying.pop(place, None)
            (retrying if leaving.state == "retrying" else dead)[place] = Failure(
                failure.event, failure.stage, failure.error, leaving, leaving.cause
            )
        return handled._replace(retrying=retrying, dead=dead), None

    def _fit(  # noqa: PLR0913, PLR0917 - what a copy depends on
        self,
        failure: Failure,
        leaving: Leaving,
        now_ms: int,
        held: Held,
        handled: Handled,
        place: int,
    ) -> Leaving:
        """The copy as its topic takes it; what fits nowhere stays in the ledger alone."""
        record = leaving.record
        if record is None or self._room is None:
            return leaving
        room, partitions = self._room.of(record.topic)
        event = failure.event
        if leaving.state == "retrying" and event.partition < partitions:
            # Whoever has its turn later changes the books of one partition then, not of all.
            leaving = leaving.to(event.partition)
            record = leaving.record or record
        # Mostly there is so much room that nobody has to count.
        roughly = len(event.value or b"") + 3 * len(event.key or b"") + 2 * ROOM_BYTES
        if (not event.headers and roughly <= room) or record.bytes <= room:
            return leaving
        leaving = shorter(self._pipeline, failure, leaving)
        if leaving.record is not None and leaving.record.bytes <= room:
            return leaving
        if leaving.state == "dead":
            return structs.replace(leaving, record=None)
        given_up = decide(
            self._pipeline,
            failure,
            "dead",
            attempts=leaving.attempts,
            now_ms=now_ms,
            incarnation=held.incarnation,
            copy=None if handled.copies is None else handled.copies[place],
        )
        return self._fit(failure, given_up, now_ms, held, handled, place)

    def account(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """Count what committing the slice would do."""
        if handled.copies is not None:
            # They were consumed before, elsewhere: that is where they are counted.
            return Outcome(handled.end, copies=len(handled.copies))
        counts = account(handled)
        if handled.parked:
            counts = counts._replace(aside=len(stepping_aside(handled, aside)))
        if not self._guarded:
            # Somebody overrode the guard: what it saw before is no reason to stop the next run.
            return counts._replace(guard=[]) if held.guard else counts
        if held.guard or handled.parked or handled.dead:
            total, failed = counted(handled)
            memory = flood.judge(self._pipeline.guard, held.guard, total, failed).memory or []
            if memory != (held.guard or []):
                counts = counts._replace(guard=memory)
        return counts

    def hold(self, held: Held, handled: Handled, aside: Aside) -> None:
        """Right after the fence: see to it that no event of the slice is somebody else's."""
        if handled.copies is not None:
            self.copying.claim(held, handled)
            return
        self._parking.hold(held, handled, aside)

    def write(self, held: Held, handled: Handled, aside: Aside) -> str | None:
        """Set aside and count what the slice could not apply.

        Returns the progress row's new place, if it has moved.
        """
        place = self.publish(held, handled)
        if handled.copies is not None:
            place = self.copying.settle(held, handled) or place
            reach("after-settle")
            return place
        if handled.parked or handled.skipped:
            stashed = self._stashed(held, handled)
            self._parking.write(held, handled, aside, self._elsewhere(handled, stashed))
            reach("after-park")
            if stashed:
                place = self.copying.send(held, stashed.values()) or place
                reach("after-stash-written")
        if not handled.leaves:
            return place
        place = self.copying.keep(held, handled) or place
        reach("after-copy-written")
        return place

    def publish(
        self, held: Held, handled: Handled, places: Collection[int] | None = None
    ) -> str | None:
        """Write what is published, by all events or some, to the outbox.

        Returns the progress row's new place, if it has moved.
        """
        held.outbox_next = held.outbox_last
        held.ready.forget()
        if self.outgoing is None or not handled.publishes:
            return None
        place = self.copying.send(held, self.outgoing.records(handled, places))
        reach("after-publish-written")
        return place

    def unsendable(self, handled: Handled) -> dict[int, Failure]:
        """Events that publish what nobody could send, by place."""
        if self.outgoing is None or not handled.publishes:
            return {}
        return {
            place: Failure(handled.events[place], "publish", error)
            for place, error in self.outgoing.errors(handled).items()
        }

    def _elsewhere(self, handled: Handled, stashed: Mapping[int, Record]) -> Mapping[int, str]:
        """Where the bytes of parked events are, if not in the ledger."""
        if self._pipeline.stash == "pointer":
            return dict.fromkeys(handled.parked, "source")
        return dict.fromkeys(stashed, "stash")

    def _stashed(self, held: Held, handled: Handled) -> dict[int, Record]:
        """The records that keep the bytes of parked events; what fits nowhere stays here."""
        if self._pipeline.stash != "topic" or not handled.parked:
            return {}
        now_ms = int(time.time() * 1000)
        try:
            topic = self._pipeline.names.stash_of(held.partition.topic, self._pipeline.name)
            room = self._room(topic) if self._room is not None else 0
        except SidelineError as error:
            log.warning("parked events stay in the ledger: %s", error)
            return {}
        records = {
            place: stash(
                self._pipeline,
                handled.events[place],
                failure,
                now_ms=now_ms,
                incarnation=held.incarnation,
            )
            for place, failure in handled.parked.items()
        }
        return {place: record for place, record in records.items() if record.bytes <= room}

    def settle(self, held: Held, handled: Handled, aside: Aside, counts: Outcome) -> None:
        """The slice is committed: what it changed is known from here on."""
        if handled.parked:
            fresh = new_names(handled, aside)
            remember(aside, fresh)
            held.aside += counts.aside
            held.aside_version += counts.aside
            aside.version = aside.version + bool(fresh) if held.shared else held.aside_version
        if counts.guard is not None:
            held.guard = counts.guard
        held.outbox_last = max(held.outbox_last, held.outbox_next)
        held.ready.commit()
        for failures in (handled.parked, handled.skipped, handled.retrying, handled.dead):
            for failure in failures.values():
                if failure is not None:
                    let_go(failure.error)


def _behind(handled: Handled, failed: Mapping[int, Failure]) -> list[int]:
    """Later events of the keys of some that failed."""
    first: dict[tuple[bytes | None, bool], int] = {}
    for place in sorted(failed):
        first.setdefault(handled.own_key(place), place)
    setbacks = handled.setbacks
    return [
        place
        for place in range(len(handled.events))
        if place not in setbacks
        and (own := handled.own_key(place))[0] is not None
        and first.get(own, place) < place
    ]
