"""Whether events may be overtaken (pure): what updates data must not leave its order (F9).

Dead letters and retry topics let later events of a key go first. That is harmless for records
that stand alone; where they change what is there, an older one would overwrite a newer one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sideline.effects import Delete, Effect, Execute, Insert, Publish, Upsert
from sideline.errors import GuardrailError
from sideline.policies import DeadLetter, RetryTopics
from sideline.sinks import Calls
from sideline.slices import effects_of

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.pipeline import Pipeline

_OVERWRITE = "let an older event overwrite a newer one"
_BRING_BACK = "let an older event bring back what a newer one deleted, or delete what it wrote"


def stands(pipeline: Pipeline) -> bool:
    """Whether the pipeline's policy lets events overtake each other, and it said nothing of it."""
    return isinstance(pipeline.on_failure, DeadLetter | RetryTopics) and not pipeline.independent


def is_order_free(pipeline: Pipeline) -> bool:
    """Whether it is known, before any event, that order does not matter to the pipeline."""
    if pipeline.independent:
        return True
    if pipeline.effects is None or pipeline.wants_transaction or isinstance(pipeline.sink, Calls):
        return False
    return all(map(_harmless, pipeline.effects))


def _harmless(effect: type[Effect] | Effect) -> bool:
    if isinstance(effect, type):
        return effect in {Insert, Publish}
    if isinstance(effect, Upsert):
        return effect.version is not None
    return isinstance(effect, Insert | Publish)


def check(pipeline: Pipeline) -> None:
    """GuardrailError if what is known before the first event forbids the policy."""
    if not stands(pipeline):
        return
    if (refused := unseen(pipeline)) is not None:
        raise refused
    for effect in pipeline.effects or ():
        if isinstance(effect, type):
            # Whether its upserts name a version, their kind alone does not say.
            if effect is Delete:
                raise _refusal(pipeline, "declares that it deletes rows", _BRING_BACK)
            if effect is Execute:
                raise _refusal(pipeline, "declares SQL of its own", _OVERWRITE)
        else:
            judge(pipeline, (effect,))


def judge(pipeline: Pipeline, effects: Iterable[Effect]) -> None:
    """GuardrailError at the first effect that depends on the order of events."""
    for effect in effects:
        kind = type(effect)
        if kind is Upsert:
            if effect.version is None:  # type: ignore[union-attr]
                table = effect.table  # type: ignore[union-attr]
                raise _refusal(pipeline, f"updates table {table}", _OVERWRITE)
        elif kind is Delete:
            table = effect.table  # type: ignore[union-attr]
            raise _refusal(pipeline, f"deletes from table {table}", _BRING_BACK)
        elif kind is Execute:
            sql = " ".join(effect.sql.split())[:60]  # type: ignore[union-attr]
            raise _refusal(pipeline, f"runs SQL of its own ({sql})", _OVERWRITE)


def first_forbidden(
    pipeline: Pipeline, effects: Sequence[tuple[Effect, ...]], places: Iterable[int]
) -> tuple[int, GuardrailError] | None:
    """The first event out of its order whose effects depend on it, and why it may not be applied.

    Whatever the policy is now: what left its order stays out of it.
    """
    if pipeline.independent:
        return None
    for place in places:
        try:
            judge(pipeline, effects[place])
        except GuardrailError as error:
            return place, error
    return None


def unseen(pipeline: Pipeline) -> GuardrailError | None:
    """Why no event out of its order may be handled: nobody sees what its handler does."""
    if pipeline.independent:
        return None
    if pipeline.wants_transaction:
        return _refusal(pipeline, "gives its handler the transaction", _OVERWRITE)
    if isinstance(pipeline.sink, Calls):
        return _refusal(pipeline, "acts on the outside world, where nobody sees what", _OVERWRITE)
    return None


def watched(pipeline: Pipeline, allowed: tuple[type, ...]) -> Callable[..., Any]:
    """The pipeline's handler; where the guardrail stands, one that raises at what it forbids."""
    handle = pipeline.handle
    if not stands(pipeline):
        return handle

    def judged(result: Any) -> tuple[Effect, ...]:  # noqa: ANN401 - whatever a handler returns
        effects = effects_of(result, allowed)
        judge(pipeline, effects)
        return effects

    async def handle_later(event: Event) -> tuple[Effect, ...]:
        return judged(await handle(event))

    def handle_now(event: Event) -> tuple[Effect, ...]:
        return judged(handle(event))

    return handle_later if inspect.iscoroutinefunction(handle) else handle_now


def _refusal(pipeline: Pipeline, does: str, danger: str) -> GuardrailError:
    what = {DeadLetter: "dead letters", RetryTopics: "retry topics"}.get(
        type(pipeline.on_failure), "events out of their order"
    )
    message = f"pipeline {pipeline.name!r} {does}, so {what} could {danger}."
    ways = ["use on_failure=Sideline()"] if stands(pipeline) else []
    if "updates table" in does:
        ways.append('give Upsert(..., version="updated_at")')
    hint = ", or ".join([*ways, "declare independent=True."])
    return GuardrailError(message, hint=hint[0].upper() + hint[1:])
