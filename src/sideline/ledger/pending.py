"""What a slice changes in the ledger once Kafka has committed it: written first, applied after.

Everything here is fenced by lease and owner. A slice's number is drawn with its pending changes
and never again. The events that it sets aside stand in the ledger already, as `pending`: they have
their places, and nobody overtakes them (K18, K21).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from psycopg.pq import TransactionStatus

from sideline import arrays
from sideline.errors import FencedError
from sideline.homes.numbers import Books
from sideline.leaving import Plain, Record
from sideline.ledger.operating import Done
from sideline.ledger.sql import queries
from sideline.ledger.store import Stale, moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sideline.homes.transactions import Sent
    from sideline.ledger.connection import Connection
    from sideline.ledger.copying import Copying
    from sideline.ledger.parking import Parking
    from sideline.ledger.replay import Replays
    from sideline.ledger.store import Claim, Held
    from sideline.slices import Aside, Outcome

_BY_PLACE = "ctid = %(ctid)s::tid\n  and "


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pending changes of one slice."""

    start: int
    end: int
    consumed: int = 0
    applied: int = 0
    filtered: int = 0
    skipped: int = 0
    parked: int = 0
    retrying: int = 0
    dead: int = 0
    duplicate: int = 0
    copies: int = 0
    event_ms: int = -1
    guard: list[int] | None = None
    events: bool = False
    """Whether rows of events are named by it."""
    causes: list[tuple[str, int, str, int, int, int, int]] = []
    """By what the causes were raised: topic, partition, fingerprint; parked, skipped, retried,
    dead."""
    settlement: dict[str, list[Any]] | None = None
    """Of a retry topic: what becomes of the events whose turn it was."""
    replay: dict[str, Any] | None = None
    """Of a replay: what becomes of the events that came back; see `Replays.noted`."""


class Drawn(NamedTuple):
    """A slice whose number is drawn; it holds once its transaction is committed."""

    ctid: str
    number: int
    aside: int
    aside_version: int
    text: str

    def keep(self, held: Held) -> None:
        """It is committed."""
        held.ctid, held.slice_number, held.pending = self.ctid, self.number, self.text
        held.aside, held.aside_version = self.aside, self.aside_version


class Pendings:
    """The pending changes of partitions that a lease owns, through one connection."""

    def __init__(
        self,
        connection: Connection,
        claim: Claim,
        parking: Parking,
        copying: Copying,
        replays: Replays,
    ) -> None:
        self._connection = connection
        self._claim = claim
        self._parking = parking
        self._copying = copying
        self._replays = replays

    def look(self, held: Held) -> Books:
        """What the progress row says, while it is ours; FencedError otherwise."""
        row = self._connection.execute(queries()["look_pending"], self._names(held)).fetchone()
        self._connection.commit()
        if row is None:
            raise _fenced(held)
        held.next_offset, held.ctid, held.slice_number, held.applied_number = row[:4]
        held.pending, held.aside, held.aside_version = row[4:7]
        changes = changes_of(held)
        return Books(
            held.mark,
            held.next_offset,
            held.slice_number,
            held.applied_number,
            None if changes is None else (changes.start, changes.end),
        )

    # Before Kafka

    def write(self, held: Held, changes: Changes, *, aside: int = 0) -> Drawn:
        """Draw the slice's number and write down what it changes; the transaction stays open."""
        return self._pend(held, changes, aside=aside)

    def write_at_once(
        self, held: Held, changes: Changes, ids: Mapping[str, Any] | None = None
    ) -> None:
        """The same for a slice in which nothing failed: one statement, committed.

        ``ids``: the message ids that it stores; one that is there already refuses all of it.
        """
        connection = self._connection
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.rollback()
        connection.autocommit = True
        try:
            drawn = self._pend(held, changes, ids=ids)
        finally:
            if not (connection.broken or connection.closed):
                connection.autocommit = False
        drawn.keep(held)

    def _pend(
        self,
        held: Held,
        changes: Changes,
        *,
        aside: int = 0,
        ids: Mapping[str, Any] | None = None,
    ) -> Drawn:
        text = msgspec.json.encode(changes).decode()
        names = self._names(held) | {
            "ctid": held.ctid,
            "pending": text,
            "aside": aside,
            "start": held.next_offset,
            "shared": held.shared,
        }
        row = self._execute(_pend_text(stores=ids is not None), names | dict(ids or {}))
        if row is None:
            raise self._refusal(held)
        return Drawn._make([*row, text])

    def note_causes(self, held: Held, changes: Changes, drawn: Drawn) -> Drawn:
        """In the same transaction, once it is known why events failed."""
        counted, self._parking.counted = self._parking.counted, []
        text = msgspec.json.encode(
            msgspec.structs.replace(changes, events=True, causes=counted)
        ).decode()
        names = self._names(held) | {"pending": text}
        row = self._connection.execute(queries()["note_pending"], names).fetchone()
        if row is None:
            raise self._refusal(held)
        return drawn._replace(ctid=row[0], text=text)

    def _refusal(self, held: Held) -> Exception:
        """Somebody else's row, or one whose topic grew."""
        self._connection.rollback()
        row = self._connection.execute(queries()["look_pending"], self._names(held)).fetchone()
        self._connection.rollback()
        if row is None or not row[7] or held.shared:
            return _fenced(held)
        held.shared = True
        return Stale()

    # After it

    def apply(
        self,
        held: Held,
        sent: Mapping[tuple[str, int, int], Sent] | None = None,
        aside: Aside | None = None,
    ) -> Done:
        """Kafka has committed the slice; what a replay came to.

        ``sent``: where it put the copies of events whose bytes are kept nowhere else.
        """
        changes = changes_of(held)
        if changes is None:
            return Done()
        if changes.replay is not None:
            return self._apply_replay(held, changes, changes.replay, aside)
        if not changes.events:
            self._apply_at_once(held, changes)
            return Done()
        ctid, end = self._move(held, changes)
        if changes.settlement is not None:
            self._copying.hold(changes.settlement)
        self._connection.execute(queries()["lift_pending"], self._names(held))
        if changes.settlement is not None:
            self._copying.settle_as(changes.settlement)
        if sent:
            self._place(sent)
        self._connection.commit()
        self._applied(held, ctid, end)
        return Done()

    def _apply_at_once(self, held: Held, changes: Changes) -> None:
        connection = self._connection
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.rollback()
        connection.autocommit = True
        try:
            ctid, end = self._move(held, changes)
        finally:
            if not (connection.broken or connection.closed):
                connection.autocommit = False
        self._applied(held, ctid, end)

    def _apply_replay(
        self, held: Held, changes: Changes, note: Mapping[str, Any], aside: Aside | None
    ) -> Done:
        met = self._replays.begin_noted(held, note)
        self._move(held, changes)
        self._connection.execute(queries()["lift_pending"], self._names(held))
        done = self._replays.settle_noted(held, note, met, aside)
        held.applied_number, held.pending = held.slice_number, None
        return done

    def _move(self, held: Held, changes: Changes) -> tuple[str, int]:
        names = self._names(held) | {
            "ctid": held.ctid,
            "number": held.slice_number,
            "before": held.applied_number,
            "moves": changes.replay is None,
            "event_at": moment(changes.event_ms),
            "guard": changes.guard,
            **{
                name: getattr(changes, name)
                for name in (
                    "start", "end", "consumed", "applied", "filtered", "skipped", "parked",
                    "retrying", "dead", "duplicate", "copies",
                )
            },
        }  # fmt: skip
        row = self._execute(queries()["apply_pending"], names)
        if row is None:
            self._connection.rollback()
            raise _fenced(held)
        return row[0], row[1]

    def _applied(self, held: Held, ctid: str, end: int) -> None:
        held.ctid, held.next_offset = ctid, end
        held.applied_number, held.pending = held.slice_number, None

    def _place(self, sent: Mapping[tuple[str, int, int], Sent]) -> None:
        self._connection.execute(
            queries()["place_sent"],
            {
                "pipeline": self._claim.pipeline,
                "topics": [topic for topic, _, _ in sent],
                "partitions": [partition for _, partition, _ in sent],
                "offsets": [offset for _, _, offset in sent],
                "copy_partitions": [one.partition for one in sent.values()],
                "copy_offsets": [one.offset for one in sent.values()],
            },
        )

    def drop(self, held: Held) -> None:
        """Kafka has not committed the slice, and never will: nothing of it stays."""
        changes = changes_of(held)
        if changes is None:
            return
        names = self._names(held)
        numbers = {"number": held.slice_number, "before": held.applied_number}
        if self._connection.execute(queries()["drop_pending"], names | numbers).fetchone() is None:
            self._connection.rollback()
            raise _fenced(held)
        self._connection.execute(queries()["drop_claims"], names)
        if changes.events:
            if held.shared:
                self._connection.execute(queries()["claim_topic"], names)
            fresh = self._connection.execute(queries()["drop_fresh"], names).fetchall()
            self._connection.execute(queries()["lift_pending"], names)
            self._shrink(held, Counter(queue for (queue,) in fresh if queue is not None))
        if changes.causes:
            self._uncount(changes.causes)
        self._connection.commit()
        held.pending = None
        # Keys that had stepped aside with it are back.
        self.look(held)

    def _shrink(self, held: Held, less: Counter[int]) -> None:
        if not less:
            return
        names = {
            "queues": arrays.numbers(sorted(less)),
            "events": arrays.numbers([less[queue] for queue in sorted(less)]),
            "passed": arrays.numbers([0] * len(less)),
        }
        left = self._connection.execute(queries()["shrink"], names).fetchall()
        empty = sorted(queue for queue, events in left if not events)
        if not empty:
            return
        ended = {"queues": arrays.numbers(empty), "events": arrays.numbers([0] * len(empty))}
        homes = self._connection.execute(queries()["homes_of_queues"], ended).fetchall()
        self._connection.execute(queries()["end_queues"], ended)
        for home, queues in homes:
            self._connection.execute(
                queries()["fewer_aside"], self._names(held) | {"partition": home, "queues": queues}
            )
        if held.shared:
            self._connection.execute(queries()["move_topic"], self._names(held))

    def _uncount(self, causes: Iterable[tuple[str, int, str, int, int, int, int]]) -> None:
        columns = [list(column) for column in zip(*causes, strict=True)]
        names = ("topics", "partitions", "fingerprints", "parked", "skipped", "retried", "dead")
        self._connection.execute(
            queries()["uncount_dropped"],
            {"pipeline": self._claim.pipeline, **dict(zip(names, columns, strict=True))},
        )

    def _execute(self, text: str, names: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a row
        """By the row's last place, or by its key where it has moved (K6)."""
        row = self._connection.execute(text, names, prepare=True).fetchone()
        if row is not None:
            return row
        by_key = text.replace(_BY_PLACE, "", 1)
        return self._connection.execute(by_key, names, prepare=True).fetchone()

    def _names(self, held: Held) -> dict[str, Any]:
        return {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
        }


def _pend_text(*, stores: bool) -> str:
    """The statement that draws a slice's number; with its message ids, if it stores some."""
    text = queries()["pend"]
    if not stores:
        return text
    claimed = queries()["store_ids_at_once"]
    return f"with fence as (\n{text}\n),\nclaimed as (\n{claimed}\n)\nselect * from fence"


def changes_of(held: Held) -> Changes | None:
    """What the partition's last slice changes, while it is neither applied nor dropped."""
    if held.pending is None:
        return None
    return msgspec.json.decode(held.pending, type=Changes)


def forward(held: Held, counts: Outcome) -> Changes:
    """The changes of a live slice, as far as they are counted."""
    return Changes(
        held.next_offset,
        counts.end,
        counts.consumed,
        counts.applied,
        counts.filtered,
        counts.skipped,
        counts.parked,
        counts.retrying,
        counts.dead,
        counts.duplicate,
        counts.copies,
        counts.event_ms,
        counts.guard,
    )


def spots(
    records: Sequence[Plain | Record], sent: Mapping[int, Sent]
) -> dict[tuple[str, int, int], Sent]:
    """Where Kafka put the copies of events, by where the events came from."""
    asked = {place: records[place] for place in sent}
    return {
        record.of: sent[place]
        for place, record in asked.items()
        if isinstance(record, Record) and record.of is not None
    }


def _fenced(held: Held) -> FencedError:
    return FencedError(f"partition {held.partition} has another owner now.")
