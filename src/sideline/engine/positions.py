"""Where partitions start, and what to do when a topic is not what it was."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from sideline.engine.lease import Partition
from sideline.errors import ConfigurationError, DataLostError, RefusedError
from sideline.ledger.place import NewPartition

if TYPE_CHECKING:
    from sideline.ledger.place import PartitionRow, Place
    from sideline.pipeline import Pipeline, Start
    from sideline.topics.admin import Cluster, TopicInfo

log = logging.getLogger(__name__)

_OFFSETS = re.compile(r"\d+:\d+(,\d+:\d+)*", re.ASCII)


def parse(text: str) -> Start:
    """A start as people write it: earliest, latest, a time, or ``0:120,1:90``."""
    if text in {"earliest", "latest"}:
        return text
    if _OFFSETS.fullmatch(text):
        pairs = (pair.split(":") for pair in text.split(","))
        return {int(partition): int(offset) for partition, offset in pairs}
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is not a start."
        hint = "Write earliest, latest, 2026-01-31T12:00:00Z, or 0:120,1:90 (partition:offset)."
        raise ConfigurationError(message, hint=hint) from None
    return moment if moment.tzinfo else moment.astimezone()


def store_starts(
    pipeline: Pipeline, cluster: Cluster, place: Place, topics: list[TopicInfo]
) -> list[Partition]:
    """Store the start of every partition that is not known yet; returns those.

    Partitions of a new topic start where the pipeline says. Partitions that a known topic gained
    start at the beginning, and only after the older ones have passed the end they have now.
    """
    known = {(row.topic, row.partition): row for row in place.rows()}
    added: list[NewPartition] = []
    grown: list[str] = []
    for topic in topics:
        fresh = [number for number in topic.partitions if (topic.name, number) not in known]
        older = [number for number in topic.partitions if (topic.name, number) in known]
        if not fresh:
            continue
        partitions = [Partition(topic.name, number) for number in fresh]
        if older:
            starts = cluster.beginnings(partitions)
            # With what open transactions have written: that is older too, once it is committed.
            ends = cluster.ends_written(Partition(topic.name, number) for number in older)
            waits = {partition.number: end for partition, end in ends.items() if end > 0}
            # From here on a key may live in two partitions. The slices of the old ones have to
            # know before the new ones are read (K13).
            place.run("share_topic", topic=topic.name)
            place.run("share_partitions", topic=topic.name)
            grown.append(topic.name)
        else:
            starts = resolve(pipeline.start_at, partitions, cluster)
            waits = {}
        added += [
            NewPartition(topic.name, partition.number, topic.id, starts[partition], waits or None)
            for partition in partitions
        ]
    if added:
        place.add_all(added, shared=grown)
    return [Partition(one.topic, one.partition) for one in added]


def resolve(start: Start, partitions: list[Partition], cluster: Cluster) -> dict[Partition, int]:
    """A start position as offsets."""
    if isinstance(start, datetime):
        return cluster.at(partitions, int(start.timestamp() * 1000))
    if isinstance(start, Mapping):
        numbers = {partition.number for partition in partitions}
        unknown = sorted(set(start) - numbers)
        if unknown:
            topic = partitions[0].topic if partitions else "?"
            message = f"start names partitions {unknown}, which topic {topic!r} does not have."
            raise ConfigurationError(message)
        return _given(start, partitions, cluster)
    if start == "latest":
        return cluster.ends(partitions)
    return cluster.beginnings(partitions)


def _given(
    start: Mapping[int, int], partitions: list[Partition], cluster: Cluster
) -> dict[Partition, int]:
    """Offsets that a person named; an offset that Kafka does not have would look like a loss."""
    beginnings, ends = cluster.beginnings(partitions), cluster.ends(partitions)
    found = {}
    for partition in partitions:
        first, end = beginnings[partition], ends[partition]
        offset = start.get(partition.number, first)
        if not first <= offset <= end:
            message = f"start names offset {offset} of {partition}, which has {first} to {end}."
            raise ConfigurationError(message, hint="Name an offset that is there.")
        found[partition] = offset
    return found


def check_losses(
    cluster: Cluster,
    place: Place,
    topics: list[TopicInfo],
    *,
    accept_loss: bool,
    bounds: Mapping[Partition, int] | None = None,
) -> None:
    """Stop when Kafka no longer has what comes next; go on only when a person accepts the loss.

    Where there are bounds, what has reached its own needs nothing more.
    """
    ids = {topic.name: topic for topic in topics}
    rows = [row for row in place.rows() if row.topic in ids and not _is_done(row, bounds)]
    present = [
        Partition(row.topic, row.partition)
        for row in rows
        if row.partition in ids[row.topic].partitions
    ]
    beginnings, ends = cluster.beginnings(present), cluster.ends(present)
    losses: dict[Partition, tuple[str, int | None]] = {}
    for row in rows:
        partition = Partition(row.topic, row.partition)
        loss = _loss(row, ids[row.topic].id, beginnings.get(partition), ends.get(partition))
        if loss is not None:
            losses[partition] = loss
    if not losses:
        return
    sentences = "; ".join(text for text, _ in losses.values())
    if not accept_loss:
        hint = "Go on without these events with --accept-loss."
        raise DataLostError(f"events were lost: {sentences}.", hint=hint)
    _check_nobody_waits(rows, losses)
    log.warning("accepted: %s", sentences)
    place.change(
        "accept loss",
        [
            ("forget_partition", {"topic": topic, "partition": number})
            if go_on_at is None
            else (
                "accept_loss",
                {
                    "topic": topic,
                    "partition": number,
                    "topic_id": ids[topic].id,
                    "next_offset": go_on_at,
                },
            )
            for (topic, number), (_, go_on_at) in losses.items()
        ],
        {"lost": [text for text, _ in losses.values()]},
        count=len(losses),
    )


def _is_done(row: PartitionRow, bounds: Mapping[Partition, int] | None) -> bool:
    if bounds is None:
        return False
    return row.next_offset >= bounds.get(Partition(row.topic, row.partition), 0)


def _check_nobody_waits(
    rows: list[PartitionRow], losses: Mapping[Partition, tuple[str, int | None]]
) -> None:
    """Parked events belong to their partition: without it nobody could ever replay them."""
    for row in rows:
        _, go_on_at = losses.get(Partition(row.topic, row.partition), ("", 0))
        if go_on_at is None and (row.parked or row.aside):
            message = (
                f"{row.topic}/{row.partition} is gone, but {row.parked} events of it are parked."
            )
            hint = f"Give topic {row.topic!r} as many partitions as it had, then run again."
            raise RefusedError(message, hint=hint)


def _loss(
    row: PartitionRow, topic_id: str, beginning: int | None, end: int | None
) -> tuple[str, int | None] | None:
    """What a partition lost, and where it could go on; None: nowhere, it is gone."""
    name = f"{row.topic}/{row.partition}"
    if beginning is None or end is None:
        return f"{name} is gone, at offset {row.next_offset}", None
    if row.topic_id != topic_id:
        return f"{name} was deleted and made again at offset {row.next_offset}", beginning
    if row.next_offset < beginning:
        return f"{name} offsets {row.next_offset} to {beginning - 1}", beginning
    if row.next_offset > end:
        return f"{name} was cut off at {end}, before offset {row.next_offset}", end
    return None
