"""Events that leave as copies, and copies that come back: the slice's part of the ledger.

A copy in a retry topic is no more than a signal that it is an event's turn. What is applied are
the bytes of the ledger's row, and only while that row says `retrying` with the copy's attempt: a
second or a forged copy changes nothing (K7).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sideline import arrays
from sideline.causes import Cause
from sideline.engine.lease import Partition
from sideline.errors import RefusedError
from sideline.events import Event
from sideline.ledger import outbox
from sideline.ledger.connection import ask_alone
from sideline.ledger.parking import EVENTS_PER_STATEMENT, Parking, records
from sideline.ledger.sql import queries
from sideline.slices import NOTHING, Copy
from sideline.topics import headers

if TYPE_CHECKING:
    from sideline.leaving import Leaving, Record
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Held
    from sideline.slices import Failure, Handled

_NUMBERS = frozenset({"partitions", "offsets", "incarnations", "attempts", "delays"})
_CAUSE = ("stage", "error", "message", "traceback", "fingerprint")


class Unclaimed(Exception):  # noqa: N818 - a fact, not an error
    """Of some copies it is no longer their turn: they are taken out of their slice."""

    def __init__(self, places: set[int]) -> None:
        super().__init__(f"{len(places)} copies came too late")
        self.places = places


class Undecided(Exception):  # noqa: N818 - a fact, not an error
    """Whether it is a copy's turn is known once another slice is applied or dropped (K22)."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the copy at offset {offset} comes before its own slice is applied")
        self.offset = offset


class Copying:
    """The copied events of one pipeline, through one connection."""

    def __init__(
        self, connection: Connection, pipeline: str, parking: Parking, *, version: str
    ) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._parking = parking
        self._version = version
        self.gathered: list[Record] | None = None
        """Where copies leave with the slice's own records: those, in place of the outbox."""

    # Leaving

    def keep(self, held: Held, handled: Handled) -> str | None:
        """Keep what failed, count why, and let the copies leave; the progress row's new place."""
        leaving = _leaving(handled)
        places = list(leaving)
        for start in range(0, len(places), EVENTS_PER_STATEMENT):
            some = places[start : start + EVENTS_PER_STATEMENT]
            self._connection.execute(
                queries()["keep_copied"],
                self._names(held.partition)
                | {"incarnation": held.incarnation, "version": self._version}
                | self._parking.pending(held)
                | records([handled.events[place] for place in some])
                | _outcomes([leaving[place] for place in some]),
            )
        self._count(handled, leaving)
        return self._send(held, leaving.values())

    def send(self, held: Held, some: Iterable[Record]) -> str | None:
        """Write records to the outbox; the progress row's new place."""
        sent = list(some)
        if not sent:
            return None
        if self.gathered is not None:
            self.gathered += sent
            return None
        written = outbox.put(self._connection, self._pipeline, held.partition, sent)
        held.outbox_next = written.last
        if all(one.of is None or one.of[:2] == held.partition for one in sent):
            # An erasure that comes now writes its tombstone behind these, so that they may be sent
            # as they are. Copies of other partitions' events are read again.
            held.ready.write(written.last - len(sent) + 1, written.stamp, sent)
        return written.place

    def _send(self, held: Held, leaving: Iterable[Leaving]) -> str | None:
        records = [one.record for one in leaving if one.record is not None]
        # Those of one partition in a row: they need one reference. Within it, log order stays.
        records.sort(key=lambda record: (record.topic, record.partition or 0))
        return self.send(held, records)

    def _count(self, handled: Handled, leaving: dict[int, Leaving]) -> None:
        """Causes are counted where the events came from."""
        origins: dict[tuple[str, int], list[tuple[Cause, str, Event]]] = defaultdict(list)
        for place, one in leaving.items():
            event = handled.events[place]
            origins[event.topic, event.partition].append((one.cause, one.state, event))
        for spot in sorted(origins):
            self._parking.count(Partition(*spot), origins[spot])

    # Coming back

    def find(self, held: Held, events: Sequence[Event]) -> list[tuple[Event, Copy]]:
        """The events whose turn it is by these copies, as they came, in the order of the copies.

        Those that nobody waits for are left out: their progress passes them.
        """
        turns = [headers.turn_of(event.headers) for event in events]
        ours = [place for place, turn in enumerate(turns) if turn is not None]
        asked = [turn for turn in turns if turn is not None]
        rows = ask_alone(
            self._connection,
            queries()["find_copied"],
            {
                "pipeline": self._pipeline,
                "copy_topic": held.partition.topic,
                "topics": arrays.texts([turn.topic for turn in asked]),
                "partitions": arrays.numbers([turn.partition for turn in asked]),
                "offsets": arrays.numbers([turn.offset for turn in asked]),
                "incarnations": arrays.numbers([turn.incarnation for turn in asked]),
                "attempts": arrays.numbers([turn.attempt for turn in asked]),
            },
        )
        found: list[tuple[Event, Copy]] = []
        seen: set[tuple[str, int, int, int]] = set()
        for (
            number,
            incarnation,
            timestamp_ms,
            key,
            value,
            names,
            values,
            first_ms,
            pending,
        ) in sorted(rows, key=lambda row: row[0]):
            turn, copy = asked[number], events[ours[number]]
            if pending:
                raise Undecided(copy.offset)
            if turn[:4] in seen:
                continue
            seen.add(turn[:4])
            event = Event(
                turn.topic,
                turn.partition,
                turn.offset,
                timestamp_ms,
                key,
                value,
                tuple(zip(names, values, strict=True)),
                copy.delivery,
            )
            found.append((event, Copy(copy.offset, turn.attempt, incarnation, first_ms)))
        return found

    def claim(self, held: Held, handled: Handled) -> None:
        """Right after the fence: make sure of every copy, or say which are not the slice's (K7)."""
        if not handled.copies:
            return
        self._hold(map(_spot, handled.events))
        lost = set(range(len(handled.events))) - self._claimed(held, handled.events, handled.copies)
        if lost:
            self._connection.rollback()
            raise Unclaimed(lost)

    def _claimed(self, held: Held, events: Sequence[Event], copies: Sequence[Copy]) -> set[int]:
        """The places of those whose turn it still is; nobody else moves them from here on."""
        rows = self._connection.execute(
            queries()["claim_copied"],
            {"pipeline": self._pipeline, "copy_topic": held.partition.topic}
            | _literals(_named(events, copies))
            | {"attempts": arrays.numbers([copy.attempt for copy in copies])},
        ).fetchall()
        return {place for (place,) in rows}

    def _hold(self, origins: Iterable[Partition]) -> None:
        spots = sorted(set(origins))
        self._connection.execute(
            queries()["hold_origins"],
            {
                "pipeline": self._pipeline,
                "topics": [spot.topic for spot in spots],
                "partitions": [spot.number for spot in spots],
            },
        )

    def claim_for_good(self, held: Held, found: Sequence[tuple[Event, Copy]]) -> list[int]:
        """Say in the ledger which copy brings each event its turn; the places of those that may.

        A second copy, wherever it stands, comes too late then. The same one may come again: whoever
        claimed may have died.
        """
        events, copies = [event for event, _ in found], [copy for _, copy in found]
        # What is claimed stays where it is until it is said for good.
        self._claimed(held, events, copies)
        rows = self._connection.execute(
            queries()["claim_for_good"],
            {
                "pipeline": self._pipeline,
                "copy_topic": held.partition.topic,
                "copy_partition": held.partition.number,
            }
            | _literals(_named(events, copies))
            | {
                "attempts": arrays.numbers([copy.attempt for copy in copies]),
                "copy_offsets": arrays.numbers([copy.offset for copy in copies]),
            },
        ).fetchall()
        return sorted(place for (place,) in rows)

    def settle(self, held: Held, handled: Handled) -> str | None:
        """What became of the events; their books are kept where they came from."""
        if not handled.copies:
            return None
        self.settle_as(self.settlement(handled))
        leaving = _leaving(handled)
        self._count(handled, leaving)
        return self._send(held, leaving.values())

    def settlement(self, handled: Handled) -> dict[str, list[Any]]:
        """The same as values that can be written down: one entry an event in every list."""
        if handled.parked:
            self._connection.rollback()
            event = handled.events[min(handled.parked)]
            message = f"event {event.id} came from a retry topic, so it cannot be parked."
            raise RefusedError(message, hint="Nothing of its slice was written.")
        leaving = _leaving(handled)
        places = range(len(handled.events))
        ends = [leaving.get(place) for place in places]
        copies = handled.copies or ()
        states = ["resolved" if end is None else end.state for end in ends]
        return {
            **_identities(handled, places),
            "states": states,
            "attempts": [
                copies[place].attempt if end is None else end.attempts
                for place, end in enumerate(ends)
            ],
            "copy_topics": [end and end.record and end.record.topic for end in ends],
            "delays": [end and end.delay_ms for end in ends],
            **{f"{name}s": [end and getattr(end.cause, name) for end in ends] for name in _CAUSE},
            "outcomes": [_outcome(handled, place, state) for place, state in enumerate(states)],
        }

    def hold(self, settlement: Mapping[str, list[Any]]) -> None:
        """Lock the books that a settlement changes."""
        self._hold(map(Partition, settlement["topics"], settlement["partitions"]))

    def settle_as(self, settlement: Mapping[str, list[Any]]) -> None:
        """Make a settlement so."""
        applied = [n for n, state in enumerate(settlement["states"]) if state == "resolved"]
        moved = self._resolve(settlement, applied) if applied else 0
        if moved < len(settlement["states"]):
            self._connection.execute(
                queries()["settle_copied"],
                {"pipeline": self._pipeline, "version": self._version, **_literals(settlement)},
            )
        self._balance(settlement)

    def _resolve(self, settlement: Mapping[str, list[Any]], places: Sequence[int]) -> int:
        """Move events that were applied to those that came back; how many of them may go."""
        names = ("topics", "partitions", "offsets", "incarnations", "attempts")
        ((moved,),) = self._connection.execute(
            queries()["resolve_copied"],
            {"pipeline": self._pipeline}
            | _literals({name: [settlement[name][place] for place in places] for name in names}),
        ).fetchall()
        return int(moved)

    def pend(self, held: Held, handled: Handled) -> None:
        """Name the events of a slice that is applied only once Kafka has committed it (K22).

        What leaves because of them is gathered, and why they failed is counted.
        """
        if not handled.copies:
            return
        leaving = _leaving(handled)
        self._connection.execute(
            queries()["pend_copied"],
            {"pipeline": self._pipeline}
            | self._parking.pending(held)
            | _identities(handled, range(len(handled.events))),
        )
        self._count(handled, leaving)
        self._send(held, leaving.values())

    def _balance(self, settlement: Mapping[str, list[Any]]) -> None:
        books: dict[Partition, dict[str, int]] = defaultdict(
            lambda: {"applied": 0, "filtered": 0, "dead": 0, "duplicate": 0}
        )
        for topic, partition, what in zip(
            settlement["topics"], settlement["partitions"], settlement["outcomes"], strict=True
        ):
            if what != "retrying":
                books[Partition(topic, partition)][what] += 1
        if not books:
            return
        spots = sorted(books)
        self._connection.execute(
            queries()["balance_origins"],
            {
                "pipeline": self._pipeline,
                "topics": [spot.topic for spot in spots],
                "partitions": [spot.number for spot in spots],
                **{
                    name: [books[spot][name] for spot in spots]
                    for name in ("applied", "filtered", "dead", "duplicate")
                },
            },
        )

    def _names(self, spot: Partition) -> dict[str, Any]:
        return {"pipeline": self._pipeline, "topic": spot.topic, "partition": spot.number}


def _spot(event: Event) -> Partition:
    return Partition(event.topic, event.partition)


def _leaving(handled: Handled) -> dict[int, Leaving]:
    """By place, in log order."""
    failures: dict[int, Failure] = {**handled.retrying, **handled.dead}
    found = {place: failures[place].leaving for place in sorted(failures)}
    return {place: leaving for place, leaving in found.items() if leaving is not None}


def _outcome(handled: Handled, place: int, state: str) -> str:
    if place in handled.duplicates:
        return "duplicate"
    if state != "resolved":
        return state
    return "filtered" if handled.effects[place] == NOTHING else "applied"


def _identities(handled: Handled, places: Sequence[int]) -> dict[str, list[Any]]:
    copies = handled.copies or ()
    return _named([handled.events[place] for place in places], [copies[place] for place in places])


def _named(events: Sequence[Event], copies: Sequence[Copy]) -> dict[str, list[Any]]:
    return {
        "topics": [event.topic for event in events],
        "partitions": [event.partition for event in events],
        "offsets": [event.offset for event in events],
        "incarnations": [copy.incarnation for copy in copies],
    }


def _literals(columns: Mapping[str, list[Any]]) -> dict[str, str]:
    return {
        name: (arrays.numbers if name in _NUMBERS else arrays.texts)(values)
        for name, values in columns.items()
    }


def _outcomes(leaving: Sequence[Leaving]) -> dict[str, str]:
    # Column by column: by name it would be a look at each of them for every event.
    columns = dict(
        zip(Cause._fields, zip(*[one.cause for one in leaving], strict=True), strict=True)
    )
    return {
        "states": arrays.texts([one.state for one in leaving]),
        "attempts": arrays.numbers([one.attempts for one in leaving]),
        "copy_topics": arrays.texts([one.record.topic if one.record else None for one in leaving]),
        "delays": arrays.numbers([one.delay_ms for one in leaving]),
        **{f"{name}s": arrays.texts(columns[name]) for name in _CAUSE},
    }
