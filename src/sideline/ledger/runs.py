"""Runs that apply a range of a pipeline's topics again: their rows, and what waits for them.

A run stands in every table under a name of its own, like a pipeline. While it is under way and
the pipeline's writes are not guarded by version, nobody takes the pipeline's own partitions: the
mark is in their progress rows, where a take has to pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from sideline.engine.lease import Partition
from sideline.errors import RefusedError
from sideline.ledger import audit
from sideline.ledger.place import LOCK_SPACE, partition_rows
from sideline.ledger.sql import queries
from sideline.sinks import Calls

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline

# Longer than a slice's transaction, and than a worker needs to let go of what is paused.
QUIET_SECONDS = 15.0
LOOK_AGAIN_SECONDS = 0.1


class Range(NamedTuple):
    """Offsets of one partition: from the first up to, not including, the last."""

    partition: Partition
    first: int
    beyond: int

    @property
    def offsets(self) -> int:
        """How many there are; some may be holes."""
        return max(0, self.beyond - self.first)


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What a person wants applied again, and how."""

    ranges: Sequence[Range]
    guarded: bool
    """The live pipeline may go on meanwhile."""
    include_damaged: bool = False
    repeat_effects: bool = False
    skip_failures: bool = False
    reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunRow:
    """A run."""

    id: int
    name: str
    pipeline: str
    state: str
    alone: bool
    bounds: list[list[Any]]
    include_damaged: bool
    repeat_effects: bool
    skip_failures: bool
    actor: str
    reason: str | None
    created_at: datetime
    ended_at: datetime | None

    @property
    def ends(self) -> dict[Partition, int]:
        """Where each partition ends."""
        return {Partition(topic, number): end for topic, number, end in self.bounds}


def under_way(connection: Connection, pipeline: str) -> RunRow | None:
    """The one run of a pipeline that is not over."""
    cursor = connection.cursor(row_factory=class_row(RunRow))
    return cursor.execute(queries()["run_under_way"], {"pipeline": pipeline}).fetchone()


def begin(connection: Connection, pipeline: Pipeline, wish: Wish, actor: str) -> RunRow:
    """Write a run down, and see to it that nothing of the pipeline overtakes it."""
    until = time.monotonic() + QUIET_SECONDS
    while True:
        try:
            found = _begin(connection, pipeline, wish, actor)
        except psycopg.errors.LockNotAvailable as error:
            connection.rollback()
            if time.monotonic() > until:
                raise _busy(pipeline.name) from error
        else:
            if found is not None:
                return found
            connection.rollback()
            if time.monotonic() > until:
                raise _busy(pipeline.name)
        time.sleep(LOOK_AGAIN_SECONDS)


def _begin(connection: Connection, pipeline: Pipeline, wish: Wish, actor: str) -> RunRow | None:
    """In one transaction; None: a worker still holds a partition."""
    name = {"pipeline": pipeline.name}
    connection.execute("select set_config('lock_timeout', '1s', true)")
    row = connection.execute(queries()["lock_pipeline"], name).fetchone()
    paused = bool(row and row[0])
    if (other := under_way(connection, pipeline.name)) is not None:
        connection.rollback()
        raise unfinished(other)
    if not wish.guarded and not _quiet(connection, pipeline, paused=paused):
        return None
    bounds = [[part.topic, part.number, beyond] for part, _, beyond in wish.ranges]
    wanted = name | {
        "alone": not wish.guarded,
        "bounds": Jsonb(bounds),
        "include_damaged": wish.include_damaged,
        "repeat_effects": wish.repeat_effects,
        "skip_failures": wish.skip_failures,
        "actor": actor,
        "reason": wish.reason,
    }
    ((number, run),) = connection.execute(queries()["add_run"], wanted).fetchall()
    connection.execute(
        queries()["add_run_pipeline"],
        {
            "run": run,
            "version": pipeline.version,
            "topics": sorted({part.topic for part, _, _ in wish.ranges}),
            "sink": type(pipeline.sink).__name__,
            "delivery": pipeline.delivery,
        },
    )
    connection.execute(
        queries()["add_run_partitions"],
        name
        | {
            "run": run,
            "topics": [part.topic for part, _, _ in wish.ranges],
            "partitions": [part.number for part, _, _ in wish.ranges],
            "starts": [first for _, first, _ in wish.ranges],
        },
    )
    if not wish.guarded:
        connection.execute(queries()["hold_for_run"], name | {"id": number})
    offsets = sum(one.offsets for one in wish.ranges)
    subject = {"run": run, "ranges": [[str(part), *rest] for part, *rest in wish.ranges]}
    audit.record(
        connection,
        "reprocess",
        actor=actor,
        pipeline=pipeline.name,
        subject=subject,
        count=offsets,
        reason=wish.reason,
    )
    made = under_way(connection, pipeline.name)
    connection.commit()
    return made


def _quiet(connection: Connection, pipeline: Pipeline, *, paused: bool) -> bool:
    """Lock the pipeline's partitions; whether nobody works on them, or can from here on."""
    name = {"pipeline": pipeline.name}
    rows = connection.execute(queries()["lock_partitions"], name).fetchall()
    place = name | {"space": LOCK_SPACE}
    ((free,),) = connection.execute(queries()["lock_place_for_now"], place).fetchall()
    released = all(row[0] for row in rows)
    unsent = sum(row[2] for row in rows)
    if not free:
        if not (paused or all(row[1] for row in rows)):
            connection.rollback()
            raise live(pipeline.name)
        return released and not unsent
    if unsent:
        # Held for the run, nobody would send them (K23).
        connection.rollback()
        message = f"{unsent:,} records of pipeline {pipeline.name!r} are still to be sent."
        raise RefusedError(message, hint="Run it until they are: sideline run APP:NAME --once")
    if released:
        return True
    if isinstance(pipeline.sink, Calls):
        # Its last worker may still be calling the outside world.
        return False
    # Its driver is gone: what that one handed out is worth nothing from here on.
    ((epoch,),) = connection.execute(queries()["fence_pipeline"], name).fetchall()
    fence = name | {"epoch": epoch, "at_once": True}
    connection.execute(queries()["fence_partitions"], fence)
    return True


def resume(
    connection: Connection, run: RunRow, actor: str, *, skip_failures: bool, reason: str | None
) -> None:
    """A run goes on; ``skip_failures``: it is to leave out what fails from here on."""
    connection.execute(queries()["change_run"], {"id": run.id, "skip_failures": skip_failures})
    audit.record(
        connection,
        "reprocess resumed",
        actor=actor,
        pipeline=run.pipeline,
        subject={"run": run.name, "skip_failures": skip_failures or run.skip_failures},
        reason=reason,
    )
    connection.commit()


def finish(connection: Connection, run: RunRow, actor: str) -> bool:
    """The run has reached all its bounds, and all that it wrote is sent: the pipeline goes on.

    False: it is not over yet.
    """
    rows = partition_rows(connection, run.name)
    ends = run.ends
    if any(
        row.unsent or row.next_offset < ends[Partition(row.topic, row.partition)] for row in rows
    ):
        connection.rollback()
        return False
    counts = {
        name: sum(getattr(row, name) for row in rows)
        for name in ("consumed", "applied", "filtered", "skipped", "duplicate")
    }
    _end(connection, run, "done", actor, counts=counts)
    return True


def cancel(connection: Connection, run: RunRow, actor: str, reason: str | None = None) -> None:
    """Give a run up: what it applied stands, and nothing of it is written from here on."""
    place = {"pipeline": run.name, "space": LOCK_SPACE}
    connection.execute("select set_config('lock_timeout', '15s', true)")
    ((free,),) = connection.execute(queries()["lock_place_for_now"], place).fetchall()
    if not free:
        connection.rollback()
        message = f"run {run.name} is at work."
        raise RefusedError(message, hint="Stop it first: Ctrl-C or SIGTERM where it runs.")
    try:
        ((epoch,),) = connection.execute(queries()["fence_pipeline"], place).fetchall()
        fence = {"pipeline": run.name, "epoch": epoch, "at_once": True}
        connection.execute(queries()["fence_partitions"], fence)
    except psycopg.errors.LockNotAvailable as error:
        connection.rollback()
        raise _busy(run.name) from error
    rows = partition_rows(connection, run.name)
    if unsent := sum(row.unsent for row in rows):
        connection.rollback()
        message = f"{unsent:,} records of run {run.name} are still to be sent."
        raise RefusedError(message, hint="Let it go on until they are: --resume")
    counts = {"consumed": sum(row.consumed for row in rows)}
    _end(connection, run, "cancelled", actor, counts=counts, reason=reason)


def _end(  # noqa: PLR0913 - what is written down of it
    connection: Connection,
    run: RunRow,
    state: str,
    actor: str,
    *,
    counts: Mapping[str, int],
    reason: str | None = None,
) -> None:
    ended = connection.execute(queries()["end_run"], {"id": run.id, "state": state}).fetchone()
    if ended is None:
        # Somebody else ended it meanwhile.
        connection.rollback()
        return
    connection.execute(queries()["let_go_of_run"], {"id": run.id})
    connection.execute(queries()["clear_alerts_of"], {"pipeline": run.name})
    audit.record(
        connection,
        f"reprocess {state}",
        actor=actor,
        pipeline=run.pipeline,
        subject={"run": run.name, **counts},
        count=counts["consumed"],
        reason=reason,
    )
    connection.commit()


def unfinished(run: RunRow) -> RefusedError:
    """One run of a pipeline at a time."""
    message = f"run {run.name}, begun by {run.actor}, is not over."
    hint = "Let it go on with --resume, or give it up with --cancel."
    return RefusedError(message, hint=hint)


def live(pipeline: str) -> RefusedError:
    """The pipeline runs, and its writes would meet those of the run."""
    message = (
        f"pipeline {pipeline!r} is running: an older event, applied again, could replace what it "
        "has just written."
    )
    hint = (
        f"Let it wait meanwhile: sideline pause {pipeline}\n"
        'Or guard its upserts: effects=[Upsert("users", {...}, key="id", version="updated_at")]'
    )
    return RefusedError(message, hint=hint)


def _busy(pipeline: str) -> RefusedError:
    message = f"a worker of {pipeline!r} holds its partitions longer than {QUIET_SECONDS:.0f} s."
    return RefusedError(message, hint="Nothing was changed; try again in a minute.")
