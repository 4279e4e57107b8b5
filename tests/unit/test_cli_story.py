"""The demo's story: the same each time, and its ending is the last word of each user."""

from __future__ import annotations

import pytest

from sideline.cli import story
from sideline.events import Event


def test_story_is_the_same_each_time_and_has_the_length_that_was_asked_for():
    """Two people who try the demo see the same."""
    facts = story.tell(users=50, events=400)
    assert facts == story.tell(users=50, events=400)
    assert len(facts) == 400
    assert {fact.user for fact in facts} == {f"user-{number}" for number in range(1, 51)}


def test_heroine_has_her_three_names_in_order():
    """Zoey renames herself to Zoë, then to Zoiee, and Zoiee it is (C1)."""
    facts = story.tell(users=50, events=400)
    assert tuple(fact.name for fact in facts if fact.user == story.HEROINE) == story.HER_NAMES
    assert story.ending(facts)[story.HEROINE] == "Zoiee"


def test_who_left_is_not_in_the_ending_and_who_came_back_is():
    """The ending is what a table must hold (C7)."""
    facts = [
        story.Fact("a", "A"),
        story.Fact("b", "B"),
        story.Fact("a", None),
        story.Fact("b", None),
        story.Fact("b", "B2"),
    ]
    assert story.ending(facts) == {"b": "B2"}


def test_some_choose_a_name_that_version_1_cannot_write():
    """The heroine and about three in a hundred; version 2 can write all of them."""
    facts = story.tell(users=2_000, events=20_000)
    aside = story.troubled(facts)
    assert story.HEROINE in aside
    assert len(aside) == 61
    assert story.before.version != story.users.version
    for fact in facts:
        event = Event("users", 0, 0, 0, fact.user.encode(), fact.value)
        story.login(event)
        if fact.name is not None and not fact.name.isascii():
            with pytest.raises(UnicodeEncodeError):
                story.login_1(event)
        else:
            assert story.login_1(event) == story.login(event)


def test_some_leave():
    """The story as it is told has tombstones in it (C7)."""
    assert any(fact.name is None for fact in story.tell(users=2_000, events=20_000))


def test_handler_turns_facts_into_rows():
    """Names are upserted, who leaves is deleted (C7)."""
    for fact, expected in (
        (story.Fact("user-17", "Zoë"), {"id": "user-17", "name": "Zoë"}),
        (story.Fact("user-17", None), {"id": "user-17"}),
    ):
        event = Event("users", 0, 0, 0, fact.user.encode(), fact.value)
        effect = story.login(event)
        assert (effect.table, effect.row) == ("users", expected)
