"""Waiting events with their bytes, wherever those are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sideline.events import Delivery, Event
from sideline.replays import Waiting
from sideline.views import Content, Held

Elsewhere = Callable[[Iterable[Held]], Mapping[Held, Content | None]]
"""Fetches what is not in the ledger; None: it is gone."""


def waiting_of(
    rows: Sequence[tuple[Any, ...]], topic: str, delivery: Delivery, elsewhere: Elsewhere
) -> list[Waiting]:
    """Rows of `waiting_events` as events, with their own bytes, headers and time (F13)."""
    found = [
        Waiting(
            number - 1,
            place,
            partition,
            incarnation or 0,
            state or "parked",
            fingerprint,
            generation or 0,
            queue,
            Event(
                topic,
                partition,
                offset,
                timestamp_ms,
                key,
                value,
                () if names is None else tuple(zip(names, values, strict=True)),
                delivery,
            ),
            held_in is not None,
        )
        for (
            number, place, partition, offset, queue, key, value, timestamp_ms, state, incarnation,
            generation, fingerprint, names, values, held_in,
        ) in rows
    ]  # fmt: skip
    away = {
        Held(topic, one.partition, one.event.offset, one.incarnation, row[-1]): place
        for place, (one, row) in enumerate(zip(found, rows, strict=True))
        if one.lost
    }
    if away:
        contents = elsewhere(away)
        for held, place in away.items():
            found[place] = found[place].with_content(contents.get(held))
    return found
