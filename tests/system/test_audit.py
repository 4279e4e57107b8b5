"""Who did what, when and why: written with the change, read by anybody, changed by nobody (S6)."""

from __future__ import annotations

import os
import socket
from itertools import pairwise
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from sideline import Pipeline
from sideline.ledger import audit, schema


@pytest.fixture
def worker(rows, database):
    """A session of the role that pipelines run as."""
    role = sql.Identifier(f"worker_{uuid4().hex}")
    rows.connection.execute(sql.SQL("create role {}").format(role))
    schema.grant(rows.connection, role.as_string().strip('"'))
    rows.commit()
    with psycopg.connect(database) as connection:
        connection.execute(sql.SQL("set role {}").format(role))
        connection.commit()
        yield connection
    rows.connection.execute(sql.SQL("drop owned by {}").format(role))
    rows.connection.execute(sql.SQL("drop role {}").format(role))
    rows.commit()


def test_what_a_run_was_told_to_do_is_in_the_books(desk, topics, read):
    """S6: whoever takes a place over, or runs without the guard, and from whom."""
    topic = topics(partitions=1)
    desk(Pipeline("login", topics=topic))
    assert read("audit")["changes"] == []
    desk(Pipeline("login", topics=topic), take_over=True, guard=False)
    guard, taken = read("audit", "login")["changes"]
    assert (guard["action"], taken["action"]) == ("override guard", "take over")
    assert taken["subject"] == {"host": socket.gethostname(), "pid": os.getpid()}
    assert taken["actor"] == audit.actor()


def test_changes_by_hand_are_in_the_books(rows, cli, read):
    """S6: pause, resume and park, with who, what and why; what changed nothing is not there."""
    rows.partition("login", "users", 2, stuck_at=7, next_offset=7)
    rows.commit()
    for _ in range(2):
        assert cli("pause", "login", "--reason", "the disk\nis full")[0] == 0
    assert cli("resume", "login")[0] == 0
    assert cli("pause", "login", "--partition", "2")[0] == 0
    assert cli("park", "users/2/7", "--reason", "typed in by hand", "--execute")[0] == 0

    changes = read("audit", "login")["changes"][::-1]

    assert [(one["action"], one["reason"], one["count"], one["subject"]) for one in changes] == [
        ("pause", "the disk is full", None, {}),
        ("resume", None, None, {}),
        ("pause", None, None, {"partitions": ["users/2"]}),
        ("park", "typed in by hand", 1, {"event": "users/2/7"}),
    ]
    assert {one["actor"] for one in changes} == {audit.actor()}


def test_a_change_and_its_record_are_one_transaction(rows):
    """S6: a change that is rolled back leaves no record."""
    audit.record(rows.connection, "release", actor="zoey@here", pipeline="login")
    rows.connection.rollback()
    assert audit.page(rows.connection, limit=10) == []


def test_filters_and_pages(rows, cli, read):
    """By pipeline, action, person and time; page after page, each change once."""
    for number in range(7):
        audit.record(
            rows.connection,
            ("release", "discard")[number % 2],
            actor=("zoey@desk", "bob@desk")[number % 2],
            pipeline=("login", "orders")[number > 4],
            count=number,
        )
    rows.commit()
    seen, after = [], ()
    while True:
        page = read("audit", "--limit", "3", *after)
        seen += [one["count"] for one in page["changes"]]
        if page["next"] is None:
            break
        after = ("--after", str(page["next"]))
    assert seen == [6, 5, 4, 3, 2, 1, 0]
    assert [one["count"] for one in read("audit", "orders")["changes"]] == [6, 5]
    assert [one["count"] for one in read("audit", "--action", "discard")["changes"]] == [5, 3, 1]
    by = [read("audit", "--by", name)["changes"] for name in ("bob", "bob@desk", "bo")]
    assert [len(found) for found in by] == [3, 3, 0]
    assert read("audit", "--until", "1h")["changes"] == []
    assert len(read("audit", "--since", "1h")["changes"]) == 7
    code, out, err = cli("audit", "login", "--limit", "2")
    assert (code, out.count("\n")) == (0, 3)
    assert "--after" in err
    ids = [one["id"] for one in read("audit")["changes"]]
    assert all(later > earlier for later, earlier in pairwise(ids))


def test_words_of_strangers_are_harmless(rows, cli, read):
    """What a terminal would obey, NUL and half characters are stored and shown tamed."""
    audit.record(
        rows.connection,
        "discard",
        actor="\x1b[31mzoey\0@here",
        subject={"key": "a\0\x1b[2J\udcff"},
        reason="\x1b]0;owned\x07 \udcff",
    )
    rows.commit()
    code, out, _ = cli("audit")
    assert code == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert read("audit")["changes"][0]["subject"] == {"key": "a\x1b[2J?"}


def test_nonsense_is_refused(rows, cli):
    """One sentence and exit code 2."""
    rows.commit()
    for arguments in (
        ("--since", "yesterday"),
        ("--until", "12:00"),
        ("--after", "0"),
        ("--after", "9223372036854775808"),
        ("--limit", "0"),
    ):
        code, _, err = cli("audit", *arguments)
        assert code == 2, arguments
        assert "Traceback" not in err


def test_the_books_of_a_database_without_a_ledger(cli, read):
    """Nobody has changed anything there."""
    assert read("audit") == {"changes": [], "next": None}
    assert cli("audit")[0] == 0


def test_the_application_only_adds(worker):
    """S6: the role that pipelines run as inserts and reads; it changes and deletes nothing."""
    audit.record(worker, "release", actor="zoey@here", count=3)
    worker.commit()
    assert [entry.count for entry in audit.page(worker, limit=10)] == [3]
    for statement in (
        "update sideline.audit set actor = 'nobody'",
        "delete from sideline.audit",
        "truncate sideline.audit",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            worker.execute(statement)
        worker.rollback()
