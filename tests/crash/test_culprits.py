"""Events that end or hang their worker are found by themselves; who is ended from outside, not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest

from sideline.engine.deaths import ENOUGH, TIMEOUT_CODE
from tests.support import deadly  # noqa: F401 - its handlers and keys, by name
from tests.support.ground import numbered
from tests.support.waiting import wait_for

# What handlers do, and what their event fails with.
CRASHES = {
    "segfault": "died of SIGSEGV",
    "abort": "died of SIGABRT",
    "exit": "exited with code 3",
    "exit 0": "exited with code 0",
    "group": "died of SIGABRT",
}
SLICE = 10
# Off the slices' boundaries and on them: the first, one in the middle, a slice's first and last.
PLACES = [0, 13, 20, 29, 59]


def with_poison(count, poison, keys=20):
    """Events of some keys, with some that end their worker."""
    events = numbered(count, keys=keys)
    for number, how in poison.items():
        events[number] = (events[number][0], how)
    return events


def drive(ground, *, care=False, **job):
    """Do as the driver does: lease after lease, with care once a worker has died."""
    for _ in range(20):
        worker = ground.start(ground.lease(care=care), **job)
        worker.end()
        if ground.next_offsets() == ground.ends():
            return worker
        care = True
    raise AssertionError(worker._said())


def failed(ground):
    """The events that failed, in log order: where, and with what."""
    return ground.query(
        'select partition, "offset", error, message, traceback from sideline.events'
        " where why = 'failed' order by partition, \"offset\""
    )


def offsets(ground):
    return [row[1] for row in failed(ground)]


def deaths(ground):
    return ground.query("select in_hand, deaths from sideline.progress order by partition")


# Who it is


@pytest.mark.parametrize("how", CRASHES)
def test_an_event_that_ends_its_worker_is_parked(grounds, how):
    """It alone fails, its followers wait behind it, everything else is applied once (F3, F4)."""
    ground = grounds(handler="deadly", slice_size=SLICE)
    ground.publish(with_poison(60, {13: how}))
    # In the test's own process group the first death would be the test's, too.
    drive(ground, care=how == "group")
    ((_, offset, error, message, _),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.WorkerCrashed")
    assert CRASHES[how] in message
    assert f"{ENOUGH} times" in message
    assert [place.offset for place in ground.parked()] == [13, 33, 53]
    ground.check()


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_stands(grounds, place):
    """In the middle of a slice, at its begin and its end, at the log's (K9)."""
    ground = grounds(handler="deadly", slice_size=SLICE)
    ground.publish(with_poison(60, {place: "segfault"}, keys=60))
    drive(ground)
    assert offsets(ground) == [place]
    ground.check()


def test_the_stack_of_the_dying_worker_is_kept(grounds):
    """A person finds out where it happened: faulthandler's words are in the traceback (S3)."""
    ground = grounds(handler="deadly", slice_size=SLICE)
    ground.publish(with_poison(20, {13: "segfault"}))
    drive(ground)
    ((*_, traceback),) = failed(ground)
    assert "Segmentation fault" in traceback
    assert "string_at" in traceback


@pytest.mark.parametrize("handler", ["deadly_generator", "deadly_insert", "deadly_async"])
def test_whatever_the_handler_is(grounds, handler):
    """Also where its code runs late, in the transaction or in a loop."""
    ground = grounds(handler=handler, slice_size=SLICE)
    ground.publish(with_poison(60, {13: "segfault"}))
    drive(ground)
    assert offsets(ground) == [13]
    assert [place.offset for place in ground.parked()] == [13, 33, 53]
    ground.check()


@pytest.mark.parametrize("handler", ["deadly", "deadly_async"])
def test_of_many_at_once_the_right_one(grounds, handler):
    """With concurrency nobody knows who it was; with care there is one at a time (K11)."""
    ground = grounds(2, handler=handler, slice_size=SLICE, concurrency=8)
    ground.publish(with_poison(60, {13: "segfault", 14: "exit"}), 0)
    ground.publish(with_poison(60, {27: "abort"}), 1)
    drive(ground)
    assert [row[:2] for row in failed(ground)] == [(0, 13), (0, 14), (1, 27)]
    ground.check()


def test_a_key_that_ends_its_worker(grounds):
    """`key=` is the user's code too; without it the event waits under its Kafka key (K15)."""
    ground = grounds(handler="record", key="deadly", slice_size=SLICE)
    ground.publish(with_poison(60, {13: "segfault"}))
    drive(ground)
    ((_, offset, error, *_),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.WorkerCrashed")
    ground.check()


def test_one_after_the_other_in_two_partitions(grounds):
    """Neighbours, the first and the last of a log: each is found, each alone."""
    ground = grounds(2, handler="deadly", slice_size=SLICE)
    first = {0: "segfault", 13: "exit", 14: "segfault", 15: "exit 0", 49: "abort"}
    ground.publish(with_poison(50, first, keys=50), 0)
    ground.publish(with_poison(50, {23: "segfault", 24: "exit"}, keys=50), 1)
    drive(ground)
    found = [row[:2] for row in failed(ground)]
    assert found == [(0, number) for number in first] + [(1, 23), (1, 24)]
    ground.check()


def test_skip_leaves_it_out(grounds):
    """Counted, and on (F5)."""
    ground = grounds(handler="deadly", slice_size=SLICE, skip=True)
    ground.publish(with_poison(60, {13: "segfault"}))
    drive(ground)
    assert ground.accounts()[ground.topic, 0].skipped == 1
    assert ground.faults() == {"lost": [ground.produced[13]]}


def test_block_waits_and_tries_it_again(grounds, tmp_path):
    """The partition waits, says why, and goes on with the mended code (F6)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="until_mended", argument=str(flag), slice_size=SLICE, block=True)
    ground.publish(with_poison(60, {13: "segfault"}))
    ground.start(ground.lease()).end()
    troubles = []
    # It is tried in every lease, and counted on.
    while len(troubles) < 2 or deaths(ground)[0][1] <= ENOUGH:
        (report,) = ground.run(ground.lease(care=True, seconds=4))
        troubles += [part.trouble for part in report.partitions if part.trouble]
    assert all("WorkerCrashed" in trouble for trouble in troubles)
    assert ground.next_offsets() == {0: 13}
    flag.unlink()
    ground.run(ground.lease(care=True))
    assert failed(ground) == []
    ground.check()


def test_calls_are_not_repeated_for_it(grounds, tmp_path):
    """What the outside world saw before the culprit, it sees no second time with care (C2)."""
    path = tmp_path / "calls"
    ground = grounds(
        handler="deadly_call",
        argument=str(path),
        calls=True,
        slice_size=SLICE,
        handler_timeout="1s",
    )
    ground.publish(with_poison(30, {13: "segfault"}))
    ground.run(ground.lease(care=True))
    counts = [ground.calls(path).count(place) for place in ground.produced]
    assert counts[13] == ENOUGH
    assert counts[:13] + counts[14:] == [1] * 29
    assert offsets(ground) == [13]


# Deaths are remembered


def test_deaths_are_counted_over_leases_and_drivers(grounds):
    """Other keepers know: an event is tried three times, not three times by each."""
    ground = grounds(handler="deadly", slice_size=SLICE, handler_timeout="3s")
    ground.publish(with_poison(30, {13: "hang"}))
    said = []
    # No lease is long enough for three of them to hang; each driver is a new one.
    while ground.next_offsets() != ground.ends():
        ground.begin()
        worker = ground.start(ground.lease(care=True, seconds=4))
        worker.reports()
        said.append(worker._said().count("/13 in hand"))
    assert max(said) < ENOUGH
    assert sum(said) == ENOUGH
    ((_, _, error, *_),) = failed(ground)
    assert error == "sideline.errors.HandlerTimeout"
    ground.check()


def test_who_was_found_out_elsewhere_is_not_tried_again(grounds):
    """Three deaths stand in the row; the one who parks it was not there."""
    ground = grounds(handler="deadly", slice_size=SLICE)
    ground.publish(with_poison(30, {13: "exit"}))
    ground.query(
        "update sideline.progress set in_hand = 13, deaths = %s,"
        " trouble = 'the worker exited with code 3'",
        ENOUGH,
    )
    worker = ground.start(ground.lease(care=True))
    (report,) = worker.reports()
    assert report.partitions[0].next_offset == 30
    assert "in hand" not in worker._said()
    assert offsets(ground) == [13]
    ground.check()


def test_an_accident_is_not_held_against_the_next_event(grounds, tmp_path):
    """Deaths with different events in hand are counted apart."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="until_mended", argument=str(flag), slice_size=SLICE)
    ground.publish(with_poison(30, {13: "exit", 20: "exit"}, keys=30))
    ground.query("update sideline.progress set in_hand = 12, deaths = %s", ENOUGH - 1)
    ground.run(ground.lease(care=True))
    assert offsets(ground) == [13, 20]
    # What was passed is forgotten: its offset may come again, as another event.
    assert deaths(ground) == [(None, 0)]
    ground.check()


# Handlers that do not come back


HANGS = {
    "ordinary": {"handler": "deadly"},
    "in a generator": {"handler": "deadly_generator"},
    "in the server": {"handler": "deadly_insert"},
    "in a thread": {"handler": "deadly", "concurrency": 4},
    "in key=": {"handler": "record", "key": "deadly", "concurrency": 4},
    "in dedupe=": {"handler": "record", "dedupe": "deadly"},
}


@pytest.mark.parametrize("options", HANGS.values(), ids=HANGS)
def test_a_handler_that_hangs(grounds, options):
    """Past its timeout the worker ends, and with care its event is parked (F3)."""
    ground = grounds(slice_size=SLICE, handler_timeout="1s", **options)
    ground.publish(with_poison(60, {13: "hang"}))
    assert ground.start(ground.lease()).end() == TIMEOUT_CODE
    drive(ground, care=True)
    ((_, offset, error, message, traceback),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.HandlerTimeout")
    assert f"{ENOUGH} times" in message
    assert "deadly.py" in traceback
    assert [place.offset for place in ground.parked()] == [13, 33, 53]
    ground.check()


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_coroutine_that_hangs(grounds, concurrency):
    """It is cancelled and parked at once; nobody has to die (F3)."""
    ground = grounds(
        handler="deadly_async", slice_size=SLICE, concurrency=concurrency, handler_timeout="1s"
    )
    ground.publish(with_poison(60, {13: "hang"}))
    ground.run()
    ((_, offset, error, *_),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.HandlerTimeout")
    assert deaths(ground) == [(None, 0)]
    ground.check()


def test_a_coroutine_that_blocks_its_loop(grounds):
    """Nothing can cancel it: its worker ends like any other's."""
    ground = grounds(handler="deadly_async", slice_size=SLICE, concurrency=8, handler_timeout="1s")
    ground.publish(with_poison(60, {13: "block"}))
    assert ground.start(ground.lease()).end() == TIMEOUT_CODE
    drive(ground, care=True)
    ((_, offset, error, *_),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.HandlerTimeout")
    ground.check()


def test_a_handler_that_keeps_pythons_lock(grounds):
    """A regular expression gone wild: not even the watchdog's thread gets on."""
    ground = grounds(handler="deadly", slice_size=SLICE, handler_timeout="1s")
    ground.publish(with_poison(60, {13: "lock"}))
    drive(ground, care=True)
    ((_, offset, error, *_),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.HandlerTimeout")
    ground.check()


def test_nobody_else_is_too_slow(grounds):
    """Each event has the whole time: a slice may take longer than one handler may."""
    ground = grounds(handler="slow", argument=0.2, slice_size=SLICE, handler_timeout="3s")
    ground.publish(numbered(20))
    ground.run()
    assert failed(ground) == []
    ground.check()


# Nobody's fault


def worker_of(keeper):
    """The process that a keeper has forked, if it has one now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(keeper.pid).children():
            return child.pid
    return None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_with_an_event_in_hand(grounds, tmp_path, number):
    """Five times the same event was in hand, and somebody ended the worker: it is applied."""
    flag = tmp_path / "slow"
    flag.touch()
    ground = grounds(handler="held", argument=str(flag), slice_size=SLICE)
    ground.publish(numbered(1))
    keeper = ground.start(ground.lease(care=True, seconds=120))
    for _ in range(ENOUGH + 2):
        pid = wait_for(lambda: worker_of(keeper), what="another worker")
        wait_for(Path(f"{flag}-{pid}").exists, what="it has the event in hand")
        os.kill(pid, number)
        wait_for(lambda pid=pid: worker_of(keeper) != pid, what="its end")
    flag.unlink()
    (report,) = keeper.reports()
    assert keeper._said().count("in hand") == ENOUGH + 2
    assert report.partitions[0].applied == 1
    assert failed(ground) == []
    assert deaths(ground) == [(None, 0)]
    ground.check()


@pytest.mark.parametrize("options", [{}, {"concurrency": 4}, {"handler": "deadly_insert"}], ids=str)
def test_killed_at_any_moment(grounds, options):
    """Workers and their keepers, at random, with care and without: nobody is parked (C2)."""
    ground = grounds(2, **{"handler": "deadly", "argument": 0.005, "slice_size": SLICE} | options)
    kill_at_random(ground, deaths=12)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_hundreds_of_times(grounds):
    """The same, for long."""
    kill_at_random(grounds(2, handler="deadly", argument=0.005, slice_size=SLICE), deaths=200)


def kill_at_random(ground, deaths):
    published = 0
    while ground.kills < deaths:
        ground.publish(numbered(120, start=published))
        published += 120
        worker = ground.start(ground.lease(care=random.random() < 0.7))
        timer = threading.Timer(random.uniform(0.05, 0.5), kill_one, [ground, worker])
        timer.start()
        worker.end()
        timer.join()
    ground.run()
    assert ground.parked() == []
    ground.check()
    assert ground.next_offsets() == ground.ends()


def kill_one(ground, worker):
    """The worker that a keeper has, or the process itself."""
    victim = worker_of(worker) if random.random() < 0.7 else None
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim or worker.pid, signal.SIGKILL)
        ground.kills += 1


def test_a_keeper_takes_its_worker_along(grounds):
    """Nobody goes on who is not watched over: the successor finds a free partition."""
    ground = grounds(handler="slow", argument=3600)
    ground.publish(numbered(1))
    keeper = ground.start(ground.lease(care=True))
    pid = wait_for(lambda: worker_of(keeper), what="a worker")
    keeper.kill()
    wait_for(lambda: not psutil.pid_exists(pid), what="the worker is gone")
    ground.run(ground.lease(), pipeline={"argument": 0})
    ground.check()


def test_a_worker_that_dies_with_nothing_in_hand_blames_nobody(grounds):
    """Between two events, again and again: the report says so, for the driver to decide."""
    ground = grounds(handler="record", slice_size=SLICE)
    ground.publish(numbered(30))
    worker = ground.start(ground.lease(care=True), crash_at="after-handler:1")
    (report,) = worker.reports()
    assert "SIGKILL" in report.crash
    assert failed(ground) == []
    assert deaths(ground) == [(None, 0)]
    ground.run()
    ground.check()


# Memory


MEMORY_BYTES = 200 * 1024 * 1024


@pytest.fixture
def memory_group():
    """A group of processes that may use little memory, where this machine lets us make one."""
    parent = Path("/sys/fs/cgroup/memory")
    new, limit = parent / f"sideline-{os.getpid()}", "memory.limit_in_bytes"
    if not parent.exists():
        new, limit = Path(f"/sys/fs/cgroup/sideline-{os.getpid()}"), "memory.max"
    try:
        new.mkdir()
        (new / limit).write_text(str(MEMORY_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            new.rmdir()
        pytest.skip(f"no group of its own: {error}")
    yield new
    wait_for(lambda: not (new / "cgroup.procs").read_text(), what="an empty group")
    new.rmdir()


def test_an_event_that_eats_all_memory(grounds, memory_group):
    """The kernel kills the worker; that is the event's doing, and no kill from outside."""
    ground = grounds(handler="deadly", slice_size=SLICE)
    ground.publish(with_poison(30, {13: "memory"}))
    keeper = ground.start(ground.lease(care=True), group=str(memory_group / "cgroup.procs"))
    keeper.reports()
    ((_, offset, error, message, _),) = failed(ground)
    assert (offset, error) == (13, "sideline.errors.WorkerCrashed")
    assert "memory ran out" in message
    ground.check()


def test_memory_error_is_an_ordinary_failure(grounds):
    """Python noticed in time: the event fails at once and nobody dies (F3)."""
    ground = grounds(handler="deadly", slice_size=SLICE)
    ground.publish(with_poison(30, {13: "too much"}))
    ground.run()
    ((_, offset, error, *_),) = failed(ground)
    assert (offset, error) == (13, "MemoryError")
    ground.check()
