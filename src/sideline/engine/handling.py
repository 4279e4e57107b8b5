"""Runs the user's handler over a run of events, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sideline.effects import Delete, Effect, Execute, Insert, Upsert
from sideline.policies import Skip
from sideline.sinks import Postgres
from sideline.slices import NOTHING, Failure, Handled, effects_of

if TYPE_CHECKING:
    from sideline.clock import Clock
    from sideline.events import Event
    from sideline.pipeline import Pipeline

# A slice ends after this much handling, so that a lease ends in time.
HANDLING_SECONDS = 0.5
# A run of events is longer than the last one if that was quicker than this.
QUICK_SECONDS = 0.005
LONGEST_RUN = 256


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
    until = clock.monotonic() + HANDLING_SECONDS
    if pipeline.key is None and not isinstance(pipeline.on_failure, Skip):
        effects, mixed, failure = _handle_runs(pipeline, events, until, clock)
        executes = mixed and any(map(runs_sql, effects))
        handled = Handled(start, end, events, effects, 0, executes)
        return handled.prefix(len(effects)), failure
    return _handle_each(pipeline, events, until, clock, span=(start, end))


def _handle_runs(
    pipeline: Pipeline, events: Sequence[Event], until: float, clock: Clock
) -> tuple[list[tuple[Effect, ...]], bool, Failure | None]:
    """Handle ever longer runs of events, so that the loop itself costs next to nothing.

    Returns their effects, whether these are anything but one upsert each, and what failed.
    """
    allowed = allowed_effects(pipeline)
    results: list[Any] = []
    effects: list[tuple[Effect, ...]] = []
    failure = None
    mixed = False
    length = 1
    before = clock.monotonic()
    while len(effects) < len(events) and failure is None:
        done = len(results)
        wanted = events[done : done + length]
        try:
            # What came before an exception stays in the list.
            results.extend(map(pipeline.handle, wanted))
            if len(results) < done + len(wanted):
                # To map() it was the end of the events; to the handler it was an exception.
                raise StopIteration  # noqa: TRY301
        except KeyboardInterrupt:
            raise
        # Whatever a handler raises, SystemExit included, is a failure of its event alone.
        except BaseException as error:  # noqa: BLE001
            failure = Failure(events[len(results)], "handler", error)
        run = results[done:]
        if Upsert in allowed and set(map(type, run)) == {Upsert}:
            effects.extend(zip(run, strict=True))
        else:
            mixed = True
            misfit = _take_effects(run, effects, allowed)
            if misfit is not None:
                failure = Failure(events[len(effects)], "handler", misfit)
        now = clock.monotonic()
        if now > until:
            break
        if now - before < QUICK_SECONDS:
            length = min(length * 2, LONGEST_RUN)
        else:
            length = max(1, length // 2)
        before = now
    return effects, mixed, failure


def _take_effects(
    results: list[Any], effects: list[tuple[Effect, ...]], allowed: tuple[type, ...]
) -> BaseException | None:
    """Add what handlers returned; the error of the first that is not an effect, if one is not."""
    for result in results:
        try:
            effects.append(effects_of(result, allowed))
        except KeyboardInterrupt:
            raise
        # A generator runs the user's code here.
        except BaseException as error:  # noqa: BLE001
            return error
    return None


def _handle_each(
    pipeline: Pipeline,
    events: Sequence[Event],
    until: float,
    clock: Clock,
    *,
    span: tuple[int, int],
) -> tuple[Handled, Failure | None]:
    """Handle events one by one, with their keys derived and failures left out."""
    start, end = span
    run = pipeline.handle
    allowed = allowed_effects(pipeline)
    effects: list[tuple[Effect, ...]] = []
    append = effects.append
    failure = None
    skipped = 0
    executes = False
    derive = pipeline.key
    keys: list[Any] = []
    monotonic = clock.monotonic
    for event in events:
        try:
            if derive is not None:
                hash(key := derive(event))
                keys.append(key)
            some = effects_of(run(event), allowed)
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
