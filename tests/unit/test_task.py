"""What a Python worker of Spark's keeps between the tasks of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pyspark import cloudpickle

from sideline import Pipeline
from sideline.engine import task
from sideline.engine.lease import Lease
from sideline.engine.worker import Access

LEASE = Lease("users", 1, 1, (), ends_at=0.0)


@pytest.fixture
def spared(monkeypatch) -> list[str]:
    """A process that has worked for nobody yet; how often its objects were spared."""
    found: list[str] = []
    monkeypatch.setattr(task, "_workers", {})
    monkeypatch.setattr(task, "_settled", set())
    monkeypatch.setattr(task, "_begin_process", lambda: None)
    monkeypatch.setattr(task, "_spare_garbage_collection", lambda: found.append("spared"))
    monkeypatch.setattr(task, "access", lambda _lease: Access("", {}))
    return found


def test_what_the_first_lease_loaded_is_spared_once(spared):
    """Spark collects after every task; but what is frozen for ever must not grow with leases."""
    pipeline = SimpleNamespace(value=cloudpickle.dumps(Pipeline("users", topics="users")))
    one = task.Task("run", pipeline)
    workers = {one.worker(LEASE)}
    assert len(spared) == 1
    workers |= {one.worker(LEASE) for _ in range(5)}
    assert len(workers) == 1
    assert len(spared) == 2
    # The next run of this process has a worker of its own.
    assert list(task.Farewell("run")([])) == []
    one.worker(LEASE)
    one.worker(LEASE)
    assert len(spared) == 4


def test_a_worker_whose_end_hangs_is_ended():
    """Nobody is left behind by Spark, whatever a client waits for when it is closed (P4)."""
    code = """
import os, signal, threading
from types import SimpleNamespace
from sideline.engine import task
task.LAST_SECONDS = 1
task._workers["run"] = SimpleNamespace(close=threading.Event().wait)
task._begin_process()
os.kill(os.getpid(), signal.SIGHUP)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert ended.returncode == -signal.SIGALRM
