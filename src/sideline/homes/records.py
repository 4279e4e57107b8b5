"""The Kafka home without transactions: records may come twice, or get lost, as was declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from sideline.crashpoints import reach
from sideline.homes.duplicates import Conflict, Cut
from sideline.homes.kafka import KafkaHome, records_of
from sideline.homes.transactions import PRODUCER, Unsent
from sideline.leaving import Plain, Record
from sideline.ledger.store import Held, Move
from sideline.slices import Aside, Handled, Outcome
from sideline.topics.refusals import culprits, refused

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.ledger.operating import Done
    from sideline.replays import Choice, Verdict, Waiting

FLUSH_SECONDS = 15.0
_NOT_OURS = ("transaction.timeout.ms",)


class Outlet:
    """A worker's plain producer: idempotent, acknowledged by all."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        own = {name: value for name, value in PRODUCER.items() if name not in _NOT_OURS}
        # Who is told of every record that went well does little else.
        self._settings = {**kafka, **own, "delivery.report.only.error": True}
        self._producer: Producer | None = None
        self._one_by_one = False
        """Whether each record is a batch: one of the last ones was refused as a whole."""

    def send(self, records: Sequence[Plain | Record]) -> None:
        """Send records and wait until Kafka has them; `Unsent` where it may not have them all."""
        producer = self._producer = self._producer or self._made()
        failed: dict[int, KafkaError] = {}

        def told(place: int, error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed[place] = error

        for place, made in enumerate(records):
            record = made.record if isinstance(made, Plain) else made
            more: dict[str, Any] = {"on_delivery": partial(told, place)}
            if record.partition is not None:
                more["partition"] = record.partition
            if record.timestamp_ms is not None:
                more["timestamp"] = record.timestamp_ms
            try:
                _produce(producer, record, more)
            except KafkaException as error:
                failed[place] = error.args[0]
                break
        left = producer.flush(FLUSH_SECONDS)
        if left or failed:
            # The next one has nothing of it under way, and no error that would stay.
            producer.purge()
            self._producer = None
            raise self._unsent(failed, left)
        if self._one_by_one:
            self._one_by_one, self._producer = False, None

    def _made(self) -> Producer:
        own = {"batch.num.messages": 1} if self._one_by_one else {}
        return Producer({**self._settings, **own})

    def _unsent(self, failed: Mapping[int, KafkaError], left: int) -> Unsent:
        if blamed := culprits(failed, alone=self._one_by_one):
            return Unsent(next(iter(blamed.values())), blamed)
        if some := refused(failed):
            # Which one of a batch it is shows where each of them is one.
            self._one_by_one = True
            return Unsent(f"a batch was refused: {next(iter(some.values())).str()}")
        if failed:
            return Unsent(failed[min(failed)].str())
        return Unsent(f"{left:,} records are not acknowledged")


def _produce(producer: Producer, record: Record, more: Mapping[str, Any]) -> None:
    while True:
        try:
            producer.produce(
                record.topic, record.value, record.key, headers=list(record.headers), **more
            )
        except BufferError:
            producer.poll(0.1)
        else:
            return


class RecordsHome(KafkaHome):
    """Sends inside the ledger's own transaction, which is committed after Kafka has answered."""

    outlet: Outlet
    _left = False
    """Whether records of the last slice may have left."""

    def taken(self, held: Held) -> None:
        """Nothing is kept of partitions between leases."""

    def resolve(self, held: Held) -> None:
        """Only what this pipeline left open when it still was exactly-once."""
        if held.pending is not None:
            self._transactor(held.partition).drop()
            super().resolve(held)

    def refresh(self, held: Held) -> None:
        """It has no offsets in Kafka that would be the truth."""

    def commit(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """At least once: the records first, then progress and failures."""
        handled, early = self._setter.look_over(held, handled, self._claims)
        handled, failure = self._setter.guard(held, handled)
        try:
            counts = self._publish(held, handled, aside, partial(Move.forward, held))
        except Cut as cut:
            self._connection.rollback()
            return self.commit(held, cut.shorter, aside)
        self._forgive(handled.events)
        return counts._replace(failure=failure or early)

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """At most once: progress first; until the records are sent, nobody knows about these."""
        move = Move.unsure(held, events, end)
        self._finish(held, move, self._ledger.advance(held, move))

    def finish_unsure(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """At most once: the records, behind a check of lease and owner.

        Raises `Unsent` once some of them may have left: then they are not sent again.
        """
        # Progress has passed the events already: there is no second slice for them.
        stays = handled._replace(end=held.next_offset)
        stays, _ = self._setter.look_over(held, stays, self._claims)
        self._left = False
        try:
            return self._publish(held, stays, aside, partial(Move.sure, held), cuts=False)
        except psycopg.Error as error:
            if not self._left or self._connection.broken or self._connection.closed:
                raise
            self._connection.rollback()
            message = f"the records were sent, and PostgreSQL refused to say so: {error}"
            raise Unsent(message.strip()) from error

    def _publish(
        self,
        held: Held,
        handled: Handled,
        aside: Aside,
        moving: Callable[[Outcome], Move],
        *,
        cuts: bool = True,
    ) -> Outcome:
        copying = self._setter.copying
        copying.gathered = []
        ctid, handled, counts = self._fence(held, handled, aside, moving, cuts=cuts)
        ctid = self._setter.write(held, handled, aside) or ctid
        # At most once, nothing of them is sent again: nobody has to be blamed.
        places = range(len(handled.events)) if cuts else ()
        self._send_out([*records_of(handled), *copying.gathered], handled, places)
        self._finish(held, moving(counts), ctid)
        self._setter.settle(held, handled, aside, counts)
        return counts

    def _fence(
        self,
        held: Held,
        handled: Handled,
        aside: Aside,
        moving: Callable[[Outcome], Move],
        *,
        cuts: bool,
    ) -> tuple[str, Handled, Outcome]:
        """Fence and claim; progress moves once it is known which events are duplicates (K7)."""
        if not self._claims.wanted:
            counts = self._setter.account(held, handled, aside)
            ctid = self._ledger.advance(held, moving(counts))
            self._setter.hold(held, handled, aside)
            return ctid, handled, counts
        while True:
            ctid = self._ledger.advance(held, Move.stay(held))
            self._setter.hold(held, handled, aside)
            try:
                new = self._claims.take_out(held, handled, cuts=cuts)
            except Conflict:
                self._connection.rollback()
                continue
            counts = self._setter.account(held, new, aside)
            at = dataclasses.replace(held, ctid=ctid)
            return self._ledger.advance(at, moving(counts)), new, counts

    def _send_out(
        self, records: Sequence[Plain | Record], handled: Handled, places: Iterable[int]
    ) -> None:
        self._left = True
        try:
            self.outlet.send(records)
        except Unsent as unsent:
            self._connection.rollback()
            self._blame(handled, places, unsent)
            raise
        reach("between-effects-and-progress")

    def _finish(self, held: Held, move: Move, ctid: str) -> None:
        self._connection.commit()
        reach("after-commit")
        held.ctid, held.next_offset = ctid, move.end

    def replay(  # noqa: PLR0913, PLR0917 - what a slice of a replay depends on
        self,
        held: Held,
        choice: Choice,
        waiting: Sequence[Waiting],
        handled: Handled,
        verdict: Verdict,
        aside: Aside | None,
    ) -> Done:
        """Events that waited: the records first, then their states."""
        done = self._replays.settle(held, choice, waiting, verdict)
        self._send_out(records_of(handled, verdict.applied), handled, verdict.applied)
        self._replays.commit(held, done, aside)
        self._forgive(handled.events)
        return done
