"""The Kafka home: records, copies and the offset of a slice in one transaction of Kafka.

The ledger is in PostgreSQL. So a slice's changes there are written down first, then Kafka commits,
then they are applied; whoever comes in between reads from Kafka's offset which of the two it was.
The way of a slice: pending -> transaction -> applied.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs
from psycopg.errors import UniqueViolation

from sideline.crashpoints import reach
from sideline.errors import FencedError
from sideline.homes.duplicates import Claims, Conflict, Cut
from sideline.homes.numbers import decide, word
from sideline.homes.transactions import Unsent
from sideline.ledger.operating import Done
from sideline.ledger.pending import Changes, Drawn, Pendings, forward, spots
from sideline.ledger.store import Stale
from sideline.slices import Aside, Handled, Outcome

if TYPE_CHECKING:
    from sideline.engine.lease import Partition
    from sideline.events import Event
    from sideline.homes.setbacks import Setter
    from sideline.homes.transactions import Transactor
    from sideline.leaving import Plain, Record
    from sideline.ledger.connection import Connection
    from sideline.ledger.replay import Replays
    from sideline.ledger.store import Held, Ledger
    from sideline.replays import Choice, Verdict, Waiting

log = logging.getLogger(__name__)


class Refused(Exception):  # noqa: N818 - a fact, not an error
    """Kafka does not take a record, and would not if it were sent again: its event failed."""


class KafkaHome:
    """Publishes slices for one lease, each exactly once for those who read committed records."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a slice depends on
        self,
        connection: Connection,
        ledger: Ledger,
        setter: Setter,
        pendings: Pendings,
        replays: Replays,
        transactor: Callable[[Partition], Transactor],
        blamed: dict[str, BaseException],
        claims: Claims | None = None,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._setter = setter
        self._pendings = pendings
        self._replays = replays
        self._transactor = transactor
        self._claims = claims or Claims(setter.pipeline, connection)
        self.blamed = blamed
        """Events whose records Kafka did not take: they fail without being tried."""

    def taken(self, held: Held) -> None:
        """A new owner: what this process has of the partition may be an older one's (K20)."""
        if not held.mine:
            self._transactor(held.partition).drop()

    # Which of the two it was

    def resolve(self, held: Held) -> None:
        """Know what became of the last slice, and be the only one who can publish the next.

        Raises `Unsent` where Kafka does not answer, RefusedError where it contradicts the ledger,
        FencedError where the partition has another owner.
        """
        transactor = self._transactor(held.partition)
        if held.pending is None and transactor.ready:
            return
        # An init fences the owner before: only an owner may do that (K20).
        self._pendings.look(held)
        reach("before-home-init")
        transactor.begin()
        reach("after-home-init")
        # Asked again: whoever was frozen before its init may have fenced its successor, but from
        # here on nobody publishes for this partition who has not made a newer producer.
        books = self._pendings.look(held)
        try:
            verdict = decide(books, transactor.shown(), where=str(held.partition))
            if verdict == "apply":
                self._pendings.apply(held)
            elif verdict == "drop":
                self._pendings.drop(held)
            elif verdict == "rewrite":
                transactor.send((), held.next_offset, word(held.mark, held.applied_number))
        except BaseException:
            # Nothing was decided: the next one begins anew.
            transactor.drop()
            raise

    def refresh(self, held: Held) -> None:
        """Nothing happens in the partition: write its offsets again before brokers forget them."""
        transactor = self._transactor(held.partition)
        if not transactor.outdated:
            return
        self.resolve(held)
        if transactor.outdated:
            self._pendings.look(held)
            transactor.send((), held.next_offset, word(held.mark, held.applied_number))

    # Live

    def commit(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """Records, failures and progress together, or nothing (C3)."""
        start, unclear = held.next_offset, held.pending is not None
        self.resolve(held)
        if held.next_offset != start:
            if unclear:
                # It is done: these events were admitted before that was known.
                raise Stale
            message = f"partition {held.partition} does not stand at offset {start}."
            raise FencedError(message)
        return self._commit(held, handled, aside)

    def _commit(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        handled, early = self._setter.look_over(held, handled, self._claims)
        handled, failure = self._setter.guard(held, handled)
        try:
            handled, counts, records = self._pend(held, handled, aside)
        except Cut as cut:
            self._connection.rollback()
            return self._commit(held, cut.shorter, aside)
        reach("after-pending")
        self._send(held, handled, records, counts.end)
        self._pendings.apply(held, spots(records, self._transactor(held.partition).sent))
        reach("after-apply")
        self._forgive(handled.events)
        # Its number of queues is known already, from the pending changes.
        aside_now, version = held.aside, held.aside_version
        self._setter.settle(held, handled, aside, counts)
        held.aside, held.aside_version = aside_now, version
        if handled.parked and not held.shared:
            aside.version = version
        return counts._replace(failure=failure or early)

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """Never called: a pipeline with this home is not at-most-once."""
        raise NotImplementedError

    def finish_unsure(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """Never called, like the above."""
        raise NotImplementedError

    def _pend(
        self, held: Held, handled: Handled, aside: Aside
    ) -> tuple[Handled, Outcome, list[Plain | Record]]:
        """Write down what the slice changes in the ledger.

        Returns it without its duplicates, counted, and the records that it publishes.
        """
        counts = self._setter.account(held, handled, aside)
        if self._pend_at_once(held, handled, counts):
            return handled, counts, records_of(handled)
        copying, parking = self._setter.copying, self._setter.parking
        parking.counted, copying.gathered = [], []
        drawn, new = self._claim(held, handled, aside, counts)
        if new is not handled:
            handled, counts = new, self._setter.account(held, new, aside)
        changes = forward(held, counts)
        if handled.copies is not None:
            copying.pend(held, handled)
            changes = structs.replace(changes, settlement=copying.settlement(handled))
        else:
            self._setter.write(held, handled, aside)
        drawn = self._pendings.note_causes(held, changes, drawn)
        reach("before-pending")
        self._connection.commit()
        drawn.keep(held)
        return handled, counts, [*records_of(handled), *copying.gathered]

    def _pend_at_once(self, held: Held, handled: Handled, counts: Outcome) -> bool:
        """In one statement, where nothing failed; False: nothing is written, the long way."""
        failed = handled.parked or handled.skipped or handled.leaves
        if failed or handled.copies is not None or held.shared:
            return False
        try:
            ids = self._claims.at_once(held, handled)
            self._pendings.write_at_once(held, forward(held, counts), ids)
        except Conflict:
            return False
        except UniqueViolation:
            self._claims.expect()
            return False
        return True

    def _claim(
        self, held: Held, handled: Handled, aside: Aside, counts: Outcome
    ) -> tuple[Drawn, Handled]:
        """Fence, then claim what the slice brings; what it could not claim is taken out (K7)."""
        while True:
            drawn = self._pendings.write(held, forward(held, counts), aside=counts.aside)
            self._setter.hold(held, handled, aside)
            try:
                return drawn, self._claims.take_out(held, handled)
            except Conflict:
                self._connection.rollback()

    def _send(
        self, held: Held, handled: Handled, records: Sequence[Plain | Record], end: int
    ) -> None:
        transactor = self._transactor(held.partition)
        try:
            transactor.send(records, end, word(held.mark, held.slice_number))
        except Unsent as unsent:
            self._blame(handled, range(len(handled.events)), unsent)
            raise

    def _blame(self, handled: Handled, places: Iterable[int], unsent: Unsent) -> None:
        """The events that refused records belong to; copies wait for their topics (K23)."""
        if not unsent.refused:
            return
        number = 0
        for place in places:
            event = handled.events[place]
            for record in handled.effects[place]:
                reason = unsent.refused.get(number)
                if reason is not None:
                    topic = record.topic  # type: ignore[union-attr]
                    message = f"Kafka does not take a record of its for {topic}: {reason}"
                    self.blamed.setdefault(event.id, Refused(message))
                number += 1

    def _forgive(self, events: Iterable[Event]) -> None:
        """The slice is over: whichever of them come back are tried again."""
        if self.blamed:
            for event in events:
                self.blamed.pop(event.id, None)

    # What comes back

    def replay(  # noqa: PLR0913, PLR0917 - what a slice of a replay depends on
        self,
        held: Held,
        choice: Choice,
        waiting: Sequence[Waiting],
        handled: Handled,
        verdict: Verdict,
        aside: Aside | None,
    ) -> Done:
        """Events that waited: the offset stays where it is, under a new number (K18).

        The caller has begun the transaction: it is fenced, and the queues are locked.
        """
        note = self._replays.noted(choice, waiting, verdict)
        at = held.next_offset
        drawn = self._pendings.write(held, Changes(at, at, events=True, replay=note))
        self._replays.claim(held, note)
        reach("before-pending")
        self._connection.commit()
        drawn.keep(held)
        reach("after-pending")
        records = records_of(handled, verdict.applied)
        try:
            self._transactor(held.partition).send(records, at, word(held.mark, held.slice_number))
        except Unsent as unsent:
            self._blame(handled, verdict.applied, unsent)
            raise
        done = self._pendings.apply(held, aside=aside)
        reach("after-apply")
        self._forgive(handled.events)
        return done


def records_of(handled: Handled, places: Iterable[int] | None = None) -> list[Plain | Record]:
    """What events publish, in log order: all of them, or those at some places."""
    effects: Any = handled.effects
    some = effects if places is None else [effects[place] for place in places]
    return list(itertools.chain.from_iterable(some))
