"""How pipelines share a Spark session."""

from __future__ import annotations

import pytest

from sideline.engine.room import Guest, Room, share
from sideline.errors import RefusedError


class Session:
    """As much of a SparkSession as counts here."""

    def __init__(self, slots: int) -> None:
        self.sparkContext = self
        self.defaultParallelism = slots


@pytest.mark.parametrize(
    ("total", "pipelines", "wanted", "room"),
    [
        (4, 1, 2, Room(2, hand_over=True)),
        (4, 2, 2, Room(2, hand_over=False)),
        (4, 3, 2, Room(1, hand_over=False)),
        (4, 4, 2, Room(1, hand_over=False)),
        (3, 1, 2, Room(2, hand_over=False)),
        (1, 1, 1, Room(1, hand_over=False)),
        (16, 4, 2, Room(2, hand_over=True)),
    ],
)
def test_slots_are_divided_fairly(total, pipelines, wanted, room):
    """Rounds that warm up beside the last one only where nobody waits for the slots."""
    assert share(total, pipelines, wanted) == room


def test_the_room_changes_with_the_others():
    """Who comes takes a part, who leaves gives it back."""
    session = Session(4)
    first = Guest(session, 2)
    assert first.room() == Room(2, hand_over=True)

    second = Guest(session, 2)
    assert first.room() == second.room() == Room(2, hand_over=False)

    second.leave()
    assert first.room() == Room(2, hand_over=True)


def test_a_session_without_a_slot_left_is_refused():
    """A pipeline that would never get its turn is told so, with the way out."""
    session = Session(2)
    guests = [Guest(session, 2), Guest(session, 2)]

    with pytest.raises(RefusedError, match="a pipeline in each of them already") as caught:
        Guest(session, 1)

    assert "local[" in caught.value.hint
    guests[0].leave()
    Guest(session, 1)
