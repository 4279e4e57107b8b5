"""Keys that are aside, and the events that wait behind them: the slice's part of the ledger.

Everything here happens inside the transaction of a slice, after its fence (C3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sideline import arrays
from sideline.causes import Cause
from sideline.keys import digest_text, mark, marks_of, signed
from sideline.ledger.sql import queries
from sideline.ledger.store import Stale
from sideline.slices import Aside

if TYPE_CHECKING:
    from sideline.engine.lease import Partition
    from sideline.events import Event
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Held
    from sideline.slices import Handled

# So many marks of a partition's keys are remembered; with more aside, each slice asks for its own.
MOST_REMEMBERED = 500_000
# Events of one statement: their bytes stand in memory a second time meanwhile.
EVENTS_PER_STATEMENT = 5_000


class Key(NamedTuple):
    """What an event's order belongs to."""

    data: bytes
    derived: bool
    """Said by the pipeline's ``key=``."""

    @property
    def digest(self) -> str:
        """What stands for it in the ledger."""
        return digest_text(self.data, derived=self.derived)


class Parking:
    """The waiting events of one pipeline, through one connection."""

    def __init__(
        self, connection: Connection, pipeline: str, *, version: str, pends: bool = False
    ) -> None:
        self.connection = self._connection = connection
        self.pipeline = self._pipeline = pipeline
        self.version = self._version = version
        self.pends = pends
        """Whether what is written here is true only once Kafka has committed its slice (K21)."""
        self.counted: list[tuple[str, int, str, int, int, int, int]] = []
        """Where that is so: what the causes of a slice were raised by, should it be dropped."""

    # Which keys are aside

    def read(self, held: Held, known: Aside | None, keys: Iterable[bytes | None]) -> Aside:
        """Which keys are aside, as far as these are concerned; what is known is not read again."""
        if held.shared:
            return self._read_topic(held, known)
        if known is None or known.version != held.aside_version:
            known = self._read_marks(held)
        unsure = known.unsure(keys)
        if unsure:
            found = self.ask(held, (Key(key, derived=False) for key in unsure))
            known.kafka |= found.kafka
            known.absent.update(set(unsure) - found.kafka)
        return known

    def _read_marks(self, held: Held) -> Aside:
        """Marks instead of keys: a million of them are read in a moment."""
        if not held.aside:
            return Aside(held.aside_version)
        ((packed,),) = self._connection.execute(
            queries()["marks_at_home"], self._names(held), binary=True
        ).fetchall()
        self._connection.commit()
        return Aside(held.aside_version, marks=marks_of(packed))

    def ask(self, held: Held, keys: Iterable[Key]) -> Aside:
        """Which of some keys are aside, where those of a partition are at home in it."""
        digests = sorted([key.digest for key in set(keys)])
        names = self._names(held) | {"digests": arrays.texts(digests)}
        rows = self._connection.execute(queries()["keys_among"], names).fetchall()
        self._connection.commit()
        return _aside(held.aside_version, rows)

    def _read_topic(self, held: Held, known: Aside | None) -> Aside:
        if known is None:
            self._connection.execute(queries()["share_topic"], self._names(held))
            known = Aside(-1)
        self._catch_up(held, known)
        self._connection.commit()
        return known

    def _catch_up(self, held: Held, known: Aside) -> Aside:
        """Learn what stepped aside since; returns that alone."""
        names = self._names(held) | {"since": known.version}
        rows = self._connection.execute(queries()["keys_of_topic"], names).fetchall()
        version = rows[0][0] if rows else 0
        fresh = _aside(version, [(key, derived) for _, key, derived in rows if key is not None])
        fresh.kafka -= known.kafka
        fresh.derived -= known.derived
        known.kafka |= fresh.kafka
        known.derived |= fresh.derived
        known.version = version
        return fresh

    # What a slice does to them

    def hold(self, held: Held, handled: Handled, aside: Aside) -> None:
        """Where keys live in several partitions: let none of the slice's own step aside (K13).

        Raises `Stale` if one has since the slice was admitted.
        """
        if not held.shared:
            return
        # Whoever knows that it will move the row takes it alone: two who had it together could
        # only wait for each other.
        lock = "claim_topic" if new_names(handled, aside) else "hold_topic"
        row = self._connection.execute(queries()[lock], self._names(held)).fetchone()
        if row is None or row[0] == aside.version:
            return
        fresh = self._catch_up(held, aside)
        for place, event in enumerate(handled.events):
            key, derived = handled.own_key(place)
            # Also of one that failed: it was counted as the first of its key.
            if fresh.holds(event, key if derived else None):
                self._connection.rollback()
                raise Stale

    def write(
        self,
        held: Held,
        handled: Handled,
        aside: Aside,
        elsewhere: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Set aside what a slice could not apply, and count why.

        ``elsewhere``: where the bytes of an event are, by its place, if not in the ledger.
        """
        failed = {
            place: failure.cause
            for place, failure in [*handled.parked.items(), *handled.skipped.items()]
            if failure is not None
        }
        if handled.parked:
            version = self._move(held, handled, aside)
            self._step_aside(held, stepping_aside(handled, aside), aside, version)
            self._meet(held, handled, aside, version)
            self._park(held, handled, aside, failed, elsewhere)
        if failed:
            self._count(held, handled, failed)

    def _move(self, held: Held, handled: Handled, aside: Aside) -> int:
        if not held.shared:
            return held.aside_version + 1
        if not new_names(handled, aside):
            return aside.version
        ((version,),) = self._connection.execute(
            queries()["move_topic"], self._names(held)
        ).fetchall()
        return int(version)

    def _step_aside(self, held: Held, fresh: Sequence[Key], aside: Aside, version: int) -> None:
        if not fresh:
            return
        names = self._names(held) | {
            "digests": arrays.texts([key.digest for key in fresh]),
            "marks": arrays.numbers([signed(mark(key.data)) for key in fresh]),
            "keys": arrays.blobs([key.data for key in fresh]),
            "derived": [key.derived for key in fresh],
            "version": version,
        }
        stepped = self._connection.execute(queries()["step_aside"], names).rowcount
        if stepped == len(fresh):
            return
        self._connection.rollback()
        if not held.shared:
            # It is aside in another partition: its producers do not agree where it belongs (K13).
            # Slices under way are over before anybody reads the keys of the topic.
            for name in ("share_partitions", "share_topic"):
                self._connection.execute(queries()[name], self._names(held))
            self._connection.commit()
            held.shared = True
        _forget(aside)
        raise Stale

    def _park(
        self,
        held: Held,
        handled: Handled,
        aside: Aside,
        failed: dict[int, Cause],
        elsewhere: Mapping[int, str],
    ) -> None:
        keys = {place: waits_behind(handled, place) for place in sorted(handled.parked)}
        queues = self._grow(held, Counter(keys.values()), aside)
        places = list(keys)
        for start in range(0, len(places), EVENTS_PER_STATEMENT):
            some = places[start : start + EVENTS_PER_STATEMENT]
            events = [
                _bare(handled.events[place]) if place in elsewhere else handled.events[place]
                for place in some
            ]
            causes = [failed.get(place) for place in some]
            names = self._names(held) | {
                "incarnation": held.incarnation,
                "version": self._version,
                **self.pending(held),
                "queues": arrays.numbers([queues[keys[place]] for place in some]),
                "alone": arrays.numbers(
                    [
                        handled.events[place].offset
                        for place in some
                        if _stands_alone(handled, place)
                    ]
                ),
                "attempts": arrays.numbers([_attempts(held, event) for event in events]),
                "held": arrays.texts([elsewhere.get(place, "ledger") for place in some]),
                **records(events),
                **{
                    f"{name}s": arrays.texts([cause and getattr(cause, name) for cause in causes])
                    for name in ("stage", "error", "message", "traceback", "fingerprint")
                },
            }
            self._connection.execute(queries()["park"], names)

    def _grow(
        self, held: Held, behind: Counter[Key | None], aside: Aside
    ) -> dict[Key | None, int | None]:
        """Lock the queues that get longer, and count; the queue of each key."""
        keys = [key for key in behind if key is not None]
        queues: dict[Key | None, int | None] = {None: None}
        added: Counter[int] = Counter()
        for number, queue in self._queues(held, keys):
            queues[keys[number]] = queue
            added[queue] += behind[keys[number]]
        longer = sorted(added)
        names = {
            "queues": arrays.numbers(longer),
            "events": arrays.numbers([added[queue] for queue in longer]),
            # The key may have rejoined here and be aside elsewhere since: nobody in this partition
            # would see that its next events are behind that (K13).
            "home": None if held.shared else held.partition.number,
        }
        grown = self._connection.execute(queries()["grow"], names).rowcount if longer else 0
        if len(queues) <= len(keys) or grown < len(longer):
            # A key has rejoined since: its next event is not behind anything.
            self._connection.rollback()
            _forget(aside)
            raise Stale
        return queues

    def _queues(self, held: Held, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """Where keys wait, those that do: the place among them, and the queue."""
        if not keys:
            return []
        digests = arrays.texts([key.digest for key in keys])
        names = self._names(held) | {"digests": digests}
        return self._connection.execute(queries()["queues_among"], names).fetchall()

    def _count(self, held: Held, handled: Handled, failed: dict[int, Cause]) -> None:
        self.count(
            held.partition,
            [
                (cause, "parked" if place in handled.parked else "skipped", handled.events[place])
                for place, cause in failed.items()
            ],
        )

    def count(self, spot: Partition, failed: Sequence[tuple[Cause, str, Event]]) -> None:
        """Count why events of a partition failed, and what became of each."""
        last = {cause.fingerprint: (cause, event) for cause, _, event in failed}
        counts = Counter([(cause.fingerprint, fate) for cause, fate, _ in failed])
        causes = [cause for cause, _ in last.values()]
        if self.pends:
            self.counted += [
                (
                    spot.topic, spot.number, name, counts[name, "parked"], counts[name, "skipped"],
                    counts[name, "retrying"], counts[name, "dead"],
                )
                for name in last
            ]  # fmt: skip
        self._connection.execute(
            queries()["count_causes"],
            {
                "pipeline": self._pipeline,
                "topic": spot.topic,
                "partition": spot.number,
                "fingerprints": list(last),
                "errors": [cause.error for cause in causes],
                "stages": [cause.stage for cause in causes],
                "places": [cause.place for cause in causes],
                "messages": [cause.message for cause in causes],
                "tracebacks": [cause.traceback for cause in causes],
                "offsets": [event.offset for _, event in last.values()],
                "keys": arrays.blobs([event.key for _, event in last.values()]),
                "parked": [counts[name, "parked"] for name in last],
                "skipped": [counts[name, "skipped"] for name in last],
                "retried": [counts[name, "retrying"] for name in last],
                "dead": [counts[name, "dead"] for name in last],
            },
        )

    def _meet(self, held: Held, handled: Handled, aside: Aside, version: int) -> None:
        """Events with two keys tie their queues together (K15)."""
        pairs = _pairs(handled, aside)
        if not pairs:
            return
        names = self._names(held)
        keys = list({key: None for pair in pairs for key in pair})
        queue_of = {keys[number]: queue for number, queue in self._queues(held, keys)}
        if any(
            record not in queue_of or (own.data in aside.derived and own not in queue_of)
            for own, record in pairs
        ):
            # One of the two has rejoined since.
            self._connection.rollback()
            _forget(aside)
            raise Stale
        joining: dict[Key, None] = {}
        for own, record in pairs:
            behind = queue_of[record]
            mine = queue_of.get(own)
            if mine is None:
                queue_of[own] = behind
                joining[own] = None
            elif mine != behind:
                into, gone = min(mine, behind), max(mine, behind)
                self.join(names, into, gone)
                queue_of = {key: into if at == gone else at for key, at in queue_of.items()}
        if joining:
            self._connection.execute(
                queries()["join_queue"],
                names
                | {
                    "digests": arrays.texts([key.digest for key in joining]),
                    "keys": arrays.blobs([key.data for key in joining]),
                    "queues": arrays.numbers([queue_of[key] for key in joining]),
                    "version": version,
                },
            )

    def join(self, names: dict[str, Any], into: int, gone: int) -> None:
        """Whoever waits in the second queue waits in the first from here on (K15)."""
        execute = self._connection.execute
        self._redirect(names | {"into": into, "queue": gone})
        execute(queries()["meet"], {"into": into, "queue": gone})
        row = execute(queries()["forget_queue"], {"queue": gone}).fetchone()
        if row is not None:
            execute(queries()["one_aside_less"], names | {"partition": row[0]})

    def pending(self, held: Held) -> dict[str, Any]:
        """By which slice rows are named that it writes."""
        spot = held.partition if self.pends else None
        return {
            "fresh": self.pends,
            "pending_topic": spot and spot.topic,
            "pending_partition": None if spot is None else spot.number,
        }

    def _redirect(self, names: dict[str, Any]) -> None:
        """What was to happen to a queue happens to the one that it joins."""
        items = self._connection.execute(queries()["items_of_queue"], names).fetchall()
        if items:
            given = {"operations": [item[0] for item in items], "numbers": [n for _, n in items]}
            for query in ("look_back", "redirect_items"):
                self._connection.execute(queries()[query], names | given)

    def _names(self, held: Held) -> dict[str, Any]:
        return {
            "pipeline": self._pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
        }


def stepping_aside(handled: Handled, aside: Aside) -> list[Key]:
    """The keys that begin a queue of their own with this slice, in log order."""
    fresh: dict[Key, None] = {}
    for place, failure in sorted(handled.parked.items()):
        if failure is None:
            continue
        data, derived = handled.own_key(place)
        if data is not None and data not in (aside.derived if derived else aside.kafka):
            fresh[Key(data, derived)] = None
    return list(fresh)


def new_names(handled: Handled, aside: Aside) -> list[Key]:
    """All keys that are aside after this slice and were not before."""
    fresh = dict.fromkeys(stepping_aside(handled, aside))
    for own, _ in _pairs(handled, aside):
        if own.data not in aside.derived:
            fresh[own] = None
    return list(fresh)


def remember(aside: Aside, keys: Iterable[Key]) -> None:
    """The slice is committed: these keys are aside."""
    for key in keys:
        (aside.derived if key.derived else aside.kafka).add(key.data)
        aside.absent.discard(key.data)


def waits_behind(handled: Handled, place: int) -> Key | None:
    """The key whose queue an event belongs to; None: it stands alone."""
    data, derived = handled.own_key(place)
    if data is not None:
        return Key(data, derived)
    # It has no key of its own, but its record's may be aside.
    record = handled.events[place].key
    if derived and record is not None and handled.parked[place] is None:
        return Key(record, derived=False)
    return None


def _stands_alone(handled: Handled, place: int) -> bool:
    """Whether ``key=`` said that the event has no key; one whose key nobody knows may have one."""
    data, derived = handled.own_key(place)
    return derived and data is None


def _pairs(handled: Handled, aside: Aside) -> list[tuple[Key, Key]]:
    """Followers with a derived key whose record's key is aside too: (own, record's)."""
    if handled.keys is None:
        return []
    stepped: set[bytes] = set()
    pairs = []
    for place, failure in sorted(handled.parked.items()):
        data, derived = handled.own_key(place)
        record = handled.events[place].key
        if data is None or record is None:
            continue
        if failure is not None:
            if not derived:
                stepped.add(data)
        elif derived and (record in aside.kafka or record in stepped):
            pairs.append((Key(data, derived=True), Key(record, derived=False)))
    return pairs


def _aside(version: int, rows: Iterable[tuple[bytes, bool]]) -> Aside:
    found = Aside(version)
    for key, derived in rows:
        (found.derived if derived else found.kafka).add(key)
    return found


def _forget(aside: Aside) -> None:
    """What is remembered is wrong: it is read anew."""
    aside.version = -1
    aside.kafka.clear()
    aside.derived.clear()
    aside.marks = frozenset()
    aside.absent.clear()


def _bare(event: Event) -> Event:
    """Without what is kept elsewhere; the key stays, for whoever looks for it."""
    return structs.replace(event, value=None, headers=())


def _attempts(held: Held, event: Event) -> int:
    return held.attempts + 1 if event.offset == held.stuck_at else 1


def records(events: Sequence[Event]) -> dict[str, str]:
    """Events as columns, exactly as they came."""
    # Mostly none of them has headers: then nobody is asked for his own.
    bare = [arrays.NOTHING] * len(events) if not any(event.headers for event in events) else None
    return {
        "offsets": arrays.numbers([event.offset for event in events]),
        "keys": arrays.blobs([event.key for event in events]),
        "values": arrays.blobs([event.value for event in events]),
        # Arrays of arrays would have to be rectangular: each event's headers are a literal.
        "header_names": arrays.texts(
            bare or [arrays.header_names(event.headers) for event in events]
        ),
        "header_values": arrays.texts(
            bare or [arrays.header_values(event.headers) for event in events]
        ),
        "timestamps": arrays.numbers([event.timestamp_ms for event in events]),
    }
