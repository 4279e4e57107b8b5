"""A call that may never return does not keep anybody."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import KafkaError, KafkaException

from sideline.homes import offsets
from sideline.homes.offsets import Offsets
from tests.support.waiting import wait_for

SPOT = object()


class Producer:
    """Adds offsets when it is let."""

    def __init__(self, *, error: BaseException | None = None) -> None:
        self.added: list[tuple[object, object]] = []
        self.threads: set[str] = set()
        self.goes_on = threading.Event()
        self.aborted = self.purged = False
        self._error = error

    def send_offsets_to_transaction(self, spots, member, _seconds):
        self.threads.add(threading.current_thread().name)
        self.goes_on.wait()
        if self._error is not None:
            raise self._error
        self.added += [(spot, member) for spot in spots]

    def abort_transaction(self, _seconds):
        self.aborted = True

    def purge(self):
        self.purged = True


def threads() -> int:
    """How many wait for errands, or for an answer."""
    return sum(thread.name == "sideline-offsets" for thread in threading.enumerate())


def test_offsets_are_added_under_every_group():
    """One after the other, by one thread for all transactions, which ends with them."""
    before = threads()
    producer, some = Producer(), Offsets()
    producer.goes_on.set()
    some.add(producer, SPOT, ["home", "public"], 1.0)
    some.add(producer, SPOT, ["home"], 1.0)
    assert producer.added == [(SPOT, "home"), (SPOT, "public"), (SPOT, "home")]
    assert threads() == before + 1
    assert not producer.aborted
    some.rest()
    wait_for(lambda: threads() == before, what="the thread's end")


def test_what_kafka_answers_is_raised_as_it_is():
    """A fenced producer, for one."""
    fenced = KafkaException(KafkaError(KafkaError._FENCED))
    producer, some = Producer(error=fenced), Offsets()
    producer.goes_on.set()
    with pytest.raises(KafkaException) as raised:
        some.add(producer, SPOT, ["home"], 1.0)
    assert raised.value is fenced
    some.rest()


def test_a_call_that_does_not_return_is_given_up(monkeypatch):
    """The next transaction has another thread; the first ends its own when it can (P4)."""
    monkeypatch.setattr(offsets, "GRACE_SECONDS", 0.0)
    before = threads()
    stuck, well, some = Producer(), Producer(), Offsets()
    well.goes_on.set()
    with pytest.raises(KafkaException, match="in time") as raised:
        some.add(stuck, SPOT, ["home", "public"], 0.05)
    assert raised.value.args[0].code() == KafkaError._TIMED_OUT
    some.add(well, SPOT, ["home"], 60.0)
    assert well.added == [(SPOT, "home")]
    assert threads() == before + 2
    stuck.goes_on.set()
    wait_for(lambda: threads() == before + 1, what="the end of the call that hung")
    assert stuck.aborted
    assert stuck.purged
    some.rest()
