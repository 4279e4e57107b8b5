"""A trial: the handler of today on events that wait, in order per key, with nothing kept (R4).

Each key has a transaction of its own that is rolled back, so that rows which the live pipeline
writes are locked for moments only. What a handler does elsewhere is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from msgspec import structs

from sideline import guardrail
from sideline.causes import cause_of
from sideline.effects import Delete, Effect, Execute, Insert, Upsert
from sideline.engine.handling import allowed_effects
from sideline.errors import GuardrailError, RefusedError, is_interrupt
from sideline.events import Delivery, Event
from sideline.homes.writer import JUDGE_DEFERRED, Writer
from sideline.sinks import Kafka, Postgres
from sideline.slices import effects_of
from sideline.views import Content, Held

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.parked import Fetch
    from sideline.pipeline import Pipeline
    from sideline.selections import Plan

MOST_EVENTS = 1_000
MOST_NAMED = 20
# The live pipeline goes first where both want a row.
LOCK_TIMEOUT = "2s"
_XACT = "select pg_current_xact_id()::text"
_WRITTEN = (Upsert, Insert, Delete, Execute)


class Waiting(NamedTuple):
    """An event that is tried."""

    lane: int
    """Events of one lane are tried in order, each on top of the one before."""
    event: Event
    lost: bool = False
    """Whether its bytes could not be had."""
    dead: bool = False
    """Whether it left its order: the guardrail is asked, as in a release (F9)."""


class Mishap(NamedTuple):
    """An event that would not be applied, and why."""

    id: str
    error: str
    message: str
    fate: str
    """``parked``: it would fail again; ``waits``: the world has to heal first; ``stops``."""


@dataclasses.dataclass(slots=True)
class Trial:
    """What would become of the events that were tried."""

    tried: int = 0
    applied: int = 0
    filtered: int = 0
    failed: int = 0
    behind: int = 0
    """Not tried, because an earlier event of their key failed."""
    elsewhere: int = 0
    """Not tried, because their bytes, or those of an event before them, are gone."""
    keys: int = 0
    mishaps: list[Mishap] = dataclasses.field(default_factory=list)
    """The first ones."""


def refuse_outside(pipeline: Pipeline) -> None:
    """A handler that acts by itself cannot be tried: it would act."""
    if isinstance(pipeline.sink, Kafka):
        message = f"pipeline {pipeline.name!r} publishes records, which nobody can take back."
        raise RefusedError(message, hint="Only effects in PostgreSQL can be tried and taken back.")
    if not isinstance(pipeline.sink, Postgres):
        message = f"the handler of pipeline {pipeline.name!r} acts on the outside world itself."
        raise RefusedError(message, hint="Only effects in PostgreSQL can be tried and taken back.")
    if pipeline.prepare is not None:
        message = f"pipeline {pipeline.name!r} has prepare=, which needs Spark; a trial has none."
        hint = "Release one key first: sideline release --first 1."
        raise RefusedError(message, hint=hint)


def read(
    connection: Connection, shown: Plan, fetch: Fetch, *, most: int = MOST_EVENTS
) -> list[Waiting]:
    """The events of a plan, as they would be replayed; at most so many.

    ``fetch`` gets bytes that are not in the ledger.
    """
    from sideline.operations import trial_rows  # noqa: PLC0415 - it knows what is chosen

    rows = trial_rows(connection, shown, most=most)
    away = [held for row in rows if (held := _held(row)).held_in != "ledger"]
    contents = fetch(shown.selection.pipeline, away) if away else {}
    dead = shown.selection.dead
    return [_waiting(row, contents)._replace(dead=dead) for row in rows]


def run(
    pipeline: Pipeline,
    connection: Connection,
    events: list[Waiting],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Trial:
    """Try the events; nothing of it stays in the database."""
    refuse_outside(pipeline)
    if any(one.dead for one in events) and (refused := guardrail.unseen(pipeline)) is not None:
        raise refused
    connection.rollback()
    # As live: what others write meanwhile is seen, and is no failure.
    connection.isolation_level = None
    writer = Writer(connection, fold=False)
    found = Trial()
    with _set_up(pipeline) as context:
        for lane in _lanes(pipeline, events):
            found.keys += 1
            _try_lane(pipeline, connection, writer, lane, context, found)
            progress(found.tried + found.behind + found.elsewhere)
    return found


def _lanes(pipeline: Pipeline, events: list[Waiting]) -> list[list[Waiting]]:
    """Events that are tried one on top of the other, as a release would.

    Dead ones of a key go in its order, and none goes behind one that fails, unless the pipeline
    gave up order.
    """
    ordered = not (pipeline.copies_failures or pipeline.independent)
    lanes: dict[Hashable, list[Waiting]] = {}
    for one in events:
        lane: Hashable = one.lane
        if one.dead and ordered and one.event.key is not None:
            lane = (one.event.topic, one.event.partition, one.event.key)
        lanes.setdefault(lane, []).append(one)
    return list(lanes.values())


def _try_lane(  # noqa: PLR0913, PLR0917 - what a trial depends on
    pipeline: Pipeline,
    connection: Connection,
    writer: Writer,
    lane: list[Waiting],
    context: Any,  # noqa: ANN401 - whatever setup returned
    found: Trial,
) -> None:
    connection.rollback()
    connection.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
    before = connection.execute(_XACT).fetchone()
    try:
        for place, one in enumerate(lane):
            if one.lost:
                found.elsewhere += len(lane) - place
                return
            found.tried += 1
            tried = one._replace(event=_with(one.event, context))
            error = _try_one(pipeline, connection, writer, tried, found)
            if error is not None:
                found.failed += 1
                if len(found.mishaps) < MOST_NAMED:
                    found.mishaps.append(_mishap(pipeline, one.event, error))
                found.behind += len(lane) - place - 1
                return
        _refuse_committed(pipeline, connection, before)
    except (
        psycopg.errors.InvalidSavepointSpecification,
        psycopg.errors.NoActiveSqlTransaction,
    ) as error:
        raise _committed(pipeline) from error
    finally:
        if not connection.closed:
            connection.rollback()


def _try_one(
    pipeline: Pipeline,
    connection: Connection,
    writer: Writer,
    one: Waiting,
    found: Trial,
) -> BaseException | None:
    failure: BaseException | None = None
    with suppress(psycopg.Rollback), connection.transaction():
        try:
            arguments = (one.event, connection) if pipeline.wants_transaction else (one.event,)
            result = pipeline.handle(*arguments)
            if pipeline.is_async:
                result = asyncio.run(result)
            effects = effects_of(result, allowed_effects(pipeline))
            if one.dead and not pipeline.independent:
                guardrail.judge(pipeline, effects)
            writer.apply_one([effect for effect in effects if isinstance(effect, _WRITTEN)])
            connection.execute(JUDGE_DEFERRED)
        except BaseException as error:
            if is_interrupt(error):
                raise
            failure = error
            raise psycopg.Rollback from None
        _count(found, effects, acts=pipeline.wants_transaction)
    if connection.closed:
        message = f"the handler of pipeline {pipeline.name!r} ended the trial's connection."
        raise RefusedError(message, hint="Take close() out of the handler.")
    return failure


def _count(found: Trial, effects: tuple[Effect, ...], *, acts: bool) -> None:
    if effects or acts:
        found.applied += 1
    else:
        found.filtered += 1


def _refuse_committed(pipeline: Pipeline, connection: Connection, before: Any) -> None:  # noqa: ANN401
    if connection.execute(_XACT).fetchone() != before:
        raise _committed(pipeline)


def _committed(pipeline: Pipeline) -> RefusedError:
    message = (
        f"pipeline {pipeline.name!r}: a statement of the handler ended the trial's "
        "transaction, so its effects may have been kept."
    )
    return RefusedError(message, hint="Take COMMIT and ROLLBACK out of the handler's SQL.")


def _mishap(pipeline: Pipeline, event: Event, error: BaseException) -> Mishap:
    cause = cause_of(error, "trial")
    fate = "stops" if isinstance(error, GuardrailError) else pipeline.fate(error)
    return Mishap(event.id, cause.error, cause.message, fate)


@contextmanager
def _set_up(pipeline: Pipeline) -> Iterator[Any]:
    context = pipeline.set_up() if pipeline.set_up is not None else None
    try:
        yield context
    finally:
        if pipeline.tear_down is not None:
            pipeline.tear_down(context)


def _held(row: tuple[Any, ...]) -> Held:
    _, topic, partition, offset, incarnation, _, _, _, _, _, held_in, *_ = row
    return Held(topic, partition, offset, incarnation, held_in)


def _waiting(row: tuple[Any, ...], contents: Mapping[Held, Content | None]) -> Waiting:
    lane, topic, partition, offset, _, timestamp_ms, key, value, names, values, *_ = row
    content: Content | None = Content(value, tuple(zip(names, values, strict=True)))
    if (held := _held(row)).held_in != "ledger":
        content = contents.get(held)
    value, headers = content or Content(None, ())
    event = Event(topic, partition, offset, timestamp_ms, key, value, headers)
    return Waiting(lane, event, lost=content is None)


def _with(event: Event, context: Any) -> Event:  # noqa: ANN401 - whatever setup returned
    return structs.replace(event, delivery=Delivery(context))
