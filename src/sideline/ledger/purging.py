"""Empties dead-letter and stash topics of what is over: tombstones, through the outbox (R7, K25).

A record there is keyed by its event's id, so a tombstone takes that one away and no other. It
is written to the outbox of the partition that the event came from, behind the copy itself, in
the transaction that marks the event: doing it again adds nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.engine.lease import Partition
from sideline.errors import NotFoundError, RefusedError
from sideline.leaving import Record
from sideline.ledger import audit, outbox
from sideline.ledger.sql import queries
from sideline.topics import scanning
from sideline.topics.headers import origin_id

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.topics.admin import Cluster

# Events of one transaction.
BATCH_EVENTS = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be purged: what was parked in a span of time, or came back by a release."""

    pipeline: str
    since: datetime | None = None
    until: datetime | None = None
    release: int | None = None

    def named(self) -> dict[str, Any]:
        """For the queries."""
        return dataclasses.asdict(self)


class Closed(NamedTuple):
    """An event that is over, and whose copy is still in a topic."""

    topic: str
    partition: int
    offset: int
    incarnation: int
    key: bytes | None
    state: str
    copy_topic: str = ""

    @property
    def spot(self) -> Partition:
        """The partition that it came from."""
        return Partition(self.topic, self.partition)

    @property
    def tombstone(self) -> Record:
        """What takes its copy away."""
        origin = origin_id(self.topic, self.partition, self.offset, self.incarnation)
        return Record(self.copy_topic, origin.encode(), None)


@dataclasses.dataclass(slots=True)
class Plan:
    """What a purge does, or would do."""

    topics: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tombstones, by topic."""
    open: int = 0
    """Events of the same choice that still wait, or are dead and nobody gave up: left alone."""
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    """Topics that are left alone, and why."""


def look(connection: Connection, chosen: Chosen, cluster: Cluster) -> Plan:
    """What would be done; changes nothing."""
    plan = Plan()
    for topic, count in connection.execute(queries()["purge_counts"], chosen.named()):
        plan.topics[topic] = count
    ((plan.open,),) = connection.execute(queries()["purge_open"], chosen.named()).fetchall()
    connection.rollback()
    for topic in list(plan.topics):
        why = _unfit(cluster, topic)
        if why is not None:
            plan.kept[topic] = why
            del plan.topics[topic]
    return plan


def purge(
    connection: Connection,
    chosen: Chosen,
    plan: Plan,
    *,
    actor: str,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the tombstones, batch after batch; returns how many.

    The letter that ends a chain of retries leaves from its retry topic's partition: until it is
    sent, a tombstone could come before it, and would take nothing away (K25).
    """
    done = 0
    while batch := _batch(connection, chosen, list(plan.topics)):
        _refuse_unsent(connection, chosen.pipeline)
        for spot, events in _by_spot(batch).items():
            # First the partition's row: whoever holds it writes to its outbox.
            outbox.put(connection, chosen.pipeline, spot, [one.tombstone for one in events])
            _mark(connection, chosen.pipeline, events)
        audit.record(
            connection,
            "purge",
            actor=actor,
            pipeline=chosen.pipeline,
            subject={"topics": sorted({one.copy_topic for one in batch})},
            count=len(batch),
        )
        connection.commit()
        done += len(batch)
        progress(done)
    return done


def _refuse_unsent(connection: Connection, pipeline: str) -> None:
    """Looked at behind the choice: what is over now has left all that will ever leave of it."""
    ((unsent,),) = connection.execute(
        queries()["unsent_letters"], {"pipeline": pipeline}
    ).fetchall()
    if unsent:
        connection.rollback()
        records = "1 record is" if unsent == 1 else f"{unsent:,} records are"
        message = (
            f"pipeline {pipeline!r}: {records} still to be sent from retry topics, "
            "and a tombstone must not come before the copy that it takes away."
        )
        raise RefusedError(message, hint="Let the pipeline run until they are sent, then purge.")


def pipeline_of(connection: Connection, release: int) -> str:
    """Whose release it is."""
    row = connection.execute(queries()["release_known"], {"release": release}).fetchone()
    connection.rollback()
    if row is None:
        message = f"there is no release {release}."
        raise NotFoundError(message, hint="`sideline ops list` shows those there are.")
    return str(row[0])


class Damaged(NamedTuple):
    """A damaged event at its source, and whether a tombstone may take its key's place there."""

    event: Closed
    reason: str | None
    """Why not."""


def look_at_source(
    connection: Connection, chosen: Chosen, cluster: Cluster, kafka: Mapping[str, Any]
) -> list[Damaged]:
    """Damaged events in compacted source topics: only its key's last record can be tombstoned."""
    rows = connection.execute(queries()["purge_source"], chosen.named()).fetchall()
    connection.rollback()
    events = [Closed(*row) for row in rows]
    found: list[Damaged] = []
    for spot, some in _by_spot(events).items():
        why = _unfit(cluster, spot.topic)
        later = {} if why else _last_offsets(cluster, kafka, spot, some)
        found += [Damaged(one, why or _superseded(one, later)) for one in some]
    return found


def purge_source(
    connection: Connection, pipeline: str, damaged: Iterable[Damaged], *, actor: str
) -> int:
    """Write tombstones for damaged events into their source topics."""
    events = [one.event for one in damaged if one.reason is None]
    for spot, some in _by_spot(events).items():
        records = [Record(spot.topic, one.key, None, partition=spot.number) for one in some]
        outbox.put(connection, pipeline, spot, records)
        audit.record(
            connection,
            "purge source",
            actor=actor,
            pipeline=pipeline,
            subject={"partition": str(spot), "offsets": [one.offset for one in some]},
            count=len(some),
        )
        connection.execute(queries()["mark_source_purged"], _named(pipeline, some))
        connection.commit()
    return len(events)


def _unfit(cluster: Cluster, topic: str) -> str | None:
    """Why tombstones do nothing in a topic."""
    found = cluster.describe(topic)
    if found is None:
        return "it does not exist"
    if "compact" not in found.settings.get("cleanup.policy", ""):
        return "it is not compacted, so tombstones would take nothing away"
    return None


def _batch(connection: Connection, chosen: Chosen, topics: list[str]) -> list[Closed]:
    if not topics:
        return []
    named = chosen.named() | {"topics": topics, "limit": BATCH_EVENTS}
    rows = connection.execute(queries()["purgeable"], named).fetchall()
    return [Closed(*row) for row in rows]


def _by_spot(events: Iterable[Closed]) -> dict[Partition, list[Closed]]:
    """By partition, always in the same order: two who purge do not wait in a circle."""
    found: dict[Partition, list[Closed]] = defaultdict(list)
    for one in events:
        found[one.spot].append(one)
    return dict(sorted(found.items()))


def _mark(connection: Connection, pipeline: str, events: Sequence[Closed]) -> None:
    connection.execute(queries()["mark_purged"], _named(pipeline, events))


def _named(pipeline: str, events: Sequence[Closed]) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "topics": [one.topic for one in events],
        "partitions": [one.partition for one in events],
        "offsets": [one.offset for one in events],
        "incarnations": [one.incarnation for one in events],
    }


def _last_offsets(
    cluster: Cluster, kafka: Mapping[str, Any], spot: Partition, events: Sequence[Closed]
) -> Counter[bytes]:
    """The last offset of each wanted key in its partition."""
    wanted = {one.key for one in events}
    begins = {spot: max(min(one.offset for one in events), cluster.beginnings([spot])[spot])}
    last: Counter[bytes] = Counter()
    for key, offset in _keys(scanning.scan(kafka, begins, cluster.ends([spot]))):
        if key in wanted:
            last[key] = max(last[key], offset)
    return last


def _keys(batches: Iterable[Sequence[Any]]) -> Iterator[tuple[bytes, int]]:
    for batch in batches:
        for event in batch:
            if event.key is not None:
                yield event.key, event.offset


def _superseded(one: Closed, last: Mapping[bytes, int]) -> str | None:
    if one.key is None:
        return "it has no key"
    at = last.get(one.key)
    if at is None:
        return "it is not in its topic any more"
    return None if at == one.offset else f"offset {at} of its key came after it"
