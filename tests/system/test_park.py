"""`sideline park`: a person sets aside what a partition waits for, and nothing else."""

from __future__ import annotations

import threading
from itertools import product

import psycopg
import pytest

from sideline.errors import RefusedError
from sideline.ledger import asking
from sideline.views import EventId
from tests.support.ledger_rows import Failed
from tests.support.waiting import wait_for

REASON = ("--reason", "the order was typed in by hand")


@pytest.fixture
def stuck(rows):
    """Partition 2 of users waits for offset 7, partition 1 for nothing."""
    rows.partition(
        "login",
        "users",
        2,
        stuck_at=7,
        attempts=12,
        trouble="ValueError: cannot spell this",
        due_at="2099-01-01",
        next_offset=7,
    )
    rows.partition("login", "users", 1, next_offset=3)
    rows.commit()
    return rows


def wishes(rows) -> list[tuple]:
    found = rows.connection.execute(
        "select pipeline, partition, park_at, park_reason, due_at <= now() from sideline.progress"
        " where park_at is not null order by 1, 2"
    ).fetchall()
    rows.commit()
    return found


def test_the_plan_is_shown_and_nothing_is_changed(stuck, cli, read):
    """Without --execute: what would happen, in words and as JSON."""
    code, out, err = cli("park", "users/2/7", *REASON)
    assert (code, out) == (0, "")
    assert "users/2 of pipeline login waits for users/2/7, after 12 attempts: ValueError" in err
    assert "the order was typed in by hand" in err
    assert "--execute" in err
    found = read("park", "users/2/7", *REASON)
    assert (found["id"], found["pipeline"], found["executed"]) == ("users/2/7", "login", False)
    assert wishes(stuck) == []


def test_executed_it_is_due_at_once(stuck, cli, read):
    """The partition's next lease finds the wish and does not wait for its next attempt."""
    assert read("park", "users/2/7", *REASON, "--execute")["executed"] is True
    assert wishes(stuck) == [("login", 2, 7, REASON[1], True)]
    _, _, err = cli("park", "users/2/7", "login", "--reason", "again", "--execute")
    assert f"asked for before, for the reason: {REASON[1]}" in err
    assert wishes(stuck) == [("login", 2, 7, "again", True)]


def test_the_driver_is_woken(stuck, cli, database):
    """Whoever listens for released partitions hears of it."""
    from sideline.ledger.store import channel

    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute(f"listen {channel('login')}")
        assert cli("park", "users/2/7", *REASON, "--execute")[0] == 0
        assert [found.channel for found in listener.notifies(timeout=10, stop_after=1)] == [
            channel("login")
        ]


REFUSED = [
    (["users/2/8", *REASON], 5, "waits for event users/2/7, not for users/2/8"),
    (["users/1/3", *REASON], 5, "partition users/1 of pipeline 'login' waits for no event"),
    (["users/9/3", *REASON], 4, "no pipeline reads partition users/9"),
    (["orders/2/7", *REASON], 4, "no pipeline reads partition orders/2"),
    (["users/9/3", "login", *REASON], 4, "'login' does not read partition users/9"),
    (["users/2/7", "shop", *REASON], 4, "no pipeline 'shop' has run"),
    (["users/2", *REASON], 2, "'users/2' is not an event's id"),
    (["users/2/x", *REASON], 2, "is not an event's id"),
    (["users/2/7", "--reason", " "], 2, "--reason is empty"),
    (["users/2/7"], 2, "--reason"),
]


def test_what_nobody_waits_for_is_refused(stuck, cli):
    """With the event that the partition does wait for, or that it waits for none."""
    for (arguments, code, words), execute in product(REFUSED, [[], ["--execute"]]):
        found, out, err = cli("park", *arguments, *execute)
        assert (found, out) == (code, ""), arguments
        assert words in err
        assert wishes(stuck) == []


def test_what_is_parked_already_is_refused(stuck, cli):
    """Twice aside is once too often."""
    stuck.park(b"zoey", ("users", 2, 7), Failed())
    stuck.commit()
    code, _, err = cli("park", "users/2/7", *REASON, "--execute")
    assert code == 5
    assert "event users/2/7 is parked already in pipeline 'login'" in err
    assert "sideline parked show users/2/7" in err
    assert wishes(stuck) == []


def test_an_event_of_a_topic_that_was_made_again_is_another_one(stuck, cli):
    """The old one of the same offset may wait already."""
    stuck.park(b"zoey", ("users", 2, 7), Failed())
    stuck.partition("login", "users", 2, incarnation=1)
    stuck.commit()
    assert cli("park", "users/2/7", *REASON, "--execute")[0] == 0


def test_a_name_is_needed_only_where_several_wait(stuck, cli):
    """Another pipeline that reads the topic and does not wait changes nothing."""
    stuck.partition("shop", "users", 2)
    stuck.commit()
    assert cli("park", "users/2/7", *REASON)[0] == 0
    stuck.partition("shop", "users", 2, stuck_at=7)
    stuck.commit()
    code, _, err = cli("park", "users/2/7", *REASON, "--execute")
    assert code == 2
    assert "2 pipelines wait for event users/2/7: login, shop." in err
    assert cli("park", "users/2/7", "shop", *REASON, "--execute")[0] == 0
    assert [wish[0] for wish in wishes(stuck)] == ["shop"]


def test_a_pause_is_mentioned(stuck, cli):
    """Else one would wait in vain."""
    stuck.partition("login", "users", 2, paused=True)
    stuck.commit()
    assert "sideline resume" in cli("park", "users/2/7", *REASON)[2]


def test_a_partition_that_moved_on_meanwhile_is_left_alone(stuck, database):
    """The wish waits for the slice in flight, then sees what became of the event (C3)."""
    event = EventId("users", 2, 7)
    failed = []

    def ask() -> None:
        with psycopg.connect(database) as connection:
            assert asking.look(connection, event).pipeline == "login"
            ready.set()
            assert go_on.wait(30)
            try:
                asking.ask(connection, event, "login", "too late", who="zoey@here")
            except RefusedError as error:
                failed.append(error.message)

    ready, go_on = threading.Event(), threading.Event()
    person = threading.Thread(target=ask)
    person.start()
    assert ready.wait(30)
    # A slice that parks the event is about to commit.
    stuck.partition("login", "users", 2, stuck_at=None, next_offset=8)
    stuck.park(b"zoey", ("users", 2, 7), Failed())
    go_on.set()
    wait_for(lambda: blocked(database), what="the person waits for the slice")
    stuck.commit()
    person.join(30)
    assert failed == ["event users/2/7 is parked already in pipeline 'login'."]
    assert wishes(stuck) == []


def blocked(database: str) -> bool:
    with psycopg.connect(database) as connection:
        return bool(
            connection.execute(
                "select from pg_locks where not granted and pid in"
                " (select pid from pg_stat_activity where datname = current_database())"
            ).fetchall()
        )


def test_a_row_that_is_held_too_long_is_said(stuck, cli, database, monkeypatch):
    """A frozen worker does not freeze the person too."""
    monkeypatch.setattr(asking, "LOCK_TIMEOUT", "50ms")
    stuck.partition("login", "users", 2, attempts=13)
    code, _, err = cli("park", "users/2/7", *REASON, "--execute")
    assert code == 5
    assert "holds its row longer than" in err
