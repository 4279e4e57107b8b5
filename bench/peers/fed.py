"""The query of the mapInArrow contestant, with a pipeline of sideline's as its sink."""

from __future__ import annotations

import psycopg
from pyspark.sql import DataFrame

from bench.app import users
from bench.peers import spark, task

CONSUMED = "select coalesce(sum(consumed), 0)::int8 from sideline.progress"


def main() -> None:
    """Apply the topic to the table users."""
    given = task()
    session = spark.session(given)
    seen = 0

    def apply(batch: DataFrame) -> int:
        nonlocal seen
        users.foreach_batch(batch, 0)
        before, seen = seen, consumed.execute(CONSUMED).fetchone()[0]
        return seen - before

    with psycopg.connect(given.database, autocommit=True) as consumed:
        spark.run(given, spark.source(session, given), apply)


if __name__ == "__main__":
    main()
