"""The one place that builds a Spark session, or checks a user's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sideline.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

# What a session of ours is made with, each with its reason.
SETTINGS = {
    # Two sets of slots: the next round warms up while the last one still works.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Saves 40 ms a task against TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # Workers are forked with our modules loaded.
    "spark.python.daemon.module": "sideline.engine.daemon",
    # Connections and consumers are kept by the worker process.
    "spark.python.worker.reuse": "true",
    # A handler that kills its worker leaves a traceback.
    "spark.python.worker.faulthandler.enabled": "true",
    # A copy of a running task would fight it for its partitions.
    "spark.speculation": "false",
    "spark.driver.memory": "512m",
    # A task that lost its lease is not worth repeating: the next round does it.
    "spark.task.maxFailures": "1",
}
# On this machine alone nobody else needs to reach the driver; a cluster's executors do.
LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
# What must not be otherwise in a session of the user's own, and why.
NEEDED = {
    "spark.python.worker.reuse": ("true", "true", "workers keep their connections"),
    "spark.speculation": ("false", "false", "a second copy of a task would fight the first"),
}

CONNECTOR = "org.apache.spark.sql.kafka010.KafkaSourceProvider"


def build(
    slots: int,
    *,
    master: str | None = None,
    name: str = "sideline",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with room for two rounds at once; ``settings`` stand above ours."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - slow to import

    from sideline.stack.java import spark_home  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    local = master is None or master.startswith("local")
    if local:
        os.environ["JAVA_HOME"] = str(spark_home())
    builder = SparkSession.Builder().master(master or f"local[{2 * slots}]").appName(name)
    for setting, value in _settings(settings or {}, local=local).items():
        builder = builder.config(setting, value)
    return builder.getOrCreate()


def active() -> SparkSession | None:
    """The session that this process has already, if it has one."""
    from pyspark import SparkContext  # noqa: PLC0415 - slow to import
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if SparkContext._active_spark_context is None:  # noqa: SLF001 - it has no public name
        return None
    return SparkSession.Builder().getOrCreate()


def is_connect(spark: object) -> bool:
    """Whether it is a Connect session: a client that has no JVM of its own, and no RDDs."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__)


def refuse_connect(spark: object | None = None) -> None:
    """Nothing but DataFrames comes through a Connect session: said before anything is done."""
    from pyspark.sql.utils import is_remote  # noqa: PLC0415 - slow to import

    if is_connect(spark) or (spark is None and is_remote()):
        message = (
            "this is a Spark Connect session, which can read sideline's DataFrames and nothing "
            "else: pipelines run tasks of their own, for which Connect has no door."
        )
        raise ConfigurationError(
            message, hint="Use a classic session, in a process of its own: sideline.spark.session()"
        )


def has_connector(spark: SparkSession) -> bool:
    """Whether Spark's Kafka connector is among its jars."""
    jvm: Any = spark._jvm  # noqa: SLF001 - the class loader has no public name
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return loader.getResource(CONNECTOR.replace(".", "/") + ".class") is not None


@contextmanager
def hushed(spark: SparkSession) -> Iterator[None]:
    """Jobs that are expected to fail say nothing on the terminal; only in sessions of ours."""
    context = spark.sparkContext
    options = context.getConf().get("spark.driver.extraJavaOptions") or ""
    if _java_options() not in options:
        yield
        return
    context.setLogLevel("OFF")
    try:
        yield
    finally:
        # As log4j2.properties has it.
        context.setLogLevel("ERROR")


def check(spark: SparkSession) -> None:
    """Refuse a session that breaks a promise, with everything that is wrong at once."""
    wrong = problems(spark)
    if wrong:
        message = f"the Spark session has {'; '.join(wrong)}."
        raise ConfigurationError(message, hint="Set this when the session is built.")


def problems(spark: SparkSession) -> list[str]:
    """What a session has that breaks a promise, each as the end of a sentence."""
    conf = spark.sparkContext.getConf()
    wrong = [
        f"{setting}={conf.get(setting, default)} (needs {wanted}: {why})"
        for setting, (wanted, default, why) in NEEDED.items()
        if (conf.get(setting, default) or "").lower() != wanted
    ]
    return wrong + _python_problems(spark.sparkContext)


def _python_problems(context: SparkContext) -> list[str]:
    """Whether the workers of a session on this machine run a Python that has what they need."""
    python = shutil.which(context.pythonExec)
    elsewhere = not (context.master or "").startswith("local")
    if elsewhere or python is None or Path(python).parent == Path(sys.executable).parent:
        return []
    probe = "import confluent_kafka, orjson, psycopg, sideline"
    if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0:  # noqa: S603
        return []
    return [f"workers that run {python} without sideline (set PYSPARK_PYTHON={sys.executable})"]


def _settings(given: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Ours, below what was given; Java's options beside those that were given."""
    options = "spark.driver.extraJavaOptions"
    joined = " ".join(filter(None, (_java_options(), given.get(options))))
    return {**SETTINGS, **(LOCAL_SETTINGS if local else {}), **given, options: joined}


def _java_options() -> str:
    log4j = resources.files("sideline.engine").joinpath("log4j2.properties")
    return f"-Dlog4j2.configurationFile={log4j} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
