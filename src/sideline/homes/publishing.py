"""What a handler publishes, made into records while it is still its event's turn.

Whatever cannot be sent fails here, like an exception of the handler, so that the event is parked
or left out as the policy says, and everything behind its key waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sideline.effects import Publish
from sideline.errors import KafkaUnreachableError, NonRecoverable, Recoverable, SidelineError
from sideline.leaving import Plain, Record
from sideline.slices import effects_of
from sideline.topics.carrying import record_of
from sideline.topics.room import FRESH_SECONDS

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.pipeline import Handler, Pipeline
    from sideline.topics.room import Rooms

_ALLOWED = (Publish,)
Made = Plain | Record | tuple[Plain | Record, ...] | None
# Frames of a record, the id that it is given, and a little more.
_FRAME_BYTES = 1_024
NOBODY: Mapping[str, BaseException] = MappingProxyType({})


def publishing(
    pipeline: Pipeline, rooms: Rooms, blamed: Mapping[str, BaseException] = NOBODY
) -> Handler:
    """The pipeline's handler; it returns records that their topics take.

    ``blamed``: events whose records Kafka did not take when they were sent. They fail with that,
    wherever they come from, until their slice is over.
    """
    handle = pipeline.handle
    # A run that applies a range again repeats the ids of the pipeline itself.
    name = pipeline.name.partition("@")[0]
    make = _maker(name, rooms)

    def made(event: Event, result: Any) -> Made:  # noqa: ANN401 - whatever a handler returns
        if result is None:
            return None
        effects = effects_of(result, _ALLOWED)
        return tuple(make(event, place, effect) for place, effect in enumerate(effects))  # type: ignore[arg-type]

    async def handle_later(event: Event) -> Made:
        if blamed and (why := blamed.get(event.id)) is not None:
            raise why
        result = await handle(event)
        return make(event, 0, result) if type(result) is Publish else made(event, result)

    def handle_now(event: Event) -> Made:
        if blamed and (why := blamed.get(event.id)) is not None:
            raise why
        result = handle(event)
        return make(event, 0, result) if type(result) is Publish else made(event, result)

    return handle_later if inspect.iscoroutinefunction(handle) else handle_now


def _maker(name: str, rooms: Rooms) -> Callable[[Event, int, Publish], Plain | Record]:
    fits: dict[str, int] = {}
    """How many bytes of key and value a topic takes for sure, by its name."""
    fits_until = 0.0

    def make(event: Event, position: int, effect: Publish) -> Plain | Record:
        # Most records: bytes for a topic that is known, with nothing else said. Made by the
        # million, so everything that only others need is left to the long way.
        key, value = effect.key, effect.value
        if (
            type(value) is bytes
            and type(key) is bytes
            and effect.headers is None
            and not event.headers
            and effect.partition is None
            and effect.timestamp is None
            and len(value) + len(key) <= fits.get(effect.topic, -1)
            and monotonic() < fits_until
        ):
            of = f"{name}/{event.topic}/{event.partition}/{event.offset}/{position}"
            return Plain(effect.topic, value, key, of.encode())
        return make_slowly(event, position, effect)

    def make_slowly(event: Event, position: int, effect: Publish) -> Record:
        nonlocal fits_until
        record = record_of(name, event, position, effect)
        most, partitions = _room(rooms, record.topic)
        if record.partition is not None and record.partition >= partitions:
            raise NonRecoverable(
                f"Publish was given partition {record.partition}, but topic {record.topic!r} has "
                f"only {partitions}"
            )
        if record.bytes > most:
            raise NonRecoverable(
                f"a record of {record.bytes:,} bytes is too large for topic {record.topic!r}, "
                f"which takes {most:,}"
            )
        if monotonic() >= fits_until:
            fits.clear()
            fits_until = monotonic() + FRESH_SECONDS / 2
        fits[record.topic] = most - _FRAME_BYTES
        return record

    return make


def _room(rooms: Rooms, topic: str) -> tuple[int, int]:
    try:
        return rooms.of(topic)
    except KafkaUnreachableError as error:
        raise Recoverable(error.message) from error
    except SidelineError as error:
        told = error.message.replace(", and a copy has to go there", "")
        raise NonRecoverable(f"Publish: {told}") from error
