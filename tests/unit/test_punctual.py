"""The event loop of coroutine handlers."""

from __future__ import annotations

import asyncio
import select
import threading

import pytest

from sideline.engine import punctual


@pytest.fixture
def loop():
    made = punctual.new_event_loop()
    yield made
    made.close()


def test_a_wait_is_asked_for_as_it_is(loop, monkeypatch):
    """Half a millisecond is not rounded up to a whole one."""
    asked = []

    def spy(read, write, strange, timeout):
        asked.append(timeout)
        return real(read, write, strange, timeout)

    real = select.select
    monkeypatch.setattr(select, "select", spy)
    # A clock that moves by waiting only: on a busy machine the time is over before anybody waits.
    monkeypatch.setattr(loop, "time", lambda: sum(asked))
    loop.run_until_complete(asyncio.sleep(0.0005))
    assert asked == [0.0005]


def test_whatever_happens_ends_the_wait(loop):
    """Another thread's call is seen while everybody sleeps."""

    async def wait():
        woken = loop.create_future()
        timer = threading.Timer(0.01, loop.call_soon_threadsafe, [woken.set_result, "called"])
        timer.start()
        return await asyncio.wait_for(woken, 60)

    assert loop.run_until_complete(wait()) == "called"


def test_descriptors_that_select_cannot_see(monkeypatch):
    """Then it waits as every other loop does."""
    monkeypatch.setattr(punctual, "MOST_DESCRIPTORS", 0)
    monkeypatch.setattr(select, "select", None)
    made = punctual.new_event_loop()
    made.run_until_complete(asyncio.sleep(0.001))
    made.close()
