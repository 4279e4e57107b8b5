"""Whether the bytes of parked events are safe where they are: stash topics, and pointers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from sideline.engine.lease import Partition
from sideline.errors import NotFoundError, RefusedError
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster
    from sideline.topics.plans import Found

# Somebody should have a day to copy what is about to go.
WARN_SECONDS = 86_400.0


class Pointer(NamedTuple):
    """Events of a partition whose bytes are nowhere but in it."""

    partition: Partition
    offset: int
    """Of the oldest one."""
    timestamp_ms: int | None
    events: int
    state: str = "parked"


def check_stash(pipeline: Pipeline, cluster: Cluster, *, wait: bool = False) -> None:
    """Refuse to keep bytes where they cannot stay: compaction, a topic that is missing."""
    if pipeline.stash == "pointer":
        for topic in pipeline.topics:
            found = cluster.describe(topic)
            if found is not None and "compact" in found.settings.get("cleanup.policy", ""):
                message = (
                    f"pipeline {pipeline.name!r}: topic {topic!r} is compacted, so a later event "
                    "of its key would take a parked one away."
                )
                raise RefusedError(message, hint='Use stash="topic" or stash="ledger".')
    for own in pipeline.own_topics:
        if own.kind == "stash" and not wait and cluster.describe(own.name) is None:
            message = f"stash topic {own.name!r} does not exist at {cluster.bootstrap}."
            raise NotFoundError(message, hint="`sideline topics create` makes it.")


def pointers(pipeline: str, connection: Connection) -> list[Pointer]:
    """The oldest pointer of each partition."""
    rows = connection.execute(queries()["oldest_pointers"], {"pipeline": pipeline}).fetchall()
    connection.commit()
    return [Pointer(Partition(topic, number), *rest) for topic, number, *rest in rows]


def expiring(cluster: Cluster, pointers: Iterable[Pointer], now: float) -> dict[str, str]:
    """What is about to happen to them, by partition; nothing where they are safe."""
    known = list(pointers)
    topics = {
        name: cluster.describe(name) for name in sorted({one.partition.topic for one in known})
    }
    there = [one.partition for one in known if _holds(topics[one.partition.topic], one.partition)]
    beginnings = cluster.beginnings(there) if there else {}
    return {
        str(one.partition): told
        for one in known
        if (told := verdict(one, beginnings.get(one.partition), _kept(topics, one), now))
    }


def verdict(
    pointer: Pointer, beginning: int | None, retention_seconds: float | None, now: float
) -> str | None:
    """What somebody should know of the oldest pointer of a partition (pure)."""
    what = f"event {pointer.partition}/{pointer.offset} is {pointer.state}, and its bytes"
    many = "" if pointer.events == 1 else f"; {pointer.events:,} events are kept like this"
    if beginning is None:
        return f"{what} are gone: the source topic is not there any more{many}"
    if pointer.offset < beginning:
        return f"{what} are gone: retention has deleted them from the source topic{many}"
    if retention_seconds is None or pointer.timestamp_ms is None:
        return None
    left = pointer.timestamp_ms / 1000 + retention_seconds - now
    if left > WARN_SECONDS:
        return None
    hours = max(0, int(left // 3600))
    return f"{what} go from the source topic in about {hours} h: release or export it{many}"


def _holds(found: Found | None, partition: Partition) -> bool:
    return found is not None and partition.number < found.partitions


def _kept(topics: Mapping[str, Found | None], pointer: Pointer) -> float | None:
    """How long records stay, in seconds; None: for ever, or nobody knows."""
    found = topics[pointer.partition.topic]
    value = found.settings.get("retention.ms") if found is not None else None
    return int(value) / 1000 if value is not None and int(value) >= 0 else None
