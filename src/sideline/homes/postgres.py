"""The PostgreSQL home: rows, failures and progress of a slice in one transaction."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from psycopg import Error, OperationalError, Rollback
from psycopg.errors import UniqueViolation
from psycopg.pq import TransactionStatus

from sideline.classify import kind_of
from sideline.crashpoints import armed, reach
from sideline.effects import Effect
from sideline.engine.handling import NOTHING_FORCED, Run, allowed_effects
from sideline.errors import RefusedError
from sideline.events import Event
from sideline.homes.duplicates import (
    Claims,
    Conflict,
    Cut,
    all_duplicates,
    cut_at,
)
from sideline.homes.home import AlwaysKnown
from sideline.homes.outgoing import rows_of
from sideline.homes.savepoints import DEADLOCK, GONE, Ended
from sideline.homes.setbacks import Setter
from sideline.homes.writer import ALL_APPLIED, JUDGE_DEFERRED, Batch, Writer, Written
from sideline.ledger.store import Held, Ledger, Move
from sideline.slices import (
    ACTED,
    NOTHING,
    Aside,
    Copy,
    Failure,
    Handled,
    Outcome,
    effects_of,
    setback,
)

if TYPE_CHECKING:
    from sideline.clock import Clock
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline

_XACT = "select pg_current_xact_id()::text"
IDLE, OPEN = TransactionStatus.IDLE, TransactionStatus.INTRANS
BROKEN = TransactionStatus.INERROR
# A larger slice has more to do than to wait for answers.
AT_ONCE_EVENTS = 1_000

log = logging.getLogger(__name__)


class PostgresHome(AlwaysKnown):
    """Commits slices through one connection, for one lease."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a home is made of
        self,
        pipeline: Pipeline,
        connection: Connection,
        writer: Writer,
        ledger: Ledger,
        setter: Setter,
        claims: Claims | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._claims = claims or Claims(pipeline, connection)
        # At most once, progress has passed the events already: there is no second slice for them.
        self._cuts = pipeline.delivery != "at-most-once"
        self._connection = connection
        self._writer = writer
        self._ledger = ledger
        self._setter = setter
        self._foreseen: tuple[Handled, tuple[Batch, Sequence[int]]] | None = None

    def commit(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """Effects, failures and progress together, or nothing (C3)."""
        if self._pipeline.delivery == "at-least-once":
            return self._commit_effects_first(held, handled, aside)
        return self._commit(held, handled, aside, partial(Move.forward, held))

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """At most once: progress first; until the effects follow, nobody knows about these."""
        self._finish(held, end, self._ledger.advance(held, Move.unsure(held, events, end)))

    def finish_unsure(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """At most once: the effects, behind a check of lease and owner."""
        stays = handled._replace(end=held.next_offset)
        return self._commit(held, stays, aside, partial(Move.sure, held))

    def run(  # noqa: PLR0913 - what a slice depends on
        self,
        held: Held,
        events: Sequence[Event],
        end: int,
        clock: Clock,
        *,
        aside: Aside,
        forced: Mapping[int, BaseException] = NOTHING_FORCED,
        copies: Sequence[Copy] | None = None,
    ) -> Outcome:
        """Handlers that take the transaction: each event in a savepoint of the slice's own."""
        while True:
            ctid = self._ledger.advance(held, Move.stay(held))
            before = self.transaction_id()
            given = Handled(held.next_offset, end, events, [NOTHING] * len(events), copies=copies)
            if copies is not None:
                self._setter.hold(held, given, aside)
            ahead = self._claims.ahead(held, given)
            if ahead.events == len(events) and ahead.what in {"new", "broken"}:
                break
            self._connection.rollback()
            first = given.prefix(ahead.events)
            if ahead.what == "repeated":
                passed = all_duplicates(first.start, first.end, first.events)
                passed = passed._replace(copies=first.copies)
                return self._commit(held, passed, aside, partial(Move.forward, held))
            events, end, copies = first.events, first.end, first.copies
        if ahead.error is not None:
            forced = {**forced, events[0].offset: ahead.error}
        handled, failure = self.run_each(
            held, events, end, clock, aside=aside, forced=forced, copies=copies
        )
        self.same_transaction(before)
        self._claims.give_back(handled)
        if copies is None:
            self._setter.hold(held, handled, aside)
        handled, refused = self._setter.guard(held, handled)
        if refused is not None:
            # What was handled behind it is in the transaction already: do it anew, without.
            self._connection.rollback()
            return Outcome(held.next_offset, failure=refused)
        counts = self._setter.account(held, handled, aside)
        # The row was locked and moved on its page by the statement above.
        ctid = self._ledger.advance(
            dataclasses.replace(held, ctid=ctid), Move.forward(held, counts)
        )
        ctid = self._setter.write(held, handled, aside) or ctid
        reach("between-write-and-commit")
        self._finish(held, handled.end, ctid)
        self._setter.settle(held, handled, aside, counts)
        return counts._replace(failure=failure)

    def run_each(  # noqa: PLR0913 - what a slice depends on
        self,
        held: Held,
        events: Sequence[Event],
        end: int,
        clock: Clock,
        *,
        aside: Aside,
        forced: Mapping[int, BaseException],
        copies: Sequence[Copy] | None,
    ) -> tuple[Handled, Failure | None]:
        """Like `handling.handle`, with the transaction in the handler's hands."""
        handler: Callable[..., Any] = self._pipeline.handle
        allowed = allowed_effects(self._pipeline)
        left_out = self._pipeline.left_out

        def act(event: Event) -> tuple[Effect, ...]:
            effects = effects_of(handler(event, self._connection), allowed)
            if left_out is not None and left_out(event):
                return NOTHING
            if self._setter.outgoing is not None:
                self._setter.outgoing.check(event, effects)
            self._writer.apply_one(rows_of(effects))
            # What the handler deferred is judged with its event, not at COMMIT.
            self._connection.execute(JUDGE_DEFERRED)
            return effects or ACTED

        run = Run(
            self._pipeline,
            events,
            aside,
            self._setter.tally(held) if copies is None else None,
            tries=held.tries,
            copies=copies,
            handler=lambda event: self._in_savepoint(partial(act, event)),
            gone=self._is_over,
        )
        return run.slice(held.next_offset, end, clock, forced)

    def _in_savepoint(self, act: Callable[[], tuple[Effect, ...]]) -> tuple[Effect, ...]:
        """Do one event's part; what it raises undoes it, and is raised."""
        effects, failure, deadlock = NOTHING, None, False
        try:
            # Inside this block psycopg refuses commit() and rollback() by the handler. It looks
            # at what passes through it, and at a Rollback of the handler's own it would be silent.
            with suppress(Rollback), self._connection.transaction():
                try:
                    effects = act()
                except BaseException as error:  # noqa: BLE001 - raised below
                    failure = error
                    deadlock = self._is_deadlock(error)
                    raise Rollback from None
        except Error as error:
            # Of the savepoint itself: whatever the handler raised is kept.
            if error.sqlstate in GONE:
                raise self._ended() from error
            raise
        self._refuse_closed()
        if failure is None:
            return effects
        if self._is_gone() and not issubclass(type(failure), Error):
            # Whatever words the handler had for it.
            raise OperationalError("the connection was lost in a handler") from failure
        if not self._is_gone() and self._is_over():
            # psycopg keeps it to itself that there was no savepoint to go back to.
            raise self._ended() from failure
        if deadlock:
            # Not the event's, and with the savepoint alone the slice would keep its other locks:
            # all of it is done again (K16).
            self._connection.rollback()
        raise failure

    def _is_deadlock(self, error: BaseException) -> bool:
        """Whether the slice's own transaction was the victim; a handler may have others."""
        if self._connection.info.transaction_status != BROKEN:
            return False
        return issubclass(type(error), Error) and error.sqlstate == DEADLOCK  # type: ignore[attr-defined]

    def _refuse_closed(self) -> None:
        # One that broke is closed, too: that is an outage, and the slice is done again.
        if self._connection.closed and not self._connection.broken:
            message = (
                f"pipeline {self._pipeline.name!r}: the handler closed the connection of the "
                "slice's transaction."
            )
            raise RefusedError(message, hint="Take close() out of the handler.")

    def _is_gone(self) -> bool:
        return self._connection.broken or self._connection.closed

    def _is_over(self) -> bool:
        """Whether the slice's transaction is not there any more, or good for nothing."""
        return self._is_gone() or self._connection.info.transaction_status != OPEN

    def _commit_effects_first(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        outcome, handled, ctid = self._write(held, handled, aside, partial(Move.stay, held))
        reach("between-write-and-commit")
        self._finish(held, held.next_offset, ctid)
        reach("between-effects-and-progress")
        ctid = self._fence(held, handled, aside, Move.forward(held, outcome))
        ctid = self._setter.write(held, handled, aside) or ctid
        self._finish(held, outcome.end, ctid)
        self._setter.settle(held, handled, aside, outcome)
        return outcome

    def _commit(
        self, held: Held, handled: Handled, aside: Aside, moving: Callable[[Outcome], Move]
    ) -> Outcome:
        outcome, handled, ctid = self._write(held, handled, aside, moving)
        ctid = self._setter.write(held, handled, aside) or ctid
        reach("between-write-and-commit")
        self._finish(held, outcome.end, ctid)
        self._setter.settle(held, handled, aside, outcome)
        return outcome

    def _write(
        self, held: Held, handled: Handled, aside: Aside, moving: Callable[[Outcome], Move]
    ) -> tuple[Outcome, Handled, str]:
        """Fence, then effects; the transaction stays open, with what failed taken out."""
        handled, early = self._setter.look_over(held, handled, self._claims)
        handled, failure = self._setter.guard(held, handled)
        failure = failure or early
        counts = self._setter.account(held, handled, aside)
        try:
            ctid, written, new = self._apply(held, handled, aside, moving(counts))
        except Cut as cut:
            self._connection.rollback()
            return self._write(held, cut.shorter, aside, moving)
        if not written.failed:
            if new is handled:
                return counts._replace(failure=failure), handled, ctid
            outcome, ctid = self._correct(held, (handled, new), aside, moving, ctid)
            return outcome._replace(failure=failure), new, ctid
        fates = {
            place: self._setter.fate(held, handled, place, error)
            for place, error in written.failed.items()
        }
        waits = min((p for p, fate in fates.items() if fate in {"waits", "stops"}), default=None)
        if waits is None:
            failures = self.failures(handled, written)
            offsets = {handled.events[place].id: fate for place, fate in fates.items()}
            left = setback(new, failures, lambda failure: offsets[failure.event.id])
            if self._cuts and (twin := cut_at(left, left.setbacks)) is not None:
                self._connection.rollback()
                return self._write(held, handled.prefix(twin), aside, moving)
            guarded, flood = self._setter.guard(held, left)
            if flood is None:
                self._claims.give_back(guarded)
                outcome, ctid = self._correct(held, (handled, guarded), aside, moving, ctid)
                return outcome._replace(failure=failure), guarded, ctid
            waits = len(guarded.events)
            failure = flood
        else:
            failure = Failure(handled.events[waits], "write", written.failed[waits])
        # Nothing may overtake the event: commit what comes before it, and say which it is.
        self._connection.rollback()
        outcome, before, ctid = self._write(held, handled.prefix(waits), aside, moving)
        return outcome._replace(failure=outcome.failure or failure), before, ctid

    def failures(self, handled: Handled, written: Written) -> dict[int, Failure | None]:
        """What could not be written, by place; None: it only follows one that could not."""
        failures: dict[int, Failure | None] = dict.fromkeys(written.followers)
        for place, error in written.failed.items():
            failures[place] = Failure(handled.events[place], "write", error)
        return failures

    def _correct(
        self,
        held: Held,
        change: tuple[Handled, Handled],
        aside: Aside,
        moving: Callable[[Outcome], Move],
        ctid: str,
    ) -> tuple[Outcome, str]:
        """Some of what was counted as applied was not."""
        before, after = (self._setter.account(held, handled, aside) for handled in change)
        old, new = moving(before), moving(after)
        correction = Move(
            old.end,
            old.end,
            applied=new.applied - old.applied,
            filtered=new.filtered - old.filtered,
            skipped=new.skipped - old.skipped,
            parked=new.parked - old.parked,
            aside=new.aside - old.aside,
            guard=new.guard,
            retrying=new.retrying - old.retrying,
            dead=new.dead - old.dead,
            duplicate=new.duplicate - old.duplicate,
        )
        if new == old:
            return after, ctid
        at = dataclasses.replace(held, next_offset=old.end, ctid=ctid)
        return after, self._ledger.advance(at, correction)

    def _apply(
        self, held: Held, handled: Handled, aside: Aside, move: Move
    ) -> tuple[str, Written, Handled]:
        if handled.executes:
            return self._apply_sql(held, handled, aside, move)
        batch = self._batch(handled)
        plain = move.plain and handled.copies is None and not handled.publishes
        if len(handled.events) <= AT_ONCE_EVENTS and plain and not held.shared:
            at_once = self._at_once(held, handled, batch[0], move)
            if at_once is not None:
                return at_once, ALL_APPLIED, handled
        ctid, new = self._claim(held, handled, aside, move)
        batch = batch if new is handled else self._batch(new)
        reach("before-first-write")
        try:
            # Without a savepoint first: a slice with poison in it is rare, and is done anew.
            return ctid, self._written(new, batch, optimistic=True), new
        except Exception as error:
            if kind_of(error) == "recoverable":
                raise
            self._connection.rollback()
        ctid, again = self._claim(held, handled, aside, move)
        # The writer knows a batch again that it could not write.
        return ctid, self._written(again, batch if again is new else self._batch(again)), again

    def _claim(self, held: Held, handled: Handled, aside: Aside, move: Move) -> tuple[str, Handled]:
        """Fence, then claim what the slice brings; what it could not claim is taken out (K7)."""
        while True:
            ctid = self._fence(held, handled, aside, move)
            try:
                return ctid, self._claims.take_out(held, handled, cuts=self._cuts)
            except Conflict:
                self._connection.rollback()

    def _at_once(self, held: Held, handled: Handled, batch: Batch, move: Move) -> str | None:
        """Fence, effects and COMMIT in one round trip; None: nothing is written, the long way."""
        connection = self._connection
        if connection.info.transaction_status != IDLE or armed("between-write-and-commit"):
            return None
        try:
            ids = self._claims.at_once(held, handled)
            found = self._writer.in_one(batch)
            if connection.info.transaction_status != IDLE:
                # The catalogue was asked.
                connection.rollback()
            if found is None:
                return None
            reach("before-first-write")
            connection.autocommit = True
            return self._ledger.advance_at_once(held, move, *found, ids)
        except Conflict:
            return None
        except Exception as error:
            if kind_of(error) == "recoverable":
                raise
            if issubclass(type(error), UniqueViolation):
                # Perhaps of a message's.
                self._claims.expect()
            # The long way finds out whose fault it is.
            connection.rollback()
            return None
        finally:
            if not self._is_gone():
                connection.autocommit = False

    def _apply_sql(
        self, held: Held, handled: Handled, aside: Aside, move: Move
    ) -> tuple[str, Written, Handled]:
        """The handler's own SQL could end the transaction: progress moves only after it."""
        ctid, new = self._claim(held, handled, aside, Move.stay(held))
        before = self.transaction_id()
        written = self._written(new, self._batch(new))
        self.same_transaction(before)
        return self._ledger.advance(dataclasses.replace(held, ctid=ctid), move), written, new

    def _fence(self, held: Held, handled: Handled, aside: Aside, move: Move) -> str:
        ctid = self._ledger.advance(held, move)
        self._setter.hold(held, handled, aside)
        return ctid

    def write(self, handled: Handled, *, optimistic: bool = False) -> Written:
        """The effects alone, in a transaction that the caller fenced and ends."""
        before, self._foreseen = self._foreseen, None
        known = before is not None and before[0] is handled
        batch = before[1] if before and known else self._batch(handled)
        return self._written(handled, batch, optimistic=optimistic)

    def foresee(self, handled: Handled) -> None:
        """Plan what a slice is to write while the connection is busy with another one."""
        batch = self._batch(handled)
        try:
            self._writer.foresee(batch[0])
        # Whatever it is, whoever writes the slice meets it.
        except Exception as error:  # noqa: BLE001
            log.debug("a slice could not be planned ahead: %s", error)
        self._foreseen = handled, batch

    def _batch(self, handled: Handled) -> tuple[Batch, Sequence[int]]:
        """What there is to write, and which event each of it belongs to."""
        effects, places = handled.effects, range(len(handled.effects))
        if handled.publishes:
            effects = [rows_of(some) for some in effects]
        if NOTHING not in effects:
            return Batch(effects, partial(_keys, handled, places)), places
        # Without those that have none, the usual slice stays a usual one.
        busy = list(compress(places, effects))
        return Batch(list(filter(None, effects)), partial(_keys, handled, busy)), busy

    def _written(
        self, handled: Handled, batch: tuple[Batch, Sequence[int]], *, optimistic: bool = False
    ) -> Written:
        works, places = batch
        hold = self._setter.keyed and handled.copies is None
        try:
            written = self._writer.write(works, hold_followers=hold, optimistic=optimistic)
        except Ended as error:
            raise self._ended() from error
        if not written.failed:
            return written
        return Written(
            {places[place]: error for place, error in written.failed.items()},
            frozenset(places[place] for place in written.followers),
        )

    def _finish(self, held: Held, end: int, ctid: str) -> None:
        self._connection.commit()
        reach("after-commit")
        held.ctid = ctid
        held.next_offset = end

    def transaction_id(self) -> str:
        """Of the transaction that is open."""
        row = self._connection.execute(_XACT).fetchone()
        return str(row[0]) if row else ""

    def same_transaction(self, before: str) -> None:
        """Refuse to go on if a statement of the handler's ended the transaction."""
        if self.transaction_id() != before:
            raise self._ended()

    def _ended(self) -> RefusedError:
        """What is still open goes back; what a COMMIT has written nobody can take back."""
        self._connection.rollback()
        message = (
            f"pipeline {self._pipeline.name!r}: a statement of the handler ended the slice's "
            "transaction, so effects and progress can no longer be kept together."
        )
        return RefusedError(message, hint="Take COMMIT and ROLLBACK out of the handler's SQL.")


def _keys(handled: Handled, places: Sequence[int]) -> list[Hashable | None]:
    derived = handled.keys
    if derived is not None:
        return [derived[place] for place in places]
    return [handled.events[place].key for place in places]
