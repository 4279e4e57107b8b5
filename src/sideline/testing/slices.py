"""One slice, handled as a worker would, with nothing written anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from sideline.effects import Effect
from sideline.engine.handling import allowed_effects
from sideline.errors import UsageError
from sideline.events import Delivery, Event
from sideline.pipeline import Pipeline
from sideline.slices import NOTHING, Failure, effects_of


class SliceResult(NamedTuple):
    """What became of each event."""

    effects: list[tuple[Effect, ...]]
    """One entry an event, in order; empty for an event that failed or had nothing to do."""
    failures: dict[int, Failure]
    """By the event's index."""
    recoverable: frozenset[int]
    """Which of the failed events would be tried again where they are."""


def event(  # noqa: PLR0913 - an event has that many parts
    value: Any = None,  # noqa: ANN401 - whatever the test needs
    *,
    key: bytes | str | None = None,
    topic: str = "topic",
    partition: int = 0,
    offset: int = 0,
    timestamp_ms: int = 0,
    headers: Mapping[str, bytes | str | None] | Sequence[tuple[str, bytes | None]] = (),
) -> Event:
    """An event as it would come from Kafka; values that are not bytes or text become JSON.

    No value at all is a tombstone.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return Event(
        topic,
        partition,
        offset,
        timestamp_ms,
        _bytes(key),
        _payload(value),
        tuple((name, _bytes(text)) for name, text in pairs),
    )


def run_slice(
    pipeline: Pipeline,
    events: Iterable[Event],
    *,
    transaction: Any = None,  # noqa: ANN401
) -> SliceResult:
    """Run the pipeline's handler over events, in order, as one slice.

    ``transaction`` is handed to handlers that take one. Unlike in a run, a failure does not end
    the slice: every event is tried, so that a test sees all of them.
    """
    if not pipeline.has_handler:
        message = f"pipeline {pipeline.name!r} has no handler."
        raise UsageError(message)
    context = pipeline.set_up() if pipeline.set_up is not None else None
    try:
        return _run(pipeline, [_with(event, context) for event in events], transaction)
    finally:
        if pipeline.tear_down is not None:
            pipeline.tear_down(context)


def _run(pipeline: Pipeline, events: list[Event], transaction: Any) -> SliceResult:  # noqa: ANN401
    allowed = allowed_effects(pipeline)
    effects: list[tuple[Effect, ...]] = []
    failures: dict[int, Failure] = {}
    recoverable: set[int] = set()
    for index, one in enumerate(events):
        try:
            result = pipeline.handle(one, *([transaction] if pipeline.wants_transaction else []))
            if pipeline.is_async:
                result = asyncio.run(result)
            effects.append(effects_of(result, allowed))
        except KeyboardInterrupt:
            raise
        # As in a worker: whatever a handler raises is a failure of its event.
        except BaseException as error:  # noqa: BLE001
            effects.append(NOTHING)
            failures[index] = Failure(one, "handler", error)
            if pipeline.recovers(error):
                recoverable.add(index)
    return SliceResult(effects, failures, frozenset(recoverable))


def _with(one: Event, context: Any) -> Event:  # noqa: ANN401 - whatever setup returned
    return one._replace(delivery=Delivery(context))


def _payload(value: Any) -> bytes | None:  # noqa: ANN401 - whatever the test needs
    if value is None or isinstance(value, bytes | str):
        return _bytes(value)
    return orjson.dumps(value)


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
