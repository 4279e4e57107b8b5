"""Pipelines in a program of the user's own, with the user's own SparkSession."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.pipelines import applied, faults, numbered, publish

# As somebody would write it: handlers in the notebook itself, prices in a module beside it.
NOTEBOOK = """
import json
import os
import sys
import time

from pyspark.sql import SparkSession

import shop
from sideline import Insert, Pipeline
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
bad.stop()

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = session(spark_speculation="false", spark_python_worker_reuse="true")
running = flow.start(spark)
until = time.monotonic() + 90
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
    (folder / "notebook.py").write_text(NOTEBOOK)
    (folder / "shop.py").write_text(SHOP)
    services = {"SIDELINE_KAFKA": kafka, "SIDELINE_DATABASE": database, "TMPDIR": str(tmp_path)}
    # A Python without sideline, as Spark would find it on the path of a user's machine.
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python3").write_text("#!/bin/sh\nexit 1\n")
    (bare / "python3").chmod(0o755)
    services["PATH"] = f"{bare}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: text for name, text in os.environ.items() if name != "PYSPARK_PYTHON"}

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
    assert said["status"]["alive"]
    assert said["status"]["applied"] == 200
    assert len(said["status"]["partitions"]) == 3
    assert (said["finished early"], said["finished"], said["alive"]) == (False, True, False)
    assert said["mine"] == 1000
    effects = applied(database)
    assert faults(effects, sent) == []
    assert all(effect.value.startswith("item v") for effect in effects)
    assert not list(tmp_path.glob("sideline-run-*"))
