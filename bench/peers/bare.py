"""Two bare confluent-kafka processes: what the same work costs without Spark and without safety.

The same fold by key over 25,000 events of a partition, the same binary COPY into a temporary
table and INSERT .. SELECT .. ON CONFLICT, one transaction each. No progress is kept, no failure
is handled: a crash would apply everything again, a bad event would stop it.
"""

from __future__ import annotations

import os
from typing import Any

import orjson
import psycopg
from confluent_kafka import Consumer, Message, TopicPartition

from bench.peers import TRANSACTION_EVENTS, UPSERT, Task, report, task

# psycopg's COPY slows down on longer streams.
COPY_ROWS = 5_000
Row = tuple[str, str, str, int]


def main() -> None:
    """Fork one process for each slot and wait for them."""
    given = task()
    children = [pid for slot in range(given.slots) if (pid := _fork(given, slot))]
    failed = [pid for pid in children if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    raise SystemExit(1 if failed else 0)


def _fork(given: Task, slot: int) -> int:
    pid = os.fork()
    if pid == 0:
        partitions = list(range(slot, given.partitions, given.slots))
        consume(given, partitions)
        os._exit(0)
    return pid


def consume(given: Task, partitions: list[int]) -> None:
    """Apply all events of the partitions up to the end that they have now."""
    consumer = Consumer(
        {
            "bootstrap.servers": given.bootstrap,
            "group.id": "bare",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
        }
    )
    left = {
        p: consumer.get_watermark_offsets(TopicPartition(given.topic, p), timeout=10)[1]
        for p in partitions
    }
    consumer.assign([TopicPartition(given.topic, p, 0) for p in partitions])
    slices: dict[int, list[Message]] = {p: [] for p in partitions}
    with connect(given.database) as connection:
        while any(left.values()):
            for message in consumer.consume(10_000, timeout=0.05):
                slices[message.partition() or 0].append(message)
            for partition, waiting in slices.items():
                if waiting and len(waiting) >= min(TRANSACTION_EVENTS, left[partition]):
                    slice_ = waiting[:TRANSACTION_EVENTS]
                    apply(connection, slice_)
                    left[partition] -= len(slice_)
                    slices[partition] = waiting[TRANSACTION_EVENTS:]
    consumer.close()


def connect(database: str) -> psycopg.Connection[Any]:
    """A connection with an empty stage."""
    connection = psycopg.connect(database)
    connection.execute(
        "create temporary table stage (id text, name text, email text, seq int8)"
        " on commit delete rows"
    )
    connection.commit()
    return connection


def apply(connection: psycopg.Connection[Any], messages: list[Message]) -> None:
    """Fold by key, write in one transaction, report."""
    rows: dict[bytes, Row] = {}
    for message in messages:
        user = orjson.loads(message.value() or b"")
        rows[message.key() or b""] = (user["id"], user["name"], user["email"], user["seq"])
    write(connection, [rows[key] for key in sorted(rows)])
    report(len(messages))


def write(connection: psycopg.Connection[Any], rows: list[Row]) -> None:
    """Put the rows into the table by way of the stage, and commit."""
    cursor = connection.cursor()
    for start in range(0, len(rows), COPY_ROWS):
        with cursor.copy("copy stage from stdin with (format binary)") as copy:
            copy.set_types(["text", "text", "text", "int8"])
            for row in rows[start : start + COPY_ROWS]:
                copy.write_row(row)
    cursor.execute(UPSERT.format(stage="stage"))
    connection.commit()


if __name__ == "__main__":
    main()
