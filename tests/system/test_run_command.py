"""`sideline run` as a process: what it prints, its exit codes, and bad input."""

from __future__ import annotations

import socket
from contextlib import closing
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql

from tests.support.pipelines import applied, faults, numbered, publish, query, write_app
from tests.support.waiting import wait_for

SIBLING = """
import os
from pathlib import Path

from greetings import greet
from sideline import Event, Insert, Pipeline

flow = Pipeline("whole", topics=os.environ["TOPIC"])
notes = Path(os.environ["NOTES"])


@flow.setup
def open_shop():
    (notes / f"setup-{os.getpid()}").touch()
    return {"open": True}


@flow.teardown
def close_shop(context):
    (notes / f"teardown-{os.getpid()}").write_text(str(context["open"]))


@flow.handler
def record(event: Event):
    assert event.context["open"]
    row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
    return Insert("applied", row | {"value": greet(event.text())})
"""


def untouched(database: str) -> bool:
    """Whether nothing of ours is in the database."""
    return query(database, "select from pg_namespace where nspname = 'sideline'") == []


def test_a_run_from_start_to_end(command, ready, database, kafka, topics, tmp_path):
    """--once --json: exit 0, JSON on stdout, words on stderr, nothing left behind (E1).

    The pipeline's file imports a module beside it; every setup of a worker has its teardown.
    """
    topic = topics(partitions=4)
    sent = publish(kafka, topic, numbered(400))
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "my-app.py").write_text(SIBLING)
    (tmp_path / "greetings.py").write_text("def greet(name):\n    return 'hello ' + name\n")

    run = command(
        "run", f"{tmp_path}/my-app.py:flow", "--once", "--json", TOPIC=topic, NOTES=str(notes)
    )

    assert run.end(120) == 0, run.err
    status = run.json()
    assert (status["consumed"], status["applied"], status["lag"]) == (400, 400, 0)
    assert "whole" in run.err
    assert "WARN" not in run.err
    effects = applied(database)
    assert faults(effects, sent) == []
    assert all(effect.value.startswith("hello v") for effect in effects)
    begun = {file.name.removeprefix("setup-") for file in notes.glob("setup-*")}
    assert begun

    def all_ended() -> bool:
        return {file.name.removeprefix("teardown-") for file in notes.glob("teardown-*")} == begun

    wait_for(all_ended, what="every teardown")
    assert {file.read_text() for file in notes.glob("teardown-*")} == {"True"}
    assert not list((run.directory / "tmp").glob("sideline-run-*"))


@pytest.mark.parametrize(
    ("target", "exit_code", "words"),
    [
        ("users", 2, "'users' does not name a pipeline"),
        (":users", 2, "':users' does not name a pipeline"),
        ("app.py:", 2, "'app.py:' does not name a pipeline"),
        ("missing.py:users", 4, "there is no file 'missing.py'"),
        ("no_such_module:users", 4, "there is no module 'no_such_module'"),
        ("json:users", 4, "'users' does not exist there"),
        ("json:loads", 4, "'loads' is not a pipeline"),
        ("..:users", 2, "'..' is not a module's name"),
    ],
)
def test_what_is_not_a_pipeline_is_said_in_one_sentence(
    command, database, target, exit_code, words
):
    """A wrong app:name: the documented exit code, the way to write it, the world unchanged."""
    run = command("run", target)

    assert run.end() == exit_code, run.err
    assert words in run.err
    assert "Traceback" not in run.err
    assert untouched(database)


def test_an_import_error_shows_the_user_s_own_traceback(command, database, tmp_path):
    """From the user's first line on; how sideline got there is nobody's concern."""
    (tmp_path / "prices.py").write_text("def load():\n    return {}['coffee']\n")
    (tmp_path / "shop.py").write_text("import prices\n\nprices.load()\n")

    run = command("run", f"{tmp_path}/shop.py:users")

    assert run.end() == 2
    assert "shop.py cannot be imported: KeyError: 'coffee'" in run.err
    assert f'File "{tmp_path}/shop.py", line 3' in run.err
    assert f'File "{tmp_path}/prices.py", line 2' in run.err
    assert "loading.py" not in run.err
    assert "importlib" not in run.err
    assert untouched(database)


def test_a_pipeline_without_a_handler(command, database, topics, tmp_path):
    """It is refused before anything is touched (exit 2)."""
    source = f"from sideline import Pipeline\nflow = Pipeline('empty', topics={topics()!r})\n"
    (tmp_path / "app.py").write_text(source)

    run = command("run", f"{tmp_path}/app.py:flow")

    assert run.end() == 2
    assert "pipeline 'empty' has no handler" in run.err
    assert untouched(database)


def test_what_cannot_travel_to_the_workers_is_named(command, ready, topics, tmp_path):
    """A lock or a connection in the handler's reach: say so, with the way out (exit 2)."""
    app = write_app(tmp_path, "stuck", topics(partitions=1), before="lock.acquire()")
    source = (tmp_path / "app.py").read_text()
    (tmp_path / "app.py").write_text(f"import threading\nlock = threading.Lock()\n{source}")

    run = command("run", app, "--once")

    assert run.end(120) == 2, run.err
    assert "cannot be sent to Spark's workers" in run.err
    assert "setup" in run.err
    assert not list((run.directory / "tmp").glob("sideline-run-*"))


def test_an_unknown_topic(command, database, tmp_path):
    """Named, exit 4, before Spark is started and before the database is changed."""
    run = command("run", write_app(tmp_path, "lost", "no-such-topic"))

    assert run.end() == 4
    assert "topic 'no-such-topic' does not exist at 127.0.0.1:" in run.err
    assert untouched(database)


def test_an_unreachable_broker(command, database, tmp_path):
    """Named after a bounded wait, exit 6."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = command("run", write_app(tmp_path, "dark", "any"), SIDELINE_KAFKA=address)

        assert run.end(60) == 6
    assert f"Kafka at {address} does not answer" in run.err
    assert untouched(database)


def test_an_unreachable_database(command, topics, tmp_path):
    """Named after a bounded wait, exit 6."""
    app = write_app(tmp_path, "dark", topics(partitions=1))

    run = command("run", app, SIDELINE_DATABASE="postgresql://me@127.0.0.1:1/shop")

    assert run.end(60) == 6
    assert "PostgreSQL at 127.0.0.1:1/shop cannot be used" in run.err
    assert "sideline stack up" in run.err


@pytest.fixture
def worker_role(database):
    """The URL of a role that may connect and nothing else."""
    name, password = f"role_{uuid4().hex}", uuid4().hex
    with psycopg.connect(database, autocommit=True) as admin:
        create = sql.SQL("create role {} login password {}")
        admin.execute(create.format(sql.Identifier(name), sql.Literal(password)))
    parts = conninfo.conninfo_to_dict(database)
    yield f"postgresql://{name}:{password}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def test_what_the_deployment_broke_stops_the_run(command, ready, database, kafka, topics, tmp_path):
    """A table that is not there (SQLSTATE 42) parks nothing: exit 7, and what came before stays.

    Whatever the handler logs bears the id of the event in its hand (F1, S3).
    """
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    before = """import logging
    from sideline import Execute
    logging.getLogger("shop").warning("looks at it")
    if event.offset == 6:
        return Execute("insert into nowhere values (1)")"""
    app = write_app(tmp_path, "broken", topic, before=before, options="slice_size=3")

    run = command("run", app, "--once")

    assert run.end(120) == 7, run.err
    assert 'relation "nowhere" does not exist' in run.err
    assert "Traceback" not in run.err
    assert query(database, "select count(*) from sideline.events") == [(0,)]
    assert [effect.offset for effect in applied(database)] == list(range(6))
    for offset in range(6):
        assert f"WARNING shop {topic}/0/{offset} looks at it" in run.err


def test_a_role_that_may_not_make_tables(command, database, topics, worker_role, tmp_path):
    """Refused with the two ways out, exit 5; nothing is half made."""
    app = write_app(tmp_path, "humble", topics(partitions=1))

    run = command("run", app, "--once", SIDELINE_DATABASE=worker_role)

    assert run.end(120) == 5, run.err
    assert "this role may not make them" in run.err
    assert "sideline migrate --sql" in run.err
    assert untouched(database)


def test_a_role_that_may_not_see_the_ledger(command, database, topics, worker_role, tmp_path):
    """The tables are there, the rights are not: refused in one sentence, exit 5."""
    topic = topics(partitions=1)
    migrated = command("migrate")
    assert migrated.end() == 0, migrated.err

    run = command("run", write_app(tmp_path, "humble", topic), SIDELINE_DATABASE=worker_role)

    assert run.end(120) == 5, run.err
    assert "sideline" in run.err
    assert "Traceback" not in run.err


def test_a_worker_role_without_ddl_suffices(
    command, ready, database, kafka, topics, worker_role, tmp_path
):
    """A DBA ran the script of `sideline migrate --sql`; the role may only read and write.

    The last event fails and is parked, and the command says where to read about it.
    """
    topic = topics(partitions=1)
    sent = publish(kafka, topic, numbered(50))
    publish(kafka, topic, [("b", "poison")])
    user = conninfo.conninfo_to_dict(worker_role)["user"]
    script = command("migrate", "--sql", "--grant-to", user)
    assert script.end() == 0, script.err
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(script.out)
        for grant in (
            "grant insert on applied to {}",
            "grant usage on sequence applied_seq_seq to {}",
        ):
            admin.execute(sql.SQL(grant).format(sql.Identifier(user)))
    before = """if event.value == b"poison":
        raise LookupError("no such thing")"""
    app = write_app(tmp_path, "humble", topic, before=before)

    run = command("run", app, "--once", SIDELINE_DATABASE=worker_role)

    assert run.end(120) == 0, run.err
    assert "51 events consumed, 50 applied, 1 parked" in run.err
    assert "sideline parked causes humble" in run.err
    assert "Traceback" not in run.err
    causes = command("parked", "causes", "humble", SIDELINE_DATABASE=worker_role)
    assert causes.end() == 0, causes.err
    assert "no such thing" in causes.out
    assert faults(applied(database), sent) == []
