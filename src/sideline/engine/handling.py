"""Runs the user's handler over a run of events, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sideline.effects import Delete, Effect, Execute, Insert, Upsert
from sideline.sinks import Postgres
from sideline.slices import NOTHING, Failure, Handled, effects_of

if TYPE_CHECKING:
    from sideline.clock import Clock
    from sideline.events import Event
    from sideline.pipeline import Pipeline

# A slice ends after this much handling, so that a lease ends in time.
HANDLING_SECONDS = 0.5


def allowed_effects(pipeline: Pipeline) -> tuple[type, ...]:
    """The effects that the pipeline's sink takes, and that it declared, if it declared any."""
    fits: tuple[type, ...] = ()
    if isinstance(pipeline.sink, Postgres):
        fits = (Upsert, Insert, Delete, Execute)
    if pipeline.effects is None:
        return fits
    declared = {effect if isinstance(effect, type) else type(effect) for effect in pipeline.effects}
    return tuple(kind for kind in fits if kind in declared)


def runs_sql(effects: tuple[Effect, ...]) -> bool:
    """Whether SQL of the handler's own is among the effects."""
    return any(type(effect) is Execute for effect in effects)


def handle(
    pipeline: Pipeline,
    events: Sequence[Event],
    *,
    start: int,
    end: int,
    clock: Clock,
) -> tuple[Handled, Failure | None]:
    """Handle events until one fails or the time for a slice is over.

    Returns what was handled and, if that ended it, the failure of the event behind it.
    """
    run = pipeline.handle
    allowed = allowed_effects(pipeline)
    upserts = Upsert in allowed
    effects: list[tuple[Effect, ...]] = []
    append = effects.append
    failure = None
    skipped = 0
    executes = False
    derive = pipeline.key
    keys: list[Any] = []
    monotonic = clock.monotonic
    until = monotonic() + HANDLING_SECONDS
    for event in events:
        try:
            if derive is not None:
                hash(key := derive(event))
                keys.append(key)
            result = run(event)
            if upserts and result.__class__ is Upsert:
                append((result,))
            else:
                some = effects_of(result, allowed)
                append(some)
                executes = executes or runs_sql(some)
        except KeyboardInterrupt:
            raise
        # Whatever a handler raises, SystemExit included, is a failure of its event alone.
        except BaseException as error:  # noqa: BLE001
            if not pipeline.skips(error):
                failure = Failure(event, "handler", error)
                break
            skipped += 1
            append(NOTHING)
            if derive is not None and len(keys) < len(effects):
                keys.append(None)
        if monotonic() > until:
            break
    count = len(effects)
    del keys[count:]
    if count < len(events):
        end = events[count].offset
        events = events[:count]
    return Handled(start, end, events, effects, skipped, executes, keys or None), failure
