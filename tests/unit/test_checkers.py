"""The checkers find what they are there for: each is shown a broken history."""

from __future__ import annotations

import random

import pytest

from tests.support import checkers
from tests.support.checkers import Accounts, Place

PRODUCED = [Place("t", number % 2, number // 2, f"k{number % 3}") for number in range(12)]


def test_a_whole_history_has_no_fault():
    """Every event once, in log order (C1, C2)."""
    assert checkers.faults(PRODUCED, PRODUCED) == {}


def test_partitions_may_interleave():
    """Order is promised per key of a partition, not between partitions (C1)."""
    effects = sorted(PRODUCED, key=lambda place: (place.partition, place.offset))
    assert checkers.faults(PRODUCED, effects) == {}


@pytest.mark.parametrize("index", range(len(PRODUCED)))
def test_a_missing_effect_is_found(index):
    """One event less is lost, wherever it stood."""
    effects = PRODUCED[:index] + PRODUCED[index + 1 :]
    assert checkers.lost(PRODUCED, effects) == [PRODUCED[index]]
    assert "lost" in checkers.faults(PRODUCED, effects)


@pytest.mark.parametrize("index", range(len(PRODUCED)))
def test_a_second_effect_is_found(index):
    """An event twice is a duplicate, even right behind itself."""
    effects = [*PRODUCED[: index + 1], PRODUCED[index], *PRODUCED[index + 1 :]]
    assert checkers.duplicate(effects) == [PRODUCED[index]]
    assert "duplicate" in checkers.faults(PRODUCED, effects)


def test_a_lost_event_is_found_behind_a_duplicate():
    """As many effects as events prove nothing."""
    effects = [*PRODUCED[:-1], PRODUCED[0]]
    found = checkers.faults(PRODUCED, effects)
    assert set(found) >= {"lost", "duplicate"}


def test_an_overtaken_event_is_found():
    """Two events of one key in the wrong order, with other keys between them."""
    first, second, other = (Place("t", 0, n, key) for n, key in ((1, "a"), (2, "a"), (3, "b")))
    assert checkers.out_of_order([second, other, first]) == [(second, first)]
    assert "out of order" in checkers.faults([first, second, other], [second, other, first])


def test_every_step_back_is_found():
    """An event that goes back behind a step forward is found as well as the first step back."""
    places = {offset: Place("t", 0, offset, "a") for offset in range(4)}
    effects = [places[2], places[0], places[3], places[1]]
    assert checkers.out_of_order(effects) == [(places[2], places[0]), (places[3], places[1])]


def test_events_without_a_key_stand_alone():
    """Nothing is promised about their order."""
    assert checkers.out_of_order([Place("t", 0, 2), Place("t", 0, 1)]) == []


def test_an_invented_effect_is_found():
    """An effect of an event that was never committed to Kafka (an aborted transaction)."""
    stray = Place("t", 0, 99, "k0")
    assert checkers.invented(PRODUCED, [*PRODUCED, stray]) == [stray]
    assert "invented" in checkers.faults(PRODUCED, [*PRODUCED, stray])


def test_repeats_are_taken_out_by_their_first_effect():
    """A repeated slice is in order where repeats are allowed; a reordered one still is not."""
    repeated = PRODUCED[:6] + PRODUCED[2:]
    assert checkers.first_effects(repeated) == PRODUCED
    shuffled = PRODUCED[6:] + PRODUCED
    assert checkers.out_of_order(checkers.first_effects(shuffled))


@pytest.mark.parametrize(
    "row",
    [
        Accounts(next_offset=6, consumed=5, applied=5),
        Accounts(next_offset=6, consumed=7, applied=7),
        Accounts(next_offset=5, consumed=6, applied=6),
        Accounts(next_offset=6, consumed=6, applied=5),
        Accounts(next_offset=6, consumed=6, applied=6, unknown=1),
        Accounts(next_offset=6, consumed=6, applied=6, parked=1),
    ],
)
def test_counters_that_do_not_add_up_are_found(row):
    """Consumed is what progress has passed, and every one of them has one outcome."""
    assert checkers.unaccounted(PRODUCED, {("t", 0): row})


def test_counters_that_add_up_are_fine():
    """Skipped, filtered and unknown events are accounted for."""
    row = Accounts(next_offset=6, consumed=6, applied=2, filtered=2, skipped=1, unknown=1)
    assert checkers.unaccounted(PRODUCED, {("t", 0): row}) == []


def test_random_damage_is_found():
    """Whatever is taken out, doubled or swapped within a key, something is found."""
    for _ in range(200):
        effects = list(PRODUCED)
        index = random.randrange(len(effects))
        match random.randrange(3):
            case 0:
                del effects[index]
            case 1:
                effects.insert(random.randrange(len(effects)), effects[index])
            case _:
                place = effects[index]
                later = next((p for p in effects[index + 1 :] if p[1::2] == place[1::2]), None)
                if later is None:
                    continue
                effects[effects.index(later)], effects[index] = place, later
        assert checkers.faults(PRODUCED, effects), effects


def test_an_event_that_passes_a_parked_one_is_found():
    """Zoiee must not be applied while Zoë is parked; what came before Zoë may be (F4)."""
    zoey, zoe, zoiee = (Place("t", 0, n, "zoe") for n in (1, 2, 3))
    bob = Place("t", 0, 4, "bob")
    assert checkers.overtaken([zoey, bob], [zoe, zoiee]) == []
    assert checkers.overtaken([zoey, zoiee, bob], [zoe]) == [(zoe, zoiee)]
    assert checkers.overtaken([Place("t", 0, 5)], [Place("t", 0, 4)]) == [], "it stands alone"
