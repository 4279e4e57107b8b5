"""Structured Streaming with mapInArrow and COPY, written by hand.

Python workers get Arrow batches of 25,000 events, fold them by key and write them exactly as the
bare processes do. A batch that is repeated after a crash is applied again: upserts bear it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame

from bench.peers import bare, spark, task

_connections: dict[str, psycopg.Connection[Any]] = {}


def main() -> None:
    """Apply the topic to the table users."""
    given = task()
    session = spark.session(given)
    database = given.database

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from bench.peers import map_in_arrow  # noqa: PLC0415 - the worker's module, not main's

        yield from map_in_arrow.write(database, batches)

    def apply(batch: DataFrame) -> int:
        counts = batch.select("key", "value").mapInArrow(write, "events long").collect()
        return sum(row.events for row in counts)

    spark.run(given, spark.source(session, given), apply)


def write(database: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write each Arrow batch in a transaction of its own; yield how many events it had."""
    connection = _connection(database)
    for batch in batches:
        rows: dict[bytes, bare.Row] = {}
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        for key, value in zip(keys, values, strict=True):
            user = orjson.loads(value)
            rows[key] = (user["id"], user["name"], user["email"], user["seq"])
        bare.write(connection, [rows[key] for key in sorted(rows)])
        yield pa.RecordBatch.from_pydict({"events": [batch.num_rows]})


def _connection(database: str) -> psycopg.Connection[Any]:
    # Workers are reused: one connection and one stage for each.
    if database not in _connections:
        _connections[database] = bare.connect(database)
    return _connections[database]


if __name__ == "__main__":
    main()
