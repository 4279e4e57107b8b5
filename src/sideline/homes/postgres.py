"""The PostgreSQL home: rows, failures and progress of a slice in one transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sideline.classify import kind_of
from sideline.crashpoints import reach
from sideline.effects import Effect
from sideline.engine.handling import HANDLING_SECONDS, allowed_effects
from sideline.errors import RefusedError
from sideline.events import Event
from sideline.homes.writer import Batch, Writer
from sideline.ledger.store import Held, Ledger, Move
from sideline.policies import Skip
from sideline.slices import ACTED, NOTHING, Failure, Handled, Outcome, account, effects_of

if TYPE_CHECKING:
    from sideline.clock import Clock
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline

# Index in the slice: its own error.
Failed = dict[int, BaseException]
_JUDGE_DEFERRED = "set constraints all immediate; set constraints all deferred"
_XACT = "select pg_current_xact_id()::text"


class PostgresHome:
    """Commits slices through one connection, for one lease."""

    def __init__(
        self, pipeline: Pipeline, connection: Connection, writer: Writer, ledger: Ledger
    ) -> None:
        self._pipeline = pipeline
        self._connection = connection
        self._writer = writer
        self._ledger = ledger
        self._skipping = isinstance(pipeline.on_failure, Skip)

    def commit(self, held: Held, handled: Handled) -> Outcome:
        """Effects and progress together, or nothing (C3)."""
        if self._pipeline.delivery == "at-least-once":
            return self._commit_effects_first(held, handled)
        outcome, ctid = self._write(held, handled, partial(Move.forward, held))
        self._finish(held, outcome.end, ctid)
        return outcome

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """At most once: progress first; until the effects follow, nobody knows about these."""
        self._finish(held, end, self._ledger.advance(held, Move.unsure(held, events, end)))

    def finish_unsure(self, held: Held, handled: Handled) -> Outcome:
        """At most once: the effects, behind a check of lease and owner."""
        outcome, ctid = self._write(held, handled, partial(Move.sure, held))
        self._finish(held, held.next_offset, ctid)
        return outcome._replace(end=held.next_offset)

    def run(self, held: Held, events: Sequence[Event], end: int, clock: Clock) -> Outcome:
        """Handlers that take the transaction: each event in a savepoint of the slice's own."""
        ctid = self._ledger.advance(held, Move.stay(held))
        before = self._transaction_id()
        handled, failure = self._run_each(held, events, end, clock)
        self._same_transaction(before)
        counts = account(handled)
        # The row was locked and moved on its page by the statement above.
        ctid = self._ledger.advance(
            dataclasses.replace(held, ctid=ctid), Move.forward(held, counts)
        )
        reach("between-write-and-commit")
        self._finish(held, handled.end, ctid)
        return counts._replace(failure=failure)

    def _run_each(
        self, held: Held, events: Sequence[Event], end: int, clock: Clock
    ) -> tuple[Handled, Failure | None]:
        handler: Callable[..., Any] = self._pipeline.handle
        allowed = allowed_effects(self._pipeline)
        done: list[tuple[Effect, ...]] = []
        failure, skipped = None, 0
        until = clock.monotonic() + HANDLING_SECONDS
        for event in events:
            try:
                # Inside this block psycopg refuses commit() and rollback() by the handler.
                with self._connection.transaction():
                    effects = effects_of(handler(event, self._connection), allowed)
                    self._writer.apply_one(effects)
                    # What the handler deferred is judged with its event, not at COMMIT.
                    self._connection.execute(_JUDGE_DEFERRED)
                done.append(effects or ACTED)
            except KeyboardInterrupt:
                raise
            # Whatever a handler raises is a failure of its event alone; a lost connection is not.
            except BaseException as error:
                if self._connection.broken or self._connection.closed:
                    raise
                if not self._pipeline.skips(error):
                    failure = Failure(event, "handler", error)
                    break
                skipped += 1
                done.append(NOTHING)
            if clock.monotonic() > until:
                break
        count = len(done)
        if count < len(events):
            end = events[count].offset
        return Handled(held.next_offset, end, events[:count], done, skipped), failure

    def _commit_effects_first(self, held: Held, handled: Handled) -> Outcome:
        outcome, ctid = self._write(held, handled, partial(Move.stay, held))
        self._finish(held, held.next_offset, ctid)
        reach("between-effects-and-progress")
        ctid = self._ledger.advance(held, Move.forward(held, outcome))
        self._finish(held, outcome.end, ctid)
        return outcome

    def _write(
        self, held: Held, handled: Handled, moving: Callable[[Outcome], Move]
    ) -> tuple[Outcome, str]:
        """Fence, then effects; the transaction stays open, with what failed taken out."""
        counts = account(handled)
        ctid, failed = self._apply(held, handled, moving(counts))
        reach("between-write-and-commit")
        if not failed:
            return counts, ctid
        if self._skipping:
            return self._leave_out(held, counts, moving, ctid, len(failed))
        # Nothing may overtake the event: commit what comes before it, and say which it is.
        self._connection.rollback()
        first = min(failed)
        outcome, ctid = self._write(held, handled.prefix(first), moving)
        if outcome.failure is None:
            failure = Failure(handled.events[first], "write", failed[first])
            outcome = outcome._replace(failure=failure)
        return outcome, ctid

    def _apply(self, held: Held, handled: Handled, move: Move) -> tuple[str, Failed]:
        if handled.executes:
            return self._apply_sql(held, handled, move)
        batch = self._batch(handled)
        ctid = self._ledger.advance(held, move)
        reach("before-first-write")
        try:
            # Without a savepoint first: a slice with poison in it is rare, and is done anew.
            return ctid, self._written(batch, optimistic=True)
        except Exception as error:
            if kind_of(error) == "recoverable":
                raise
            self._connection.rollback()
        ctid = self._ledger.advance(held, move)
        return ctid, self._written(batch)

    def _apply_sql(self, held: Held, handled: Handled, move: Move) -> tuple[str, Failed]:
        """The handler's own SQL could end the transaction: progress moves only after it."""
        ctid = self._ledger.advance(held, Move.stay(held))
        before = self._transaction_id()
        failed = self._written(self._batch(handled))
        self._same_transaction(before)
        return self._ledger.advance(dataclasses.replace(held, ctid=ctid), move), failed

    def _leave_out(
        self,
        held: Held,
        counts: Outcome,
        moving: Callable[[Outcome], Move],
        ctid: str,
        failed: int,
    ) -> tuple[Outcome, str]:
        """Skip: what failed to be written counts as skipped instead of applied."""
        left = counts._replace(applied=counts.applied - failed, skipped=counts.skipped + failed)
        old, new = moving(counts), moving(left)
        correction = Move(
            old.end, old.end, applied=new.applied - old.applied, skipped=new.skipped - old.skipped
        )
        at = dataclasses.replace(held, next_offset=old.end, ctid=ctid)
        return left, self._ledger.advance(at, correction)

    def _batch(self, handled: Handled) -> tuple[Batch, Sequence[int]]:
        """What there is to write, and which event each of it belongs to."""
        effects, places = handled.effects, range(len(handled.effects))
        if NOTHING not in effects:
            return Batch(effects, partial(_keys, handled, places)), places
        # Without those that have none, the usual slice stays a usual one.
        busy = [place for place in places if effects[place]]
        return Batch([effects[place] for place in busy], partial(_keys, handled, busy)), busy

    def _written(self, batch: tuple[Batch, Sequence[int]], *, optimistic: bool = False) -> Failed:
        works, places = batch
        hold = not self._skipping
        written = self._writer.write(works, hold_followers=hold, optimistic=optimistic)
        return {places[place]: error for place, error in written.failed.items()}

    def _finish(self, held: Held, end: int, ctid: str) -> None:
        self._connection.commit()
        reach("after-commit")
        held.ctid = ctid
        held.next_offset = end

    def _transaction_id(self) -> str:
        row = self._connection.execute(_XACT).fetchone()
        return str(row[0]) if row else ""

    def _same_transaction(self, before: str) -> None:
        if self._transaction_id() != before:
            self._connection.rollback()
            message = (
                f"pipeline {self._pipeline.name!r}: a statement of the handler ended the slice's "
                "transaction, so effects and progress can no longer be kept together."
            )
            hint = "Take COMMIT and ROLLBACK out of the handler's SQL."
            raise RefusedError(message, hint=hint)


def _keys(handled: Handled, places: Sequence[int]) -> list[Hashable | None]:
    derived = handled.keys
    if derived is not None:
        return [derived[place] for place in places]
    return [handled.events[place].key for place in places]
