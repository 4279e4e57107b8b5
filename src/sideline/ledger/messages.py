"""Messages that were applied: the slice's part of the ledger against duplicates (C4, K7).

A row is an id, and the event that brought it: topic, partition, offset, and how often the topic
had been made again. A row with the event's own origin is no duplicate: the event is tried, applied
or released once more.

How a home uses it: right after its fence, before anything is staged, inside the transaction that
makes the slice true, ``claim`` the ids of all events that will be applied or filtered, and take
out those that it returns. What is parked afterwards is given back with ``unclaim``, in the same
transaction, unless it was there before. A home whose effects are committed elsewhere (Kafka) claims
in the transaction that writes down what is pending, and its ids go with it if it is dropped. Until
it is applied or dropped they say nothing: who brings the same message waits (`InDoubt`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

from sideline import arrays
from sideline.ledger.sql import queries
from sideline.ledger.store import Stale

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# An id that is neither stored nor there was cleaned in between: it is claimed once more.
CLAIMS = 3
_UUID, _UUIDS = 2950, 2951
_INT8, _INT8S = 20, 1016
_ID_LENGTH = struct.pack("!i", 16)
_NUMBER_LENGTH = struct.pack("!i", 8)


class Origin(NamedTuple):
    """The event that brings a message."""

    topic: str
    partition: int
    offset: int
    incarnation: int = 0


class Brought(NamedTuple):
    """A message and the event that brings it."""

    id: bytes
    origin: Origin


class Claimed(NamedTuple):
    """What became of ids, by their place among those that were claimed."""

    duplicates: frozenset[int]
    """Stored by another event: these are not to be applied."""
    before: frozenset[int]
    """Stored by the event itself, earlier."""


NEW = Claimed(frozenset(), frozenset())


class InDoubt(Exception):  # noqa: N818 - a fact, not an error
    """A message is in a slice of which it is not known whether it was published."""

    def __init__(self, place: int) -> None:
        super().__init__(
            "its message is in another slice too, and whether that was published is not known yet"
        )
        self.place = place
        """The first event that brings such a message, by its place."""


class Messages:
    """The messages of one pipeline, through one connection."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._number: int | None = None

    @property
    def number(self) -> int:
        """What stands for the pipeline's name; asked for once."""
        if self._number is None:
            row = self._connection.execute(
                queries()["pipeline_number"], {"pipeline": self._pipeline}
            ).fetchone()
            self._number = row[0] if row else -1
        return self._number

    def store(self, ids: Sequence[bytes], offsets: Sequence[int], spot: Origin) -> bool:
        """Store ids of one partition of which all are new; False: one was not.

        The transaction is of no use then: it has to be rolled back.
        """
        try:
            self._connection.execute(
                queries()["store_ids"], self.arguments(ids, offsets, spot), prepare=True
            )
        except psycopg.errors.UniqueViolation:
            return False
        return True

    def arguments(
        self, ids: Sequence[bytes], offsets: Sequence[int], spot: Origin
    ) -> dict[str, Any]:
        """What the statements that store ids of one partition take."""
        return {
            "ids": _packed(ids),
            "id_offsets": _numbers(offsets),
            "number": self.number,
            "id_partition": spot.partition,
            "incarnation": spot.incarnation,
            "id_topic": spot.topic,
        }

    def claim(self, brought: Sequence[Brought]) -> Claimed:
        """Store ids, each of them named once; which of them other events have stored."""
        duplicates: set[int] = set()
        before: set[int] = set()
        left = list(range(len(brought)))
        for _ in range(CLAIMS):
            some = [brought[place] for place in left]
            rows = self._connection.execute(queries()["claim_ids"], self._columns(some)).fetchall()
            left = [left[number] for (number,) in rows]
            if not left:
                return Claimed(frozenset(duplicates), frozenset(before))
            # In a statement of its own: what others committed meanwhile is seen only now.
            try:
                known = self.known([brought[place] for place in left])
            except InDoubt as doubt:
                raise InDoubt(left[doubt.place]) from None
            for number, own in known.items():
                (before if own else duplicates).add(left[number])
            left = [place for place in left if place not in duplicates and place not in before]
            if not left:
                return Claimed(frozenset(duplicates), frozenset(before))
        self._connection.rollback()
        raise Stale

    def known(self, brought: Sequence[Brought]) -> dict[int, bool]:
        """Which ids are stored, by place, and whether by the very event that brings them.

        Raises `InDoubt`, with the transaction rolled back, if nobody can say of one.
        """
        if not brought:
            return {}
        rows = self._connection.execute(queries()["whose_ids"], self._columns(brought)).fetchall()
        unsure = [number for number, own, undecided in rows if undecided and not own]
        if unsure:
            self._connection.rollback()
            raise InDoubt(min(unsure))
        return {number: own for number, own, _ in rows}

    def unclaim(self, brought: Iterable[Brought]) -> None:
        """Give ids back that their events stored: they were not applied after all."""
        some = list(brought)
        if some:
            self._connection.execute(queries()["unclaim_ids"], self._columns(some))

    def _columns(self, brought: Sequence[Brought]) -> dict[str, Any]:
        origins = [one.origin for one in brought]
        return {
            "number": self.number,
            "ids": _packed([one.id for one in brought]),
            "offsets": _numbers([origin.offset for origin in origins]),
            "partitions": arrays.numbers([origin.partition for origin in origins]),
            "incarnations": arrays.numbers([origin.incarnation for origin in origins]),
            "topics": arrays.texts([origin.topic for origin in origins]),
        }


# Arrays as PostgreSQL's wire has them: to read them as text takes it as long as to store the rows.


class _Ids(bytes):
    """Many uuids."""


class _Numbers(bytes):
    """Many bigints."""


def _packed(ids: Sequence[bytes]) -> _Ids:
    return _Ids(_head(_UUID, len(ids)) + _elements(_ID_LENGTH, ids))


def _numbers(values: Sequence[int]) -> _Numbers:
    whole = struct.pack(f"!{len(values)}q", *values)
    each = [whole[at : at + 8] for at in range(0, len(whole), 8)]
    return _Numbers(_head(_INT8, len(values)) + _elements(_NUMBER_LENGTH, each))


def _head(kind: int, count: int) -> bytes:
    # Dimensions, whether any is null, the elements' type; how many, and where they begin.
    if not count:
        return struct.pack("!iiI", 0, 0, kind)
    return struct.pack("!iiIii", 1, 0, kind, count, 1)


def _elements(length: bytes, each: Sequence[bytes]) -> bytes:
    return length + length.join(each) if each else b""


class _IdsDumper(Dumper):
    format = Format.BINARY
    oid = _UUIDS

    def dump(self, obj: _Ids) -> Buffer | None:
        return bytes(obj)


class _NumbersDumper(Dumper):
    format = Format.BINARY
    oid = _INT8S

    def dump(self, obj: _Numbers) -> Buffer | None:
        return bytes(obj)


psycopg.adapters.register_dumper(_Ids, _IdsDumper)
psycopg.adapters.register_dumper(_Numbers, _NumbersDumper)
