"""How a worker died, and whether the event in its hand is to blame."""

from __future__ import annotations

import pickle
import signal

import pytest

from sideline import Pipeline
from sideline.engine import deaths
from sideline.engine.deaths import TIMEOUT_CODE, Death, oom_kills, telling
from sideline.errors import HandlerTimeout, WorkerCrashed


@pytest.mark.parametrize(
    "code",
    [
        -signal.SIGSEGV,
        -signal.SIGBUS,
        -signal.SIGILL,
        -signal.SIGFPE,
        -signal.SIGABRT,
        -signal.SIGALRM,
        0,
        1,
        3,
        TIMEOUT_CODE,
    ],
)
def test_what_a_process_does_to_itself_speaks_against_its_event(code):
    """A fault, an exit of any code, a timeout (F3)."""
    assert Death(code).counts


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
)
def test_a_signal_from_outside_does_not(number):
    """Whoever ends a worker by hand parks nobody."""
    assert not Death(-number).counts
    assert number.name in str(Death(-number))


def test_the_kernel_that_ran_out_of_memory_does():
    """The same signal, but the machine says why."""
    death = Death(-signal.SIGKILL, out_of_memory=True)
    assert death.counts
    assert "memory" in str(death)


@pytest.mark.parametrize(
    ("death", "kind", "words"),
    [
        (Death(-signal.SIGSEGV), WorkerCrashed, "died of SIGSEGV"),
        (Death(3), WorkerCrashed, "exited with code 3"),
        (Death(-signal.SIGKILL, out_of_memory=True), WorkerCrashed, "memory ran out"),
        (Death(TIMEOUT_CODE), HandlerTimeout, "handler_timeout"),
        (Death(1, last_words="Timeout (0:00:01)!\nFile x"), HandlerTimeout, "handler_timeout"),
    ],
)
def test_the_error_says_what_happened(death, kind, words):
    """What stands in the list of causes."""
    error = death.error(3)
    assert type(error) is kind
    assert words in str(error)
    assert "3 times" in str(error)


def test_last_words_travel_with_the_error():
    """The stack of the dying process is what a person looks for."""
    error = pickle.loads(pickle.dumps(Death(-11, last_words="Segmentation fault").error(3)))
    assert error.__notes__ == ["Segmentation fault"]


def test_nothing_recovers_from_it():
    """However wide the white list: it is not tried again in vain (F3)."""
    pipeline = Pipeline("p", "t", recoverable=(Exception,))
    assert not pipeline.recovers(HandlerTimeout("late"))
    assert not pipeline.recovers(WorkerCrashed("dead"))


def test_the_nearest_counter_is_believed(monkeypatch, tmp_path):
    """The group's own, if the kernel shows it; not its neighbours'."""
    group, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    machine.write_text("nr_free_pages 12\noom_kill 7\n")
    monkeypatch.setattr(deaths, "_counters", lambda: iter([group, machine]))
    assert oom_kills() == 7
    group.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills() == 2


DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "pulse.py", line 9 in _run

Current thread 0x00007f2 (most recent call first):
  File "app.py", line 17 in login
  File "care.py", line 1 in careful

Extension modules: psycopg_binary.pq (total: 1)
"""


def test_of_the_last_words_the_handlers_thread_is_kept():
    """The others are ours, and there may be many."""
    assert telling(DUMP) == (
        "Fatal Python error: Segmentation fault\n"
        "Current thread 0x00007f2 (most recent call first):\n"
        '  File "app.py", line 17 in login\n'
        '  File "care.py", line 1 in careful'
    )


def test_a_watchdogs_words_begin_with_a_thread():
    """It says why by its exit code."""
    threads = DUMP.partition("\n\n")[2].replace("Current thread", "Thread")
    assert telling(threads).startswith("Thread 0x00007f2")
    assert telling("Timeout (0:00:01)!\n" + threads).startswith(
        "Timeout (0:00:01)!\nThread 0x00007f2"
    )
    assert telling("") == ""
