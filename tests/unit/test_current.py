"""Log lines of a handler carry its event's id, however handlers run."""

from __future__ import annotations

import logging
import signal
import threading

import pytest

from sideline import Event, Pipeline, Upsert
from sideline.engine import current
from sideline.engine.handling import allowed_effects, handle
from sideline.engine.lease import Partition
from sideline.engine.window import LoopPool, ThreadPool, Window
from sideline.slices import Aside
from sideline.testing import FakeClock

EVENTS = [Event("users", 0, n, 0, b"k%d" % n, b"v") for n in range(40)]
log = logging.getLogger("app")


@pytest.fixture(autouse=True)
def factory():
    before = logging.getLogRecordFactory()
    current.mark_log_records()
    current.mark_log_records()
    yield
    logging.setLogRecordFactory(before)


def act(event):
    log.warning("%s", event.offset)
    return Upsert("users", {"id": event.offset}, key="id")


async def act_async(event):
    return act(event)


def seen(caplog):
    records = [record for record in caplog.records if record.name == log.name]
    return sorted((int(record.getMessage()), record.event_id) for record in records)


WANTED = [(n, f"users/0/{n}") for n in range(40)]


def test_one_after_the_other(caplog):
    """Although nothing is written down per event."""
    pipeline = Pipeline("login", topics="users")
    pipeline.handler(act)
    handle(pipeline, EVENTS, start=0, end=40, clock=FakeClock())
    assert seen(caplog) == WANTED
    log.warning("99")
    assert caplog.records[-1].event_id == ""


@pytest.mark.parametrize(("kind", "handler"), [(ThreadPool, act), (LoopPool, act_async)])
def test_side_by_side(caplog, kind, handler):
    """Each thread and each task has its own."""
    pipeline = Pipeline("login", topics="users", concurrency=4)
    pipeline.handler(handler)
    pool = kind(handler, 4, allowed_effects(pipeline), pipeline.fate)
    window = Window(pool, pipeline.key_of, derives=False)
    partition = Partition("users", 0)
    window.add(partition, EVENTS, Aside())
    while window.finished(partition) < len(EVENTS):
        window.wait(1.0)
    pool.close()
    assert seen(caplog) == WANTED


def test_ctrl_c_is_the_handlers_own_where_nobody_listens_to_it():
    """In Spark's workers a KeyboardInterrupt can only come from the handler (F14)."""
    before = signal.getsignal(signal.SIGINT)
    assert threading.current_thread() is threading.main_thread()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert not current.is_from_outside(KeyboardInterrupt())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert current.is_from_outside(KeyboardInterrupt())
        assert not current.is_from_outside(ValueError())
    finally:
        signal.signal(signal.SIGINT, before)
