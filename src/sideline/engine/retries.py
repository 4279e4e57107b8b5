"""The retry topics of a pipeline: those of its policy, and older ones that still hold events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from sideline.engine.lease import Partition
from sideline.errors import NotFoundError, RefusedError
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.ledger.place import Place
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster, TopicInfo


log = logging.getLogger(__name__)


class RetryTopic(NamedTuple):
    """A topic in which failed events wait for their turn."""

    topic: str
    source: str
    number: int
    delay_ms: int


def know(pipeline: Pipeline, place: Place) -> list[RetryTopic]:
    """Write down the retry topics of the policy; all that the pipeline has or had (F8)."""
    delays = pipeline.delays_seconds
    for topic in pipeline.own_topics:
        if topic.kind == "retry":
            place.run(
                "know_retry_topic",
                topic=topic.name,
                source=topic.source,
                number=topic.n,
                delay_ms=round(delays[topic.n - 1] * 1000),
            )

    place.run("look_at_retry_topics")

    def read(connection: Connection) -> list[RetryTopic]:
        rows = connection.execute(queries()["retry_topics"], {"pipeline": pipeline.name}).fetchall()
        connection.commit()
        return [RetryTopic(*row) for row in rows]

    return place.ask(read)


def find(pipeline: Pipeline, cluster: Cluster, known: list[RetryTopic]) -> list[TopicInfo]:
    """Those of the retry topics that there are.

    NotFoundError if one of the policy's is missing, RefusedError if its times are its producers'.
    """
    needed = {topic.name for topic in pipeline.own_topics if topic.kind != "stash"}
    for name in sorted(needed):
        _needed(pipeline, cluster, name)
    for topic in pipeline.own_topics:
        if topic.kind == "retry":
            _stamped_by_broker(pipeline, cluster, topic.name)
    found = []
    for retry in known:
        try:
            found.append(cluster.topic(retry.topic))
        except NotFoundError:
            # Of an older policy: somebody has cleaned up.
            if retry.topic in needed:
                raise
    return found


def store_starts(cluster: Cluster, place: Place, topics: list[TopicInfo]) -> None:
    """Retry topics are read from their beginning, whatever the pipeline's start is."""
    known = {(row.topic, row.partition) for row in place.rows()}
    for topic in topics:
        fresh = [
            Partition(topic.name, number)
            for number in topic.partitions
            if (topic.name, number) not in known
        ]
        for partition, start in (cluster.beginnings(fresh) if fresh else {}).items():
            place.add(topic.name, partition.number, topic.id, start)


def _stamped_by_broker(pipeline: Pipeline, cluster: Cluster, name: str) -> None:
    """Where producers say the time, a copy may be due behind one that is not (F8)."""
    try:
        topic = cluster.describe(name)
    except RefusedError as error:
        log.warning("whether the broker stamps the copies in %s nobody says: %s", name, error)
        return
    kind = None if topic is None else topic.settings.get("message.timestamp.type")
    if kind is None or kind == "LogAppendTime":
        return
    message = (
        f"pipeline {pipeline.name!r}: the retry topic {name!r} has the times of its producers "
        f"({kind}), so that copies could come too early or wait for one another."
    )
    hint = "`sideline topics create --alter` mends it: message.timestamp.type=LogAppendTime."
    raise RefusedError(message, hint=hint)


def _needed(pipeline: Pipeline, cluster: Cluster, name: str) -> None:
    try:
        cluster.topic(name)
    except NotFoundError as error:
        message = f"pipeline {pipeline.name!r} needs the topic {name!r}, which does not exist."
        hint = "`sideline topics create` makes all that it needs."
        raise NotFoundError(message, hint=hint) from error
