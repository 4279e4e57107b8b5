"""Passwords reach the workers, and nothing else."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from psycopg import conninfo

from sideline import Pipeline, Postgres
from sideline.engine.jobs import ship
from tests.support.pipelines import numbered, publish, query, write_app
from tests.support.waiting import wait_for

SASL = "sasl-pa55word-of-nobody"


def holders(folder: Path, secrets: list[str]) -> list[str]:
    """The files below ``folder`` that hold a secret."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            # Spark deletes files while they are looked at.
            with suppress(FileNotFoundError):
                content = (Path(place) / name).read_bytes()
                found += [f"{name} holds {text}" for text in secrets if text.encode() in content]
    return found


def test_a_pipelines_url_is_not_pickled():
    """What Spark ships holds the code, not the database's address."""
    flow = Pipeline("quiet", topics="t", sink=Postgres("postgresql://me:hunter2@db.example/shop"))
    flow.handler(lambda event: None)

    shipped = ship(flow)

    assert b"hunter2" not in shipped
    assert b"db.example" not in shipped
    assert "hunter2" not in repr(flow) + repr(flow.sink) + repr(vars(flow))


def test_secrets_are_nowhere_but_in_the_run_s_own_file(
    command, ready, database, kafka, topics, tmp_path
):
    """Not in closures, broadcasts, logs, errors, --json, the ledger or Spark's event log.

    The run fails in the end, with --debug, so that all words that can be said are said.
    """
    topic = topics(partitions=1)
    publish(kafka, topic, [*numbered(50), ("p", "park"), ("k", "poison")])
    gate, logs, local = tmp_path / "gate", tmp_path / "events", tmp_path / "local"
    logs.mkdir()
    local.mkdir()
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.dir file://{logs}\n"
        "spark.eventLog.compress false\nspark.eventLog.logBlockUpdates.enabled true\n"
    )
    before = f"""import psycopg
    if event.value == b"poison":
        while not os.path.exists({str(gate)!r}):
            time.sleep(0.05)
        raise psycopg.errors.UndefinedColumn("poisoned")
    if event.value == b"park":
        raise ValueError("cannot reach " + os.environ["APP_DB"])"""
    app = write_app(
        tmp_path, "quiet", topic, before=before, options="sink=Postgres(os.environ['APP_DB'])"
    )
    run = command(
        "run",
        app,
        "--once",
        "--debug",
        "--json",
        APP_DB=database,
        SIDELINE_DATABASE="postgresql://nobody:other-pa55word@127.0.0.1:1/nothing",
        SIDELINE_KAFKA__SASL_PASSWORD=SASL,
        SPARK_CONF_DIR=str(conf),
        SPARK_LOCAL_DIRS=str(local),
    )
    password = conninfo.conninfo_to_dict(database)["password"]
    secrets = [password, SASL, "other-pa55word"]

    def handling() -> bool:
        return bool(
            query(database, "select to_regclass('sideline.workers') is not null")[0][0]
            and query(database, "select from sideline.workers")
        )

    wait_for(handling, what="a worker", within_seconds=120)
    # What is on disk while it runs: broadcasts, shuffles, the run's own file.
    assert any(local.rglob("*")), "Spark's own files are not where they were looked for"
    assert holders(local, secrets) == []
    own = list((run.directory / "tmp").glob("sideline-run-*/access.json"))
    assert [file.stat().st_mode & 0o777 for file in own] == [0o600]
    assert password in own[0].read_text()
    for argument in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown = argument.read_bytes()
        except OSError:
            continue
        assert not any(secret.encode() in shown for secret in secrets), shown
    gate.touch()

    assert run.end(120) == 7, run.err
    assert run.json()["error"] == "event-failed"
    assert "poisoned" in run.err
    assert not [text for text in secrets if text in run.out + run.err]
    assert any(logs.rglob("*")), "Spark wrote no event log"
    assert holders(logs, secrets) == []
    assert not own[0].exists()
    assert query(database, "select starts_with(message, 'cannot reach') from sideline.events") == [
        (True,)
    ]
    for table in ("pipelines", "progress", "workers", "events", "causes", "alerts"):
        rows = str(query(database, f"select row_to_json(t)::text from sideline.{table} as t"))
        assert not [text for text in secrets if text in rows]


def test_a_database_that_refuses_us_is_named_without_the_password(command, kafka, topics, tmp_path):
    """The address is in the error, the password is not (exit 6)."""
    app = write_app(tmp_path, "quiet", topics(partitions=1))
    url = "postgresql://somebody:hunter2@127.0.0.1:1/shop?password=hunter3"

    run = command("run", app, "--debug", SIDELINE_DATABASE=url)

    assert run.end() == 6
    assert "127.0.0.1:1/shop" in run.err
    assert "hunter" not in run.err + run.out
