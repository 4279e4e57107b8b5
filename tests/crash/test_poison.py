"""Rows that the database refuses: pinned on their event, wherever the slice ends."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.support.operations import counts, operate
from tests.support.poison import NAMES, POISONS, SCHEMA

# All there is fits into the last one.
SIZES = [1, 3, 7, 1_000]
MODES = {
    "folded": {"handler": "poisoned"},
    "unfolded": {"handler": "poisoned", "fold": False},
    "transaction": {"handler": "poisoned_tx"},
    "threads": {"handler": "poisoned", "concurrency": 3},
    "at least once": {"handler": "poisoned", "delivery": "at-least-once"},
}
FINE, BAD, LATER = "fine", "bad", "later"


def story(name):
    """Zoe's second event is poison; Bob is well, all the while."""
    zoe, bob = f"{name} zoe", f"{name} bob"
    return [(bob, FINE), (zoe, FINE), (zoe, BAD), (bob, FINE), (zoe, LATER), (bob, LATER)]


def prepared(grounds, **options):
    ground = grounds(guard_off=True, **options)
    for statement in SCHEMA:
        ground.query(statement)
    return ground


def waiting(ground):
    """Which events of which keys wait, and the first one's reason."""
    rows = ground.query(
        "select convert_from(key, 'utf8'), convert_from(value, 'utf8'), why, stage"
        " from sideline.events order by place"
    )
    found = {}
    for key, value, why, stage in rows:
        found.setdefault(key, []).append((value, why, stage))
    return found


def check_traces(ground):
    """No event that waits has left anything in any table; all others have left what is last."""
    parked = {place.offset for place in ground.parked()}
    last = {place.key: place.offset for place in ground.produced if place.offset not in parked}
    for table in (*(f"{name}_rows" for name in NAMES), "touched", "history"):
        numbers = {number for (number,) in ground.query(f"select number from {table}")}
        assert not numbers & parked, table
    for name in NAMES:
        rows = dict(ground.query(f"select id, number from {name}_rows"))
        assert rows == {key: at for key, at in last.items() if key.startswith(f"{name} ")}, name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_poison_of_every_kind(grounds, mode, size):
    """The event fails with all its effects, its key waits, all others go on (F3, F4, K8, K9)."""
    ground = prepared(grounds, slice_size=size, **MODES[mode])
    # Round about: the kinds stand together in a slice, and on all sides of its ends.
    ground.publish(chain.from_iterable(zip(*map(story, NAMES), strict=True)))
    (report,) = ground.run(ground.lease(seconds=120))
    assert report.failure is None
    assert ground.next_offsets() == ground.ends()
    ground.check()
    check_traces(ground)
    found = waiting(ground)
    expected = [(BAD, "failed", "handler" if mode == "transaction" else "write")]
    expected.append((LATER, "follows", None))
    for name in NAMES:
        if (key := f"{name} zoe") in found or _is_strict(name, mode, size):
            assert found[key] == expected, name
    assert not any(key.endswith(" bob") for key in found)


def _is_strict(name, mode, size):
    """What is judged on the folded row may be hidden by a later event of its slice (K9)."""
    return (
        size == 1
        or mode in {"unfolded", "transaction"}
        or (name in POISONS and POISONS[name].by_row)
    )


@pytest.mark.parametrize("name", NAMES)
def test_poison_alone(grounds, name):
    """Each kind by itself, with the poison last in its slice: nothing folds over it (K8)."""
    ground = prepared(grounds, slice_size=3, handler="poisoned")
    ground.publish(story(name))
    ground.run()
    ground.check()
    check_traces(ground)
    assert waiting(ground) == {f"{name} zoe": [(BAD, "failed", "write"), (LATER, "follows", None)]}


@pytest.mark.parametrize("point", ["between-write-and-commit", "after-commit"])
@pytest.mark.parametrize("mode", ["folded", "at least once"])
def test_killed_around_a_commit_that_refuses(grounds, point, mode):
    """What only COMMIT refuses is found again by whoever comes next, once (C3, K8)."""
    ground = prepared(grounds, slice_size=3, **MODES[mode])
    ground.publish(story("at_commit_elsewhere"))
    for count in (1, 2, 3):
        ground.perhaps_killed(ground.start(ground.lease(), crash_at=f"{point}:{count}"))
        if mode == "folded":
            ground.check_prefix()
    ground.run()
    assert ground.kills
    assert ground.next_offsets() == ground.ends()
    key = "at_commit_elsewhere zoe"
    assert waiting(ground) == {key: [(BAD, "failed", "write"), (LATER, "follows", None)]}
    check_traces(ground)
    if mode == "folded":
        ground.check()


def test_what_only_commit_refuses_in_a_release(grounds):
    """It goes back aside as the next generation; the operation goes on (R3, K8)."""
    name = "at_commit_elsewhere"
    ground = prepared(grounds, slice_size=3, handler="failing")
    ground.publish([*story(name), (f"{name} eve", BAD)])
    ground.run()
    operation = operate(ground.database, "ground")
    (report,) = ground.run(pipeline={"handler": "poisoned"})
    assert report.failure is None
    assert counts(ground.database, operation)[:3] == ("done", 0, 2)
    rows = ground.query(
        "select generation, stage from sideline.events where why = 'failed' order by place"
    )
    assert rows == [(1, "write"), (1, "write")]
    ground.check()


@pytest.mark.parametrize("size", SIZES)
def test_who_has_no_effects_waits_behind_poison_too(grounds, size):
    """Filtered events and failures behind a refused row are not tried: they wait (F4, K9)."""
    ground = prepared(grounds, slice_size=size, handler="poisoned_or_not")
    values = [FINE, BAD, "nothing", "fails", LATER, "nothing"]
    ground.publish([pair for value in values for pair in (("check zoe", value), ("bob", FINE))])
    ground.run()
    assert waiting(ground) == {
        "check zoe": [
            (BAD, "failed", "write"),
            *((value, "follows", None) for value in values[2:]),
        ]
    }
    assert ground.query("select applied, filtered, parked from sideline.progress") == [(7, 0, 5)]
    assert ground.query("select parked from sideline.causes") == [(1,)]


@pytest.mark.parametrize("mode", MODES)
def test_much_poison_in_one_slice(grounds, mode):
    """Hundreds of refused rows of different kinds among healthy ones (F3, K8)."""
    ground = prepared(grounds, slice_size=1_000, **MODES[mode])
    names = [name for name in NAMES if name in POISONS and POISONS[name].by_row]
    ground.publish(
        [(f"{names[n % len(names)]} {n % 300}", BAD if n % 7 == 3 else FINE) for n in range(900)]
    )
    (report,) = ground.run(ground.lease(seconds=120))
    assert report.failure is None
    ground.check()
    check_traces(ground)
    found = waiting(ground)
    assert len(found) > 100
    assert all(events[0][0] == BAD for events in found.values())
