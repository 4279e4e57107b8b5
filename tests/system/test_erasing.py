"""A person's bytes, and everything of a pipeline: gone for good, in one go, or not at all."""

from __future__ import annotations

import subprocess
import sys

import psycopg
import pytest

from sideline import accounting
from sideline.keys import digest
from sideline.ledger.connection import connect
from sideline.ledger.place import LOCK_SPACE
from tests.support.ledger_rows import Failed
from tests.support.waiting import patiently, wait_for

NAMED = "cannot spell Zoë of 1 Main Street"
WHY = Failed(message=NAMED, traceback=f"Traceback ...\nValueError: {NAMED}")
REASON = ("--reason", "request 815 of the data protection officer")
ERASE = ("erase", "--pipeline", "login", "--key", "zoey", *REASON)
STATES = ("resolved", "skipped", "discarded", "dead")


@pytest.fixture
def zoey(rows):
    """Events of Zoey in every state that waits for nothing, and one of Bob."""
    for offset, state in enumerate(STATES):
        rows.park(
            b"zoey",
            ("users", 1, offset),
            WHY,
            value=b'{"name": "Zo\xc3\xab"}',
            headers=[("email", b"zoe@home.example")],
        )
        settle(rows, offset, state)
    rows.park(b"bob", ("users", 1, 9), Failed(fingerprint="ba9876543210"), value=b"Bob")
    settle(rows, 9, "resolved")
    rows.connection.execute("delete from sideline.keys")
    rows.connection.execute("delete from sideline.queues")
    rows.connection.execute("update sideline.progress set aside = 0")
    rows.commit()
    return rows


def settle(rows, offset, state):
    """What becomes of a parked event, in the counters too."""
    counter = {"resolved": "applied"}.get(state, state)
    rows.connection.execute(
        'update sideline.events set state = %s, queue = null where "offset" = %s', (state, offset)
    )
    rows.connection.execute(
        f"update sideline.progress set parked = parked - 1, {counter} = {counter} + 1"
    )
    rows.connection.execute("update sideline.causes set parked = 0")
    if state == "skipped":
        rows.connection.execute("update sideline.causes set skipped = 1")
    rows.connection.execute("update sideline.queues set events = greatest(events - 1, 0)")


def everything(database) -> str:
    """All that the ledger has, as one text."""
    with psycopg.connect(database) as connection:
        tables = connection.execute(
            "select table_name from information_schema.tables where table_schema = 'sideline'"
        ).fetchall()
        return "\n".join(
            str(connection.execute(f"select * from sideline.{name}").fetchall())
            for (name,) in tables
        )


def test_the_plan_changes_nothing(zoey, read, database):
    """How many events, by state; without the key (S6)."""
    before = everything(database)
    found = read(*ERASE)
    assert found["events"] == dict.fromkeys(STATES, 1)
    assert (found["erased"], found["executed"]) == (0, False)
    assert "zoey" not in str(found)
    assert everything(database) == before


def test_nothing_of_a_person_is_left(zoey, read, database):
    """Key, value, headers, error texts, in the audit neither; Bob is untouched (F13, S6)."""
    asked = '{"keys": [{"text": "zoey"}, {"text": "bob"}]}'
    zoey.connection.execute(
        "insert into sideline.operations (pipeline, kind, state, selection, actor, items, events,"
        " plan) values ('login', 'discard', 'done', %s, 'me', 1, 1, 'p')",
        (asked,),
    )
    zoey.connection.execute(
        "insert into sideline.audit (actor, action, pipeline, subject)"
        " values ('me', 'discard', 'login', jsonb_build_object('selection', %s::jsonb))",
        (asked,),
    )
    zoey.commit()
    assert read(*ERASE, "--execute")["erased"] == 4
    left = everything(database)
    for secret in ("zoey", "Zo\\xc3", "Zoë", "home.example", "Main Street", b"zoey".hex()):
        assert secret not in left
    assert str(digest(b"zoey", derived=False)) not in left
    assert "Bob" in left
    rows = zoey.connection.execute(
        'select "offset", state, error from sideline.events where erased_at is not null order by 1'
    ).fetchall()
    assert [row[:2] for row in rows] == [
        (0, "resolved"),
        (1, "skipped"),
        (2, "discarded"),
        # It can be released no more.
        (3, "discarded"),
    ]
    assert {row[2] for row in rows} == {"ValueError"}
    zoey.commit()
    assert [books.differences for books in accounting.check(database)] == [[]]
    ((actor, action, number, reason),) = zoey.connection.execute(
        "select actor, action, count, reason from sideline.audit where action = 'erase'"
    ).fetchall()
    assert (action, number, reason) == ("erase", 4, REASON[1])
    assert "@" in actor
    zoey.commit()
    assert read(*ERASE, "--execute")["events"] == {}


def test_copies_are_taken_away_by_tombstones(zoey, read, database):
    """Behind the copies, through the outbox of the partition that the event came from (K25)."""
    zoey.connection.execute(
        'update sideline.pipelines set dead_letters = \'{"users": "users.login.dlq"}\','
        ' stashes = \'{"users": "users.login.stash"}\''
    )
    zoey.connection.execute(
        "update sideline.events set copy_topic = 'users.login.dlq' where state = 'dead'"
    )
    zoey.connection.execute(
        "update sideline.events set held_in = 'stash', value = null where state = 'discarded'"
    )
    # Through a retry topic, where keys are the records' own.
    zoey.connection.execute(
        "update sideline.events set copy_topic = 'users.login.retry.1' where state = 'resolved'"
    )
    # The copy of the dead one has not left yet.
    zoey.connection.execute(
        "insert into sideline.outbox (pipeline, topic, partition, number, to_topic, key, value,"
        " header_names, header_values, of_topic, of_partition, of_offset) values"
        " ('login', 'users', 1, 1, 'users.login.dlq', 'users/1/3', 'Zoey', '{a}', '{zoe@x}',"
        " 'users', 1, 3)"
    )
    zoey.connection.execute("update sideline.progress set outbox_last = 1")
    zoey.commit()
    assert read(*ERASE, "--execute")["erased"] == 4
    rows = zoey.connection.execute(
        "select number, to_topic, convert_from(key, 'utf8'), value, header_names"
        " from sideline.outbox order by number"
    ).fetchall()
    assert rows[0] == (1, "users.login.dlq", "users/1/3", None, [])
    assert sorted(row[1:] for row in rows[1:]) == [
        ("users.login.dlq", "users/1/3", None, []),
        ("users.login.stash", "users/1/2", None, []),
    ]
    assert zoey.connection.execute("select outbox_last from sideline.progress").fetchall() == [(3,)]


def test_refused_while_an_event_of_the_key_waits(zoey, cli, database):
    """It could never be applied: exit 5, with the way out; nothing is erased."""
    zoey.park(b"zoey", ("users", 1, 20), WHY)
    zoey.commit()
    before = everything(database)
    for more in ((), ("--execute",)):
        code, out, err = cli(*ERASE, *more)
        assert code == 5, out + err
        assert "sideline discard login --key KEY" in err
    assert everything(database) == before


WRONG = [
    (("--pipeline", "nobody", "--key", "zoey", *REASON), 4),
    (("--pipeline", "login", *REASON), 2),
    (("--pipeline", "login", "--key", "a", "--key-hex", "00", *REASON), 2),
    (("--pipeline", "login", "--key-hex", "\x1b[31mxx", *REASON), 2),
    (("--pipeline", "login", "--key", "a", "--reason", " \n"), 2),
    (("--pipeline", "login", "--key", "a"), 2),
    (("--pipeline", "lo\udcffgin", "--key", "a", *REASON), 4),
]


def test_what_is_not_a_key(zoey, cli):
    """One sentence and its exit code; nothing that a terminal would obey."""
    for arguments, code in WRONG:
        found, out, err = cli("erase", *arguments, "--execute")
        assert found == code, (arguments, out + err)
        assert "\x1b" not in out + err
        assert "unexpected" not in err


def test_a_key_of_any_bytes(rows, read):
    """As the lists print it; the topic may be named, too."""
    rows.park(b"\xff\x00", ("users", 0, 0), WHY)
    settle(rows, 0, "discarded")
    rows.commit()
    hexed = ("erase", "--pipeline", "login", "--key-hex", "0xff00", *REASON)
    assert read(*hexed, "--topic", "others")["events"] == {}
    assert read(*hexed, "--topic", "users", "--execute")["erased"] == 1


# Forgetting


def test_everything_of_a_pipeline_goes_and_the_audit_stays(zoey, read, database):
    """And nothing of another pipeline, its runs included (S6)."""
    zoey.park(b"x", ("users", 0, 1), Failed(), pipeline="other")
    ((run,),) = zoey.connection.execute(
        "insert into sideline.runs (pipeline, state, alone, bounds, actor) values"
        " ('login', 'done', true, '[]', 'me') returning name"
    ).fetchall()
    zoey.partition(run, "users", 0)
    zoey.commit()
    plan = read("forget", "login")
    assert (plan["rows"]["events"], plan["runs"], plan["executed"]) == (5, [run], False)
    assert read("forget", "login", "--execute")["executed"] is True
    for (table,) in tables_with_a_pipeline(zoey):
        if table != "audit":
            found = zoey.connection.execute(f"select distinct pipeline from sideline.{table}")
            assert {name for (name,) in found.fetchall()} <= {"other"}, table
    names = zoey.connection.execute("select name from sideline.pipelines").fetchall()
    assert names == [("other",)]
    ((action, pipeline, subject),) = zoey.connection.execute(
        "select action, pipeline, subject from sideline.audit"
    ).fetchall()
    assert (action, pipeline, subject["events"]) == ("forget", "login", 5)


def tables_with_a_pipeline(rows):
    return rows.connection.execute(
        "select table_name from information_schema.columns"
        " join information_schema.tables using (table_schema, table_name)"
        " where table_schema = 'sideline' and column_name = 'pipeline'"
        " and table_type = 'BASE TABLE'"
    ).fetchall()


def test_every_table_of_a_pipeline_is_forgotten(rows):
    """A table that comes later must not be left out."""
    from sideline.ledger.sql import queries

    statement = queries()["remove_pipelines"]
    for (table,) in tables_with_a_pipeline(rows):
        if table != "audit":
            assert f"delete from sideline.{table}\n" in statement, table


def test_refused_while_it_runs(zoey, cli, database):
    """Exit 5; its run counts, too."""
    with connect(database, role="test") as driver:
        driver.execute("select pg_advisory_lock(%s, hashtext('login'))", (LOCK_SPACE,))
        driver.commit()
        for more in ((), ("--execute",)):
            code, out, err = cli("forget", "login", *more)
            assert code == 5, out + err
            assert "is running" in err
        # A session that is closed may hold it a moment longer.
        driver.execute("select pg_advisory_unlock_all()")
        driver.commit()
    assert cli("forget", "login", "--execute")[0] == 0


def test_refused_while_events_wait(zoey, cli, read, database):
    """They would be lost: only with --discard-parked and a reason."""
    zoey.park(b"eve", ("users", 1, 20), WHY)
    zoey.commit()
    before = everything(database)
    code, _, err = cli("forget", "login", "--execute")
    assert code == 5
    assert "--discard-parked --reason TEXT" in err
    assert cli("forget", "login", "--execute", "--discard-parked")[0] == 2
    assert everything(database) == before
    found = read("forget", "login", "--execute", "--discard-parked", *REASON)
    assert found["waiting"] == 1
    ((reason, subject),) = zoey.connection.execute(
        "select reason, subject from sideline.audit"
    ).fetchall()
    assert (reason, subject["waiting"]) == (REASON[1], 1)


def test_a_run_that_is_not_over_is_not_forgotten(zoey, cli):
    """It keeps its pipeline waiting: that has to end first."""
    ((run,),) = zoey.connection.execute(
        "insert into sideline.runs (pipeline, alone, bounds, actor) values"
        " ('login', true, '[]', 'me') returning name"
    ).fetchall()
    zoey.partition(run, "users", 0)
    zoey.commit()
    code, _, err = cli("forget", run, "--execute")
    assert code == 5
    assert "--cancel" in err


def test_a_pipeline_that_is_not_there(zoey, cli):
    """Exit 4, in words that a terminal can show."""
    for name in ("nobody", "\x1b[31mlogin", "login\udcff", "x" * 10_000):
        code, out, err = cli("forget", name, "--execute")
        assert code == 4, out + err
        assert "\x1b" not in err


def test_the_groups_offsets_go_when_somebody_says_so(zoey, read, kafka, topics, monkeypatch):
    """Left alone otherwise; a group that is not there is no error."""
    from sideline.engine.lease import Partition
    from sideline.topics.admin import Cluster
    from tests.support.pipelines import group_offsets, publish

    monkeypatch.setenv("SIDELINE_KAFKA", kafka)
    topic = topics()
    publish(kafka, topic, [("k", "v")], partition=0)
    cluster = Cluster({"bootstrap.servers": kafka})

    def shown():
        patiently(lambda: cluster.commit_group("login", {Partition(topic, 0): 1}))
        return group_offsets(kafka, "login", topic, 1)

    # A broker that has just started does not know its groups yet.
    wait_for(lambda: shown() == {0: 1}, what="the group's offset")
    zoey.partition("other", topic, 0)
    zoey.commit()
    read("forget", "login", "--execute")
    assert group_offsets(kafka, "login", topic, 1) == {0: 1}
    zoey.partition("login", topic, 0)
    zoey.commit()
    read("forget", "login", "--execute", "--group-offsets")
    assert group_offsets(kafka, "login", topic, 1) == {}
    read("forget", "other", "--execute", "--group-offsets")


# Half of it is nothing


@pytest.mark.parametrize(
    ("point", "arguments"),
    [
        ("erased", (*ERASE, "--execute")),
        ("forgotten", ("forget", "login", "--execute")),
    ],
)
def test_killed_before_its_commit_nothing_has_happened(zoey, database, tmp_path, point, arguments):
    """All of it, its record included, or nothing (C3, S6)."""
    import os

    before = everything(database)
    done = subprocess.run(
        [sys.executable, "-m", "sideline", *arguments],
        cwd=tmp_path,
        env=os.environ | {"SIDELINE_DATABASE": database, "SIDELINE_CRASH_AT": point},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -9, done.stderr
    assert everything(database) == before
