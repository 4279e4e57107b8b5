"""One slice, handled as a worker would, with nothing written anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson
from msgspec import structs

from sideline.dedupe import ids_of
from sideline.effects import Effect
from sideline.engine.handling import allowed_effects
from sideline.errors import UsageError
from sideline.events import Delivery, Event
from sideline.guardrail import watched
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
    duplicates: frozenset[int] = frozenset()
    """Which events bring a message that an earlier one of them has brought."""


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
    the slice: every event is tried, so that a test sees all of them. Coroutines run one after the
    other, in one loop.
    """
    if not pipeline.has_handler:
        message = f"pipeline {pipeline.name!r} has no handler."
        raise UsageError(message)
    context = pipeline.set_up() if pipeline.set_up is not None else None
    try:
        with _waiting(pipeline) as wait:
            return _run(pipeline, [_with(event, context) for event in events], transaction, wait)
    finally:
        if pipeline.tear_down is not None:
            pipeline.tear_down(context)


@contextmanager
def _waiting(pipeline: Pipeline) -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """What waits for coroutines: in one loop for all, as in a worker, for clients belong to one."""

    async def whole(result: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever a handler returns
        return await result

    if not pipeline.is_async:
        yield lambda result: result
        return
    if _in_a_coroutine():
        message = "run_slice has a loop of its own, and cannot be called from a coroutine."
        raise UsageError(message, hint="Call it in an ordinary function, or by asyncio.to_thread.")
    with asyncio.Runner() as runner:
        yield lambda result: runner.run(whole(result))


def _in_a_coroutine() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(
    pipeline: Pipeline,
    events: list[Event],
    transaction: Any,  # noqa: ANN401
    wait: Callable[[Awaitable[Any]], Any],
) -> SliceResult:
    allowed = allowed_effects(pipeline)
    handle = watched(pipeline, allowed)
    effects: list[tuple[Effect, ...]] = []
    failures: dict[int, Failure] = {}
    recoverable: set[int] = set()
    ids, unnamed = ids_of(pipeline.dedupe, events) if pipeline.dedupe else ([], {})
    applied: set[bytes] = set()
    duplicates: set[int] = set()
    for index, one in enumerate(events):
        if ids and ids[index] in applied:
            duplicates.add(index)
            effects.append(NOTHING)
            continue
        stage = "dedupe" if index in unnamed else "key"
        try:
            if index in unnamed:
                raise unnamed[index]  # noqa: TRY301 - as if the handler had
            pipeline.key_of(one)
            stage = "handler"
            result = handle(one, *([transaction] if pipeline.wants_transaction else []))
            effects.append(effects_of(wait(result), allowed))
            if ids and (named := ids[index]) is not None:
                applied.add(named)
        except KeyboardInterrupt:
            raise
        # As in a worker: whatever a handler or ``key=`` raises is a failure of its event.
        except BaseException as error:  # noqa: BLE001
            effects.append(NOTHING)
            failures[index] = Failure(one, stage, error)
            if pipeline.recovers(error):
                recoverable.add(index)
    return SliceResult(effects, failures, frozenset(recoverable), frozenset(duplicates))


def _with(one: Event, context: Any) -> Event:  # noqa: ANN401 - whatever setup returned
    return structs.replace(one, delivery=Delivery(context))


def _payload(value: Any) -> bytes | None:  # noqa: ANN401 - whatever the test needs
    if value is None or isinstance(value, bytes | str):
        return _bytes(value)
    return orjson.dumps(value)


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
