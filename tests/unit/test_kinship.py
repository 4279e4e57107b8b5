"""Who is held out with a culprit, and who may be written before it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sideline.homes.kinship import behind, related
from sideline.homes.plans import Batch, Plan, Touch

TABLE: Any = object()


def made(keys, *touched):
    """A batch of events with these keys; each table is a list of (event, row)."""
    batch = Batch([()] * len(keys), lambda: keys)
    touches = [
        Touch(TABLE, [event for event, _ in pairs], [row for _, row in pairs] if told else None)
        for pairs, told in touched
    ]
    return batch, Plan([], touches)


@pytest.mark.parametrize(
    ("seeds", "held", "kin"),
    [
        ({0}, {0, 2, 4}, {0, 2, 4}),
        ({2}, {2, 4}, {0, 2, 4}),
        ({4}, {4}, {0, 2, 4}),
        ({3}, {3}, {3}),
        ({1, 2}, {1, 2, 4}, {0, 1, 2, 4}),
    ],
)
def test_by_key(seeds, held, kin):
    """What comes before a culprit of its key may be written first (K8)."""
    batch, plan = made(["a", "b", "a", None, "a", None])
    assert behind(batch, plan, seeds) == held
    assert related(batch, plan, seeds) == kin


def test_by_rows_and_keys_in_turns():
    """The second shares a row with the culprit, the third a key with the second (K8)."""
    batch, plan = made(["a", "b", "b", "b", "c"], ([(0, 1), (1, 2), (2, 1), (4, 2)], True))
    assert behind(batch, plan, {0}) == {0, 2, 3}
    assert behind(batch, plan, {1}) == {1, 2, 3, 4}
    assert related(batch, plan, {0}) == {0, 1, 2, 3, 4}


def test_rows_that_cannot_be_told_apart():
    """Whatever changes the table later may change the same row (K8)."""
    batch, plan = made(["a", "b", "c", "d"], ([(0, 1), (1, 2), (3, 3)], False))
    assert behind(batch, plan, {1}) == {1, 3}


@pytest.mark.parametrize("seed", range(200))
def test_whoever_comes_behind_is_found_whatever_the_turns(seed):
    """Held out is exactly what can be reached forwards, by keys and rows in any turns (K8)."""
    chance = random.Random(seed)
    count = chance.randint(1, 12)
    keys = [chance.choice(["a", "b", "c", None]) for _ in range(count)]
    rows = [chance.randint(1, 5) for _ in range(count)]
    touched = chance.choice([range(count), sorted(chance.sample(range(count), count // 2))])
    plan = Plan([], [Touch(TABLE, touched, [rows[event] for event in touched])])
    batch = Batch([()] * count, lambda: keys)
    seeds = {event for event in range(count) if chance.random() < 0.3}

    def leads(one, other):
        alike = keys[one] is not None and keys[one] == keys[other]
        shares = one in touched and other in touched and rows[one] == rows[other]
        return one < other and (alike or shares)

    reached = set(seeds)
    for event in range(count):
        if any(leads(one, event) for one in reached):
            reached.add(event)
    assert behind(batch, plan, seeds) == reached
