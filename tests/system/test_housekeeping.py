"""What a driver clears away when it begins."""

from __future__ import annotations

import psycopg

from sideline import Pipeline
from sideline.engine.driver import Driver, Options
from sideline.ledger import schema
from sideline.ledger.connection import connect
from sideline.ledger.place import Place
from sideline.topics.admin import Cluster

BEAT = """
insert into sideline.workers (worker, pipeline, host, pid, beat_at)
values (gen_random_uuid(), 'tidy', %s, 1, now() - %s::interval)
"""


def test_rows_of_workers_that_are_long_gone_are_buried(database, kafka, topics):
    """The table of signs of life does not grow with every worker that ever was (K3)."""
    pipeline = Pipeline("tidy", topics=topics(partitions=1))
    pipeline.handler(lambda event: None)
    with connect(database, role="test") as connection:
        schema.ensure(connection)
        connection.execute(BEAT, ("gone", "2 hours"))
        connection.execute(BEAT, ("here", "1 second"))
    cluster = Cluster({"bootstrap.servers": kafka})
    Driver(pipeline, Place(database, pipeline), cluster, lambda _: [], Options(once=True)).run()
    with psycopg.connect(database) as connection:
        assert connection.execute("select host from sideline.workers").fetchall() == [("here",)]
