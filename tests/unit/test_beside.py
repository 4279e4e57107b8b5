"""Something of this process's own, while PostgreSQL works."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from sideline.engine.beside import beside


def test_both_are_done_at_once():
    """What asks has a thread of its own; the user's code stays in this one."""
    asked, answered = threading.Event(), threading.Event()
    threads = []

    def asks():
        threads.append(threading.current_thread())
        asked.set()
        assert answered.wait(10)
        return "done"

    def own(is_asking):
        assert asked.wait(10)
        assert is_asking()
        threads.append(threading.current_thread())
        answered.set()

    assert beside(asks, own) == "done"
    assert threads[0] is not threads[1] is threading.current_thread()


def test_an_error_comes_where_it_was_asked_for():
    """And only once the other one is done."""
    done = []

    def asks():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        beside(asks, lambda _: done.append(True))
    assert done


def test_nothing_goes_on_behind_an_error():
    """The connection is free again, whatever becomes of this thread's own part."""
    done = []
    failed = threading.Event()

    def asks():
        assert failed.wait(10)
        done.append(True)

    def own(_):
        failed.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        beside(asks, own)
    assert done


def test_an_error_keeps_nothing_of_its_slice():
    """What asked is free once the error is dealt with, without the garbage collector."""

    class Slice:
        def ask(self):
            raise ValueError("no")

    gc.disable()
    try:
        held = Slice()
        gone = weakref.ref(held)
        with pytest.raises(ValueError, match="no"):
            beside(held.ask, lambda _: None)
        del held
        assert gone() is None
    finally:
        gc.enable()
