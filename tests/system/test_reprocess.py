"""`sideline reprocess`: the plan, who stands in its way, and the whole way on Spark."""

from __future__ import annotations

import os
import signal
import threading
from datetime import UTC, datetime

import pytest

from sideline import loading
from sideline.ledger.connection import connect
from sideline.ledger.place import LOCK_SPACE, Place
from tests.support.pipelines import applied as applied_rows
from tests.support.pipelines import execute, faults, progress, publish, query
from tests.support.waiting import wait_for

APP = """
import time

from sideline import Calls, Delete, Event, Execute, Insert, Pipeline, Upsert

GUARDED = Upsert("people", {{"id": "", "name": "", "version": 0}}, key="id", version="version")
flow = Pipeline("again", topics={topic!r}{options})


@flow.handler
def record(event: Event):
    {before}
    row = {{"id": event.key.decode(), "name": event.text(), "version": event.offset}}
    return Upsert("people", row, key="id"{more})
"""
INSERTS = """
import os
import time

from sideline import Event, Insert, Pipeline

flow = Pipeline("again", topics={topic!r}, slice_size=2)


@flow.handler
def record(event: Event):
    {before}
    row = {{"topic": event.topic, "partition": event.partition, "number": event.offset}}
    return Insert("applied", row | {{"key": event.key.decode(), "value": event.text()}})
"""
PEOPLE = "create table people (id text primary key, name text, version bigint)"


@pytest.fixture
def app(tmp_path, ready, database, topics, kafka, monkeypatch):
    """Write a pipeline as a user would; 40 events of 4 keys in 2 partitions wait for it."""
    execute(database, PEOPLE)
    monkeypatch.setenv("SIDELINE_KAFKA", kafka)
    topic = topics(partitions=2)
    places = []
    for half in (0, 1):
        events = [(f"k{n % 4}", f"name {n}") for n in range(half, 40, 2)]
        places += publish(kafka, topic, events, partition=half)
    listen = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def write(*, before="pass", options="", more="", text=APP):
        file = tmp_path / "app.py"
        given = {"topic": topic, "before": before, "more": more}
        file.write_text(text.format(**given, options=f", {options}" if options else ""))
        return f"{file}:flow"

    write.topic, write.places = topic, places
    yield write
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), listen, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def passed(app, database):
    """The pipeline has passed everything, as far as its ledger says: no Spark is needed."""
    from sideline.ledger import schema
    from sideline.topics.admin import Cluster

    def write(**options):
        target = app(**options)
        cluster = Cluster({"bootstrap.servers": os.environ["SIDELINE_KAFKA"]})
        info = cluster.topic(app.topic)
        with connect(database, role="test") as connection:
            schema.ensure(connection)
        place = Place(database, loading.load(target))
        place.hold()
        counts = {n: sum(spot[1] == n for spot in app.places) for n in info.partitions}
        for number in info.partitions:
            place.add(app.topic, number, info.id, counts[number])
        place.leave("stopped")
        return target

    return write


PREPARED = {
    "options": "prepare=lambda df: df.selectExpr('*', 'length(value) as size')",
    "before": "assert event.row['size'] == len(event.value)",
}


@pytest.mark.parametrize("options", [{}, PREPARED], ids=["plain", "prepared"])
def test_the_whole_way(app, finish, cli, read, database, options):
    """Planned, executed, written down; the pipeline goes on as if nothing had been (C6, R5, S6)."""
    target = app(**options)
    assert finish(loading.load(target))["applied"] == 40
    before = progress(database, "again")
    execute(database, "update people set name = 'broken'", "delete from people where id = 'k3'")
    plan = read("reprocess", target, "--from", "earliest")
    assert (plan["offsets"], plan["mode"], plan["executed"]) == (40, "alone", False)
    assert plan["left_out"] == {"damaged": 0, "waiting": 0}
    assert query(database, "select count(*) from sideline.runs") == [(0,)]
    code, _, err = cli(
        "reprocess", target, "--from", "earliest", "--reason", "names broke", "--execute"
    )
    assert code == 0, err
    assert "would be applied again" in err
    people = query(database, "select id, name from people order by id")
    assert people == [(f"k{n}", f"name {36 + n}") for n in range(4)]
    assert progress(database, "again") == before
    ((run, state),) = query(database, "select name, state from sideline.runs")
    assert (state, f"Run {run} is done: 40 consumed, 40 applied." in err) == ("done", True)
    actions = query(database, "select action, pipeline, count, reason from sideline.audit")
    assert actions == [
        ("reprocess", "again", 40, "names broke"),
        ("reprocess done", "again", 40, None),
    ]
    assert query(database, "select count(*) from sideline.progress where held_for > 0") == [(0,)]
    assert [one["name"] for one in read("status")] == ["again"]
    shown = read("status", run)
    assert (shown["run_of"], shown["run_state"], shown["applied"]) == ("again", "done", 40)
    assert shown["lag"] == 0
    assert cli("status", "--check")[0] == 0
    assert cli("reprocess", target, "--resume")[0] == 4
    assert cli("reprocess", target, "--cancel")[0] == 4


def test_stopped_and_killed_it_goes_on_exactly(app, finish, cli, command, database, tmp_path):
    """SIGINT ends it with exit 7, SIGKILL without a word; in the end each event once (C6, R5)."""
    # Whoever is stopped or killed is far from the end by then.
    slow = tmp_path / "slow"
    target = app(text=INSERTS, before=f"time.sleep(0.4 * os.path.exists({str(slow)!r}))")
    finish(loading.load(target))
    execute(database, "truncate applied")
    slow.touch()
    again = ("reprocess", target, "--repeat-effects")

    def stop():
        wait_for(lambda: applied_rows(database), what="the first effects", within_seconds=120)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    code, _, err = cli(*again, "--from", "earliest", "--execute")
    stopper.join()
    assert code == 7, err
    assert "--resume" in err
    done = len(applied_rows(database))
    assert 0 < done < 40
    # One run at a time; and the pipeline itself waits for it.
    assert cli(*again, "--from", "earliest")[0] == 5
    killed = command("reprocess", target, "--resume")
    wait_for(lambda: len(applied_rows(database)) > done, what="more effects", within_seconds=120)
    killed.kill()
    assert len(applied_rows(database)) < 40
    slow.unlink()
    code, _, err = cli("reprocess", target, "--resume")
    assert code == 0, err
    assert faults(applied_rows(database), app.places) == []
    assert cli("status", "--check")[0] == 0


def test_a_range_by_time_and_by_offsets(passed, app, kafka, read):
    """Offsets mean the partitions they name; it ends where the pipeline stands (C6, C5)."""
    target = passed()
    plan = read("reprocess", target, "--from", "0:3", "--to", "0:7,1:2", "--leave-old-states")
    ranges = [(part["partition"], part["from"], part["to"]) for part in plan["ranges"]]
    assert ranges == [(0, 3, 7), (1, 20, 20)]
    # What came since belongs to the pipeline.
    publish(kafka, app.topic, [("k0", "newer")], partition=0)
    late = read("reprocess", target, "--from", "earliest", "--to", "latest")
    assert late["offsets"] == 40
    part = read("reprocess", target, "--from", "earliest", "--to", "0:7", "--leave-old-states")
    assert part["offsets"] == 7
    ahead = read("reprocess", target, "--from", "0:0", "--to", "0:21")
    assert (ahead["offsets"], ahead["cut_at_progress"]) == (20, True)
    now = datetime.now(UTC).isoformat()
    assert read("reprocess", target, "--from", now)["offsets"] == 0
    assert read("reprocess", target, "--from", "2001-01-01T00:00:00Z", "--to", now)["offsets"] == 40


def test_a_range_that_would_leave_rows_in_the_past_needs_a_word(passed, cli, read):
    """k0 has events before and after --to: exit 5, unless order does not matter (C1, R5)."""
    target = passed()
    early = ("--from", "earliest", "--to", "0:7")
    code, _, err = cli("reprocess", target, *early, "--execute")
    assert code == 5, err
    assert "would stay in an old state for good" in err
    assert "--leave-old-states" in err
    assert read("reprocess", target, *early, "--leave-old-states")["leaves_old_states"]
    words = cli("reprocess", target, *early, "--leave-old-states", "--skip-failures")[2]
    assert "stay in an old state" in words
    assert "where the last event of its key fails" in words
    # Nothing is left behind by a range without events, nor by one that goes to the end.
    assert read("reprocess", target, "--from", "0:7", "--to", "0:7")["offsets"] == 0
    assert not read("reprocess", target, "--from", "0:7")["leaves_old_states"]
    for order_free in ("effects=[GUARDED]", "independent=True"):
        other = passed_again(target, options=order_free, more=', version="version"')
        assert not read("reprocess", other, *early)["leaves_old_states"]


def test_nothing_to_do_is_done_at_once(passed, cli, database):
    """An empty range begins no run, and no Spark."""
    target = passed()
    code, _, err = cli("reprocess", target, "--from", datetime.now(UTC).isoformat(), "--execute")
    assert code == 0, err
    assert "nothing to apply again" in err
    assert query(database, "select count(*) from sideline.runs") == [(0,)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("effects=[Upsert, Insert]", "Insert"),
        ("effects=[Execute]", "Execute"),
        ("sink=Calls()", "calls of the handler"),
    ],
)
def test_what_happens_twice_needs_a_word(passed, cli, read, options, what):
    """Exit 5 with what it is; --repeat-effects says that it is wanted (R5)."""
    target = passed(options=options)
    code, _, err = cli("reprocess", target, "--from", "earliest", "--execute")
    assert code == 5, err
    assert what in err
    assert "--repeat-effects" in err
    plan = read("reprocess", target, "--from", "earliest", "--repeat-effects")
    assert plan["happens_again"] == [what]


def test_a_running_pipeline(passed, cli, read, database):
    """Refused with both ways out; paused, or guarded by version, it may be done (C1, F10)."""
    target = passed()
    with connect(database, role="test") as driver:
        driver.execute("select pg_advisory_lock(%s, hashtext('again'))", (LOCK_SPACE,))
        driver.commit()
        code, _, err = cli("reprocess", target, "--from", "earliest")
        assert code == 5, err
        assert "sideline pause again" in err
        assert "version=" in err
        assert cli("pause", "again")[0] == 0
        assert read("reprocess", target, "--from", "earliest")["mode"] == "alone"
        assert cli("resume", "again")[0] == 0
        guarded = passed_again(target, options="effects=[GUARDED]", more=', version="version"')
        assert read("reprocess", guarded, "--from", "earliest")["mode"] == "beside"
        deletes = passed_again(target, options="effects=[GUARDED, Delete]")
        assert cli("reprocess", deletes, "--from", "earliest")[0] == 5


def passed_again(target, *, options, more=""):
    """The same pipeline, declared otherwise."""
    from pathlib import Path

    file = Path(target.removesuffix(":flow"))
    text = file.read_text()
    head, _, _ = text.partition("flow = Pipeline(")
    topic = text.partition("topics=")[2].partition("'")[2].partition("'")[0]
    other = file.with_name(f"app_{abs(hash(options))}.py")
    rest = APP.partition("flow = Pipeline(")[2].format(
        topic=topic, options=f", {options}", before="pass", more=more
    )
    other.write_text(f"{head}flow = Pipeline({rest}")
    return f"{other}:flow"


WRONG = [
    ((), 2),
    (("--from", "latest"), 2),
    (("--from", ""), 2),
    (("--from", "\x1b[31mnow"), 2),
    (("--from", "0:1,"), 2),
    (("--from", "7:0"), 2),
    (("--from", "0:99999999999999999999"), 2),
    (("--from", "0:1000"), 2),
    (("--from", "earliest", "--to", "earliest"), 2),
    (("--from", "earliest", "--to", "0:-1"), 2),
    (("--from", "earliest", "--resume"), 2),
    (("--resume", "--cancel"), 2),
    (("--cancel", "--execute"), 2),
    (("--from", "earliest", "--reason", " "), 2),
    (("--resume",), 4),
    (("--cancel",), 4),
]


def test_what_cannot_be_meant(passed, cli):
    """One sentence and its exit code; nothing that a terminal would obey."""
    target = passed()
    for arguments, code in WRONG:
        found, out, err = cli("reprocess", target, *arguments)
        assert found == code, (arguments, out + err)
        assert "\x1b" not in out + err
        assert "unexpected" not in err


def test_a_pipeline_that_never_ran(app, cli):
    """There is nothing to repeat: exit 4."""
    code, _, err = cli("reprocess", app(), "--from", "earliest", "--json")
    assert code == 4, err


def test_one_that_cannot_begin_keeps_nobody_waiting(passed, cli, database, monkeypatch):
    """The run is given up, and the pipeline's partitions are free."""
    from sideline.engine import running
    from sideline.errors import ConfigurationError

    def refuse(*_arguments, **_options):
        raise ConfigurationError("no Spark today.")

    target = passed()
    monkeypatch.setattr(running.Running, "begin", refuse)
    assert cli("reprocess", target, "--from", "earliest", "--execute")[0] == 2
    assert query(database, "select state from sideline.runs") == [("cancelled",)]
    assert query(database, "select count(*) from sideline.progress where held_for > 0") == [(0,)]


@pytest.fixture
def begun(passed, database):
    """A run that somebody began, and its target."""
    from sideline.engine.lease import Partition
    from sideline.ledger import audit, runs
    from sideline.ledger.runs import Range, Wish

    target = passed()
    spots = [Partition(topic, number) for topic, number in progress(database, "again")]
    with connect(database, role="test") as connection:
        wish = Wish([Range(spot, 0, 1) for spot in spots], guarded=False)
        run = runs.begin(connection, loading.load(target), wish, audit.actor())
    return target, run


def test_who_lets_a_run_go_on_is_in_the_books(begun, cli, read, monkeypatch):
    """Also that it leaves out what fails from here on; who gives it up is warned (S6, C1)."""
    from sideline.engine import running
    from sideline.errors import ConfigurationError
    from sideline.ledger import audit

    def refuse(*_arguments, **_options):
        raise ConfigurationError("no Spark today.")

    target, run = begun
    monkeypatch.setattr(running.Running, "begin", refuse)
    assert cli("reprocess", target, "--resume")[0] == 2
    resumed = cli("reprocess", target, "--resume", "--skip-failures", "--reason", "two are odd")
    assert resumed[0] == 2
    assert "where the last event of its key fails" in resumed[2]
    code, _, err = cli("reprocess", target, "--cancel")
    assert (code, "show an old state" in err) == (0, True)
    changes = read("audit", "again")["changes"][::-1]
    assert [(one["action"], one["reason"], one["subject"]) for one in changes[1:3]] == [
        ("reprocess resumed", None, {"run": run.name, "skip_failures": False}),
        ("reprocess resumed", "two are odd", {"run": run.name, "skip_failures": True}),
    ]
    assert {one["actor"] for one in changes} == {audit.actor()}


def test_a_pipeline_that_waits_for_a_run_says_so(begun, cli, desk):
    """In status, and while it runs; it goes on by itself when the run is over."""
    target, run = begun
    assert f"waits for run {run.name}" in cli("status")[2]
    one = desk(loading.load(target))
    wait_for(lambda: "held" in one.driver.troubles, what="the word")
    assert one.leased == []
    assert cli("reprocess", target, "--cancel")[0] == 0
    wait_for(lambda: one.leased, what="the next round")
    assert "held" not in one.driver.troubles
