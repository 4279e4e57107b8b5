"""Records that a lease wrote itself: sent from memory only where nothing stands before them."""

from __future__ import annotations

from sideline.engine.forwarding import MOST_UNSENT
from sideline.leaving import Record
from sideline.ledger import outbox
from sideline.ledger.outbox import Ready

# What a pipeline takes at a time unless told otherwise.
SLICE_EVENTS = 25_000


def some(count, size=1):
    return [Record("t", None, b"x" * size) for _ in range(count)]


def numbers(batch):
    return [one.number for one in batch]


def test_only_what_is_committed_is_sent():
    """What was rolled back, or nobody knows of, is not there (C3, K5)."""
    ready = Ready()
    ready.write(1, 5, some(2))
    assert ready.take(0, None) == []
    ready.forget()
    ready.commit()
    assert ready.take(0, None) == []
    ready.write(1, 6, some(2))
    ready.commit()
    assert [(one.number, one.stamp) for one in ready.take(0, None)] == [(1, 6), (2, 6)]


def test_nothing_is_sent_before_what_stands_before_it():
    """Older records are in the database alone: they are read first (K24)."""
    ready = Ready()
    ready.write(4, 5, some(3))
    ready.commit()
    assert ready.take(0, None) == []
    assert ready.before == 3
    assert numbers(ready.take(3, None)) == [4, 5, 6]
    assert numbers(ready.take(4, None)) == [5, 6], "what is marked is gone"
    assert numbers(ready.take(4, 5)) == [5], "no further than wanted"


def test_a_gap_is_read():
    """Somebody else wrote a record in between: nothing is taken from memory (K24, K25)."""
    ready = Ready()
    ready.write(1, 5, some(2))
    ready.commit()
    ready.write(4, 6, some(2))
    ready.commit()
    assert ready.take(0, None) == []
    assert ready.before is None


def test_memory_is_bounded(monkeypatch):
    """Many or large records are left to the database, and counted right afterwards."""
    ready = Ready()
    monkeypatch.setattr(outbox, "REMEMBERED_BYTES", 100)
    ready.write(1, 5, some(2, size=60))
    ready.commit()
    assert ready.take(0, None) == []
    ready.write(3, 6, some(2, size=40))
    ready.commit()
    assert numbers(ready.take(2, None)) == [3, 4]


def test_a_transaction_is_bounded(monkeypatch):
    """What is remembered may be more than Kafka gets at a time."""
    ready = Ready()
    monkeypatch.setattr(outbox, "MOST_BYTES", 100)
    ready.write(1, 5, some(3, size=60))
    ready.write(4, 5, some(1, size=160))
    ready.commit()
    assert numbers(ready.take(0, None)) == [1]
    assert numbers(ready.take(2, None)) == [3]
    assert numbers(ready.take(3, None)) == [4], "one at least"


def test_a_whole_slice_is_remembered():
    """The largest slice of copies is sent from memory, behind as much as may be unsent before."""
    ready = Ready()
    ready.write(1, 5, some(MOST_UNSENT))
    ready.commit()
    ready.write(MOST_UNSENT + 1, 6, some(SLICE_EVENTS))
    ready.commit()
    assert numbers(ready.take(0, None))[0] == 1
