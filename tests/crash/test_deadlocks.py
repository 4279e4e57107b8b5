"""Sessions of others that lock rows crosswise with a slice."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import psycopg
import pytest

from tests.support.operations import operate
from tests.support.waiting import wait_for

ROWS = ("a", "g", "z")
LOCK = "select from users where id = %s for update"
WAITING = """
    select count(*)
    from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock'
"""
DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"
STATE = "select next_offset, attempts, stuck_at, trouble, due_at from sideline.progress"


class Crosswise(threading.Thread):
    """Holds row z; once somebody has a, it wants that too, and is never the one that gives way."""

    def __init__(self, database: str) -> None:
        super().__init__()
        self.connection = psycopg.connect(database)
        self.connection.execute("set deadlock_timeout = '1h'")
        self.connection.execute(LOCK, ("z",))

    def run(self) -> None:
        self.connection.execute(LOCK, ("a",))
        self.connection.commit()


@contextmanager
def crosswise(ground):
    """Whoever writes a, g and z meanwhile is the victim of a deadlock, once."""
    with psycopg.connect(ground.database) as gate:
        gate.execute(LOCK, ("g",))
        other = Crosswise(ground.database)
        before = ground.query(DEADLOCKS)[0][0]
        yield
        wait_for(lambda: ground.query(WAITING) == [(1,)], what="the worker at the gate")
        other.start()
        wait_for(lambda: ground.query(WAITING) == [(2,)], what="the other one behind the worker")
    other.join()
    other.connection.close()
    wait_for(lambda: ground.query(DEADLOCKS)[0][0] > before, what="a deadlock in the books")


def prepared(ground):
    for row in ROWS:
        ground.query("insert into users values (%s, 'old')", row)
    return ground


def values(ground):
    return dict(ground.query("select id, value from users"))


@pytest.mark.parametrize(
    "options",
    [
        {"handler": "words"},
        {"handler": "words", "concurrency": 3},
        {"handler": "words_tx"},
        {"handler": "words_tx", "skip": True},
        {"handler": "words_tx", "dead_letter": 1, "independent": True},
    ],
    ids=str,
)
def test_a_deadlock_redoes_the_slice(grounds, options):
    """At once, without a pause or a word to anybody; nothing lost, nothing twice (K16)."""
    # A pause would outlast the lease.
    ground = prepared(grounds(**options, retry_first="10m", retry_limit="10m"))
    ground.publish([("k", " ".join(ROWS)), ("l", " ".join(ROWS))])
    with crosswise(ground):
        worker = ground.start(ground.lease())
    (report,) = worker.reports()
    assert report.failure is None
    assert (report.partitions[0].trouble, report.partitions[0].attempts) == (None, 0)
    assert ground.query(STATE) == [(2, 0, None, None, None)]
    assert values(ground) == dict.fromkeys(ROWS, f"{ground.topic}/0/1")
    ground.check()


@pytest.mark.parametrize("handler", ["words", "words_tx"])
def test_a_deadlock_redoes_what_comes_back(grounds, handler):
    """The same for events that are released: they do not wait, and do not fail again (K16, R1)."""
    ground = prepared(grounds(handler=handler, retry_first="10m", retry_limit="10m"))
    ground.publish([("k", " ".join(ROWS))])
    ground.run(pipeline={"handler": "failing_all"})
    assert len(ground.parked()) == 1
    operate(ground.database, ground.options["name"])
    with crosswise(ground):
        worker = ground.start(ground.lease())
    (report,) = worker.reports()
    assert report.failure is None
    assert values(ground) == dict.fromkeys(ROWS, f"{ground.topic}/0/0")
    assert ground.parked() == []
    ground.check()
