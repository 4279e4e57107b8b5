"""A contestant's reports are followed, and its end is noticed."""

from __future__ import annotations

import sys

import psutil
import pytest

from bench import contest, cpu
from bench.peers import Peer, Task
from tests.support.waiting import wait_for

TASK = Task("localhost:1", "postgresql:///none", "t", 1, events=30)


def peer(program: str) -> Peer:
    return Peer("test", "test", lambda _task: [sys.executable, "-c", program])


def test_reports_add_up():
    """Each report says what came on top; times are the contestant's own."""
    program = "print('1.0 10'); print('2.5 20', flush=True); import time; time.sleep(60)"
    with contest.started(peer(program), TASK) as contestant:
        commits = contestant.commits()
        assert next(commits) == (1.0, 10)
        assert next(commits) == (2.5, 30)


def test_a_contestant_that_ends_early_shows_its_log():
    """The person sees why, not only that."""
    program = "import sys; print('1.0 10'); sys.exit('no such topic')"
    with contest.started(peer(program), TASK) as contestant:
        commits = contestant.commits()
        next(commits)
        with pytest.raises(contest.ContestantFailedError, match="no such topic"):
            next(commits)


def test_nothing_of_a_contestant_is_left():
    """Its children end with it, also when the block fails."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('1.0', child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    pids = []

    def fail() -> None:
        with contest.started(peer(program), TASK) as contestant:
            pids.extend([contestant.process.pid, next(contestant.commits())[1]])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_for(lambda: not any(map(_runs, pids)), what="the end of it and of its child")


def test_children_that_have_ended_still_count():
    """CPU time of a worker that was waited for is not lost."""
    program = (
        "import os, time\n"
        "child = os.fork()\n"
        "while not child and time.process_time() < 0.3:\n"
        "    pass\n"
        "if not child:\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('1.0 1', flush=True)\n"
        "time.sleep(60)\n"
    )
    # In a tree of its own: what else this process has started comes and goes meanwhile.
    with contest.started(peer(program), TASK) as contestant:
        next(contestant.commits())
        parent = psutil.Process(contestant.process.pid)
        own = sum(parent.cpu_times()[:2])
        # The kernel counts user and system time in whole ticks: some hundredths go missing.
        assert cpu.seconds(parent.pid) - own > 0.2


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
