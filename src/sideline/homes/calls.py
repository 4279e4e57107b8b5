"""The home of handlers that act on the outside world: progress alone is ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sideline.crashpoints import reach
from sideline.ledger.store import Held, Ledger, Move
from sideline.slices import Handled, Outcome, account

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.ledger.connection import Connection


class CallsHome:
    """Commits progress after the calls, or before them."""

    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self._connection = connection
        self._ledger = ledger

    def commit(self, held: Held, handled: Handled) -> Outcome:
        """At least once: the calls are made, now say so."""
        counts = _account(handled)
        self._finish(held, Move.forward(held, counts))
        return counts

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """At most once: progress first; until the calls are made, nobody knows about these."""
        self._finish(held, Move.unsure(held, events, end))

    def finish_unsure(self, held: Held, handled: Handled) -> Outcome:
        """At most once: the calls are made."""
        counts = _account(handled)
        self._finish(held, Move.sure(held, counts))
        return counts._replace(end=held.next_offset)

    def _finish(self, held: Held, move: Move) -> None:
        ctid = self._ledger.advance(held, move)
        reach("between-write-and-commit")
        self._connection.commit()
        reach("after-commit")
        held.ctid = ctid
        held.next_offset = move.end


def _account(handled: Handled) -> Outcome:
    """Count events; one that returned nothing was handled all the same, so it is applied."""
    counts = account(handled)
    return counts._replace(applied=counts.applied + counts.filtered, filtered=0)
