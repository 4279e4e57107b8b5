"""What the Structured Streaming contestants share: session, source, end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psycopg import conninfo
from pyspark.sql import DataFrame, SparkSession

from bench import jars
from bench.peers import Task, report
from bench.peers.batches import BATCH_EVENTS

VALUE = "id string, name string, email string, seq long"


def session(task: Task) -> SparkSession:
    """A local session with as many slots as every contestant has workers."""
    return (
        SparkSession.builder.master(f"local[{task.slots}]")
        .appName("bench")
        .config("spark.jars", ",".join(map(str, jars.fetch(lambda *_: None))))
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", task.workdir)
        .config("spark.sql.warehouse.dir", str(Path(task.workdir, "warehouse")))
        .config("spark.sql.shuffle.partitions", str(task.slots))
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "25000")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .getOrCreate()
    )


def source(spark: SparkSession, task: Task) -> DataFrame:
    """The topic from its beginning, key and value as bytes."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", task.bootstrap)
        .option("subscribe", task.topic)
        .option("startingOffsets", "earliest")
        .option("kafka.max.poll.records", 10_000)
        .option("kafka.max.partition.fetch.bytes", 4_000_000)
        .option("maxOffsetsPerTrigger", task.options.get("batch_events", BATCH_EVENTS))
        .load()
    )


def run(task: Task, batches: DataFrame, apply: Callable[[DataFrame], int]) -> None:
    """Apply batch after batch and report each; end at the topic's end, or on SIGTERM."""

    def one(batch: DataFrame, _number: int) -> None:
        report(apply(batch))

    writer = batches.writeStream.foreachBatch(one).option(
        "checkpointLocation", str(Path(task.workdir, "checkpoint"))
    )
    if task.events is not None:
        writer = writer.trigger(availableNow=True)
    query = writer.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    query.awaitTermination()


def jdbc(database: str) -> tuple[str, dict[str, str]]:
    """URL and properties of a libpq address for JDBC, which speaks TCP only."""
    parts: dict[str, Any] = conninfo.conninfo_to_dict(database)
    properties = {"user": str(parts.get("user", "postgres")), "driver": "org.postgresql.Driver"}
    if password := parts.get("password"):
        properties["password"] = str(password)
    return f"jdbc:postgresql://{parts['host']}:{parts['port']}/{parts['dbname']}", properties
