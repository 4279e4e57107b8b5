"""A pipeline as a run of `sideline reprocess` applies it: the same handler, under another name.

Pure: what would happen twice, and what it may do. Whether it may run beside the live pipeline,
`sideline.guardrail` knows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sideline import guardrail
from sideline.effects import EFFECTS, Delete, Effect, Upsert
from sideline.errors import GuardrailError
from sideline.policies import Skip, Stop
from sideline.sinks import Calls, Kafka, Postgres
from sideline.slices import effects_of

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.pipeline import Pipeline

# Applied twice, in order, they leave what they left the first time.
HARMLESS: tuple[type[Effect], ...] = (Upsert, Delete)
# No share is larger: what is passed over would otherwise look like a loss.
NO_ALARM = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """What a run has to know of the pipeline whose events it applies again."""

    of: str
    """The pipeline's own name: what waits and what is damaged stands under it."""
    include_damaged: bool = False


def repeats(pipeline: Pipeline) -> list[str]:
    """What would happen a second time, as far as the declaration tells."""
    if isinstance(pipeline.sink, Calls):
        return ["calls of the handler"]
    if isinstance(pipeline.sink, Kafka):
        return ["records that it publishes"]
    if pipeline.wants_transaction:
        return ["SQL of the handler in its transaction"]
    kinds = {_kind(effect) for effect in pipeline.effects or ()}
    return sorted(kind.__name__ for kind in kinds if kind not in HARMLESS)


def derive(  # noqa: PLR0913 - what was asked for, by keyword
    pipeline: Pipeline,
    run: str,
    *,
    include_damaged: bool = False,
    repeat_effects: bool = False,
    skip_failures: bool = False,
    guarded: bool = False,
) -> Pipeline:
    """The pipeline as the run ``run`` of it.

    What fails stops the run, or is left out: it is never parked, or a key would have two tails.
    ``guarded``: it runs beside the live pipeline, so only what no order matters to may pass.
    """
    made = copy.copy(pipeline)
    made.name = run
    made.again = Again(pipeline.name, include_damaged)
    skips = skip_failures or isinstance(pipeline.on_failure, Skip)
    made.on_failure = Skip(alarm=NO_ALARM) if skips else Stop()
    # Nothing waits under its name, so it needs no topics of its own either.
    made.stash = "ledger"
    if not repeat_effects and isinstance(pipeline.sink, Postgres):
        declared = HARMLESS if pipeline.effects is None else pipeline.effects
        made.effects = tuple(effect for effect in declared if _kind(effect) in HARMLESS)
    if guarded and not pipeline.independent:
        made.handle = _newer_only(pipeline)
    return made


def _kind(effect: type[Effect] | Effect) -> type[Effect]:
    return effect if isinstance(effect, type) else type(effect)


def _newer_only(pipeline: Pipeline) -> Callable[..., Any]:
    """The handler, if what it returns can do no harm to newer rows, whatever was declared."""
    handler = pipeline.handle

    def checked(result: object) -> tuple[Effect, ...]:
        effects = effects_of(result, EFFECTS)
        try:
            guardrail.judge(pipeline, effects)
        except GuardrailError as error:
            # Like anything else that fails it stops the run.
            raise TypeError(error.message) from None
        return effects

    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def handle_async(event: Event) -> tuple[Effect, ...]:
            return checked(await handler(event))

        return handle_async

    @functools.wraps(handler)
    def handle(event: Event) -> tuple[Effect, ...]:
        return checked(handler(event))

    return handle
