"""Events that come back: the owner of a queue's home carries operations out in its lease.

The way of a released event: the ledger -> a slice -> the handler -> effects, ledger and the key's
state in one transaction. Live events of other keys go on in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline import guardrail
from sideline.classify import kind_of
from sideline.crashpoints import reach
from sideline.engine.attempts import Attempts, Prepared, Read
from sideline.engine.beside import beside
from sideline.engine.handling import NOBODY
from sideline.errors import GuardrailError
from sideline.homes.duplicates import Ahead, Claims, Doubtful, cut_at
from sideline.homes.postgres import PostgresHome
from sideline.homes.savepoints import is_data
from sideline.homes.setbacks import Setter
from sideline.ledger.operating import Done
from sideline.ledger.replay import Replays
from sideline.ledger.store import Stale
from sideline.replays import (
    FIRST_EVENTS,
    Choice,
    Item,
    Verdict,
    Waiting,
    choose,
    dead_places,
    going,
    judge,
    pace,
)
from sideline.sinks import Calls, Postgres
from sideline.slices import NOTHING, Failure, Handled

if TYPE_CHECKING:
    import psycopg

    from sideline.clock import Clock
    from sideline.engine.window import Pool
    from sideline.events import Delivery, Event
    from sideline.homes.kafka import KafkaHome
    from sideline.homes.outgoing import Outgoing
    from sideline.homes.writer import Writer, Written
    from sideline.ledger.ahead import Foreseen
    from sideline.ledger.connection import Connection
    from sideline.ledger.parking import Parking
    from sideline.ledger.store import Held, Ledger
    from sideline.pipeline import Pipeline
    from sideline.slices import Aside

# With a rate, a slice is about this much of it.
PACE_SECONDS = 0.25
# Smaller slices are not read ahead while they grow: a release of few events needs no second
# connection.
AHEAD_EVENTS = 1_000


class Step(NamedTuple):
    """What one slice of an operation came to."""

    operation: int | None = None
    """None: nothing waits here."""
    done: Done = Done()
    failure: Failure | None = None
    """What ended it before its time: an event that waits for the world, or cannot be tried."""
    tried: int = 0
    wait_seconds: float = 0.0
    """How long the operation's rate wants it to wait now."""


class Replayer:
    """Carries operations out, slice by slice, through the connection of one lease."""

    def __init__(  # noqa: PLR0913 - what a replay depends on, by keyword
        self,
        pipeline: Pipeline,
        connection: Connection,
        *,
        replays: Replays,
        ledger: Ledger,
        parking: Parking,
        writer: Writer,
        clock: Clock,
        pool: Pool | None,
        publishing: KafkaHome | None = None,
        claims: Claims | None = None,
        outgoing: Outgoing | None = None,
        knows: Callable[[Event], bool] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._connection = connection
        self._replays = replays
        self._claims = claims = claims or Claims(pipeline, connection)
        self._clock = clock
        self._knows = knows
        """Whether an event has been through ``prepare=``; None: there is no such step."""
        self._writer = writer
        self.operation: int | None = None
        """What the last slice was about."""
        self._attempts = Attempts(pipeline, clock, pool)
        self._in_transaction = pipeline.wants_transaction
        self._home: PostgresHome | None = None
        self._publishing = publishing
        self._calls = isinstance(pipeline.sink, Calls)
        if isinstance(pipeline.sink, Postgres):
            # The flood guard counts what arrives, not what comes back.
            again = self._attempts.again
            self._setter = setter = Setter(again, parking, guarded=False, outgoing=outgoing)
            self._home = PostgresHome(again, connection, writer, ledger, setter, claims)
        # Side by side a slice takes as many events as were quick; what came through ``prepare=``
        # is known only in its own round.
        self._foresees = self._home is not None and pool is None and knows is None
        # With ``key=`` each event is asked for its key first, in its turn: what was handled ahead
        # would be thrown away.
        plain = pipeline.key is None and pipeline.rate is None and not claims.wanted
        self._prepares = self._foresees and plain
        self._prepared: Prepared | None = None
        self._spent: object = None
        """The last slice, which is over; freed while PostgreSQL works on the next one."""
        self._likely = FIRST_EVENTS
        """So many events the next slice will most likely have at most."""

    def step(  # noqa: PLR0913 - what a slice of a replay depends on
        self,
        held: Held,
        aside: Aside | None,
        delivery: Delivery,
        *,
        limit: int,
        excluded: Sequence[int] = (),
        onward: bool = True,
    ) -> Step:
        """The next slice of the oldest operation that has something to do here.

        ``onward``: another one is wanted right after it, as far as can be seen.
        """
        self.operation = None
        self._onward = onward
        prepared = None
        if self._prepared is not None and self._prepared.held is held:
            prepared, self._prepared = self._prepared, None
        if self._publishing is not None:
            self._publishing.resolve(held)
        foreseen = self._foreseen(held, limit, excluded) if self._foresees else None
        if foreseen is not None:
            self.operation = operation = foreseen.wanted.operation
            rows = foreseen.rows
            return self._release(
                held,
                operation,
                foreseen.choice,
                aside,
                delivery,
                rows=rows,
                prepared=prepared,
                next_limit=self._next_limit(limit, foreseen.tried + len(rows)),
            )
        items = self._items(held, limit, excluded)
        if not items:
            return Step()
        first = items[0]
        self.operation = first.operation
        if first.rate is None:
            return self._carry_out(held, items, aside, delivery, limit)
        rate = first.rate / self._replays.homes(first.operation)
        slow = max(1, int(min(limit, rate * PACE_SECONDS)))
        step = self._carry_out(held, items[:slow], aside, delivery, slow)
        return step._replace(wait_seconds=step.tried / rate)

    def _foreseen(self, held: Held, limit: int, excluded: Sequence[int]) -> Foreseen | None:
        """What was read ahead: no more of it than what came back may be followed by."""
        found = self._replays.foreseen(held, limit, excluded)
        if found is None or len(found.rows) > self._growing(limit, found.tried):
            return None
        return found

    def _growing(self, limit: int, tried: int) -> int:
        """How many events of a release the next slice may take."""
        return min(limit, pace(self._pipeline.slice_size, tried))

    def _next_limit(self, limit: int, tried: int) -> int:
        """How many events to read ahead; 0: it is not worth the trouble yet."""
        most = self._growing(limit, tried)
        return most if most >= min(limit, self._pipeline.slice_size, AHEAD_EVENTS) else 0

    def _items(self, held: Held, limit: int, excluded: Sequence[int]) -> list[Item]:
        """The next items: not those of a large slice as long as slices are small."""
        likely = min(limit, self._likely)
        items = self._replays.items(held, likely, excluded)
        if not items:
            return items
        first = items[0]
        most = limit
        if first.kind == "release":
            most = self._growing(limit, first.tried)
        self._likely = pace(self._pipeline.slice_size, first.tried + most)
        return self._replays.items(held, most, excluded) if most > likely else items

    def _carry_out(
        self,
        held: Held,
        items: Sequence[Item],
        aside: Aside | None,
        delivery: Delivery,
        limit: int,
    ) -> Step:
        first = items[0]
        if first.kind != "release":
            done = self._give_up_or_restore(held, items, aside)
            return Step(first.operation, done, tried=len(items))
        outside = not isinstance(self._pipeline.sink, Postgres)
        if outside and self._pipeline.delivery == "at-most-once":
            self._replays.stop(
                first.operation,
                "with delivery at-most-once nobody could tell whether it was done; "
                "run the pipeline with at-least-once to release",
            )
            return Step(first.operation)
        choice = choose(items, self._growing(limit, first.tried))
        tried = first.tried + sum(choice.limits)
        next_limit = self._next_limit(limit, tried) if first.rate is None else 0
        return self._release(held, first.operation, choice, aside, delivery, next_limit=next_limit)

    # What goes with it

    @property
    def gone(self) -> bool:
        """Whether the connection is lost."""
        return self._connection.broken or self._connection.closed

    def stops(self, failure: Failure) -> bool:
        """Whether waiting does not help: the code or its tables do not fit."""
        if issubclass(type(failure.error), GuardrailError):
            return True
        return self._attempts.again.fate(failure.error, own=failure.stage == "write") == "stops"

    def undo(self) -> None:
        """Nothing of a refused slice stays."""
        self.forget()
        self._connection.rollback()
        self._writer.forget()

    def forget(self) -> None:
        """What was handled ahead is handled again."""
        self._prepared = self._spent = None

    def judges_early(self, error: psycopg.Error) -> bool:
        """Whether a row that only COMMIT refused will be found out when it is done again (K8)."""
        return is_data(error) and self._writer.judge_early()

    def stop(self, operation: int, note: str) -> None:
        """End an operation that cannot be carried out as things are."""
        self._replays.stop(operation, note)

    def note(self, operation: int, note: str | None) -> None:
        """Say why an operation waits; None: it no longer does."""
        self._replays.note(operation, note)

    def waits(self, held: Held) -> list[tuple[int, float, int]]:
        """Operations that wait at home in a partition: for how many seconds, how often in vain."""
        return self._replays.waits(held)

    def defer(self, held: Held, operation: int, seconds: float, attempts: int) -> None:
        """Say for how long an operation waits here, to whoever holds the partition then."""
        self._replays.defer(held, operation, seconds, attempts)

    def finish(self) -> None:
        """End the operations of which nothing waits any more."""
        self.forget()
        self._replays.finish()

    # Release

    def _release(  # noqa: PLR0913 - what a slice of a replay depends on
        self,
        held: Held,
        operation: int,
        choice: Choice,
        aside: Aside | None,
        delivery: Delivery,
        *,
        rows: list[tuple[Any, ...]] | None = None,
        prepared: Prepared | None = None,
        next_limit: int,
    ) -> Step:
        """``rows``: as they were read ahead, and perhaps ``prepared``.

        ``next_limit``: how many to read ahead now.
        """
        if prepared is not None and prepared.rows is rows:
            waiting, gone = prepared.waiting, choice.gone
        else:
            waiting, gone = self._replays.read(held, choice, delivery, rows)
        reach("replay-read")
        if self._foresees and next_limit:
            self._replays.look_ahead(held, choice, next_limit)
        if gone:
            # Whoever lost its lease says nothing, not even what is true (K1).
            self._replays.begin(held, (), ())
            self._replays.mark(operation, dict.fromkeys(gone, "gone"))
            self._connection.commit()
        waiting = self._behind_none(held, choice, waiting)
        step = Step(operation)
        if waiting and self._knows is not None:
            waiting = self._known(waiting)
            if not waiting:
                # The next round brings their rows.
                return Step()
        if not waiting:
            return step
        read = self._attempts.readable(waiting, prepared)
        read.rows = rows
        if read.failed:
            done = self._write_down(held, choice, waiting, Verdict([], [], read.failed), aside)
            return step._replace(done=done, tried=len(read.failed))
        if not read.waiting:
            return step._replace(failure=read.failure)
        dead = dead_places(read.waiting)
        if dead and (refused := guardrail.unseen(self._pipeline)) is not None:
            event = read.waiting[dead[0]].event
            return step._replace(failure=Failure(event, "guardrail", refused))
        return self._apply(held, choice, read, aside, step)

    def _behind_none(self, held: Held, choice: Choice, waiting: list[Waiting]) -> list[Waiting]:
        """Without dead events of keys of which an earlier one failed again in this operation (C1).

        They stay dead with it. Where the policy gives up order anyway, or there is none, they go.
        """
        dead = [
            one for place in dead_places(waiting) if (one := waiting[place]).event.key is not None
        ]
        if not dead or self._pipeline.copies_failures or self._pipeline.independent:
            return waiting
        operation = choice.items[0].operation
        failed = self._replays.failed_keys(held, operation)
        behind = {id(one) for one in dead if one.event.key in failed}
        if not behind:
            return waiting
        self._replays.begin(held, (), ())
        numbers = [choice.items[one.item].number for one in dead if id(one) in behind]
        self._replays.mark(operation, dict.fromkeys(numbers, "failed"))
        self._connection.commit()
        return [one for one in waiting if id(one) not in behind]

    def _known(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """As far as rows have come: nothing overtakes what has none yet."""
        knows = self._knows
        assert knows is not None  # noqa: S101 - for the type checker
        return list(takewhile(lambda one: knows(one.event), waiting))

    def _apply(
        self, held: Held, choice: Choice, read: Read, aside: Aside | None, step: Step
    ) -> Step:
        ahead = self._look_ahead(held, read)
        if ahead.what == "repeated":
            passed = Verdict([], [], {}, range(ahead.events))
            done = self._write_down(held, choice, read.waiting, passed, aside)
            return step._replace(done=done, tried=ahead.events)
        if ahead.error is not None:
            unnamed = Failure(read.waiting[0].event, "dedupe", ahead.error)
            return self._fail_first(held, choice, read, unnamed, aside, step)
        if ahead.events < len(read.waiting):
            read.waiting = read.waiting[: ahead.events]
            read.failure = read.handled = None
        return self._apply_new(held, choice, read, aside, step)

    def _apply_new(
        self, held: Held, choice: Choice, read: Read, aside: Aside | None, step: Step
    ) -> Step:
        if self._in_transaction and self._home is not None:
            return self._apply_in_transaction(held, choice, read, aside, step)
        if read.handled is not None:
            handled, failure = read.handled, None
        else:
            handled, failure = self._attempts.handle(held, read.waiting)
        reach("replay-handled")
        handled, failure = self._in_order(read, handled, failure or read.failure)
        handled, unsendable = self._sendable(handled)
        if unsendable is not None:
            failure = None
            if not handled.events:
                return self._fail_first(held, choice, read, unsendable, aside, step)
        if not handled.events:
            return step._replace(failure=failure)
        if self._publishing is not None:
            done = self._publish(held, choice, read, handled, aside)
            return step._replace(done=done, failure=failure, tried=len(handled.events))
        if self._home is None:
            verdict = _called(handled, read)
            done = self._write_down(held, choice, read.waiting, verdict, aside, called=True)
            return step._replace(done=done, failure=failure, tried=len(handled.events))
        return self._apply_rows(held, choice, read, aside, step._replace(failure=failure), handled)

    def _apply_rows(  # noqa: PLR0913, PLR0917 - what a slice of a replay depends on
        self,
        held: Held,
        choice: Choice,
        read: Read,
        aside: Aside | None,
        step: Step,
        handled: Handled,
    ) -> Step:
        assert self._home is not None  # noqa: S101 - for the type checker
        written, new = self._write(held, handled, read)
        while (stop := self._stops_at(new, written)) is not None:
            # What comes before it goes; it stays where it is, and so does all behind it.
            self._connection.rollback()
            error = written.failed.get(stop)
            failure = None if error is None else Failure(handled.events[stop], "write", error)
            step = step._replace(failure=failure)
            handled = handled.prefix(stop)
            if not handled.events:
                return step
            written, new = self._write(held, handled, read)
        reach("replay-written")
        verdict = judge(new, read.waiting, self._home.failures(new, written))
        self._claims.keep_only([*verdict.applied, *verdict.filtered])
        self._setter.publish(held, new, verdict.applied)

        def end() -> Done:
            done = self._replays.settle(held, choice, read.waiting, verdict, read.going)
            self._replays.commit(held, done, aside)
            return done

        if self._is_passed(choice, read, verdict):
            prepared: list[Prepared] = []
            delivery = read.waiting[0].event.delivery
            done = beside(end, partial(self._prepare, held, delivery, prepared))
            # Behind a slice that is refused, this is not what comes next.
            self._prepared = prepared[0] if prepared else None
            self._spent = read, handled, new, verdict
        else:
            done = end()
        return step._replace(done=done, tried=len(handled.events))

    def _is_passed(self, choice: Choice, read: Read, verdict: Verdict) -> bool:
        """Whether what was read ahead comes next, and is worth a handler's time already."""
        whole = len(verdict.gone) == len(read.waiting) == sum(choice.limits)
        return self._prepares and self._onward and self._attempts.quick and whole

    def _prepare(
        self,
        held: Held,
        delivery: Delivery,
        prepared: list[Prepared],
        patient: Callable[[], bool],
    ) -> None:
        """Handle what comes next: events of other queues, so it is the same before and after.

        Not if one fails: that is to be true when it is written down.
        """
        coming = self._replays.coming(held, delivery, patient)
        # Now, when nobody waits for it: a slice of many takes milliseconds to go, and by now
        # PostgreSQL has something to do.
        self._spent = None
        if coming is None or not patient():
            return
        rows, waiting = coming
        handled, failure = self._attempts.handle(held, waiting)
        if failure is not None or handled.parked:
            return
        prepared.append(Prepared(held, rows, waiting, handled, going(waiting)))
        reach("replay-ahead")
        if self._home is not None and patient():
            self._home.foresee(handled)

    def _publish(
        self,
        held: Held,
        choice: Choice,
        read: Read,
        handled: Handled,
        aside: Aside | None,
    ) -> Done:
        assert self._publishing is not None  # noqa: S101 - for the type checker
        new, verdict = self._claim_to_publish(held, handled, read)
        return self._publishing.replay(held, choice, read.waiting, new, verdict, aside)

    def _claim_to_publish(
        self, held: Held, handled: Handled, read: Read
    ) -> tuple[Handled, Verdict]:
        """Fence and claim, and what is to be written down; the transaction stays open."""
        while True:
            try:
                new = self._claim(held, handled, read)
            except Doubtful as doubt:
                # What comes before it goes; the others wait until that is known.
                if not doubt.at:
                    raise
                handled = handled.prefix(doubt.at)
                continue
            verdict = judge(new, read.waiting, {})
            passed = {*verdict.gone}
            stop = cut_at(new, {place for place in range(len(new.events)) if place not in passed})
            if stop is None:
                self._claims.keep_only([*verdict.applied, *verdict.filtered])
                return new, verdict
            self._connection.rollback()
            handled = handled.prefix(stop)

    def _in_order(
        self, read: Read, handled: Handled, failure: Failure | None
    ) -> tuple[Handled, Failure | None]:
        """What comes before the first dead event that would overwrite what overtook it (F9)."""
        dead = dead_places(read.waiting[: len(handled.events)])
        found = guardrail.first_forbidden(self._pipeline, handled.effects, dead)
        if found is None:
            return handled, failure
        place, error = found
        return handled.prefix(place), Failure(handled.events[place], "guardrail", error)

    def _sendable(self, handled: Handled) -> tuple[Handled, Failure | None]:
        """What comes before the first event that publishes what cannot be sent, and why."""
        errors = self._setter.unsendable(handled) if self._home is not None else {}
        if not errors:
            return handled, None
        first = min(errors)
        return handled.prefix(first), errors[first]

    def _look_ahead(self, held: Held, read: Read) -> Ahead:
        """Which messages the events bring: before the handler, where it acts by itself (K7)."""
        count = len(read.waiting)
        if not self._claims.wanted:
            return Ahead(count, "new")
        given = self._given(held, read)
        if not self._in_transaction and not self._calls:
            errors = self._claims.errors(given.events)
            first = min(errors, default=count)
            return Ahead(1, "broken", errors[0]) if first == 0 else Ahead(first, "new")
        self._begin(held, read)
        ahead = self._claims.ahead(held, given, _incarnations(read))
        if self._calls and ahead.what == "new" and ahead.events == count:
            self._connection.commit()
        else:
            # With the transaction it is claimed again, by the one in which the handler runs.
            self._connection.rollback()
        return ahead

    def _given(self, held: Held, read: Read) -> Handled:
        at, events = held.next_offset, [one.event for one in read.waiting]
        return Handled(at, at, events, [NOTHING] * len(events))

    def _fail_first(  # noqa: PLR0913, PLR0917 - what a slice of a replay depends on
        self,
        held: Held,
        choice: Choice,
        read: Read,
        failure: Failure,
        aside: Aside | None,
        step: Step,
    ) -> Step:
        """The first event fails without its effects: whose message nobody can name, or send."""
        if self._attempts.again.fate(failure.error) != "parked":
            return step._replace(failure=failure)
        verdict = Verdict([], [], {0: failure})
        done = self._write_down(held, choice, read.waiting, verdict, aside)
        return step._replace(done=done, tried=1)

    def _stops_at(self, new: Handled, written: Written) -> int | None:
        """Where a slice has to end: an event waits, or a message's first event failed."""
        waits = self._first_that_waits(written)
        if waits is not None:
            return waits
        return cut_at(new, {*written.failed, *written.followers, *new.setbacks})

    def _apply_in_transaction(
        self, held: Held, choice: Choice, read: Read, aside: Aside | None, step: Step
    ) -> Step:
        assert self._home is not None  # noqa: S101 - for the type checker
        self._begin(held, read)
        self._attempts.plan(read.waiting)
        before = self._home.transaction_id()
        if self._claims.take(held, self._given(held, read), _incarnations(read)):
            # Somebody applied one of these messages meanwhile.
            self._connection.rollback()
            raise Stale
        events = [one.event for one in read.waiting]
        handled, failure = self._home.run_each(
            held,
            events,
            held.next_offset,
            self._clock,
            aside=NOBODY,
            forced={},
            copies=None,
        )
        reach("replay-handled")
        self._home.same_transaction(before)
        failure = failure or read.failure
        if not handled.events:
            self._connection.rollback()
            return step._replace(failure=failure)
        reach("replay-written")
        verdict = judge(handled, read.waiting, {})
        self._claims.keep_only([*verdict.applied, *verdict.filtered])
        self._setter.publish(held, handled, verdict.applied)
        done = self._replays.settle(held, choice, read.waiting, verdict)
        self._replays.commit(held, done, aside)
        return step._replace(done=done, failure=failure, tried=len(handled.events))

    def _write(self, held: Held, handled: Handled, read: Read) -> tuple[Written, Handled]:
        """Fence, then effects; the transaction stays open, with what failed taken out."""
        home = self._home
        assert home is not None  # noqa: S101 - for the type checker
        if handled.executes:
            new = self._claim(held, handled, read)
            before = home.transaction_id()
            written = home.write(new)
            home.same_transaction(before)
            return written, new
        new = self._claim(held, handled, read)
        try:
            return home.write(new, optimistic=True), new
        except Exception as error:
            if kind_of(error) == "recoverable":
                raise
            self._connection.rollback()
        new = self._claim(held, handled, read)
        return home.write(new), new

    def _claim(self, held: Held, handled: Handled, read: Read) -> Handled:
        """Fence, then claim the messages; what was applied before is taken out (K7)."""
        self._begin(held, read)
        incarnations = _incarnations(read)
        new = handled.taken_out(self._claims.take(held, handled, incarnations))
        known = self._claims.failed(held, handled, incarnations)
        if not known:
            return new
        parked = {place: why for place, why in new.parked.items() if place not in known}
        return new._replace(parked=parked).taken_out(known)

    def _first_that_waits(self, written: Written) -> int | None:
        return min(
            (
                place
                for place, error in written.failed.items()
                if self._attempts.again.fate(error, own=True) in {"waits", "stops"}
            ),
            default=None,
        )

    def _begin(self, held: Held, read: Read) -> None:
        queues = [one.queue for one in read.waiting if one.queue is not None]
        self._replays.begin(held, (one.partition for one in read.waiting), queues)
        if read.keys and self._replays.strangers(held, read.keys):
            self._connection.commit()
            raise Stale

    def _write_down(  # noqa: PLR0913 - what is written down, and of what
        self,
        held: Held,
        choice: Choice,
        waiting: Sequence[Waiting],
        verdict: Verdict,
        aside: Aside | None,
        *,
        called: bool = False,
    ) -> Done:
        queues = [one.queue for one in waiting if one.queue is not None]
        self._replays.begin(held, (one.partition for one in waiting), queues)
        if called:
            left = {*range(len(waiting))} - {*verdict.applied}
            read = Read(list(waiting))
            self._claims.unclaim(held, self._given(held, read), left, _incarnations(read))
        done = self._replays.settle(held, choice, waiting, verdict)
        self._replays.commit(held, done, aside)
        return done

    # Discard and restore

    def _give_up_or_restore(self, held: Held, items: Sequence[Item], aside: Aside | None) -> Done:
        discards = self._replays.discards
        found = discards.read(held, items)
        reach("replay-read")
        queues = [queue for one in found if (queue := one.queue or one.former_queue) is not None]
        discards.begin(held, (one.partition for one in found), queues)
        act = discards.give_up if items[0].kind == "discard" else discards.restore
        done = act(held, items, found)
        reach("replay-written")
        discards.commit(held, done, aside)
        return done


def _incarnations(read: Read) -> list[int]:
    return [one.incarnation for one in read.waiting]


def _called(handled: Handled, read: Read) -> Verdict:
    """One that returned nothing was called all the same, so it is applied."""
    verdict = judge(handled, read.waiting, {})
    applied = sorted([*verdict.applied, *verdict.filtered])
    return Verdict(applied, [], verdict.failed, verdict.duplicates)
