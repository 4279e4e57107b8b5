"""What Kafka and the ledger say about the last slice, and what follows."""

from __future__ import annotations

import pytest

from sideline.errors import UnclearError
from sideline.homes.numbers import Books, Shown, decide, shown, word

MARK, OTHER = "ab12", "cd34"
QUIET = Books(MARK, next_offset=100, drawn=7, applied=7)
# Number 6 was applied, 7 was dropped once, 8 is open.
OPEN = Books(MARK, next_offset=100, drawn=8, applied=6, pending=(100, 150))


@pytest.mark.parametrize(
    ("books", "kafka", "verdict"),
    [
        (QUIET, Shown(100, MARK, 7), "agreed"),
        (QUIET, Shown(), "rewrite"),
        (QUIET, Shown(100), "rewrite"),
        (QUIET, Shown(40, MARK, 7), "rewrite"),
        (QUIET, Shown(100, MARK, 5), "rewrite"),
        # A ledger that was made anew under the same name.
        (QUIET, Shown(900, OTHER, 70), "rewrite"),
        (OPEN, Shown(150, MARK, 8), "apply"),
        (OPEN, Shown(100, MARK, 6), "drop"),
    ],
)
def test_what_follows(books, kafka, verdict):
    """The progress row is the truth unless something is pending; then Kafka tells (K19)."""
    assert decide(books, kafka, where="users/0") == verdict


@pytest.mark.parametrize(
    ("books", "kafka"),
    [
        (QUIET, Shown(150, MARK, 8)),
        (OPEN, Shown()),
        (OPEN, Shown(100)),
        (OPEN, Shown(150)),
        (OPEN, Shown(100, MARK, 8)),
        (OPEN, Shown(150, MARK, 6)),
        (OPEN, Shown(149, MARK, 8)),
        (OPEN, Shown(150, MARK, 7)),
        (OPEN, Shown(150, MARK, 9)),
        (OPEN, Shown(150, OTHER, 8)),
        (OPEN, Shown(0, MARK, 6)),
    ],
)
def test_a_contradiction_is_refused(books, kafka):
    """Reset or forgotten offsets, or an older ledger: nothing is guessed (K19)."""
    with pytest.raises(UnclearError) as caught:
        decide(books, kafka, where="users/0")
    assert "users/0" in caught.value.message
    assert caught.value.hint


def test_an_unmoved_offset_has_a_new_number():
    """A replay publishes without moving on: the number alone tells the two apart (K18)."""
    replay = OPEN._replace(pending=(100, 100))
    assert decide(replay, Shown(100, MARK, 8), where="users/0") == "apply"
    assert decide(replay, Shown(100, MARK, 6), where="users/0") == "drop"


@pytest.mark.parametrize(
    "metadata",
    [None, "", "x", "sideline/1/ab12", "sideline/1/ab12/", "sideline/1/ab12/-1",
     "sideline/1/AB12/7", "sideline/1/ab12/7 ", "sideline/2/ab12/7", "sideline/1/ab12/\u0667",
     "sideline/1/ab12/" + "9" * 40],
)  # fmt: skip
def test_words_of_others_say_nothing(metadata):
    """Whatever stands in the metadata, reading it never raises (K19)."""
    assert shown(5, metadata) == Shown(5)


def test_a_word_is_read_as_it_was_written():
    """What a slice commits is what its successor reads; no offset is no word (K19)."""
    assert shown(5, word(MARK, 12)) == Shown(5, MARK, 12)
    assert shown(-1001, None) == Shown()
