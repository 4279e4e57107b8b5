"""Pipelines in a program of the user's own, with the user's own SparkSession."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import conninfo

from sideline.engine import session
from sideline.stack.java import spark_home
from tests.support.ledger_rows import Failed
from tests.support.pipelines import applied, faults, numbered, publish

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parked.ipynb"

# As somebody would write it: handlers in the notebook itself, prices in a module beside it.
PROGRAM = """
import json
import os
import sys
import time

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import shop
from sideline import Insert, Pipeline
from sideline.spark import session as ready_session
from sideline.errors import SidelineError

topic = sys.argv[1]
flow = Pipeline("notebook", topics=topic)


@flow.handler
def record(event):
    row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
    return Insert("applied", row | {"value": shop.label(event)})


def session(**settings):
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for name, value in settings.items():
        builder = builder.config(name.replace("_", "."), value)
    return builder.getOrCreate()


said = {}
bad = session(spark_speculation="true", spark_python_worker_reuse="false")
try:
    flow.start(bad)
except SidelineError as error:
    said["refused"] = error.as_dict() | {"exit": error.exit_code}
try:
    ready_session(master="local[9]", settings={"spark.executor.memory": "3g"})
except SidelineError as error:
    said["not ready"] = error.message
source = bad.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
query = source.writeStream.foreachBatch(flow.foreach_batch).trigger(availableNow=True).start()
try:
    query.awaitTermination(120)
except StreamingQueryException as error:
    said["query"] = str(error)
bad.stop()
try:
    ready_session(connector="cluster")
except SidelineError as error:
    said["no connector"] = error.message

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = session(spark_speculation="false", spark_python_worker_reuse="true")
running = flow.start(spark)
until = time.monotonic() + 150
while running.status()["applied"] < 200 and time.monotonic() < until:
    time.sleep(0.1)
said["status"] = running.status()
said["finished early"] = running.wait(0.01)
running.stop()
said["finished"] = running.wait(60)
said["alive"] = running.is_alive
said["mine"] = spark.range(1000).count()
print(json.dumps(said))
"""

SHOP = """
def label(event):
    return "item " + event.text()
"""


def test_a_notebook_with_a_session_of_its_own(ready, database, kafka, topics, tmp_path):
    """start(spark), status(), stop(), wait(); a session that breaks a promise is refused (E1).

    The session has no spare slots, so rounds come without hand-over; it stays the user's own.
    """
    topic = topics(partitions=3)
    sent = publish(kafka, topic, numbered(200))
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "notebook.py").write_text(PROGRAM)
    (folder / "shop.py").write_text(SHOP)
    services = {"SIDELINE_KAFKA": kafka, "SIDELINE_DATABASE": database, "TMPDIR": str(tmp_path)}
    # A Python without sideline, as Spark would find it on the path of a user's machine.
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python3").write_text("#!/bin/sh\nexit 1\n")
    (bare / "python3").chmod(0o755)
    services["PATH"] = f"{bare}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: text for name, text in os.environ.items() if name != "PYSPARK_PYTHON"}
    # Another module of the name; the driver finds the one beside its program, and so must workers.
    (bare / "shop.py").write_text("label = None\n")
    services["PYTHONPATH"] = str(bare)

    ended = subprocess.run(
        [sys.executable, str(folder / "notebook.py"), topic],
        cwd=tmp_path,
        env=inherited | services,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    refused = said["refused"]
    assert refused["exit"] == 2
    assert "spark.speculation=true (needs false" in refused["message"]
    assert "spark.python.worker.reuse=false (needs true" in refused["message"]
    assert f"workers that run {bare}/python3 without sideline" in refused["message"]
    for lack in (
        "spark.speculation=true",
        "spark.python.worker.reuse=false",
        "spark.master=local[2] (asked for: local[9])",
        "spark.executor.memory=unset (asked for: 3g)",
        "no Kafka connector",
    ):
        assert lack in said["not ready"]
    assert "spark.speculation=true (needs false" in said["query"]
    assert said["no connector"].startswith("Spark has no Kafka connector here")
    assert said["status"]["alive"]
    assert said["status"]["applied"] == 200, said["status"]
    assert len(said["status"]["partitions"]) == 3
    assert (said["finished early"], said["finished"], said["alive"]) == (False, True, False)
    assert said["mine"] == 1000
    effects = applied(database)
    assert faults(effects, sent) == []
    assert all(effect.value.startswith("item v") for effect in effects)
    assert not list(tmp_path.glob("sideline-run-*"))


# What a notebook does with its cells: run them in one namespace, show what the last line is.
CELLS = """
import ast
import json
import sys

from sideline.errors import SidelineError

space = {}
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
for cell in cells[:-1]:
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        if hasattr(shown, "_repr_html_"):
            print(shown._repr_html_())
spark = space["spark"]
assert space["ledger"].session() is spark
exec("".join(cells[-1]["source"]), space)
"""


def test_the_example_notebook_runs(rows, database, kafka, topics, tmp_path):
    """Causes, a plot, payloads, the topic itself and the accounts, in one session (E1, S1).

    Nothing of what Spark writes down holds the password, and nothing stays behind.
    """
    topic = topics(partitions=2)
    publish(kafka, topic, [("zoey", "a"), ("zoey", "b"), ("bob", "c"), ("eve", "d")])
    rows.park(b"zoey", (topic, 0, 3), Failed(), value='{"name": "Zo\u00eb"}'.encode())
    rows.park(b"zoey", (topic, 0, 4))
    rows.park(b"bob", (topic, 1, 5), Failed("KeyError", "<name>"), value=b"\xff")
    rows.commit()
    logs = tmp_path / "events"
    logs.mkdir()
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.dir file://{logs}\n"
        "spark.eventLog.compress false\n"
    )
    (tmp_path / "cells.py").write_text(CELLS)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    services = {"SIDELINE_KAFKA": kafka, "SIDELINE_DATABASE": database}

    ended = subprocess.run(
        [sys.executable, str(tmp_path / "cells.py"), str(EXAMPLE)],
        cwd=tmp_path,
        env=os.environ | services | {"TMPDIR": str(temporary), "SPARK_CONF_DIR": str(conf)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "|ValueError|cannot spell this| 1| 1|" in lines
    assert "| KeyError| <name>| 1| 1|" in lines
    assert "2026-01-31 12:00 failed</text>" in ended.stdout
    assert ended.stdout.count("<rect ") == 2
    assert any("| zoey| Zo\u00eb|ValueError|" in line for line in lines), ended.stdout
    assert "| 4| 3|" in lines
    password = conninfo.conninfo_to_dict(database)["password"]
    written = [file for file in logs.rglob("*") if file.is_file()]
    assert written
    assert not [file for file in written if password.encode() in file.read_bytes()]
    assert password not in ended.stdout + ended.stderr
    assert not list(temporary.glob("sideline-run-*"))


# A server of its own, as a team would have one: at a port that nobody else has.
SERVER = """
import sys

from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]")
for name, value in {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
service = getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
print(getattr(service, "MODULE$").localPort(), flush=True)
sys.stdin.read()
spark.stop()
"""

CONNECT = """
import faulthandler
import json
import sys

# A client tries for ten minutes to reach a server that has gone: say where it waits instead.
faulthandler.dump_traceback_later(150, exit=True)

from pyspark.sql import SparkSession

from sideline import Pipeline, Postgres
from sideline import spark as ledger
from sideline.errors import SidelineError

spark = SparkSession.builder.remote(f"sc://127.0.0.1:{sys.argv[1]}").getOrCreate()
said = {"type": type(spark).__module__}
found = ledger.parked(spark, "login", decode="text").orderBy("offset").collect()
said["parked"] = [[row.offset, row.value_text] for row in found]
said["history"] = ledger.history(spark, "login", payload=False).count()
said["progress"] = [row.parked for row in ledger.progress(spark, "login").collect()]
flow = Pipeline("login", topics="users", sink=Postgres("postgresql://db.example/shop"))
flow.handler(lambda event: None)
for name, call in {
    "unknown": lambda: ledger.parked(spark, "logni"),
    "elsewhere": lambda: ledger.parked(spark, flow),
    "start": lambda: flow.start(spark),
    "start alone": lambda: flow.start(),
    "session": lambda: ledger.session(),
    "foreach_batch": lambda: flow.foreach_batch(spark.range(1), 0),
}.items():
    try:
        call()
    except SidelineError as error:
        said[name] = [error.code, error.message]
spark.stop()
print(json.dumps(said))
"""


@pytest.fixture
def connect_server(database, kafka, tmp_path) -> Iterator[tuple[int, dict[str, str]]]:
    """The port of a Connect server, and the environment that it and its clients have."""
    services = {"SIDELINE_KAFKA": kafka, "SIDELINE_DATABASE": database}
    more = {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(spark_home())}
    # As a server of a few tasks would be set up; Spark's defaults are for many.
    quick = session.SETTINGS | session.LOCAL_SETTINGS | {"spark.sql.shuffle.partitions": "1"}
    quick["spark.driver.extraJavaOptions"] = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    lines = [f"{name} {value}\n" for name, value in quick.items()]
    (tmp_path / "spark-defaults.conf").write_text("".join(lines))
    more |= {"SPARK_CONF_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    env = os.environ | services | more
    (tmp_path / "server.py").write_text(SERVER)
    log = tmp_path / "server.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(tmp_path / "server.py")],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            # Spark's launcher may say something first.
            port = next((line for line in server.stdout if line.strip().isdigit()), None)
            assert port is not None, log.read_text()
            yield int(port), env
        finally:
            server.stdin.close()
            # Shown where the test fails.
            sys.stderr.write(log.read_text())


def test_a_connect_session_reads_dataframes_and_nothing_else(rows, connect_server, tmp_path):
    """The ledger is read by the server's own tasks; pipelines are refused in a sentence (E1)."""
    rows.park(b"k", ("users", 0, 2**62), Failed(), value=b"hello")
    rows.park(b"k", ("users", 0, 2**62 + 1))
    rows.commit()
    (tmp_path / "client.py").write_text(CONNECT)
    port, env = connect_server

    ended = subprocess.run(
        [sys.executable, str(tmp_path / "client.py"), str(port)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["type"] == "pyspark.sql.connect.session"
    assert said["parked"] == [[2**62, "hello"], [2**62 + 1, "{}"]]
    assert (said["history"], said["progress"]) == (2, [2])
    assert said["unknown"] == ["not-found", "no pipeline 'logni' has run with this database."]
    assert said["elsewhere"][0] == "configuration"
    assert "settings of its server" in said["elsewhere"][1]
    for door in ("start", "start alone", "session"):
        assert said[door][0] == "configuration"
        assert "this is a Spark Connect session" in said[door][1]
    assert said["foreach_batch"][0] == "refused"
    assert "this is a Spark Connect session" in said["foreach_batch"][1]
