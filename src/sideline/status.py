"""Progress, lag and state of pipelines: right while they run and while they do not (S4)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.rows import dict_row

from sideline import operations
from sideline.engine.lease import Partition
from sideline.errors import NotFoundError
from sideline.ledger.alerts import count_open
from sideline.ledger.connection import Connection, reach
from sideline.ledger.place import PartitionRow, is_held, partition_rows
from sideline.ledger.reading import schema_of, understood
from sideline.ledger.sql import queries
from sideline.topics import peek
from sideline.topics.admin import Cluster

if TYPE_CHECKING:
    from sideline.settings import Settings

MOST_OPERATIONS = 20

COUNTERS = (
    "consumed",
    "applied",
    "filtered",
    "skipped",
    "unknown",
    "parked",
    "retrying",
    "dead",
    "discarded",
    "duplicate",
    "aside",
)


def gather(settings: Settings, name: str | None = None) -> list[dict[str, Any]]:
    """Every pipeline of the ledger, or one."""
    url = settings.require_database()
    with understood(url), reach(url, role="status") as connection:
        found = _pipelines(connection)
        if name is not None:
            found = [row for row in found if row["name"] == name]
            if not found:
                message = f"no pipeline {name!r} has run with this database."
                raise NotFoundError(message, hint="`sideline status` lists those there are.")
        rows = connection.execute(queries()["runs"]).fetchall() if found else []
        runs = {row[0]: Run(*row[1:]) for row in rows}
        if name is None:
            # A run that is over is shown to whoever asks for it.
            found = [row for row in found if not runs.get(row["name"], NO_RUN).is_over]
        cluster = Cluster(settings.kafka_client()) if settings.kafka else None
        return [
            _describe(connection, row, cluster, settings, runs.get(row["name"], NO_RUN))
            for row in found
        ]


class Run(NamedTuple):
    """What is known of a pipeline if it is a run that applies a range again."""

    of: str | None = None
    state: str | None = None
    bounds: Sequence[tuple[str, int, int]] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in {"done", "cancelled"}

    def until(self, ends: dict[Partition, int]) -> dict[Partition, int]:
        """Ends of partitions, no further than it goes itself."""
        bounds = {Partition(topic, number): bound for topic, number, bound in self.bounds}
        return {spot: min(end, bounds.get(spot, end)) for spot, end in ends.items()}


NO_RUN = Run()


def _pipelines(connection: Connection) -> list[dict[str, Any]]:
    if not schema_of(connection):
        return []
    return connection.cursor(row_factory=dict_row).execute(queries()["pipelines"]).fetchall()


def _describe(
    connection: Connection,
    row: dict[str, Any],
    cluster: Cluster | None,
    settings: Settings,
    run: Run,
) -> dict[str, Any]:
    rows = partition_rows(connection, row["name"])
    held = is_held(connection, row["name"])
    ends = run.until(_ends(cluster, rows))
    behind = {
        spot: part.next_offset
        for part in rows
        if ends.get(spot := Partition(part.topic, part.partition), -1) > part.next_offset
    }
    made = peek.timestamps(settings.kafka_client(), behind) if cluster else {}
    partitions = [_partition(part, ends, made) for part in rows]
    # What waits in a retry topic for its turn is not late.
    later = {found["topic"] for found in _rows(connection, "retry_topics", row["name"])}
    own = [part for part in partitions if part["topic"] not in later]
    known = [part["lag"] for part in own if part["lag"] is not None]
    seconds = [part["lag_seconds"] for part in own if part["lag_seconds"] is not None]
    return {
        "name": row["name"],
        "state": _state(row["state"], held=held),
        "note": row["note"],
        "run_of": run.of,
        "run_state": run.state,
        "paused": row["paused"],
        "paused_note": row["paused_note"],
        "alerts": count_open(connection, row["name"]),
        "operations": [
            {
                "id": one.id,
                "kind": one.kind,
                "state": one.state,
                "done": one.done,
                "failed": one.failed,
                "total": one.total,
                "note": one.note,
            }
            for one in operations.page(
                connection, pipeline=row["name"], only_open=True, limit=MOST_OPERATIONS
            )
        ],
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
        "lag": sum(known) if len(known) == len(own) else None,
        "lag_seconds": max(seconds, default=0.0) if cluster else None,
        **{count: sum(getattr(part, count) for part in rows) for count in COUNTERS},
        "partitions": partitions,
        "retry_topics": _rows(connection, "retrying_by_topic", row["name"]),
        "outbox": _outbox(connection, row["name"]) if any(part.unsent for part in rows) else [],
    }


def _rows(connection: Connection, query: str, pipeline: str) -> list[dict[str, Any]]:
    cursor = connection.cursor(row_factory=dict_row)
    return cursor.execute(queries()[query], {"pipeline": pipeline}).fetchall()


def _outbox(connection: Connection, pipeline: str) -> list[dict[str, Any]]:
    """What waits to be sent, by partition, and how old the oldest of it is."""
    now = datetime.now(UTC)
    return [
        {
            **row,
            "age_seconds": max(0.0, round((now - row["since"]).total_seconds(), 3))
            if row["since"]
            else None,
        }
        for row in _rows(connection, "oldest_outbox", pipeline)
    ]


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
        "parked": row.parked,
        "retrying": row.retrying,
        "dead": row.dead,
        "discarded": row.discarded,
        "duplicate": row.duplicate,
        "aside": row.aside,
        "copies": row.copies,
        "unsent": row.unsent,
        "last_event_at": row.event_at,
        "waits_until": row.due_at,
        "waits_for": row.waits_for,
        "attempts": row.attempts,
        "trouble": row.trouble,
        "stuck_at": row.stuck_at,
        "paused": row.paused,
        "held_for": row.held_for,
        "updated_at": row.updated_at,
    }
