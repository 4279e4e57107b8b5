"""Events that wait for copies which will not come: their retry topic was deleted, or emptied (F8).

A copy is no more than a signal. The event itself is in the ledger, so that another copy can be
sent; where the pipeline has no retry topics any more, the event is dead.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.engine.lease import Partition
from sideline.errors import NotFoundError
from sideline.leaving import Kept, Record
from sideline.ledger import audit, outbox
from sideline.ledger.place import partition_rows
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster

# A copy that is so late, with its topic read to the end, does not come any more.
LATE_SECONDS = 60
# Events of one call: it can be repeated.
MOST_EVENTS = 100_000


class Waiting(NamedTuple):
    """An event whose copy should have come."""

    topic: str
    partition: int
    offset: int
    incarnation: int
    attempts: int
    copy_topic: str


class Lost(NamedTuple):
    """What waits in vain."""

    events: list[Waiting]
    missing: frozenset[str]
    """Retry topics that do not exist."""
    unsent: int = 0
    """Records that wait to be sent: as long as there are some, nobody knows."""


def find(connection: Connection, cluster: Cluster, pipeline: str) -> Lost:
    """The events whose copies are gone. Changes nothing."""
    unsent = sum(row.unsent for row in partition_rows(connection, pipeline))
    rows = connection.execute(
        queries()["late_copies"],
        {"pipeline": pipeline, "late": f"{LATE_SECONDS}s", "most": MOST_EVENTS},
    ).fetchall()
    connection.rollback()
    if unsent:
        return Lost([], frozenset(), unsent)
    late = [Waiting(*row) for row in rows]
    topics = {one.copy_topic for one in late}
    missing: set[str] = set()
    ends: dict[Partition, int] = {}
    for topic in sorted(topics):
        try:
            spots = [Partition(topic, number) for number in cluster.topic(topic).partitions]
        except NotFoundError:
            missing.add(topic)
        else:
            ends |= cluster.ends(spots)
    # After the ends: what has been read up to there has brought no turn to these.
    known = partition_rows(connection, pipeline)
    connection.rollback()
    read = {Partition(row.topic, row.partition): row.next_offset for row in known}
    unread = {spot.topic for spot, end in ends.items() if read.get(spot, 0) < end}
    return Lost([one for one in late if one.copy_topic not in unread], frozenset(missing))


def resend(
    connection: Connection, pipeline: Pipeline, lost: Lost, *, actor: str
) -> tuple[int, int]:
    """Let other copies leave; how many, and how many events are dead now instead."""
    by_spot: dict[Partition, list[Waiting]] = defaultdict(list)
    for one in lost.events:
        by_spot[Partition(one.topic, one.partition)].append(one)
    sent = dead = 0
    for spot in sorted(by_spot):
        again, over = _resend(connection, pipeline, spot, by_spot[spot], lost.missing)
        audit.record(connection, "resend", actor=actor, pipeline=pipeline.name, count=again + over)
        connection.commit()
        sent, dead = sent + again, dead + over
    return sent, dead


def _resend(
    connection: Connection,
    pipeline: Pipeline,
    spot: Partition,
    events: Sequence[Waiting],
    missing: frozenset[str],
) -> tuple[int, int]:
    names: dict[str, Any] = {
        "pipeline": pipeline.name,
        "topics": [spot.topic],
        "partitions": [spot.number],
    }
    # Whoever changes a partition's books, or writes to its outbox, holds its row first.
    connection.execute(queries()["hold_origins"], names)
    targets = [_target(pipeline, one, missing) for one in events]
    rows = connection.execute(
        queries()["resend_copied"],
        {
            "pipeline": pipeline.name,
            "topic": spot.topic,
            "partition": spot.number,
            "offsets": [one.offset for one in events],
            "incarnations": [one.incarnation for one in events],
            "attempts": [one.attempts for one in events],
            "copy_topics": [one.copy_topic for one in events],
            "new_topics": [topic for topic, _ in targets],
            "delays": [delay for _, delay in targets],
        },
    ).fetchall()
    records = [
        Record(topic, None, None, of=(*spot, offset), kept=Kept("retrying", incarnation))
        for offset, incarnation, topic in rows
        if topic is not None
    ]
    dead = len(rows) - len(records)
    if dead:
        books = {"applied": [0], "filtered": [0], "dead": [dead], "duplicate": [0]}
        connection.execute(queries()["balance_origins"], names | books)
    if records:
        outbox.put(connection, pipeline.name, spot, records)
    return len(records), dead


def _target(
    pipeline: Pipeline, one: Waiting, missing: frozenset[str]
) -> tuple[str | None, int | None]:
    """Where the next copy goes, and how long it waits there; None: nowhere, the event is dead."""
    delays = pipeline.delays_seconds
    number = min(one.attempts, len(delays))
    topic: str | None = one.copy_topic
    if one.copy_topic in missing:
        topic = pipeline.names.retry_of(one.topic, pipeline.name, number) if number else None
    return topic, round(delays[number - 1] * 1000) if number else None
