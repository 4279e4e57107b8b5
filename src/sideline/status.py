"""Progress, lag and state of pipelines: right while they run and while they do not (S4)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from sideline.engine.lease import Partition
from sideline.errors import NotFoundError
from sideline.ledger import schema
from sideline.ledger.connection import Connection, reach
from sideline.ledger.place import PartitionRow, is_held, partition_rows
from sideline.ledger.sql import queries
from sideline.topics import peek
from sideline.topics.admin import Cluster

if TYPE_CHECKING:
    from sideline.settings import Settings


def gather(settings: Settings, name: str | None = None) -> list[dict[str, Any]]:
    """Every pipeline of the ledger, or one."""
    with reach(settings.require_database(), role="status") as connection:
        found = _pipelines(connection)
        if name is not None:
            found = [row for row in found if row["name"] == name]
            if not found:
                message = f"no pipeline {name!r} has run with this database."
                raise NotFoundError(message, hint="`sideline status` lists those there are.")
        cluster = Cluster(settings.kafka_client()) if settings.kafka else None
        return [_describe(connection, row, cluster, settings) for row in found]


def _pipelines(connection: Connection) -> list[dict[str, Any]]:
    if schema.version(connection) == 0:
        return []
    return connection.cursor(row_factory=dict_row).execute(queries()["pipelines"]).fetchall()


def _describe(
    connection: Connection, row: dict[str, Any], cluster: Cluster | None, settings: Settings
) -> dict[str, Any]:
    rows = partition_rows(connection, row["name"])
    held = is_held(connection, row["name"])
    ends = _ends(cluster, rows)
    behind = {
        spot: part.next_offset
        for part in rows
        if ends.get(spot := Partition(part.topic, part.partition), -1) > part.next_offset
    }
    made = peek.timestamps(settings.kafka_client(), behind) if cluster else {}
    partitions = [_partition(part, ends, made) for part in rows]
    known = [part["lag"] for part in partitions if part["lag"] is not None]
    seconds = [part["lag_seconds"] for part in partitions if part["lag_seconds"] is not None]
    return {
        "name": row["name"],
        "state": _state(row["state"], held=held),
        "note": row["note"],
        "topics": row["topics"],
        "sink": row["sink"],
        "delivery": row["delivery"],
        "handler_version": row["handler_version"],
        "driver": {
            "host": row["driver_host"],
            "pid": row["driver_pid"],
            "since": row["driver_since"],
        }
        if held
        else None,
        "events_per_second": row["events_per_second"] if held else 0.0,
        "lag": sum(known) if len(known) == len(partitions) else None,
        "lag_seconds": max(seconds, default=0.0) if cluster else None,
        **{
            count: sum(getattr(part, count) for part in rows)
            for count in ("consumed", "applied", "filtered", "skipped", "unknown")
        },
        "partitions": partitions,
    }


def _state(recorded: str, *, held: bool) -> str:
    if held:
        return "running"
    # It never said goodbye.
    return "crashed" if recorded == "running" else recorded


def _ends(cluster: Cluster | None, rows: list[PartitionRow]) -> dict[Partition, int]:
    if cluster is None:
        return {}
    ends: dict[Partition, int] = {}
    for topic in sorted({row.topic for row in rows}):
        try:
            there = set(cluster.topic(topic).partitions)
        except NotFoundError:
            continue
        spots = [Partition(topic, row.partition) for row in rows if row.topic == topic]
        ends |= cluster.ends(spot for spot in spots if spot.number in there)
    return ends


def _partition(
    row: PartitionRow, ends: dict[Partition, int], made: dict[Partition, int]
) -> dict[str, Any]:
    spot = Partition(row.topic, row.partition)
    end = ends.get(spot)
    lag = None if end is None else max(0, end - row.next_offset)
    seconds: float | None = None
    if lag == 0:
        seconds = 0.0
    elif spot in made:
        seconds = max(0.0, round(time.time() - made[spot] / 1000, 3))
    return {
        "topic": row.topic,
        "partition": row.partition,
        "next_offset": row.next_offset,
        "end": end,
        "lag": lag,
        "lag_seconds": seconds,
        "consumed": row.consumed,
        "applied": row.applied,
        "filtered": row.filtered,
        "skipped": row.skipped,
        "unknown": row.unknown,
        "last_event_at": row.event_at,
        "waits_until": row.due_at,
        "attempts": row.attempts,
        "trouble": row.trouble,
        "updated_at": row.updated_at,
    }
