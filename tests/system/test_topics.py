"""`sideline topics` on a real broker."""

from __future__ import annotations

import json
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from sideline.cli import main
from sideline.ledger import schema
from tests.support.pipelines import execute

APP = """
from sideline import DeadLetter, Insert, Pipeline, RetryTopics, TopicNames

flow = Pipeline({name!r}, topics={topic!r}, independent=True, {options})
flow.on_failure = {policy}
plain = Pipeline({name!r}, topics={topic!r})
"""


@pytest.fixture
def app(tmp_path, topics, kafka):
    """Write an app of one pipeline; its topics are deleted afterwards."""
    made = []

    def write(policy="RetryTopics(delays=('1s', '1m'))", options="", partitions=3):
        topic = topics(partitions=partitions)
        name = f"g{uuid4().hex[:8]}"
        file = tmp_path / f"app_{name}.py"
        file.write_text(APP.format(name=name, topic=topic, policy=policy, options=options))
        made.append(f"{topic}.{name}.")
        return f"{file}:flow", f"{topic}.{name}"

    yield write
    admin = AdminClient({"bootstrap.servers": kafka})
    names = [name for name in admin.list_topics(timeout=30).topics if name.startswith(tuple(made))]
    for future in admin.delete_topics(names).values() if names else ():
        future.result()


@pytest.fixture
def sideline(kafka, capsys):
    """Run the command against the broker; returns exit code and JSON."""

    def call(*arguments, words=False):
        form = [] if words else ["--json"]
        code = main.run(["topics", *arguments, "--kafka", kafka, *form])
        captured = capsys.readouterr()
        return code, captured.err if words else json.loads(captured.out)

    return call


def test_resend_says_what_it_found(app, kafka, database, ready, capsys):
    """Of a pipeline that never ran, or with nothing lost: a sentence, and its exit code (F8)."""
    target, stem = app()
    given = ["topics", "resend", target, "--kafka", kafka, "--database", database]
    assert main.run(given) == 4
    assert "has run" in capsys.readouterr().err
    name = stem.rpartition(".")[2]
    with psycopg.connect(database) as connection:
        schema.migrate(connection)
    execute(database, f"insert into sideline.pipelines (name) values ('{name}')")
    assert main.run([*given, "--execute", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["lost"], found["sent"], found["dead"], found["missing"]) == (0, 0, 0, [])
    assert main.run(given) == 0
    assert "No event" in capsys.readouterr().err


def test_plan_create_check(app, sideline):
    """Missing topics are planned, found missing, created, and then found right (P3, F8, F11)."""
    target, stem = app()
    code, planned = sideline("plan", target)
    names = [f"{stem}.retry.1", f"{stem}.retry.2", f"{stem}.dlq"]
    assert (code, [topic["topic"] for topic in planned["topics"]]) == (0, names)
    assert not any(topic["exists"] for topic in planned["topics"])
    assert all(one["why"] for topic in planned["topics"] for one in topic["settings"])
    code, checked = sideline("check", target)
    assert (code, checked["ok"]) == (3, False)
    code, made = sideline("create", target)
    assert (code, made["created"], made["left"]) == (0, names, [])
    code, checked = sideline("check", target)
    assert (code, checked["ok"]) == (0, True), checked
    code, made = sideline("create", target)
    assert (code, made["created"], made["altered"]) == (0, [], [])
    code, words = sideline("check", target, words=True)
    assert "All 3 topics" in words


def test_what_exists_is_altered_only_when_asked(app, sideline, create_topic):
    """`create` leaves a topic that differs alone, `--alter` mends what can be mended (P3)."""
    target, stem = app("DeadLetter()")
    create_topic(NewTopic(f"{stem}.dlq", 1, 1, config={"cleanup.policy": "delete"}))
    code, made = sideline("create", target)
    assert (code, made["created"], made["altered"]) == (0, [], [])
    left = {one["name"]: (one["is"], one["alterable"]) for one in made["left"]}
    assert left["cleanup.policy"] == ("delete", True)
    assert left["partitions"] == ("1", False)
    code, words = sideline("check", target, words=True)
    assert code == 3
    assert "cleanup.policy is delete, should be compact" in words
    code, made = sideline("create", target, "--alter")
    assert (code, made["altered"]) == (0, [f"{stem}.dlq"])
    assert [one["name"] for one in made["left"]] == ["partitions"]
    code, checked = sideline("check", target)
    assert code == 3
    assert [one["name"] for one in checked["topics"][0]["differences"]] == ["partitions"]


def test_partitions_of_retry_topics_grow_with_alter(app, sideline, create_topic):
    """A retry topic with fewer partitions than its source gets the rest."""
    target, stem = app("RetryTopics(delays=('1s',))")
    create_topic(NewTopic(f"{stem}.retry.1", 1, 1))
    code, made = sideline("create", target, "--alter")
    assert code == 0, made
    assert (made["altered"], made["created"]) == ([f"{stem}.retry.1"], [f"{stem}.dlq"])
    assert sideline("check", target)[0] == 0


def test_a_pipeline_that_needs_no_topics(app, sideline):
    """With everything in the ledger there is nothing to create."""
    target, _ = app()
    plain = target.replace(":flow", ":plain")
    assert sideline("check", plain)[1]["topics"] == []
    assert "needs no topics" in sideline("create", plain, words=True)[1]


def test_a_source_that_is_missing(tmp_path, sideline):
    """Without its source nobody knows how many partitions (exit 4)."""
    file = tmp_path / "missing.py"
    file.write_text(APP.format(name="g", topic="not-there", policy="DeadLetter()", options=""))
    code, told = sideline("plan", f"{file}:flow")
    assert (code, told["error"]) == (4, "not-found")
