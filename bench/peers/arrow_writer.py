"""The Python worker of the mapInArrow contestant; a module, so that workers keep its connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import psycopg
import pyarrow as pa

from bench.peers import bare

_connections: dict[str, psycopg.Connection[Any]] = {}


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
