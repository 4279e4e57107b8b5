"""What people ask for, carried out by a pipeline that runs: released, given up, put back."""

from __future__ import annotations

import signal

import pytest

from sideline import Pipeline, Upsert
from sideline.accounting import check
from tests.support.pipelines import applied, execute, faults, publish, query, write_app
from tests.support.waiting import wait_for

TABLE = "create table people (id text primary key, names text not null)"
WHY = ("--reason", "mended")


@pytest.fixture
def people(ready, database, kafka, topics):
    """A topic in which eleven keys have a name that fails, with one before and one behind."""
    execute(database, TABLE)
    topic = topics(partitions=2)
    keys = [f"k{number}" for number in range(11)]
    for name in ("good", "bad", "last"):
        publish(kafka, topic, [(key, name) for key in keys])
    publish(kafka, topic, [("fine", "good")])
    return topic


def pipeline(topic: str | tuple[str, ...], *, fails: tuple[str, ...] = ()) -> Pipeline:
    """Appends nothing, keeps the last name; ``fails`` are names or keys that it cannot do."""
    made = Pipeline("people", topics=topic)

    @made.handler
    def handle(event):
        name, key = event.text(), event.key.decode()
        if name in fails or key in fails:
            raise ValueError(f"cannot spell {name}")
        return Upsert("people", {"id": key, "names": name}, key="id")

    return made


def names(database: str) -> dict[str, str]:
    return dict(query(database, "select id, names from people"))


def test_a_ramp_watched_to_its_end(people, start, finish, cli, read, database):
    """R1, R2, R4: 1 key, then 10; the rest of the keys goes on; a second ramp finds nothing."""
    status = finish(pipeline(people, fails=("bad",)))
    assert status["parked"] == 22
    assert set(names(database).values()) == {"good"}
    start(pipeline(people))

    done = read("release", "people", "--all", "--ramp", "--execute", "--watch", *WHY)

    assert [(one["state"], one["applied"], one["failed"]) for one in done["ended"]] == [
        ("done", 2, 0),
        ("done", 20, 0),
    ]
    assert {key: name for key, name in names(database).items() if key != "fine"} == {
        f"k{number}": "last" for number in range(11)
    }
    assert read("release", "people", "--all", "--execute")["operations"] == []
    (books,) = check(database, "people")
    assert books.differences == []
    assert sum(account.parked for account in books.partitions) == 0
    actions = [one["action"] for one in read("audit", "people")["changes"]]
    assert actions == ["ops resume", "release"]


def test_a_ramp_ends_where_something_fails_again(people, start, finish, cli, read, database):
    """R3, R4: the next step stays paused; a head that is given up lets its followers go."""
    finish(pipeline(people, fails=("bad",)))
    start(pipeline(people, fails=("bad",)))

    code, _, err = cli("release", "people", "--all", "--ramp", "--execute", "--watch")

    assert code == 7
    assert "1 failed again" in err
    assert "sideline ops resume 2" in err
    assert [one["state"] for one in read("ops", "list")["operations"]] == ["paused", "done"]
    assert cli("ops", "cancel", "2")[0] == 0
    (failed,) = read("parked", "list", "people", "--limit", "1")["events"]
    assert (failed["generation"], failed["why"]) == (1, "failed")
    done = read("discard", "people", "--event", failed["id"], *WHY, "--execute", "--watch")
    assert done["ended"][0]["discarded"] == 1
    assert cli("parked", "show", failed["id"])[1].count("operation ") == 2
    back = read("restore", "people", "--event", failed["id"], *WHY, "--execute", "--watch")
    assert back["ended"][0]["restored"] == 1
    read("discard", "people", "--event", failed["id"], *WHY, "--execute", "--watch")
    key = failed["key"]["text"]
    done = read("release", "people", "--key", key, "--execute", "--watch")
    assert (done["ended"][0]["applied"], done["ended"][0]["failed"]) == (1, 0)
    assert names(database)[key] == "last"
    code, _, err = cli("restore", "people", "--event", failed["id"], *WHY, "--execute")
    assert (code, "have rejoined" in err) == (5, True)
    (books,) = check(database, "people")
    assert books.differences == []
    assert sum(account.discarded for account in books.partitions) == 1


def test_ctrl_c_ends_the_watching_only(people, finish, command, read, database):
    """Nobody runs the pipeline: the command says so, and after Ctrl-C how to watch again."""
    finish(pipeline(people, fails=("bad",)))
    watching = command("release", "people", "--all", "--execute", "--watch")
    watching.says("Nothing happens until the pipeline runs")
    watching.signal(signal.SIGINT)
    assert watching.end() == 130
    assert "sideline ops show 1 --watch" in watching.err
    assert read("ops", "show", "1")["state"] == "running"
    finish(pipeline(people))
    assert read("ops", "show", "1")["state"] == "done"
    assert set(names(database).values()) == {"good", "last"}


def test_kill_9_of_the_driver_in_the_middle_of_a_release(
    command, ready, database, kafka, topics, finish, read, tmp_path
):
    """The rest of it, and nothing twice, whoever runs next: here --replay-only (C3, R1, R2)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, [(f"k{n % 8}", "bad" if n < 8 else "later") for n in range(32)])
    failing = Pipeline("back", topics=topic)

    @failing.handler
    def fail(event):
        raise ValueError("not yet")

    assert finish(failing)["parked"] == 32
    read("release", "back", "--all", "--execute")
    # Whoever is killed is far from the end by then.
    slow = tmp_path / "slow"
    slow.touch()
    before = f"time.sleep(0.5 * os.path.exists({str(slow)!r}))"
    app = write_app(tmp_path, "back", topic, before=before, options="slice_size=2, fold=False")
    running = command("run", app)
    wait_for(lambda: applied(database), what="the first that came back", within_seconds=120)
    running.signal(signal.SIGKILL)
    running.end()
    assert 0 < len(applied(database)) < 32
    assert read("ops", "show", "1")["state"] == "running"
    # What arrives meanwhile is not read by whoever only replays.
    publish(kafka, topic, [("k9", "new")])
    slow.unlink()

    again = command("run", app, "--replay-only")

    assert again.end(120) == 0, again.err
    effects = applied(database)
    assert faults(sorted(effects, key=lambda one: (one.partition, one.offset)), sent) == []
    for key in {effect.key for effect in effects}:
        offsets = [effect.offset for effect in effects if effect.key == key]
        assert offsets == sorted(offsets), key
    shown = read("ops", "show", "1")
    assert (shown["state"], shown["applied"], shown["failed"]) == ("done", 32, 0)
    (books,) = check(database, "back")
    assert books.differences == []


def test_a_topic_that_is_read_no_more_gives_back_what_waits(
    ready, database, kafka, topics, start, finish, read
):
    """R1, R6: its keys are released and given up all the same; nothing more of it is read."""
    execute(database, TABLE)
    kept, dropped = topics(partitions=1), topics(partitions=1)
    publish(kafka, dropped, [("zoe", "bad"), ("zoe", "last"), ("ann", "bad")])
    assert finish(pipeline((kept, dropped), fails=("bad",)))["parked"] == 3
    publish(kafka, dropped, [("bob", "unread")])
    read("discard", "people", "--key", "ann", *WHY, "--execute")
    read("release", "people", "--key", "zoe", *WHY, "--execute")

    running = start(pipeline(kept), replay_only=True)

    assert running.wait(120), running.status()
    operations = read("ops", "list")["operations"]
    assert [(one["kind"], one["state"]) for one in operations] == [
        ("release", "done"),
        ("discard", "done"),
    ]
    assert names(database) == {"zoe": "last"}
    (books,) = check(database, "people")
    assert books.differences == []
