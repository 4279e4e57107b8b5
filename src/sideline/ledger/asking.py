"""A person wants an event set aside that its partition waits for: a mark in the ledger.

The worker that owns the partition obeys it; nothing else may decide what becomes of an event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psycopg
from psycopg.rows import class_row

from sideline.errors import NotFoundError, RefusedError, UsageError
from sideline.ledger import audit
from sideline.ledger.reading import waiting
from sideline.ledger.sql import queries
from sideline.ledger.store import channel
from sideline.views import EventId

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# Longer than a slice's transaction; a frozen worker's may take a minute.
LOCK_TIMEOUT = "15s"


@dataclasses.dataclass(frozen=True, slots=True)
class Stuck:
    """A partition of a pipeline, and the event that it waits for."""

    pipeline: str
    stuck_at: int | None
    park_at: int | None
    """What somebody asked for already."""
    park_reason: str | None
    trouble: str | None
    attempts: int
    paused: bool
    parked: bool
    """Whether the event that is asked about waits already, set aside."""


def look(connection: Connection, event: EventId, name: str | None = None) -> Stuck:
    """The one partition that waits for the event; refused where none does."""
    rows: list[Stuck] = []
    if waiting(connection, name):
        cursor = connection.cursor(row_factory=class_row(Stuck))
        named = {"pipeline": name, **event._asdict()}
        rows = cursor.execute(queries()["stuck_partitions"], named).fetchall()
    if not rows:
        reader = "no pipeline reads" if name is None else f"pipeline {name!r} does not read"
        message = f"{reader} partition {event.topic}/{event.partition}."
        raise NotFoundError(message, hint="`sideline status` lists what is read.")
    stuck = [row for row in rows if row.stuck_at == event.offset and not row.parked]
    if not stuck:
        raise RefusedError(_reason(rows, event), hint=_next_step(rows, event))
    if len(stuck) > 1:
        names = ", ".join(row.pipeline for row in stuck)
        message = f"{len(stuck)} pipelines wait for event {event}: {names}."
        hint = f"Name one: sideline park {event} {stuck[0].pipeline} --reason TEXT"
        raise UsageError(message, hint=hint)
    return stuck[0]


def ask(connection: Connection, event: EventId, pipeline: str, reason: str, *, who: str) -> None:
    """Have the event set aside with the partition's next lease, which is due at once."""
    named = {"pipeline": pipeline, "reason": reason, **event._asdict()}
    try:
        connection.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        row = connection.execute(queries()["ask_to_park"], named).fetchone()
    except psycopg.errors.LockNotAvailable as error:
        connection.rollback()
        message = f"a worker of pipeline {pipeline!r} holds its row longer than {LOCK_TIMEOUT}."
        raise RefusedError(message, hint="Nothing was changed; try again in a minute.") from error
    if row is None:
        # It moved on since we looked: say how it stands now.
        connection.rollback()
        look(connection, event, pipeline)
        message = f"partition {event.topic}/{event.partition} of pipeline {pipeline!r} moved on."
        raise RefusedError(message, hint="Nothing was changed.")
    audit.record(
        connection,
        "park",
        actor=who,
        pipeline=pipeline,
        subject={"event": str(event)},
        count=1,
        reason=reason,
    )
    connection.execute(queries()["announce_release"], {"channel": channel(pipeline)})
    connection.commit()


def _reason(rows: Sequence[Stuck], event: EventId) -> str:
    said = []
    for row in rows:
        partition = f"partition {event.topic}/{event.partition} of pipeline {row.pipeline!r}"
        if row.parked:
            said.append(f"event {event} is parked already in pipeline {row.pipeline!r}")
        elif row.stuck_at is None:
            said.append(f"{partition} waits for no event")
        else:
            other = event._replace(offset=row.stuck_at)
            said.append(f"{partition} waits for event {other}, not for {event}")
    return f"{'; '.join(said)}."


def _next_step(rows: Sequence[Stuck], event: EventId) -> str:
    if any(row.parked for row in rows):
        return f"See it: sideline parked show {event}"
    return "Only the event that a partition blocks or backs off on can be set aside by hand."
