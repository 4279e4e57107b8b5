"""`sideline status --check`: every difference is found, and none where there is none."""

from __future__ import annotations

import json

import pytest

from sideline import accounting
from tests.support.ledger_rows import Failed

SPELLING = Failed()


@pytest.fixture
def balanced(rows):
    """A ledger in order: applied, filtered, skipped, unknown, failed, followed, and alone."""
    rows.partition(
        "login",
        "users",
        0,
        consumed=14,
        applied=5,
        filtered=4,
        skipped=3,
        unknown=2,
        next_offset=20,
    )
    rows.partition("login", "users", 1)
    rows.park(b"zoey", ("users", 0, 1), SPELLING)
    rows.park(b"zoey", ("users", 0, 2))
    rows.park(b"bob", ("users", 1, 1), Failed(fingerprint="ba9876543210"))
    rows.park(None, ("users", 1, 2), SPELLING)
    rows.park(b"zoey", ("users", 0, 1), SPELLING, pipeline="shop")
    rows.connection.execute(
        "update sideline.causes set skipped = 3 where pipeline = 'login' and partition = 0"
    )
    rows.commit()
    return rows


def test_books_that_balance(balanced, cli, read):
    """consumed = applied + filtered + skipped + unknown + parked, and the rows agree (S1)."""
    found = read("status", "--check")
    assert found["ok"] is True
    assert [books["pipeline"] for books in found["pipelines"]] == ["login", "shop"]
    account = found["pipelines"][0]["partitions"][0]
    assert (account["consumed"], account["parked"], account["aside"]) == (16, 2, 1)
    code, out, err = cli("status", "login", "--check")
    assert (code, err) == (0, "")
    head = "pipeline partition consumed applied filtered skipped unknown parked keys_aside books"
    assert out.splitlines() == [
        head.replace(" ", "\t").replace("_", " "),
        "login\tusers/0\t16\t5\t4\t3\t2\t2\t1\tok",
        "login\tusers/1\t2\t0\t0\t0\t0\t2\t1\tok",
    ]
    assert cli("status", "nope", "--check")[0] == 4


MISTAKES = {
    "an event lost from the sum": (
        [
            "alter table sideline.progress drop constraint accounting",
            "update sideline.progress set consumed = consumed + 1 where partition = 1",
        ],
        ("users/1", "events consumed, and accounted for", 3, 2),
    ),
    "an event parked and not counted": (
        ["update sideline.progress set parked = 1, applied = applied + 1 where partition = 1"],
        ("users/1", "events parked, by the counter and by their rows", 1, 2),
    ),
    "an event counted and gone": (
        ['delete from sideline.events where "offset" = 2 and partition = 0'],
        ("users/0", "events parked, by the counter and by their rows", 2, 1),
    ),
    "a dead event that is gone": (
        ["update sideline.progress set dead = 1, applied = applied - 1 where partition = 0"],
        ("users/0", "events dead, by the counter and by their rows", 1, 0),
    ),
    "an event discarded and not counted": (
        ["update sideline.events set state = 'discarded', queue = null where key = 'bob'"],
        ("users/1", "events discarded, by the counter and by their rows", 0, 1),
    ),
    "a key aside and not counted": (
        ["update sideline.progress set aside = 0 where partition = 1"],
        ("users/1", "keys aside, by the counter and by their queues", 0, 1),
    ),
    "a queue that counts wrongly": (
        ["update sideline.queues set events = 5 where home = 1"],
        ("users/1", "events in queue", 5, 1),
    ),
    "a key aside for nothing": (
        ["update sideline.events set state = 'resolved', queue = null where key = 'bob'"],
        ("users/1", "a key is aside, and nothing waits", 1, 0),
    ),
    "a queue without its key": (
        ["delete from sideline.keys where key = 'bob'"],
        ("users/1", "no key is aside for it", 1, 0),
    ),
    "an event that left its queue": (
        ["update sideline.events set queue = null where key = 'bob'"],
        ("users/1", "event users/1/1 has a key, and waits in no queue", 1, 0),
    ),
    "a cause that counts wrongly": (
        ["update sideline.causes set parked = 2 where partition = 0"],
        ("users/0", "events parked for cause 0123456789ab", 2, 1),
    ),
    "a cause that is gone": (
        ["delete from sideline.causes where fingerprint = 'ba9876543210'"],
        ("users/1", "events parked for cause ba9876543210", 0, 1),
    ),
    "skipped and not counted by cause": (
        ["update sideline.causes set skipped = 1 where partition = 0"],
        ("users/0", "events skipped, by the counter and by their causes", 3, 1),
    ),
    "a partition without progress": (
        ["delete from sideline.progress where partition = 1"],
        ("users/1", "events and queues of a partition that has no progress", 0, 3),
    ),
}


def test_every_mistake_is_found(balanced, database):
    """Each by its partition and both numbers; the other pipeline is in order (S1)."""
    for mistake, (statements, (partition, words, counted, found)) in MISTAKES.items():
        for statement in statements:
            scope = "" if "alter" in statement else " and pipeline = 'login'"
            balanced.connection.execute(statement + scope)
        login, shop = (
            accounting._books(balanced.connection, pipeline) for pipeline in ("login", "shop")
        )
        balanced.connection.rollback()
        assert shop.differences == [], mistake
        assert any(
            (one.partition, one.counted, one.found) == (partition, counted, found)
            and words in one.message
            for one in login.differences
        ), (mistake, login.differences)


def test_a_difference_exits_3(balanced, cli):
    """With the partition, what differs, and both numbers, for people and for programs (S1)."""
    balanced.connection.execute("update sideline.queues set events = 5 where home = 1")
    balanced.commit()
    code, out, _ = cli("status", "--check", "--json")
    said = json.loads(out)
    assert (code, said["ok"]) == (3, False)
    assert [len(books["differences"]) for books in said["pipelines"]] == [1, 0]
    code, out, err = cli("status", "--check")
    assert code == 3
    assert [line.split("\t")[-1] for line in out.splitlines()[1:]] == ["ok", "differs", "ok"]
    assert "login users/1: events in queue" in err
    assert "5 and 1" in err


def test_an_event_may_stand_alone_where_the_pipeline_says_so(balanced, cli):
    """With key= a record's key is not the event's: nothing waits behind it (K15)."""
    balanced.connection.execute("update sideline.events set queue = null where key = 'bob'")
    balanced.connection.execute("delete from sideline.keys where key = 'bob'")
    balanced.connection.execute("delete from sideline.queues where home = 1")
    balanced.connection.execute("update sideline.progress set aside = 0 where partition = 1")
    balanced.commit()
    assert cli("status", "login", "--check")[0] == 3
    balanced.connection.execute("update sideline.events set alone = true where key = 'bob'")
    balanced.commit()
    assert cli("status", "login", "--check")[0] == 0


def test_a_slice_in_flight_is_not_half_seen(balanced, database, monkeypatch):
    """All questions are answered from one moment, so a running pipeline always balances (C3)."""
    ask = accounting._queues

    def park_meanwhile(connection, pipeline):
        balanced.park(b"late", ("users", 0, 9), Failed(fingerprint="fedcba987654"))
        balanced.commit()
        return ask(connection, pipeline)

    monkeypatch.setattr(accounting, "_queues", park_meanwhile)
    assert [books.differences for books in accounting.check(database, "login")] == [[]]


def test_status_shows_what_is_parked(balanced, read, cli):
    """Parked events and keys aside, by pipeline and by partition (S1)."""
    found = read("status", "login")
    assert (found["parked"], found["aside"]) == (4, 2)
    assert [(part["parked"], part["aside"]) for part in found["partitions"]] == [(2, 1), (2, 1)]
    _, out, _ = cli("status", "login")
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0][4:6] == ["parked", "keys aside"]
    assert lines[1][4:6] == ["4", "2"]
    assert lines[4][5:7] == ["2", "1"]


def test_a_million_differences_are_not_said_one_by_one(balanced, cli, monkeypatch):
    """The first ones, how many more there are, and where to find them."""
    monkeypatch.setattr("sideline.cli.status.MOST_DIFFERENCES", 2)
    balanced.connection.execute("update sideline.queues set events = 9")
    balanced.connection.execute("update sideline.progress set aside = 9")
    balanced.commit()
    _, _, err = cli("status", "login", "--check")
    assert len(err.splitlines()) == 3
    assert "... and 2 more" in err
