"""What `sideline.testing` shows of a handler is what a worker would see."""

from __future__ import annotations

import asyncio

import pytest

from sideline import Execute, Pipeline, Upsert
from sideline.errors import UsageError
from sideline.testing import event, run_slice


def upsert(one):
    return Upsert("users", {"id": one.text()}, key="id")


def test_coroutines_run_in_order_in_one_loop():
    """An async handler's effects and failures are seen; one client can serve them all (C1)."""
    pipeline = Pipeline("login", topics="users", concurrency=4)
    loops, order = [], []

    @pipeline.handler
    async def handle(one):
        loops.append(asyncio.get_running_loop())
        order.append(f"{one.text()} begins")
        await asyncio.sleep(0)
        order.append(f"{one.text()} ends")
        if one.text() == "b":
            raise ValueError("bad")
        if one.text() == "c":
            raise SystemExit
        return upsert(one)

    events = [event(name, offset=place) for place, name in enumerate("abcd")]
    result = run_slice(pipeline, events)
    assert result.effects == [(upsert(events[0]),), (), (), (upsert(events[3]),)]
    assert {place: type(one.error) for place, one in result.failures.items()} == {
        1: ValueError,
        2: SystemExit,
    }
    assert order == [f"{name} {word}" for name in "abcd" for word in ("begins", "ends")]
    assert len(set(loops)) == 1


def test_a_coroutine_cannot_wait_for_another_loop():
    """Called where a loop runs, it says so; the events are not blamed."""
    pipeline = Pipeline("login", topics="users")

    @pipeline.handler
    async def handle(one):
        return upsert(one)

    async def test():
        return run_slice(pipeline, [event("a")])

    with pytest.raises(UsageError, match="cannot be called from a coroutine"):
        asyncio.run(test())

    async def in_a_thread():
        return await asyncio.to_thread(run_slice, pipeline, [event("a")])

    assert asyncio.run(in_a_thread()).failures == {}


def test_a_handler_gets_the_transaction_that_is_given():
    """Handlers of two arguments get it with every event; what they return is an effect too."""
    pipeline = Pipeline("login", topics="users")
    given, seen = object(), []

    @pipeline.handler
    def handle(one, tx):
        seen.append(tx)
        return Execute("select 1") if one.text() == "a" else None

    result = run_slice(pipeline, [event("a"), event("b")], transaction=given)
    assert seen == [given, given]
    assert result.effects == [(Execute("select 1"),), ()]
    assert result.failures == {}


def test_one_argument_no_transaction():
    """A handler that does not take it is not handed it."""
    pipeline = Pipeline("login", topics="users")
    pipeline.handler(upsert)
    assert run_slice(pipeline, [event("a")], transaction=object()).failures == {}


def test_setup_and_teardown_are_around_the_slice():
    """Once each, however the events end; their word is ``event.context``."""
    pipeline = Pipeline("login", topics="users")
    story = []

    @pipeline.setup
    def begin():
        story.append("setup")
        return {"names": "known"}

    @pipeline.teardown
    def end(context):
        story.append(f"teardown {context['names']}")

    @pipeline.handler
    def handle(one):
        story.append(f"{one.text()} {one.context['names']}")
        if one.text() == "a":
            raise ValueError("bad")

    result = run_slice(pipeline, [event("a"), event("b")])
    assert story == ["setup", "a known", "b known", "teardown known"]
    assert set(result.failures) == {0}


def test_teardown_runs_when_a_person_interrupts():
    """Ctrl-C ends the slice, and is no failure of its event; what was opened is closed."""
    pipeline = Pipeline("login", topics="users")
    closed = []
    pipeline.setup(lambda: "context")
    pipeline.teardown(closed.append)

    @pipeline.handler
    def handle(one):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_slice(pipeline, [event("a")])
    assert closed == ["context"]
