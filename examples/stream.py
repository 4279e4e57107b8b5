"""A Structured Streaming query that ends in a pipeline: parsed by Spark, applied by sideline.

Needs: create table members (id text primary key, name text, country text);

Run it with: python examples/stream.py HOST:PORT
"""

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from sideline import Event, Pipeline, Upsert

members = Pipeline("members", topics="members")


@members.handler
def member(event: Event):
    # What comes back from the ledger has its bytes, and no row of a query that is long over.
    row = event.row["person"] if event.row else event.json()
    return Upsert(
        "members",
        {"id": event.key.decode(), "name": row["name"], "country": row["country"].upper()},
        key="id",
    )


def parse(events: DataFrame) -> DataFrame:
    """A column beside those of Kafka; nobody needs to hear of those without a name."""
    person = f.from_json(f.col("value").cast("string"), "name string, country string")
    return events.withColumn("person", person).where("person.name is not null")


def start(spark: SparkSession, kafka: str, checkpoint: str):
    events = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", kafka)
        .option("subscribe", ",".join(members.topics))
        .option("startingOffsets", "earliest")
        .load()
    )
    return (
        parse(events)
        .writeStream.foreachBatch(members.foreach_batch)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    from sideline.spark import session

    start(session(), sys.argv[1], "checkpoints/members").awaitTermination()
