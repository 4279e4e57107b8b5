"""What is over and old goes, in small bites; what still waits is never touched."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from sideline import Pipeline
from sideline.engine import housekeeping
from sideline.ledger import cleaning
from sideline.ledger.sql import queries
from sideline.retention import Retention
from tests.support.ledger_rows import Failed
from tests.support.waiting import wait_for

MONTH = Retention(*[timedelta(days=30)] * 4)
CLOSED = ("resolved", "skipped", "discarded")
OPEN = ("parked", "retrying", "dead")


def ages(rows, table="events", column="updated_at", days=31):
    rows.connection.execute(
        f"update sideline.{table} set {column} = now() - make_interval(days => %s)", (days,)
    )
    rows.commit()


def states(rows) -> dict[str, int]:
    found = rows.connection.execute(
        "select state, count(*) from sideline.events group by state"
    ).fetchall()
    rows.commit()
    return dict(found)


@pytest.fixture
def all_states(rows):
    """Two events of every state, one of them alone, one of a key."""
    for number, state in enumerate(CLOSED + OPEN):
        for key in (b"zoey", None):
            offset = 2 * number + (key is None)
            rows.park(key, ("users", 0, offset), Failed(), value=b"secret")
            if state != "parked":
                rows.connection.execute(
                    'update sideline.events set state = %s, queue = null where "offset" = %s',
                    (state, offset),
                )
    ages(rows, days=1)
    return rows


def clean_all(rows, keep, bite=1_000):
    total: dict[str, int] = {}
    while True:
        taken = cleaning.step(rows.connection, "login", keep, bite=bite)
        total = cleaning.merged((total, taken))
        if cleaning.is_done(taken, bite=bite):
            return total


CAME_BACK = """
insert into sideline.resolved (
    pipeline, topic, partition, "offset", incarnation, place, queue, operation, why, error,
    fingerprint, handler_version, timestamp_ms, attempts, generation, parked_at, updated_at
)
select 'login', 'users', 0, number, 0, number, 1, 1, 'failed', 'ValueError', 'why', 'v1', 0, 2, 1,
       now(), now() - make_interval(days => number)
from generate_series(29, 32) as numbers (number)
"""


@pytest.mark.parametrize("bite", [1, 1_000])
def test_what_came_back_is_remembered_for_its_time(rows, cli, bite):
    """That it waited and why, not its bytes; then nothing (F13, S6)."""
    rows.park(b"zoey", ("users", 0, 1), Failed(), value=b"secret")
    rows.connection.execute(CAME_BACK)
    rows.commit()
    code, out, _ = cli("parked", "show", "users/0/32", "login")
    assert code == 0
    assert "resolved" in out
    assert "not kept: the event was applied" in out
    code, _, err = cli("release", "login", "--event", "users/0/32", "--execute")
    assert (code, "it is resolved" in err) == (5, True)
    assert cleaning.count(rows.connection, "login", MONTH)["events that came back"] == 3
    assert clean_all(rows, MONTH, bite)["events that came back"] == 3
    found = rows.connection.execute('select "offset" from sideline.resolved').fetchall()
    rows.commit()
    assert found == [(29,)]
    assert states(rows) == {"parked": 1}
    discard = ("--discard-parked", "--reason", "over", "--execute")
    assert cli("forget", "login", *discard)[0] == 0
    assert rows.connection.execute("select count(*) from sideline.resolved").fetchall() == [(0,)]


@pytest.mark.parametrize("bite", [1, 3, 1_000])
def test_only_what_is_over_goes(all_states, bite):
    """Parked, retrying and dead events stay, however old they are; young ones stay (R5, F13)."""
    clean_all(all_states, MONTH, bite)
    assert states(all_states) == dict.fromkeys(CLOSED + OPEN, 2)
    ages(all_states)
    assert cleaning.count(all_states.connection, "login", MONTH)["events"] == 4
    total = clean_all(all_states, MONTH, bite)
    assert (total["events"], total["bytes of discarded events"]) == (4, 2)
    assert states(all_states) == dict.fromkeys(("discarded", *OPEN), 2)
    kept = all_states.connection.execute(
        "select state, value from sideline.events where state = any(%s)", (list(OPEN),)
    ).fetchall()
    assert {bytes(value) for _, value in kept} == {b"secret"}


def test_what_has_a_copy_in_a_topic_stays_until_that_is_purged(all_states):
    """Without the row nobody could take the copy away (R7)."""
    execute = all_states.connection.execute
    execute('update sideline.pipelines set dead_letters = \'{"users": "letters"}\'')
    execute("update sideline.events set copy_topic = 'letters' where \"offset\" = 0")
    execute("update sideline.events set held_in = 'stash' where \"offset\" = 1")
    execute("update sideline.events set copy_topic = 'a retry topic' where \"offset\" = 2")
    ages(all_states)
    assert clean_all(all_states, MONTH)["events"] == 2
    execute("update sideline.events set purged_at = now()")
    all_states.commit()
    assert clean_all(all_states, MONTH)["events"] == 2


def test_a_discarded_event_stays_known_without_its_bytes(all_states):
    """Its offset is what a run that applies the topic again leaves out (R5)."""
    ages(all_states)
    clean_all(all_states, MONTH)
    found = all_states.connection.execute(
        'select "offset", value, traceback, erased_at is not null, message from sideline.events'
        " where state = 'discarded' order by 1"
    ).fetchall()
    assert found == [(n, None, None, True, "cannot spell this") for n in (4, 5)]
    named = {"pipeline": "login", "topic": "users", "partition": 0, "incarnation": 0}
    registry = all_states.connection.execute(
        queries()["registry"], named | {"first": 4, "last": 5}
    ).fetchall()
    assert sorted(registry) == [(4, "discarded"), (5, "discarded")]


def test_an_erased_event_cannot_wait_again(all_states):
    """The schema itself forbids to put it back (F13)."""
    import psycopg

    ages(all_states)
    clean_all(all_states, MONTH)
    with pytest.raises(psycopg.errors.CheckViolation, match="erased_for_good"):
        all_states.connection.execute(
            "update sideline.events set state = 'parked' where state = 'discarded'"
        )


def test_operations_alerts_and_audit(rows):
    """Finished ones go with their items, open ones stay; the audit only where it has an age."""
    rows.partition("login", "users", 0)
    rows.connection.execute(
        "insert into sideline.operations (pipeline, kind, state, selection, actor, items, events,"
        " plan, ended_at) select 'login', 'release', state, '{}', 'me', 3, 3, state,"
        " case when state in ('done', 'cancelled') then now() - interval '31 days' end"
        " from unnest(array['running', 'paused', 'stopped', 'cancelled', 'done']) as state"
    )
    rows.connection.execute(
        "insert into sideline.operation_items (operation, number, topic, home, queue)"
        " select id, n, 'users', 0, n from sideline.operations, generate_series(1, 3) as n"
    )
    rows.connection.execute(
        "insert into sideline.alerts (pipeline, kind, message, cleared_at)"
        " values ('login', 'lag', 'm', now() - interval '31 days'), ('login', 'lag', 'm', now()),"
        " ('login', 'lag', 'm', null)"
    )
    rows.connection.execute(
        "insert into sideline.audit (actor, action, pipeline, at) values"
        " ('me', 'old', 'login', now() - interval '31 days'), ('me', 'new', 'login', now())"
    )
    rows.commit()
    clean_all(rows, Retention(), bite=2)
    assert count(rows, "operations") == 5
    clean_all(rows, Retention(*[timedelta(days=30)] * 3, audit=None), bite=2)
    left = rows.connection.execute("select state from sideline.operations order by 1").fetchall()
    assert left == [("paused",), ("running",), ("stopped",)]
    assert count(rows, "operation_items") == 9
    assert count(rows, "alerts") == 2
    assert count(rows, "audit") == 2
    clean_all(rows, MONTH, bite=1)
    assert rows.connection.execute("select action from sideline.audit").fetchall() == [("new",)]


def count(rows, table):
    return rows.connection.execute(f"select count(*) from sideline.{table}").fetchone()[0]


def test_a_bite_leaves_locked_rows_and_finds_its_rows_by_an_index(all_states, database):
    """No worker waits for cleaning, and cleaning waits for no worker."""
    import psycopg

    ages(all_states)
    with psycopg.connect(database) as other:
        other.execute("select from sideline.events where state = 'resolved' for update")
        taken = cleaning.step(all_states.connection, "login", MONTH)
        assert taken["events"] == 2
    connection = all_states.connection
    connection.execute("set enable_seqscan = off")
    for query in ("clean_events", "clean_discarded"):
        plan = connection.execute(
            "explain " + queries()[query],
            {"pipeline": "login", "age": timedelta(days=1), "limit": 10},
        ).fetchall()
        assert "events_to_clean" in str(plan)


def test_a_run_that_is_long_over_goes_with_everything_of_it(rows):
    """And one that is under way stays."""
    for state in ("done", "running"):
        rows.partition("login", "users", 0)
        ((name,),) = rows.connection.execute(
            "insert into sideline.runs (pipeline, state, alone, bounds, actor, ended_at)"
            " values ('login', %s, true, '[]', 'me', now() - interval '31 days') returning name",
            (state,),
        ).fetchall()
        rows.partition(name, "users", 0)
    rows.commit()
    assert cleaning.count(rows.connection, "login", MONTH)["runs"] == 1
    assert clean_all(rows, MONTH)["runs"] == 1
    left = rows.connection.execute("select name from sideline.pipelines order by 1").fetchall()
    assert [name for (name,) in left] == ["login", name]


# The command


def test_the_plan_changes_nothing(all_states, cli, read):
    """What would go, by pipeline and kind; --execute does it, and the audit says so (S6)."""
    ages(all_states)
    found = read("clean", "--older-than", "30d")
    assert found == {
        "executed": False,
        "pipelines": {
            "login": {
                "events": 4,
                "events that came back": 0,
                "bytes of discarded events": 2,
                "items of operations": 0,
                "operations": 0,
                "alerts": 0,
                "message ids": 0,
                "audit": 0,
                "runs": 0,
            }
        },
    }
    assert sum(states(all_states).values()) == 12
    code, out, err = cli("clean", "login", "--older-than", "30d", "--execute")
    assert code == 0, err
    assert "events\t4" in out
    assert sum(states(all_states).values()) == 8
    ((action, number, reason),) = all_states.connection.execute(
        "select action, count, reason from sideline.audit"
    ).fetchall()
    assert (action, number, reason) == ("clean", 6, "older than 30d")
    _, _, err = cli("clean", "--older-than", "30d", "--execute")
    assert "Nothing is old enough." in err


NO_AGES = ("", "30", "never", "-1d", "30 years", "\x1b[31m1d", "1e9d", "9" * 30 + "d")


def test_an_age_that_is_none_is_refused(rows, cli):
    """One sentence, exit 2, and nothing that a terminal would obey."""
    for age in NO_AGES:
        code, out, err = cli("clean", "--older-than", age)
        assert code == 2, out + err
        assert "\x1b" not in err
        assert "--older-than" in err


def test_an_unknown_pipeline(rows, cli):
    """Exit 4, and where to look."""
    code, _, err = cli("clean", "nobody", "--older-than", "1d", "--json")
    assert code == 4, err


# The driver


def test_the_driver_cleans_its_own_pipeline(rows, desk, topics, monkeypatch):
    """In its housekeeping, bite by bite; other pipelines are none of its business."""
    monkeypatch.setattr(housekeeping, "FIRST_CLEAN_SECONDS", 0.0)
    monkeypatch.setattr(cleaning, "BITE", 2)
    for pipeline in ("keeper", "other"):
        for offset in range(7):
            rows.park(None, ("elsewhere", 0, offset), Failed(), pipeline=pipeline)
    rows.connection.execute("update sideline.events set state = 'resolved'")
    ages(rows)
    one = desk(Pipeline("keeper", topics=topics()), retention=MONTH)

    def left():
        found = rows.connection.execute(
            "select pipeline, count(*) from sideline.events group by 1"
        ).fetchall()
        rows.commit()
        return dict(found)

    wait_for(lambda: left() == {"other": 7}, what="the old events to go")
    assert one.stop() is None


def test_a_role_that_may_not_delete_stops_nothing(rows, desk, topics, monkeypatch):
    """It is a trouble that status shows, not an end."""
    monkeypatch.setattr(housekeeping, "FIRST_CLEAN_SECONDS", 0.0)
    rows.connection.execute(
        "create function no() returns trigger language plpgsql as"
        " $$ begin raise exception 'not allowed' using errcode = '42501'; end $$"
    )
    rows.connection.execute(
        "create trigger no before delete on sideline.events execute function no()"
    )
    rows.park(None, ("elsewhere", 0, 1), Failed(), pipeline="keeper")
    rows.connection.execute("update sideline.events set state = 'resolved'")
    ages(rows)
    one = desk(Pipeline("keeper", topics=topics()), retention=MONTH)
    wait_for(lambda: "cleaning" in one.driver.troubles, what="the trouble")
    assert one.stop() is None
    assert json.dumps(one.driver.troubles["cleaning"])
