"""What is to be gone for good: the bytes of one key, or everything of a pipeline.

Both in one transaction, with their record in the audit; a record never holds what was erased.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from sideline import showing
from sideline.crashpoints import reach
from sideline.engine.lease import Partition
from sideline.errors import NotFoundError, RefusedError
from sideline.leaving import Record
from sideline.ledger import audit, outbox, runs
from sideline.ledger.place import LOCK_SPACE, describe_pipeline
from sideline.ledger.reading import schema_of
from sideline.ledger.sql import queries
from sideline.topics.headers import origin_id

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# Longer than a slice's transaction; a frozen worker's may take a minute.
LOCK_TIMEOUT = "15s"
# Pending: a slice names them of which nobody knows yet what became of it.
WAITING = ("parked", "retrying", "pending")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The events of a key that the ledger has, by state."""

    states: dict[str, int]
    erased: int
    """Of these: without bytes already."""
    causes: int = 0
    """Causes of failures that quote one, though it may have come back long ago."""

    @property
    def waiting(self) -> int:
        """Those that are still to be applied."""
        return sum(self.states.get(state, 0) for state in WAITING)

    @property
    def events(self) -> int:
        """All of them."""
        return sum(self.states.values())


def find(connection: Connection, pipeline: str, key: bytes, topic: str | None = None) -> Found:
    """What the ledger has of a key; NotFoundError where there is no such pipeline."""
    check_known(connection, pipeline)
    named = {"pipeline": pipeline, "key": key, "topic": topic}
    rows = connection.execute(queries()["events_of_key"], named).fetchall()
    ((causes,),) = connection.execute(queries()["causes_of_key"], named).fetchall()
    connection.rollback()
    states = {state: number for state, number, _ in rows}
    return Found(states, sum(row[2] for row in rows), int(causes))


def erase(  # noqa: PLR0913 - whose, why and who
    connection: Connection,
    pipeline: str,
    key: bytes,
    *,
    topic: str | None = None,
    actor: str,
    reason: str,
) -> int:
    """Erase the bytes of a key's events for good; how many events. Refused while one waits."""
    named = {"pipeline": pipeline, "key": key, "topic": topic}
    try:
        connection.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        _lock_spots(connection, named)
        # Locked, so that none of them is put back meanwhile; a new one may be parked any time.
        rows = connection.execute(queries()["lock_events_of_key"], named).fetchall()
        waiting = sum(state in WAITING for (state,) in rows)
        if waiting:
            connection.rollback()
            raise still_waiting(pipeline, waiting)
        rows = connection.execute(queries()["erase_events"], named).fetchall()
        erased = [_Erased(*row) for row in rows]
        spots = {
            "topics": [one.topic for one in erased],
            "partitions": [one.partition for one in erased],
            "offsets": [one.offset for one in erased],
        }
        for query in ("erase_causes", "erase_outbox"):
            connection.execute(queries()[query], {**named, **spots})
        connection.execute(queries()["give_up_dead"], {"pipeline": pipeline, **_dead(erased)})
        _take_copies_away(connection, pipeline, erased)
        _erase_words(connection, pipeline, key)
    except psycopg.errors.LockNotAvailable as error:
        connection.rollback()
        raise _busy(pipeline) from error
    # Neither the key nor its digest, which a guess at the key could be compared with.
    audit.record(
        connection, "erase", actor=actor, pipeline=pipeline, count=len(erased), reason=reason
    )
    reach("erased")
    connection.commit()
    return len(erased)


def _erase_words(connection: Connection, pipeline: str, key: bytes) -> None:
    """Take the key out of what people asked for by it."""
    named = {"pipeline": pipeline, "shown": Jsonb(showing.as_json(key))}
    connection.execute(queries()["erase_operations"], named)
    # A worker's role may only add to the audit; what is there stays there then.
    with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
        connection.execute(queries()["erase_audit"], named)


class _Erased(NamedTuple):
    """An event without its bytes."""

    topic: str
    partition: int
    offset: int
    incarnation: int
    was_dead: bool
    copy_topic: str | None
    """Where a copy of it still is, keyed by its id."""


def _lock_spots(connection: Connection, named: dict[str, Any]) -> None:
    """Counters and outboxes of the partitions that the events came from."""
    spots = connection.execute(queries()["spots_of_key"], named).fetchall()
    parts = {"topics": [spot[0] for spot in spots], "partitions": [spot[1] for spot in spots]}
    connection.execute(queries()["lock_spots"], {"pipeline": named["pipeline"], **parts})


def _dead(erased: Iterable[_Erased]) -> dict[str, list[str] | list[int]]:
    """What was dead can be released no more: it is given up, partition by partition."""
    counts = Counter((one.topic, one.partition) for one in erased if one.was_dead)
    spots = sorted(counts)
    return {
        "topics": [topic for topic, _ in spots],
        "partitions": [number for _, number in spots],
        "counts": [counts[spot] for spot in spots],
    }


def _take_copies_away(connection: Connection, pipeline: str, erased: Iterable[_Erased]) -> None:
    """Tombstones behind copies in the stash and dead-letter topics (K25)."""
    tombstones: dict[Partition, list[Record]] = defaultdict(list)
    for one in erased:
        if one.copy_topic is not None:
            origin = origin_id(one.topic, one.partition, one.offset, one.incarnation)
            record = Record(one.copy_topic, origin.encode(), None)
            tombstones[Partition(one.topic, one.partition)].append(record)
    for spot in sorted(tombstones):
        outbox.put(connection, pipeline, spot, tombstones[spot])


@dataclasses.dataclass(frozen=True, slots=True)
class Belongings:
    """What the ledger has of a pipeline."""

    rows: dict[str, int]
    """By table."""
    waiting: int
    """Events that were never applied."""
    runs: list[str]
    """Runs of it, which go along."""


def belongings(connection: Connection, pipeline: str) -> Belongings:
    """What would go; NotFoundError where there is no such pipeline."""
    check_known(connection, pipeline)
    names = _names(connection, pipeline)
    cursor = connection.execute(queries()["count_belongings"], {"pipelines": names})
    rows = {str(name): int(number) for name, number in cursor.fetchall()}
    ((waiting,),) = connection.execute(queries()["count_waiting"], {"pipelines": names}).fetchall()
    connection.rollback()
    return Belongings(rows, int(waiting), names[1:])


def forget(
    connection: Connection, pipeline: str, *, discard: bool, actor: str, reason: str | None
) -> Belongings:
    """Remove everything of a pipeline; refused while it runs, or while events wait."""
    found = belongings(connection, pipeline)
    names = [pipeline, *found.runs]
    try:
        connection.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        _check_not_held(connection, pipeline)
        check_idle(connection, names)
        # Behind the place and the rows: nobody parks anything from here on.
        for name in names:
            connection.execute(queries()["lock_partitions"], {"pipeline": name})
        ((waiting,),) = connection.execute(
            queries()["count_waiting"], {"pipelines": names}
        ).fetchall()
        if waiting and not discard:
            connection.rollback()
            raise would_lose(pipeline, waiting)
        remove(connection, names)
    except psycopg.errors.LockNotAvailable as error:
        connection.rollback()
        raise _busy(pipeline) from error
    subject = {
        "waiting": waiting,
        **{name: number for name, number in found.rows.items() if number},
    }
    audit.record(
        connection,
        "forget",
        actor=actor,
        pipeline=pipeline,
        subject=subject,
        count=found.rows.get("events", 0),
        reason=reason,
    )
    reach("forgotten")
    connection.commit()
    return dataclasses.replace(found, waiting=waiting)


def remove(connection: Connection, pipelines: Sequence[str]) -> None:
    """Delete every row of some pipelines, but not who did what to them."""
    connection.execute(queries()["remove_pipelines"], {"pipelines": list(pipelines)})


def check_known(connection: Connection, pipeline: str) -> None:
    """NotFoundError where no such pipeline has run."""
    known = schema_of(connection) and _is_text(pipeline)
    if not known or describe_pipeline(connection, pipeline) is None:
        message = f"no pipeline {pipeline!r} has run with this database."
        raise NotFoundError(message, hint="`sideline status` lists those there are.")


def _is_text(name: str) -> bool:
    """Whether PostgreSQL could hold it: words of a shell may be any bytes."""
    return "\0" not in name and name.isprintable()


def check_idle(connection: Connection, pipelines: Sequence[str]) -> None:
    """Hold the places of some pipelines until the transaction ends; refused where one runs."""
    for name in pipelines:
        place = {"pipeline": name, "space": LOCK_SPACE}
        ((free,),) = connection.execute(queries()["lock_place_for_now"], place).fetchall()
        if not free:
            connection.rollback()
            raise RefusedError(f"pipeline {name!r} is running.", hint="Stop it first.")


def still_waiting(pipeline: str, waiting: int) -> RefusedError:
    """Without their bytes they could never be applied."""
    events = (
        "an event of that key waits" if waiting == 1 else f"{waiting:,} events of that key wait"
    )
    message = f"{events} in pipeline {pipeline!r}, and could not be applied without their bytes."
    flags = "--key KEY --followers --reason TEXT --execute"
    hint = f"Give them up first: sideline discard {pipeline} {flags}"
    return RefusedError(message, hint=hint)


def would_lose(pipeline: str, waiting: int) -> RefusedError:
    """They were never applied, and nobody could any more."""
    what = "wait to be applied or sent, and would be lost"
    message = f"{waiting:,} events of pipeline {pipeline!r} {what}."
    hint = "Release them first, or give them up: --discard-parked --reason TEXT"
    return RefusedError(message, hint=hint)


def _check_not_held(connection: Connection, pipeline: str) -> None:
    """A run that is not over keeps its pipeline waiting: that has to end first."""
    of = pipeline.rpartition("@")[0]
    run = runs.under_way(connection, of) if of else None
    if run is not None and run.name == pipeline:
        connection.rollback()
        message = f"run {pipeline} is not over."
        raise RefusedError(message, hint="Give it up: sideline reprocess APP:NAME --cancel")


def _names(connection: Connection, pipeline: str) -> list[str]:
    rows = connection.execute(queries()["runs_of"], {"pipeline": pipeline}).fetchall()
    return [pipeline, *(name for (name,) in rows)]


def _busy(pipeline: str) -> RefusedError:
    message = f"a worker of pipeline {pipeline!r} holds its row longer than {LOCK_TIMEOUT}."
    return RefusedError(message, hint="Nothing was changed; try again in a minute.")
