"""Events of different keys side by side: who is next."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sideline import Event, Pipeline, Recoverable
from sideline.engine.handling import allowed_effects
from sideline.engine.lease import Partition
from sideline.engine.window import PORTION, LoopPool, ThreadPool, Window
from sideline.slices import Aside
from tests.support.waiting import wait_for

PARTITION = Partition("users", 0)
# The hot key's events first, then many others.
HOT = 10
EVENTS = [Event("users", 0, n, 0, b"hot" if n < HOT else b"k%d" % n, b"v") for n in range(500)]


class Blocking:
    """An ordinary handler that notes who came when."""

    def __init__(self):
        self.order = []

    def handle(self, event):
        self.order.append(event.offset)


class Held(Blocking):
    """One that comes back when it is told to."""

    def __init__(self):
        super().__init__()
        self.may_end = [threading.Event() for _ in EVENTS]

    def handle(self, event):
        super().handle(event)
        self.may_end[event.offset].wait()


class Waiting(Blocking):
    """A coroutine that does."""

    async def handle(self, event):
        self.order.append(event.offset)
        await asyncio.sleep(0)


def test_a_hot_key_does_not_wait_for_all_that_was_read():
    """Its next event is the oldest that may run: behind all others it would hold up the prefix."""
    act = Held()
    pipeline = Pipeline("login", topics="users", concurrency=4)
    pipeline.handler(act.handle)
    pool = ThreadPool(act.handle, 4, allowed_effects(pipeline), pipeline.fate)
    window = Window(pool, pipeline.key_of, derives=False)
    window.add(PARTITION, EVENTS, Aside())
    wait_for(lambda: len(act.order) == 4, what="a handler in every place")
    assert sorted(act.order) == [0, HOT, HOT + 1, HOT + 2]
    for offset in range(HOT - 1):
        act.may_end[offset].set()
        wait_for(lambda count=5 + offset: len(act.order) == count, what="the next one")
        assert act.order[-1] == offset + 1
    for one in act.may_end:
        one.set()
    while window.finished(PARTITION) < len(EVENTS):
        window.wait(1.0)
    pool.close()
    assert sorted(act.order) == list(range(len(EVENTS)))


def test_nor_does_a_hot_key_of_coroutines():
    """They take turns, so that every fourth event is one of the hot key's until it is over."""
    act = Waiting()
    pipeline = Pipeline("login", topics="users", concurrency=4)
    pipeline.handler(act.handle)
    pool = LoopPool(act.handle, 4, allowed_effects(pipeline), pipeline.fate)
    window = Window(pool, pipeline.key_of, derives=False)
    window.add(PARTITION, EVENTS, Aside())
    while window.finished(PARTITION) < len(EVENTS):
        window.wait(1.0)
    pool.close()
    assert sorted(act.order) == list(range(len(EVENTS)))
    hot = [place for place, offset in enumerate(act.order) if offset < HOT]
    assert [act.order[place] for place in hot] == list(range(HOT))
    assert hot[-1] < len(EVENTS) // 2


@pytest.mark.parametrize(("kind", "handler"), [(ThreadPool, Blocking), (LoopPool, Waiting)])
def test_handlers_begin_before_all_that_was_read_is_admitted(kind, handler):
    """At the beginning of a lease nobody rests until thousands of events have their place."""
    act = handler()
    pipeline = Pipeline("login", topics="users", concurrency=4)
    pipeline.handler(act.handle)
    pool = kind(act.handle, 4, allowed_effects(pipeline), pipeline.fate)
    begun = []

    def key_of(event):
        if event.offset == HOT + PORTION:
            begun.append(pool.finished.wait(60.0))
        return event.key

    window = Window(pool, key_of, derives=False)
    window.add(PARTITION, EVENTS, Aside())
    while window.finished(PARTITION) < len(EVENTS):
        window.wait(1.0)
    pool.close()
    assert begun == [True]
    assert sorted(act.order) == list(range(len(EVENTS)))


OTHER = Partition("users", 1)


class Gated:
    """An ordinary handler: events go on when their gates open, and fail while they are broken."""

    def __init__(self, pool):
        self.gates = {}
        self.broken = set()
        self.begun = []
        self.began = threading.Condition()
        pipeline = Pipeline("login", topics="users", concurrency=4, key=lambda _: b"same")
        pipeline.handler(self.handle)
        self.pool = pool(self.handle, 4, allowed_effects(pipeline), pipeline.fate)
        self.window = Window(self.pool, pipeline.key_of, derives=True)

    def add(self, *places):
        for partition, offset in places:
            event = Event("users", partition, offset, 0, b"k", b"v")
            self.window.add(Partition("users", partition), [event], Aside())

    def note(self, event):
        place = (event.partition, event.offset)
        with self.began:
            self.begun.append(place)
            self.began.notify_all()
        return self.gates.get(place)

    def judge(self, event):
        if (event.partition, event.offset) in self.broken:
            raise Recoverable("not yet")

    def handle(self, event):
        gate = self.note(event)
        if gate is not None:
            assert gate.wait(60)
        self.judge(event)

    def await_begun(self, *places):
        with self.began:
            assert self.began.wait_for(lambda: set(places) <= set(self.begun), 60), self.begun

    def await_finished(self, partition, count):
        for _ in range(60):
            if self.window.finished(partition) == count:
                return
            self.window.wait(1.0)
        raise AssertionError(self.begun)


class GatedLoop(Gated):
    """A coroutine that does."""

    async def handle(self, event):
        gate = self.note(event)
        if gate is not None:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, gate.wait, 60)
        self.judge(event)


@pytest.fixture(params=[(Gated, ThreadPool), (GatedLoop, LoopPool)], ids=["threads", "loop"])
def gated(request):
    kind, pool = request.param
    made = kind(pool)
    yield made
    for gate in made.gates.values():
        gate.set()
    made.window.close()
    made.pool.close()


def test_another_partition_does_not_wait_for_one_that_failed(gated):
    """Of one key: what fails and waits keeps back its own partition only (F2, F6, K4)."""
    gated.gates[0, 0] = threading.Event()
    gated.broken.add((0, 0))
    gated.add((0, 0), (0, 1), (1, 0), (0, 2), (1, 1))
    gated.await_begun((0, 0))
    gated.gates[0, 0].set()

    gated.await_finished(OTHER, 2)

    assert gated.window.blocked(PARTITION)
    assert gated.begun == [(0, 0), (1, 0), (1, 1)]


def test_another_partition_goes_on_after_one_that_failed(gated):
    """Whatever comes later, of the key in its own partition waits, elsewhere not (F2, C1)."""
    gated.broken.add((0, 0))
    gated.add((0, 0))
    while not gated.window.blocked(PARTITION):
        gated.window.wait(1.0)
    gated.add((0, 1), (1, 0), (0, 2), (1, 1))

    gated.await_finished(OTHER, 2)

    assert gated.begun == [(0, 0), (1, 0), (1, 1)]


def test_what_waited_behind_one_that_failed_is_handled_with_it(gated):
    """Its turn comes again, and then that of all behind it, in order (C1)."""
    gated.broken.add((0, 0))
    gated.add((0, 0), (0, 1), (1, 0))
    gated.await_finished(OTHER, 1)
    gated.broken.clear()
    gated.window.drop(PARTITION)
    gated.add((0, 0), (0, 1))

    gated.await_finished(PARTITION, 2)

    assert gated.begun == [(0, 0), (1, 0), (0, 0), (0, 1)]


def test_a_partition_that_is_dropped_leaves_the_order_of_others(gated):
    """What follows of a key waits for the one before it, though one between them is gone (C1)."""
    gated.gates[1, 0] = threading.Event()
    gated.add((1, 0), (0, 0))
    gated.await_begun((1, 0))
    gated.window.drop(PARTITION)
    gated.add((1, 1), (0, 0))
    # Of the same pool, and younger: whoever could begin has begun before the last of these.
    free = [Event("others", 9, n, 0, b"%d" % n, b"v") for n in range(20)]
    window = Window(gated.pool, lambda event: event.key, derives=False)
    window.add(Partition("others", 9), free, Aside())
    while window.finished(Partition("others", 9)) < len(free):
        window.wait(1.0)
    before = [place for place in gated.begun if place[0] != 9]
    gated.gates[1, 0].set()

    gated.await_finished(OTHER, 2)
    gated.await_finished(PARTITION, 1)

    assert before == [(1, 0)]
    assert [place for place in gated.begun if place[0] != 9] == [(1, 0), (1, 1), (0, 0)]
