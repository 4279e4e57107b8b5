"""The home of handlers that act on the outside world: progress alone is ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sideline.crashpoints import reach
from sideline.homes.duplicates import Ahead, Claims
from sideline.homes.home import AlwaysKnown
from sideline.homes.setbacks import Setter
from sideline.ledger.store import Held, Ledger, Move
from sideline.slices import NOTHING, Aside, Copy, Handled, Outcome

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.ledger.connection import Connection


class CallsHome(AlwaysKnown):
    """Commits progress after the calls, or before them."""

    def __init__(
        self,
        connection: Connection,
        ledger: Ledger,
        setter: Setter,
        claims: Claims | None = None,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._setter = setter
        self._claims = claims or Claims(setter.pipeline, connection)

    def ahead(self, held: Held, events: Sequence[Event], copies: Sequence[Copy] | None) -> Ahead:
        """Claim the messages of events before they are handled: a call cannot be taken back (K7).

        Only "new" for all of them is a promise; it is committed then.
        """
        given = Handled(0, 0, events, [NOTHING] * len(events), copies=copies)
        while True:
            ctid = self._ledger.advance(held, Move.stay(held))
            ahead = self._claims.ahead(held, given)
            if ahead.what != "again":
                break
            self._connection.rollback()
        if ahead.what == "new" and ahead.events == len(events):
            self._connection.commit()
            held.ctid = ctid
            reach("after-claim-committed")
        else:
            self._connection.rollback()
        return ahead

    def commit(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """At least once: the calls are made, now say so."""
        handled, failure = self._setter.guard(held, handled)
        counts = self._account(held, handled, aside)
        self._write(held, handled, aside, counts, Move.forward(held, counts))
        return counts._replace(failure=failure)

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """At most once: progress first; until the calls are made, nobody knows about these."""
        move = Move.unsure(held, events, end)
        self._finish(held, move, self._ledger.advance(held, move))

    def finish_unsure(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """At most once: the calls are made."""
        counts = self._account(held, handled, aside)._replace(end=held.next_offset)
        self._write(held, handled, aside, counts, Move.sure(held, counts))
        return counts

    def _write(
        self, held: Held, handled: Handled, aside: Aside, counts: Outcome, move: Move
    ) -> None:
        ctid = self._ledger.advance(held, move)
        self._setter.hold(held, handled, aside)
        self._claims.unclaim(held, handled, handled.setbacks)
        ctid = self._setter.write(held, handled, aside) or ctid
        self._finish(held, move, ctid)
        self._setter.settle(held, handled, aside, counts)

    def _finish(self, held: Held, move: Move, ctid: str) -> None:
        reach("between-write-and-commit")
        self._connection.commit()
        reach("after-commit")
        held.ctid = ctid
        held.next_offset = move.end

    def _account(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """Count events; one that returned nothing was handled all the same, so it is applied."""
        counts = self._setter.account(held, handled, aside)
        if handled.copies is not None:
            return counts
        return counts._replace(applied=counts.applied + counts.filtered, filtered=0)
