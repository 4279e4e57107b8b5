"""foreachPartition with executemany: the short way that tutorials show."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import psycopg
from pyspark.sql import DataFrame, Row

from bench.peers import spark, task

UPSERT = """
insert into users (id, name, email, seq)
values (%(id)s, %(name)s, %(email)s, %(seq)s)
on conflict (id) do update
set name = excluded.name, email = excluded.email, seq = excluded.seq
"""


def main() -> None:
    """Apply the topic to the table users."""
    given = task()
    session = spark.session(given)
    database = given.database

    written = session.sparkContext.accumulator(0)

    def write(rows: Iterator[Row]) -> None:
        users = [orjson.loads(row.value) for row in rows]
        with psycopg.connect(database) as connection:
            connection.cursor().executemany(UPSERT, users)
        written.add(len(users))

    def apply(batch: DataFrame) -> int:
        before = written.value
        batch.select("value").foreachPartition(write)
        return written.value - before

    spark.run(given, spark.source(session, given), apply)


if __name__ == "__main__":
    main()
