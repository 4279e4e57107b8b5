"""A handler that does not come back is noticed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sideline.engine import watchdog
from sideline.engine.deaths import TIMEOUT_CODE
from sideline.engine.watchdog import Watchdog, in_time
from sideline.errors import HandlerTimeout
from sideline.events import Event
from sideline.testing import FakeClock
from tests.support.waiting import wait_for

ONE, TWO = (Event("t", 0, number, -1, None, None) for number in (1, 2))


class Hands:
    def __init__(self, event=None):
        self.event = event


@pytest.fixture
def clock():
    return FakeClock()


def watched(clock, *hands, patience=1.0):
    dog = Watchdog(patience, lambda: hands, clock=clock)

    def after(seconds):
        clock.advance(seconds)
        return dog.look()

    after(0)
    return after


def test_what_stands_still_is_found(clock):
    """One event for as long as it may take: that is too long."""
    after = watched(clock, Hands(ONE))
    assert after(0.5) is None
    assert after(0.5) is ONE


def test_what_moves_is_left_alone(clock):
    """Each event has its own time."""
    hands = Hands(ONE)
    after = watched(clock, hands)
    for event in (TWO, ONE, TWO, None, TWO):
        assert after(0.9) is None
        hands.event = event
    assert after(0.9) is None
    assert after(0.9) is None
    assert after(0.2) is TWO


def test_others_do_not_hide_it(clock):
    """Of many hands one stands still."""
    busy, stuck = Hands(ONE), Hands(TWO)
    after = watched(clock, busy, stuck)
    busy.event = None
    assert after(0.6) is None
    busy.event = ONE
    assert after(0.6) is TWO


def test_the_same_event_in_other_hands_begins_anew(clock):
    """An attempt that was given up and one that has just begun are two."""
    hands = [Hands(ONE)]
    dog = Watchdog(1.0, lambda: hands, clock=clock)
    dog.look()
    clock.advance(0.7)
    hands[:] = [Hands(ONE)]
    assert dog.look() is None
    clock.advance(0.7)
    assert dog.look() is None


def test_a_look_that_came_late_proves_nothing(clock):
    """The whole process was frozen: the handler is not to blame."""
    after = watched(clock, Hands(ONE))
    assert after(100.0) is None
    assert after(0.6) is None
    assert after(0.6) is ONE


@pytest.fixture
def patient(monkeypatch):
    """Tests that stand still for seconds are not ended: a dog among them would end them all."""
    monkeypatch.setattr(watchdog, "LOCKED_SECONDS", 600.0)


def test_it_ends_the_process(patient, tmp_path):
    """With a code that says why, and with the stack as its last words."""
    ended = threading.Event()
    codes, stuck = [], [Hands(ONE)]

    def end(code):
        codes.append(code)
        ended.set()

    # A file: in a pipe that is full, words wait for a reader, and Python's lock with them.
    with (tmp_path / "words").open("w+") as words:
        dog = Watchdog(0.1, lambda: stuck, last_words=words.fileno(), end=end)
        dog.start()
        assert ended.wait(60)
        dog.rest()
        dog.close()
        words.seek(0)
        assert "test_it_ends_the_process" in words.read()
    assert codes[0] == TIMEOUT_CODE


def test_it_watches_again_after_a_rest(patient):
    """Lease after lease; between them nobody looks."""
    ended = threading.Event()
    looks = []

    def at_work():
        looks.append(1)
        return [hands]

    hands = Hands()
    with Path(os.devnull).open("w") as nowhere:
        dog = Watchdog(0.1, at_work, last_words=nowhere.fileno(), end=lambda _code: ended.set())
        dog.start()
        wait_for(lambda: looks, what="the first look")
        dog.rest()
        hands.event = ONE
        dog.start()
        assert ended.wait(60)
        dog.close()


LOCKED = """
import re, threading
from sideline.engine import watchdog
watchdog.LOCKED_SECONDS = 0.3
watchdog.Watchdog(0.2, list).start()
re.match(r"(a+)+$", "a" * 64 + "b")
"""


def test_also_where_the_handler_keeps_pythons_lock():
    """A regular expression gone wild lets no thread look; the process ends all the same."""
    done = subprocess.run(
        [sys.executable, "-c", LOCKED], capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (")


def test_a_coroutine_is_cancelled_in_time():
    """It fails as HandlerTimeout, at once, and the loop goes on."""
    cancelled = []

    async def hang(event):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(event)
            raise

    with pytest.raises(HandlerTimeout, match=r"of 0[.]05 s"):
        asyncio.run(in_time(hang, 0.05)(ONE))
    assert cancelled == [ONE]


def test_a_timeout_of_its_own_stays_one():
    """The outside world was slow; that heals by itself (F1)."""

    async def ask(_event):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        asyncio.run(in_time(ask, 60)(ONE))


def test_what_is_in_time_is_left_alone():
    """The result is the handler's."""

    async def handle(event):
        return event

    timed = in_time(handle, 60)
    assert asyncio.run(timed(ONE)) is ONE
    assert asyncio.iscoroutinefunction(timed)
