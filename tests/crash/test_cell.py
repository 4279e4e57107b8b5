"""The process beside Spark's worker in which careful workers are kept; here without Spark."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from sideline.engine.cell import Cell, Charge
from sideline.engine.jobs import ship
from sideline.engine.worker import Access
from tests.support import deadly
from tests.support.waiting import wait_for


@pytest.fixture
def cells():
    """Cells for a ground's pipeline; they end with the test."""
    made = []

    def make(ground, prepare=lambda pipeline: None):
        pipeline = deadly.handlers.build(**ground.options)
        prepare(pipeline)
        access = Access(ground.database, {"bootstrap.servers": ground.kafka})
        made.append(Cell(Charge(ship(pipeline), access, tuple(sys.path))))
        return made[-1]

    yield make
    for cell in made:
        cell.close()


def test_a_culprit_is_found_in_a_process_apart(grounds, cells):
    """Whoever asks for a lease with care gets a report, whatever died for it (F3)."""
    ground = grounds(handler="deadly", slice_size=10)
    ground.publish([("a", "v0"), ("b", "segfault"), ("b", "v2"), ("c", "v3")])
    cell = cells(ground)
    report = cell.work(ground.lease(care=True))
    assert report.partitions[0].next_offset == 4
    assert [place.offset for place in ground.parked()] == [1, 2]
    ground.check()


def test_lease_after_lease(grounds, cells):
    """Its worker is kept, with its connections, as long as it lives."""
    ground = grounds(handler="record", slice_size=10)
    cell = cells(ground)
    pids = set()
    for number in range(3):
        ground.publish([("a", f"v{number}")])
        pids.add(cell.work(ground.lease(care=True)).pid)
    assert len(pids) == 1
    assert os.getpid() not in pids
    ground.check()


def test_a_keeper_that_is_killed_is_replaced(grounds, cells):
    """Nobody is blamed; the next lease goes on in a new one."""
    ground = grounds(handler="record", slice_size=10)
    ground.publish([("a", "v0")])
    cell = cells(ground)
    cell.work(ground.lease(care=True))
    keeper = psutil.Process(cell.pid)
    (worker,) = keeper.children()
    keeper.send_signal(signal.SIGKILL)
    wait_for(lambda: not worker.is_running(), what="its worker is gone with it")
    ground.publish([("a", "v1")])
    assert "from outside" in cell.work(ground.lease(care=True)).crash
    assert not cell.work(ground.lease(care=True)).crash
    ground.check()


def test_teardown_runs_when_it_ends(grounds, cells, tmp_path, monkeypatch):
    """In an orderly end, as in any worker."""
    # A loaded machine may need longer than anybody waits for it elsewhere.
    monkeypatch.setattr("sideline.engine.cell.FAREWELL_SECONDS", 60.0)
    ground = grounds(handler="record", slice_size=10)
    ground.publish([("a", "v0")])
    folder = str(tmp_path)

    def prepare(pipeline):
        @pipeline.setup
        def begin():
            return open(f"{folder}/begun", "w")  # noqa: PTH123

        @pipeline.teardown
        def end(file):
            os.rename(file.name, f"{folder}/ended")  # noqa: PTH104

    cell = cells(ground, prepare)
    cell.work(ground.lease(care=True))
    keeper = psutil.Process(cell.pid)
    cell.close()
    assert (tmp_path / "ended").exists()
    assert not keeper.is_running()


def test_a_setup_that_ends_its_worker_blames_nobody(grounds, cells):
    """No event was in hand; the report says what happened, and the driver decides."""
    ground = grounds(handler="record", slice_size=10)
    ground.publish([("a", "v0")])

    def prepare(pipeline):
        @pipeline.setup
        def begin():
            os._exit(7)

    report = cells(ground, prepare).work(ground.lease(care=True))
    assert report.crash == "the worker exited with code 7"
    assert ground.parked() == []


@pytest.mark.parametrize("cell", ["forked", "run"])
def test_like_sparks_workers(grounds, cell):
    """With a nursery, as in our sessions, and without one (F3)."""
    ground = grounds(handler="deadly", slice_size=10)
    ground.publish([("a", "v0"), ("b", "segfault"), ("b", "v2"), ("c", "v3")])
    ground.run(ground.lease(care=True), cell=cell)
    assert [place.offset for place in ground.parked()] == [1, 2]
    ground.check()


@pytest.mark.parametrize("cell", ["forked", "run"])
def test_it_ends_with_whoever_started_it(grounds, tmp_path, cell):
    """A killed Spark worker leaves neither a keeper nor a worker behind."""
    path = tmp_path / "pids"
    ground = grounds(handler="family", argument=str(path))
    ground.publish([("a", "v0")])
    worker = ground.start(ground.lease(care=True), cell=cell)
    pids = wait_for(lambda: path.exists() and path.read_text().split(), what="a call")
    assert str(worker.pid) not in pids
    worker.kill()
    wait_for(lambda: not any(map(psutil.pid_exists, map(int, pids))), what="the end of all")
