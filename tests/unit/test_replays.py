"""What becomes of events that come back, and how far an operation is (pure)."""

from __future__ import annotations

import pytest

from sideline import Event, Upsert
from sideline.replays import (
    Item,
    Waiting,
    causes_left,
    choose,
    chosen_again,
    judge,
    one_key_each,
    pace,
)
from sideline.slices import Failure, Handled

EFFECT = (Upsert("users", {"id": 1}, key="id"),)


def item(number, queue=None, events=None):
    offset = None if queue is not None else number
    return Item(7, number, "release", None, queue, 0, offset, 0, events, 0)


def waiting(queue, key, place=0, **options):
    known = {"incarnation": 0, "state": "parked", "fingerprint": None, "generation": 0} | options
    event = Event("users", 0, place, -1, key, b"")
    return Waiting(0, place, 0, queue=queue, event=event, **known)


def handled(*effects, parked=()):
    events = [Event("users", 0, place, -1, b"k", b"") for place in range(len(effects))]
    failed = {place: Failure(events[place], "handler", ValueError()) for place in parked}
    return Handled(0, 0, events, effects, parked=failed)


def test_a_release_begins_small_and_grows():
    """What fails again is noticed before much of it has failed (R4)."""
    assert [pace(5_000, tried) for tried in (0, 64, 320, 10_000)] == [64, 256, 1_280, 5_000]


def test_a_long_queue_goes_in_several_slices():
    """As far as the slice has room (K17)."""
    chosen = choose([item(1, 11, 3), item(2, 12, 9), item(3, 13, 1)], 5)
    assert ([one.queue for one in chosen.queues], chosen.limits) == ([11, 12], [3, 2])


def test_a_short_queue_is_not_cut():
    """It goes whole in the next slice; only what would fill much of a slice is cut (K17)."""
    chosen = choose([item(1, 11, 30), item(2, 12, 5), item(3, 13, 1)], 32)
    # Five are more than an eighth of 32, four are not.
    assert (chosen.limits, chosen.is_whole) == ([30, 2], False)
    chosen = choose([item(1, 11, 30), item(2, 12, 4), item(3, 13, 1)], 32)
    assert ([one.queue for one in chosen.queues], chosen.is_whole) == ([11], True)


@pytest.mark.parametrize("last", [item(3), item(3, 11, 1)])
def test_a_slice_is_not_whole_that_leaves_items_behind(last):
    """A single event, or a queue that is named twice: what comes next is not behind all items."""
    assert choose([item(1, 11, 1), item(2, 12, 1)], 10).is_whole
    assert not choose([item(1, 11, 1), item(2, 12, 1), last], 10).is_whole


def test_queues_go_before_single_events():
    """Each kind has slices of its own; what is not there any more is named."""
    chosen = choose([item(1), item(2, 12, 0), item(3, 13, 2)], 10)
    assert [one.number for one in chosen.items] == [3]
    assert chosen.gone == [2]
    assert [one.number for one in choose([item(1), item(4)], 10).items] == [1, 4]


@pytest.mark.parametrize(
    ("states", "seen", "said"),
    [
        ({0: "done", 1: "done", 2: "done"}, 4, {}),
        ({0: "done", 2: "done"}, 2, {4: "done"}),
        ({0: "done", 1: "failed", 2: "done"}, 4, {3: "failed"}),
        ({1: "done"}, -1, {3: "done"}),
        ({}, -1, {}),
    ],
)
def test_items_are_passed_as_far_as_all_of_them_are_over(states, seen, said):
    """Only what the number does not tell is said one by one (R4)."""
    chosen = choose([item(2, 11, 1), item(3, 12, 1), item(4, 13, 1)], 10)
    assert chosen.passed(states) == (seen, said)
    # As it is after a crash between Kafka's commit and the ledger's.
    assert chosen_again(chosen.items, chosen.until).passed(states) == (seen, said)


@pytest.mark.parametrize("between", [item(3), item(3, 11, 1)])
def test_no_item_is_passed_that_waits_for_another_slice(between):
    """A single event, or a queue that is named twice, between queues that are over."""
    chosen = choose([item(2, 11, 1), between, item(4, 12, 1)], 10)
    done = {0: "done", 1: "done"}
    assert chosen.passed(done) == (2, {4: "done"})
    assert chosen_again(chosen.items, chosen.until).passed(done) == (2, {4: "done"})


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([waiting(1, b"a"), waiting(1, b"a"), waiting(2, b"b")], True),
        ([waiting(1, b"a"), waiting(None, None)], True),
        ([waiting(1, b"a"), waiting(1, b"b")], False),
        ([waiting(1, b"a"), waiting(2, b"a")], False),
        ([waiting(1, None)], False),
        ([waiting(None, b"a")], False),
    ],
)
def test_whether_keys_tell_queues_apart(events, told):
    """Then the records' own keys are enough to keep the order (K15)."""
    assert one_key_each(events) is told


def test_what_stands_behind_a_failed_one_stays():
    """In its order only; what returned nothing is filtered (C1, R3)."""
    same, other = waiting(1, b"a"), waiting(2, b"b")
    verdict = judge(handled(EFFECT, (), EFFECT, EFFECT, parked=[2]), [same] * 4, {})
    assert (verdict.applied, verdict.filtered, list(verdict.failed)) == ([0], [1], [2])
    verdict = judge(handled(EFFECT, EFFECT, EFFECT, parked=[0]), [same, other, same], {})
    assert (verdict.applied, list(verdict.failed)) == ([1], [0])


def test_what_came_back_is_told_in_order():
    """Applied and filtered ones, where nothing failed."""
    verdict = judge(handled(EFFECT, (), EFFECT), [waiting(None, None)] * 3, {})
    assert (verdict.applied, verdict.filtered, verdict.gone) == ([0, 2], [1], [0, 1, 2])
    assert judge(handled(EFFECT, EFFECT), [waiting(None, None)] * 2, {}).gone == [0, 1]


def test_only_what_was_parked_for_a_cause_leaves_it():
    """Followers have none, and dead ones are in no cause's counter."""
    events = [
        waiting(1, b"a", fingerprint="why"),
        waiting(1, b"a"),
        waiting(None, b"a", fingerprint="why", state="dead"),
    ]
    assert causes_left(events) == {(0, "why"): 1}


def test_an_event_without_a_queue_is_kept_behind_its_key():
    """And no key is taken for a queue's number."""
    assert waiting(5, b"5").order == 5
    assert waiting(None, b"5").order == b"5"
    assert waiting(None, None).order is None
