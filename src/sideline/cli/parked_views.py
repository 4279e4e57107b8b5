"""What waits, for people and for programs: cells, lines and JSON made of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sideline import showing
from sideline.views import AsideKey, CauseSeen, Dealing, Neighbour, Shown, Standing, Waiting

# What a screen bears of somebody's key or message; --json has all of it.
KEY_CHARACTERS = 80
MESSAGE_CHARACTERS = 160


def key_cell(key: bytes | None) -> str:
    """A key in a table."""
    return showing.short(showing.data(key), KEY_CHARACTERS)


def why_cell(row: AsideKey | Waiting) -> str:
    """The error in a line; what only follows has none."""
    if row.error is None:
        return "follows" if row.why == "follows" else ""
    again = f" (again, generation {row.generation})" if row.generation else ""
    return showing.short(f"{row.error}: {row.message}", MESSAGE_CHARACTERS) + again


def cause_lines(row: CauseSeen, *, name: bool) -> list[str]:
    """A cause as a tired person reads it: how many, what, where, since when, and an example."""
    counts = [f"{row.parked:,} parked ({row.share:.0%})"] if row.parked else []
    counts += [f"{row.skipped:,} skipped"] if row.skipped else []
    where = f"{row.pipeline}: " if name else ""
    return [
        f"{where}{', '.join(counts)}: {showing.words(row.error)} at {showing.words(row.place)}",
        f"    {showing.short(row.message, MESSAGE_CHARACTERS)}",
        f"    first {showing.moment(row.first_at)}, last {showing.moment(row.last_at)}",
        f"    cause {row.fingerprint}, for example {row.example}",
        "",
    ]


def event_lines(found: Shown) -> list[str]:
    """Everything about an event."""
    event = found.event
    lines = [
        f"{event.id}  {event.state} ({event.why}) in pipeline {event.pipeline}",
        _field("key", showing.data(event.key)),
        _field("timestamp", _made(event.timestamp_ms)),
        _field("parked", f"{showing.moment(event.parked_at)}, generation {event.generation}"),
        _field("handler", f"version {event.handler_version}, attempts {event.attempts}"),
        *_standing_lines(found.standing),
        *_dealing_lines(found.operations),
    ]
    if event.error is not None:
        lines += [
            _field("error", f"{showing.words(event.error)} (stage {event.stage})"),
            _field("cause", f"{event.fingerprint}"),
            *_indented("message", showing.lines(event.message or "")),
        ]
    names = [
        f"{showing.data(name.encode())}: {showing.data(value)}" for name, value in event.headers
    ]
    lines += _indented("headers", names or ["none"])
    lines += _value_lines(found)
    if event.traceback:
        lines += _indented("traceback", showing.lines(event.traceback.rstrip("\n")))
    if found.others:
        numbers = ", ".join(map(str, found.others))
        lines.append(f"The topic was made again; the same id is there as --incarnation {numbers}.")
    return lines


def _standing_lines(standing: Standing | None) -> list[str]:
    if standing is None:
        return [_field("queue", "none: nothing waits behind it")]
    place = "far from both ends" if standing.place is None else f"place {standing.place:,}"
    lines = [_field("queue", f"{place} of {standing.events:,}")]
    if len(standing.keys) > 1:
        shown = ", ".join(key_cell(key) for key, _ in standing.keys)
        lines.append(_field("  keys", shown))
    before = _neighbours(standing.before) or "nothing: all others wait for it"
    return [
        *lines,
        _field("  before", before),
        _field("  behind", _neighbours(standing.behind) or "nothing"),
    ]


def _dealing_lines(operations: Sequence[Dealing]) -> list[str]:
    lines = []
    for one in operations:
        reason = f": {showing.words(one.reason)}" if one.reason else ""
        became = {"waiting": "its turn has not come", "failed": "failed again"}.get(
            one.item, one.item
        )
        lines.append(
            _field(
                one.kind,
                f"{became}; operation {one.id}, {one.state}, {showing.moment(one.created_at)} "
                f"by {showing.words(one.actor)}{reason}",
            )
        )
    return lines


def _neighbours(events: Sequence[Neighbour]) -> str:
    return ", ".join(f"{event.id} ({event.why})" for event in events)


def _value_lines(found: Shown) -> list[str]:
    event = found.event
    if found.missing is not None:
        return [_field("value", found.missing)]
    if event.value is None or event.value_bytes is None:
        return [_field("value", "none: a tombstone")]
    more = event.value_bytes - len(event.value)
    lines = [
        _field("value", f"{event.value_bytes:,} bytes"),
        *(f"    {line}" for line in showing.block(event.value, cut=more > 0)),
    ]
    return [*lines, f"    ... {more:,} bytes more: --full"] if more else lines


def _made(milliseconds: int) -> str:
    """The record's own time; it may be any number."""
    if milliseconds < 0:
        return "none"
    try:
        at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
    return f"{showing.moment(at)} ({milliseconds} ms)"


def _field(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _indented(name: str, lines: Sequence[str]) -> list[str]:
    # Deeper than any field: no text can pass for one.
    return [f"  {name}", *(f"    {line}" for line in lines)]


# For programs


def key_json(row: AsideKey) -> dict[str, Any]:
    """A key that is aside."""
    return {
        "pipeline": row.pipeline,
        "topic": row.topic,
        "key": showing.as_json(row.key),
        "derived": row.derived,
        "events": row.events,
        "since": row.since,
        "queue": row.queue,
        "home": row.home,
        "head": None
        if row.head is None
        else {
            "id": str(row.head),
            "why": row.why,
            "error": row.error,
            "message": row.message,
            "cause": row.fingerprint,
            "generation": row.generation,
        },
    }


def cause_json(row: CauseSeen) -> dict[str, Any]:
    """Why events failed."""
    return {
        "pipeline": row.pipeline,
        "cause": row.fingerprint,
        "parked": row.parked,
        "share": round(row.share, 4),
        "skipped": row.skipped,
        "error": row.error,
        "stage": row.stage,
        "place": row.place,
        "message": row.message,
        "first_at": row.first_at,
        "last_at": row.last_at,
        "example": str(row.example),
    }


def event_json(row: Waiting) -> dict[str, Any]:
    """An event of a list."""
    return {
        "pipeline": row.pipeline,
        "id": str(row.id),
        "topic": row.topic,
        "partition": row.partition,
        "offset": row.offset,
        "incarnation": row.incarnation,
        "timestamp_ms": row.timestamp_ms,
        "key": showing.as_json(row.key),
        "value_bytes": row.value_bytes,
        "state": row.state,
        "why": row.why,
        "queue": row.queue,
        "stage": row.stage,
        "error": row.error,
        "message": row.message,
        "cause": row.fingerprint,
        "handler_version": row.handler_version,
        "attempts": row.attempts,
        "generation": row.generation,
        "parked_at": row.parked_at,
    }


def shown_json(found: Shown) -> dict[str, Any]:
    """Everything about an event."""
    event, standing = found.event, found.standing
    return event_json(event) | {
        "value": showing.as_json(event.value),
        "headers": [[name, showing.as_json(value)] for name, value in event.headers],
        "held_in": event.held_in,
        "missing": found.missing,
        "traceback": event.traceback,
        "updated_at": event.updated_at,
        "other_incarnations": found.others,
        "operations": [dataclasses.asdict(one) for one in found.operations],
        "queue": None
        if standing is None
        else {
            "id": standing.queue,
            "home": standing.home,
            "since": standing.since,
            "events": standing.events,
            "place": standing.place,
            "before": [str(other.id) for other in standing.before],
            "behind": [str(other.id) for other in standing.behind],
            "keys": [
                {"key": showing.as_json(key), "derived": derived} for key, derived in standing.keys
            ],
        },
    }
