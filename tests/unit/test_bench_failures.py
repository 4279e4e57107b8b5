"""What the bench says about failures is what it measured."""

from __future__ import annotations

import orjson
import pytest

from bench import poison
from bench.contest import Run
from bench.cpu import Cpu
from bench.suites.failures import cost_seconds


@pytest.mark.parametrize("kind", poison.KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("keys", ["repeated", "distinct"])
@pytest.mark.parametrize("count", poison.POISON)
def test_a_slice_has_as_many_poison_keys_as_it_says(kind, keys, count):
    """No two bad rows share a key; where rows are folded, the bad one is its key's last."""
    bodies = poison._slice(kind, keys, count, 7)
    good = poison._slice(kind, keys, 0, 7)
    last = {key: place for place, (key, _) in enumerate(bodies)}
    bad = [place for place, pair in enumerate(zip(bodies, good, strict=True)) if len(set(pair)) > 1]
    assert len(bodies) == poison.SLICE_EVENTS
    assert len({bodies[place][0] for place in bad}) == len(bad) == count
    assert not kind.folded or all(last[bodies[place][0]] == place for place in bad)
    assert {orjson.loads(value)["id"] for _, value in bodies} == set(last)


def run(seconds, events, rate):
    return Run("sideline", events, seconds, rate, Cpu(0, 0, 0), [])


def test_the_cost_of_an_outage():
    """What is left of the time without the work and without the outage itself."""
    assert cost_seconds(run(42.0, 900, 0), run(10.0, 1000, 100.0), 31.0) == 2.0
