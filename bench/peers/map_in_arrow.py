"""Structured Streaming with mapInArrow and COPY, written by hand.

Python workers get Arrow batches of 25,000 events, fold them by key and write them exactly as the
bare processes do. A batch that is repeated after a crash is applied again: upserts bear it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from bench.peers import arrow_writer, spark, task


def main() -> None:
    """Apply the topic to the table users."""
    given = task()
    session = spark.session(given)
    database = given.database

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return arrow_writer.write(database, batches)

    def apply(batch: DataFrame) -> int:
        counts = batch.select("key", "value").mapInArrow(write, "events long").collect()
        return sum(row.events for row in counts)

    spark.run(given, spark.source(session, given), apply)


if __name__ == "__main__":
    main()
