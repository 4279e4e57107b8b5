"""Pipelines and partitions that a person keeps waiting: marks in the ledger, nothing else.

The driver leases nothing that is marked, and workers let go of it within a second or two. The
marks outlive the driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import psycopg

from sideline.engine.lease import Partition
from sideline.errors import NotFoundError, RefusedError, UsageError
from sideline.ledger import audit
from sideline.ledger.place import PartitionRow, describe_pipeline, partition_rows
from sideline.ledger.reading import schema_of
from sideline.ledger.sql import queries
from sideline.ledger.store import channel

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# Longer than a slice's transaction; a frozen worker's may take a minute.
LOCK_TIMEOUT = "15s"
MOST_CHARACTERS = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """What is paused of a pipeline after a change, and what the change was."""

    pipeline: str
    paused: bool
    """The pipeline as a whole."""
    partitions: list[str]
    """Those that are paused by themselves."""
    note: str | None
    changed: list[str]
    """What was marked or freed just now: partitions, or the pipeline's name."""
    already: list[str]
    """What was in that state before."""
    unsent: int = 0
    """Records that wait to be sent; a driver that runs sends them all the same."""


def pause(
    connection: Connection,
    pipeline: str,
    partitions: Sequence[str] = (),
    *,
    who: str,
    reason: str | None = None,
) -> Pause:
    """Lease no more of a pipeline, or of some of its partitions."""
    note = _note(who, partitions, reason)
    return _mark(connection, pipeline, partitions, paused=True, note=note, who=who, reason=reason)


def resume(
    connection: Connection, pipeline: str, partitions: Sequence[str] = (), *, who: str
) -> Pause:
    """Let it go on."""
    return _mark(connection, pipeline, partitions, paused=False, note=None, who=who, reason=None)


def _mark(  # noqa: PLR0913 - what is marked, how, by whom and why
    connection: Connection,
    pipeline: str,
    partitions: Sequence[str],
    *,
    paused: bool,
    note: str | None,
    who: str,
    reason: str | None,
) -> Pause:
    if not schema_of(connection) or describe_pipeline(connection, pipeline) is None:
        message = f"no pipeline {pipeline!r} has run with this database."
        raise NotFoundError(message, hint="`sideline status` lists those there are.")
    chosen = _choose(partitions, partition_rows(connection, pipeline), pipeline)
    before: dict[str, bool] = {}
    try:
        connection.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        if not chosen:
            before[pipeline] = _set(connection, "pause_pipeline", pipeline, paused=paused)
        # In one order, so that two people at once do not wait for each other.
        for one in sorted(chosen):
            before[str(one)] = _set(connection, "pause_partition", pipeline, one, paused=paused)
    except psycopg.errors.LockNotAvailable as error:
        connection.rollback()
        message = f"a worker of pipeline {pipeline!r} holds its row longer than {LOCK_TIMEOUT}."
        raise RefusedError(message, hint="Nothing was changed; try again in a minute.") from error
    connection.execute(queries()["note_pause"], {"pipeline": pipeline, "note": note})
    # Workers look up from their slices at once, instead of with their next beat.
    connection.execute(queries()["announce_release"], {"channel": channel(pipeline)})
    found = _look(connection, pipeline, before, paused=paused)
    if found.changed:
        audit.record(
            connection,
            "pause" if paused else "resume",
            actor=who,
            pipeline=pipeline,
            subject={"partitions": found.changed} if chosen else {},
            reason=reason,
        )
    connection.commit()
    return found


def _set(
    connection: Connection,
    query: str,
    pipeline: str,
    partition: Partition | None = None,
    *,
    paused: bool,
) -> bool:
    named = {"pipeline": pipeline, "paused": paused}
    if partition is not None:
        named |= {"topic": partition.topic, "partition": partition.number}
    row = connection.execute(queries()[query], named).fetchone()
    if row is None:
        raise _unknown(str(partition), pipeline)
    return bool(row[0])


def _look(connection: Connection, pipeline: str, before: dict[str, bool], *, paused: bool) -> Pause:
    row = connection.execute(queries()["is_paused"], {"pipeline": pipeline}).fetchone()
    whole, note = row or (False, None)
    rows = partition_rows(connection, pipeline)
    return Pause(
        pipeline,
        whole,
        [f"{row.topic}/{row.partition}" for row in rows if row.paused],
        note,
        changed=[name for name, was in before.items() if was != paused],
        already=[name for name, was in before.items() if was == paused],
        unsent=sum(row.unsent for row in rows),
    )


def _choose(wanted: Iterable[str], rows: Sequence[PartitionRow], pipeline: str) -> set[Partition]:
    """Partitions as people name them: ``users/3``, or ``3`` where one topic has it."""
    known = {Partition(row.topic, row.partition) for row in rows}
    chosen = set()
    for text in wanted:
        topic, slash, number = text.rpartition("/")
        if not (number.isascii() and number.isdigit()):
            message = f"{text!r} is not a partition."
            raise UsageError(message, hint="Write it like users/3, or 3.")
        meant = {
            one for one in known if one.number == int(number) and (not slash or one.topic == topic)
        }
        if not meant:
            raise _unknown(text, pipeline)
        if len(meant) > 1:
            names = ", ".join(sorted(map(str, meant)))
            message = f"pipeline {pipeline!r} has {len(meant)} partitions {text}: {names}."
            raise UsageError(message, hint=f"Write --partition {min(meant)}.")
        chosen |= meant
    return chosen


def _unknown(partition: str, pipeline: str) -> NotFoundError:
    message = f"pipeline {pipeline!r} has no partition {partition}."
    return NotFoundError(message, hint=f"`sideline status {pipeline}` lists those there are.")


def _note(who: str, partitions: Sequence[str], reason: str | None) -> str:
    """Who, what and why, on one line that a terminal can show."""
    what = f"{', '.join(partitions)} by {who}" if partitions else f"by {who}"
    text = " ".join(f"{what}: {reason}".split()) if reason else what
    return "".join(sign for sign in text if sign.isprintable())[:MOST_CHARACTERS]
