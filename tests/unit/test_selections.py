"""Selections, plans and their names: what is asked for, said and read again (R4)."""

from __future__ import annotations

import dataclasses
import shlex
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline.errors import UsageError
from sideline.selections import PlanName, Selection, Step, check, digest, steps
from sideline.views import EventId

NOW = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
MOMENTS = st.integers(86_400_000_000, 7_258_118_400_000_000).map(
    lambda micros: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
)


@given(MOMENTS, st.integers(0, 16**16 - 1))
def test_a_plan_is_found_again_by_its_name(at, number):
    """R4: the name says to the microsecond when the plan was made, and the hash of its set."""
    name = PlanName(at, f"{number:016x}")
    assert PlanName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "12",
        "zz-0123456789abcdef",
        "12-0123456789ABCDEF",
        "12-0123456789abcde",
        "ffffffffffffffff-0123456789abcdef",
        "-1-0123456789abcdef",
        "\x1b[31m",
        "\u0661-0123456789abcdef",
    ],
)
def test_what_is_no_plan_is_refused(text):
    """One sentence, exit code 2."""
    with pytest.raises(UsageError):
        PlanName.parse(text)


@given(st.integers(0, 10_000), st.booleans())
def test_steps_hold_every_item_once(items, ramp):
    """R4: 1, 10, 100 and the rest are together exactly the set that was shown."""
    made = steps(items, ramp=ramp)
    numbers = [number for step in made for number in range(step.first, step.last + 1)]
    assert numbers == list(range(1, items + 1))
    assert len(made) <= (4 if ramp else 1)


def test_the_ramp():
    """R4: one key, then ten, a hundred, all."""
    assert steps(588, ramp=True) == [Step(1, 1), Step(2, 11), Step(12, 111), Step(112, 588)]
    assert steps(11, ramp=True) == [Step(1, 1), Step(2, 11)]
    assert steps(1, ramp=True) == [Step(1, 1)]


def selection(**columns):
    return Selection("release", "login", **columns)


@pytest.mark.parametrize(
    ("chosen", "everything"),
    [
        (selection(), False),
        (selection(first=10), False),
        (selection(keys=(b"a",)), True),
        (selection(since=NOW), True),
        (selection(events=(EventId("users", 0, 1),), keys=(b"a",)), False),
        (selection(events=(EventId("users", 0, 1),), until=NOW), False),
        (selection(cause=""), False),
        (selection(topic=""), False),
        (selection(topic="a\0b"), False),
        (selection(cause="\udcff"), False),
    ],
)
def test_a_choice_that_says_nothing_or_two_things_is_refused(chosen, everything):
    """Nobody releases everything by leaving something out."""
    with pytest.raises(UsageError):
        check(chosen, everything=everything)


@pytest.mark.parametrize(
    ("chosen", "everything"),
    [
        (selection(), True),
        (selection(first=10), True),
        (selection(keys=(b"",)), False),
        (selection(keys=(b"a", b"\xff"), topic="users", since=NOW, first=3), False),
        (selection(events=(EventId("users", 0, 1),)), False),
    ],
)
def test_a_choice_that_says_one_thing_passes(chosen, everything):
    """What is given is what is meant."""
    assert check(chosen, everything=everything) is chosen


@given(
    st.lists(st.binary(max_size=8), max_size=3, unique=True),
    st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=5) | st.none(),
    st.none() | MOMENTS,
    st.integers(1, 99) | st.none(),
)
def test_the_command_that_a_plan_prints_means_the_same(keys, cause, since, first):
    """R4: what is typed again chooses what was shown; ages have become times."""
    from sideline.cli.choosing import Asked
    from sideline.cli.release import release

    chosen = Selection(
        "release", "login", keys=tuple(sorted(keys)), cause=cause, since=since, first=first
    )
    words = shlex.split(shlex.join(chosen.words()))
    assert words[:2] == ["sideline", "release"]
    context = release.make_context("release", words[2:])
    names = {field.name for field in dataclasses.fields(Asked)}
    asked = Asked(**{name: value for name, value in context.params.items() if name in names})
    assert asked.selection("release") == chosen


def test_the_hash_tells_sets_apart():
    """R4: another kind, pipeline, count or sum is another set."""
    first = digest(selection(), [1, 2, 3])
    others = [
        digest(selection(), [1, 2, 4]),
        digest(selection(), [12, 3]),
        digest(dataclasses.replace(selection(), kind="discard"), [1, 2, 3]),
        digest(dataclasses.replace(selection(), pipeline="orders"), [1, 2, 3]),
    ]
    assert first == digest(selection(first=3), [1, 2, 3])
    assert len({first, *others}) == 5


def test_a_plan_made_a_moment_later_has_another_name():
    """The moment is part of it: what steps aside in between is not swept in."""
    later = PlanName(NOW + timedelta(microseconds=1), "0" * 16)
    assert str(later) != str(PlanName(NOW, "0" * 16))
