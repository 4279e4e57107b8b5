"""`sideline release`: what is shown is what is frozen, by any selection (R1, R4)."""

from __future__ import annotations

import shlex
import threading
from datetime import timedelta

import psycopg
import pytest

from sideline.errors import RefusedError
from sideline.ledger.store import channel
from sideline.masking import mask_database
from tests.support.ledger_rows import BEGIN, Failed

APP = """
from sideline import Pipeline

login = Pipeline("login", topics="users")


@login.handler
def handle(event):
    return None
"""
OTHER = Failed(error="app.Bad", message="no such thing", fingerprint="ffee00112233")


@pytest.fixture
def parked(rows):
    """Five keys aside in two topics, one event without a key; two causes."""
    rows.park(b"zoey", ("users", 2, 1), Failed())
    rows.park(b"zoey", ("users", 2, 3))
    rows.park(b"zoey", ("users", 2, 4))
    rows.park(b"bob", ("users", 1, 7), OTHER)
    rows.park(b"\xff\x00", ("users", 0, 9), Failed())
    rows.park(None, ("users", 0, 10), OTHER)
    rows.park(b"bob", ("orders", 0, 2), Failed(), handler_version="old")
    rows.park(b"kim", ("users", 1, 8), OTHER)
    rows.commit()
    return rows


def frozen(rows) -> list[tuple]:
    """What operations apply to: (operation, topic, home, head or event)."""
    found = rows.connection.execute(
        """
        select operation, items.topic, items.home,
               coalesce(items."offset", (
                   select min("offset") from sideline.events where events.queue = items.queue
               ))
        from sideline.operation_items as items
        order by operation, number
        """
    ).fetchall()
    rows.commit()
    return found


def operations(rows) -> list[tuple]:
    found = rows.connection.execute(
        "select kind, state, items, events, reason, rate, stop_at from sideline.operations"
        " order by id"
    ).fetchall()
    rows.commit()
    return found


SELECTIONS = [
    (("--all",), 6, 8),
    (("--key", "zoey"), 1, 3),
    (("--key", "zoey", "--key", "kim"), 2, 4),
    (("--key-hex", "ff00"), 1, 1),
    (("--key-hex", "0xff00", "--key", "nobody"), 1, 1),
    (("--key", "bob"), 2, 2),
    (("--key", "bob", "--topic", "orders"), 1, 1),
    (("--topic", "orders"), 1, 1),
    (("--cause", "0123456789ab"), 3, 5),
    (("--cause", "0123"), 3, 5),
    (("--cause", "app.Bad"), 3, 3),
    (("--cause", "Bad"), 3, 3),
    (("--cause", "ff", "--topic", "users"), 3, 3),
    (("--event", "users/2/4"), 1, 3),
    (("--event", "users/2/4", "--event", "users/2/1"), 1, 3),
    (("--event", "users/0/10"), 1, 1),
    (("--since", (BEGIN + timedelta(seconds=5)).isoformat()), 4, 4),
    (("--until", (BEGIN + timedelta(seconds=5)).isoformat()), 2, 4),
    (("--all", "--first", "2"), 2, 4),
    (("--cause", "0123", "--first", "1"), 1, 3),
    (("--key", "nobody"), 0, 0),
    (("--since", "1s"), 0, 0),
]


def test_what_is_shown_is_what_is_frozen(parked, read):
    """R4: the plan's numbers, the plan's name, and the items of the operation are one set."""
    for chosen, items, events in SELECTIONS:
        _shown_and_frozen(parked, read, chosen, items, events)
        parked.connection.execute("truncate sideline.operations cascade")
        parked.commit()


def _shown_and_frozen(parked, read, chosen, items, events):
    plan = read("release", "login", *chosen)["plan"]
    assert (plan["items"], plan["events"]) == (items, events), chosen
    assert operations(parked) == []
    if not items:
        assert read("release", "login", *chosen, "--execute")["operations"] == []
        return
    done = read("release", "login", *chosen, "--execute", "--plan", plan["plan"])
    assert done["plan"]["plan"] == plan["plan"]
    assert operations(parked) == [("release", "running", items, plan["failed"], None, None, 0.5)]
    assert len(frozen(parked)) == items


def test_a_plan_in_words(parked, cli):
    """R4: keys, events, oldest, causes, a sample, versions, and the command that does it."""
    code, out, _ = cli("release", "login", "--all")
    assert code == 0
    assert "release login: 5 keys, 1 event without a key, 8 events (6 failed, 2 behind them)" in out
    assert "ValueError at app.py:17 in login" in out
    assert "(cause ffee00112233)" in out
    assert "zoey  users/2/1 and 2 behind it" in out
    assert "failed in version 1a2b3c4d5e6f (5), old (1); ran last: none has run yet" in out
    assert "sideline release login --all --plan " in out
    assert out.rstrip().endswith("--execute")


def test_the_line_of_a_plan_does_what_was_planned(parked, cli, tmp_path, database):
    """R4: typed as it stands it keeps ramp, rate, limit, code and database; only no password."""
    app = tmp_path / "my app.py"
    app.write_text(APP)
    manner = ["--ramp", "--rate", "12.5", "--stop-at", "0.1", "--app", f"{app}:login"]
    chosen = ("release", "--all", *manner, "--database", database, "--reason", "it's fixed")
    line = shlex.split(cli(*chosen)[1].splitlines()[-1])
    masked = mask_database(database)
    assert line[1:-3] == [
        *("release", "login", "--all", *manner, "--database", masked, "--reason", "it's fixed")
    ]
    typed = [database if word == masked else word for word in line]
    code, _, err = cli(*typed[1:], "--no-watch")
    assert code == 0, err
    steps = [("release", state, items, items) for state, items in (("running", 1), ("paused", 5))]
    assert operations(parked) == [(*step, "it's fixed", 12.5, 0.1) for step in steps]


def test_the_code_that_failed_is_warned_about(parked, cli, read):
    """R4: which version failed, which one runs now; releasing to the same is in vain."""
    parked.connection.execute("update sideline.pipelines set handler_version = '1a2b3c4d5e6f'")
    parked.commit()
    assert "5 of them failed in this very version" in cli("release", "login", "--all")[1]
    plan = read("release", "login", "--all")["plan"]
    assert plan["failed_in"] == {"1a2b3c4d5e6f": 5, "old": 1}
    assert (plan["handler_version"], plan["failed_in_this_version"]) == ("1a2b3c4d5e6f", 5)
    parked.connection.execute("update sideline.pipelines set handler_version = 'new'")
    parked.commit()
    assert "this very version" not in cli("release", "login", "--all")[1]


@pytest.mark.parametrize("first", [(), ("--first", "2")])
def test_keys_parked_since_are_new_and_not_swept_in(parked, read, first):
    """R4: a plan is of its moment; what stepped aside later is reported, and stays."""
    chosen = ("release", "login", "--all", *first)
    before = read(*chosen)["plan"]
    parked.at = parked.connection.execute("select now()").fetchone()[0]
    parked.park(b"late", ("users", 2, 90), Failed())
    parked.park(None, ("users", 2, 91), Failed())
    parked.park(b"zoey", ("users", 2, 92))
    parked.commit()
    done = read(*chosen, "--plan", before["plan"], "--execute")
    assert done["plan"]["new"] == 2
    assert len(frozen(parked)) == before["items"] == (2 if first else 6)
    assert {row[3] for row in frozen(parked)}.isdisjoint({90, 91})


CHANGES = {
    "a key rejoined": (
        "delete from sideline.events where key = 'kim'; delete from sideline.keys"
        " where key = 'kim'; delete from sideline.queues where events = 1 and home = 1"
        " and not exists (select from sideline.keys where queue = queues.id)"
    ),
    "an event failed again": (
        "update sideline.events set generation = generation + 1 where key = 'kim'"
    ),
    "an event without a key was given up": (
        "update sideline.events set state = 'discarded' where key is null"
    ),
    "another event of the queue failed": (
        "update sideline.events set why = 'failed', fingerprint = 'x' where \"offset\" = 3"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_stale_plan_is_refused(parked, cli, read, change):
    """R4: the set is not what was shown: exit code 5, and nothing is written."""
    plan = read("release", "login", "--all")["plan"]["plan"]
    for statement in change.split(";"):
        parked.connection.execute(statement)
    parked.commit()
    code, _, err = cli("release", "login", "--all", "--plan", plan, "--execute")
    assert code == 5, err
    assert "has changed since that plan" in err
    assert operations(parked) == frozen(parked) == read("audit")["changes"] == []


def test_a_plan_of_another_choice_is_refused(parked, cli, read):
    """R4: the name of a plan fits its own selection only."""
    plan = read("release", "login", "--key", "zoey")["plan"]["plan"]
    assert cli("release", "login", "--key", "kim", "--plan", plan, "--execute")[0] == 5
    assert (
        cli("discard", "login", "--key", "zoey", "--reason", "x", "--plan", plan, "--execute")[0]
        == 5
    )
    assert operations(parked) == []


def test_what_follows_may_grow(parked, read):
    """R2: followers always go along, so they are not part of the hash."""
    plan = read("release", "login", "--key", "zoey")["plan"]["plan"]
    parked.park(b"zoey", ("users", 2, 5))
    parked.commit()
    done = read("release", "login", "--key", "zoey", "--plan", plan, "--execute")
    assert done["plan"]["events"] == 4


def test_options_are_kept_with_the_operation(parked, read):
    """Rate, stop-at and reason; the audit says who, why and how many (S6)."""
    read(
        *("release", "login", "--all", "--execute", "--rate", "100", "--stop-at", "0.25"),
        *("--reason", "fixed in 4711"),
    )
    assert operations(parked) == [("release", "running", 6, 6, "fixed in 4711", 100, 0.25)]
    (change,) = read("audit", "login")["changes"]
    assert (change["action"], change["count"], change["reason"]) == ("release", 8, "fixed in 4711")
    assert change["subject"]["keys"] == 6
    assert change["subject"]["selection"] == {"all": True}


def test_the_ramp_is_frozen_at_once(parked, read):
    """R4: four operations hold the set together; the first runs, the others wait their turn."""
    for number in range(20):
        parked.park(b"k%d" % number, ("users", 0, 100 + number), Failed())
        parked.park(b"k%d" % number, ("users", 0, 200 + number))
    parked.commit()
    done = read("release", "login", "--all", "--ramp", "--execute", "--no-watch")
    assert len(done["operations"]) == 3
    assert [row[:4] for row in operations(parked)] == [
        ("release", "running", 1, 1),
        ("release", "paused", 10, 10),
        ("release", "paused", 15, 15),
    ]
    assert len({row[1:] for row in frozen(parked)}) == len(frozen(parked)) == 26
    listed = read("ops", "list", "login")["operations"]
    assert [row["total"] for row in listed] == [30, 15, 3]


def test_the_driver_is_woken(parked, cli, database):
    """Whoever listens for released partitions hears of it."""
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute(f"listen {channel('login')}")
        assert cli("release", "login", "--all", "--execute")[0] == 0
        assert [found.channel for found in listener.notifies(timeout=10, stop_after=1)] == [
            channel("login")
        ]


def test_without_a_driver_it_says_so(parked, cli):
    """Nothing happens until the pipeline runs, and how to run it."""
    code, _, err = cli("release", "login", "--key", "zoey", "--execute")
    assert code == 0
    assert "Nothing happens until the pipeline runs" in err
    assert "--replay-only" in err
    assert "sideline ops show 1 --watch" in err


def test_the_pipeline_need_not_be_named_where_one_has_anything(parked, cli, read):
    """One that waits is meant; of two, one has to be named."""
    parked.partition("empty", "other", 0)
    parked.commit()
    assert read("release", "--all")["plan"]["pipeline"] == "login"
    parked.park(b"a", ("other", 0, 1), Failed(), pipeline="empty")
    parked.commit()
    code, _, err = cli("release", "--all")
    assert code == 2
    assert "empty, login" in err


REFUSED = [
    (("login",), 2),
    ((), 2),
    (("login", "--first", "3"), 2),
    (("login", "--all", "--key", "a"), 2),
    (("login", "--all", "--first", "0"), 2),
    (("login", "--all", "--first", "-1"), 2),
    (("login", "--all", "--first", "9223372036854775808"), 2),
    (("login", "--all", "--rate", "0"), 2),
    (("login", "--all", "--rate", "nan"), 2),
    (("login", "--all", "--rate", "inf"), 2),
    (("login", "--all", "--stop-at", "0"), 2),
    (("login", "--all", "--stop-at", "1.01"), 2),
    (("login", "--all", "--stop-at", "nan"), 2),
    (("login", "--key-hex", "xyz"), 2),
    (("login", "--event", "users/2"), 2),
    (("login", "--event", "users/2/1", "--key", "a"), 2),
    (("login", "--since", "yesterday"), 2),
    (("login", "--until", "2026-01-31"), 2),
    (("login", "--cause", ""), 2),
    (("login", "--topic", ""), 2),
    (("login", "--all", "--reason", " \n "), 2),
    (("login", "--all", "--plan", "x", "--execute"), 2),
    (("login", "--all", "--plan", "12-0123456789abcdef"), 2),
    (("login", "--all", "--ramp", "--first", "3"), 2),
    (("login", "--all", "--trial"), 2),
    (("login", "--all", "--trial", "--app", "a:b", "--execute"), 2),
    (("login", "--all", "--app", "nowhere.py:users"), 4),
    (("nobody", "--all"), 4),
    (("login", "--cause", "KeyError"), 4),
    (("login", "--event", "users/2/99"), 4),
    (("login", "--all", "--plan", "12-0123456789abcdef", "--execute"), 5),
]


def test_nonsense_is_refused(parked, cli):
    """One sentence and a documented exit code; nothing is written."""
    for arguments, code in REFUSED:
        found, _, err = cli("release", *arguments)
        assert found == code, (arguments, err)
        assert err.startswith("sideline: ")
        assert "Traceback" not in err
    assert operations(parked) == []


def test_a_beginning_of_two_causes_is_refused(parked, cli):
    """A fingerprint may be shortened as long as it means one cause."""
    parked.park(b"x", ("users", 0, 50), Failed(fingerprint="01ff"))
    parked.commit()
    assert cli("release", "login", "--cause", "01")[0] == 2
    assert cli("release", "login", "--cause", "01f")[0] == 0


def test_keys_of_strangers_are_harmless(rows, cli, read):
    """Bytes that a terminal would obey are spelled out, in plans and commands."""
    evil = b"\x1b[2J'; drop table users; --"
    rows.park(evil, ("users", 0, 1), Failed(message="\x1b]0;owned\x07"))
    rows.commit()
    for arguments in (("--all",), ("--key-hex", evil.hex())):
        code, out, _ = cli("release", "login", *arguments)
        assert code == 0
        assert "\x1b" not in out
        assert "\x07" not in out
    done = read("release", "login", "--key-hex", evil.hex(), "--execute")
    assert done["plan"]["items"] == 1
    assert "\x1b" not in cli("ops", "show", "1")[1]


def test_an_event_that_no_longer_waits_is_refused(parked, cli):
    """What was resolved meanwhile is not released again."""
    parked.connection.execute(
        "update sideline.events set state = 'resolved', queue = null where \"offset\" = 4"
    )
    parked.commit()
    code, _, err = cli("release", "login", "--event", "users/2/4", "--execute")
    assert code == 5
    assert "it is resolved" in err


def test_two_people_with_one_plan_do_it_once(parked, read, database):
    """R4: the same plan at the same moment, from two places: one operation."""
    import psycopg as pg

    from sideline import operations as library
    from sideline.selections import PlanName, Selection

    wanted = PlanName.parse(read("release", "login", "--all")["plan"]["plan"])
    ready, ended = threading.Barrier(2, timeout=60), []

    def act(who: str) -> None:
        with pg.connect(database) as connection:
            connection.isolation_level = pg.IsolationLevel.REPEATABLE_READ
            plan = library.plan(connection, Selection("release", "login"), name=wanted)
            ready.wait()
            try:
                ended.append(library.execute(connection, plan, actor=who, wanted=wanted))
            except RefusedError as error:
                ended.append(error.message)

    people = [threading.Thread(target=act, args=(who,)) for who in ("zoey", "bob")]
    for one in people:
        one.start()
    for one in people:
        one.join(60)
    assert sorted(map(type, ended), key=str) == [list, str]
    assert len(operations(parked)) == 1
    assert len(read("audit")["changes"]) == 1


def test_a_second_release_of_the_same_is_refused_while_the_first_runs(parked, cli, read):
    """Whoever comes later learns which operation does it; after it was cancelled it goes."""
    plan = read("release", "login", "--all")["plan"]["plan"]
    again = ("release", "login", "--all", "--plan", plan, "--execute")
    assert cli(*again)[0] == 0
    code, _, err = cli(*again)
    assert (code, "operation 1 carries out plan" in err) == (5, True)
    assert cli("ops", "cancel", "1")[0] == 0
    assert cli(*again)[0] == 0


def test_a_pipeline_that_was_forgotten_has_no_plan(parked, cli, read):
    """A plan over what is gone: exit code 4, nothing is written."""
    plan = read("release", "login", "--all")["plan"]["plan"]
    for table in ("events", "keys", "queues", "causes", "progress"):
        parked.connection.execute(f"delete from sideline.{table}")
    parked.connection.execute("delete from sideline.pipelines")
    parked.commit()
    assert cli("release", "login", "--all", "--plan", plan, "--execute")[0] == 4
    assert operations(parked) == []


def test_a_database_without_a_ledger(cli):
    """Nothing ever ran there."""
    assert cli("release", "--all")[0] == 4
    assert cli("release", "login", "--all")[0] == 4
