"""What the owner of a queue's home does to bring events back: the ledger's part of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sideline import arrays
from sideline.causes import Cause
from sideline.engine.lease import Partition
from sideline.events import Event
from sideline.ledger.ahead import Foreseen, ReadAhead, Wanted, waiting_rows
from sideline.ledger.discarding import Discards
from sideline.ledger.operating import NONE_SEEN, Counts, Done, Operating, places
from sideline.ledger.parking import Key, Parking
from sideline.ledger.records import Elsewhere, waiting_of
from sideline.ledger.sql import queries
from sideline.replays import (
    Choice,
    Going,
    Item,
    Verdict,
    Waiting,
    causes_left,
    chosen_again,
    going,
)
from sideline.slices import SLICE_BYTES

if TYPE_CHECKING:
    from sideline.events import Delivery
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Claim, Held
    from sideline.slices import Aside

# Items that are looked at for one slice: with one event each they fill it.
MOST_ITEMS = 25_000
# However long their queues are, so many items are looked at.
LEAST_ITEMS = 64
_CONSUMED = attrgetter("partition", "state", "incarnation")
# Events of a slice by their place in it.
_ByPlace = Sequence[Waiting] | Mapping[int, Waiting]


class Met(NamedTuple):
    """The queue that another one has joined."""

    queue: int
    home: int


class Replays(Operating):
    """The releases of one pipeline, through the connection of one lease."""

    def __init__(
        self,
        connection: Connection,
        claim: Claim,
        parking: Parking,
        elsewhere: Elsewhere = lambda _: {},
        ahead: ReadAhead | None = None,
    ) -> None:
        super().__init__(connection, claim, parking)
        self._ahead = ahead
        self._elsewhere = elsewhere
        self._item_events = 1.0
        """How many events an item had, the last time."""
        self.discards = Discards(connection, claim, parking)

    # Reading

    def items(self, held: Held, limit: int, excluded: Iterable[int]) -> list[Item]:
        """The next items at home in a partition, all of one operation; enough for a slice."""
        names = self._names(held) | {
            "after": NONE_SEEN,
            "limit": self._most_items(limit),
            "excluded": list(excluded),
        }
        rows = self._connection.execute(queries()["items_waiting"], names, binary=True).fetchall()
        self._connection.commit()
        found = [Item(*row) for row in rows]
        if found:
            events = sum([item.events or 1 for item in found])
            self._item_events = max(1.0, events / len(found))
        return [item for item in found if item.operation == found[0].operation]

    def _most_items(self, limit: int) -> int:
        return min(max(LEAST_ITEMS, int(limit / self._item_events)), limit, MOST_ITEMS)

    def homes(self, operation: int) -> int:
        """How many partitions share an operation's rate."""
        names = {"pipeline": self._claim.pipeline, "operation": operation}
        row = self._connection.execute(queries()["homes_of_operation"], names).fetchone()
        self._connection.commit()
        return max(1, row[0] if row else 1)

    def read(
        self,
        held: Held,
        choice: Choice,
        delivery: Delivery,
        rows: list[tuple[Any, ...]] | None = None,
    ) -> tuple[list[Waiting], list[int]]:
        """The events of a slice in the order of their replay, and items without any.

        ``rows``: what was read of them already.
        """
        items = choice.items
        names = self._names(held) | {"bytes": SLICE_BYTES}
        if rows is None and choice.queues:
            rows = waiting_rows(self._connection, names, choice)
        elif rows is None:
            query = queries()["single_events"]
            rows = self._connection.execute(query, names | places(items), binary=True).fetchall()
        # Kafka may take its time for bytes that are there: nobody waits for us meanwhile.
        self._connection.commit()
        found = waiting_of(rows, held.partition.topic, delivery, self._elsewhere)
        self._connection.commit()
        if choice.queues:
            return found, choice.gone
        # What lies behind the last one may have been too much for one slice.
        seen = found[-1].item + 1 if found else len(items)
        single = _single(found)
        there = {one.item for one in single}
        gone = [item.number for place, item in enumerate(items[:seen]) if place not in there]
        return single, choice.gone + gone

    def look_ahead(self, held: Held, choice: Choice, limit: int) -> None:
        """Begin to read what comes behind a slice that takes its queues as a whole.

        Where partitions share keys, queues of others may join these at any time: not there.
        """
        if self._ahead is None or held.shared or not choice.is_whole:
            return
        last = choice.items[-1]
        names = self._names(held) | {
            "bytes": SLICE_BYTES,
            "after": last.number,
            "limit": self._most_items(limit),
            "excluded": [],
        }
        self._ahead.start(Wanted(held, last.operation, last.number, limit, names))

    def foreseen(self, held: Held, limit: int, excluded: Collection[int]) -> Foreseen | None:
        """What was read ahead, if it is what comes next, and no more than may be done now."""
        if self._ahead is None or not self._ahead.is_for(held):
            return None
        found = self._ahead.take()
        if found is None:
            return None
        wanted = found.wanted
        if wanted.operation in excluded or len(found.rows) > limit:
            return None
        names = self._names(held) | {
            "operation": wanted.operation,
            "after": wanted.after,
            "excluded": list(excluded),
        }
        stands = self._connection.execute(queries()["operation_stands"], names).fetchone()
        self._connection.commit()
        return None if stands is None else found._replace(tried=stands[0])

    def coming(
        self, held: Held, delivery: Delivery, patient: Callable[[], bool]
    ) -> tuple[list[tuple[Any, ...]], list[Waiting]] | None:
        """What was read ahead, and its events, if all there is to them was read.

        It stays there: whether it is what comes next is said by `foreseen`. Nothing is asked.
        """
        ahead = self._ahead if self._ahead is not None and self._ahead.is_for(held) else None
        found = None if ahead is None else ahead.look(patient)
        if found is None:
            return None
        waiting = waiting_of(found.rows, held.partition.topic, delivery, lambda _: {})
        return None if any(one.lost for one in waiting) else (found.rows, waiting)

    def finish(self) -> None:
        """End the operations of which nothing waits any more."""
        if self._ahead is not None:
            self._ahead.rest()
        super().finish()

    def failed_keys(self, held: Held, operation: int) -> set[bytes]:
        """Keys of the dead events that the operation could not bring back from here."""
        names = self._names(held) | {"operation": operation}
        rows = self._connection.execute(queries()["keys_that_failed_again"], names).fetchall()
        self._connection.commit()
        return {key for (key,) in rows}

    # Inside the transaction

    def strangers(self, held: Held, keys: Iterable[tuple[bytes, int | None]]) -> bool:
        """Join queues that turn out to hold events of one key; whether there were any (K15).

        Only now that an event can be read is it known which key it has, and that key may wait in
        another queue: neither may overtake the other.
        """
        wanted = list(dict.fromkeys(keys))
        if not wanted:
            return False
        digests = [Key(data, derived=True).digest for data, _ in wanted]
        names = self._names(held) | {"digests": arrays.texts(digests)}
        rows = self._connection.execute(queries()["queues_among"], names).fetchall()
        pairs = {
            (min(other, queue), max(other, queue))
            for number, other in rows
            if (queue := wanted[number][1]) is not None and queue != other
        }
        for into, gone in sorted(pairs, reverse=True):
            self._parking.join(names, into, gone)
        return bool(pairs)

    def settle(
        self,
        held: Held,
        choice: Choice,
        waiting: Sequence[Waiting],
        verdict: Verdict,
        foreseen: Going | None = None,
    ) -> Done:
        """Write down what became of replayed events, and let keys rejoin whose tail is empty.

        ``waiting`` begins with the events of the verdict. ``foreseen``: what it takes if all of
        them go, worked out while nobody waited for it.
        """
        failed = {place: failure.cause for place, failure in verdict.failed.items()}
        whole = foreseen is not None and foreseen.rows is waiting and len(verdict.gone)
        leaving = foreseen if whole == len(waiting) else None
        return self._settle(held, choice, waiting, verdict, failed, leaving=leaving)

    def _settle(  # noqa: PLR0913, PLR0917 - what is settled, and of what
        self,
        held: Held,
        choice: Choice,
        waiting: _ByPlace,
        verdict: Verdict,
        causes: Mapping[int, Cause],
        homes: Mapping[int, int] = MappingProxyType({}),
        leaving: Going | None = None,
    ) -> Done:
        """``homes``: of queues that others have joined; then events are named one by one."""
        operation = choice.items[0].operation
        if leaving is None:
            rows = [waiting[place] for place in verdict.gone]
            if homes:
                rows.sort(key=lambda one: one.place)
            leaving = going(rows)
        if homes:
            self._resolve_single(held, leaving.rows)
        else:
            self._resolve(operation, leaving)
            if leaving.queued < len(leaving.rows):
                self._resolve_single(held, [one for one in leaving.rows if one.queue is None])
        failed = [waiting[place] for place in causes]
        self._uncount(held, leaving.causes + causes_left(failed) if failed else leaving.causes)
        if failed:
            self._fail(held, failed, list(causes.values()))
        ended, rejoined = self._shrink(leaving.less, leaving.lasts)
        counts = _tally(waiting, verdict, leaving)
        for queue in ended:
            counts[homes.get(queue, held.partition.number)]["rejoined"] += 1
        self._count(held, counts)
        states = dict.fromkeys([one.item for one in failed], "failed")
        for item in {item for queue, item in leaving.items if queue is None or queue in ended}:
            states.setdefault(item, "done")
        seen, states = choice.passed(states)
        done = Done(len(leaving.rows), len(causes), rejoined=rejoined)
        return self._account(held, operation, states, done, seen)

    # Where effects are records of Kafka: written down first, settled once Kafka has them

    def noted(self, choice: Choice, waiting: Sequence[Waiting], verdict: Verdict) -> dict[str, Any]:
        """What `settle` would do, as values that can be written down."""
        failed = {place: failure.cause for place, failure in verdict.failed.items()}
        named = [*verdict.gone, *failed]
        return {
            "items": [list(item) for item in choice.items],
            "left": choice.until,
            "waiting": {str(place): _noted(waiting[place]) for place in named},
            "applied": verdict.applied,
            "filtered": verdict.filtered,
            "duplicates": list(verdict.duplicates),
            "failed": {str(place): list(cause) for place, cause in failed.items()},
        }

    def claim(self, held: Held, note: Mapping[str, Any]) -> None:
        """Name the events of a slice that is applied only once Kafka has committed it (K21)."""
        rows = list(_noted_events(held, note).values())
        names = self._names(held) | _rows(rows) | _as_read(rows)
        if self._connection.execute(queries()["claim_replayed"], names).rowcount < len(rows):
            self._stale()

    def begin_noted(self, held: Held, note: Mapping[str, Any]) -> dict[int | None, Met]:
        """`begin` for what was written down; its queues that have joined others since (K15)."""
        events = _noted_events(held, note).values()
        heads = {one.queue: one for one in events if one.queue is not None}
        met: dict[int | None, Met] = {}
        while True:
            homes = [one.home for one in met.values()]
            queues = [met[queue].queue if queue in met else queue for queue in heads]
            self.begin(held, [*homes, *(one.partition for one in events)], queues)
            # Where keys cannot live in two partitions nobody else joins queues.
            found = self._met(held, heads) if held.shared else met
            if found == met:
                return met
            met = found
            self._connection.rollback()

    def _met(self, held: Held, heads: Mapping[int, Waiting]) -> dict[int | None, Met]:
        rows = list(heads.values())
        names = self._names(held) | _rows(rows) | _as_read(rows)
        found = self._connection.execute(queries()["queues_met"], names).fetchall()
        return {before: Met(queue, home) for before, queue, home in found}

    def settle_noted(
        self,
        held: Held,
        note: Mapping[str, Any],
        met: Mapping[int | None, Met],
        aside: Aside | None,
    ) -> Done:
        """`settle` and `commit` for what was written down: Kafka has it, wherever it waits now."""
        verdict = Verdict(note["applied"], note["filtered"], {}, note.get("duplicates", ()))
        causes = {int(place): Cause(*cause) for place, cause in note["failed"].items()}
        # What is to happen to a queue that joined another stands at that one's home.
        left = NONE_SEEN if met else note["left"]
        choice = chosen_again([Item(*item) for item in note["items"]], left)
        events = {
            place: structs.replace(one, queue=now.queue) if (now := met.get(one.queue)) else one
            for place, one in _noted_events(held, note).items()
        }
        homes = {one.queue: one.home for one in met.values()}
        done = self._settle(held, choice, events, verdict, causes, homes)
        self.commit(held, done, aside)
        return done

    # Parts of a transaction

    def _resolve(self, operation: int, leaving: Going) -> None:
        """Take replayed events out of their queues, if they are still those that were read."""
        if not leaving.queued:
            return
        # Each queue is replayed from its first event on: the last one tells which are gone.
        names = {
            "operation": operation,
            "queues": arrays.numbers(list(leaving.lasts)),
            "lasts": arrays.numbers(list(leaving.lasts.values())),
        }
        wanted = (leaving.queued, leaving.places, leaving.generations)
        found = (0, 0, 0)
        for query in ("resolve_queued", "resolve_kept"):
            (row,) = self._connection.execute(queries()[query], names).fetchall()
            found = (found[0] + row[0], found[1] + row[1], found[2] + row[2])
            if found[0] >= wanted[0]:
                break
        if found != wanted:
            self._stale()

    def _resolve_single(self, held: Held, rows: Sequence[Waiting]) -> None:
        names = self._names(held) | _rows(rows) | _as_read(rows)
        if self._connection.execute(queries()["resolve"], names).rowcount < len(rows):
            self._stale()

    def _fail(self, held: Held, rows: Sequence[Waiting], causes: Sequence[Cause]) -> None:
        names = (
            self._names(held)
            | _rows(rows)
            | _as_read(rows)
            | {
                "version": self._parking.version,
                **{
                    f"{name}s": arrays.texts([getattr(cause, name) for cause in causes])
                    for name in ("stage", "error", "message", "traceback", "fingerprint")
                },
            }
        )
        if self._connection.execute(queries()["fail_again"], names).rowcount < len(rows):
            self._stale()
        parked = [
            (one, cause) for one, cause in zip(rows, causes, strict=True) if one.state == "parked"
        ]
        for partition in sorted({one.partition for one, _ in parked}):
            here = [(one, cause) for one, cause in parked if one.partition == partition]
            self._count_causes(held, partition, here)

    def _count_causes(
        self, held: Held, partition: int, failed: Sequence[tuple[Waiting, Cause]]
    ) -> None:
        self._parking.count(
            Partition(held.partition.topic, partition),
            [(cause, "parked", one.event) for one, cause in failed],
        )


def _noted(one: Waiting) -> list[Any]:
    return [
        one.item, one.place, one.partition, one.incarnation, one.state, one.fingerprint,
        one.generation, one.queue, one.event.offset,
    ]  # fmt: skip


def _noted_events(held: Held, note: Mapping[str, Any]) -> dict[int, Waiting]:
    """Events by place, without their bytes: nobody handles them again."""
    topic = held.partition.topic
    found: dict[int, Waiting] = {}
    for place, row in note["waiting"].items():
        item, at, partition, incarnation, state, fingerprint, generation, queue, offset = row
        event = Event(topic, partition, offset, -1, None, None)
        found[int(place)] = Waiting(
            item, at, partition, incarnation, state, fingerprint, generation, queue, event
        )
    return found


def _tally(waiting: _ByPlace, verdict: Verdict, leaving: Going) -> Counts:
    counts = Counts()
    became: dict[str, Sequence[int]] = {
        "applied": verdict.applied,
        "filtered": verdict.filtered,
        "duplicate": verdict.duplicates,
    }
    for name, gone in became.items():
        if len(leaving.consumed) == 1:
            kinds = Counter(dict.fromkeys(leaving.consumed, len(gone)))
        else:
            kinds = Counter(map(_CONSUMED, map(waiting.__getitem__, gone)))
        for (partition, state, incarnation), events in kinds.items():
            # An imported one was never consumed by this pipeline.
            if incarnation >= 0:
                counts[partition][name] += events
                counts[partition][state] -= events
    return counts


def _single(found: Sequence[Waiting]) -> list[Waiting]:
    """Those that stand alone and still wait, each of them once."""
    once: dict[tuple[int, int, int], Waiting] = {}
    for one in found:
        if one.queue is None and one.state in {"parked", "dead"}:
            once.setdefault((one.partition, one.event.offset, one.incarnation), one)
    return list(once.values())


def _rows(rows: Sequence[Waiting]) -> dict[str, Any]:
    return {
        "partitions": arrays.numbers([one.partition for one in rows]),
        "offsets": arrays.numbers([one.event.offset for one in rows]),
        "incarnations": arrays.numbers([one.incarnation for one in rows]),
    }


def _as_read(rows: Sequence[Waiting]) -> dict[str, Any]:
    return {
        "generations": arrays.numbers([one.generation for one in rows]),
        "states": arrays.texts([one.state for one in rows]),
        "queues": arrays.numbers([one.queue for one in rows]),
    }
