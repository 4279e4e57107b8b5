"""Records that leave for Kafka after COMMIT: written by slices, read and marked by the owner.

Whoever writes them holds the progress row of their partition, in the transaction that makes them
true. Whoever sends them owns the partition. They are sent and marked as a prefix only (K24).

A record is a row with bytes of its own, or one of many that a row refers to: copies of events whose
rows in the ledger say all that the copies have to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sideline import arrays
from sideline.errors import FencedError
from sideline.events import Event
from sideline.leaving import Record, copy_of
from sideline.ledger.connection import ask_alone
from sideline.ledger.sql import queries
from sideline.topics import headers

if TYPE_CHECKING:
    from sideline.engine.lease import Partition
    from sideline.leaving import State
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Claim, Held
    from sideline.policies import Dialect

# Records of one transaction of Kafka: many, because it costs as much as a thousand of them.
MOST_RECORDS = 10_000
MOST_BYTES = 8 * 1024 * 1024
# What a lease remembers of one partition's records: a whole slice of copies, and what may be unsent
# before it. Whatever does not fit is read again, at several times the price.
MOST_REMEMBERED = 40_000
REMEMBERED_BYTES = 16 * 1024 * 1024
# Copies that one row refers to.
LARGEST_ROW = 2_000


class Numbered(NamedTuple):
    """A record with its number, and the time at which it was written: together they are unique."""

    number: int
    stamp: int
    record: Record


class Ready:
    """Records that this lease wrote itself, committed: it need not read them to send them."""

    def __init__(self) -> None:
        self._written: list[Numbered] = []
        """In the open transaction."""
        self._ready: deque[Numbered] = deque()
        self._bytes = 0

    @property
    def before(self) -> int | None:
        """The last number before those that are here; None: there are none."""
        return self._ready[0].number - 1 if self._ready else None

    def write(self, first: int, stamp: int, records: Sequence[Record]) -> None:
        """Remember what the open transaction writes."""
        self._written += [Numbered(first + n, stamp, one) for n, one in enumerate(records)]

    def forget(self) -> None:
        """Whatever was written was not committed, or nobody knows."""
        self._written.clear()

    def commit(self) -> None:
        """What was written is there to be sent."""
        written, self._written = self._written, []
        if not written:
            return
        joined = not self._ready or written[0].number == self._ready[-1].number + 1
        self._ready.extend(written)
        self._bytes += sum(len(one.record.value or b"") for one in written)
        if not joined or self._bytes > REMEMBERED_BYTES or len(self._ready) > MOST_REMEMBERED:
            # They are read again when it is their turn.
            self._ready.clear()
            self._bytes = 0

    def take(self, sent: int, until: int | None) -> list[Numbered]:
        """The next records behind the last one sent, if they are here, for one transaction."""
        ready = self._ready
        while ready and ready[0].number <= sent:
            self._bytes -= len(ready.popleft().record.value or b"")
        if not ready or ready[0].number != sent + 1:
            return []
        most = min(MOST_RECORDS, len(ready), MOST_RECORDS if until is None else until - sent)
        return _within(MOST_BYTES, islice(ready, most))


def _within(most: int, records: Iterable[Numbered]) -> list[Numbered]:
    """As many of the records as have no more bytes than that, and one at least."""
    found: list[Numbered] = []
    for one in records:
        most -= len(one.record.value or b"")
        if most < 0 and found:
            break
        found.append(one)
    return found


class Written(NamedTuple):
    """Where records stand in an outbox, once the transaction is committed."""

    last: int
    """The last one's number."""
    place: str
    """The progress row's new place."""
    stamp: int
    """When they were written."""


def put(
    connection: Connection, pipeline: str, spot: Partition, records: Sequence[Record]
) -> Written:
    """Write records in the open transaction, in the order in which they are to be sent."""
    named = {"pipeline": pipeline, "topic": spot.topic, "partition": spot.number}
    ((last, place, stamp),) = connection.execute(
        queries()["number_outbox"], named | {"count": len(records)}
    ).fetchall()
    number = last - len(records) + 1
    for refers, group in groupby(records, _reference):
        some = list(group)
        if refers is None:
            connection.execute(queries()["put_outbox"], named | _rows(some, number))
        else:
            for row in _references(some, number):
                connection.execute(queries()["refer_outbox"], named | row)
        number += len(some)
    return Written(int(last), str(place), int(stamp))


def _reference(record: Record) -> tuple[str, int | None, str, str] | None:
    """What the records of one referring row have in common; None: it has to be a row itself."""
    if record.kept is None or record.of is None:
        return None
    return record.topic, record.partition, record.kept.state, record.of[0]


def _rows(records: Sequence[Record], first: int) -> dict[str, Any]:
    origins = [record.of or (None, None, None) for record in records]
    return {
        "numbers": arrays.numbers(range(first, first + len(records))),
        "to_topics": arrays.texts([record.topic for record in records]),
        "to_partitions": arrays.numbers([record.partition for record in records]),
        "keys": arrays.blobs([record.key for record in records]),
        "values": arrays.blobs([record.value for record in records]),
        "header_names": arrays.texts([arrays.header_names(one.headers) for one in records]),
        "header_values": arrays.texts([arrays.header_values(one.headers) for one in records]),
        "timestamps": arrays.numbers([record.timestamp_ms for record in records]),
        "of_topics": arrays.texts([topic for topic, _, _ in origins]),
        "of_partitions": arrays.numbers([number for _, number, _ in origins]),
        "of_offsets": arrays.numbers([offset for _, _, offset in origins]),
    }


def _references(records: Sequence[Record], first: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(records), LARGEST_ROW):
        some = records[start : start + LARGEST_ROW]
        topic, partition, state, source = _reference(some[0]) or ("", None, "", "")
        yield {
            "number": first + start,
            "to_topic": topic,
            "to_partition": partition,
            "records": len(some),
            "copies_as": state,
            "copies_topic": source,
            "copies_partitions": arrays.numbers([one.of[1] for one in some if one.of]),
            "copies_offsets": arrays.numbers([one.of[2] for one in some if one.of]),
            "copies_incarnations": arrays.numbers(
                [one.kept.incarnation for one in some if one.kept]
            ),
        }


class Outbox:
    """The outbox of partitions that a lease owns."""

    def __init__(
        self, connection: Connection, claim: Claim, *, dialect: Dialect | None = None
    ) -> None:
        self._connection = connection
        self._claim = claim
        self._dialect = dialect
        """In which dead letters speak."""

    def check(self, held: Held) -> None:
        """FencedError if the partition has another owner now."""
        if not ask_alone(self._connection, queries()["owns_partition"], self._names(held)):
            raise _fenced(held)

    def read(self, held: Held, *, until: int | None = None) -> list[Numbered]:
        """The next records, oldest first; ``until`` names the last one that is wanted."""
        wanted = {
            "limit": MOST_RECORDS,
            "bytes": MOST_BYTES,
            "until": until,
            "largest": LARGEST_ROW,
        }
        rows = self._connection.execute(
            queries()["read_outbox"], self._names(held) | wanted
        ).fetchall()
        found = [*self._numbered(held, rows, until)] if rows and rows[0][0] is not None else []
        self._connection.commit()
        if not rows:
            raise _fenced(held)
        return found

    def _numbered(
        self, held: Held, rows: Sequence[Sequence[Any]], until: int | None
    ) -> Iterator[Numbered]:
        """The records of rows, no more than a transaction of Kafka takes."""
        room, left = MOST_BYTES, MOST_RECORDS
        for number, stamp, records, topic, partition, *record, copies_as, sent in rows:
            if copies_as is None:
                key, value, names, values, timestamp_ms = record
                some = tuple(zip(names, values, strict=True))
                yield Numbered(
                    number, stamp, Record(topic, key, value, some, partition, timestamp_ms)
                )
                room, left = room - len(value or b""), left - 1
                continue
            first = max(number, sent + 1)
            last = min(number + records - 1, until or number + records, first + left - 1)
            copies = self._copies(held, number, (first, last), topic, copies_as)
            for place, copy in copies:
                if room <= 0:
                    return
                yield Numbered(place, stamp, structs.replace(copy, partition=partition))
                room, left = room - len(copy.value or b""), left - 1
            if room <= 0 or left <= 0:
                return

    def _copies(
        self, held: Held, row: int, numbers: tuple[int, int], topic: str, state: State
    ) -> Iterator[tuple[int, Record]]:
        """Copies that a row refers to, made from what the ledger says of their events."""
        first, last = numbers
        places = {"number": row, "first": first - row + 1, "last": last - row + 1}
        found = self._connection.execute(
            queries()["read_references"], self._names(held) | places
        ).fetchall()
        for place, *told, before in found:
            if before >= MOST_BYTES:
                return
            yield row + place - 1, self._copy(topic, state, told)

    def _copy(self, to: str, state: State, told: Sequence[Any]) -> Record:
        topic, partition, offset, incarnation, gone, timestamp_ms, key, value, *rest = told
        if gone:
            # Without a value it says that there is nothing more. With a key: compacted topics take
            # no record that has none, and nothing overtakes what is refused.
            origin = headers.origin_id(topic, partition, offset, incarnation).encode()
            return Record(to, origin, None)
        names, values, attempts, first_ms, due_ms, error, message, stage, traceback = rest
        own = tuple(zip(names, values, strict=True))
        event = Event(topic, partition, offset, timestamp_ms, key, value, own)
        letter = headers.letter_of(
            event,
            group=self._claim.pipeline,
            attempt=attempts,
            first_failure_ms=first_ms,
            error=error or "",
            message=message or "",
            stage=stage or "",
            traceback=traceback or "",
            due_ms=due_ms if state == "retrying" else None,
            incarnation=incarnation,
        )
        return copy_of(to, event, state, letter, self._dialect if state == "dead" else None)

    def mark(
        self,
        held: Held,
        number: int,
        places: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> bool:
        """Kafka has everything up to this number; False: the outbox has no such number.

        ``places``: partition and offset of records whose events are kept nowhere else.
        """
        if places:
            self._connection.execute(
                queries()["place_copies"],
                self._names(held)
                | {
                    "numbers": list(places),
                    "partitions": [partition for partition, _ in places.values()],
                    "offsets": [offset for _, offset in places.values()],
                },
            )
        # With them it is one transaction, which this ends.
        marked = ask_alone(
            self._connection,
            queries()["mark_outbox"],
            self._names(held) | {"number": number, "news": bool(places)},
        )
        if not marked:
            self.check(held)
            return False
        held.ctid, held.outbox_sent, held.outbox_last = marked[0]
        return True

    def knows(self, held: Held, number: int, stamp: int) -> bool:
        """Whether this number was sent from this outbox, and is not marked yet."""
        if not held.outbox_sent < number <= held.outbox_last:
            return False
        ((known,),) = ask_alone(
            self._connection,
            queries()["known_outbox"],
            self._names(held) | {"number": number, "stamp": stamp, "largest": LARGEST_ROW},
        )
        return bool(known)

    def trouble(self, held: Held, trouble: str | None) -> None:
        """Say why the next record waits."""
        row = self._connection.execute(
            queries()["trouble_outbox"], self._names(held) | {"trouble": trouble}
        ).fetchone()
        self._connection.commit()
        if row is None:
            raise _fenced(held)
        held.ctid = row[0]

    def _names(self, held: Held) -> dict[str, Any]:
        return {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
        }


def _fenced(held: Held) -> FencedError:
    return FencedError(f"partition {held.partition} has another owner now.")
