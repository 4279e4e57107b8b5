"""`sideline discard`, `restore`, `ops` and `release --trial`: the people's side (R4, R6, S6)."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psycopg
import pytest

from tests.support.ledger_rows import Failed
from tests.support.waiting import wait_for

OTHER = Failed(error="app.Bad", message="no such thing", fingerprint="ffee00112233")
WHY = ("--reason", "the customer is gone")


@pytest.fixture
def parked(rows):
    """Two keys aside with followers, and an event without a key."""
    rows.park(b"zoey", ("users", 2, 1), Failed())
    rows.park(b"zoey", ("users", 2, 3))
    rows.park(b"bob", ("users", 1, 7), OTHER)
    rows.park(b"bob", ("users", 1, 8))
    rows.park(None, ("users", 0, 10), OTHER)
    rows.commit()
    return rows


def frozen(rows) -> list[tuple]:
    found = rows.connection.execute(
        'select topic, home, queue is null, partition, "offset" from sideline.operation_items'
        " order by operation, number"
    ).fetchall()
    rows.commit()
    return found


def give_up(rows, *offsets: int) -> None:
    """As the owner of the partition does it."""
    rows.connection.execute(
        "update sideline.events set state = 'discarded', former = 'parked', former_queue = queue,"
        ' queue = null, updated_at = now() where "offset" = any(%s)',
        (list(offsets),),
    )
    rows.commit()


CHOSEN = [
    (("--all",), {1, 7, 10}),
    (("--key", "zoey"), {1}),
    (("--key", "zoey", "--followers"), {1, 3}),
    (("--cause", "ffee"), {7, 10}),
    (("--all", "--followers"), {1, 3, 7, 8, 10}),
    (("--all", "--first", "1"), {1}),
    (("--event", "users/2/3"), {3}),
    (("--event", "users/2/3", "--event", "users/1/7"), {3, 7}),
    (("--key", "nobody"), set()),
]


def test_a_discard_is_of_events(parked, read):
    """R6: those that failed, what follows too if asked for, and any event by its id."""
    for chosen, offsets in CHOSEN:
        plan = read("discard", "login", *chosen, *WHY)["plan"]
        assert (plan["items"], plan["events"]) == (len(offsets), len(offsets)), chosen
        read("discard", "login", *chosen, *WHY, "--plan", plan["plan"], "--execute")
        assert {row[4] for row in frozen(parked)} == offsets
        assert all(row[2] and row[1] == row[3] for row in frozen(parked))
        parked.connection.execute("truncate sideline.operations cascade")
        parked.commit()
    changes = read("audit", "login", "--action", "discard")["changes"]
    assert {change["reason"] for change in changes} == {"the customer is gone"}
    assert {change["count"] for change in changes} == {1, 2, 3, 5}


def test_a_reason_is_needed(parked, cli):
    """R6, S6: nobody gives up on an event without saying why."""
    for command in ("discard", "restore"):
        assert cli(command, "login", "--all", "--execute")[0] == 2
        assert cli(command, "login", "--all", "--reason", " ", "--execute")[0] == 2
    assert frozen(parked) == []


def test_a_discard_in_words(parked, cli):
    """What it means, and the command with its reason."""
    _, out, _ = cli("discard", "login", "--key", "zoey", *WHY)
    assert "discard login: 1 key, 1 event (1 failed)" in out
    assert "Nobody handles them any more" in out
    assert "--reason 'the customer is gone' --plan" in out


def test_a_restore_is_of_what_was_given_up(parked, read, cli):
    """R6: by the same selections, among discarded events; those that come too late are named."""
    give_up(parked, 1, 7, 10)
    for chosen, offsets in (
        (("--all",), {1, 7, 10}),
        (("--key", "zoey"), {1}),
        (("--cause", "app.Bad"), {7, 10}),
        (("--event", "users/1/7"), {7}),
        (("--since", "1h"), {1, 7, 10}),
        (("--until", "1h"), set()),
        (("--all", "--first", "2"), {1, 7}),
    ):
        plan = read("restore", "login", *chosen, *WHY)["plan"]
        assert (plan["items"], plan["late"]) == (len(offsets), 0), chosen
        read("restore", "login", *chosen, *WHY, "--plan", plan["plan"], "--execute")
        assert {row[4] for row in frozen(parked)} == offsets
        parked.connection.execute("truncate sideline.operations cascade")
        parked.commit()
    # Zoey's queue has come further, Bob's is gone.
    parked.connection.execute("update sideline.queues set passed = 1000 where home = 2")
    parked.connection.execute("delete from sideline.events where key = 'bob' and state = 'parked'")
    parked.connection.execute("delete from sideline.keys where key = 'bob'")
    parked.connection.execute("delete from sideline.queues where home = 1")
    parked.commit()
    plan = read("restore", "login", "--all", *WHY)["plan"]
    assert (plan["items"], plan["late"]) == (1, 2)
    assert "2 events cannot be put back" in cli("restore", "login", "--all", *WHY)[1]
    code, _, err = cli("restore", "login", "--key", "bob", *WHY, "--execute")
    assert code == 5
    assert "have rejoined" in err


def test_dead_events_are_chosen_apart(parked, read, cli):
    """F7: --dead means those in the dead-letter topic, each by itself, and nothing parked."""
    parked.connection.execute(
        "update sideline.events set state = 'dead', queue = null where \"offset\" in (8, 10)"
    )
    parked.commit()
    for command, more in (("release", ()), ("discard", WHY)):
        plan = read(command, "login", "--all", "--dead", *more)["plan"]
        assert (plan["items"], plan["events"], plan["keys"], plan["alone"]) == (2, 2, 0, 2)
        assert read(command, "login", "--key", "bob", "--dead", *more)["plan"]["items"] == 1
        assert read(command, "login", "--cause", "Bad", "--dead", *more)["plan"]["items"] == 1
    assert "release login: 2 dead events\n" in cli("release", "login", "--all", "--dead")[1]
    assert read("release", "login", "--all", "--dead", "--first", "1")["plan"]["events"] == 1
    read("release", "login", "--all", "--dead", "--execute")
    assert [row[4] for row in frozen(parked)] == [8, 10]


def test_dead_events_are_listed_and_exported(parked, read, cli):
    """F7: in pages, by key, cause and topic like parked ones, and never among them."""
    parked.connection.execute(
        "update sideline.events set state = 'dead', queue = null where \"offset\" in (8, 10)"
    )
    parked.commit()

    def listed(*more: str) -> list[str]:
        return [one["id"] for one in read("parked", "list", "login", "--dead", *more)["events"]]

    (first, second) = listed()
    assert (first[-2:], second[-3:]) == ("/8", "/10")
    assert not {first, second} & {one["id"] for one in read("parked", "list", "login")["events"]}
    page = read("parked", "list", "login", "--dead", "--limit", "1")
    assert listed("--after", page["next"]) == [second]
    assert cli("parked", "list", "login", "--after", page["next"])[0] == 2
    assert listed("--key", "bob") == [first]
    assert listed("--cause", "Bad") == [second]
    assert listed("--topic", "nothing") == []
    assert "is dead." in cli("parked", "list", "login", "--dead", "--topic", "nothing")[2]
    lines = cli("parked", "export", "login", "--dead", "--key", "bob")[1].splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [8]
    assert len(cli("parked", "export", "login", "--dead")[1].splitlines()) == 2


def test_an_event_that_does_not_wait_cannot_be_given_up(parked, cli):
    """Known or not, the answer says which."""
    give_up(parked, 1)
    assert cli("discard", "login", "--event", "users/2/1", *WHY, "--execute")[0] == 5
    assert cli("discard", "login", "--event", "users/2/99", *WHY, "--execute")[0] == 4


def test_operations_in_pages(parked, read, cli):
    """The newest first, page after page; one by its number with all it knows."""
    for key in ("zoey", "bob", "zoey"):
        read("release", "login", "--key", key, "--execute", *WHY)
        parked.connection.execute("update sideline.operations set state = 'done'")
        parked.commit()
    first = read("ops", "list", "--limit", "2")
    rest = read("ops", "list", "login", "--limit", "2", "--after", str(first["next"]))
    assert [row["id"] for row in (*first["operations"], *rest["operations"])] == [3, 2, 1]
    assert rest["next"] is None
    assert read("ops", "list", "--open")["operations"] == []
    shown = read("ops", "show", "2")
    assert shown["selection"]["keys"] == [{"text": "bob"}]
    assert shown["item_states"] == {"waiting": 1, "done": 0, "failed": 0, "gone": 0}
    code, out, _ = cli("ops", "show", "2")
    assert (code, "key" in out, "1 wait" in out) == (0, True, True)
    assert cli("ops", "list")[1].count("\n") == 4
    assert cli("ops", "list", "nobody")[0] == 4
    assert cli("ops", "show", "99")[0] == 4
    for nonsense in ("0", "x", "-1", "9223372036854775808"):
        assert cli("ops", "show", nonsense)[0] == 2


def test_a_hand_on_an_operation(parked, read, cli):
    """Pause, resume, cancel: what does not fit its state is refused; each change audited (S6)."""
    read("release", "login", "--all", "--execute")
    assert read("ops", "pause", "1", "--reason", "lunch")["state"] == "paused"
    assert "lunch" in read("ops", "show", "1")["note"]
    assert read("ops", "pause", "1")["state"] == "paused"
    assert read("ops", "resume", "1")["note"] is None
    parked.connection.execute("update sideline.operations set state = 'stopped'")
    parked.commit()
    assert read("ops", "resume", "1")["state"] == "running"
    ended = read("ops", "cancel", "1")
    assert (ended["state"], ended["ended_at"] is None) == ("cancelled", False)
    for verb in ("pause", "resume"):
        code, _, err = cli("ops", verb, "1")
        assert (code, "is cancelled" in err) == (5, True)
    assert cli("ops", "cancel", "7")[0] == 4
    actions = [change["action"] for change in read("audit", "login")["changes"]]
    assert actions == ["ops cancel", "ops resume", "ops resume", "ops pause", "release"]


def test_a_stopped_operation_whose_plan_goes_on_elsewhere_stays_stopped(parked, read, cli):
    """R4: the same set is under way once; exit 5 with the number of the other one."""
    plan = read("release", "login", "--all")["plan"]["plan"]
    again = ("release", "login", "--all", "--plan", plan, "--execute")
    read(*again)
    parked.connection.execute("update sideline.operations set state = 'stopped'")
    parked.commit()
    read(*again)
    code, _, err = cli("ops", "resume", "1")
    assert code == 5, err
    assert "operation 2 carries out plan" in err
    assert read("ops", "show", "1")["state"] == "stopped"
    read("ops", "cancel", "2")
    assert read("ops", "resume", "1")["state"] == "running"


def test_watching_ends_with_the_operation(parked, cli, read, database):
    """Exit 0 if all is done, 7 if some failed again, was stopped or cancelled."""

    def finish(state: str, failed: int) -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            wait_for(
                lambda: connection.execute(
                    "select 1 from pg_stat_activity where application_name = 'sideline watch'"
                    " and datname = current_database()"
                    " and exists (select from sideline.operations where state = 'running')"
                ).fetchone(),
                what="somebody who watches",
            )
            connection.execute(
                "insert into sideline.operation_counts (operation, topic, partition, applied,"
                " failed) select max(id), 'users', 2, 2, %s from sideline.operations",
                (failed,),
            )
            connection.execute(
                "update sideline.operations set state = %s where state = 'running'", (state,)
            )

    for state, failed, code in (("done", 0, 0), ("done", 1, 7), ("stopped", 1, 7)):
        other = threading.Thread(target=finish, args=(state, failed))
        other.start()
        found, _, err = cli("release", "login", "--key", "zoey", "--execute", "--watch")
        other.join()
        assert found == code, err
        assert "2 applied" in err
        assert cli("ops", "show", "1", "--watch")[0] == 0


@pytest.fixture
def app(tmp_path):
    """A handler that cannot do one name, and none that begins with x."""
    path = tmp_path / "app.py"
    path.write_text(
        """
import os

import psycopg

from sideline import Execute, Pipeline, Recoverable, Upsert

login = Pipeline("login", topics="users")


@login.handler
def handle(event):
    name = event.text()
    if name == "bad":
        raise ValueError("cannot spell this")
    if name == "live":
        with psycopg.connect(os.environ["SIDELINE_DATABASE"], autocommit=True) as other:
            other.execute("update people set name = 'Bob' where id = 'a'")
    if name == "later":
        raise Recoverable("the world is down")
    if name == "nothing":
        return None
    if name == "commit":
        return Execute("insert into people values ('kept', 'kept'); commit")
    return Upsert("people", {"id": event.key.decode(), "name": name}, key="id")
"""
    )
    return f"{path}:login"


@pytest.fixture
def people(rows):
    """A table whose names are short, and a ledger."""
    rows.connection.execute(
        "create table people (id text primary key, name varchar(5) not null check (name <> 'no'))"
    )
    rows.commit()

    def names() -> list[tuple]:
        found = rows.connection.execute("select id, name from people order by id").fetchall()
        rows.commit()
        return found

    return names


def test_a_trial_says_what_would_happen_and_changes_nothing(rows, people, read, cli, app):
    """R4: in order per key, each on top of the one before; what follows a failure is not tried."""
    rows.park(b"a", ("users", 0, 1), Failed(), value=b"Zoey")
    rows.park(b"a", ("users", 0, 2), value=b"Zoiee")
    rows.park(b"b", ("users", 0, 3), Failed(), value=b"bad")
    rows.park(b"b", ("users", 0, 4), value=b"good")
    rows.park(b"c", ("users", 1, 5), Failed(), value=b"no")
    rows.park(b"d", ("users", 1, 6), Failed(), value=b"much too long")
    rows.park(b"e", ("users", 1, 7), Failed(), value=b"later")
    rows.park(None, ("users", 1, 8), OTHER, value=b"nothing")
    rows.commit()
    code, out, err = cli("release", "login", "--all", "--trial", "--app", app, "--json")
    assert code == 7, err
    trial = json.loads(out)["trial"]
    assert people() == []
    assert {name: trial[name] for name in ("tried", "applied", "filtered", "failed")} == {
        "tried": 7,
        "applied": 2,
        "filtered": 1,
        "failed": 4,
    }
    assert (trial["behind"], trial["elsewhere"]) == (1, 0)
    assert {
        one["id"]: (one["error"].rpartition(".")[2], one["fate"]) for one in trial["mishaps"]
    } == {
        "users/0/3": ("ValueError", "parked"),
        "users/1/5": ("CheckViolation", "parked"),
        "users/1/6": ("StringDataRightTruncation", "parked"),
        "users/1/7": ("Recoverable", "waits"),
    }
    assert frozen(rows) == read("audit")["changes"] == []
    code, out, _ = cli("release", "--key", "a", "--trial", "--app", app)
    assert code == 0
    assert "would be applied 2, would fail 0" in out
    assert people() == []
    assert cli("release", "--all", "--trial", "--app", app, "--most", "1")[0] == 0


def test_a_trial_of_dead_events_asks_the_guardrail(rows, people, cli, app):
    """F9: what would overwrite a newer row is not said to be applied; it would stop the run."""
    rows.park(b"a", ("users", 0, 1), Failed(), value=b"Zoey")
    rows.commit()
    rows.connection.execute("update sideline.events set state = 'dead', queue = null")
    rows.commit()
    code, out, err = cli("release", "--all", "--dead", "--trial", "--app", app, "--json")
    assert code == 7, err
    trial = json.loads(out)["trial"]
    assert (trial["applied"], trial["failed"]) == (0, 1)
    (mishap,) = trial["mishaps"]
    assert (mishap["fate"], "updates table people" in mishap["message"]) == ("stops", True)
    assert people() == []


@pytest.mark.parametrize(("options", "tried", "behind"), [("", 2, 1), (", independent=True", 3, 0)])
def test_a_trial_of_dead_events_keeps_their_order(rows, people, cli, app, options, tried, behind):
    """R4, C1: like a release, it takes a key's dead events in order and none behind a failure."""
    path = Path(app.rpartition(":")[0])
    path.write_text(path.read_text().replace('topics="users"', f'topics="users"{options}'))
    rows.park(b"a", ("users", 0, 1), Failed(), value=b"bad")
    rows.park(b"b", ("users", 0, 2), Failed(), value=b"nothing")
    rows.park(b"a", ("users", 0, 3), Failed(), value=b"nothing")
    rows.commit()
    # When they died says nothing about their order.
    rows.connection.execute(
        "update sideline.events set state = 'dead', queue = null,"
        " updated_at = updated_at - \"offset\" * interval '1 hour'"
    )
    rows.commit()
    code, out, err = cli("release", "--all", "--dead", "--trial", "--app", app, "--json")
    assert code == 7, err
    trial = json.loads(out)["trial"]
    assert (trial["tried"], trial["behind"]) == (tried, behind)
    assert [one["id"] for one in trial["mishaps"]] == ["users/0/1"]


def test_a_live_write_is_no_mishap_of_a_trial(rows, people, cli, app):
    """R4: a row that the running pipeline changes meanwhile is written like any other."""
    rows.connection.execute("insert into people values ('a', 'Zoey')")
    rows.park(b"a", ("users", 0, 1), Failed(), value=b"live")
    rows.commit()
    code, out, err = cli("release", "--all", "--trial", "--app", app)
    assert code == 0, out + err
    assert people() == [("a", "Bob")]


def test_a_trial_that_could_not_be_taken_back_is_refused(rows, people, cli, app):
    """A handler whose SQL commits is found out at once, before the next event."""
    rows.park(b"a", ("users", 0, 1), Failed(), value=b"commit")
    rows.park(b"b", ("users", 0, 2), Failed(), value=b"Zoey")
    rows.commit()
    code, _, err = cli("release", "--all", "--trial", "--app", app)
    assert code == 5
    assert "ended the trial's transaction" in err
    assert people() == [("kept", "kept")]


def test_a_pipeline_that_calls_is_not_tried(rows, cli, tmp_path):
    """What a handler does elsewhere cannot be taken back."""
    (tmp_path / "calls.py").write_text(
        """
from sideline import Calls, Pipeline

login = Pipeline("login", topics="users", sink=Calls(), delivery="at-least-once")


@login.handler
def handle(event):
    raise SystemExit("it was called")
"""
    )
    rows.park(b"a", ("users", 0, 1), Failed())
    rows.commit()
    code, _, err = cli("release", "--all", "--trial", "--app", f"{tmp_path}/calls.py:login")
    assert code == 5
    assert "acts on the outside world" in err


def test_the_plan_knows_the_code_that_would_get_them(rows, people, read, cli, app):
    """With --app the version is that of today's code, whatever ran last."""
    from sideline import loading

    rows.park(b"a", ("users", 0, 1), Failed(), handler_version=loading.load(app).version)
    rows.commit()
    assert "this very version" in cli("release", "--all", "--app", app)[1]
    assert cli("release", "orders", "--all", "--app", app)[0] == 2


def test_an_event_tells_what_was_done_to_it(parked, read, cli):
    """S6: which operations it was in, by whom and why; status shows what is under way."""
    read("release", "login", "--key", "zoey", "--execute", "--reason", "fixed")
    read("discard", "login", "--event", "users/2/1", *WHY, "--execute")
    for event, kinds in (("users/2/1", ["discard", "release"]), ("users/2/3", ["release"])):
        shown = read("parked", "show", event)
        assert [one["kind"] for one in shown["operations"]] == kinds
    assert read("parked", "show", "users/1/7")["operations"] == []
    _, out, _ = cli("parked", "show", "users/2/1")
    assert "its turn has not come; operation 2, running" in out
    assert "the customer is gone" in out
    status = read("status", "login")
    assert [(one["id"], one["state"], one["total"]) for one in status["operations"]] == [
        (2, "running", 1),
        (1, "running", 2),
    ]
    assert "sideline ops show 1" in cli("status")[2]
