"""The bytes of parked events that are not in the ledger: in the stash topic, or at their source.

Until Kafka has acknowledged a stashed record, its bytes are in the outbox (K25).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.engine.lease import Partition
from sideline.events import Event
from sideline.ledger.sql import queries
from sideline.topics import headers, scanning
from sideline.topics.admin import Cluster
from sideline.views import Content, Held

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection


def fetch(
    connection: Connection,
    kafka: Mapping[str, Any],
    pipeline: str,
    events: Iterable[Held],
    *,
    stash_of: Callable[[str], str] | None = None,
) -> dict[Held, Content | None]:
    """The bytes of events that are held elsewhere; None: they are gone.

    ``stash_of``: the stash topic of a source; by default, as the ledger remembers it.
    """
    wanted = list(dict.fromkeys(events))
    found: dict[Held, Content | None] = dict.fromkeys(wanted)
    pointers = [one for one in wanted if one.held_in == "source"]
    if pointers:
        found |= _from_source(connection, kafka, pipeline, pointers)
    stashed = [one for one in wanted if one.held_in == "stash"]
    if stashed:
        found |= _from_stash(connection, kafka, pipeline, stashed, stash_of)
    return found


def _from_source(
    connection: Connection, kafka: Mapping[str, Any], pipeline: str, events: Sequence[Held]
) -> dict[Held, Content]:
    """What stands at the events' own places, if it is them: a topic may have been made again."""
    rows = connection.execute(queries()["pointed_at"], _named(pipeline, events)).fetchall()
    known = {events[number - 1]: _Known(*rest) for number, *rest in rows}
    spots = {
        (Partition(one.topic, one.partition), one.offset): one
        for one, row in known.items()
        if row.imported or row.incarnation == one.incarnation
    }
    found: dict[Held, Content] = {}
    for event in scanning.pick(kafka, spots) if spots else ():
        one = spots[Partition(event.topic, event.partition), event.offset]
        if known[one].is_it(event):
            found[one] = _content(event)
    return found


class _Known(NamedTuple):
    """What the ledger knows of an event whose bytes are at their source."""

    key: bytes | None
    timestamp_ms: int
    kept_ms: int
    """Since when the ledger knows it."""
    imported: bool
    incarnation: int | None
    """How often its topic has been made again; None: nobody owns its partition any more."""

    def is_it(self, event: Event) -> bool:
        """Whether a record at its place is the event itself."""
        if self.imported:
            return event.timestamp_ms <= self.kept_ms
        return (event.key, event.timestamp_ms) == (self.key, self.timestamp_ms)


def _from_stash(
    connection: Connection,
    kafka: Mapping[str, Any],
    pipeline: str,
    events: Sequence[Held],
    stash_of: Callable[[str], str] | None,
) -> dict[Held, Content]:
    found: dict[Held, Content] = {}
    rows = connection.execute(queries()["stashed_places"], _named(pipeline, events)).fetchall()
    spots: dict[tuple[Partition, int], Held] = {}
    lost: list[Held] = []
    topic_of = stash_of or _stashes(connection, pipeline)
    for number, partition, offset, unsent, key, value, names, values in rows:
        one = events[number - 1]
        if unsent:
            some = tuple(zip(names, values, strict=True))
            found[one] = Content(*headers.unwrap(key, value, some)[1:])
        elif offset is None:
            lost.append(one)
        else:
            spots[Partition(topic_of(one.topic), partition), offset] = one
    for event in scanning.pick(kafka, spots):
        one = spots[Partition(event.topic, event.partition), event.offset]
        if _is_copy(event, one):
            found[one] = _content(event)
    if lost:
        found |= _look_through(connection, kafka, pipeline, lost, topic_of)
    return found


def _look_through(
    connection: Connection,
    kafka: Mapping[str, Any],
    pipeline: str,
    lost: Sequence[Held],
    topic_of: Callable[[str], str],
) -> dict[Held, Content]:
    """An owner died between sending and saying where: look through the topic, once for all."""
    found: dict[Held, tuple[Event, Content]] = {}
    by_topic: dict[str, dict[bytes, Held]] = {}
    for one in lost:
        by_topic.setdefault(topic_of(one.topic), {})[_origin(one).encode()] = one
    cluster = Cluster(kafka)
    for topic, wanted in by_topic.items():
        known = cluster.describe(topic)
        spots = [Partition(topic, number) for number in range(known.partitions if known else 0)]
        for batch in scanning.scan(kafka, cluster.beginnings(spots), cluster.ends(spots)):
            for event in batch:
                held = wanted.get(event.key or b"")
                if held is not None and _is_copy(event, held):
                    found[held] = event, _content(event)
    # Whoever only looks changes nothing.
    if found and not connection.read_only:
        connection.execute(
            queries()["remember_copies"],
            _named(pipeline, list(found))
            | {
                "copy_partitions": [event.partition for event, _ in found.values()],
                "copy_offsets": [event.offset for event, _ in found.values()],
            },
        )
    return {one: content for one, (_, content) in found.items()}


def _origin(one: Held) -> str:
    """What the record in a stash topic is keyed by."""
    return headers.origin_id(one.topic, one.partition, one.offset, max(one.incarnation, 0))


def _is_copy(event: Event, of: Held) -> bool:
    """A tombstone, or whatever else stands there, is not it."""
    return event.value is not None and headers.read(event.headers).origin == _origin(of)


def _content(event: Event) -> Content:
    return Content(*headers.unwrap(event.key, event.value, event.headers)[1:])


def _stashes(connection: Connection, pipeline: str) -> Callable[[str], str]:
    """The pipeline's stash topics by their sources, as it declared them when it last ran."""
    named = {"pipeline": pipeline}
    row = connection.execute(queries()["stashes_of_pipeline"], named).fetchone()
    known: dict[str, str] = dict(row[0] or {}) if row else {}
    return lambda topic: known.get(topic, f"{topic}.{pipeline}.stash")


def _named(pipeline: str, events: Sequence[Held]) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "topics": [one.topic for one in events],
        "partitions": [one.partition for one in events],
        "offsets": [one.offset for one in events],
        "incarnations": [one.incarnation for one in events],
    }
