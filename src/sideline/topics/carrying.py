"""What a `Publish` becomes (pure): a record that carries on what its event came with.

Correlation id and trace go from an event to what is published for it. Each record gets a message
id of its own, the same whenever the event is handled again, so that whoever reads the topic knows
a repeated one; the message id of the event stands beside it as the causation id. Headers that the
handler sets itself come first, and one of these that it sets to None is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sideline import leaving
from sideline.leaving import Record
from sideline.topics.names import is_legal

if TYPE_CHECKING:
    from sideline.effects import Publish
    from sideline.events import Event, Headers

MESSAGE_ID = leaving.MESSAGE_ID
CAUSATION_ID = "causation-id"
CORRELATION_ID = "correlation-id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# From the event's own headers, as they are.
CARRIED = (CORRELATION_ID, TRACEPARENT, TRACESTATE)
_OURS = frozenset({MESSAGE_ID, CAUSATION_ID, *CARRIED})
_INT32, _YEAR_9999_MS = 2**31 - 1, 253_402_300_799_999


def message_id(pipeline: str, event_id: str, position: int) -> str:
    """The id of the record that stands at this position of what was published for an event.

    ``pipeline`` is the declared name: a run that applies a range again repeats its ids.
    """
    return f"{pipeline}/{event_id}/{position}"


def record_of(pipeline: str, event: Event, position: int, effect: Publish) -> Record:
    """The record that the effect at this position of an event's effects stands for.

    TypeError or ValueError where no record can be made of it.
    """
    if not isinstance(effect.topic, str) or not is_legal(effect.topic):
        message = f"Publish was given the topic {effect.topic!r}, which is not a topic name"
        raise ValueError(message)
    return Record(
        effect.topic,
        _data(effect.key, "key"),
        _data(effect.value, "value"),
        headers_of(pipeline, event, position, effect.headers),
        _within(effect.partition, _INT32, "partition"),
        _within(effect.timestamp, _YEAR_9999_MS, "timestamp"),
    )


def headers_of(
    pipeline: str, event: Event, position: int, own: Mapping[str, bytes | str | None] | None
) -> Headers:
    """The headers of a record: the handler's own, then what is carried, then its id."""
    name = message_id(pipeline, event.id, position).encode()
    if not own and not event.headers:
        # Most records: nothing to look for.
        return ((MESSAGE_ID, name),)
    told: list[tuple[str, bytes | None]] = []
    said: set[str] = set()
    for header, value in _mapping(own).items():
        said.add(_name(header))
        if value is not None or header not in _OURS:
            told.append((header, _data(value, f"header {header!r}")))
    carried = {header: value for header, value in event.headers if header in _OURS}
    told += [
        (header, carried[header])
        for header in CARRIED
        if header not in said and carried.get(header) is not None
    ]
    if CAUSATION_ID not in said and carried.get(MESSAGE_ID) is not None:
        told.append((CAUSATION_ID, carried[MESSAGE_ID]))
    if MESSAGE_ID not in said:
        told.append((MESSAGE_ID, name))
    return tuple(told)


def _mapping(own: object) -> Mapping[str, bytes | str | None]:
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        message = f"Publish was given headers of type {type(own).__name__}; they are a mapping"
        raise TypeError(message)
    return own


def _name(header: object) -> str:
    if not isinstance(header, str):
        message = f"Publish was given a header with the name {header!r}, which is not text"
        raise TypeError(message)
    return header


def _data(value: object, what: str) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    message = (
        f"Publish was given a {what} of type {type(value).__name__}; it is bytes, text or None"
    )
    raise TypeError(message)


def _within(number: object, most: int, what: str) -> int | None:
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
        message = f"Publish was given the {what} {number!r}; it is a number from 0 to {most}"
        raise ValueError(message)
    return number
