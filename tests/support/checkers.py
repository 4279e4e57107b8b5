"""What may be wrong between what was produced and what took effect (pure).

Effects are counted, one by one, in the order in which they became visible: a final table can be
right although an event was lost on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where an event stands in Kafka, and the key whose order it belongs to."""

    topic: str
    partition: int
    offset: int
    key: str | None = None


def lost(produced: Iterable[Place], effects: Iterable[Place]) -> list[Place]:
    """Events without an effect."""
    seen = set(effects)
    return [event for event in produced if event not in seen]


def invented(produced: Iterable[Place], effects: Iterable[Place]) -> list[Place]:
    """Effects of events that nobody produced."""
    known = set(produced)
    return [effect for effect in effects if effect not in known]


def duplicate(effects: Iterable[Place]) -> list[Place]:
    """Events with more than one effect."""
    return [place for place, count in Counter(effects).items() if count > 1]


def out_of_order(effects: Iterable[Place]) -> list[tuple[Place, Place]]:
    """Effects that came after a later one of their key; an event without a key stands alone."""
    last: dict[tuple[str, int, str], Place] = {}
    found = []
    for effect in effects:
        if effect.key is None:
            continue
        name = (effect.topic, effect.partition, effect.key)
        before = last.setdefault(name, effect)
        if effect.offset < before.offset:
            found.append((before, effect))
        last[name] = effect
    return found


def overtaken(effects: Iterable[Place], parked: Iterable[Place]) -> list[tuple[Place, Place]]:
    """Later events of a key that took effect while an earlier one is parked."""
    waiting: dict[tuple[str, int, str], Place] = {}
    for place in parked:
        if place.key is not None:
            name = (place.topic, place.partition, place.key)
            waiting[name] = min(waiting.get(name, place), place)
    found = []
    for effect in effects:
        first = waiting.get((effect.topic, effect.partition, effect.key or ""))
        if first is not None and effect.key is not None and effect.offset > first.offset:
            found.append((first, effect))
    return found


def first_effects(effects: Iterable[Place]) -> list[Place]:
    """Each event's first effect only: what order means where repeats are allowed."""
    return list(dict.fromkeys(effects))


class Accounts(NamedTuple):
    """The counters of one partition."""

    next_offset: int
    consumed: int
    applied: int = 0
    filtered: int = 0
    skipped: int = 0
    unknown: int = 0
    parked: int = 0


def unaccounted(
    produced: Sequence[Place], accounts: Mapping[tuple[str, int], Accounts]
) -> list[str]:
    """Partitions whose counters do not add up to the events that progress has passed."""
    found = []
    for (topic, partition), row in accounts.items():
        passed = sum(
            event.topic == topic and event.partition == partition and event.offset < row.next_offset
            for event in produced
        )
        if row.consumed != passed:
            found.append(f"{topic}/{partition}: {passed} passed, {row.consumed} consumed")
        outcomes = row.applied + row.filtered + row.skipped + row.unknown + row.parked
        if row.consumed != outcomes:
            found.append(f"{topic}/{partition}: {row.consumed} consumed, {outcomes} outcomes")
    return found


def faults(produced: Sequence[Place], effects: Sequence[Place]) -> dict[str, list[object]]:
    """Everything that contradicts exactly once and in order; empty: nothing does."""
    found: dict[str, list[object]] = {
        "lost": list(lost(produced, effects)),
        "invented": list(invented(produced, effects)),
        "duplicate": list(duplicate(effects)),
        "out of order": list(out_of_order(effects)),
    }
    return {name: places[:10] for name, places in found.items() if places}
