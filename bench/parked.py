"""A ledger in which many keys are aside already, none of which the stream will bring."""

from __future__ import annotations

import contextlib

import psycopg

from bench.events import EVENT_BYTES, Topic
from bench.services import Services
from sideline import Pipeline
from sideline.accounting import check
from sideline.ledger import schema
from sideline.ledger.place import Place
from sideline.topics.admin import Cluster

# One event for each key, as its first failure leaves it. Offsets that the stream never reaches.
_FIRST_OFFSET = 1_000_000_000
_QUEUES = """
insert into sideline.queues (pipeline, topic, home, digest, mark, events)
select %(pipeline)s, %(topic)s, number %% %(partitions)s, md5('gone ' || number)::uuid,
       hashtext('gone ' || number), 1
from generate_series(0, %(keys)s - 1) as numbers (number)
"""
_KEYS = """
insert into sideline.keys (pipeline, topic, digest, key, queue, version)
select queues.pipeline, queues.topic, queues.digest, convert_to('gone-' || id, 'UTF8'), id, id
from sideline.queues
"""
_EVENTS = """
insert into sideline.events (
    pipeline, topic, partition, "offset", queue, state, why, key, value, timestamp_ms,
    stage, error, message, traceback, fingerprint, handler_version, attempts
)
select queues.pipeline, queues.topic, queues.home, %(first)s + queues.id, queues.id, 'parked',
       'failed', keys.key, convert_to(repeat('x', %(bytes)s), 'UTF8'), 0,
       'handler', 'ValueError', 'gone', 'ValueError: gone', '0123456789ab', 'bench', 1
from sideline.queues
join sideline.keys on keys.queue = queues.id
order by queues.id
"""
_CAUSES = """
insert into sideline.causes (
    pipeline, topic, partition, fingerprint, error, stage, place, message, traceback, last_offset,
    parked
)
select pipeline, topic, partition, fingerprint, min(error), min(stage), 'app.py:1 in gone',
       min(message), min(traceback), max("offset"), count(*)
from sideline.events
group by pipeline, topic, partition, fingerprint
"""
_PROGRESS = """
update sideline.progress
set consumed = found.events,
    parked = found.events,
    aside = found.events,
    aside_version = found.newest
from (
    select home, count(*) as events, max(id) as newest
    from sideline.queues
    group by home
) as found
where progress.partition = found.home
"""


def fill(services: Services, database: str, topic: Topic, keys: int) -> None:
    """Make the ledger, with so many keys of the topic aside; its books balance."""
    named = {
        "pipeline": "bench",
        "topic": topic.name,
        "partitions": topic.partitions,
        "keys": keys,
        "first": _FIRST_OFFSET,
        "bytes": EVENT_BYTES,
    }
    with psycopg.connect(database) as connection:
        schema.migrate(connection)
    _add_partitions(services, database, topic)
    with psycopg.connect(database, autocommit=True) as connection:
        for statement in (_QUEUES, _KEYS, _EVENTS, _CAUSES, _PROGRESS):
            connection.execute(statement, named)
        # Now, and not by itself in the middle of a measurement.
        connection.execute("vacuum (analyze, freeze)")
    (books,) = check(database, "bench")
    if books.differences:
        raise RuntimeError(books.differences[0].message)


def _add_partitions(services: Services, database: str, topic: Topic) -> None:
    topic_id = Cluster({"bootstrap.servers": services.bootstrap}).topic(topic.name).id
    with contextlib.closing(Place(database, Pipeline("bench", topics=topic.name))) as place:
        place.hold()
        for partition in range(topic.partitions):
            place.add(topic.name, partition, topic_id, 0)
